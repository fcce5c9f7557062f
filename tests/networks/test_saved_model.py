"""Tests which saved models load, get a new head, or are refused."""

import os
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import models
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.saved_model import count_trainable, from_saved_model, load_saved
from elastic.steps.training_step import evaluation_function
from small_models import (
    DATA,
    SMALL,
    assert_same_values,
    backbones,
    described,
    photos,
    saved,
    sequential,
    set_to_distinct_values,
    small_base,
    small_classifier,
    train,
    user_classifier,
    values,
)
from small_runs import script

# Class scores of a dark photo. Keras 3.15.1 and 2.7.0 saved the models at commit 9773f57, when all
# modules were in the root.
FORMER_OUTPUTS = {'.keras': [-0.6517079, -0.3490128, 0.4695595],
                  '.h5': [-0.873437, -0.9957624, -1.1076376]}


def test_a_model_saved_before_the_package_loads():
    ending = os.path.splitext(keras_stack.MODEL_FILE)[1]
    model = models.build_model(os.path.join(DATA, 'saved_before_the_package' + ending), SMALL, 3)
    assert len(backbones(model)) == 1 and backbones(model)[0].preprocessing == 'mobilenet_v2'
    outputs = model(0.1 * photos(SMALL), training=False)
    np.testing.assert_allclose(outputs[0], FORMER_OUTPUTS[ending], atol=1e-5)


def test_a_classifier_of_ours_loads_with_its_weights_and_one_backbone(tmp_path):
    model = small_classifier()
    set_to_distinct_values(model)
    images = photos(SMALL)
    again = models.build_model(saved(model, tmp_path), SMALL, 3)
    np.testing.assert_allclose(again(images, training=False), model(images, training=False),
                               rtol=1e-5)
    assert len(backbones(again)) == 1
    assert described(again) == described(model)


@pytest.mark.parametrize('build, in_logits', [
    (lambda: user_classifier(activation='softmax'), False),
    (lambda: user_classifier(activation=None), True),
    (lambda: sequential(keras.layers.Dense(3), keras.layers.Softmax()), False),
    (lambda: sequential(keras.layers.Dense(7, activation='softmax'), keras.layers.Dense(3)), True)],
    ids=['nested softmax', 'nested logits', 'Softmax layer', 'softmax inside'])
def test_the_loss_fits_the_kind_of_output_of_a_saved_classifier(build, in_logits, tmp_path):
    model = models.build_model(saved(build(), tmp_path), SMALL, 3)
    images, labels = photos(SMALL), np.array([0, 1, 2, 1])
    outputs = model(images, training=False).numpy().astype(np.float64)
    if in_logits:
        outputs = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(outputs.sum(axis=1), 1, atol=1e-5)
    by_hand = -np.log(outputs[np.arange(4), labels]).sum()
    loss, *_ = evaluation_function(model)(tf.constant(images), tf.constant(labels, tf.int32))
    assert float(loss) == pytest.approx(by_hand, rel=1e-4)


def test_a_saved_feature_map_gets_a_new_head_and_keeps_its_weights(tmp_path):
    base = small_base()
    set_to_distinct_values(base)
    model = models.build_model(saved(base, tmp_path), SMALL, 7)
    assert model.output_shape == (None, 7)
    assert [keras_stack.variable_name(v) for v in model.trainable_weights[-2:]] == [
        'head/kernel', 'head/bias']
    assert_same_values(values(base.trainable_weights), values(model.trainable_weights)[:-2])


# --- heads

@pytest.mark.parametrize('build', [
    lambda: user_classifier(num_classes=1, activation='sigmoid'),
    lambda: small_classifier(num_classes=3),
    lambda: keras.Sequential([keras.Input(SMALL), user_classifier(num_classes=4, activation=None),
                              keras.layers.Softmax()])],
    ids=['one sigmoid', 'ours', 'softmax after a nested head'])
def test_a_head_for_another_number_of_classes_is_replaced_with_a_warning(build, tmp_path):
    classifier = build()
    set_to_distinct_values(classifier)
    with pytest.warns(UserWarning, match='data has 2 classes: its last layer, .*, was replaced'):
        model = models.build_model(saved(classifier, tmp_path), SMALL, 2)
    assert model.output_shape == (None, 2)
    kept = values(classifier.trainable_weights)[:-2]
    assert_same_values(kept, values(model.trainable_weights)[:-2])
    assert len(backbones(model)) == 1
    assert train(model, photos(SMALL), 2)[-1] > 0


