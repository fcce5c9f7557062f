"""Tests how passes and steps correct the timing table; their times are set, not measured."""

import numpy as np
import pytest

from drawn_tables import tangled_table
from elastic.selection.closed_loop import (
    NOISE,
    STEP_DRIFT,
    ClosedLoop,
    Steps,
    explaining,
    steps_drift_ms,
)
from elastic.timing.table import CacheCost
from fixed_tables import fixed_table
from small_steps import N, batch, conv_stack, maker_of
from timing_tables import chain_time


@pytest.fixture(scope='module')
def table():
    table = tangled_table(np.random.RandomState(0), N)
    return table._replace(t_both=table.t_fp + table.t_bp)


class Device:
    """Stands in for a StepMaker; its passes take the times of a table, times a factor."""

    def __init__(self, table, forward=1.0, backward=1.0):
        self.ms = forward * table.t_fp, forward * table.t_fp + backward * table.t_bp

    def forward(self):
        return Pass(self.ms[0])

    def gradients(self, averaged=True):
        return Pass(self.ms[1])


class Pass:
    def __init__(self, ms):
        self.ms = ms

    def milliseconds(self, inputs, labels):
        return self.ms


def loop_of(table, forward=1.0, backward=1.0):
    return ClosedLoop(table, Device(table, forward, backward))


def updated(loop, steps=None, both_ms=()):
    return loop.update(None, None, both_ms, steps)


def test_rescaling_keeps_the_costs_of_masks_in_proportion(table):
    slower = table.rescaled(2 * table.t_fp, 3 * table.t_bp)._replace(t_loop=1.5)
    rng = np.random.RandomState(0)
    for _ in range(10):
        mask = rng.rand(N) < 0.5
        assert slower.backward_time(mask) == pytest.approx(3 * table.backward_time(mask))
        assert chain_time(slower, mask) == pytest.approx(3 * chain_time(table, mask))
    whole = (2 * table.t_fp + 3 * table.t_bp) / (table.t_fp + table.t_bp)
    assert slower.t_update == pytest.approx(whole * table.t_update)
    assert slower.fixed == pytest.approx(
        2 * table.t_fp + 1.5 + whole * (table.fixed - table.t_fp))
    assert slower.step_time(np.ones(N, bool)) == pytest.approx(slower.t_step)


def test_passes_of_a_real_network_correct_any_table():
    maker, found = maker_of(conv_stack()), []
    table = fixed_table(maker)
    for wrong in (table.rescaled(200 * table.t_fp, table.t_bp),
                  table.rescaled(table.t_fp, 200 * table.t_bp)):
        loop = ClosedLoop(wrong, maker)
        loop.update(*batch())
        found.append(loop.timings.t_bp / loop.timings.t_fp)
    # The tables were 40,000-fold apart, far more than any load of the machine could cause.
    assert max(found) < 100 * min(found)


@pytest.mark.parametrize('forward, backward, drift', [
    (2.0, 2.0, 0), (0.5, 0.5, 0), (1.0, 1 + 0.9 * NOISE[0], 0), (2.0, 0.8, -0.6), (1.0, 50, 49)])
def test_shares_follow_the_passes_only_beyond_noise(table, forward, backward, drift):
    loop = loop_of(table, forward, backward)
    assert updated(loop) == pytest.approx(drift)
    now, speed = loop.timings, (forward * table.t_fp + backward * table.t_bp) / (
        table.t_fp + table.t_bp)
    expected = (forward, backward) if drift else (speed, speed)
    assert (now.t_fp, now.t_bp) == pytest.approx(
        (expected[0] * table.t_fp, expected[1] * table.t_bp))
    assert updated(loop) == 0  # this is now the reference


def test_a_quick_look_that_sees_drift_is_confirmed_by_a_long_one(table):
    loop = loop_of(table)
    assert updated(loop, both_ms=[1e4 * table.t_step]) == 0
    assert loop.timings.t_bp == pytest.approx(table.t_bp)


