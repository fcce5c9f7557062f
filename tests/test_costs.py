"""What each way to train costs: by the timing table, by what was measured, and for the figures."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from small_models import SMALL, small_classifier, user_classifier
from test_selection_solver_DP import tangled_table

import cost_file
import costs
import keras_stack
import profiler
import reproduce
from command_line import UserError
from figure_grid import CUB, runs_of
from flags import parse_arguments
from selection_solver_DP import smallest_rho
from tensor_timings import TensorTimings
from train import fixed_mask

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PEAKS = {'full_training': 9 * 10 ** 8, 'traditional_tl_training': 7 * 10 ** 8,
         'bn_plus_bias_training': None, 'elastic_training': 10 ** 9}
IMAGES = (640, 100)


def given(logs, *flags):
    """Arguments of profiler.py for small_classifier, on data whose images come back unchanged."""
    return profiler.parse_arguments([
        '--model_name=small', '--input_size=16', '--batch_size=8', '--dataset_name=digits',
        '--logs_dir={}'.format(logs)] + list(flags))


@pytest.fixture(scope='module')
def profiled():
    return profiler.profile_model(small_classifier(), SMALL, 3, 8, seconds=0.5, key={
        'model': 'small', 'host': 'a board', 'tensorflow': '2.21', 'batch_size': 8})


@pytest.fixture
def found(profiled, tmp_path):
    """(costs of small_classifier, (train type, rho, prefix cache) -> its row)."""
    content = costs.costs_of(given(tmp_path), profiled, str(tmp_path / 'timings.json'), IMAGES,
                             PEAKS)
    return content, {(row['train_type'], row['rho'], row['prefix_cache']): row
                     for row in content['ways']}


# --- rows


@pytest.mark.parametrize('build', [small_classifier, user_classifier])
@pytest.mark.parametrize('name', costs.BASELINES)
def test_a_fixed_scheme_is_told_by_names_as_it_trains(name, build):
    model = build()
    names = [keras_stack.variable_name(v) for v in model.trainable_variables]
    np.testing.assert_array_equal(costs.mask_of(name, names), fixed_mask(name, model))


def test_steps_and_hours_are_those_of_the_timing_table(profiled, found):
    _, rows = found
    full, head, bias = [rows[name, None, 'off'] for name in costs.BASELINES]
    names = profiled.names
    assert full['step_ms'] == pytest.approx(profiled.t_step) and full['tensors'] == len(names)
    assert head['step_ms'] == profiled.plain_time([name.startswith('head/') for name in names])
    assert head['speed_up'] == pytest.approx(full['step_ms'] / head['step_ms'])
    assert head['step_ms'] < bias['step_ms'] <= full['step_ms']
    tests = 12 * 100 / 8 * profiled.t_fp
    assert full['hours'] == pytest.approx((12 * 80 * profiled.t_step + tests) / 3.6e6)
    assert [row['peak_bytes'] for row in (full, head, bias)] == [9 * 10 ** 8, 7 * 10 ** 8, None]


def test_elastic_steps_are_what_rho_may_spend_and_out_of_reach_below_the_smallest(profiled, found):
    _, rows = found
    least = smallest_rho(profiled)
    for rho in costs.RHOS:
        row = rows['elastic_training', rho, 'off']
        assert row['smallest_rho'] == least and row['peak_bytes'] == 10 ** 9
        if rho < least:
            assert row['step_ms'] is row['hours'] is row['tensors'] is None
        else:
            assert row['step_ms'] == pytest.approx(rho * profiled.t_step)
            assert 1 <= row['tensors'] <= len(profiled.names)
    assert rows['elastic_training', 0.25, 'on']['smallest_rho'] < least


def test_the_head_with_a_prefix_cache_costs_the_mean_of_reading_and_filling(profiled, found,
                                                                            tmp_path):
    _, rows = found
    row, without = [rows['traditional_tl_training', None, cache] for cache in ('on', 'off')]
    mask = np.array([name.startswith('head/') for name in profiled.names])
    (read, read_more), (write, write_more) = zip(*TensorTimings.load(
        str(tmp_path / 'timings.json')).measured['row_ms']['memory'])
    fill = without['step_ms'] + write
    reading = without['step_ms'] + read - profiled.t_prefix[profiled.deepest(mask)]
    assert row['step_ms'] == pytest.approx(fill / 12 + 11 / 12 * reading)
    assert row['cache_bytes'] == 640 * (profiled.cut_bytes[profiled.deepest(mask)] + 4)
    assert row['cache_in'] == 'memory' and without['cache_bytes'] is None


def test_what_was_measured_is_stored_and_not_measured_again(profiled, found, tmp_path):
    content, _ = found
    path = str(tmp_path / 'timings.json')
    stored = TensorTimings.load(path)
    assert stored.measured['peak_bytes'] == PEAKS
    written = os.stat(path).st_mtime_ns
    assert costs.costs_of(given(tmp_path), stored, path, IMAGES, PEAKS) == content
    assert os.stat(path).st_mtime_ns == written


@pytest.mark.parametrize('flags, cut, says', [
    (['--num_epochs=1'], True, 'no image comes back in one epoch'),
    ([], False, 'no part of this network can be cut off'),
    (['--augmentation=flip+rotate'], True, 'which holds the views'), ([], True, 'used by itself')])
def test_what_a_prefix_cache_needs_is_told(profiled, tmp_path, flags, cut, says):
    table = profiled if cut else profiled._replace(
        cut_bytes=np.full(len(profiled.names), np.inf))
    content = costs.costs_of(given(tmp_path, *flags), table, str(tmp_path / 't.json'), IMAGES,
                             PEAKS)
    text = costs.describe(content)
    assert says in text and max(map(len, text.split('\n'))) <= 120
    assert ('on' in {row['prefix_cache'] for row in content['ways']}) == (says[:2] != 'no')


def test_the_printed_table_has_a_row_a_way_and_says_what_is_missing(profiled, found):
    content, rows = found
    lines = costs.describe(content).split('\n')
    assert len([line for line in lines if line.startswith('elastic_training rho ')]) == 8
    bias, = [line for line in lines if line.startswith('bn_plus_bias_training')]
    assert bias.endswith('not measured')
    beyond = dict(rows['elastic_training', 0.25, 'off'], step_ms=None, hours=None, speed_up=None,
                  tensors=None, smallest_rho=0.3121)
    line = costs.describe(dict(content, ways=[rows['full_training', None, 'off'], beyond]))
    assert 'elastic_training rho 0.25  off           out of reach                   0.313' in line


def test_the_peak_of_full_training_holds_the_activations_that_the_head_alone_frees():
    """Ten convolutions whose outputs take 8 MB each; in a process that has run nothing else."""
    code = '''
import numpy as np, json, command_line
command_line.quiet_tensorflow()
import tensorflow as tf
from tensorflow import keras
import peak_memory
inputs = x = keras.Input((64, 64, 3))
for _ in range(10):
    x = keras.layers.Conv2D(16, 3, padding='same', activation='relu')(x)
outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x))
model = keras.Model(inputs, outputs)
masks = {'head': np.arange(22) >= 20, 'full': np.ones(22, bool)}
print(json.dumps(peak_memory.peaks_of(model, tf.zeros((32, 64, 64, 3)),
                                      tf.zeros((32,), tf.int32), masks)))'''
    peaks = json.loads(subprocess.check_output(
        [sys.executable, '-c', code], cwd=ROOT, universal_newlines=True).split('\n')[-2])
    assert peaks['head'] + 40e6 < peaks['full'] <= peaks['importance'] < peaks['full'] + 400e6


# --- runs and figures


def prefix_table():
    """Timings whose forward pass is a third of a step; more of it can be cut off the nearer the
    output the deepest tensor in training is.
    """
    table = tangled_table(np.random.RandomState(0))
    n = len(table.names)
    table = table._replace(t_fp=(table.t_bp + table.t_update) / 2, cut_bytes=np.full(n, 9.0))
    prefix = np.zeros(n)
    prefix[table.order] = table.t_fp * np.arange(n) / n
    return table._replace(t_prefix=prefix)


def test_a_rho_that_only_the_prefix_cache_reaches_is_left_out_without_it():
    runs = [parse_arguments(list(run.flags)) for run in runs_of('cache')]
    table = prefix_table()
    assert [run.rho for run in runs if costs.why_not(run, table) is None
            and run.prefix_cache == 'off'] == [0.5, 0.5]
    assert all(costs.why_not(run, table) is None for run in runs if run.prefix_cache == 'on')
    lost = table._replace(cut_bytes=np.full(len(table.names), np.inf))  # no cut anywhere
    assert 'out of reach' in costs.why_not(runs[-1], lost)
    runs[-1].rho = 0.99 * smallest_rho(table.cached_at_best(4))
    assert 'the prefix cache has to be filled' in costs.why_not(runs[-1], table)


@pytest.mark.parametrize('data, epochs, interval, each', [
    (CUB, 12, 4, 4), (CUB, 12, 0, 12), (CUB, 5, 4, 2.5), (CUB, 3, 4, 3), ('digits', 12, 4, 12)])
def test_a_prefix_cache_is_filled_as_often_as_views_change(data, epochs, interval, each):
    args = parse_arguments(['--dataset_name', data, '--num_epochs', str(epochs),
                            '--interval', str(interval)])
    assert costs.epochs_of_a_cache(args) == each


def test_figures_are_reckoned_as_a_dry_run_does():
    table = prefix_table()
    figures = {figure['figure']: figure for figure in costs.figures_of(
        profiler.parse_arguments([]), table)}
    assert set(figures) == {'7', '15', '15ad', '16', '17ac', '19', '21', '23', 'cache'}
    for name in ('15ad', '16', '23'):
        assert figures[name]['hours'] == pytest.approx(sum(
            reproduce.estimated_hours(run, table) for run in runs_of(name)))
    assert figures['21']['hours'] == figures['21']['elastic_hours'] == pytest.approx(
        figures['15']['elastic_hours'])
    assert (figures['19']['runs'], figures['19']['of_runs']) == (4, 12)
    assert figures['17ac']['out_of_reach'] == [rho for rho in (0.35, 0.4) if rho < smallest_rho(
        table)] != []
    assert costs.figures_of(profiler.parse_arguments(['--input_size=96']), table) == []
    assert costs.figures_of(profiler.parse_arguments(['--bn_statistics=train']), table) == []


# --- saved tables


def test_a_saved_table_is_read_back_and_written_anew_over_itself_alone(found, tmp_path):
    path, other = str(tmp_path / 'board.json'), tmp_path / 'timings.json'
    cost_file.check_path(path)
    cost_file.save(path, found[0])
    assert cost_file.load(path) == found[0]
    cost_file.check_path(path)
    with pytest.raises(UserError, match='would overwrite.*timings.json is not a table of costs'):
        cost_file.check_path(str(other))
    with open(path) as file:
        text = file.read()
    (tmp_path / 'board.json').write_text(text.replace('a board', 'a bored'))
    with pytest.raises(UserError, match='board.json is not as it was written'):
        cost_file.load(path)


@pytest.mark.parametrize('flags, says', [
    (['--save_table', 'no/such/folder.json'], 'error: --save_table no/such/folder.json: cannot'),
    (['--save_table', 'docs'], 'error: --save_table docs: cannot'),
    (['--save_table', 'board'], "a .json file in a folder that is there"),
    (['--dataset_name', 'digit'], "unknown data set 'digit' (did you mean 'digits'?)"),
    (['--num_epochs', '0'], '0 is not a whole number')])
def test_wrong_arguments_are_told_before_anything_heavy(flags, says):
    code = ("import sys, command_line, profiler\n"
            "try: command_line.run(profiler.main, {})\n"
            "finally: print('tensorflow' in sys.modules)")
    result = subprocess.run([sys.executable, '-c', code.format(flags)], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            universal_newlines=True)
    assert result.returncode == 2 and result.stdout.split() == ['False']
    assert says in result.stderr and 'Traceback' not in result.stderr


def test_a_batch_larger_than_the_data_set_is_told_before_the_profile(tmp_path):
    with pytest.raises(UserError, match='20000 does not fit into the 10776 training images'):
        costs.sizes_of(given(tmp_path, '--batch_size=20000'))
