"""The shell scripts parse; the benchmarks: arguments, output."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPTS = os.path.join(ROOT, 'scripts')


def run(*command, **options):
    """(status, stdout, stderr)."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=120, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize('script', sorted(
    os.path.join(SCRIPTS, name) for name in os.listdir(SCRIPTS) if name.endswith('.sh')
) + [os.path.join(ROOT, '.ci', 'run')], ids=os.path.basename)
def test_script_parses(script):
    assert run('bash', '-n', script) == (0, '', '')
    assert os.path.basename(script).startswith('_') or os.access(script, os.X_OK)


def test_selector_benchmark_prints_a_table_and_writes_its_numbers(tmp_path):
    path = tmp_path / 'new' / 'selector.json'
    status, output, errors = run(
        sys.executable, os.path.join(ROOT, 'benchmarks', 'selector.py'), '--tensors', 7, 9,
        '--repeats', 2, '--json', path, cwd=str(tmp_path),
        env=dict(os.environ, PYTHONIOENCODING='utf-8'))
    assert status == 0, errors
    rows = json.loads(path.read_text())['rows']
    assert [(row['tensors'], row['bins_exact']) for row in rows] == (
        [(7, 10_000), (7, 1000)] * 3 + [(9, 10_000), (9, 1000)] * 3)
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    assert all(row['exact_time_share'] <= 1 for row in rows)
    lines = output.splitlines()
    assert len({len(line) for line in lines[:2 + len(rows)]}) == 1, 'the columns are not aligned'
    assert lines[0].split('  ')[0].strip() == 'N'
    assert 'Target not measured' in output


def test_selector_limits_extrapolate_the_recursion_beyond_its_time(tmp_path):
    code = """
import json, selector
selector.RESOLUTIONS, selector.PAPER_SECONDS = (10, 1000), 0
drawn = {str(n): selector.draw_instance(n, 0) for n in (5, 10)}
rows = selector.limits(drawn, lambda: None)
print(selector.limits_report(rows))
print(json.dumps(rows))"""
    status, output, errors = run(sys.executable, '-c', code, cwd=str(tmp_path), env=dict(
        os.environ, PYTHONPATH=os.path.join(ROOT, 'benchmarks')))
    assert status == 0, errors
    rows = json.loads(output.splitlines()[-1])
    assert [row['paper_measured'] for row in rows] == [True, True, False, False]
    assert rows[3]['paper_seconds'] == pytest.approx(4 * rows[1]['paper_seconds'])
    assert [max(row['value_ratio'] for row in rows[i:i + 2]) for i in (0, 2)] == [1, 1]
    assert output.count('~') == 3  # two estimates and the line that explains them


def test_selector_graph_measures_against_the_true_optimum(tmp_path):
    code = """
import json, numpy as np, scipy.optimize, selector, _selector_graph as graph
graph.SMALL, graph.SMALL_TENSORS, selector.GRAPH_TENSORS = 10, 7, (9, 30)
random = np.random.default_rng(0)
agree = []
optima = [graph.by_trying_all] + [graph.by_highs] * hasattr(scipy.optimize, 'milp')
for _ in range(5):
    table, importance = graph.draw_table(7, random), graph.draw_instance(7, 1)[2]
    rho = 0.5 + 0.5 * graph.smallest_rho(table)
    agree.append([graph.gaps(table, importance, rho, optimum)
                  for optimum in optima])
rows = [graph.small_gaps(tangled, 0) for tangled in (False, True)]
times = [graph.selection_time(n, 0, 1) for n in selector.GRAPH_TENSORS]
print(selector.graph_report(times, rows)[0])
print(json.dumps([agree, rows, times]))"""
    status, output, errors = run(sys.executable, '-c', code, cwd=str(tmp_path), env=dict(
        os.environ, PYTHONPATH=os.path.join(ROOT, 'benchmarks')))
    assert status == 0, errors
    agree, rows, times = json.loads(output.splitlines()[-1])
    for by_trying_all, *by_highs in agree:  # SciPy has HiGHS from 1.9
        assert by_highs in ([], [pytest.approx(by_trying_all, abs=1e-4)])
        assert min(by_trying_all.values()) > -1e-9
    for row in rows:
        assert row['chosen']['worst'] <= row['chain, filled']['worst'] <= row['chain']['worst']
    assert [row['tensors'] for row in times] == [9, 30] and 'at most 50 at 1000' in output


def test_the_price_of_a_selection_is_told_of_the_scheme_that_trains(tmp_path):
    path = str(tmp_path / 'result.json')
    status, output, errors = run(
        sys.executable, os.path.join(ROOT, 'benchmarks', 'overhead.py'), '--models',
        'mobilenetv2@32', '--selections', '4', '--json', path, cwd=str(tmp_path))
    assert status == 0, errors
    assert re.search(r'mobilenetv2 +32 +8 ', output), output
    with open(path) as lines:
        assert 'whole' in lines.read()


