"""The timing table follows the device: measured passes, steps that ran, rescaled times."""

import numpy as np
import pytest

from drawn_tables import tangled_table
from elastic.selection.closed_loop import (
    NOISE,
    STEP_DRIFT,
    ClosedLoop,
    explaining,
    steps_drift_ms,
)
from elastic.timing.table import CacheCost
from profiler import profile_model
from small_steps import N, batch, conv_stack, maker_of

pytestmark = pytest.mark.timing


@pytest.fixture(scope='module')
def model():
    return conv_stack()


@pytest.fixture(scope='module')
def table(model):
    table = profile_model(model, (12, 12, 3), 3, 4, num_steps=2, seconds=0)
    # So small a network's steps vary, whatever else runs.
    return table._replace(profile=table.profile._replace(spread=0.0))


def test_rescaling_changes_every_part_and_keeps_what_masks_cost_in_proportion(table):
    slower = table.rescaled(2 * table.t_fp, 3 * table.t_bp)._replace(t_loop=1.5)
    rng = np.random.RandomState(0)
    for _ in range(10):
        mask = rng.rand(N) < 0.5
        assert slower.backward_time(mask) == pytest.approx(3 * table.backward_time(mask))
        assert slower.chain_time(mask) == pytest.approx(3 * table.chain_time(mask))
    whole = (2 * table.t_fp + 3 * table.t_bp) / (table.t_fp + table.t_bp)
    assert slower.t_update == pytest.approx(whole * table.t_update)
    assert slower.fixed == pytest.approx(
        2 * table.t_fp + 1.5 + whole * (table.fixed - table.t_fp))
    assert slower.t_step == pytest.approx(
        2 * table.t_fp + 3 * table.t_bp + whole * table.t_update + 1.5)
    everything = np.ones(N, bool)
    assert slower.step_time(everything) == pytest.approx(slower.t_step)


def test_a_wrong_table_is_put_right_whatever_it_said(model, table):
    """From tables wrong in different ways the loop arrives at one ratio: the measured one."""
    ratios = []
    for fp, bp in ((1, 1), (20, 1), (1, 20)):
        loop = ClosedLoop(table.rescaled(fp * table.t_fp, bp * table.t_bp), maker_of(model))
        for _ in range(15):
            loop.update(*batch())
        ratios.append(loop.timings.t_bp / loop.timings.t_fp)
    # Not times but ratios that were 400-fold apart: the machine's noise is far below that.
    assert max(ratios) < 8 * min(ratios)


def test_where_shares_stay_steps_tell_the_speed_and_waiting_is_paid_by_every_step(model, table):
    mask = np.arange(N) > 2
    for factor in (1.02, 7.0, 0.3):  # as a busy device, or one that cools, changes all of a step
        for _ in range(30):  # until the machine's noise leaves the ratio of the passes alone
            loop = ClosedLoop(table, maker_of(model))
            loop.reference = table.rescaled(*loop.measure(*batch(), calls=20))
            taken = factor * loop.reference.step_time(mask)
            if loop.update(*batch(), mask=mask, step_ms=[taken + 0.05] * 9, wait_ms=0.05) == 0:
                break
        assert loop.timings.t_fp == pytest.approx(factor * loop.reference.t_fp)
        assert loop.timings.t_bp == pytest.approx(factor * loop.reference.t_bp)
        assert loop.timings.t_loop == 0.05
        assert loop.timings.step_time(mask) == pytest.approx(taken + 0.05)
        assert loop.timings.t_step == pytest.approx(
            loop.timings._replace(t_loop=0.0).t_step + 0.05)
        loop.update(*batch())
        assert loop.timings.t_loop == 0.05  # until steps tell otherwise


def test_a_wrong_price_of_steps_that_read_the_prefix_back_does_not_enlarge_the_budget(model, table):
    mask, there = np.arange(N) > 2, np.full(N, 0.01)
    cache = CacheCost(np.full(N, 0.25), np.full(N, 0.9), there, there)
    ms = 50 * table._replace(cache=cache).reading_time(mask)
    plain, reading = ClosedLoop(table, maker_of(model)), ClosedLoop(table, maker_of(model))
    plain.update(*batch())
    reading.update(*batch(), mask=mask, step_ms=[ms] * 10, cache=cache)
    # Both measured the passes: far less apart than the steps would have it.
    assert reading.timings.t_step < 8 * plain.timings.t_step


