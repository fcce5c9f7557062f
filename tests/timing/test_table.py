"""Tests timing tables: the cost of masks by the graph and by the chain, and storage."""

import os

import numpy as np
import pytest

from elastic.errors import UserError
from elastic.files import read_json, write_json
from elastic.timing.table import TensorTimings, chain_timings
from made_runs import read_csv
from timing_tables import (
    chain_time,
    groups_of,
    op_times,
    random_masks,
    table_of,
    table_of_branching,
)


@pytest.fixture(scope='module')
def branching_table():
    return table_of_branching()


def random_table(seed, n=9):
    rng = np.random.RandomState(seed)
    groups = {int(mask): float(ms) for mask, ms in
              zip(rng.randint(1, 1 << n, 25), rng.exponential(size=25))}
    groups.update({1 << k: float(rng.exponential()) for k in range(n)})
    return table_of(op_times(groups, n))


def test_chain_timings_of_two_branches():
    # Stem 0, left 1, right 2, head 3. Right has more shared time, so it counts as deeper.
    groups = {0b0001: 1, 0b0010: 2, 0b0100: 3, 0b1000: 4,
              0b1111: 5, 0b0111: 6, 0b0011: 7, 0b0101: 8}
    t_dw, t_dy, depth = chain_timings(*groups_of(groups, 4))
    assert t_dw.tolist() == [1, 2, 3, 4]
    assert depth.tolist() == [3, 1, 2, 0]
    assert t_dy.tolist() == [0, 6 + 7, 8, 5]
    table = table_of(op_times(groups, 4))
    right = [False, False, True, False]
    assert table.backward_time(right) == pytest.approx(3 + 5 + 6 + 8)
    assert chain_time(table, right) == pytest.approx(3 + 5 + (6 + 7) + 8)


@pytest.mark.parametrize('seed', [None, 0, 1, 2])
def test_the_chain_is_never_cheaper_than_the_graph_and_equal_for_all_tensors(seed, branching_table):
    table = branching_table if seed is None else random_table(seed)
    n = len(table.names)
    masks = random_masks(n, 200)
    graph = np.array([table.backward_time(mask) for mask in masks])
    chain = np.array([chain_time(table, mask) for mask in masks])
    assert (chain >= graph - 1e-9).all() and (chain > graph + 1e-9).any()
    everything = np.ones(n, dtype=bool)
    assert chain_time(table, everything) == pytest.approx(table.backward_time(everything))
    assert table.backward_time(everything) == pytest.approx(table.t_bp)


def test_backward_time_is_the_union_and_grows_with_the_mask():
    table = random_table(5)
    n = len(table.names)
    assert table.backward_time(np.zeros(n, bool)) == chain_time(table, np.zeros(n, bool)) == 0
    for mask in random_masks(n, 50):
        by_hand = sum(ms for members, ms in zip(table.group_tensors, table.group_ms)
                      if mask[members].any())
        assert table.backward_time(mask) == pytest.approx(by_hand)
        assert table.backward_time(mask | (np.arange(n) == 3)) >= table.backward_time(mask)


def test_step_time_adds_forward_backward_and_the_update_of_the_selected():
    table = table_of(op_times({0b01: 1.0, 0b10: 2.0, 0b11: 4.0}, 2, np.array([0.5, 1.0])))
    # Update: 1.2 ms measured for 0.5 + 1 ms traced make 0.4 and 0.8; 0.3 ms occur in every step.
    assert table.t_up == pytest.approx([0.4, 0.8])
    assert table.fixed == pytest.approx(2 + 0.3)
    assert table.step_time([True, False]) == pytest.approx(2.3 + 5 + 0.4)
    assert table.step_time([True, True]) == pytest.approx(2 + 7 + 1.5)
    assert table.t_step == pytest.approx(2 + 7 + 1.5)


@pytest.mark.parametrize('seed', [None, 0])
def test_a_saved_table_prices_every_mask_identically(seed, branching_table, tmp_path):
    table = branching_table if seed is None else random_table(seed)
    path = str(tmp_path / 'timings.json')
    table.save(path)
    again = TensorTimings.load(path)
    for mask in random_masks(len(table.names), 100):
        assert again.backward_time(mask) == table.backward_time(mask)
        assert chain_time(again, mask) == chain_time(table, mask)
        assert again.step_time(mask) == table.step_time(mask)
    assert (again.names, again.shapes, again.key) == (table.names, table.shapes, table.key)
    for field in ('t_dw', 't_dy', 't_up', 'depth'):
        assert getattr(again, field).dtype == getattr(table, field).dtype
    np.testing.assert_array_equal(again.profile.estimated, table.profile.estimated)
    assert again.profile.estimated.dtype == bool
    assert sorted(os.listdir(str(tmp_path))) == ['timings.csv', 'timings.json']


def test_the_csv_beside_the_table_has_one_row_per_tensor(branching_table, tmp_path):
    branching_table.save(str(tmp_path / 'timings.json'))
    rows = read_csv(tmp_path / 'timings.csv')
    assert [row['name'] for row in rows] == branching_table.names
    assert rows[1]['shape'] == '2x2' and {row['time'] for row in rows} == {'measured'}
    for column, expected in (('t_dw_ms', branching_table.t_dw), ('t_dy_ms', branching_table.t_dy),
                             ('t_up_ms', branching_table.t_up)):
        np.testing.assert_allclose([float(row[column]) for row in rows], expected, atol=1e-5)
    assert sum(float(row['share']) for row in rows) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize('content', ['{"a": 1}', '[1, 2]', 'null', '7', '"text"', '{', ''])
def test_a_foreign_file_is_no_timing_table(content, tmp_path):
    path = str(tmp_path / 'timings.json')
    with open(path, 'w') as out:
        out.write(content)
    with pytest.raises(UserError):
        TensorTimings.load(path)


def test_a_table_with_a_field_missing_is_refused(branching_table, tmp_path):
    path = str(tmp_path / 'timings.json')
    branching_table.save(path)
    content = read_json(path)
    del content['t_up']
    write_json(path, content)
    with pytest.raises(UserError, match='is not a timing table of this version'):
        TensorTimings.load(path)
