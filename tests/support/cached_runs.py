"""Runs of small networks on a few digits, with and without the prefix cache."""

import contextlib
import functools
import resource

import numpy as np
import tensorflow as tf
from tensorflow import keras

import train
from datasets import load_dataset
from elastic.cache.prefix_cache import PrefixCache
from elastic.compat import keras_stack
from elastic.runs.checkpoint import Keeper
from elastic.runs.recorder import Recorder
from elastic.runs.session import Session
from elastic.schemes.scheme import Choice, Scheme
from elastic.settings import Settings
from elastic.steps.masked_step import StepMaker
from elastic.steps.prefix_steps import PrefixSteps
from fixed_tables import fixed_profile

SIZE, BATCH, IMAGES = 32, 8, 60  # seven steps per epoch; four images are left over
HEAD = 8  # index of the head's kernel, after four convolutions


def network():
    """Returns a network of four convolutions and a head; the second has the smallest output."""
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
    """Lists the kinds of steps by epoch; at[epoch, step] is called before that step."""

    def __init__(self, dataset, folder, at=None, **more):
        super().__init__(dataset, folder, **more)
        self.kinds, self.at = [], at or {}

    def calls(self, step, epoch, done=0):
        self.kinds.append([])
        for call in super().calls(step, epoch, done):
            self.at.get((epoch, len(self.kinds[-1])), lambda cache: None)(self)
            self.kinds[-1].append(call.kind)
            yield call


class AfterSteps(Keeper):
    """Stops a run after a number of steps in its process."""

    def __init__(self, folder, left):
        super().__init__(folder, about={}, stop=lambda: self.left <= 0)
        self.left = left

    def due(self):
        self.left -= 1
        return super().due()


class Forced(Scheme):
    """Trains choice_of(masks[epoch]), starting in each epoch of `masks`."""

    def __init__(self, maker, masks, choice_of=Choice):
        super().__init__('forced', maker)
        self._masks, self._choice_of = masks, choice_of

    def select(self, epoch, last):
        return self._choice_of(self._masks[epoch]) if epoch in self._masks else None


def ran(folder, dataset, masks, cache=None, num_epochs=4, model=None, choice_of=Choice,
        learning_rate=0.05, **settings):
    """Trains Forced masks; returns (losses and bits of the weights, measured summary)."""
    model = network() if model is None else model
    settings = Settings(num_epochs=num_epochs, learning_rate=learning_rate, **settings)
    recorder = Recorder(str(folder / ('plain' if cache is None else 'cached')))
    rows = []
    recorder.epoch = rows.append
    scheme = Forced(train.step_maker(model, dataset, settings), masks, choice_of)
    result, model = train.train(scheme, dataset, settings, Session(recorder), cache)
    losses = [(row['train_loss'], row['test_loss'], row['test_accuracy']) for row in rows]
    return losses + bits(model), result


def ran_as_plain(folder, dataset, masks, cache, make=network, **more):
    """Trains Forced masks with the cache; asserts that this gives the bits of a run without one.

    Returns the measured summary.
    """
    plain, _ = ran(folder, dataset, masks, model=make(), **more)
    cached, result = ran(folder, dataset, masks, cache, model=make(), **more)
    assert same_run(cached, plain)
    return result


def bits(model):
    return [keras_stack.raw(variable).numpy().tobytes() for variable in model.variables]


@functools.lru_cache(maxsize=None)
def images_apart():
    """Returns by how much an image depends on its batch here: by rounding, on some processors."""
    inputs, labels = next(iter(digits().train))
    return PrefixSteps(StepMaker(network(), None, 0.0, inputs, labels)).rows_apart(inputs, labels)


def same_run(one, other):
    """Returns whether two lists of `ran` are equal, to rounding where images depend on that."""
    return one == other or images_apart() > 0 and len(one) == len(other) and all(
        map(_near, one, other))


def _near(one, other):
    if isinstance(one, bytes):
        one, other = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
    return np.allclose(one, other, rtol=0, atol=1e-3 * np.abs(one).max())


def kinds(*epochs):
    return [[kind] * 7 for kind in epochs]


def watched(scheme, chosen, seen=lambda last, choice: last):
    """Returns the scheme, which from now on stores its Choices in the dict `chosen`, by epoch.

    seen: (EpochResult, current Choice) -> the EpochResult that the scheme sees.
    """
    original = scheme.select

    def select(epoch, last):
        choice = original(epoch, last and seen(last, chosen[max(chosen)]))
        if choice is not None:
            chosen[epoch] = choice
        return choice
    scheme.select = select
    return scheme


def branches():
    """Returns a network of a stem, three branches of two convolutions each, and a head.

    A mask that trains a single branch has a longer prefix than the chain of its deepest tensor.
    """
    keras_stack.set_seed(0)
    inputs = keras.Input((SIZE, SIZE, 3))
    stem, ends = keras.layers.Conv2D(8, 3, 2, 'same', activation='relu', name='stem')(inputs), []
    for name, filters in (('a', 8), ('b', 24), ('c', 16)):
        x = keras.layers.Conv2D(filters, 3, 1, 'same', activation='relu', name=name + '1')(stem)
        ends.append(keras.layers.Conv2D(4, 3, 2, 'same', activation='relu', name=name + '2')(x))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Concatenate()(ends))
    return keras.Model(inputs, keras.layers.Dense(10, name='head')(x))


def maker_of(model):
    """Returns the StepMaker of a network that has not been trained."""
    return StepMaker(model, None, 0.0, np.zeros((BATCH, SIZE, SIZE, 3), np.float32),
                     np.zeros(BATCH, np.int32))


def slow_table(model):
    """Returns a fixed timing table of a slow device, on which copying costs next to nothing.

    Forward ops take exactly the table's rates, so that cuts and costs agree.
    """
    table = fixed_profile(model, (SIZE, SIZE, 3), 10, BATCH)
    table = table.rescaled(1e3 * table.t_fp, 1e3 * table.t_bp)._replace(
        op_rates={kind: 1e3 * ms for kind, ms in table.op_rates.items()})
    prefixes = PrefixSteps(maker_of(model))
    cuts = [prefixes.cut_off(table.depth <= depth, table.op_rates) for depth in table.depth]
    skipped = np.array([cut.skipped_ms for cut in cuts])
    return table._replace(t_prefix=0.9 * table.t_fp / skipped.max() * skipped,
                          cut_bytes=np.array([float(cut.nbytes) for cut in cuts]))


class NearlyAlone(keras.layers.Layer):
    """Makes an image depend on its batch, by no more than rounding does on some devices."""

    def call(self, x):
        return x + 1e-6 * tf.reduce_mean(x, 0)


def behind(layer):
    """Returns the convolutions of `network`, then the layer, then the head."""
    small = network()
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.models.clone_model(keras.Model(small.input, small.layers[-3].output))(inputs)
    x = keras.layers.GlobalAveragePooling2D()(layer(x))
    return keras.Model(inputs, keras.layers.Dense(10, name='head')(x))


@contextlib.contextmanager
def files_of_at_most(nbytes):
    """Limits the size of files, so that writing fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
