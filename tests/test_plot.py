"""The figures: numbers equal to the records, and no figure from records with a hole."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from test_selection_solver_DP import branching_table

import plot
from benchmarks._accuracy_figure import _draw_points, accuracy_against_time
from command_line import UserError
from runs import EPOCH_COLUMNS, SelectionRow, read_run, selection_per_epoch

EPOCHS, TENSORS = 4, 9
SHARE = [0.05 + 0.01 * tensor for tensor in range(TENSORS)]
MASKS = {1: [0, 0, 1, 0, 1, 1, 0, 1, 1], 3: [0, 1, 0, 0, 0, 1, 1, 0, 1]}  # by first epoch
TABLE = {'key': {'model': 'mobilenetv2'}, 'names': ['stem/kernel', 'block/kernel', 'head/bias'],
         't_dw': [3.25, 1.5, 0.25], 't_dy': [0.5, 2.0, 0.0], 't_fp': 4.0, 't_bp': 7.5,
         't_update': 0.75}


def stored(folder, table=TABLE):
    """Path of the table's file."""
    (folder / 'timings.json').write_text(json.dumps(table), encoding='utf-8')
    return folder / 'timings.json'


def write_csv(path, rows):
    with open(str(path), 'w', encoding='utf-8', newline='') as file:
        csv.writer(file).writerows(rows)


