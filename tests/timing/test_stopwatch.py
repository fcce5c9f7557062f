"""Tests how rounds of timed calls that were disturbed from outside are found."""

import itertools
import time

import numpy as np
import pytest

from elastic.timing.stopwatch import DISTURBED, at_one_speed, interleaved_ms, undisturbed


def rounds_of(*factors):
    """Returns (rounds, 3) ms of three functions; factors: the slowdown of each round."""
    return np.outer(factors, (40.0, 13.0, 0.5))


def test_a_quiet_machines_rounds_are_all_kept():
    ms = rounds_of(*np.random.RandomState(0).uniform(1, DISTURBED, 20))
    np.testing.assert_array_equal(undisturbed(ms), ms)


def test_slow_spells_of_the_whole_machine_are_dropped():
    ms = rounds_of(1.35, 1.4, 1.0, 1.02, 1.38, 1.05, 1.41)
    np.testing.assert_array_equal(undisturbed(ms), ms[[2, 3, 5]])
    mixed = rounds_of(*[1.0] * 6)
    mixed[:, 2] *= [1, 5, 1, 1, 1, 1]  # one slow short call is no spell: the median ignores it
    np.testing.assert_array_equal(undisturbed(mixed), mixed)


def test_the_quickest_few_stay_whatever_they_took():
    ms = rounds_of(3, 1, 2, 4)
    np.testing.assert_array_equal(undisturbed(ms), ms[:3])
    np.testing.assert_array_equal(undisturbed(ms, least=1), ms[1:2])
    np.testing.assert_array_equal(undisturbed(ms[:1]), ms[:1])


def test_rounds_of_a_machine_that_changes_speed_count_as_if_it_did_not():
    ms = rounds_of(1.35, 1.4, 1.0, 1.02, 1.38, 1.05, 1.41)
    np.testing.assert_allclose(at_one_speed(ms), rounds_of(*[1.35] * 7))  # the median
    ms[3, 2] *= 5  # one slow short call is no spell
    np.testing.assert_allclose(np.median(at_one_speed(ms), axis=0), rounds_of(1.35)[0])


@pytest.mark.timing
def test_it_goes_on_through_a_slow_spell_until_enough_rounds_are_undisturbed():
    calls = itertools.count()
    slow = 2 + 2 * 2  # the first two calls, and those of two rounds

    def function():
        time.sleep(0.05 if next(calls) < slow else 0.01)
    ms = interleaved_ms([function], seconds=0.22, rounds=(5, 100))
    assert len(ms) >= 7 and 5 <= len(undisturbed(ms)) <= len(ms) - 2
    assert len(interleaved_ms([function], seconds=0.0, rounds=(5, 100))) == 5
    calls, slow = itertools.count(), 2 + 2 * 3
    ms = interleaved_ms([function], seconds=60, rounds=(2, 4))  # three of four rounds are slow
    assert len(ms) >= 5 and len(undisturbed(ms, least=1)) >= 2
