"""Models that a user saved: what comes back, what gets a new head, what is refused."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import models
from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.steps.training_step import evaluation_function
from small_models import (
    SMALL,
    backbones,
    described,
    photos,
    saved,
    sequential,
    set_to_distinct_values,
    small_base,
    small_classifier,
    user_classifier,
    values,
)


def test_our_saved_classifier_comes_back_with_its_weights_and_is_not_wrapped_again(tmp_path):
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
    (lambda: sequential(keras.layers.Dense(3), keras.layers.Activation('softmax')), False),
    (lambda: sequential(keras.layers.Dense(3, activation='softmax')), False),
    (lambda: sequential(keras.layers.Dense(7, activation='softmax'), keras.layers.Dense(3)), True)],
    ids=['nested softmax', 'nested logits', 'Softmax layer', 'Activation layer', 'softmax',
         'softmax inside'])
def test_the_loss_of_a_saved_classifier_is_that_of_what_it_outputs(build, in_logits, tmp_path):
    model = models.build_model(saved(build(), tmp_path), SMALL, 3)
    images, labels = photos(SMALL), np.array([0, 1, 2, 1])
    outputs = model(images, training=False).numpy().astype(np.float64)
    if in_logits:
        outputs = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(outputs.sum(axis=1), 1, atol=1e-5)
    by_hand = -np.log(outputs[np.arange(4), labels]).sum()
    loss, _ = evaluation_function(model)(tf.constant(images), tf.constant(labels, tf.int32))
    assert float(loss) == pytest.approx(by_hand, rel=1e-4)


def test_a_saved_feature_map_gets_a_new_head_and_keeps_its_weights(tmp_path):
    base = small_base()
    set_to_distinct_values(base)
    model = models.build_model(saved(base, tmp_path), SMALL, 7)
    assert model.output_shape == (None, 7)
    assert [keras_stack.variable_name(v) for v in model.trainable_weights[-2:]] == [
        'head/kernel', 'head/bias']
    for mine, loaded in zip(values(base.trainable_weights), values(model.trainable_weights)):
        np.testing.assert_array_equal(mine, loaded)


def test_a_saved_classifier_for_another_number_of_classes_is_refused(tmp_path):
    path = saved(user_classifier(num_classes=4), tmp_path)
    with pytest.raises(UserError, match='tells 4 classes apart, the data has 3'):
        models.build_model(path, SMALL, 3)


def test_a_saved_model_for_another_input_size_is_refused(tmp_path):
    path = saved(user_classifier(), tmp_path)
    with pytest.raises(UserError, match='takes images of 16x16x3, not 32x32x3: set --input_size'):
        models.build_model(path, (32, 32, 3), 3)


def test_a_file_that_is_no_saved_model_is_refused(tmp_path):
    path = str(tmp_path / keras_stack.MODEL_FILE)
    with open(path, 'wb') as out:
        out.write(b'not a model')
    with pytest.raises(UserError, match='is not a saved Keras model that this stack can read'):
        models.build_model(path, SMALL, 3)


def test_weights_given_beside_a_saved_model_are_used_or_refused_but_never_ignored(tmp_path):
    path = saved(user_classifier(), tmp_path)
    with pytest.raises(UserError, match='saved model .* brings its weights'):
        models.build_model(path, SMALL, 3, 'none')
    h5 = str(tmp_path / 'other.h5')
    with open(h5, 'wb') as out:
        out.write(b'any weights')
    with pytest.raises(UserError):
        models.build_model(path, SMALL, 3, h5)
