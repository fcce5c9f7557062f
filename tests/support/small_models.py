"""Builds small networks for tests, saves them, and trains them for a few steps."""

import os

import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.networks import backbone
from elastic.steps.optimizer import make_optimizer
from elastic.steps.training_step import TrainingStep
from small_runs import ROOT

DATA = os.path.join(ROOT, 'tests', 'support')
MOBILENET_VARIABLES = os.path.join(DATA, 'mobilenetv2_035_variables.json')
SMALL = (16, 16, 3)


def photos(shape=(32, 32, 3), batch=4, seed=0):
    """Returns random (B, H, W, 3) float32 images in 0..255."""
    return np.random.RandomState(seed).uniform(0, 255, (batch,) + shape).astype(np.float32)


def small_base(shape=SMALL, filters=6):
    """Returns a network (B, 16, 16, 3) -> (B, 8, 8, 8) with batch normalisation."""
    inputs = keras.Input(shape)
    x = keras.layers.Rescaling(1 / 255.0)(inputs)
    x = keras.layers.Conv2D(filters, 3, strides=2, padding='same', use_bias=False, name='stem')(x)
    x = keras.layers.BatchNormalization(name='stem_bn')(x)
    x = keras.layers.ReLU(name='stem_relu')(x)
    x = keras.layers.DepthwiseConv2D(3, padding='same', use_bias=False, name='depthwise')(x)
    x = keras.layers.BatchNormalization(name='depthwise_bn')(x)
    x = keras.layers.Conv2D(8, 1, activation='relu', name='project')(x)
    return keras.Model(inputs, x, name='small_base')


def small_classifier(num_classes=3, bn_statistics='frozen', filters=6):
    return backbone.classifier(small_base(filters=filters), None, SMALL, num_classes, bn_statistics)


def user_classifier(num_classes=3, activation='softmax'):
    """Returns a nested network that ends in probabilities, as a user may save it."""
    return keras.Sequential([keras.Input(SMALL), small_base(),
                             keras.layers.GlobalAveragePooling2D(), keras.layers.Dropout(0.3),
                             keras.layers.Dense(num_classes, activation=activation)])


def sequential(*layers):
    return keras.Sequential([keras.Input(SMALL), keras.layers.Rescaling(1 / 255.0),
                             keras.layers.Flatten()] + list(layers))


def saved(model, folder, name=None):
    path = os.path.join(str(folder), name or keras_stack.MODEL_FILE)
    model.save(path)
    return path


def set_to_distinct_values(model, seed=0):
    """Makes all arrays distinct, so that swapping two would show; variances are positive."""
    rng = np.random.RandomState(seed)
    for variable in model.weights:
        variable.assign(rng.uniform(0.1, 0.9, tuple(variable.shape)).astype(np.float32))


def values(variables):
    return [keras_stack.raw(v).numpy().copy() for v in variables]


def assert_same_values(one, other):
    """Asserts that two lists of arrays are equal, bit for bit."""
    assert [array.tobytes() for array in one] == [array.tobytes() for array in other]


def train(model, images, num_classes=3, steps=3, rate=0.05):
    labels = tf.constant(np.arange(len(images)) % num_classes, tf.int32)
    variables = model.trainable_variables
    step = TrainingStep(model, make_optimizer('sgd', rate, 100, variables),
                        np.ones(len(variables), bool), weight_decay=5e-4)
    return [float(step(tf.constant(images), labels)[0]) for _ in range(steps)]


def backbones(model):
    return [layer for layer in keras_stack.flat_layers(model)
            if isinstance(layer, backbone.Backbone)]


def described(model):
    """Returns [name, shape] of every variable, in order, by kind."""
    return {kind: [[keras_stack.variable_name(v), [int(n) for n in v.shape]] for v in variables]
            for kind, variables in (('trainable', model.trainable_weights),
                                    ('statistics', model.non_trainable_weights))}
