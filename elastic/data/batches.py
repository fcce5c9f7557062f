"""Passes over numbered images: in which order, augmented how, and as batches of tf.data.

A stream draws order and augmentation: the epochs are one stream, the probe is another.
"""

import itertools
from typing import NamedTuple

import numpy as np

from elastic.data.augmentation import augment, augmentation_draws
from elastic.data.split import Split, untuned


class Stream(NamedTuple):
    """Passes over training images, with an order and augmentation of its own.

    NumPy's RandomState draws both. Unlike the shuffle of tf.data, it draws the same in every
    version of TensorFlow, needs no buffer of images, and can start at any epoch.
    number: 0 for the epochs, 1 for the probe. split: the training images. batch_size: B.
    steps: batches in a pass. seed: below 2 ** 32. augmented: whether images are flipped and turned.
    """
    number: int
    split: Split
    batch_size: int
    steps: int
    seed: int
    augmented: bool

    def order(self, index):
        """Returns the image numbers of pass `index`, from 0: (steps, B) int64."""
        rng = np.random.RandomState([self.seed, self.number, index])
        order = rng.permutation(self.split.size)[:self.steps * self.batch_size]
        return order.reshape(self.steps, self.batch_size)

    def drawn(self, numbers, view):
        """Returns (numbers, flip, turn): the numbers, (steps, B) int64, and each image's draws."""
        flip, turn = augmentation_draws(self.seed, self.number, view, self.split.size)
        return numbers, flip[numbers], turn[numbers]


def pipeline(stream, ahead):
    """Returns the function (numbers, flip, turn) -> tf.data of these batches; works in a graph too.

    Traces its graph once: each pass only hands over its own numbers, flips and turns.
    ahead: whether it makes the next batches in advance.
    """
    import tensorflow as tf
    size, shape = stream.split.input_size, (None, stream.batch_size)
    batch_spec = (tf.TensorSpec((stream.batch_size, size, size, 3), tf.float32),
                  tf.TensorSpec((stream.batch_size,), tf.int32))

    def batch(numbers, flip, turn):
        images, labels = _fetch_batch(stream.split, numbers)
        return (augment(images, flip, turn) if stream.augmented else images), labels

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.int64), tf.TensorSpec(shape, tf.bool),
                                  tf.TensorSpec(shape + (2,), tf.float32)])
    def variant(numbers, flip, turn):
        data = tf.data.Dataset.from_tensor_slices((numbers, flip, turn))
        data = (data.map(batch, num_parallel_calls=2, deterministic=True).prefetch(4) if ahead
                else data.map(batch))
        return tf.data.experimental.to_variant(data)

    return lambda *drawn: tf.data.experimental.from_variant(variant(*drawn), batch_spec)


def passes(stream, batches, view, count):
    """Returns tf.data in which each iteration is the stream's next `count` passes; None: endless.

    batches: as returned by pipeline. view: number of a pass, from 0 -> number of its view.
    """
    import tensorflow as tf
    indices = itertools.count()  # shared by all iterations

    def draw(_):
        index = next(indices)
        return stream.drawn(stream.order(index), view(index))

    def one_pass(unused):
        return batches(*tf.numpy_function(draw, [unused], (tf.int64, tf.bool, tf.float32)))

    size = stream.steps * count if count else tf.data.INFINITE_CARDINALITY
    data = tf.data.Dataset.range(1).repeat(count).flat_map(one_pass)
    return untuned(data.apply(tf.data.experimental.assert_cardinality(size)))


def in_order(split, batch_size):
    """Returns tf.data of the images of the split, in order and unchanged.

    Makes one batch in advance: as fast as four, with less memory (docs/benchmarks.md).
    """
    import tensorflow as tf
    return untuned(tf.data.Dataset.range(split.size).batch(batch_size).map(
        lambda indices: _fetch_batch(split, indices), num_parallel_calls=2).prefetch(1))


def _fetch_batch(split, indices):
    """Returns images, (B, S, S, 3) float32, and labels, (B,) int32, of `indices`, (B,) int64."""
    import tensorflow as tf
    images, labels = split.fetch(indices) if split.kept else tf.map_fn(
        split.fetch, indices, fn_output_signature=(tf.uint8, tf.int32))
    shape = (indices.shape[0], split.input_size, split.input_size, 3)
    return (tf.ensure_shape(tf.cast(images, tf.float32), shape),
            tf.ensure_shape(labels, shape[:1]))
