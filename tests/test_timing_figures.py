"""Tables of costs of several devices, drawn beside each other."""

import json

import pytest
from made_runs import read_csv
from test_plot import assert_figure

import cost_file
import plot
from command_line import UserError
from timing_figures import labels_of


def table_of(folder, name, host, slower=1.0, **changes):
    """Path of a table of costs, of three tensors."""
    content = dict(
        kind=cost_file.KIND, ways=[], model='small',
        names=['stem/kernel', 'block/kernel', 'head/bias'],
        key=dict(host=host, tensorflow='2.21.0', model='small', batch_size=4, input_size=16),
        shapes=[[3, 3], [3, 4], [4]], t_dw=[3.25 * slower, 1.5 * slower, 0.25 * slower],
        t_dy=[0.5 * slower, 2.0 * slower, 0.0], t_fp=4.0 * slower, t_bp=7.5 * slower,
        t_update=0.75 * slower)
    path = folder / name
    cost_file.save(str(path), dict(content, **changes))
    return str(path)


def test_devices_are_drawn_one_below_the_other_with_their_own_numbers(tmp_path, capsys):
    paths = [table_of(tmp_path, 'pc.json', 'a PC, 2 cores'),
             table_of(tmp_path, 'pi.json', 'a board, 4 cores', 40.0)]
    output = str(tmp_path / 'devices')
    capsys.readouterr()
    plot.main(['devices'] + paths + ['--output', output])
    written = capsys.readouterr().out.split()
    assert_figure(written, output)
    rows = read_csv(written[2])
    assert [row['host'] for row in rows] == 3 * ['a PC, 2 cores'] + 3 * ['a board, 4 cores']
    assert [row['name'] for row in rows] == 2 * ['stem/kernel', 'block/kernel', 'head/bias']
    for column in ('t_dw_ms', 't_dy_ms', 't_fp_ms'):
        of_pc, of_board = [[float(row[column]) for row in part] for part in (rows[:3], rows[3:])]
        assert of_board == pytest.approx([40 * ms for ms in of_pc]) and any(of_pc)


def test_equal_hosts_are_told_apart_by_software_then_by_file():
    def table(host, tensorflow):
        return {'key': {'host': host, 'tensorflow': tensorflow}}
    assert labels_of([table('x', '2.7'), table('y', '2.7')], ['a', 'b']) == ['x', 'y']
    assert labels_of([table('x', '2.7'), table('x', '2.21')], ['a', 'b']) == [
        'x, TensorFlow 2.7', 'x, TensorFlow 2.21']
    assert labels_of([table('x', '2.7'), table('x', '2.7')], ['in/a.json', 'b.json']) == [
        'x, TensorFlow 2.7 (a.json)', 'x, TensorFlow 2.7 (b.json)']


@pytest.mark.parametrize('changes', [
    dict(names=['stem/kernel', 'other/kernel', 'head/bias']), dict(shapes=[[3, 3], [3, 9], [9]]),
    dict(key=dict(host='x', tensorflow='2.21.0', model='small', batch_size=8, input_size=16))])
def test_tables_of_different_networks_or_steps_are_an_error_in_one_line(tmp_path, changes):
    paths = [table_of(tmp_path, 'one.json', 'x'), table_of(tmp_path, 'two.json', 'x', **changes)]
    with pytest.raises(UserError, match='one.json is of small, 16x16.*two.json of small.*one '
                                        'network') as caught:
        plot.main(['devices'] + paths + ['--output', str(tmp_path / 'none')])
    assert '\n' not in str(caught.value) and not (tmp_path / 'none.png').exists()


def test_tables_of_another_kind_damaged_or_absent_are_refused(tmp_path):
    good = table_of(tmp_path, 'good.json', 'x')
    (tmp_path / 'other.json').write_text(json.dumps({'key': {}, 'names': [], 't_dw': []}))
    (tmp_path / 'half.json').write_text('{"kind": "costs", ')
    for name, says in (('other.json', 'is not a table of costs, which profiler.py --save_table'),
                       ('half.json', 'cannot read'), ('absent.json', 'cannot read')):
        with pytest.raises(UserError, match=says):
            plot.main(['devices', good, str(tmp_path / name), '--output', str(tmp_path / 'none')])
    hole = table_of(tmp_path, 'hole.json', 'x', t_dy=[0.5, None, 0.0])
    with pytest.raises(UserError, match='hole.json.*not a number'):
        plot.main(['devices', good, hole, '--output', str(tmp_path / 'none')])
