"""Tests the batch statistics of a backbone: frozen, trained, or taken from one batch."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import models
from elastic.compat import keras_stack
from elastic.networks.backbone import statistics_from_batch
from small_models import (
    SMALL,
    backbones,
    photos,
    saved,
    small_base,
    small_classifier,
    train,
    user_classifier,
    values,
)


@pytest.mark.parametrize('kind', ['our classifier', "a user's classifier", "a user's feature map"])
def test_moving_statistics_of_a_saved_model_change_unless_frozen(kind, tmp_path):
    build = {'our classifier': lambda: small_classifier(bn_statistics='train'),
             "a user's classifier": user_classifier, "a user's feature map": small_base}[kind]
    path = saved(build(), tmp_path)
    for bn_statistics, stays in (('frozen', True), (None, True), ('train', False)):
        model = models.build_model(path, SMALL, 3, bn_statistics=bn_statistics)
        before, trained = values(model.non_trainable_weights), values(model.trainable_weights)
        assert len(before) == 4
        train(model, photos(SMALL))
        after = values(model.non_trainable_weights)
        assert [np.array_equal(a, b) for a, b in zip(before, after)] == [stays] * 4
        assert not any(np.array_equal(a, b)
                       for a, b in zip(trained, values(model.trainable_weights)))


def modes_of(model):
    return [layer.train_statistics for layer in backbones(model)] + [
        layer.momentum for layer in keras_stack.flat_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)]


def test_statistics_from_batch_are_those_of_the_batch():
    model = small_classifier(bn_statistics='frozen')
    images = photos(SMALL)
    statistics_from_batch(model, tf.constant(images))
    features = keras.layers.Conv2D(6, 3, strides=2, padding='same', use_bias=False)
    features.build((None,) + SMALL)
    features.set_weights([keras_stack.raw(model.trainable_weights[0]).numpy()])
    stem = features(images / 255.0).numpy()
    by_name = {keras_stack.variable_name(v): keras_stack.raw(v).numpy()
               for v in model.non_trainable_weights}
    np.testing.assert_allclose(by_name['stem_bn/moving_mean'], stem.mean((0, 1, 2)), atol=1e-5)
    # The fused kernel stores the unbiased variance.
    np.testing.assert_allclose(by_name['stem_bn/moving_variance'], stem.var((0, 1, 2)), rtol=0.01)
    assert modes_of(model) == [False, 0.99, 0.99]


@pytest.mark.parametrize('kind', [list, dict])
def test_statistics_from_batch_take_several_inputs(kind):
    inputs = {'left': keras.Input((4,), name='left'), 'right': keras.Input((4,), name='right')}
    joined = keras.layers.Concatenate()([keras.layers.BatchNormalization(name=name + '_bn')(each)
                                         for name, each in sorted(inputs.items())])
    model = keras.Model(list(inputs.values()) if kind is list else inputs, joined)
    batch = {name: np.random.RandomState(i).normal(i, 1, (64, 4)).astype(np.float32)
             for i, name in enumerate(sorted(inputs))}
    statistics_from_batch(model, list(map(tf.constant, batch.values())) if kind is list
                          else {name: tf.constant(x) for name, x in batch.items()})
    for name, x in batch.items():
        np.testing.assert_allclose(keras_stack.raw(model.get_layer(name + '_bn').moving_mean),
                                   x.mean(axis=0), atol=1e-5)


@pytest.mark.thorough
def test_frozen_statistics_turn_off_dropout_inside_the_base():
    model = models.build_model('EfficientNetB0', (32, 32, 3), 3, 'none', bn_statistics='frozen')
    layer = model.get_layer('backbone')
    images = tf.constant(photos(batch=8))
    statistics_from_batch(model, images)  # otherwise the features vanish
    assert sum(isinstance(inner, keras.layers.Dropout) and inner.noise_shape is not None
               for inner in keras_stack.flat_layers(layer.base)) == 9  # stochastic depth
    for train_statistics in (False, True):
        layer.set_statistics(train_statistics)
        first, second = [layer(images, training=True).numpy() for _ in range(2)]
        assert np.ptp(first, axis=0).max() > 0.1
        assert (np.abs(first - second).max() > 0.1) == train_statistics
        heads = [model(images, training=True).numpy() for _ in range(2)]
        assert (heads[0] != heads[1]).any()  # the head's dropout stays on
