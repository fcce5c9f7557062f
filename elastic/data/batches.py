"""Makes batches of numbered images: their order and their augmentation."""

import itertools

import numpy as np

from elastic.data.augmentation import augment, augmentation_draws
from elastic.data.split import untuned
from elastic.device.host import memory_limit


class Stream:
    """Makes endless passes over the training images, in an order and augmentation of its own.

    The epochs of a run are one stream, the probe batches another. NumPy draws the order: so it is
    the same with every version of TensorFlow, needs no buffer of images, and can start at any pass.
    """

    def __init__(self, number, split, batch_size, steps, seed, augmentation, ahead):
        """number: 0 for the epochs, 1 for the probe. split: of the training images.

        steps: batches per pass. seed: int below 2 ** 32. augmentation: in AUGMENTATIONS.
        ahead: whether to make batches in advance.
        """
        self._number, self._split, self._seed = number, split, seed
        self._batch_size, self._steps = batch_size, steps
        self._pipeline = _pipeline(split, batch_size, augmentation, ahead)

    def order(self, index):
        """Returns the image numbers of pass `index`, from 0: (steps, B) int64."""
        rng = np.random.RandomState([self._seed, self._number, index])
        order = self._split.order(rng)[:self._steps * self._batch_size]
        return order.reshape(self._steps, self._batch_size)

    def batches(self, numbers, view):
        """Returns tf.data of the batches of these image numbers, (steps, B) int64, in a view."""
        return untuned(self._pipeline(*self._drawn(numbers, view)))

    def passes(self, view_of, count):
        """Returns tf.data; each iteration yields the next `count` passes (None: endless).

        view_of: number of a pass, from 0 -> number of its view.
        """
        import tensorflow as tf
        indices = itertools.count()  # shared by all iterations

        def draw(_):
            index = next(indices)
            return self._drawn(self.order(index), view_of(index))

        def one_pass(unused):
            return self._pipeline(*tf.numpy_function(
                draw, [unused], (tf.int64, tf.bool, tf.float32)))

        size = self._steps * count if count else tf.data.INFINITE_CARDINALITY
        data = tf.data.Dataset.range(1).repeat(count).flat_map(one_pass)
        return untuned(data.apply(tf.data.experimental.assert_cardinality(size)))

    def _drawn(self, numbers, view):
        flip, turn = augmentation_draws(self._seed, self._number, view, self._split.size)
        return numbers, flip[numbers], turn[numbers]


def in_order(split, batch_size):
    """Returns tf.data of all images of the split, in order and unchanged.

    Makes one batch in advance: as fast as four, with less memory (docs/results/tried_numbers.md).
    """
    import tensorflow as tf
    return untuned(tf.data.Dataset.range(split.size).batch(batch_size).map(
        lambda indices: _fetch_batch(split, indices), num_parallel_calls=2).prefetch(1))


def _pipeline(split, batch_size, augmentation, ahead):
    """Returns a function (numbers, flip, turn) -> tf.data of batches. Its graph is traced once."""
    import tensorflow as tf
    size, shape = split.input_size, (None, batch_size)
    batch_spec = (tf.TensorSpec((batch_size, size, size, 3), tf.float32),
                  tf.TensorSpec((batch_size,), tf.int32))

    def batch(numbers, flip, turn):
        images, labels = _fetch_batch(split, numbers)
        if augmentation != 'none':
            images = augment(images, flip, turn if augmentation == 'flip+rotate' else None)
        return images, labels

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.int64), tf.TensorSpec(shape, tf.bool),
                                  tf.TensorSpec(shape + (2,), tf.float32)])
    def variant(numbers, flip, turn):
        data = tf.data.Dataset.from_tensor_slices((numbers, flip, turn))
        data = (data.map(batch, num_parallel_calls=2, deterministic=True).prefetch(
            4 if memory_limit() is None else 1) if ahead
                else data.map(batch))
        return tf.data.experimental.to_variant(data)

    return lambda *drawn: tf.data.experimental.from_variant(variant(*drawn), batch_spec)


def _fetch_batch(split, indices):
    """Returns the images, (B, S, S, 3) float32, and labels, (B,) int32, of `indices`, (B,)."""
    import tensorflow as tf
    images = split.fetch(indices) if split.kept else tf.map_fn(
        split.fetch, indices, fn_output_signature=tf.uint8)
    shape = (indices.shape[0], split.input_size, split.input_size, 3)
    return (tf.ensure_shape(tf.cast(images, tf.float32), shape),
            tf.gather(split.labels(), indices))


def specs_of(batches, size):
    """Returns the tf.TensorSpecs of batches of `size` images. batches: tf.data of others."""
    import tensorflow as tf
    return [tf.TensorSpec((size,) + tuple(spec.shape[1:]), spec.dtype)
            for spec in batches.element_spec]
