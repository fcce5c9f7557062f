"""Trains small networks on joint batches, in one process or as one of several workers.

As a script, it is one worker: worker_steps.py ADDRESSES INDEX OUT writes the weights of every case.
"""

import contextlib
import sys

import numpy as np

STEPS, SIZE, WORKERS = 8, 4, 2
SPIKE = 3  # the step in which a gradient overflows on worker 1, in float16
CASES = {'full adam': ('adam', None, False), 'mask sgd': ('sgd', (3, 4, 5), False),
         'elastic sgd': ('sgd', 'elastic', False), 'float16 sgd': ('sgd', None, True)}


def main(addresses, index, out):
    from elastic.workers.addresses import Workers
    from elastic.workers.cluster import Cluster
    from elastic.workers.step_mean import StepMean
    cluster = Cluster(Workers(tuple(addresses.split(',')), index), 60.0)
    cluster.join()
    before, after = statistics(index, StepMean(cluster))
    np.savez(out, before=before, after=after, **{
        '{} {}'.format(name, i): array for name in CASES
        for i, array in enumerate(trained(name, (index,), StepMean(cluster)))})


def statistics(index, mean):
    """Returns the moving statistics of worker `index` after a step, and after they are averaged."""
    import tensorflow as tf
    from tensorflow import keras

    from elastic.steps.masked_step import StepMaker
    from elastic.steps.optimizer import make_optimizer
    from elastic.workers.agreement import average_statistics
    model = keras.Sequential([keras.layers.Flatten(input_shape=(12, 12, 3)),
                              keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    batch = [tf.constant(each) for each in batches_of((index,), 0)]
    maker = StepMaker(model, make_optimizer('sgd', 0.01, 50, model.trainable_variables), 0.0,
                      *batch, mean=mean)
    maker.step(np.ones(len(model.trainable_variables), bool))(*batch)
    before = np.stack([variable.numpy() for variable in maker.moving])
    average_statistics(maker)
    return before, np.stack([variable.numpy() for variable in maker.moving])


def joint(batches):
    """Returns one batch of several (inputs, labels)."""
    return tuple(np.concatenate(parts) for parts in zip(*batches))


def batches_of(workers, seed, spike=False):
    """Returns the joint batch of these workers; with `spike`, that of worker 1 overflows."""
    found = []
    for worker in workers:
        rng = np.random.RandomState([seed, worker])
        inputs = rng.uniform(-1, 1, (SIZE, 12, 12, 3)).astype(np.float32)
        found.append((inputs * (1e5 if spike and worker == 1 else 1),
                      rng.randint(0, 3, SIZE).astype(np.int32)))
    return joint(found)


def trained(name, workers, mean=None):
    """Returns the arrays of a network after STEPS steps on the images of these workers.

    The last ones are the loss scale, 1 without float16, and the mask of the last step.
    """
    import tensorflow as tf
    from tensorflow import keras

    from elastic.selection.importance import Evaluator, evaluate_importance
    from elastic.steps.masked_step import StepMaker
    from elastic.steps.optimizer import make_optimizer
    from small_steps import N, conv_stack, mask_of
    optimizer_name, masks, float16 = CASES[name]
    with contextlib.ExitStack() as after:
        if float16:
            keras.mixed_precision.set_global_policy('mixed_float16')
            after.callback(keras.mixed_precision.set_global_policy, 'float32')
        model = conv_stack()
        optimizer = make_optimizer(optimizer_name, 0.001 if float16 else 0.01, 50,
                                   model.trainable_variables)
        batch = [tf.constant(each) for each in batches_of(workers, 0)]
        maker = StepMaker(model, optimizer, 1e-3, *batch, mean=mean)
        evaluator = Evaluator(maker) if masks == 'elastic' else None
        for number in range(STEPS):
            if masks == 'elastic' and number % 4 == 0:
                probe = [tf.constant(each) for each in batches_of(workers, 1000 + number)]
                importance = evaluate_importance(model, optimizer, [probe], evaluator=evaluator)
                step = maker.step(importance >= np.sort(importance)[3])
            elif not number:
                step = maker.step(np.ones(N, bool) if masks is None else mask_of(*masks))
            step(*[tf.constant(each) for each in batches_of(workers, number,
                                                            float16 and number == SPIKE)])
        scale = maker.loss_scale.scale.numpy() if float16 else 1.0
        return [variable.numpy() for variable in maker.everything] + [
            np.array(scale), np.array(step.mask)]


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
