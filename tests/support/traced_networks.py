"""Builds small networks, and their executed graphs and real traces, once for all tests."""

import collections
import functools
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.timing.op_times import read_trace
from elastic.timing.trace import executed_graph, record_trace

STEPS = 3  # in each trace


def plain():
    """Returns convolution -> Dense with ReLU -> Dense. Tensors: 0,1 conv; 2,3 mid; 4,5 head."""
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Flatten()(keras.layers.Conv2D(4, 3, name='conv')(inputs))
    x = keras.layers.Dense(5, activation='relu', name='mid')(x)
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))


def branching():
    """Returns a sum of two branches. Tensors: 0,1 stem; 2,3 left; 4,5 right; 6,7 head."""
    inputs = keras.Input((24, 24, 3))
    stem = keras.layers.Conv2D(16, 3, padding='same', activation='relu', name='stem')(inputs)
    left = keras.layers.Conv2D(16, 3, padding='same', activation='relu', name='left')(stem)
    right = keras.layers.Conv2D(16, 3, padding='same', activation='relu', name='right')(stem)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Add(name='sum')([left, right]))
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))


Executed = collections.namedtuple('Executed', 'variables maker batch graph')
Traced = collections.namedtuple('Traced', 'variables step graph times path')


@functools.lru_cache(maxsize=None)
def executed(build, optimizer='sgd', clip_norm=None):
    """Returns the executed graph of the full step, without a trace, which takes a second more."""
    model = build()
    variables = model.trainable_variables
    rng = np.random.RandomState(0)
    images = tf.constant(rng.uniform(0, 1, (4,) + tuple(model.input_shape[1:])), tf.float32)
    labels = tf.constant([0, 1, 2, 1])
    trained_by = make_optimizer(optimizer, 1e-3, 100, variables, clip_norm=clip_norm)
    maker = StepMaker(model, trained_by, 5e-4, images, labels)
    return Executed(variables, maker, (images, labels), executed_graph(maker, images, labels))


@functools.lru_cache(maxsize=None)
def traced(build, optimizer='sgd', clip_norm=None):
    """Returns the executed graph and a real trace of the full step; times: op name -> ms."""
    case = executed(build, optimizer, clip_norm)
    step = case.maker.step([True] * len(case.variables))
    path = record_trace(step, *case.batch, tempfile.mkdtemp(), STEPS)
    return Traced(case.variables, step, case.graph, read_trace(path, STEPS)[0], path)
