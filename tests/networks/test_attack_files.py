"""Tests that models from others neither run code, nor read other files, nor fill the memory.

Each test makes a file that did so, or that a released Keras loaded, without --trust_model.
"""

import io
import json
import resource
import stat
import zipfile

import h5py
import pytest
import tensorflow as tf
from tensorflow import keras

import models
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.export.litert import LiteRTModel
from elastic.networks.model_files import check_hdf5
from elastic.networks.saved_model import load_saved
from small_models import SMALL

KERAS_3 = keras_stack.KERAS_3
SUFFIXES = ('.h5', '.keras') if KERAS_3 else ('.h5',)
on_keras_2 = pytest.mark.skipif(KERAS_3, reason='Keras 3 loads no such file')
on_keras_3 = pytest.mark.skipif(not KERAS_3, reason='Keras 2 loads no such file')


def refused(path, words):
    """Asserts that a model is refused in one line with these words, with little memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=words) as error:
        load_saved(str(path))
    assert '\n' not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200e3  # kB


def saved(folder, suffix='.h5'):
    inputs = keras.Input(SMALL)
    x = keras.layers.GlobalAveragePooling2D()(inputs)
    path = str(folder / ('model' + suffix))
    keras.Model(inputs, keras.layers.Dense(3)(x)).save(path)
    return path


def rewritten(folder, change):
    """Saves a network as `.keras`; `change` edits the archive, a dict of name -> bytes."""
    path = saved(folder, '.keras')
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def with_config(folder, suffix, old, new):
    """Saves a network with `new` in place of `old` in its configuration, both JSON."""
    def change(entries):
        text = str(entries['config.json'], 'utf-8')
        assert old in text
        entries['config.json'] = text.replace(old, new)
    if suffix == '.keras':
        return rewritten(folder, change)
    path = saved(folder, suffix)
    with h5py.File(path, 'r+') as file:
        text = file.attrs['model_config']
        text = str(text, 'utf-8') if isinstance(text, bytes) else text
        assert old in text
        file.attrs['model_config'] = text.replace(old, new)
    return path


# ---------------------------------------------------------------- code

POOLING, LINEAR = '"class_name": "GlobalAveragePooling2D"', '"activation": "linear"'


@pytest.mark.parametrize('suffix', SUFFIXES)
@pytest.mark.parametrize('old, new, words', [
    (POOLING, '"class_name": "Lambda"', 'holds a Lambda layer, .*--trust_model'),
    (POOLING, POOLING + ', "layer": {"class_name": "Lambda"}', 'holds a Lambda layer'),  # wrapped
    (POOLING + ', "config": {', '"class_name": "TFOpLambda", "config": {"function": "io.open",',
     'holds a TFOpLambda layer'),
    (POOLING, '"class_name": "StringLookup"', 'holds a StringLookup layer'),
    (LINEAR, '"activation": {"module": "os", "class_name": "function", "config": "system", '
     '"registered_name": "function"}', 'needs the function system, a Python class or function'),
    (LINEAR, '"activation": {"class_name": "__lambda__", "config": {"value": "4wEAAAA="}}',
     'needs __lambda__'),
    (LINEAR, '"activation": {"class_name": "PopenSpawnPosix", "module": "subprocess"}',
     'needs PopenSpawnPosix')])
def test_a_configuration_that_runs_code_or_reads_files(tmp_path, suffix, old, new, words):
    refused(with_config(tmp_path, suffix, old, new), words)


def test_a_file_that_is_hdf5_and_a_zip_archive(tmp_path):
    path = with_config(tmp_path, '.h5', POOLING, '"class_name": "Lambda"')
    with open(path, 'ab') as file, zipfile.ZipFile(file, 'w') as archive:
        archive.writestr('config.json', '{}')
    assert zipfile.is_zipfile(path) and h5py.is_hdf5(path)
    refused(path, 'holds a Lambda layer')


@on_keras_2
def test_a_function_that_only_computes_needs_no_trust(tmp_path):
    inputs = keras.Input(SMALL)
    x = keras.layers.Flatten()(2.0 * inputs + 1.0)
    path = str(tmp_path / 'model.h5')
    keras.Model(inputs, keras.layers.Dense(3)(x)).save(path)
    assert load_saved(path).output_shape == (None, 3)


@on_keras_2
def test_a_class_under_the_name_of_a_registered_one(tmp_path):
    """Keras 2 ignores registered_name, so it must not vouch for the class."""
    refused(with_config(tmp_path, '.h5', POOLING, '"class_name": "TensorFlowOpLayer", '
                        '"registered_name": "elastic>Backbone"'), 'needs TensorFlowOpLayer')


def test_a_folder(tmp_path):
    """The graph of a SavedModel can write files, without its metadata, too."""
    tf.saved_model.save(tf.Module(), str(tmp_path))
    refused(tmp_path, 'a SavedModel folder may write files when it runs')


@on_keras_3  # older converters refuse such an op
def test_ops_of_tensorflow_in_a_litert_file(tmp_path):
    @tf.function(input_signature=[tf.TensorSpec((1,) + SMALL, tf.float32)])
    def write(images):
        tf.io.write_file(str(tmp_path / 'canary'), 'written')
        return tf.reduce_mean(images, axis=(1, 2))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([write.get_concrete_function()])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS,
                                           tf.lite.OpsSet.SELECT_TF_OPS]
    path = tmp_path / 'model.tflite'
    path.write_bytes(converter.convert())
    with pytest.raises(UserError, match='holds the op FlexWriteFile'):
        LiteRTModel(str(path))
    assert not (tmp_path / 'canary').exists()


@on_keras_3
@pytest.mark.parametrize('module, name', [
    ('keras.datasets.mnist', 'load_data'), ('keras.applications', 'ResNet50'),
    ('keras.activations', 'deserialize'), ('keras.src.utils.file_utils', 'get_file'),
    ('builtins', 'eval')])
@pytest.mark.parametrize('as_class', [True, False])
def test_a_function_of_keras_that_does_more_than_compute(tmp_path, module, name, as_class):
    """Safe mode of Keras 3.15 finds most of them, and calls them while it loads."""
    found = {'module': module, 'class_name': name, 'config': {}} if as_class else {
        'module': module, 'class_name': 'function', 'config': name}
    path = with_config(tmp_path, '.keras', LINEAR, '"activation": ' + json.dumps(found))
    refused(path, 'needs .*{}, a Python class or function'.format(name))


@on_keras_3
@pytest.mark.parametrize('activation', [
    'relu', {'module': 'builtins', 'class_name': 'function', 'config': 'relu'},
    {'module': 'keras.activations', 'class_name': 'function', 'config': 'relu'},
    {'module': 'keras.layers', 'class_name': 'ReLU', 'config': {}}])
def test_a_function_of_keras_that_computes_needs_no_trust(tmp_path, activation):
    path = with_config(tmp_path, '.keras', LINEAR, '"activation": ' + json.dumps(activation))
    assert load_saved(path).layers[-1].activation(tf.constant(-1.0)) == 0.0


@on_keras_3
def test_what_a_model_was_compiled_with_is_not_read(tmp_path):
    model = keras.Sequential([keras.Input(SMALL), keras.layers.Flatten(), keras.layers.Dense(3)])
    model.compile(loss=lambda labels, outputs: outputs)
    model.save(str(tmp_path / 'model.keras'))
    assert load_saved(str(tmp_path / 'model.keras')).output_shape == (None, 3)


# ---------------------------------------------------------------- other files, memory

def external_link(file, name):
    file[name] = h5py.ExternalLink('/etc/other.h5', '/weights')


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


HDF5_ATTACKS = [(external_link, "has a link 'extra'"),
                (external_storage, "has data '.*extra' in another file"),
                (virtual, "has data '.*extra' in another file"),
                (inflating, 'inflates to 400,000,[0-9,]+ bytes')]


@pytest.mark.parametrize('suffix', SUFFIXES)
@pytest.mark.parametrize('attack, words', HDF5_ATTACKS)
def test_hdf5_data_that_lie_elsewhere_or_inflate(tmp_path, suffix, attack, words):
    def change(entries):
        inside = io.BytesIO(entries['model.weights.h5'])
        with h5py.File(inside, 'r+') as file:
            attack(file, 'extra')
        entries['model.weights.h5'] = inside.getvalue()
    if suffix == '.keras':
        refused(rewritten(tmp_path, change), words)
        return
    path = saved(tmp_path)
    with h5py.File(path, 'r+') as file:
        attack(file['model_weights'], 'extra')
    refused(path, words)
    with pytest.raises(UserError, match=words):
        models.build_model('resnet50', (32, 32, 3), 3, path)  # --weights, before Keras reads it


@on_keras_3
@pytest.mark.parametrize('entry, size, words', [
    ('assets.bin', 3 * 10 ** 8, 'holds assets.bin, which inflates to 300,000,000 bytes'),
    ('/etc/new', 0, 'holds /etc/new, a link or a path'),
    ('../../new', 0, 'holds ../../new, a link or a path'),
    (linked('assets'), 4, 'holds assets, a link')])
def test_a_keras_archive_that_inflates_or_leaves_its_folder(tmp_path, entry, size, words):
    refused(rewritten(tmp_path, lambda entries: entries.update({entry: bytes(size)})), words)


def test_links_in_a_circle_end(tmp_path):
    path = saved(tmp_path)
    with h5py.File(path, 'r+') as file:
        file['model_weights']['again'] = file['model_weights']
    check_hdf5(path)
