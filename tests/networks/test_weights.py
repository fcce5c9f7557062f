"""Tests that weights files load exactly, or are refused before anything is assigned."""

import copy
import json
import os
import resource
import zipfile

import numpy as np
import pytest
from tensorflow import keras

import models
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks import backbone
from small_models import (
    DATA,
    SMALL,
    assert_same_values,
    backbones,
    photos,
    set_to_distinct_values,
    small_classifier,
    values,
)

# Keras 2.7 wrote both, by write_stored_files, which this file held until commit 6e711ae.
PAPER_WEIGHTS = os.path.join(DATA, 'small_classifier_keras_2_7.npz')
PAPER_OUTPUT = os.path.join(DATA, 'small_classifier_keras_2_7.json')


@pytest.fixture
def weights_file(tmp_path):
    model = small_classifier()
    set_to_distinct_values(model)
    path = str(tmp_path / 'weights.npz')
    models.save_weights(model, path)
    return model, path


def assert_untouched_by(model, path, match):
    before = values(model.weights)
    with pytest.raises(UserError, match=match) as error:
        models.load_weights(model, path)
    assert_same_values(before, values(model.weights))
    return str(error.value)


def test_weights_round_trip_exactly(weights_file):
    model, path = weights_file
    other = small_classifier()
    models.load_weights(other, path)
    assert len(model.weights) == 14
    assert_same_values(values(model.weights), values(other.weights))
    assert not os.path.exists(path + '.part')


def with_normalization():
    """Returns a classifier with a Normalization layer, as in EfficientNet."""
    inputs = keras.Input(SMALL)
    x = keras.layers.Normalization(name='normalization')(inputs)
    x = keras.layers.Conv2D(8, 3, activation='relu')(x)
    return backbone.classifier(keras.Model(inputs, x), None, SMALL, 3, 'frozen')


@pytest.mark.parametrize('name', ['weights.npz', keras_stack.MODEL_FILE, 'model.h5'])
def test_a_normalization_layer_keeps_its_statistics_when_saved(name, tmp_path):
    """This Keras layer computes constants from its weights, and must do so after loading."""
    keras_stack.set_seed(0)
    model, images = with_normalization(), photos(SMALL)
    layer = next(layer for layer in keras_stack.flat_layers(model) if layer.name == 'normalization')
    layer.set_weights([np.array([0.2, 0.5, 0.7]), np.array([0.1, 0.4, 0.9]), np.array(1)])
    layer.finalize_state()
    path = str(tmp_path / name)
    if name.endswith('.npz'):
        models.save_weights(model, path)
        again = with_normalization()
        models.load_weights(again, path)
    else:
        model.save(path)
        again = models.build_model(path, SMALL, 3)
    expected = model(images, training=False).numpy()
    assert np.abs(with_normalization()(images, training=False) - expected).max() > 1e-2
    np.testing.assert_allclose(again(images, training=False).numpy(), expected, rtol=0,
                               atol=1e-5 * np.abs(expected).max())


def test_build_model_reads_weights_and_then_freezes_statistics(tmp_path):
    path = str(tmp_path / 'weights.npz')
    model = models.build_model('mobilenetv2', (32, 32, 3), 3, 'none', alpha=0.35)
    assert backbones(model)[0].train_statistics  # the default only for random weights
    set_to_distinct_values(model)
    models.save_weights(model, path)
    again = models.build_model('mobilenetv2', (32, 32, 3), 3, path, alpha=0.35)
    assert not backbones(again)[0].train_statistics
    assert_same_values(values(model.weights), values(again.weights))


def test_weights_are_read_without_pickle(weights_file, tmp_path):
    model, path = weights_file
    with np.load(path) as stored:
        arrays = dict(stored)

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'executed'),)
    key = next(iter(sorted(k for k in arrays if k.startswith('trainable/'))))
    arrays[key] = np.array([Payload()], dtype=object)
    np.savez(path, **arrays)
    assert_untouched_by(model, path, 'cannot be read')
    assert not (tmp_path / 'executed').exists()


