"""Tests that the paper's figures show the numbers of the records, and nothing else."""

import numpy as np
import pytest

import paper_plots
from elastic.errors import UserError
from elastic.runs.folder import read_run
from made_runs import EPOCHS, MASKS, TENSORS, assert_figure, edit_csv, make_run, read_csv

SCHEMES = ('full_training', 'traditional_tl_training', 'bn_plus_bias_training', 'elastic_training')
DATA = ('caltech_birds2011', 'oxford_iiit_pet')


def grid(logs, seeds=1, **changes):
    """Makes runs of four schemes on two data sets; elastic training takes half the time."""
    return [make_run(logs, '{}_{}_{}'.format(data, scheme, seed), scheme, seed=seed,
                     dataset_name=data, step_seconds=(60 if scheme == SCHEMES[0] else 30) + seed,
                     accuracy=0.6 + 0.1 * seed, train_seconds=4.0 * (
                         (60 if scheme == SCHEMES[0] else 30) + seed), **changes)
            for data in DATA for scheme in SCHEMES for seed in range(seeds)]


def test_curves_have_a_column_for_each_data_set(tmp_path):
    paths = paper_plots.curve_grid(grid(tmp_path / 'logs', seeds=2), tmp_path / 'figure15')
    assert_figure(paths, tmp_path / 'figure15')
    rows = read_csv(paths[2])
    assert len(rows) == len(DATA) * len(SCHEMES) * EPOCHS
    last = [row for row in rows if row['dataset_name'] == DATA[1] and row['epoch'] == str(EPOCHS)
            and row['scheme'] == 'elastic_training'][0]
    assert float(last['test_accuracy_mean']) == pytest.approx(0.65 * (1 - 0.5 ** EPOCHS))
    assert float(last['train_seconds_mean']) == pytest.approx(30.5 * EPOCHS) and last['n'] == '2'


def test_bars_show_every_configuration_once(tmp_path):
    runs = [make_run(tmp_path / 'logs', 'rho{}_{}'.format(rho, seed), rho=rho, seed=seed,
                     accuracy=rho + 0.1 * seed, train_seconds=100 * rho)
            for rho in (0.35, 0.5) for seed in (0, 1)]
    runs += [make_run(tmp_path / 'logs', scheme, scheme, train_seconds=100.0)
             for scheme in SCHEMES[:3] + ('prune_training',)]
    paths = paper_plots.bars(runs, tmp_path / 'figure17')
    assert_figure(paths, tmp_path / 'figure17')
    rows = {(row['scheme'], row['rho']): row for row in read_csv(paths[2])}
    assert len(rows) == 6
    half = rows['elastic_training', '0.5']
    assert (half['n'], float(half['train_seconds_mean'])) == ('2', 50)
    assert float(half['final_accuracy_mean']) == pytest.approx(0.55)
    assert float(half['final_accuracy_std']) == pytest.approx(0.1 / 2 ** 0.5)


@pytest.mark.thorough
def test_the_energy_figure_shows_energy_or_says_that_it_is_missing(tmp_path):
    measured = grid(tmp_path / 'measured', energy_joules=1500.0, energy_source='rail VDD_IN',
                    energy_note=None)
    paths = paper_plots.energy_bars(measured, tmp_path / 'figure23')
    assert_figure(paths, tmp_path / 'figure23')
    assert {(row['energy_joules_mean'], row['energy_source']) for row in read_csv(paths[2])} == {
        ('1500.0', 'rail VDD_IN')}
    without = grid(tmp_path / 'without', energy_joules=None, energy_note='no power sensor found')
    paths = paper_plots.energy_bars(without, tmp_path / 'none')
    assert_figure(paths, tmp_path / 'none')
    assert {row['energy_joules_mean'] for row in read_csv(paths[2])} == {''}
    with pytest.raises(UserError, match="run '{}_full_training_0' has no energy".format(DATA[0])):
        paper_plots.energy_bars(measured[:2] + without[:2], tmp_path / 'figure23')