@pytest.mark.parametrize('last', [
    keras.layers.GlobalAveragePooling2D,
    lambda: keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(9, activation='relu')])])
def test_pooled_features_get_a_head(last, tmp_path):
    extractor = keras.Sequential([keras.Input(SMALL), small_base(), last()])
    model = models.build_model(saved(extractor, tmp_path), SMALL, 3)
    assert model.output_shape == (None, 3)
    assert len(model.trainable_weights) == len(extractor.trainable_weights) + 2
    assert train(model, photos(SMALL))[-1] > 0


def test_probabilities_whose_layer_cannot_be_replaced_are_refused(tmp_path):
    inputs = keras.Input(SMALL)
    x = keras.layers.Conv2D(5, 1)(small_base()(inputs))
    x = keras.layers.Softmax()(keras.layers.GlobalAveragePooling2D()(x))
    path = saved(keras.Model(inputs, x), tmp_path)
    with pytest.raises(UserError, match='5 probabilities, the data has 3 classes.*without a head'):
        models.build_model(path, SMALL, 3)
    assert models.build_model(path, SMALL, 5).output_shape == (None, 5)


# --- frozen layers

def test_all_tensors_of_a_frozen_model_are_trained_unless_it_is_to_stay_frozen(tmp_path):
    classifier = user_classifier()
    classifier.layers[0].trainable = False
    path = saved(classifier, tmp_path)
    model = models.build_model(path, SMALL, 3)
    assert len(model.trainable_variables) == count_trainable(model) == 10
    model = models.build_model(path, SMALL, 3, keep_frozen=True)
    assert (len(model.trainable_variables), count_trainable(model)) == (2, 10)
    before = values(model.weights)
    assert train(model, photos(SMALL))[-1] > 0
    moved = [not np.array_equal(*pair) for pair in zip(before, values(model.weights))]
    assert sum(moved) == 2


def test_a_model_that_is_frozen_whole_cannot_stay_so(tmp_path):
    classifier = user_classifier()
    classifier.trainable = False
    path = saved(classifier, tmp_path)
    with pytest.raises(UserError, match='all layers .* are frozen: leave --keep_frozen out'):
        models.build_model(path, SMALL, 3, keep_frozen=True)
    assert len(models.build_model(path, SMALL, 3).trainable_variables) == 10


# --- what does not fit

def test_a_saved_model_for_another_input_size_is_refused(tmp_path):
    path = saved(user_classifier(), tmp_path)
    with pytest.raises(UserError, match='takes images of 16x16x3, not 32x32x3: set --input_size'):
        models.build_model(path, (32, 32, 3), 3)


def test_weights_beside_a_saved_model_are_never_ignored(tmp_path):
    path = saved(user_classifier(), tmp_path)
    (tmp_path / 'other.h5').write_bytes(b'any weights')
    for weights in 'none', str(tmp_path / 'other.h5'):
        with pytest.raises(UserError, match='saved model .* has its own weights'):
            models.build_model(path, SMALL, 3, weights)


# --- code in a model


def saved_with_lambda(folder, suffix):
    inputs = keras.Input(SMALL)
    x = keras.layers.Lambda(lambda images: images / 255, output_shape=SMALL)(inputs)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return saved(keras.Model(inputs, keras.layers.Dense(3)(x)), folder, 'model' + suffix)


@pytest.mark.parametrize('suffix', ['.keras', '.h5'] if keras_stack.KERAS_3 else ['.h5', ''])
def test_a_model_with_code_in_it_is_refused_unless_trusted(tmp_path, suffix):
    path = saved_with_lambda(tmp_path, suffix)
    with pytest.raises(UserError, match='(Lambda layer|SavedModel folder).*--trust_model'):
        from_saved_model(path, SMALL, 3, 'frozen')
    assert from_saved_model(path, SMALL, 3, 'frozen', trust=True).output_shape == (None, 3)


@pytest.mark.parametrize('content', [b'', b'not a model', b'PK\x03\x04', b'\x89HDF\r\n\x1a\n'])
def test_a_file_that_is_no_saved_model_is_refused(tmp_path, content):
    path = tmp_path / keras_stack.MODEL_FILE
    path.write_bytes(content)
    with pytest.raises(UserError, match='is not a saved Keras model that this stack can read'):
        models.build_model(str(path), SMALL, 3)


