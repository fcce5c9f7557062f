"""Tests that the numbers of figures equal the records, and that their files are complete."""

import pytest
from matplotlib.figure import Figure

import plot
from benchmarks._accuracy_figure import accuracy_against_time
from elastic.errors import UserError
from elastic.runs.folder import read_run, selection_per_epoch
from elastic.runs.labels import label_of
from elastic.settings import VARIED
from made_runs import (
    EPOCHS,
    MASKS,
    SHARE,
    TENSORS,
    assert_figure,
    edit_csv,
    make_run,
    read_csv,
    watched_figures,
)
from small_runs import script
from timing_tables import stored


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
    for column in ('train_seconds', 'test_accuracy', 'test_loss'):
        assert [float(row[column + '_mean']) for row in rows[-EPOCHS:]] == elastic[column]
    assert {(row['n'], row['test_accuracy_std']) for row in rows} == {('1', '')}
    assert (rows[-1]['rho'], rows[0]['rho']) == ('0.5', '')


def test_seeds_become_a_mean_and_a_sample_standard_deviation(tmp_path):
    values = [(0.70, 40.0), (0.80, 50.0), (0.84, 63.0)]
    runs = [make_run(tmp_path, 'seed{}'.format(seed), seed=seed, accuracy=accuracy,
                     step_seconds=seconds) for seed, (accuracy, seconds) in enumerate(values)]
    runs.append(make_run(tmp_path, 'other', rho=0.4, accuracy=0.6))
    rows = read_csv(plot.accuracy_over_time(runs, str(tmp_path / 'curves.png'))[2])
    assert [(row['rho'], row['n']) for row in rows[::EPOCHS]] == [('0.4', '1'), ('0.5', '3')]
    last = rows[-1]
    # By hand: mean 0.78; squares of 0.08, 0.02, 0.06 sum to 0.0104, over n - 1 = 2; times 15/16.
    assert float(last['test_accuracy_mean']) == pytest.approx(0.78 * 15 / 16)
    assert float(last['test_accuracy_std']) == pytest.approx((0.0104 / 2) ** 0.5 * 15 / 16)
    # The mean is 51, the squares sum to 121 + 1 + 144 = 266; times 4 epochs.
    assert float(last['train_seconds_mean']) == pytest.approx(204)
    assert float(last['train_seconds_std']) == pytest.approx(133 ** 0.5 * 4)


@pytest.mark.parametrize('loss, scale', [(1.5, 'linear'), (80000, 'log')])
def test_a_loss_that_nearly_exploded_makes_the_axis_logarithmic(tmp_path, loss, scale):
    run = make_run(tmp_path, 'run')
    edit_csv(run / 'epochs.csv', 1, 'test_loss', loss)
    accuracy_axis, loss_axis = Figure().subplots(2)
    plot.draw_panels(accuracy_axis, loss_axis, plot.curves_of([read_run(run)]), 1)
    assert (accuracy_axis.get_yscale(), loss_axis.get_yscale()) == ('linear', scale)


def test_labels_show_the_prefix_cache(tmp_path):
    runs = [read_run(make_run(tmp_path, name, rho=rho, **changes)) for name, rho, changes in (
        ('cached', 0.25, dict(prefix_cache='on', views='held')),
        ('held', 0.5, dict(prefix_cache='off', views='held', train_images=160)),
        ('plain', 0.5, {}))]
    assert {curve.label for curve in plot.curves_of(runs)} == {
        'ElasticTrainer, ρ = 0.25, held views, cache on', 'ElasticTrainer, ρ = 0.5',
        'ElasticTrainer, ρ = 0.5, held views, train_images 160, cache off'}


def test_runs_with_validation_images_are_drawn_by_these(tmp_path, drawn):
    """A run that ended early stays where it ended; the legend has the accuracy on test images."""
    judged = dict(validation_share=0.2, keep='best', patience=2, validation_accuracy=0.8)
    runs = [make_run(tmp_path, 'whole', step_seconds=50.0, final_accuracy=0.6, **judged),
            make_run(tmp_path, 'early', seed=1, step_seconds=30.0, final_accuracy=0.7, epochs=3,
                     **judged)]
    rows = read_csv(plot.accuracy_over_time(runs, tmp_path / 'curves')[2])
    assert [float(row['train_seconds_mean']) for row in rows] == [40, 80, 120, 145]
    ends = [0.8 * 15 / 16, 0.8 * 7 / 8]
    assert float(rows[-1]['validation_accuracy_mean']) == pytest.approx(sum(ends) / 2)
    assert not {'test_accuracy_mean', 'test_loss_mean'} & set(rows[0])
    assert [axis.get_ylabel() for axis in drawn().axes] == [
        'validation accuracy (%)', 'validation loss']
    assert [text.get_text() for text in drawn().legends[0].texts] == [
        'ElasticTrainer, ρ = 0.5, n = 2: test 65.0 ± 7.1 % in 145.0 s']
    runs.append(make_run(tmp_path, 'by_test_images'))
    with pytest.raises(UserError, match='by_test_images.* has validation_share None'):
        plot.accuracy_over_time(runs, tmp_path / 'curves')


@pytest.fixture
def drawn(monkeypatch):
    """Returns a function that returns the last Figure written."""
    figures = watched_figures(monkeypatch)
    return lambda: figures[-1]


