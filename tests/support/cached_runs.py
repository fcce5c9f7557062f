"""Runs with the prefix cache and without, of a small network on a few digits."""

import contextlib
import resource

import numpy as np
import tensorflow as tf
from tensorflow import keras

import train
from datasets import load_dataset
from elastic.cache import stores
from elastic.cache.prefix_cache import PrefixCache
from elastic.compat import keras_stack
from elastic.runs.recorder import Recorder
from elastic.runs.session import Session
from elastic.schemes.scheme import Choice, Scheme
from elastic.settings import Settings

SIZE, BATCH, IMAGES = 32, 8, 60  # seven steps an epoch, four images left over
HEAD = 8  # place of the head's kernel and bias, behind four convolutions


def network():
    """Four convolutions wide enough that to read their outputs back is cheaper; the second has the
    thinnest output but for the head's averages.
    """
    keras_stack.set_seed(0)
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.Rescaling(1 / 255)(inputs) if hasattr(keras.layers, 'Rescaling') else inputs
    for filters, strides in ((16, 2), (4, 2), (16, 1), (16, 2)):
        x = keras.layers.Conv2D(filters, 3, strides, 'same', activation='relu')(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10, name='head')(x))


def digits(**more):
    return load_dataset('digits', SIZE, BATCH, train_images=IMAGES, validation_steps=1, **more)


def mask_from(k):
    return np.arange(HEAD + 2) >= k


DEEP, MIDDLE, HEAD_ALONE = mask_from(2), mask_from(4), mask_from(HEAD)


class Watched(PrefixCache):
    """Knows the kinds of the steps of each epoch, and does `at` (epoch, step) before a step."""

    def __init__(self, dataset, folder, at=None, **more):
        super().__init__(dataset, folder, **more)
        self.kinds, self.at = [], at or {}

    def calls(self, step, epoch, done=0):
        self.kinds.append([])
        for call in super().calls(step, epoch, done):
            self.at.get((epoch, len(self.kinds[-1])), lambda cache: None)(self)
            self.kinds[-1].append(call.kind)
            yield call


class Forced(Scheme):
    """Trains the mask of each epoch in `masks`; or what choice_of makes a Choice of."""

    def __init__(self, maker, masks, choice_of=Choice):
        super().__init__('forced', maker)
        self._masks, self._choice_of = masks, choice_of

    def select(self, epoch, last):
        return self._choice_of(self._masks[epoch]) if epoch in self._masks else None


def ran(folder, dataset, masks, cache=None, num_epochs=4, model=None, choice_of=Choice,
        learning_rate=0.05, **settings):
    """(bits of weights and losses, measured summary) of a run.

    masks, choice_of: see Forced.
    """
    model = network() if model is None else model
    settings = Settings(num_epochs=num_epochs, learning_rate=learning_rate, **settings)
    recorder = Recorder(str(folder / ('plain' if cache is None else 'cached')))
    rows = []
    recorder.epoch = rows.append
    scheme = Forced(train.step_maker(model, dataset, settings), masks, choice_of)
    result, model = train.train(scheme, dataset, settings, Session(recorder), cache)
    losses = [(row['train_loss'], row['test_loss'], row['test_accuracy']) for row in rows]
    return losses + bits(model), result


def bits(model):
    return [keras_stack.raw(variable).numpy().tobytes() for variable in model.variables]


def kinds(*epochs):
    return [[kind] * 7 for kind in epochs]


def in_a_file(monkeypatch):
    monkeypatch.setattr(stores, 'room', lambda folder, cache_gb=None: (0, 10 ** 9))


def watched(scheme, chosen, times=1):
    """The scheme, which puts its Choices into the dict, by epoch; it sees so many times the steps.
    """
    original = scheme.select

    def select(epoch, last):
        choice = original(epoch, last and last._replace(
            ms={kind: ms * times for kind, ms in last.ms.items()}))
        if choice is not None:
            chosen[epoch] = choice
        return choice
    scheme.select = select
    return scheme


def frozen_body():
    """Nearly all of a step is the forward pass of layers that never train, and their output thin:
    to read it back pays on any machine.
    """
    keras_stack.set_seed(0)
    x = inputs = keras.Input((SIZE, SIZE, 3))
    for filters, strides in ((128, 1), (128, 1), (8, 4)):
        x = keras.layers.Conv2D(filters, 3, strides, 'same', activation='relu', trainable=False)(x)
    for _ in range(2):
        x = keras.layers.Conv2D(16, 3, padding='same', activation='relu')(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10, name='head')(x))


class NearlyAlone(keras.layers.Layer):
    """Its rows differ beside others as little as rounding makes them differ on some devices."""

    def call(self, x):
        return x + 1e-6 * tf.reduce_mean(x, 0)


def behind(layer):
    """The convolutions of `network`, the layer, and the head."""
    small = network()
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.models.clone_model(keras.Model(small.input, small.layers[-3].output))(inputs)
    x = keras.layers.GlobalAveragePooling2D()(layer(x))
    return keras.Model(inputs, keras.layers.Dense(10, name='head')(x))


@contextlib.contextmanager
def files_of_at_most(nbytes):
    """The system then refuses to write more, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
