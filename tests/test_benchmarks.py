"""Tests the flags, tables, goals and comparisons of the benchmarks."""

import argparse
import json
import os
import re
import subprocess
import sys

import _accuracy_rows
import _accuracy_table
import _bench
import _selector_graph as graph
import _solar_cells
import accuracy
import achieved_speedup
import numpy as np
import overhead
import prefix_cache
import pytest
import scipy.optimize
import selector
import throttling
import time_model

import main
import profiler
from cached_runs import SIZE, digits, network
from elastic.errors import UserError
from elastic.runs.folder import Run
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from fixed_tables import fixed_profile

BENCHMARKS = os.path.dirname(os.path.abspath(_bench.__file__))
MOBILENET = _accuracy_rows.NETWORKS['mobilenetv2']


# ---------------------------------------------------------------- _bench.py

@pytest.mark.parametrize('slowdowns, kept', [
    ([1, 1.1, 1.14, 1.02], [0, 1, 2, 3]), ([1.35, 1.4, 1.0, 1.02, 1.38, 1.05, 1.41], [2, 3, 5]),
    ([3, 1, 2, 4], [0, 1, 2])], ids=['quiet', 'slow spells', 'the quickest three stay'])
def test_slow_spells_of_the_whole_machine_are_dropped(slowdowns, kept):
    ms = np.outer(slowdowns, (40.0, 13.0, 0.5))  # of three functions, in each round
    np.testing.assert_array_equal(_bench.undisturbed(ms), ms[kept])


# ---------------------------------------------------------------- selector.py

def test_selector_benchmark_prints_a_table_and_writes_its_numbers(tmp_path, capsys):
    path = tmp_path / 'new' / 'selector.json'
    assert not selector.main(['--tensors', '7', '9', '--repeats', '2', '--json', str(path)])
    output = capsys.readouterr().out
    rows = json.loads(path.read_text())['rows']
    assert [(row['tensors'], row['bins_exact']) for row in rows] == (
        [(7, 10_000), (7, 1000)] * 3 + [(9, 10_000), (9, 1000)] * 3)
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    assert all(row['exact_time_share'] <= 1 for row in rows)
    assert 'Target not measured' in output


def test_selector_graph_compares_with_the_true_optimum():
    random = np.random.default_rng(0)
    for _ in range(5):
        table, importance = graph.draw_table(7, random), graph.draw_instance(7, 1)[2]
        rho = 0.5 + 0.5 * graph.smallest_rho(table)
        tried = graph.gaps(table, importance, rho, graph.by_trying_all)
        assert min(tried.values()) > -1e-9
        if hasattr(scipy.optimize, 'milp'):  # HiGHS, from SciPy 1.9 on
            assert graph.gaps(table, importance, rho, graph.by_highs) == pytest.approx(
                tried, abs=1e-4)
    rows = [graph.small_gaps(tangled, 0, 10, 7) for tangled in (False, True)]
    for row in rows:
        assert row['chosen']['worst'] <= row['chain, filled']['worst'] <= row['chain']['worst']
    times = [graph.selection_time(n, 0, 1) for n in (9, 30)]
    assert 'at most 50 at 1000' in selector.graph_report(times, rows)[0]


# ---------------------------------------------------------------- steps of a network

def small_network(name, input_size, seed=0, **_):
    """Replaces _bench.prepare; returns the Prepared small network."""
    model = network()
    images, labels = next(iter(digits().train))
    maker = StepMaker(model, make_optimizer('sgd', 1e-6, 1000, model.trainable_variables), 0.0,
                      images, labels)
    return _bench.Prepared(model, maker, images, labels, len(labels))


@pytest.mark.parametrize('module, flags, columns', [
    (overhead, ['--selections', '4'], '32 +8'),
    (time_model, ['--masks', '2', '--rounds', '3'], '32 +8 +2'),
    (achieved_speedup, ['--rhos', '1', '--rounds', '3'], r'1\.00 +\d+/10'),
    (prefix_cache, ['--rhos', '1', '--rounds', '3'], r'1\.00 +memory'),
    (throttling, ['--rounds', '3'], 'one core')])
@pytest.mark.thorough
def test_a_benchmark_of_steps_prints_and_writes_its_result(module, flags, columns, tmp_path,
                                                           monkeypatch, capsys):
    monkeypatch.setattr(_bench, 'prepare', small_network)
    monkeypatch.setattr(profiler, 'profile_model', fixed_profile)
    monkeypatch.setattr(_bench, 'in_own_process', lambda module, function, *arguments: getattr(
        sys.modules[module], function)(*arguments))
    monkeypatch.setattr(overhead, 'PLAIN_ROUNDS', 3)
    monkeypatch.setattr(throttling, 'HOGS', {})
    path = str(tmp_path / 'result.json')
    assert module.main(['--models', 'small@{}'.format(SIZE), '--json', path] + flags) == 0
    assert re.search('^small +' + columns, capsys.readouterr().out, re.M)
    with open(path) as file:
        result, = json.load(file)
    assert result['model'] == 'small'