def marks_of(axis):
    """Returns [(x, y)] of the marks of throttled epochs in a panel."""
    return [list(zip(*line.get_data())) for line in axis.lines if line.get_marker() == 'x']


def test_curves_mark_throttled_epochs(tmp_path, drawn):
    runs = [make_run(tmp_path, 'cool', throttled=[]),
            make_run(tmp_path, 'hot', throttled=[2, 4], seed=1, step_seconds=60.0),
            make_run(tmp_path, 'full', 'full_training')]
    rows = read_csv(plot.accuracy_over_time(runs, tmp_path / 'curves')[2])
    assert [row['throttled'] for row in rows] == ['0'] * EPOCHS + ['0', '1', '0', '1']
    for axis, column, scale in zip(drawn().axes, ('test_accuracy', 'test_loss'), (100, 1)):
        (first, second), = marks_of(axis)
        assert first == pytest.approx([110 / 60, scale * float(rows[5][column + '_mean'])])
        assert second == pytest.approx([220 / 60, scale * float(rows[7][column + '_mean'])])
    texts = [text.get_text() for text in drawn().legends[0].texts]
    assert texts[2:] == ['throttled'] and len(texts) == 3


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


def test_main_draws_each_figure(tmp_path, capsys):
    logs = tmp_path / 'logs'
    make_run(logs, 'elastic')
    full = make_run(logs, 'full', 'full_training')
    for figure, inputs in (('curves', ['elastic', str(full)]), ('selection', ['elastic']),
                           ('timings', [stored(tmp_path)])):
        output = str(tmp_path / figure)
        plot.main([figure] + inputs + ['--output', output, '--logs_dir', str(logs)])
        assert capsys.readouterr().out.split() == [
            output + end for end in ('.png', '.pdf', '.csv')]
    with pytest.raises(UserError, match='takes one input; 2 given'):
        plot.main(['selection', 'elastic', 'full', '--output', output, '--logs_dir', str(logs)])
    with pytest.raises(UserError, match='cannot read .*absent.json'):
        plot.main(['timings', str(tmp_path / 'absent.json'), '--output', output])
    plot.main(['table', 'elastic', str(full), '--logs_dir', str(logs)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ['elastic_training', 'full_training']
    for arguments in (['table', 'full', '--output', output], ['curves', 'full']):
        with pytest.raises(UserError, match='a figure needs --output .* takes no --output'):
            plot.main(arguments + ['--logs_dir', str(logs)])


def test_an_unknown_figure_is_refused_at_once():
    """It prints one line with the nearest name, exits with 2, and imports nothing heavy."""
    code = ("import sys, plot; from elastic import command_line\n"
            "try: command_line.run(plot.main, ['curve', 'run', '--output', 'x'])\n"
            "finally: print([m for m in ('matplotlib', 'tensorflow') if m in sys.modules])")
    assert script('-c', code) == (
        2, '[]\n', "error: unknown figure 'curve' (did you mean 'curves'?); allowed: "
        'curves, selection, confusion, timings, devices, rates, forgetting, table\n')


def test_accuracy_against_time_has_all_points_and_joins_those_of_one_rate(tmp_path, monkeypatch):
    figures = watched_figures(monkeypatch)
    points = [dict(model='mobilenetv2', label=label, scheme=scheme, rho=rho, variant=variant, n=n,
                   learning_rate=0.02 if 'lr' in label else 0.01, accuracy=accuracy,
                   accuracy_se=error, seconds=seconds, seconds_se=error)
              for label, scheme, rho, variant, n, accuracy, seconds, error in (
                  ('full', 'full_training', None, False, 3, 0.98, 80.0, 0.01),
                  ('elastic 0.5', 'elastic_training', 0.5, False, 1, 0.97, 41.0, float('nan')),
                  ('elastic 0.5, lr 0.02', 'elastic_training', 0.5, False, 1, 0.975, 42.0,
                   float('nan')),
                  ('elastic 0.7', 'elastic_training', 0.7, False, 3, 0.98, 56.0, 0.01),
                  ('elastic 0.5, random', 'elastic_training', 0.5, True, 1, 0.9, 40.0,
                   float('nan')))]
    rows = read_csv(accuracy_against_time(points, str(tmp_path / 'accuracy'))[2])
    assert [(row['label'], float(row['accuracy'])) for row in rows] == [
        (point['label'], point['accuracy']) for point in points]
    assert float(rows[0]['accuracy_se']) == 0.01 and rows[1]['accuracy_se'] == ''
    joined, = [line for line in figures[0].axes[0].lines if line.get_linestyle() == '-']
    assert list(joined.get_xdata()) == [41.0, 56.0]
    with pytest.raises(UserError, match='no run'):
        accuracy_against_time([], str(tmp_path / 'nothing'))


@pytest.mark.parametrize('rate, shown', [(0.0, 'rate 0'), (0.003, 'rate 0.003'),
                                         ('auto', 'rate auto')])
def test_a_rate_is_shown_as_people_write_it(rate, shown):
    keys = [('full_training', None, 'mobilenetv2') + tuple(
        value if name == 'learning_rate' else None for name in VARIED) for value in (rate, 0.5)]
    assert label_of(keys[0], keys).split(', ')[-1] == shown
