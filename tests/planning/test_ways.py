"""Tests the cost of each way to train, by the timing table and by measurements."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import profiler
from drawn_tables import tangled_table
from elastic.cache.copy_times import CopyTimes
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.flags import parse_arguments
from elastic.planning import ways
from elastic.schemes.fixed import fixed_mask
from elastic.selection.items import smallest_rho
from elastic.settings import settings_of
from elastic.timing.table import TensorTimings
from figure_grid import runs_of
from fixed_tables import COPY_MS, fixed_profile
from small_models import SMALL, small_classifier, user_classifier
from small_runs import ROOT

PEAKS = {'full_training': 9 * 10 ** 8, 'traditional_tl_training': 7 * 10 ** 8,
         'bn_plus_bias_training': None, 'elastic_training': 10 ** 9}
IMAGES = (640, 100)
WAY = ways.Way('full_training', 'digits', 8, 12)  # its images are the same in every epoch


@pytest.fixture(scope='module')
def profiled():
    return fixed_profile(small_classifier(), SMALL, 3, 8)


@pytest.fixture
def copy_times(tmp_path):
    return CopyTimes(IMAGES[0], 8, str(tmp_path), memory_bytes=10 ** 9, measured=dict(COPY_MS))


@pytest.fixture
def found(profiled, copy_times):
    """Returns {(train type, rho, prefix cache): Forecast} of small_classifier."""
    return {way[:1] + (way.rho, way.prefix_cache): ways.forecast_of(
        way, profiled, copy_times, IMAGES, PEAKS) for way in ways.ways_like(WAY, profiled)}


# --- rows


@pytest.mark.parametrize('build', [small_classifier, user_classifier])
@pytest.mark.parametrize('name', ways.BASELINES)
def test_names_alone_give_the_mask_that_a_fixed_scheme_trains(name, build):
    model = build()
    names = [keras_stack.variable_name(v) for v in model.trainable_variables]
    np.testing.assert_array_equal(ways.mask_of(name, names), fixed_mask(name, model))


def test_steps_and_hours_are_those_of_the_timing_table(profiled, found):
    full, head, bias = [found[name, 1.0, 'off'] for name in ways.BASELINES]
    assert full.step_ms == pytest.approx(profiled.t_step)
    assert head.step_ms == profiled.plain_time(
        [name.startswith('head/') for name in profiled.names])
    assert head.speed_up == pytest.approx(full.step_ms / head.step_ms)
    assert head.step_ms < bias.step_ms <= full.step_ms
    tests = 12 * 100 / 8 * profiled.t_fp
    assert full.hours == pytest.approx((12 * 80 * profiled.t_step + tests) / 3.6e6)
    assert [cost.peak_bytes for cost in (full, head, bias)] == [9 * 10 ** 8, 7 * 10 ** 8, None]


def test_elastic_steps_are_what_rho_may_spend_and_out_of_reach_below_the_smallest(profiled, found):
    least = smallest_rho(profiled)
    for rho in ways.RHOS:
        cost = found['elastic_training', rho, 'off']
        assert cost.smallest_rho == least and cost.peak_bytes == 10 ** 9
        if rho < least:
            assert cost.step_ms is cost.hours is cost.speed_up is None
        else:
            assert cost.step_ms == pytest.approx(rho * profiled.t_step)
    assert found['elastic_training', 0.25, 'on'].smallest_rho < least


def test_the_head_with_a_prefix_cache_costs_the_mean_of_reading_and_filling(profiled, copy_times,
                                                                            found):
    cached, without = [found['traditional_tl_training', 1.0, cache] for cache in ('on', 'off')]
    mask = np.array([name.startswith('head/') for name in profiled.names])
    k = profiled.deepest(mask)
    read, write = [ms[k] for ms in copy_times.copying(profiled.cut_bytes)]
    reading = without.step_ms + read - profiled.t_prefix[k]
    assert cached.step_ms == pytest.approx((without.step_ms + write) / 12 + 11 / 12 * reading)


@pytest.mark.parametrize('way, cut, says', [
    (WAY._replace(num_epochs=1), True, 'no image comes back in one epoch'),
    (WAY, False, 'no part of the network can be cut off'),
    (WAY._replace(augmentation='flip+rotate'), True, 'only where rho needs it'),
    (WAY, True, 'used by default')])
def test_the_notes_say_what_a_prefix_cache_needs(profiled, way, cut, says):
    table = profiled if cut else profiled._replace(
        cut_bytes=np.full(len(profiled.names), np.inf))
    notes = ways.notes_on(way, table)
    assert says in notes[-1] and max(map(len, notes)) <= 120
    assert ('on' in {each.prefix_cache for each in ways.ways_like(way, table)}) == (
        not notes[-1].startswith('no '))


def test_the_printed_table_has_a_row_a_way_and_says_what_is_missing(found):
    lines = ways.describe(list(found.values())).split('\n')
    assert len([line for line in lines if line.startswith('elastic_training rho ')]) == 8
    bias, = [line for line in lines if line.startswith('bn_plus_bias_training')]
    assert bias.endswith('not measured') and max(map(len, lines)) <= 120
    beyond = found['elastic_training', 0.25, 'off']._replace(
        step_ms=None, hours=None, speed_up=None, smallest_rho=0.3121)
    line = ways.describe([found['full_training', 1.0, 'off'], beyond])
    assert 'elastic_training rho 0.25  off           out of reach                   0.313' in line


def test_the_table_says_where_views_are_held(profiled, copy_times):
    way = WAY._replace(augmentation='flip')
    lines = ways.describe([ways.forecast_of(each, profiled, copy_times, IMAGES, PEAKS)
                            for each in ways.ways_like(way, profiled)]).split('\n')
    cached = [line for line in lines if '  on, held views  ' in line]
    assert len(cached) == 1 + len(ways.RHOS) and max(map(len, lines)) <= 120
    assert 'out of reach' not in cached[-1] and '  off  ' in lines[-2]


@pytest.mark.thorough
def test_the_peak_of_full_training_holds_the_activations_that_the_head_alone_frees():
    """Ten convolutions have outputs of 8 MB each; the process has run nothing else."""
    code = '''
import json
from elastic.compat import start
start.quiet_tensorflow()
import tensorflow as tf
from tensorflow import keras
import profiler
inputs = x = keras.Input((64, 64, 3))
for _ in range(10):
    x = keras.layers.Conv2D(16, 3, padding='same', activation='relu')(x)
outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x))
model = keras.Model(inputs, outputs)
step = profiler.StepSettings('convolutions', 1.0, 64, 32, 3, 'none', 'frozen', 'sgd', 5e-4, None)
print(json.dumps(profiler.peak_bytes(step, model)))'''
    peaks = json.loads(subprocess.check_output(
        [sys.executable, '-c', code], cwd=ROOT, universal_newlines=True).split('\n')[-2])
    full = peaks['full_training']
    assert peaks['traditional_tl_training'] + 40e6 < full <= peaks['elastic_training'] < full + 4e8


# --- runs


def prefix_table():
    """Returns a table whose forward pass is a third of a step.

    The nearer the deepest trained tensor is to the output, the more of it can be cut off.
    """
    table = tangled_table(np.random.RandomState(0))
    n = len(table.names)
    table = table._replace(t_fp=(table.t_bp + table.t_update) / 2, cut_bytes=np.full(n, 9.0))
    return table._replace(t_prefix=table.t_fp * (n - 1 - table.depth) / n)


def test_a_rho_that_only_the_prefix_cache_reaches_is_out_of_reach_without_it():
    found = [settings_of(parse_arguments(list(run.flags)), ways.Way)
             for run in runs_of('cache')]
    table = prefix_table()
    assert [way.rho for way in found if way.why_not(table) is None
            and way.prefix_cache == 'off'] == [0.5, 0.5]
    beyond = [way.why_not(table) for way in found if way.why_not(table)]
    assert len(beyond) == 2 and all(reason.endswith(
        'with --prefix_cache on, which holds views, it may be within reach') for reason in beyond)
    assert all(way.why_not(table) is None for way in found if way.prefix_cache == 'on')
    lost = table._replace(cut_bytes=np.full(len(table.names), np.inf))  # no cut anywhere
    assert 'out of reach' in found[-1].why_not(lost)
    assert '--prefix_cache on' not in found[1].why_not(lost)
    least = smallest_rho(table.cached_at_best(4))
    below = found[-1]._replace(rho=0.99 * least)
    assert 'the prefix cache has to be filled' in below.why_not(table)


# --- the command


def test_what_was_measured_is_stored_and_not_measured_again(profiled, tmp_path, capsys):
    path = str(tmp_path / 'timings.json')
    profiler.print_costs(WAY, profiled, path, IMAGES, PEAKS, profiled)
    first = capsys.readouterr().out
    stored = TensorTimings.load(path)
    assert stored.profile.peak_bytes == PEAKS
    written = os.stat(path).st_mtime_ns
    profiler.print_costs(WAY, stored, path, IMAGES, PEAKS, stored)
    assert capsys.readouterr().out == first and os.stat(path).st_mtime_ns == written


def test_a_batch_larger_than_the_data_set_is_refused_before_the_profile():
    with pytest.raises(UserError, match='20000 does not fit into the 10776 training images'):
        ways.sizes_of('digits', 16, 20000)