@pytest.mark.parametrize('name', ['time_model', 'achieved_speedup', 'overhead', 'throttling',
                                  'importance', 'selector', 'accuracy', 'prefix_cache'])
def test_benchmarks_refuse_bad_flags_before_they_load_tensorflow(name, tmp_path):
    """In a folder of its own; TensorFlow would make itself known by a module of that name there."""
    (tmp_path / 'tensorflow.py').write_text('raise SystemExit("TensorFlow was loaded")')
    script = os.path.join(ROOT, 'benchmarks', name + '.py')
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    status, output, errors = run(sys.executable, script, '--seed', '-1', cwd=str(tmp_path),
                                 env=environment)
    assert (status, output) == (2, '') and '--seed' in errors
    status, output, errors = run(sys.executable, script, '--json', tmp_path, cwd=str(tmp_path),
                                 env=environment)
    assert (status, output) == (2, '')
    assert errors == "error: --json '{}' is not a file that can be written\n".format(tmp_path)
    status, output, errors = run(sys.executable, script, '--help', cwd=str(tmp_path),
                                 env=environment)
    assert (status, errors) == (0, '') and '--json' in output


def test_accuracy_benchmark_pairs_runs_by_seed_and_judges_them(tmp_path):
    """Records of the form of folder.read_run, three seeds of four schemes but for one run."""
    code = """
import json, accuracy, _accuracy_table
from elastic.runs.folder import Run
network = accuracy.NETWORKS['mobilenetv2']
def runs(final, seconds):
    return {seed: Run(dict(final_accuracy=a, best_accuracy=a, train_seconds=s, peak_memory_mb=500.0,
                           step_seconds=s - 5, selection_seconds=s / 10, host='pi',
                           stack='2.21', energy_joules=None),
                      {'train_seconds': [s / 2, s], 'test_accuracy': [0.94, a]}, [])
            for seed, (a, s) in enumerate(zip(final, seconds))}
made = {'full': runs([0.96, 0.98, 0.97], [100, 110, 90]), 'head only': runs([0.6] * 3, [30] * 3),
        'BN + bias': runs([0.9] * 3, [80] * 3), 'elastic 0.5': runs([0.955, 0.975, 0.965],
                                                                    [50, 55, 45])}
del made['BN + bias'][1]
rows = [row for row in accuracy.rows_of(network, False) if row.label in made]
results = [accuracy.result_of(network, row, made[row.label], made['full']) for row in rows]
print(accuracy.report(results))
print(json.dumps([(r, _accuracy_table.verdict(r, results)) for r in results]))"""
    status, output, errors = run(sys.executable, '-c', code, cwd=str(tmp_path), env=dict(
        os.environ, PYTHONPATH=os.path.join(ROOT, 'benchmarks'), PYTHONIOENCODING='utf-8'))
    assert status == 0, errors
    (full, _), (head, _), (bias, _), (elastic, verdict) = json.loads(output.splitlines()[-1])
    assert [r['label'] for r in (full, head, bias, elastic)] == [
        'full', 'head only', 'BN + bias', 'elastic 0.5']
    assert elastic['to_full'] == pytest.approx(-0.005) and elastic['to_full_se'] < 1e-9
    assert elastic['speed_up'] == pytest.approx(2.0) and elastic['n'] == 3
    assert elastic['steps_speed_up'] == pytest.approx((95 / 45 + 105 / 50 + 85 / 40) / 3)
    assert elastic['selection_seconds'] == pytest.approx(5) and ' 5.0 ' in output
    assert bias['n'] == 2 and bias['to_full'] == pytest.approx((0.9 - 0.96 + 0.9 - 0.97) / 2)
    assert full['reached'][0] == [50, 55, 45]  # 95 %: after the first epoch
    assert np.isnan(bias['reached'][1]).all() and 'never' in output
    assert '-0.5 (-1)' in verdict and 'best for its time' in verdict and 'MISSED' not in verdict
    assert '± 0.6' in output  # standard error of 96, 98, 97


def test_accuracy_benchmark_trains_the_rows_that_were_asked_for_beside_full_training(tmp_path):
    script = os.path.join(ROOT, 'benchmarks', 'accuracy.py')
    status, output, errors = run(sys.executable, script, '--rows', 'elastic 0.4', '--networks',
                                 'mobilenetv2_repeated', cwd=str(tmp_path))
    assert (status, output) == (2, '') and len(errors.splitlines()) == 1
    assert "--rows 'elastic 0.4' is no row of mobilenetv2_repeated" in errors
    assert "'elastic 0.25'" in errors
    status, output, errors = run(sys.executable, '-c', """
import argparse, accuracy
args = argparse.Namespace(quick=False, rows=['elastic 0.25'])
network = accuracy.NETWORKS['mobilenetv2_repeated']
print([row.label for row in accuracy.rows_for(network, args)])""", cwd=str(tmp_path), env=dict(
        os.environ, PYTHONPATH=os.path.join(ROOT, 'benchmarks')))
    assert (status, output) == (0, "['full', 'elastic 0.25']\n"), errors


