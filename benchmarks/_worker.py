"""One worker of workers.py: times steps of several rhos, and counts what they send.

    _worker.py HOST:PORT,... INDEX INTERFACE OUT     (started by workers.py)
"""

import json
import os
import sys

import _bench
import _path
import numpy as np

from elastic.compat import start

RHOS = (1.0, 0.5, 0.35)
INPUT_SIZE, ALPHA, BATCH_SIZE, NUM_CLASSES = 96, 0.35, 32, 10
SECONDS, STEPS = 10.0, (6, 40)  # how long each rho is timed; the fewest and the most steps


def main(addresses, index, interface, out):
    os.chdir(_path.ROOT)
    start.start_tensorflow(seed=0)
    import tensorflow as tf

    from elastic.networks.backbone import statistics_from_batch
    from elastic.workers.addresses import Workers
    from elastic.workers.agreement import joint_table
    from elastic.workers.cluster import Cluster
    from elastic.workers.step_mean import StepMean
    from models import build_model
    from profiler import profile_model
    from selection_solver_DP import choose_tensors
    cluster = Cluster(Workers(tuple(addresses.split(',')), index), 120.0)
    cluster.join()
    shape = (INPUT_SIZE, INPUT_SIZE, 3)
    model = build_model('mobilenetv2', shape, NUM_CLASSES, 'none', ALPHA, 'frozen')
    batch = (tf.constant(np.random.RandomState(0).uniform(0, 255, (BATCH_SIZE,) + shape),
                         tf.float32), tf.range(BATCH_SIZE) % NUM_CLASSES)
    statistics_from_batch(model, batch[0])
    table = joint_table(cluster, profile_model(model, batch=batch))
    maker = _bench.step_maker(model, *batch, mean=StepMean(cluster))
    importance = _bench.importance_of(maker, batch)
    nbytes = np.array([4 * int(np.prod(v.shape)) for v in maker.variables])
    results = []
    for rho in RHOS:
        mask = cluster.of_chief(lambda rho=rho: choose_tensors(table, importance, rho)[0])
        step, predicted = maker.step(mask), table.step_time(mask)
        for _ in range(2):
            step.milliseconds(*batch)
        count, sent = int(np.clip(1e3 * SECONDS / predicted, *STEPS)), sent_bytes(interface)
        ms = [step.milliseconds(*batch) for _ in range(count)]
        results.append(dict(
            rho=rho, tensors=int(mask.sum()), predicted_ms=predicted, full_ms=table.t_step,
            step_ms=float(np.median(ms)), low_ms=float(np.percentile(ms, 25)),
            high_ms=float(np.percentile(ms, 75)), gradient_bytes=int(nbytes[mask].sum()),
            sent_bytes=(sent_bytes(interface) - sent) / count))
    with open(out, 'w') as file:
        json.dump(results, file)


def sent_bytes(interface):
    """Returns the bytes that a network interface of this namespace has sent."""
    with open('/sys/class/net/{}/statistics/tx_bytes'.format(interface)) as file:
        return int(file.read())


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
