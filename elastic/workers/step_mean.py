"""Averages the results and gradients of a training step over the workers.

What one sum costs beside its bytes is about 2 ms. So all gradients of a step travel in one array,
but for large ones, which would only be copied. Each sum waits for the one before it, and the first
one for all gradients: so the order is the same on all workers, and times add up.
"""

import zlib

import numpy as np
import tensorflow as tf

from elastic.workers.cluster import ALONE, collective_sum

RESULTS = 3  # numbers that travel with the gradients: loss, correct, penalty
ALONE_BYTES = 4 << 20  # a gradient of this size travels by itself


def sums_of(specs):
    """Returns the lists of arrays (their indices) that travel together, in order.

    specs: a tf.TensorSpec of each array.
    """
    together, apart = {}, []
    for i, spec in enumerate(specs):
        if spec.shape.num_elements() * spec.dtype.size >= ALONE_BYTES:
            apart.append([i])
        else:
            together.setdefault(spec.dtype, []).append(i)
    return list(together.values()) + apart


def key_of(tag, mask):
    """Returns a number for all sums of a kind of step and an (N,) bool mask.

    Workers with different masks, by mistake, have different numbers, and wait for each other in
    vain; with equal numbers, they would add gradients of different tensors.
    """
    return zlib.crc32(tag.encode() + np.asarray(mask, dtype=bool).tobytes()) >> 2 & ~0x3FF


class StepMean:
    """Makes the functions that average steps over the workers of a cluster.Cluster, `size`."""

    def __init__(self, cluster):
        self.cluster, self.size = cluster, cluster.size

    def __call__(self, shapes, dtypes, tag, mask):
        """Returns a ConcreteFunction: (loss, correct, penalty, *gradients) -> the same of all.

        The loss, the penalty and the gradients are means; the number of correct examples is a sum.
        shapes, dtypes: of the gradients, those of the (N,) bool mask. tag: str, the kind of step.
        """
        cluster, key = self.cluster, key_of(tag, mask)
        numbers = [tf.TensorSpec((), dtype) for dtype in (tf.float32, tf.int32, tf.float32)]
        of_gradients = [tf.TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
        specs = [tf.TensorSpec((RESULTS,), tf.float32)] + of_gradients

        def mean(loss, correct, penalty, *gradients):
            # The mean of this multiple is the sum.
            results = tf.stack([loss, tf.cast(cluster.size * correct, tf.float32), penalty])  # (3,)
            arrays, found, before = [results] + list(gradients), {}, gradients
            for number, members in enumerate(sums_of(specs)):
                flat = [tf.reshape(arrays[i], [-1]) for i in members]
                with tf.control_dependencies(before):
                    packed = tf.concat(flat, 0) if len(flat) > 1 else flat[0]
                    total = collective_sum(packed, cluster, key + number) / cluster.size
                parts = tf.split(total, [specs[i].shape.num_elements() for i in members])
                found.update((i, tf.reshape(part, specs[i].shape))
                             for i, part in zip(members, parts))
                before = [total]
            return [found[0][0], tf.cast(tf.round(found[0][1]), tf.int32), found[0][2]] + [
                found[i] for i in range(1, len(arrays))]
        return tf.function(mean, input_signature=numbers + of_gradients,
                           autograph=False).get_concrete_function()


def cluster_of(maker):
    """Returns the cluster.Cluster for which a masked_step.StepMaker makes steps."""
    return ALONE if maker.mean is None else maker.mean.cluster
