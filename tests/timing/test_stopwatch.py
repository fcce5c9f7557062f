"""Tests how rounds of timed calls are taken, and how those of a slow machine count."""

import time

import numpy as np
import pytest

from elastic.timing.stopwatch import at_one_speed, interleaved_ms


def rounds_of(*factors):
    """Returns (rounds, 3) ms of three functions; factors: the slowdown of each round."""
    return np.outer(factors, (40.0, 13.0, 0.5))


def test_rounds_of_a_machine_that_changes_speed_count_as_if_it_did_not():
    ms = rounds_of(1.35, 1.4, 1.0, 1.02, 1.38, 1.05, 1.41)
    np.testing.assert_allclose(at_one_speed(ms), rounds_of(*[1.35] * 7))  # the median
    ms[3, 2] *= 5  # one slow short call is no spell
    np.testing.assert_allclose(np.median(at_one_speed(ms), axis=0), rounds_of(1.35)[0])


@pytest.mark.timing
def test_quick_functions_run_before_slow_ones():
    called = []
    functions = [lambda ms=ms: (called.append(ms), time.sleep(1e-3 * ms)) for ms in (60, 1, 20)]
    ms = interleaved_ms(functions, seconds=0, rounds=(4, 9))
    assert called[6:] == 4 * [1, 20, 60]  # after two calls of each
    assert ms.shape == (4, 3)
    np.testing.assert_array_less([[59, 0.9, 19]] * 4, ms)


@pytest.mark.timing
def test_timing_ends_after_its_seconds_or_its_rounds():
    assert len(interleaved_ms([lambda: time.sleep(0.05)], seconds=0.22, rounds=(2, 90))) < 8
    assert len(interleaved_ms([lambda: None], seconds=60, rounds=(2, 9))) == 9