@pytest.mark.skipif(keras_stack.KERAS_3, reason='Keras 3 reads such files')
def test_a_file_of_a_newer_keras_is_refused_with_what_to_do():
    path = os.path.join(DATA, 'saved_before_the_package.keras')
    with pytest.raises(UserError, match='was written by a newer Keras than that of TensorFlow 2'):
        models.build_model(path, SMALL, 3)


@keras.utils.register_keras_serializable(package='mine')
class Scaled(keras.layers.Layer):
    """A layer of the user's own."""

    def call(self, inputs):
        return inputs / 255


@pytest.mark.thorough
def test_a_layer_of_the_users_own_is_named_with_what_to_do(tmp_path):
    inputs = keras.Input(SMALL)
    x = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(Scaled()(inputs)))
    path = saved(keras.Model(inputs, x), tmp_path)
    assert models.build_model(path, SMALL, 3).output_shape == (None, 3)  # it is imported
    check = ('import models\nfrom elastic.command_line import run\n'
             'run(lambda argv: models.build_model({!r}, {!r}, 3))'.format(path, SMALL))
    status, _, errors = script('-c', check)
    assert status == 2
    assert re.search('needs (mine>)?Scaled, a Python class .*: from Python, import it, .*'
                     'docs/python.md shows$', errors.strip()), errors


# --- ends and inputs of other shapes

def network(inputs):
    x = keras.layers.Conv2D(4, 3, strides=2)(keras.layers.Rescaling(1 / 255.0)(inputs))
    return keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(x))


def test_a_dict_of_one_output_or_one_input_is_trained_as_that_array(tmp_path):
    inputs = keras.Input(SMALL, name='image')
    outputs = network(inputs)
    for ends in ((inputs, {'scores': outputs}), ({'image': inputs}, outputs)):
        path = saved(keras.Model(*ends), tmp_path)
        model = models.build_model(path, SMALL, 2)
        assert model.output_shape == (None, 2) and len(model.trainable_weights) == 4
        assert train(model, photos(SMALL), 2)[-1] > 0
        with pytest.warns(UserWarning, match='data has 3 classes'):
            assert models.build_model(path, SMALL, 3).output_shape == (None, 3)
    path = saved(keras.Model(inputs, {'scores': outputs, 'more': network(inputs)}), tmp_path)
    with pytest.raises(UserError, match='has 1 inputs and 2 outputs; needed is'):
        models.build_model(path, SMALL, 2)


def test_what_to_put_in_front_of_a_network_of_other_arrays_is_said_and_works(tmp_path):
    oblong = keras.Input((8, 24, 3))
    path = saved(keras.Model(oblong, network(oblong)), tmp_path)
    for load in (lambda: models.build_model(path, SMALL, 2), lambda: load_saved(path)):
        with pytest.raises(UserError, match=r'8x24x3, but all are squares here: put '
                           r'keras.layers.Resizing\(8, 24\) in front of it'):
            load()
    front = keras.Sequential([keras.Input(SMALL), keras.layers.Resizing(8, 24),
                              keras.models.load_model(path)])
    model = models.build_model(saved(front, tmp_path), SMALL, 2)
    assert train(model, photos(SMALL), 2)[-1] > 0
    channels_first = keras.Input((3, 16, 16))
    turned = keras.layers.Permute((2, 3, 1))(channels_first)
    path = saved(keras.Model(channels_first, network(turned)), tmp_path)
    with pytest.raises(UserError, match=r'3x16x16; .* put keras.layers.Permute\(\(3, 1, 2\)\)'):
        models.build_model(path, SMALL, 2)


@pytest.mark.parametrize('options', [dict(batch_size=1), dict(dtype='uint8')])
def test_a_network_saved_for_one_batch_or_for_bytes_is_trained(tmp_path, options):
    inputs = keras.Input(SMALL, **options)
    model = models.build_model(saved(keras.Model(inputs, network(inputs)), tmp_path), SMALL, 2)
    assert train(model, photos(SMALL), 2)[-1] > 0


@pytest.mark.skipif(not keras_stack.KERAS_3, reason='keras.ops came with Keras 3')
def test_a_network_whose_layers_fix_the_number_of_images_is_refused(tmp_path):
    inputs = keras.Input(SMALL, batch_size=1)
    outputs = keras.layers.Dense(2)(keras.ops.reshape(inputs, (1, -1)))
    path = saved(keras.Model(inputs, outputs), tmp_path)
    with pytest.raises(UserError, match=r'only on 1 image\(s\) at once, by the shape in one'):
        models.build_model(path, SMALL, 2)
