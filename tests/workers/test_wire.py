"""Tests that what the wire costs enters the choice of tensors."""

import numpy as np
import tensorflow as tf

from drawn_tables import all_masks, table_of
from elastic.selection.items import smallest_rho
from elastic.timing.table import TensorTimings, WireCost
from elastic.workers.step_mean import ALONE_BYTES, key_of, sums_of
from elastic.workers.wire import Wire
from selection_solver_DP import choose_tensors

WIRE = WireCost(2.0, np.array([1.0, 30.0, 1.0]))  # tensor 1 is large


NO_WIRE = WireCost()


def table(wire=NO_WIRE):
    return table_of({0b001: 2.0, 0b010: 2.0, 0b100: 2.0, 0b111: 1.0}, [0.1, 0.1, 0.1])._replace(
        wire=wire)


def test_a_step_takes_what_the_wire_takes_in_addition():
    for mask in all_masks(3):
        more = table(WIRE).step_time(mask) - table().step_time(mask)
        assert np.isclose(more, 2.0 + WIRE.t_comm[mask].sum())
    assert np.isclose(table(WIRE).t_step - table().t_step, 34.0)


def test_a_tensor_that_is_dear_to_send_is_left_out():
    importance, rho = np.array([1.0, 1.1, 1.0]), 0.6
    mask, _ = choose_tensors(table(WIRE), importance, rho)
    assert list(mask) == [True, False, True]
    assert table(WIRE).step_time(mask) <= rho * table(WIRE).t_step
    assert smallest_rho(table(WIRE)) < smallest_rho(table())  # a full step sends the large one


def test_a_stored_table_holds_no_wire(tmp_path):
    path = str(tmp_path / 'timings.json')
    table(WIRE)._replace(t_prefix=np.zeros(3), cut_bytes=np.full(3, np.inf)).save(path)
    assert TensorTimings.load(path).wire == WireCost()


def test_the_speed_of_the_device_does_not_change_the_wire():
    faster = table(WIRE).rescaled(table().t_fp / 2, table().t_bp / 2)
    assert faster.wire_time([True] * 3) == table(WIRE).wire_time([True] * 3)


def test_small_gradients_travel_together_and_large_ones_by_themselves():
    large, small = (ALONE_BYTES // 4,), (10, 10)
    specs = map(tf.TensorSpec, [small, large, small, small],
                [tf.float32, tf.float32, tf.float64, tf.float32])
    assert sums_of(specs) == [[0, 3], [2], [1]]
    cost = Wire(2.0, 1e-6).cost_of([small, large, small])
    assert np.allclose(cost.t_comm, [4e-4, 2.0 + 1e-6 * ALONE_BYTES, 4e-4])
    assert np.isclose(cost.fixed, 2.0 + 12e-6)


def test_other_masks_have_other_keys():
    keys = {key_of(tag, mask) for mask in all_masks(5) for tag in ('step', 'gradients')}
    assert len(keys) == 2 * 31 and max(keys) < 2 ** 30 and all(key % 1024 == 0 for key in keys)