REFUSALS = """
import importlib, os, sys
from elastic import command_line
folder, *names = sys.argv[1:]
for name in names:
    for argv in (['--seed', '-1'], ['--json', folder], ['--help']):
        sys.argv[0] = name + '.py'
        try:
            command_line.run(importlib.import_module(name).main, argv)
        except SystemExit as end:
            sys.stdout.flush()
            print('status', end.code, file=sys.stderr, flush=True)
"""


def test_benchmarks_refuse_bad_flags_before_they_load_tensorflow(tmp_path):
    names = ['time_model', 'achieved_speedup', 'overhead', 'throttling', 'importance', 'selector',
             'accuracy', 'prefix_cache', 'views', 'graphs']
    (tmp_path / 'tensorflow.py').write_text('raise SystemExit("TensorFlow was loaded")')
    root = os.path.dirname(BENCHMARKS)
    done = subprocess.run(
        [sys.executable, '-c', REFUSALS, str(tmp_path)] + names, cwd=str(tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), BENCHMARKS, root])))
    assert re.findall(r'^status (.*)', done.stderr, re.M) == ['2', '2', '0'] * len(names)
    assert done.stderr.count('argument --seed: -1 is not a whole number') == len(names)
    assert done.stderr.count("error: --json '{}' is not a file that can be written\n".format(
        tmp_path)) == len(names)
    assert len(re.findall(r'^  --json PATH', done.stdout, re.M)) == len(names)


# ---------------------------------------------------------------- accuracy.py

def test_accuracy_benchmark_pairs_runs_by_seed_and_judges_them():
    def runs(final, seconds):
        return {seed: Run(dict(
            final_accuracy=a, best_accuracy=a, train_seconds=s, peak_memory_mb=500.0,
            step_seconds=s - 5, selection_seconds=s / 10, host='pi', stack='2.21',
            energy_joules=None), {'train_seconds': [s / 2, s], 'test_accuracy': [0.94, a]}, [])
                for seed, (a, s) in enumerate(zip(final, seconds))}
    made = {'full': runs([0.96, 0.98, 0.97], [100, 110, 90]),
            'head only': runs([0.6] * 3, [30] * 3), 'BN + bias': runs([0.9] * 3, [80] * 3),
            'elastic 0.5': runs([0.955, 0.975, 0.965], [50, 55, 45])}
    del made['BN + bias'][1]
    results = [accuracy.result_of(MOBILENET, row, made[row.label], made['full'])
               for row in _accuracy_rows.rows_of(MOBILENET, False) if row.label in made]
    output = accuracy.report(results)
    full, _, bias, elastic = results
    assert [result['label'] for result in results] == list(made)
    assert elastic['to_full'] == pytest.approx(-0.005) and elastic['to_full_se'] < 1e-9
    assert elastic['speed_up'] == pytest.approx(2.0) and elastic['n'] == 3
    assert elastic['steps_speed_up'] == pytest.approx((95 / 45 + 105 / 50 + 85 / 40) / 3)
    assert elastic['selection_seconds'] == pytest.approx(5) and ' 5.0 ' in output
    assert bias['n'] == 2 and bias['to_full'] == pytest.approx((0.9 - 0.96 + 0.9 - 0.97) / 2)
    assert full['reached'][0] == [50, 55, 45]  # 95 % is reached after the first epoch
    assert np.isnan(bias['reached'][1]).all() and 'never' in output
    verdict = _accuracy_table.verdict(elastic, results)
    assert '-0.5 (-1)' in verdict and '+36.5 ± 0.6 to head only' in verdict
    assert 'MISSED' not in verdict
    assert '± 0.6' in output  # the standard error of 96, 98, 97


def test_accuracy_benchmark_trains_the_rows_asked_for_and_full_training():
    repeated = _accuracy_rows.NETWORKS['mobilenetv2_repeated']
    with pytest.raises(UserError, match="--rows 'elastic 0.4' is no row of mobilenetv2_repeated; "
                                        "allowed: .*'elastic 0.25'"):
        _accuracy_rows.rows_for(repeated, argparse.Namespace(
            quick=False, tune=False, rows=['elastic 0.4']))
    args = argparse.Namespace(quick=False, tune=True, rows=['elastic 0.25'])
    assert [row.label for row in _accuracy_rows.rows_for(repeated, args)] == args.rows
    args.tune = False
    rows = _accuracy_rows.rows_for(repeated, args)
    assert [row.label for row in rows] == ['full', 'elastic 0.25']


