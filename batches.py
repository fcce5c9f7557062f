"""Passes over numbered images: in which order, in which view, and as batches of tf.data.

A stream draws order and augmentation (augmentation.py): the epochs are one, the probe another.
Takes a Split, which fetches the image of a number, and the seed; gives tf.data of batches.
LOADERS: where Splits come from, by the name of the data set.
"""

import itertools
from typing import Callable, NamedTuple, Optional, Sequence

import numpy as np

from augmentation import augment, augmentation_draws


class Split(NamedTuple):
    """The training or the test images of a data set, numbered from 0."""
    input_size: int  # S
    labels: Callable  # () -> (size,) int32, without decoding an image
    size: int  # images
    fetch: Callable  # index () int64 -> image (S, S, 3) uint8, label () int32; runs in a graph
    files: Optional[Sequence[str]] = None  # of a user's folder: each file is then checked once
    kept: bool = False  # in memory: `fetch` takes many indices at once

    def only(self, chosen):
        """The Split with the images of these numbers, an int64 array, in its order."""
        import tensorflow as tf
        return self._replace(
            size=len(chosen), fetch=lambda index: self.fetch(tf.gather(chosen, index)),
            labels=lambda: self.labels()[chosen],
            files=self.files and [self.files[i] for i in chosen])

    def spaced(self, count):
        """The Split with `count` of its images, evenly spaced."""
        if count == self.size:
            return self
        return self.only(np.linspace(0, self.size - 1, count).round().astype(np.int64))


LOADERS = {}  # name -> function (name, input size, data_dir) -> (class names, two Splits)


def loads(*names):
    """Makes a function the loader of the data sets of these names.

    (name, input_size, data_dir) -> (class names, training Split, test Split).
    """
    def register(function):
        LOADERS.update(dict.fromkeys(names, function))
        return function
    return register


class Stream(NamedTuple):
    """Passes over training images, in an order and with augmentation of their own.

    Both are drawn with NumPy's RandomState: the order not with tf.data's shuffle, as it is the same
    in every version of TensorFlow, needs no buffer of images, and can resume at any epoch.
    """
    number: int  # 0: the epochs, 1: the probe
    split: Split
    batch_size: int  # B
    steps: int  # of a pass
    seed: int  # below 2 ** 32
    augmented: bool

    def order(self, index):
        """(steps, B) int64: the image numbers of pass `index`, from 0."""
        rng = np.random.RandomState([self.seed, self.number, index])
        order = rng.permutation(self.split.size)[:self.steps * self.batch_size]
        return order.reshape(self.steps, self.batch_size)

    def drawn(self, numbers, view):
        """numbers, (steps, B) int64, and with them flip and turn of each image in that view."""
        flip, turn = augmentation_draws(self.seed, self.number, view, self.split.size)
        return numbers, flip[numbers], turn[numbers]


def pipeline(stream, ahead):
    """(numbers, flip, turn), of stream.drawn -> tf.data of these batches; eager or in a graph.

    Its graph is traced once, as a function of the three: each pass only hands over its own.
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
    """tf.data: each iteration goes on with the stream's next `count` passes, endless for None.

    batches: see pipeline. view: number of a pass, from 0 -> that of the view it shows.
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
    """tf.data of the images of the split, in order and unchanged.

    One batch waits ready, which is as quick as four and takes less memory (docs/benchmarks.md).
    """
    import tensorflow as tf
    return untuned(tf.data.Dataset.range(split.size).batch(batch_size).map(
        lambda indices: _fetch_batch(split, indices), num_parallel_calls=2).prefetch(1))


def untuned(data):
    """Without tf.data's autotuning, whose thread can hold up the end of a pass for ten seconds."""
    import tensorflow as tf
    options = tf.data.Options()
    if hasattr(options, 'autotune'):
        options.autotune.enabled = False
    else:  # TensorFlow 2.6
        options.experimental_optimization.autotune = False
    return data.with_options(options)


def _fetch_batch(split, indices):
    """Images (B, S, S, 3) float32 and labels (B,) int32 of `indices`, (B,) int64."""
    import tensorflow as tf
    images, labels = split.fetch(indices) if split.kept else tf.map_fn(
        split.fetch, indices, fn_output_signature=(tf.uint8, tf.int32))
    shape = (indices.shape[0], split.input_size, split.input_size, 3)
    return (tf.ensure_shape(tf.cast(images, tf.float32), shape),
            tf.ensure_shape(labels, shape[:1]))


def resized(encoded, input_size):
    """(S, S, 3) uint8 of an encoded image: grey repeated, transparency dropped, first GIF frame.

    Rounded to whole levels, which takes a quarter of the memory of float32.
    """
    import tensorflow as tf
    image = tf.io.decode_image(encoded, expand_animations=False)  # 1 to 4 channels
    image = tf.cond(tf.shape(image)[-1] < 3, lambda: tf.tile(image[..., :1], [1, 1, 3]),
                    lambda: image[..., :3])
    image = tf.image.resize(tf.ensure_shape(image, (None, None, 3)), (input_size, input_size))
    return tf.cast(tf.round(image), tf.uint8)
