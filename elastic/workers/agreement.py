"""Keeps the workers of a run alike: images, weights, and the timing table."""

import zlib

import numpy as np

from elastic.compat import keras_stack
from elastic.steps.prefix_cut import Cut
from elastic.timing.table import CacheCost, Profile, TensorTimings, WireCost
from elastic.workers.step_mean import cluster_of
from elastic.workers.wire import measure_wire

TABLE = (TensorTimings, Profile, CacheCost, WireCost, Cut)  # the classes in a timing table


def check_start(cluster, model, dataset):
    """Raises UserError, which names a worker, unless all have the same images and weights.

    dataset: datasets.Dataset.
    """
    if cluster.size > 1:
        weights = 0
        for array in model.get_weights():
            weights = zlib.crc32(array.tobytes(), weights)
        cluster.check_same({'images with the checksum': dataset.fingerprint[:8],
                            'batches an epoch:': dataset.steps,
                            'weights with the checksum': '{:08x}'.format(weights)})


def slowest_table(cluster, table):
    """Returns the TensorTimings of the worker with the slowest full step, on all workers."""
    slowest = int(cluster.rows([table.t_step])[:, 0].argmax())
    return cluster.of_worker(slowest, lambda: table, TABLE)


def joint_table(cluster, table):
    """Returns the slowest worker's TensorTimings with the cost of the wire, on all workers.

    Prints both if there are several workers.
    """
    if cluster.size == 1:
        return table
    table = slowest_table(cluster, table)
    wire = measure_wire(cluster, table.shapes)
    table = table._replace(wire=wire.cost_of(table.shapes))
    print('wire: {:.1f} ms for each exchange, and {:.1f} ms for each MB of gradients; '
          'all gradients: {:.1f} of {:.1f} ms a step'.format(
              wire.sum_ms, 1e6 * wire.byte_ms, table.wire_time([True] * len(table.names)),
              table.t_step))
    return table


def average_statistics(maker):
    """Averages the moving statistics that the steps of a StepMaker change over its workers."""
    cluster, moving = cluster_of(maker), maker.moving if maker.mean else ()
    if moving:
        flat = np.concatenate([variable.numpy().ravel() for variable in moving])
        ends = np.cumsum([variable.shape.num_elements() for variable in moving])
        parts = np.split(cluster.mean(flat), ends[:-1])
        keras_stack.assign_arrays(moving, [part.reshape(variable.shape).astype(
            variable.dtype.as_numpy_dtype) for part, variable in zip(parts, moving)])