def test_with_the_cache_a_shorter_full_training_is_an_opponent():
    def result(label, scheme, accuracy, seconds, rho=None, cached=False):
        return dict(label=label, scheme=scheme, accuracy=accuracy, seconds=seconds, rho=rho,
                    cached=cached, cached_goals=_accuracy_table.CACHED_GOALS,
                    variant=',' in label and rho is not None, accuracies={0: accuracy},
                    to_full=accuracy - 0.98, flags=[], speed_up=100 / seconds)
    elastic = [result('elastic {:g}'.format(rho), 'elastic_training', final, 100 * rho + 1, rho,
                      True) for rho, final in ((0.5, 0.975), (0.25, 0.95))]
    half, quarter = [_accuracy_table.in_a_part(n) for n in (2, 4)]
    results = elastic + [result(half, 'full_training', 0.96, 55),
                         result(quarter, 'full_training', 0.9, 29),
                         result('head only', 'traditional_tl_training', 0.97, 20, cached=True)]
    opponents = [[other['label'] for other in _accuracy_table.opponents(each, results)]
                 for each in elastic]
    assert opponents == [[half, quarter, 'head only'], [quarter, 'head only']]
    assert [_accuracy_table.verdict(each, results) for each in elastic] == [
        '-0.5 (-0.7); 1.96x (1.9); +0.5 to head only',
        '-3.0 (-4); 3.85x (3.5); -2.0 to head only MISSED']


def test_solar_cells_become_folders_of_classes_and_neighbours_stay_on_one_side(
        tmp_path, monkeypatch):
    with pytest.raises(UserError, match='pip install no-such-package'):
        _solar_cells.write_cells(str(tmp_path / 'cells'), package='no-such-package')
    images = tmp_path / 'site' / 'elpv_dataset' / 'data' / 'images'
    images.mkdir(parents=True)
    (images.parent.parent / '__init__.py').write_text('')
    lines = []
    for number, probability in ((1, 1.0), (2, 0.3), (240, 0.0), (241, 0.0), (300, 0.7), (301, 1.0)):
        (images / 'cell{:04d}.png'.format(number)).write_bytes(bytes([number % 256]))
        lines.append('images/cell{:04d}.png  {}    mono'.format(number, probability))
    (images.parent / 'labels.csv').write_text('\n'.join(lines) + '\n')
    monkeypatch.syspath_prepend(str(tmp_path / 'site'))
    _solar_cells.write_cells(str(tmp_path / 'cells'))
    made = sorted(str(path.relative_to(tmp_path / 'cells'))
                  for path in (tmp_path / 'cells').glob('*/*/*'))
    assert made == ['test/defective/0300.png', 'test/functional/0241.png',
                    'train/defective/0001.png', 'train/defective/0301.png',
                    'train/functional/0002.png', 'train/functional/0240.png']
    assert (tmp_path / 'cells' / made[0]).read_bytes() == bytes([300 % 256])
    _solar_cells.write_cells(str(tmp_path / 'tuning'), tuning=True)
    assert sorted(str(path.relative_to(tmp_path / 'tuning'))
                  for path in (tmp_path / 'tuning').glob('*/*/*')) == [
        'test/functional/0240.png', 'train/defective/0001.png', 'train/defective/0301.png',
        'train/functional/0002.png']  # no cell of the other test/


def test_accuracy_benchmark_asks_for_runs_that_main_accepts():
    found = []
    for i, each in enumerate(_accuracy_rows.NETWORKS.values()):
        rows = _accuracy_rows.rows_of(each, i == 0) + [_accuracy_rows.stronger(each)]
        parsed = [main.parse_arguments(accuracy.flags_of(each, row, 3)) for row in rows]
        assert len({args.run_name for args in parsed}) == len(rows)
        assert not any('/' in args.run_name for args in parsed)  # each run has one folder
        assert len({json.dumps(dict(vars(args), run_name=None)) for args in parsed}) == len(rows)
        assert {args.seed for args in parsed} == {3}
        assert [args.prefix_cache == 'auto' for args in parsed] == [row.cached for row in rows]
        found.append({row.label: vars(args) for row, args in zip(rows, parsed)})
    rates = {label: args['learning_rate'] for label, args in found[0].items()}
    own = {label: rates.pop(label) for label in list(rates) if ', lr ' in label}
    assert set(rates.values()) == {rates['full']}  # all are equal unless the label says otherwise
    assert 'head only, lr 0.1' in own
    assert own == {label: float(label.split()[-1]) for label in own}
    for of_network in (found[0], found[2]):
        assert of_network['elastic 0.35']['weights'].endswith(
            'mobilenetv2_source_seed3/checkpoint/weights.npz')