def read_csv(path):
    with open(str(path), encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def edit_csv(path, row, column, value):
    """Changes one cell; `row` counts from 1 below the header."""
    rows = [list(line) for line in csv.reader(path.read_text(encoding='utf-8').splitlines())]
    rows[row][rows[0].index(column)] = value
    write_csv(path, rows)


def epoch_rows(step_seconds, accuracy):
    rows = []
    for epoch in range(1, EPOCHS + 1):
        test = accuracy * (1 - 0.5 ** epoch)
        rows.append([epoch, 1e-3 / epoch, test + 0.05, 1.5 - test, 0.0, test, 1.75 - test,
                     10.0, step_seconds - 1.0, 1.0, 0.5, 3.0, epoch * step_seconds])
    return rows


def make_run(logs, name, scheme='elastic_training', rho=0.5, seed=0, step_seconds=50.0,
             accuracy=0.8, share=SHARE, **changes):
    folder = logs / name
    folder.mkdir(parents=True)
    elastic = scheme.startswith('elastic')
    summary = {
        'run_name': name, 'scheme': scheme, 'model_name': 'mobilenetv2',
        'dataset_name': 'oxford_iiit_pet', 'rho': rho if elastic else None,
        'importance': 'loss_drop' if elastic else None, 'seed': seed, 'epochs': EPOCHS,
        'final_accuracy': accuracy, 'best_accuracy': accuracy, 'stack': 'TensorFlow 2.21',
        'host': 'pi4b', 'finished': True}
    summary.update(changes)
    write_csv(folder / 'epochs.csv',
              [list(EPOCH_COLUMNS)] + epoch_rows(step_seconds, accuracy))
    if elastic:
        rows = [list(SelectionRow._fields)]
        for epoch, mask in MASKS.items():
            rows += [[epoch, tensor, 'block_{}/kernel'.format(tensor), '3x3x8x8', mask[tensor],
                      '' if tensor == 0 else 0.1 * tensor, share[tensor] if share else '']
                     for tensor in range(TENSORS)]
        write_csv(folder / 'selections.csv', rows)
    (folder / 'summary.json').write_text(json.dumps(summary), encoding='utf-8')
    return folder


def assert_figure(paths, output):
    """PNG, PDF and CSV of that stem, whole, the PNG with more than a few colours in it."""
    from matplotlib import image
    assert [str(path) for path in paths] == [str(output) + end for end in ('.png', '.pdf', '.csv')]
    pixels = image.imread(str(paths[0]))
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000
    assert len(np.unique((255 * pixels[..., :3]).astype(int).reshape(-1, 3), axis=0)) > 20
    with open(str(paths[1]), 'rb') as file:
        content = file.read()
    assert content.startswith(b'%PDF') and content.rstrip().endswith(b'%%EOF')


def folder_content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_read_run_returns_the_records(tmp_path):
    run = read_run(make_run(tmp_path, 'elastic'))
    assert run.summary['scheme'] == 'elastic_training' and run.summary['run_name'] == 'elastic'
    assert run.epochs['epoch'] == [1, 2, 3, 4]
    assert run.epochs['train_seconds'] == [50, 100, 150, 200]
    assert len(run.selections) == 2 * TENSORS
    assert run.selections[0] == SelectionRow(
        1, 0, 'block_0/kernel', '3x3x8x8', False, None, 0.05)
    assert read_run(make_run(tmp_path, 'full', 'full_training')).selections == []


def test_curves_are_the_recorded_numbers(tmp_path):
    runs = [make_run(tmp_path, 'elastic', step_seconds=27.5),
            make_run(tmp_path, 'full', 'full_training', accuracy=0.82),
            make_run(tmp_path, 'head', 'traditional_tl_training', step_seconds=15.0),
            make_run(tmp_path, 'bn', 'bn_plus_bias_training', step_seconds=33.0)]
    output = tmp_path / 'new' / 'figures' / 'rho_0.5'
    paths = plot.accuracy_over_time(runs, output)
    assert_figure(paths, output)
    rows = read_csv(paths[2])
    assert [row['scheme'] for row in rows[::EPOCHS]] == [
        'full_training', 'traditional_tl_training', 'bn_plus_bias_training', 'elastic_training']
    elastic = read_run(runs[0]).epochs
    for column in plot.CURVE_COLUMNS:
        assert [float(row[column + '_mean']) for row in rows[-EPOCHS:]] == elastic[column]
    assert {(row['n'], row['test_accuracy_std']) for row in rows} == {('1', '')}
    assert (rows[-1]['rho'], rows[0]['rho']) == ('0.5', '')


def test_seeds_become_a_mean_and_a_sample_deviation(tmp_path):
    values = [(0.70, 40.0), (0.80, 50.0), (0.84, 63.0)]
    runs = [make_run(tmp_path, 'seed{}'.format(seed), seed=seed, accuracy=accuracy,
                     step_seconds=seconds) for seed, (accuracy, seconds) in enumerate(values)]
    runs.append(make_run(tmp_path, 'other', rho=0.4, accuracy=0.6))
    rows = read_csv(plot.accuracy_over_time(runs, str(tmp_path / 'curves.png'))[2])
    assert [(row['rho'], row['n']) for row in rows[::EPOCHS]] == [('0.4', '1'), ('0.5', '3')]
    last = rows[-1]
    # by hand: mean 0.78, squares (0.08, 0.02, 0.06)^2 sum to 0.0104, over n - 1 = 2; times 15/16
    assert float(last['test_accuracy_mean']) == pytest.approx(0.78 * 15 / 16)
    assert float(last['test_accuracy_std']) == pytest.approx((0.0104 / 2) ** 0.5 * 15 / 16)
    # mean 51, squares 121 + 1 + 144 = 266; times 4 epochs
    assert float(last['train_seconds_mean']) == pytest.approx(204)
    assert float(last['train_seconds_std']) == pytest.approx(133 ** 0.5 * 4)


@pytest.mark.parametrize('loss, scale', [(1.5, 'linear'), (80000, 'log')])
def test_a_loss_that_nearly_exploded_does_not_press_the_others_flat(tmp_path, loss, scale):
    from matplotlib.figure import Figure
    run = make_run(tmp_path, 'run')
    edit_csv(run / 'epochs.csv', 1, 'test_loss', loss)
    axis = Figure().subplots()
    plot.scale_loss(axis, plot.curves_of([read_run(run)]))
    assert axis.get_yscale() == scale


def test_labels_tell_configurations_apart():
    keys = [('elastic_training', 0.5, 'vgg16', 'loss_drop'),
            ('elastic_training', 0.5, 'vgg16', 'random'), ('full_training', None, 'vit', None)]
    assert [plot.label_of(key, keys, n) for key, n in zip(keys, (1, 3, 1))] == [
        'ElasticTrainer, ρ = 0.5, vgg16, loss_drop',
        'ElasticTrainer, ρ = 0.5, vgg16, random, n = 3', 'Full training, vit']
    assert plot.label_of(keys[2], keys[2:]) == 'Full training'


def test_runs_with_and_without_the_prefix_cache_are_told_apart(tmp_path):
    runs = [read_run(make_run(tmp_path, name, rho=rho, **changes)) for name, rho, changes in (
        ('cached', 0.25, dict(prefix_cache='on', views='held')),
        ('held', 0.5, dict(prefix_cache='off', views='held', train_images=160)),
        ('older', 0.5, {}))]
    assert {curve.label for curve in plot.curves_of(runs)} == {
        'ElasticTrainer, ρ = 0.25, held views, cache on', 'ElasticTrainer, ρ = 0.5',
        'ElasticTrainer, ρ = 0.5, held views, train_images 160, cache off'}


def test_a_selection_holds_until_the_next_one(tmp_path):
    folder = make_run(tmp_path, 'elastic')
    mask, share = selection_per_epoch(read_run(folder))
    assert mask.tolist() == [[bool(x) for x in MASKS[first]] for first in (1, 1, 3, 3)]
    assert share.tolist() == [SHARE] * EPOCHS
    output = tmp_path / 'map'
    paths = plot.selection_map(folder, output)
    assert_figure(paths, output)
    rows = read_csv(paths[2])
    assert len(rows) == EPOCHS * TENSORS
    for row in rows:
        first = 1 if int(row['epoch']) < 3 else 3
        assert int(row['selected']) == MASKS[first][int(row['tensor'])]
        assert float(row['time_share']) == SHARE[int(row['tensor'])]


def test_the_map_is_drawn_without_time_shares(tmp_path):
    paths = plot.selection_map(make_run(tmp_path, 'elastic', share=None), tmp_path / 'map')
    assert_figure(paths, tmp_path / 'map')
    assert {row['time_share'] for row in read_csv(paths[2])} == {''}


def test_timing_bars_write_the_table(tmp_path):
    paths = plot.timing_bars(stored(tmp_path), tmp_path / 'timings')
    assert_figure(paths, tmp_path / 'timings')
    rows = read_csv(paths[2])
    assert [row['name'] for row in rows] == TABLE['names']
    assert [float(row['t_dw_ms']) for row in rows] == TABLE['t_dw']
    assert [float(row['t_dy_ms']) for row in rows] == TABLE['t_dy']
    assert (rows[0]['t_fp_ms'], rows[0]['t_bp_ms'], rows[0]['t_update_ms']) == (
        '4.0', '7.5', '0.75')


def test_timing_bars_are_drawn_from_the_table_that_the_profiler_stores(tmp_path):
    path, table = str(tmp_path / 'timings.json'), branching_table(np.random.RandomState(0))
    table._replace(key={'model': 'branching'}).save(path)
    plot.main(['timings', path, '--output', str(tmp_path / 'figure')])
    rows = read_csv(str(tmp_path / 'figure.csv'))
    assert [row['name'] for row in rows] == list(table.names)
    assert {row['model'] for row in rows} == {'branching'}


@pytest.mark.parametrize('change, says', [
    ({'t_dy': None}, 'not a number'), ({'t_dw': [1.0, 2.0]}, '3 names, 2 t_dw'),
    ({'t_fp': float('nan')}, 'not a number'), ({'names': None}, 'no timing table'),
    ({'key': 7}, 'no timing table'), ({'names': [], 't_dw': [], 't_dy': []}, '0 names')])
def test_a_broken_timing_table_is_refused(tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        plot.timing_bars(stored(tmp_path, dict(TABLE, **change)), tmp_path / 'timings')
    with pytest.raises(UserError, match='lacks t_update'):
        plot.timing_bars(stored(tmp_path, {key: TABLE[key] for key in TABLE if key != 't_update'}),
                         tmp_path / 't')


def drop_rows(folder, name, keep):
    rows = (folder / name).read_text(encoding='utf-8').splitlines(True)
    (folder / name).write_text(''.join(rows[:keep]), encoding='utf-8')


def set_summary(folder, **changes):
    path = folder / 'summary.json'
    summary = json.loads(path.read_text(encoding='utf-8'))
    path.write_text(json.dumps(dict(summary, **changes)), encoding='utf-8')


BREAKS = {
    'unfinished: it has no': lambda run: (run / 'summary.json').unlink(),
    'cannot read .*summary.json': lambda run: (run / 'summary.json').write_text('{"scheme": '),
    'is not a JSON object': lambda run: (run / 'summary.json').write_text('[]'),
    'summary.json lacks scheme': lambda run: (run / 'summary.json').write_text('{}'),
    'scheme is magic_training': lambda run: set_summary(run, scheme='magic_training'),
    'finished is False': lambda run: set_summary(run, finished=False),
    'unfinished: epochs.csv has 3 of the 4': lambda run: drop_rows(run, 'epochs.csv', 4),
    'unfinished: epochs.csv has 0 of the 4': lambda run: drop_rows(run, 'epochs.csv', 1),
    'epochs.csv cannot be read': lambda run: (run / 'epochs.csv').unlink(),
    "epochs.csv, row 2: test_loss is ''": lambda run: edit_csv(
        run / 'epochs.csv', 2, 'test_loss', ''),
    "epochs.csv, row 3: test_accuracy is 'nan'": lambda run: edit_csv(
        run / 'epochs.csv', 3, 'test_accuracy', 'nan'),
    "epochs.csv, row 4: step_ms is 'fast'": lambda run: edit_csv(
        run / 'epochs.csv', 4, 'step_ms', 'fast'),
    'epochs.csv, row 2: epoch is 3': lambda run: edit_csv(run / 'epochs.csv', 2, 'epoch', '3'),
    'epochs.csv has no column train_seconds': lambda run: edit_csv(
        run / 'epochs.csv', 0, 'train_seconds', 'seconds'),
    'train_seconds does not grow': lambda run: edit_csv(
        run / 'epochs.csv', 3, 'train_seconds', '99.0'),
    'selections.csv has no column time_share': lambda run: edit_csv(
        run / 'selections.csv', 0, 'time_share', 'share'),
    "selections.csv, row 5: selected is ''": lambda run: edit_csv(
        run / 'selections.csv', 5, 'selected', ''),
    "selections.csv, row 2: tensor is 'x'": lambda run: edit_csv(
        run / 'selections.csv', 2, 'tensor', 'x'),
    'selection of epoch 3 does not name each of the tensors 0 to 8 once':
        lambda run: drop_rows(run, 'selections.csv', 2 * TENSORS),
    'selections of epochs 1 to 9': lambda run: edit_csv(run / 'selections.csv', 18, 'epoch', '9')}


@pytest.mark.parametrize('says', list(BREAKS))
def test_a_hole_names_the_run_and_leaves_old_figures(tmp_path, says):
    good, bad = make_run(tmp_path, 'good', 'full_training'), make_run(tmp_path, 'bad_run')
    figures = tmp_path / 'figures'
    plot.accuracy_over_time([good, bad], figures / 'curves')
    plot.selection_map(bad, figures / 'map')
    before = folder_content(figures)
    BREAKS[says](bad)
    for draw in (lambda: plot.accuracy_over_time([good, bad], figures / 'curves'),
                 lambda: plot.selection_map(bad, figures / 'map')):
        with pytest.raises(UserError, match="^run 'bad_run': .*" + says):
            draw()
    assert folder_content(figures) == before


def test_a_missing_run_is_named_with_the_nearest(tmp_path):
    make_run(tmp_path, 'elastic_seed0')
    with pytest.raises(UserError, match="run 'elastic_sed0': no folder .*'elastic_seed0'"):
        read_run(tmp_path / 'elastic_sed0')


def test_a_run_without_selections_has_no_map(tmp_path):
    with pytest.raises(UserError, match="run 'full': selections.csv is absent"):
        plot.selection_map(make_run(tmp_path, 'full', 'full_training'), tmp_path / 'map')


@pytest.mark.parametrize('key, value', [
    ('host', 'jetson'), ('dataset_name', 'digits'), ('stack', 'TensorFlow 2.7')])
def test_runs_that_do_not_compare_are_refused(tmp_path, key, value):
    first = make_run(tmp_path, 'first')
    second = make_run(tmp_path, 'second', 'full_training', **{key: value})
    with pytest.raises(UserError, match="run 'second' has {} {}, run 'first'".format(key, value)):
        plot.accuracy_over_time([first, second], tmp_path / 'curves')


def test_seeds_of_unequal_length_and_repeated_runs_are_refused(tmp_path):
    first = make_run(tmp_path, 'first')
    second = make_run(tmp_path, 'second', seed=1, epochs=3)
    drop_rows(second, 'epochs.csv', 4)
    with pytest.raises(UserError, match="run 'second' has epochs 3, run 'first' has 4"):
        plot.accuracy_over_time([first, second], tmp_path / 'curves')
    with pytest.raises(UserError, match="run 'first': given twice"):
        plot.accuracy_over_time([first, str(first) + '/'], tmp_path / 'curves')
    with pytest.raises(UserError, match='no run given'):
        plot.accuracy_over_time([], tmp_path / 'curves')


def test_a_figure_that_cannot_be_written_leaves_the_old_ones(tmp_path):
    figures = tmp_path / 'figures'
    plot.timing_bars(stored(tmp_path), figures / 'timings')
    before = folder_content(figures)
    with pytest.raises(AttributeError):  # fails in the middle of the drawing
        plot.write_figure(figures / 'timings', (7, 3), lambda figure: figure.no_such_method(),
                          ['a'], [])
    assert folder_content(figures) == before
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot write'):
        plot.timing_bars(stored(tmp_path), tmp_path / 'file' / 'timings')


def test_what_a_killed_drawing_left_is_gone_after_the_next(tmp_path):
    (tmp_path / '.timings.part.png').write_bytes(b'half')
    plot.timing_bars(stored(tmp_path), tmp_path / 'figure')
    (tmp_path / '.figure.part.pdf').write_bytes(b'half')
    plot.timing_bars(stored(tmp_path), tmp_path / 'figure')
    assert sorted(path.name for path in tmp_path.glob('.*')) == ['.timings.part.png']  # not its own


def test_labels_of_points_that_lie_together_cover_neither_each_other_nor_a_marker():
    points = [dict(model='m', label='a scheme ' + str(i), scheme='full_training', rho=None,
                   variant=False, learning_rate=0.1, n=1, accuracy=0.97 + 0.002 * (i % 3),
                   accuracy_se=float('nan'), seconds=100.0 + 3 * i, seconds_se=float('nan'))
              for i in range(5)]
    figure = Figure(figsize=(7.2, 4))
    axis = figure.add_subplot()
    _draw_points(axis, points)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axis.texts]
    at = axis.transData.transform([(p['seconds'], 100 * p['accuracy']) for p in points])
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not any(box.contains(*place) for box in boxes for place in at)


def test_main_draws_each_figure(tmp_path, capsys):
    logs = tmp_path / 'logs'
    make_run(logs, 'elastic')
    full = make_run(logs, 'full', 'full_training')
    (tmp_path / 'table.json').write_text(json.dumps(TABLE))
    for figure, inputs in (('curves', ['elastic', str(full)]), ('selection', ['elastic']),
                           ('timings', [str(tmp_path / 'table.json')])):
        output = str(tmp_path / figure)
        plot.main([figure] + inputs + ['--output', output, '--logs_dir', str(logs)])
        assert capsys.readouterr().out.split() == [
            output + end for end in ('.png', '.pdf', '.csv')]
    with pytest.raises(UserError, match='takes one input, given 2'):
        plot.main(['selection', 'elastic', 'full', '--output', output, '--logs_dir', str(logs)])
    with pytest.raises(UserError, match='cannot read .*absent.json'):
        plot.main(['timings', str(tmp_path / 'absent.json'), '--output', output])


def test_the_script_refuses_an_unknown_figure_at_once():
    """One line on stderr, status 2, the nearest name, and nothing heavy imported before."""
    code = ("import sys, command_line, plot\n"
            "try: command_line.run(plot.main, ['curve', 'run', '--output', 'x'])\n"
            "finally: print([m for m in ('matplotlib', 'tensorflow') if m in sys.modules])")
    result = subprocess.run([sys.executable, '-c', code], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True,
                            cwd=os.path.dirname(os.path.abspath(plot.__file__)))
    assert result.returncode == 2 and result.stdout.split() == ['[]']
    assert result.stderr == ("error: unknown figure 'curve' (did you mean 'curves'?); allowed: "
                             'curves, selection, timings\n')


def test_accuracy_against_time_draws_a_panel_a_model_and_writes_every_point(tmp_path):
    points = [dict(model=model, label=label, scheme=scheme, rho=rho, variant=variant, n=n,
                   learning_rate=0.02 if 'lr' in label else 0.01, accuracy=accuracy,
                   accuracy_se=error, seconds=seconds, seconds_se=error)
              for model in ('mobilenetv2', 'MobileNet')
              for label, scheme, rho, variant, n, accuracy, seconds, error in (
                  ('full', 'full_training', None, False, 3, 0.98, 80.0, 0.01),
                  ('elastic 0.5', 'elastic_training', 0.5, False, 1, 0.97, 41.0, float('nan')),
                  ('elastic 0.5, lr 0.02', 'elastic_training', 0.5, False, 1, 0.975, 42.0,
                   float('nan')),
                  ('elastic 0.7', 'elastic_training', 0.7, False, 3, 0.98, 56.0, 0.01),
                  ('elastic 0.5, random', 'elastic_training', 0.5, True, 1, 0.9, 40.0,
                   float('nan')))]
    paths = accuracy_against_time(points, str(tmp_path / 'accuracy'))
    assert [os.path.splitext(path)[1] for path in paths] == ['.png', '.pdf', '.csv']
    rows = read_csv(paths[2])
    assert [(row['model'], row['label']) for row in rows] == [
        (point['model'], point['label']) for point in points]
    assert float(rows[0]['accuracy_se']) == 0.01 and rows[1]['accuracy_se'] == ''
    assert [row['learning_rate'] for row in rows[:3]] == ['0.01', '0.01', '0.02']
    axis = Figure().subplots()
    _draw_points(axis, points[:4])
    joined, = [line for line in axis.lines if line.get_linestyle() == '-']
    assert list(joined.get_xdata()) == [41.0, 56.0]  # rho at the rate of all schemes
    with pytest.raises(UserError, match='no run'):
        accuracy_against_time([], str(tmp_path / 'nothing'))
