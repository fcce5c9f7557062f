"""Tests that models from others neither run code, nor read other files, nor fill the memory.

Each test makes a file that did so, or that a released Keras loaded, without --trust_model.
"""

import io
import json
import os
import resource
import stat
import zipfile

import h5py
import pytest
import tensorflow as tf
from tensorflow import keras

import models
from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.export.litert import LiteRTModel
from elastic.networks.model_files import check_hdf5
from elastic.networks.saved_model import load_saved
from small_models import SMALL

KERAS_3 = keras_stack.KERAS_3
on_keras_2 = pytest.mark.skipif(KERAS_3, reason='Keras 3 loads no such file')
on_keras_3 = pytest.mark.skipif(not KERAS_3, reason='Keras 2 loads no such file')


def refused(path, words):
    """Asserts that a model is refused in one line with these words, with little memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=words) as error:
        load_saved(str(path))
    assert '\n' not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200e3  # kB


def network(layer=None):
    inputs = keras.Input(SMALL)
    x = inputs if layer is None else layer(inputs)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name='scores')(x))


def code(canary):
    """Returns a Lambda layer that makes a folder when it runs."""
    return keras.layers.Lambda(
        lambda x, path=canary: (__import__('os').makedirs(path, exist_ok=True), x)[1],
        output_shape=SMALL)


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / 'canary'
    yield str(path)
    assert not path.exists()


def saved_h5(folder, model):
    path = str(folder / 'model.h5')
    model.save(path)
    return path


def with_config(path, change):
    """Changes the text of the configuration in an .h5 file."""
    with h5py.File(path, 'r+') as file:
        text = file.attrs['model_config']
        file.attrs['model_config'] = change(text.decode() if isinstance(text, bytes) else text)
    return path


def changed_layer(path, name, change):
    """Applies `change` to the configuration of one layer of an .h5 file."""
    def edit(text):
        config = json.loads(text)
        for layer in config['config']['layers']:
            if layer['config']['name'].startswith(name):
                change(layer)
        return json.dumps(config)
    return with_config(path, edit)


# ---------------------------------------------------------------- code

@pytest.fixture
def lambda_file(tmp_path, canary):
    path = saved_h5(tmp_path, network(code(canary)))
    os.path.exists(canary) and os.rmdir(canary)  # building it ran the code
    return path


def test_bytecode_in_a_lambda_layer_behind_a_repeated_key(lambda_file):
    with_config(lambda_file, lambda text: text.replace(
        '"class_name": "Lambda"', '"class_name" : "Dense" , "class_name" : "Lambda"'))
    refused(lambda_file, 'holds a Lambda layer, .*--trust_model')


def test_bytecode_in_a_layer_inside_a_wrapper(tmp_path, canary):
    inputs = keras.Input((4,) + SMALL)
    x = keras.layers.TimeDistributed(code(canary))(inputs)
    path = saved_h5(tmp_path, keras.Model(inputs, keras.layers.Flatten()(x)))
    os.path.exists(canary) and os.rmdir(canary)
    refused(path, 'holds a Lambda layer')


def test_a_file_that_is_hdf5_and_a_zip_archive(lambda_file):
    harmless = str(lambda_file) + '.zip'
    with zipfile.ZipFile(harmless, 'w') as archive:
        archive.writestr('config.json', '{}')
    with open(lambda_file, 'ab') as file, open(harmless, 'rb') as appended:
        file.write(appended.read())
    assert zipfile.is_zipfile(lambda_file) and h5py.is_hdf5(lambda_file)
    refused(lambda_file, 'holds a Lambda layer')


@pytest.mark.parametrize('name, config', [
    ('TFOpLambda', dict(function='io.read_file')),
    ('StringLookup', dict(vocabulary='/dev/stdin'))])  # would hang
def test_a_layer_that_runs_code_or_reads_files(tmp_path, name, config):
    path = changed_layer(saved_h5(tmp_path, network()), 'global', lambda layer: layer.update(
        class_name=name, config=dict(layer['config'], **config)))
    refused(path, 'holds a {} layer'.format(name))


@on_keras_2
def test_a_function_that_only_computes_needs_no_trust(tmp_path):
    inputs = keras.Input(SMALL)
    x = keras.layers.Flatten()(2.0 * inputs + 1.0)
    path = saved_h5(tmp_path, keras.Model(inputs, keras.layers.Dense(3)(x)))
    assert load_saved(path).output_shape == (None, 3)


@pytest.mark.parametrize('activation', [
    {'module': 'os', 'class_name': 'function', 'config': 'system', 'registered_name': 'function'},
    {'module': 'builtins', 'class_name': 'function', 'config': 'eval'},
    {'class_name': '__lambda__', 'config': {'value': '4wEAAAA='}},
    {'class_name': 'PopenSpawnPosix', 'module': 'subprocess', 'config': {}}])
def test_functions_of_python_by_name(tmp_path, activation):
    path = saved_h5(tmp_path, network())
    changed_layer(path, 'scores', lambda layer: layer['config'].update(activation=activation))
    refused(path, 'needs (the function .*|__lambda__|PopenSpawnPosix), a Python class')


@on_keras_2
def test_a_class_under_the_name_of_a_registered_one(tmp_path):
    """Keras 2 ignores registered_name, so it must not vouch for the class."""
    path = saved_h5(tmp_path, network())
    changed_layer(path, 'global', lambda layer: layer.update(
        class_name='TensorFlowOpLayer', registered_name='elastic>Backbone'))
    refused(path, 'needs TensorFlowOpLayer, a Python class or function')


def test_a_folder(tmp_path):
    """The graph of a SavedModel can write files, without its metadata, too."""
    tf.saved_model.save(tf.Module(), str(tmp_path))
    refused(tmp_path, 'a SavedModel folder may write files when it runs')


@on_keras_3  # older converters refuse such an op
def test_ops_of_tensorflow_in_a_litert_file(tmp_path, canary):
    @tf.function(input_signature=[tf.TensorSpec((1,) + SMALL, tf.float32)])
    def write(images):
        tf.io.write_file(canary, 'written')
        return tf.reduce_mean(images, axis=(1, 2))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([write.get_concrete_function()])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS,
                                           tf.lite.OpsSet.SELECT_TF_OPS]
    path = tmp_path / 'model.tflite'
    path.write_bytes(converter.convert())
    with pytest.raises(UserError, match='holds the op FlexWriteFile'):
        LiteRTModel(str(path))


@on_keras_3
def test_a_lambda_layer_in_a_keras_archive(tmp_path, canary):
    path = str(tmp_path / 'model.keras')
    network(code(canary)).save(path)
    os.path.exists(canary) and os.rmdir(canary)
    refused(path, 'holds a Lambda layer')


def rewritten(folder, change):
    """Saves a network as `.keras`; `change` edits the archive, a dict of name -> bytes."""
    path = str(folder / 'model.keras')
    network().save(path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def with_activation(folder, activation):
    """Saves a network as `.keras` whose last layer names this activation."""
    def change(entries):
        config = json.loads(str(entries['config.json'], 'utf-8'))
        config['config']['layers'][-1]['config'].update(activation=activation)
        entries['config.json'] = json.dumps(config)
    return rewritten(folder, change)


@on_keras_3
@pytest.mark.parametrize('module, name', [
    ('keras.datasets.mnist', 'load_data'), ('keras.applications', 'ResNet50'), ('keras', 'Model'),
    ('keras.utils', 'plot_model'), ('keras.activations', 'deserialize'),
    ('keras.activations', '__name__'), ('keras.src.utils.file_utils', 'get_file'),
    ('builtins', 'eval'), ('os', 'system'), (['keras'], 'relu')])
@pytest.mark.parametrize('as_class', [True, False])
def test_a_function_of_keras_that_does_more_than_compute(tmp_path, module, name, as_class):
    """Safe mode of Keras 3.15 finds most of them, and calls them while it loads."""
    found = {'module': module, 'class_name': name, 'config': {}} if as_class else {
        'module': module, 'class_name': 'function', 'config': name}
    if (module, name, as_class) == ('keras', 'Model', True):
        pytest.skip('a model may be part of another')
    path = with_activation(tmp_path, found)
    refused(path, 'needs .*{}, a Python class or function'.format(name))


@on_keras_3
@pytest.mark.parametrize('activation', [
    'relu', {'module': 'builtins', 'class_name': 'function', 'config': 'relu'},
    {'module': 'keras.activations', 'class_name': 'function', 'config': 'relu'},
    {'module': 'keras.layers', 'class_name': 'ReLU', 'config': {}}])
def test_a_function_of_keras_that_computes_needs_no_trust(tmp_path, activation):
    path = with_activation(tmp_path, activation)
    assert load_saved(path).layers[-1].activation(tf.constant(-1.0)) == 0.0


@on_keras_3
def test_what_a_model_was_compiled_with_is_not_read(tmp_path):
    model = network()
    model.compile(loss=lambda labels, outputs: outputs)
    path = str(tmp_path / 'model.keras')
    model.save(path)
    assert load_saved(path).output_shape == (None, 3)


# ---------------------------------------------------------------- other files, memory

def external_link(file, name):
    file[name] = h5py.ExternalLink('/etc/other.h5', '/weights')


def soft_link(file, name):
    file[name] = h5py.SoftLink('/elsewhere')


def external_storage(file, name):
    space = h5py.h5s.create_simple((16,))
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_external(b'/etc/passwd', 0, 64)
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, space, settings)


def virtual(file, name):
    layout = h5py.VirtualLayout((16,), 'f4')
    layout[:] = h5py.VirtualSource('/etc/other.h5', 'data', (16,))
    file.create_virtual_dataset(name, layout)


def inflating(file, name):
    file.create_dataset(name, (10 ** 11,), 'f4', chunks=(10 ** 6,), compression='gzip')


def linked(name):
    """Returns the entry of a symbolic link in a zip archive."""
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


HDF5_ATTACKS = [(external_link, "has a link 'extra'"), (soft_link, "has a link 'extra'"),
                (external_storage, "has data '.*extra' in another file"),
                (virtual, "has data '.*extra' in another file"),
                (inflating, 'inflates to 400,000,[0-9,]+ bytes')]


@pytest.mark.parametrize('attack, words', HDF5_ATTACKS)
def test_hdf5_data_that_lie_elsewhere_or_inflate(tmp_path, attack, words):
    path = saved_h5(tmp_path, network())
    with h5py.File(path, 'r+') as file:
        attack(file['model_weights'], 'extra')
    refused(path, words)
    with pytest.raises(UserError, match=words):
        models.build_model('resnet50', (32, 32, 3), 3, path)  # --weights, before Keras reads it


@on_keras_3
@pytest.mark.parametrize('attack, words', HDF5_ATTACKS)
def test_the_same_inside_a_keras_archive(tmp_path, attack, words):
    def change(entries):
        inside = io.BytesIO(entries['model.weights.h5'])
        with h5py.File(inside, 'r+') as file:
            attack(file, 'extra')
        entries['model.weights.h5'] = inside.getvalue()
    refused(rewritten(tmp_path, change), words)


@on_keras_3
@pytest.mark.parametrize('entry, size, words', [
    ('assets.bin', 3 * 10 ** 8, 'holds assets.bin, which inflates to 300,000,000 bytes'),
    ('/etc/new', 0, 'holds /etc/new, a link or a path'),
    ('../../new', 0, 'holds ../../new, a link or a path'),
    (linked('assets'), 4, 'holds assets, a link')])
def test_a_keras_archive_that_inflates_or_leaves_its_folder(tmp_path, entry, size, words):
    refused(rewritten(tmp_path, lambda entries: entries.update({entry: bytes(size)})), words)


def test_links_in_a_circle_end(tmp_path):
    path = saved_h5(tmp_path, network())
    with h5py.File(path, 'r+') as file:
        file['model_weights']['again'] = file['model_weights']
    check_hdf5(path)