def test_with_the_cache_full_training_of_as_many_epochs_is_an_opponent(tmp_path):
    code = """
import accuracy
from _accuracy_table import in_a_part, opponents, verdict
def result(label, scheme, accuracy, seconds, rho=None, cached=False):
    return dict(label=label, scheme=scheme, accuracy=accuracy, seconds=seconds, rho=rho,
                cached=cached, variant=False, to_full=accuracy - 0.98, speed_up=100 / seconds,
                flags=[])
elastic = [result('elastic %g' % rho, 'elastic_training', accuracy, 100 * rho + 1, rho, True)
           for rho, accuracy in ((0.5, 0.975), (0.25, 0.95))]
others = [result(in_a_part(2), 'full_training', 0.96, 55),
          result(in_a_part(4), 'full_training', 0.9, 29),
          result('head only', 'traditional_tl_training', 0.97, 20, cached=True)]
results = elastic + others
print([other['label'] for other in opponents(elastic[0], results)])
print([other['label'] for other in opponents(elastic[1], results)])
print(verdict(elastic[0], results))
print(verdict(elastic[1], results))"""
    status, output, errors = run(sys.executable, '-c', code, cwd=str(tmp_path), env=dict(
        os.environ, PYTHONPATH=os.path.join(ROOT, 'benchmarks')))
    assert status == 0, errors
    half, quarter, first, second = output.strip().splitlines()
    assert half == "['full, 1/2 of the epochs', 'full, 1/4 of the epochs', 'head only']"
    assert quarter == "['full, 1/4 of the epochs', 'head only']"
    assert first == '-0.5 (-0.7); 1.96x (1.9); best for its time'
    assert second == '-3.0 (-4); 3.85x (3.5); behind head only MISSED'


def test_accuracy_benchmark_asks_for_runs_that_main_accepts(tmp_path):
    code = """
import json, accuracy, main
for i, network in enumerate(accuracy.NETWORKS.values()):
    rows = accuracy.rows_of(network, i == 0) + [accuracy.stronger(network)]
    parsed = [main.parse_arguments(accuracy.flags_of(network, row, 3)) for row in rows]
    assert len({args.run_name for args in parsed}) == len(rows)
    assert not any('/' in args.run_name for args in parsed)  # a folder each, side by side
    assert len({json.dumps(dict(vars(args), run_name=None)) for args in parsed}) == len(rows)
    assert {args.seed for args in parsed} == {3}
    assert [args.prefix_cache == 'auto' for args in parsed] == [row.cached for row in rows]
    print(json.dumps({row.label: vars(args) for row, args in zip(rows, parsed)}))"""
    status, output, errors = run(sys.executable, '-c', code, cwd=str(tmp_path), env=dict(
        os.environ, PYTHONPATH=os.path.join(ROOT, 'benchmarks')))
    assert status == 0, errors
    mobilenet, efficientnet, repeated, _ = map(json.loads, output.splitlines())
    assert mobilenet['PruneTrain']['prune_interval'] == 5  # as published
    assert 2 * mobilenet['full, half the epochs']['num_epochs'] == mobilenet['full']['num_epochs']
    assert mobilenet['elastic 0.5']['interval'] == 4 and efficientnet['elastic 0.5'][
        'interval'] == 2
    assert mobilenet['elastic 0.5, selected once']['interval'] == 0
    assert mobilenet['elastic 0.5, whole layers']['granularity'] == 'layer'
    rates = {label: args['learning_rate'] for label, args in mobilenet.items()}
    own = {label: rates.pop(label) for label in list(rates) if ', lr ' in label}
    assert set(rates.values()) == {rates['full']}  # one for all, but where it is said
    assert 'head only, lr 0.1' in own and own == {
        label: float(label.split()[-1]) for label in own}
    for networks_own in (mobilenet, repeated):
        assert networks_own['elastic 0.35']['weights'].endswith(
            'mobilenetv2_source_seed3/checkpoint/weights.npz')
    assert {args['train_images'] for args in repeated.values()} == {336 * 32}
    assert 4 * repeated['full, 1/4 of the epochs']['num_epochs'] == repeated['full']['num_epochs']


def test_the_example_in_python_trains_a_network_of_ones_own():
    with open(os.path.join(ROOT, 'docs', 'python.md')) as page:
        code, = re.findall(r'```python\n(.*?)```', page.read(), re.S)
    status, output, errors = run(sys.executable, '-c', code, cwd=ROOT)
    assert status == 0, errors
    assert re.search(r'\d of 6 tensors, loss \d\.\d+$', output.strip()), output