@pytest.mark.thorough
def test_similarity_is_the_cosine_of_successive_importances(tmp_path):
    run = make_run(tmp_path / 'logs', 'run', interval=2, probe_batches=1, train_seconds=200.0,
                   importance_seconds=4.0)
    vectors = np.random.RandomState(0).randn(2, TENSORS)
    for epoch, vector in zip(sorted(MASKS), vectors):
        for tensor, value in enumerate(vector):
            row = 1 + sorted(MASKS).index(epoch) * TENSORS + tensor
            edit_csv(run / 'selections.csv', row, 'importance', value)
    paths = paper_plots.importance_stability([run], tmp_path / 'figure7')
    assert_figure(paths, tmp_path / 'figure7')
    row, = read_csv(paths[2])
    a, b = vectors
    alike = a @ b / (a @ a * (b @ b)) ** 0.5
    assert float(row['similarity_mean']) == pytest.approx(alike)
    assert float(row['importance_share_of_time_mean']) == pytest.approx(0.02)
    assert (row['n'], row['similarity_std']) == ('1', '')
    second = make_run(tmp_path / 'logs', 'second', seed=1, interval=2, probe_batches=1,
                      train_seconds=200.0, importance_seconds=8.0)  # the importances are equal
    for row in (1, 1 + TENSORS):
        edit_csv(second / 'selections.csv', row, 'importance', 0.0)
    paths = paper_plots.importance_stability([run, second], tmp_path / 'figure7')
    row, = read_csv(paths[2])
    assert float(row['similarity_mean']) == pytest.approx((alike + 1) / 2)
    assert float(row['similarity_std']) == pytest.approx((1 - alike) / 2 ** 0.5)
    assert float(row['importance_share_of_time_mean']) == pytest.approx(0.03) and row['n'] == '2'


def test_a_run_with_one_evaluation_has_no_similarity(tmp_path):
    run = make_run(tmp_path / 'logs', 'drifted', interval=4, probe_batches=1, train_seconds=200.0,
                   importance_seconds=4.0)
    assert len(paper_plots.importances(read_run(run))) == 1
    with pytest.raises(UserError, match="run 'drifted' selected once"):
        paper_plots.importance_stability([run], tmp_path / 'figure7')


def test_selections_have_a_panel_for_each_data_set_and_several_seeds_their_share(tmp_path):
    runs = [make_run(tmp_path / 'logs', data, dataset_name=data) for data in DATA]
    runs.append(make_run(tmp_path / 'logs', 'seed1', dataset_name=DATA[1], seed=1))
    for row in range(len(MASKS) * TENSORS):  # the second seed always trains all
        edit_csv(runs[2] / 'selections.csv', 1 + row, 'selected', 1)
    paths = paper_plots.selection_panels(runs, tmp_path / 'figure21')
    assert_figure(paths, tmp_path / 'figure21')
    rows = read_csv(paths[2])
    assert len(rows) == len(DATA) * EPOCHS * TENSORS
    for row in rows:
        trained, seeds = MASKS[1 if int(row['epoch']) < 3 else 3][int(row['tensor'])], 1
        if row['dataset_name'] == DATA[1]:
            trained, seeds = (trained + 1) / 2, 2
        assert (float(row['selected']), row['n']) == (trained, str(seeds))


@pytest.mark.parametrize('draw', [paper_plots.curve_grid, paper_plots.bars,
                                  paper_plots.energy_bars, paper_plots.selection_panels,
                                  paper_plots.importance_stability])
def test_runs_of_two_devices_do_not_share_a_figure(tmp_path, draw):
    keys = dict(train_seconds=1.0, interval=2, probe_batches=1, importance_seconds=0.1)
    runs = [make_run(tmp_path / 'logs', 'pi', **keys),
            make_run(tmp_path / 'logs', 'tx2', seed=1, host='tx2', **keys)]
    (tmp_path / 'old.png').write_text('kept')
    with pytest.raises(UserError, match="run 'tx2' has host tx2, run 'pi' has pi4b"):
        draw(runs, tmp_path / 'old')
    with pytest.raises(UserError, match="run 'pi': given twice"):
        draw([runs[0], str(runs[0]) + '/'], tmp_path / 'old')
    assert (tmp_path / 'old.png').read_text() == 'kept'
