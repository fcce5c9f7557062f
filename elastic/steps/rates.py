"""Finds the learning rate of a run by a short range test (Smith, arXiv 1506.01186).

The steps are the run's own, of its mask and its images, at rates that grow from step to step. The
loss of each batch is compared with what it was before the test, so a hard batch does not count.
Every variable is restored bit for bit.
"""

from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from elastic.compat import keras_stack
from elastic.errors import UserError

STEPS = 40
JUDGED = 4  # batches of validation images, where the head was solved on the training images
LOWEST, HIGHEST = 1e-5, 1.0  # rates that are tried
SMOOTHING = 0.8  # weight of the steps before in a moving mean
FLAT = 10  # first steps, whose rates are too small to change much: their changes are noise
WORSE = 1.0  # the test ends where the loss of a batch has risen by this, smoothed
SHARE = 0.8  # of the largest fall: the margin to the rate where the loss falls no further


class RangeTest(NamedTuple):
    """Holds a range test of K steps.

    rates: (K,). changes: (K,) of the loss by the steps before. smoothed: (K,), their moving mean.
    """
    rates: np.ndarray
    changes: np.ndarray
    smoothed: np.ndarray

    @property
    def largest(self):
        """Returns the largest rate at which the loss still fell."""
        return self.rates[int(np.argmin(self.smoothed))]

    @property
    def rate(self):
        """Returns the rate to train with: there, the loss had fallen by SHARE of its fall."""
        return self.rates[int(np.argmax(self.smoothed <= SHARE * self.smoothed.min()))]


def range_test(step, schedule, batches, maker, cluster, judge=None):
    """Returns the RangeTest of a step; nothing is left changed.

    step: MaskedStep of `maker`. schedule: optimizer.WarmupCosine with a `scale`. batches: () ->
    iterable of STEPS (inputs, labels), the same each time. cluster: workers.cluster.Cluster, whose
    mean loss counts. judge: () -> loss of images on which nothing was fitted; default: the loss of
    each step's batch counts, compared with that in a pass at rate 0.
    Raises UserError if the loss does not fall by more than noise at any rate.
    """
    rates, before, changes = np.geomspace(LOWEST, HIGHEST, STEPS), [], []

    def loss(batch, rate):
        schedule.at(maker.optimizer.iterations, rate)
        own = float(step(*batch).loss)
        return float(cluster.mean(np.array(own if judge is None else judge())))
    with tqdm(desc='learning rate', total=(2 - (judge is not None)) * STEPS, unit='step',
              leave=False, disable=None) as bar:
        with keras_stack.restored_afterwards(maker.everything):
            for batch in batches() if judge is None else ():
                before.append(loss(batch, 0.0))
                bar.update()
        before = before or [float(cluster.mean(np.array(judge())))] * STEPS
        with keras_stack.restored_afterwards(maker.everything):
            for batch, rate in zip(batches(), rates):
                changes.append(loss(batch, rate) - before[len(changes)])
                bar.update()
                mean = smoothed(changes)
                if not mean[-1] <= mean[0] + WORSE:  # also where it is not a number
                    break
    return found_in(rates, np.array(changes))


def smoothed(changes):
    """Returns the moving mean of changes, (K,), without a bias to 0 at the begin."""
    weight, total, found = 0.0, 0.0, []
    for change in changes:
        weight, total = SMOOTHING * weight + 1, SMOOTHING * total + change
        found.append(total / weight)
    return np.array(found)


def found_in(rates, changes):
    """Returns the RangeTest of these rates, of which the first K have changes, (K,).

    Raises UserError as range_test does.
    """
    changes = changes[np.isfinite(changes)]
    mean, rates = smoothed(changes), rates[:len(changes)]
    if len(mean) > FLAT:
        noise = changes[:FLAT].std() / FLAT ** 0.5
        if mean.min() < -4 * noise:
            return RangeTest(rates, changes, mean)
    raise UserError(
        '--learning_rate auto cannot tell: at rates from {:g} to {:g}, the loss did not fall by '
        'more than chance; give a rate'.format(LOWEST, HIGHEST))
