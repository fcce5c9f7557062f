"""Makes small networks, batches and masks for tests of training steps."""

import collections
import re

import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.networks import backbone
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer

# In the order of conv_stack().trainable_variables.
KERNEL_1, KERNEL_2, KERNEL_3, KERNEL_4, HEAD_KERNEL, HEAD_BIAS = range(6)
N = 6


def conv_stack():
    """Returns a network of four convolutions without bias and a head; all shapes differ."""
    keras_stack.set_seed(0)  # the same network whichever tests ran before
    inputs = x = keras.Input((12, 12, 3))
    for i, filters in enumerate((4, 5, 6, 7), 1):
        x = keras.layers.Conv2D(filters, 3, padding='same', activation='relu', use_bias=False,
                                name='conv{}'.format(i))(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))


def batch(size=4, seed=0):
    rng = np.random.RandomState(seed)
    return (tf.constant(rng.uniform(-1, 1, (size, 12, 12, 3)), tf.float32),
            tf.constant(rng.randint(0, 3, size), tf.int32))


def mask_of(*chosen):
    mask = np.zeros(N, dtype=bool)
    mask[list(chosen)] = True
    return mask


def loss_of(model, images, labels, training=True):
    """Returns the loss of a model that returns logits."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return float(loss(labels, model(images, training=training)))


def maker_of(model, optimizer='sgd', rate=0.1, decay=1e-3):
    return StepMaker(model, make_optimizer(optimizer, rate, 50, model.trainable_variables), decay,
                     *batch())


def layers_with_backprop(operations):
    """Returns {op type: sorted names of the layers whose backward pass has such an op}."""
    found = collections.defaultdict(list)
    for name, op in operations:
        layer = re.search(r'gradient_tape/.*/(conv\d|head)(_\d+)?/', name)
        if layer and op in ('Conv2DBackpropFilter', 'Conv2DBackpropInput', 'ReluGrad', 'MatMul',
                            'BiasAddGrad'):
            found[op].append(layer.group(1))
    return {op: sorted(layers) for op, layers in found.items()}


def residual():
    """Returns a network where a third convolution and the head read the ReLU of a sum of two."""
    keras_stack.set_seed(0)
    inputs = keras.Input((12, 12, 3))
    first = keras.layers.Conv2D(4, 3, padding='same', use_bias=False, name='first')(inputs)
    second = keras.layers.Conv2D(4, 3, padding='same', use_bias=False, name='second')(first)
    joint = keras.layers.ReLU(name='relu')(keras.layers.Add(name='join')([first, second]))
    third = keras.layers.Conv2D(4, 3, padding='same', use_bias=False, name='third')(joint)
    x = keras.layers.Concatenate()([keras.layers.GlobalAveragePooling2D()(third),
                                    keras.layers.GlobalAveragePooling2D()(joint)])
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))


class Centred(keras.layers.Layer):
    """Subtracts the mean over the batch, so that images depend on each other."""

    def call(self, x):
        return x - tf.reduce_mean(x, 0)


def small_model(bn_statistics='train', bias=True):
    """Returns a classifier with every kind of state. bias: that of the convolution before BN."""
    keras_stack.set_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, use_bias=bias)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    base = keras.Model(inputs, keras.layers.DepthwiseConv2D(3)(x))
    return backbone.classifier(base, None, (8, 8, 3), 3, bn_statistics)


def state_of(model, optimizer):
    """Returns all variables that a step may change."""
    return list(model.variables) + keras_stack.optimizer_variables(optimizer)


def batches(count, seed=0):
    rng = np.random.RandomState(seed)
    return [(tf.constant(rng.rand(4, 8, 8, 3), tf.float32), tf.constant([0, 1, 2, 0]))
            for _ in range(count)]


def still(model):
    """Turns off random layers, whose noise differs between traces on the older stacks."""
    for layer in keras_stack.flat_layers(model):
        for attribute in ('rate', 'stddev'):
            if isinstance(getattr(layer, attribute, None), float):
                setattr(layer, attribute, 0.0)


def random_masks(count, n):
    """Yields (n,) bool masks with a random deepest tensor and a random density above it."""
    rng = np.random.RandomState(0)
    for _ in range(count):
        mask = (rng.rand(n) < rng.uniform(0.1, 1)) & (np.arange(n) >= rng.randint(0, n))
        mask[rng.randint(0, n)] = True
        yield mask
