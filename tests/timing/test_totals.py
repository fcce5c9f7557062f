"""Traced times scaled to measured totals: they add up to the steps that were timed."""

import numpy as np
import pytest

from elastic.timing.totals import (
    Totals,
    build_table,
    measured_share,
    own_and_shared_scale,
    tensors_to_time,
    totals_of_steps,
    way_of_the_error_gradient,
)
from timing_tables import groups_of, op_times


def test_own_and_shared_ops_are_scaled_to_the_two_measured_totals():
    groups = {0b01: 2.0, 0b10: 1.0, 0b11: 4.0}
    # All: 0.5 * 3 + 2 * 4 = 9.5; the deepest, tensor 0: 0.5 * 2 + 2 * 4 = 9.
    totals = Totals(1.0, 9.5, 1.0, 0.0, 9.0, 0)
    assert own_and_shared_scale(*groups_of(groups, 2), totals) == pytest.approx((0.5, 2.0))
    table = build_table(['a', 'b'], [(1,), (2,)], op_times(groups, 2), totals, {})
    assert table.backward_time([True, True]) == pytest.approx(9.5)
    assert table.backward_time([True, False]) == pytest.approx(9.0)


def test_totals_add_up_to_the_full_step_and_hold_what_no_pass_does():
    times = op_times({0b01: 2.0, 0b10: 1.0, 0b11: 5.0}, 2, np.array([0.5, 1.5]))
    t_fp, t_bp, t_update, t_always, t_chain = 3.0, 16.0, 1.0, 0.5, 15.0
    # Tensor 1, nearest the output, needs 6 of 8 traced ms and three quarters of the update.
    beyond = [t_bp + t_always + t_update, t_chain + t_always + 0.25, 12 + t_always + 0.75]
    totals = totals_of_steps(times, [0, 1], t_fp, t_update, 20.0, beyond, 0.01)
    assert totals == Totals(t_fp, pytest.approx(t_bp), t_update, pytest.approx(t_always),
                            pytest.approx(t_chain), 0, 20.0, 0.01, chains=[])
    table = build_table(['a', 'b'], [(1,), (2,)], times, totals, {})
    assert table.step_time([True, True]) == table.t_step == pytest.approx(t_fp + beyond[0])
    assert table.step_time([True, False]) == pytest.approx(t_fp + beyond[1])


@pytest.mark.parametrize('beyond', [[20.0, 30.0, 40.0], [0.1, 0.1, 0.1], [-1.0, -1.0, -1.0]])
def test_totals_of_a_disturbed_measurement_are_positive_and_add_up(beyond):
    times = op_times({0b01: 2.0, 0b10: 1.0, 0b11: 5.0}, 2)
    totals = totals_of_steps(times, [0, 1], 3.0, 1.0, 20.0, beyond, 0.5)
    assert min(totals.t_bp, totals.t_update, totals.t_chain) > 0 <= totals.t_always
    assert totals.t_bp + totals.t_update + totals.t_always == pytest.approx(max(beyond[0], 1e-3))
    assert totals.t_chain <= totals.t_bp


@pytest.mark.parametrize('groups, t_bp, t_chain', [
    ({0b01: 2.0, 0b10: 1.0}, 6.0, 3.0),  # no shared op
    ({0b01: 2.0, 0b11: 4.0}, 6.0, 6.0),  # the deepest needs everything: nothing to tell apart
    # Its own gradient is nearly all: 1 % of noise would make the shared ops 17 times as dear.
    ({0b01: 18.0, 0b10: 0.2, 0b11: 1.0}, 19.2, 19.19)])
def test_one_scale_serves_both_where_the_two_totals_do_not_tell_them_apart(groups, t_bp, t_chain):
    totals = Totals(1.0, t_bp, 1.0, 0.0, t_chain, 0)
    own, shared = own_and_shared_scale(*groups_of(groups, 2), totals)
    assert own == shared == pytest.approx(t_bp / sum(groups.values()))