def test_own_gradients_and_the_error_gradients_way_are_told_apart_by_one_step():
    table = tangled_table(np.random.RandomState(0), n=N)
    own = table.group_tensors.sum(axis=1) == 1
    of_own = 1.4
    of_shared = (table.t_bp - of_own * table.group_ms[own].sum()) / table.group_ms[~own].sum()
    true = table._replace(group_ms=table.group_ms * np.where(own, of_own, of_shared))
    trained = np.arange(N) > 1
    found = explaining(table, trained, true.step_time(trained) - table.step_time(trained))
    rng = np.random.RandomState(0)
    for _ in range(10):
        mask = rng.rand(N) < 0.5
        assert found.backward_time(mask) == pytest.approx(true.backward_time(mask), rel=0.03)
        assert found.chain_time(mask) >= found.backward_time(mask) - 1e-9
    assert found.t_step == pytest.approx(true.t_step)
    nothing = explaining(table, np.ones(N, bool), 0.0)  # says nothing of parts
    assert nothing.group_ms == pytest.approx(table.group_ms)
    for noise in (100 * table.t_step, -table.step_time(trained)):
        ratio = explaining(table, trained, noise).group_ms / table.group_ms
        assert 0.3 < ratio.min() and ratio.max() < 6.5


def test_shares_that_drifted_far_are_followed(model, table):
    loop = ClosedLoop(table.rescaled(table.t_fp, 50 * table.t_bp), maker_of(model))
    wrong = loop.reference
    assert loop.update(*batch()) < -0.5
    assert loop.timings.t_bp / loop.timings.t_fp < 0.5 * wrong.t_bp / wrong.t_fp
    assert loop.reference.t_bp / loop.reference.t_fp == pytest.approx(
        loop.timings.t_bp / loop.timings.t_fp)  # so that the next look is a quick one again


def test_a_quick_look_that_sees_drift_is_confirmed_by_a_long_one(model, table):
    loop = ClosedLoop(table, maker_of(model))
    assert loop.update(*batch(), both_ms=[1e4 * table.t_step]) < 100
    assert loop.timings.t_bp < 100 * table.t_bp


def test_small_drift_keeps_the_shares_of_the_profile(model, table):
    """Its own measurement taken as the profile: drift counts where a long look confirms it."""
    loop = ClosedLoop(table, maker_of(model))
    loop.reference = table.rescaled(*loop.measure(*batch(), calls=40))
    for _ in range(5):
        before = loop.reference
        drift = loop.update(*batch())
        ratio = loop.timings.t_bp / loop.timings.t_fp
        assert (1 + drift) * before.t_bp / before.t_fp == pytest.approx(ratio)
        assert drift == 0 or abs(drift) > NOISE[1]  # of the long look


def test_what_one_epoch_told_of_own_gradients_is_not_inherited(model, table):
    table = table.rescaled(table.t_fp, 3 * table.t_fp)
    alone = table.group_tensors.sum(axis=1) == 1
    even = np.where(alone, 1 / alone.sum(), 1 / (~alone).sum()) * table.t_bp / 2
    table = table._replace(group_ms=even, t_dw=np.full(N, table.t_bp / 2 / N),
                           t_dy=np.full(N, table.t_bp / 2 / N))
    mask = np.arange(N) == 0
    more = -0.17 * table.plain_time(mask)
    for _ in range(60):  # until the machine's noise leaves passes and steps so far apart
        loop = ClosedLoop(table, maker_of(model))
        speed = loop.measure(*batch(), calls=2, both_ms=[table.t_both])[0] / table.t_fp
        loop.update(*batch(), both_ms=[speed * table.t_both], mask=mask,
                    step_ms=[speed * (table.step_time(mask) + more)] * 9)
        if loop.timings.t_dw.sum() != pytest.approx(loop.timings.t_dy.sum()):
            break
    assert loop.timings.t_dw.sum() != pytest.approx(loop.timings.t_dy.sum())
    loop.update(*batch())
    assert loop.timings.t_dw.sum() == pytest.approx(loop.timings.t_dy.sum())


def test_drift_of_steps_is_judged_by_their_median_over_the_last_ones():
    steady = [100.0] * 60
    assert steps_drift_ms(steady, 100 * (1 - 0.5 * STEP_DRIFT)) == 0
    for predicted in 100 * (1 - 2 * STEP_DRIFT), 100 * (1 + 2 * STEP_DRIFT):
        assert steps_drift_ms(steady, predicted) == pytest.approx(100 - predicted)
    assert steps_drift_ms(steady[:50] + [900.0] * 10, 100) == 0  # a few steps are an accident
    assert steps_drift_ms(steady + [130.0] * 40, 100) == 30      # the last ones count
