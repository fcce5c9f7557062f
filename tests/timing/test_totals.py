"""Tests how traced times are scaled until they explain the timed steps."""

import numpy as np
import pytest

from elastic.timing.totals import (
    Totals,
    build_table,
    fitted_scales,
    measured_share,
    tensors_to_time,
    totals_of,
)
from timing_tables import groups_of, op_times, totals_as_traced

CHAIN = {0b0001: 1.0, 0b0010: 1.0, 0b0100: 1.0, 0b1000: 1.0,
         0b1111: 2.0, 0b0111: 4.0, 0b0011: 6.0}


def table_of_steps(times, tensors, beyond, t_update=1.0, **more):
    n = len(times.update)
    return build_table([str(k) for k in range(n)], [(1,)] * n, times,
                       Totals(3.0, t_update, tensors, beyond, 20.0, 0.01, **more), {})


def test_totals_are_of_one_speed_of_the_machine():
    ms = np.array([2.0, 30.0, 85.0, 100.0, 60.0, 31.0, 14.0])
    rounds = np.outer([1.0, 1.3, 1.9], ms)
    rounds[1, 3] *= 2  # so the column's median is of the slow round
    totals = totals_of(rounds, [4, 7], [0.5])
    assert (totals.t_update, totals.t_fp, totals.t_both) == pytest.approx(tuple(1.3 * ms[:3]))
    assert totals.tensors == [4, 7]
    assert totals.beyond == pytest.approx(list(1.3 * (ms[3:6] - 30)))
    assert totals.suffixes == [(0.5, pytest.approx(14 / 30))]
    assert totals.spread == pytest.approx((225 - 145) / 2 / 190)  # of the full step, as it ran


@pytest.mark.parametrize('parts, ms', [
    ([[3.0, 0.0], [2.0, 0.0]], [6.0, 3.0]),  # one part is empty
    ([[2.0, 4.0], [2.0, 4.0]], [6.0, 5.0]),  # both steps are the same
    # 1 % of noise would make the second part, which is small, several times slower.
    ([[18.2, 1.0], [18.0, 1.0]], [19.2, 18.99])])
def test_scales_stay_nearly_equal_where_steps_say_nothing_of_them(parts, ms):
    scales = fitted_scales(np.array(parts), ms, 0.1, 5.0)
    assert scales == pytest.approx(ms[0] / sum(parts[0]), rel=0.05)


@pytest.mark.parametrize('alone', [50.0, 5.0, 1e-3])  # noise; free weight gradients; noise
def test_scales_keep_their_bounds_and_the_whole_step_is_exact(alone):
    parts = np.array([[3.0, 4.0], [2.0, 4.0]])
    scales = fitted_scales(parts, [7.0, alone], 0.1, 5.0)
    assert parts[0] @ scales == pytest.approx(7.0)
    assert 0.08 < min(scales) and max(scales) < 6


def test_weight_and_error_gradients_are_scaled_apart_as_steps_say():
    times = op_times({0b001: 2.0, 0b010: 1.0, 0b011: 4.0, 0b100: 1e-3}, 3)
    # Weight gradients take half their traced time, the path of the error gradient twice its own.
    table = table_of_steps(times, [0, 2], [9.5 + 0.75, 9.0 + 0.25, 0.25], t_update=0.75)
    for mask, ms in zip(([1, 1, 1], [1, 0, 0], [0, 1, 0]), (9.5, 9.0, 8.5)):
        assert table.backward_time(mask) == pytest.approx(ms, rel=0.01)


def test_the_full_step_comes_out_exactly_with_what_no_pass_does():
    times = op_times({0b01: 2.0, 0b10: 1.0, 0b11: 5.0}, 2, np.array([0.5, 1.5]))
    table = build_table(['a', 'b'], [(1,), (2,)], times, totals_as_traced(
        times, 3.0, 16.0, 1.0, t_always=0.5), {})
    assert table.t_step == pytest.approx(3.0 + 16.0 + 1.0 + 0.5)
    assert table.step_time([True, True]) == pytest.approx(table.t_step)
    assert table.fixed == pytest.approx(3.5)
    assert table.step_time([True, False]) == pytest.approx(3.0 + 0.5 + 14.0 + 0.25)


@pytest.mark.parametrize('beyond', [[20.0, 30.0, 40.0], [0.1, 0.1, 0.1], [-1.0, -1.0, -1.0],
                                    [20.0, -1.0, 30.0]])
def test_a_disturbed_measurement_gives_positive_times_that_add_up(beyond):
    times = op_times({0b01: 2.0, 0b10: 1.0, 0b11: 5.0}, 2)
    table = table_of_steps(times, [0, 1], beyond)
    assert min(table.t_bp, table.t_update, table.group_ms.min(), table.t_up.min()) > 0
    assert table.t_step == pytest.approx(3.0 + max(beyond[0], 1e-3))
    assert table.backward_time([True, True]) == pytest.approx(table.t_bp)


def test_steps_up_to_tensors_on_the_path_come_out_as_measured():
    times = op_times(CHAIN, 4)
    assert tensors_to_time(*groups_of(CHAIN, 4)) == [0, 3, 2]
    # A chain with tensor 3 nearest the output; 0 to 2 need half of the path, 2 takes longer.
    beyond = [18.0, 14.5, 4.0, 10.0]  # ms of all, 0, 3 and 2; each weight gradient takes 1 ms
    table = table_of_steps(times, [0, 3, 2], beyond)
    for tensors, ms in zip(([0, 1, 2, 3], [0], [2]), (18.0, 14.5, 10.0)):
        assert table.step_time(np.isin(np.arange(4), tensors)) - 3.0 == pytest.approx(ms, rel=0.02)
    without = table_of_steps(times, [0, 3], beyond[:3])
    assert without.backward_time([0, 0, 1, 0]) < 0.85 * table.backward_time([0, 0, 1, 0])
    assert table.profile.traced_ms.sum() == 16


def test_the_forward_pass_after_a_cut_takes_its_measured_share():
    suffixes = [(0.5, 0.6), (0.1, 0.2)]
    assert measured_share(np.array([0.1, 0.3, 0.5, 0.75, 1.0]), suffixes) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0])
    assert measured_share(np.array([0.0]), suffixes) == [0.2]  # the call itself takes time
    noisy = [(0.1, 0.3), (0.5, 0.2), (0.6, 1.7)]  # more work in less time; more than the whole
    left = measured_share(np.linspace(0, 1, 11), noisy)
    assert (np.diff(left) >= 0).all() and left[0] == 0.3 and left.max() == 1
    times = op_times({0b01: 2.0, 0b10: 1.0}, 2)._replace(forward={'near': 3.0, 'far': 1.0})
    totals = totals_as_traced(times, 10.0, 3.0, 1.0, suffixes=[(0.25, 0.4)],
                              skipped=np.array([0.0, 0.75]), cut_bytes=np.array([50.0, 9.0]))
    table = build_table(['a', 'b'], [(1,), (2,)], times, totals, {})
    assert table.t_prefix == pytest.approx([0.0, 6.0])  # 40 % of the 10 ms follow the cut
