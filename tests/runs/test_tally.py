"""Tests what a run remembers of its epochs for its summary."""

import pytest

from elastic.runs.tally import Tally


def row(**values):
    return dict(dict(test_accuracy=0.5, test_loss=1.0, throttled=None), **values)


def tallied(epochs, rows=None):
    """Returns the Tally of epochs; epochs: ms of each, by kind."""
    tally = Tally()
    for number, ms in enumerate(epochs):
        tally.add(rows[number] if rows else row(), ms)
    return tally


def test_the_time_of_a_step_is_the_median_of_the_epochs_medians():
    assert tallied([{'plain': [9.0, 3.0, 4.0]}, {'plain': [5.0, 7.0]}]).step_ms == 5.0
    solved = tallied([{'solve': [900.0]}], [row(step_ms=2.0)])
    assert solved.step_ms == 2.0 and solved.medians == {}


def test_steps_of_several_kinds_have_a_median_each_and_the_mean_of_all():
    tally = tallied([{'fill': [30.0, 32.0, 40.0]}, {'read': [5.0, 7.0], 'fill': [30.0]}])
    assert tally.medians == {'fill': 31.0, 'read': 6.0}
    assert tally.step_ms == pytest.approx(144 / 6)


def test_the_outcome_is_that_of_the_last_epoch_beside_the_best():
    rows = [row(test_accuracy=accuracy, throttled=throttled, test_loss=loss)
            for accuracy, throttled, loss in ((0.5, None, 3.0), (0.9, 1, 1.0), (0.7, 0, 2.0))]
    tally = tallied([{'plain': [1.0]}] * 3, rows)
    assert tally.outcome() == dict(final_accuracy=0.7, final_loss=2.0, best_accuracy=0.9)
    assert (tally.epochs, tally.throttled) == (3, 1)
    assert tallied([{'plain': [1.0]}]).throttled is None
