"""Measures what it costs to exchange gradients between the workers."""

import time
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from elastic.timing.table import WireCost
from elastic.workers.step_mean import ALONE_BYTES, RESULTS, StepMean

LEAST_BYTES = 1 << 12  # of a gradient that is tried
SHARES = (1 / 16, 1 / 4, 1)  # of all gradients that travel together; also tried
ROUNDS = 7


class Wire(NamedTuple):
    """Describes the wire between the workers.

    sum_ms: ms that one sum over the workers takes beside its bytes. byte_ms: ms for each byte of
    the array, which crosses the wire 2 (n - 1) / n times in each direction.
    """
    sum_ms: float
    byte_ms: float

    def cost_of(self, shapes):
        """Returns the WireCost of float32 gradients of these N shapes."""
        nbytes = 4.0 * np.array([np.prod(shape) for shape in shapes])
        t_comm = self.byte_ms * nbytes + np.where(nbytes >= ALONE_BYTES, self.sum_ms, 0.0)
        return WireCost(self.sum_ms + self.byte_ms * 4 * RESULTS, t_comm)


def measure_wire(cluster, shapes):
    """Returns the Wire between the workers of a cluster.Cluster, the same on all of them.

    Exchanges gradients of several sizes in turn, as a step does. The costs are a line through the
    medians, which weighs relative errors. shapes: of the N gradients of a full step.
    """
    largest = min(ALONE_BYTES, max(2 * LEAST_BYTES, 4 * int(sum(map(np.prod, shapes)))))
    tried = sorted({LEAST_BYTES} | {max(LEAST_BYTES, int(share * largest)) // 4 * 4
                                    for share in SHARES})
    exchanges = [_exchange(cluster, nbytes) for nbytes in tried]
    for exchange in exchanges:
        exchange()  # the first call is slower
    ms = np.median([[exchange() for exchange in exchanges] for _ in range(ROUNDS)], axis=0)
    byte_ms, sum_ms = np.polyfit(tried, ms, 1, w=1 / ms)
    slowest = cluster.rows([max(sum_ms, 0.0), max(byte_ms, 0.0)]).max(axis=0)
    return Wire(*map(float, slowest))


def _exchange(cluster, nbytes):
    """Returns a function () -> ms of an exchange of one gradient of this size."""
    shape = (nbytes // 4,)
    mean = StepMean(cluster)([shape], [tf.float32], 'wire {}'.format(nbytes), [True])
    zero, gradient = tf.constant(0.0), tf.zeros(shape)

    def run():
        begin = time.perf_counter()
        mean(zero, tf.constant(0), zero, gradient)[0].numpy()
        return 1e3 * (time.perf_counter() - begin)
    return run
