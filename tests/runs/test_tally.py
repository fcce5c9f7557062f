"""Tests what a run remembers of its epochs: enough for its summary, and no more as it grows."""

import json

import numpy as np
import pytest

from elastic.runs.tally import BIN, Tally


def row(**values):
    return dict(dict(test_accuracy=0.5, test_loss=1.0, throttled=None), **values)


def tallied(epochs, rows=None):
    """Returns the Tally of epochs; epochs: ms of each, by kind."""
    tally = Tally()
    for number, ms in enumerate(epochs):
        tally.add(rows[number] if rows else row(), ms)
    return tally


@pytest.mark.parametrize('count', [1, 2, 3, 1000, 1001])
def test_the_median_is_that_of_all_steps_to_half_a_bin(count):
    ms = np.random.RandomState(count).lognormal(3, 1, count).tolist()
    tally = tallied([{'plain': ms[:count // 3]}, {'plain': ms[count // 3:]}])
    assert tally.step_ms == pytest.approx(np.median(ms), rel=0.51 * BIN)


def test_steps_of_several_kinds_have_a_median_each_and_the_mean_of_all():
    tally = tallied([{'fill': [30.0, 32.0, 40.0]}, {'read': [5.0, 7.0], 'fill': [30.0]}])
    assert tally.medians == pytest.approx({'fill': 31.0, 'read': 6.0}, rel=BIN)
    assert tally.step_ms == pytest.approx(144 / 6)


def test_a_clock_that_shows_no_time_is_no_error():
    assert tallied([{'plain': [0.0, 0.0]}]).step_ms == pytest.approx(0, abs=1e-5)


def test_the_outcome_is_that_of_the_last_epoch_beside_the_best():
    rows = [row(test_accuracy=accuracy, throttled=throttled, test_loss=loss)
            for accuracy, throttled, loss in ((0.5, None, 3.0), (0.9, 1, 1.0), (0.7, 0, 2.0))]
    tally = tallied([{'plain': [1.0]}] * 3, rows)
    assert tally.outcome() == dict(final_accuracy=0.7, final_loss=2.0, best_accuracy=0.9)
    assert (tally.epochs, tally.throttled) == (3, 1)
    assert tallied([{'plain': [1.0]}]).throttled is None


def test_what_is_kept_does_not_grow_with_the_epochs():
    ms = np.random.RandomState(0).uniform(10, 12, 100).tolist()

    def size(epochs):
        state = tallied([{'plain': ms}] * epochs).state()
        return len(json.dumps(state, default=np.ndarray.tolist))
    assert size(1000) < size(10) + 500  # digits


def test_it_resumes_from_its_state():
    epochs = [{'fill': [30.0, 32.0]}, {'read': [5.0, 7.0], 'fill': [30.0]}, {'read': [6.0]}]
    resumed = Tally()
    resumed.restore(tallied(epochs[:2]).state())
    resumed.add(row(), epochs[2])
    whole = tallied(epochs)
    assert (resumed.step_ms, resumed.medians, resumed.epochs) == (
        whole.step_ms, whole.medians, whole.epochs)