@pytest.mark.parametrize('factor', [1.02, 7.0, 0.3])
def test_steps_give_the_speed_and_each_step_pays_the_wait(table, factor):
    mask, loop = np.arange(N) > 2, loop_of(table)
    taken = factor * table.step_time(mask)
    loop.waited(0.05)
    updated(loop, Steps(mask, [taken + 0.05] * 9))
    assert loop.timings.t_fp == pytest.approx(factor * table.t_fp)
    assert loop.timings.t_bp == pytest.approx(factor * table.t_bp)
    assert loop.timings.step_time(mask) == pytest.approx(taken + 0.05)
    assert loop.timings.t_step == pytest.approx(factor * table.t_step + 0.05)
    updated(loop)
    assert loop.timings.t_loop == 0.05  # kept until other steps are measured


def test_slow_reading_steps_do_not_enlarge_the_budget(table):
    mask, copying = np.arange(N) > 2, np.full(N, 0.01)
    cache = CacheCost(np.full(N, 0.25), np.full(N, 0.9), copying, copying)
    loop = loop_of(table, 2.0, 2.0)
    ms = 50 * table._replace(cache=cache).reading_time(mask)
    updated(loop, Steps(mask, [ms] * 10, cache))
    assert loop.timings.t_step == pytest.approx(2 * table.t_step)  # from the passes alone


def overlapping_less(table, of_own=1.4):
    """Returns the table with slower weight gradients in a backward pass of the same length."""
    own = table.group_tensors.sum(axis=1) == 1
    of_shared = (table.t_bp - of_own * table.group_ms[own].sum()) / table.group_ms[~own].sum()
    return table._replace(group_ms=table.group_ms * np.where(own, of_own, of_shared))


def test_one_step_separates_weight_gradients_from_the_error_gradient(table):
    true, trained = overlapping_less(table), np.arange(N) > 1
    found = explaining(table, trained, true.step_time(trained) - table.step_time(trained))
    rng = np.random.RandomState(0)
    for _ in range(10):
        mask = rng.rand(N) < 0.5
        assert found.backward_time(mask) == pytest.approx(true.backward_time(mask), rel=0.03)
        assert chain_time(found, mask) >= found.backward_time(mask) - 1e-9
    assert found.t_step == pytest.approx(true.t_step)
    nothing = explaining(table, np.ones(N, bool), 0.0)  # a full step cannot separate the parts
    assert nothing.group_ms == pytest.approx(table.group_ms)
    for noise in (100 * table.t_step, -table.step_time(trained)):
        ratio = explaining(table, trained, noise).group_ms / table.group_ms
        assert 0.3 < ratio.min() and ratio.max() < 6.5


def test_what_one_epoch_shows_of_weight_gradients_is_not_inherited():
    table = tangled_table(np.random.RandomState(0), N)
    table = table._replace(t_both=table.t_fp + table.t_bp).rescaled(table.t_fp, 3 * table.t_bp)
    true = overlapping_less(table, 1.6)
    mask = max(np.eye(N, dtype=bool), key=lambda each: abs(
        true.step_time(each) / table.step_time(each) - 1))
    assert 0.1 < abs(true.step_time(mask) / table.step_time(mask) - 1) < 0.25
    loop = loop_of(table)
    updated(loop, Steps(mask, [true.step_time(mask)] * 9))
    assert loop.timings.step_time(mask) == pytest.approx(true.step_time(mask))
    assert loop.timings.t_dw == pytest.approx(1.6 * table.t_dw, rel=0.05)
    updated(loop)
    assert loop.timings.t_dw == pytest.approx(table.t_dw)


def test_drift_of_steps_is_judged_by_the_median_of_the_last_ones():
    steady = [100.0] * 60
    assert steps_drift_ms(steady, 100 * (1 - 0.5 * STEP_DRIFT), 100) == 0
    for predicted in 100 * (1 - 2 * STEP_DRIFT), 100 * (1 + 2 * STEP_DRIFT):
        assert steps_drift_ms(steady, predicted, predicted) == pytest.approx(100 - predicted)
    assert steps_drift_ms(steady[:50] + [900.0] * 10, 100, 100) == 0  # a few slow steps are chance
    assert steps_drift_ms(steady + [130.0] * 40, 100, 100) == 30      # the last steps count