def test_arrays_of_text_are_refused_before_any_is_assigned(weights_file):
    _, path = weights_file
    with np.load(path) as stored:
        arrays = dict(stored)
    key = [key for key in sorted(arrays) if key.startswith('trainable/')][1]
    arrays[key] = arrays[key].astype(str)
    np.savez(path, **arrays)
    assert_untouched_by(small_classifier(), path, 'weights of another architecture')


def compressed(path):
    np.savez_compressed(path, zeros=np.zeros(10 ** 7))


def overlapping(path):
    """Writes an archive in which many names share the bytes of one large array."""
    with zipfile.ZipFile(path, 'w') as archive:
        with archive.open('large.npy', 'w') as entry:
            np.lib.format.write_array(entry, np.zeros(10 ** 5))
        for number in range(50):
            entry = copy.copy(archive.filelist[0])
            entry.filename = '{}.npy'.format(number)
            archive.filelist.append(entry)


@pytest.mark.parametrize('attack', [compressed, overlapping])
def test_a_file_that_would_fill_the_memory_is_refused(tmp_path, attack):
    path = str(tmp_path / 'weights.npz')
    attack(path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_untouched_by(small_classifier(), path, 'it is compressed, or its parts overlap')
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 50e3  # kB


def test_a_file_cut_short_is_refused_and_nothing_is_assigned(weights_file):
    _, path = weights_file
    os.truncate(path, os.path.getsize(path) - 10)
    assert_untouched_by(small_classifier(), path, 'cannot be read, it may be damaged or cut short')


def test_a_npz_of_another_program_is_refused(tmp_path):
    path = str(tmp_path / 'weights.npz')
    np.savez(path, kernel=np.ones((3, 3)))
    assert_untouched_by(small_classifier(), path, 'does not have the format .* of this project')


def test_every_mismatch_of_another_architecture_is_named(weights_file):
    message = assert_untouched_by(small_classifier(filters=7), weights_file[1],
                                  'weights of another architecture')
    for line in ('stem/kernel 3x3x3x6 in the file, stem/kernel 3x3x3x7 in the model',
                 'depthwise_bn/moving_mean 6 in the file, depthwise_bn/moving_mean 7 in the model'):
        assert line in message
    assert '(11 mismatches)' in message.split('\n')[0]


def test_a_file_with_fewer_arrays_says_how_many(weights_file):
    model, path = weights_file
    with np.load(path) as stored:
        arrays = dict(stored)
    del arrays[sorted(key for key in arrays if key.startswith('trainable/'))[-1]]
    np.savez(path, **arrays)
    assert_untouched_by(model, path, '9 trainable arrays in the file, 10 in the model')


def test_a_head_for_other_classes_is_left_out_with_a_warning(weights_file):
    model, path = weights_file
    other = small_classifier(num_classes=9)
    head = values(other.trainable_weights[-2:])
    with pytest.warns(UserWarning, match='the head keeps its .*head/kernel 8x3 in the file'):
        models.load_weights(other, path)
    assert_same_values(head, values(other.trainable_weights[-2:]))
    assert_same_values(values(model.trainable_weights[:-2] + model.non_trainable_weights),
                       values(other.trainable_weights[:-2] + other.non_trainable_weights))


def test_weights_of_the_papers_stack_give_the_stored_output():
    with open(PAPER_OUTPUT) as stored:
        expected = np.array(json.load(stored))
    model = small_classifier(num_classes=5)
    models.load_weights(model, PAPER_WEIGHTS)
    images = photos(SMALL) * np.array([0.1, 0.4, 0.7, 1], np.float32).reshape((4, 1, 1, 1))
    assert np.ptp(expected, axis=0).min() > 0.01
    np.testing.assert_allclose(model(images, training=False).numpy(), expected, atol=1e-5)
