"""Tests profiles of small networks: what stays untouched, and what a table is valid for."""

import concurrent.futures
import glob
import json
import os

import numpy as np
import pytest
from tensorflow import keras

import profiler
from elastic.compat import keras_stack
from elastic.settings import settings_of as fields_of
from elastic.timing import report
from elastic.timing.op_times import read_trace
from elastic.timing.stored import ENVIRONMENT, table_key
from fixed_tables import fixed_profile
from small_models import SMALL, assert_same_values, small_classifier, values
from small_runs import quick_flags, script
from timing_tables import table_of_branching


@pytest.fixture(scope='module')
def branching_table():
    return table_of_branching()


# --- the whole profiler


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_profiling_leaves_the_model_bit_identical_and_a_trace_in_the_folder(optimizer, tmp_path):
    model = small_classifier()
    state = list(model.variables)  # in Keras 3, those of random generators as well
    norms = [layer for layer in keras_stack.flat_layers(model)
             if isinstance(layer, keras.layers.BatchNormalization)]
    before, momenta = values(state), [layer.momentum for layer in norms]
    table = profiler.profile_model(model, SMALL, 3, 4, optimizer, folder=str(tmp_path),
                                   key={'batch': 4}, num_steps=3, seconds=0)
    assert len(state) > len(model.trainable_variables) + 3
    assert_same_values(before, values(state))
    assert momenta == [layer.momentum for layer in norms]
    assert not model.get_layer('backbone').train_statistics
    files = [name for _, _, names in os.walk(str(tmp_path)) for name in names]
    assert [name for name in files if name.endswith('.xplane.pb')]

    assert table.names == [
        'stem/kernel', 'stem_bn/gamma', 'stem_bn/beta', 'depthwise/kernel', 'depthwise_bn/gamma',
        'depthwise_bn/beta', 'project/kernel', 'project/bias', 'head/kernel', 'head/bias']
    assert table.shapes == [tuple(v.shape) for v in model.trainable_variables]
    assert table.key == {'batch': 4} and table.profile.coverage >= report.MIN_COVERAGE
    assert table.t_fp > 0 and table.t_bp > 0 and table.t_update > 0 and table.t_dw[0] > 0
    assert table.profile.kernel_share is None  # on a CPU
    tensors = np.arange(10)
    assert table.backward_time(tensors >= 0) == pytest.approx(table.t_bp)
    assert table.backward_time(tensors >= 8) < table.backward_time(tensors == 0)


def test_a_cut_nearer_to_the_output_saves_more_of_the_forward_pass():
    """Six convolutions, five of them alike: four fifths of the work precede the last."""
    keras_stack.set_seed(0)
    inputs = keras.Input((48, 48, 3))
    x = inputs
    for _ in range(6):
        x = keras.layers.Conv2D(32, 3, padding='same', activation='relu')(x)
    outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x))
    table = fixed_profile(keras.Model(inputs, outputs), (48, 48, 3), 3, 8)
    saved = table.t_prefix[::2] / table.t_fp  # kernels, from the input
    assert saved[0] < 0.2 and saved[-1] > 0.6 and (np.diff(saved) >= 0).all()


def test_a_disturbed_profile_says_so(branching_table, capsys):
    profiler.warn_of(branching_table.profile._replace(spread=0.02, coverage=1.0))
    assert capsys.readouterr().out == ''
    profiler.warn_of(branching_table.profile._replace(spread=0.3, coverage=1.0))
    assert 'took 30 % more or less' in capsys.readouterr().out


# --- what a table is valid for


def small_network(units=4, strides=1, dtype='float32', activation='relu'):
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(units, 3, strides=strides, padding='same', dtype=dtype,
                            activation=activation)(inputs)
    x = keras.layers.GlobalAveragePooling2D(dtype=dtype)(x)
    return keras.Model(inputs, keras.layers.Dense(3, dtype='float32')(x))


def settings_of(model_name, *more):
    flags = ['--model_name', str(model_name), '--input_size', '8', '--num_classes', '3',
             '--augmentation', 'none'] + list(more)
    return fields_of(profiler.parse_arguments(flags), profiler.StepSettings)


def key_of(model_name, model, *more):
    return table_key(settings_of(model_name, *more), model)


def test_the_key_of_a_saved_model_depends_on_its_content_not_its_path(tmp_path):
    model, keys = small_network(), []
    model.get_layer(index=1).set_weights([np.ones_like(w) for w in model.layers[1].get_weights()])
    for folder in ('here', 'there'):
        path = tmp_path / folder / keras_stack.MODEL_FILE
        path.parent.mkdir()
        model.save(str(path))
        loaded = keras.models.load_model(str(path), compile=False)
        keys.append(key_of(path, loaded))
        model = small_network()  # with other values, and other numbers in Keras' names
    assert keys[0] == keys[1] == key_of(path, model)
    assert str(tmp_path) not in json.dumps(keys)
    assert json.loads(json.dumps(keys[0])) == keys[0]


@pytest.mark.parametrize('other, flags, differing', [
    (dict(units=5), [], {'network'}), (dict(strides=2), [], {'network'}),
    (dict(activation='tanh'), [], {'network'}),
    (dict(dtype='mixed_float16'), [], {'network', 'dtype'}),
    ({}, ['--clip_norm', '1'], {'clipped'}), ({}, ['--weight_decay', '0'], {'decay'}),
    ({}, ['--optimizer', 'adam'], {'optimizer'})])
def test_the_key_differs_for_other_networks_dtypes_and_updates(other, flags, differing):
    one = key_of('model.h5', small_network())
    two = key_of('model.h5', small_network(**other), *flags)
    assert {name for name in one if one[name] != two[name]} == differing


@pytest.mark.thorough
def test_a_table_for_clipped_updates_is_measured_with_clipping(tmp_path):
    model, counts = small_network(), []
    for more in ([], ['--clip_norm', '1']):
        settings = settings_of('small', *more)
        profiler.table_for(settings, model, str(tmp_path), lambda: None)
        folder = os.path.dirname(profiler.path_of_table(settings, str(tmp_path)))
        trace, = glob.glob(os.path.join(folder, '**', '*.xplane.pb'), recursive=True)
        counts.append(len(read_trace(trace, 5)[0]))
    assert counts[1] >= counts[0] + 2 * len(model.trainable_variables)


@pytest.mark.parametrize('variable', ENVIRONMENT)
def test_the_key_holds_the_variables_of_the_environment(variable, monkeypatch):
    model = small_network()
    monkeypatch.delenv(variable, raising=False)
    without = key_of('resnet50', model)
    monkeypatch.setenv(variable, '1')
    assert key_of('resnet50', model)['environment'] == dict(without['environment'],
                                                            **{variable: '1'})
    assert variable not in without['environment'] and without['model'] == 'resnet50'


@pytest.mark.thorough
def test_of_two_runs_at_once_one_profiles_and_the_other_waits_for_its_table(tmp_path):
    flags = quick_flags(tmp_path, '--train_type', 'elastic_training', '--rho', '0.7', '--run_name')
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda name: script('main.py', *(flags + [name])), 'ab'))
    assert [status for status, *_ in ended] == [0, 0], ended
    assert ''.join(output for _, output, _ in ended).count('\nprofiled in') == 1
