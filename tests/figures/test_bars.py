"""Tests the figure of timing tables, with several devices one below the other."""

import pytest

import plot
from elastic.errors import UserError
from elastic.figures.bars import labels_of
from made_runs import assert_figure, read_csv
from timing_tables import KEY, stored


@pytest.mark.thorough
def test_devices_are_drawn_one_below_the_other_with_their_own_numbers(tmp_path, capsys):
    paths = [stored(tmp_path / 'pc', key=dict(KEY, host='a PC, 2 cores')),
             stored(tmp_path / 'pi', 40.0, key=dict(KEY, host='a board, 4 cores'))]
    output = str(tmp_path / 'devices')
    plot.main(['devices'] + paths + ['--output', output])
    written = capsys.readouterr().out.split()
    assert_figure(written, output)
    rows = read_csv(written[2])
    assert [row['host'] for row in rows] == 3 * ['a PC, 2 cores'] + 3 * ['a board, 4 cores']
    assert [row['name'] for row in rows] == 2 * ['layer/0', 'layer/1', 'layer/2']
    for column in ('t_dw_ms', 't_dy_ms', 't_fp_ms'):
        of_pc, of_board = [[float(row[column]) for row in part] for part in (rows[:3], rows[3:])]
        assert of_board == pytest.approx([40 * ms for ms in of_pc]) and any(of_pc)


def test_equal_hosts_are_distinguished_by_software_then_by_path():
    def key(host, tensorflow):
        return {'host': host, 'tensorflow': tensorflow}
    assert labels_of([key('x', '2.7'), key('y', '2.7')], ['a', 'b']) == ['x', 'y']
    assert labels_of([key('x', '2.7'), key('x', '2.21')], ['a', 'b']) == [
        'x, TensorFlow 2.7', 'x, TensorFlow 2.21']
    assert labels_of([key('x', '2.7'), key('x', '2.7')], ['in/a.json', 'b.json']) == [
        'x, TensorFlow 2.7 (in/a.json)', 'x, TensorFlow 2.7 (b.json)']


@pytest.mark.parametrize('changes, says', [
    (dict(names=['layer/0', 'other', 'layer/2']), 'is for small, 16x16.*one network'),
    (dict(shapes=[(3, 3), (3, 9), (9,)]), 'is for small, 16x16.*one network'),
    (dict(key=dict(KEY, batch_size=8)), 'is for small, 16x16.*8 at a time.*one network'),
    (dict(key={}), 'does not say on which device')])
def test_tables_that_do_not_compare_are_an_error_in_one_line(tmp_path, changes, says):
    paths = [stored(tmp_path / 'one'), stored(tmp_path / 'two', **changes)]
    with pytest.raises(UserError, match=says) as caught:
        plot.main(['devices'] + paths + ['--output', str(tmp_path / 'none')])
    assert '\n' not in str(caught.value) and not (tmp_path / 'none.png').exists()


def test_one_table_is_drawn_with_its_numbers(tmp_path):
    paths = plot.timing_bars(stored(tmp_path), tmp_path / 'figure')
    assert_figure(paths, tmp_path / 'figure')
    rows = read_csv(paths[2])
    assert {row['model'] for row in rows} == {'small'}
    assert [float(row['t_dw_ms']) for row in rows] == pytest.approx([3.25, 1.5, 0.25])
    assert [float(row['t_dy_ms']) for row in rows] == pytest.approx([0.0, 0.5, 2.0])
    assert rows[0]['t_bp_ms'] == '7.5'