@pytest.mark.parametrize('t_chain', [50.0, 7.0, 1e-3])  # noise; own gradients cost nothing; noise
def test_scales_stay_positive_and_add_up_to_the_backward_pass(t_chain):
    groups = {0b01: 2.0, 0b10: 1.0, 0b11: 4.0}
    totals = Totals(1.0, 7.0, 1.0, 0.0, t_chain, 0)
    own, shared = own_and_shared_scale(*groups_of(groups, 2), totals)
    assert own > 0 and shared > 0
    assert 3 * own + 4 * shared == pytest.approx(7.0)
    assert own < 0.2 or t_chain < 7  # what is left for them beside the error gradient's way


def test_steps_that_follow_the_error_gradient_in_part_come_out_as_measured():
    # A chain: tensor 3 nearest the output; half of the way is behind it and 2, by the trace.
    groups = {0b0001: 1.0, 0b0010: 1.0, 0b0100: 1.0, 0b1000: 1.0,
              0b1111: 2.0, 0b0111: 4.0, 0b0011: 6.0}
    times = op_times(groups, 4)
    assert tensors_to_time(*groups_of(groups, 4)) == [0, 3, 2]
    beyond = [18.0, 14.5, 4.0, 10.0]  # of all, 0, 3 and 2; each own gradient takes a ms
    totals = totals_of_steps(times, [0, 3, 2], 3.0, 1.0, 20.0, beyond, 0.01)
    table = build_table(list('abcd'), [(1,)] * 4, times, totals, {})
    for tensors, ms in zip(([0, 1, 2, 3], [0], [2]), (18.0, 14.5, 10.0)):
        assert table.step_time(np.isin(np.arange(4), tensors)) - 3.0 == pytest.approx(ms)
    without = build_table(list('abcd'), [(1,)] * 4, times, totals._replace(chains=()), {})
    assert without.backward_time([0, 0, 1, 0]) < 0.8 * table.backward_time([0, 0, 1, 0])
    assert table.profile.traced_ms.sum() == 16


@pytest.mark.parametrize('ms', [-5.0, 0.0, 100.0])  # of a disturbed measurement
def test_the_way_of_the_error_gradient_keeps_its_sum_and_no_part_of_it_is_free(ms):
    groups = groups_of({0b001: 1.0, 0b010: 1.0, 0b111: 4.0, 0b011: 6.0}, 4)
    totals = Totals(1.0, 12.0, 1.0, 0.0, 11.0, 0, chains=[(2, ms), (3, ms)])  # 3 took no time
    way = way_of_the_error_gradient(*groups, totals, 1.0, 2.0)
    without = way_of_the_error_gradient(*groups, totals._replace(chains=[(2, ms)]), 1.0, 2.0)
    assert way.tolist() == without.tolist() and len(way) == 2 and way.min() > 0.1
    assert way.sum() == pytest.approx(20.0)


def test_the_forward_pass_behind_a_cut_is_what_was_measured_there_and_in_between_by_the_trace():
    suffixes = [(0.5, 0.6), (0.1, 0.2)]
    assert measured_share(np.array([0.1, 0.3, 0.5, 0.75, 1.0]), suffixes) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0])
    assert measured_share(np.array([0.0]), suffixes) == [0.2]  # to call it takes time, too
    noisy = [(0.1, 0.3), (0.5, 0.2), (0.6, 1.7)]  # less for more, more than all
    left = measured_share(np.linspace(0, 1, 11), noisy)
    assert (np.diff(left) >= 0).all() and left[0] == 0.3 and left.max() == 1
    times = op_times({0b01: 2.0, 0b10: 1.0}, 2)._replace(forward={'near': 3.0, 'far': 1.0})
    totals = Totals(10.0, 3.0, 1.0, 0.0, 3.0, 0, suffixes=[(0.25, 0.4)])
    table = build_table(['a', 'b'], [(1,), (2,)], times, totals, {},
                        (np.array([0.0, 3.0]), np.array([50.0, 9.0])))
    assert table.t_prefix == pytest.approx([0.0, 6.0])  # of 10 ms, 0.4 are left behind the cut
