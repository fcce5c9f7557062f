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
SMOOTHING = 0.8  # weight of the steps before in moving means
FLAT = 10  # first steps, whose rates are too small to change much: their changes are noise
WORSE = 0.5  # the test ends where the loss has risen by this share
MARGIN = 1.5  # the centre of the fall is this times the rate to train with


class RangeTest(NamedTuple):
    """Holds a range test of K steps.

    rates: (K,). before, losses: (K,), of each step's batch before the test, and after the steps
    before it. change: (K,), the share by which the loss has changed, of moving means.
    """
    rates: np.ndarray
    before: np.ndarray
    losses: np.ndarray
    change: np.ndarray

    @property
    def centre(self):
        """Returns the centre of the fall: mean of log(rate), weighted by how far the loss fell.

        Where the curve is flat, its lowest point lies anywhere. In 28 tests, tuned rates differed
        from that by a factor of 2.5 (standard deviation), and from the centre by 2.0.
        """
        return float(np.exp(np.average(np.log(self.rates), weights=np.maximum(-self.change, 0))))

    @property
    def rate(self):
        """Returns the rate to train with."""
        return self.centre / MARGIN


def range_test(step, schedule, batches, maker, cluster, judge=None):
    """Returns the RangeTest of a step; nothing is left changed.

    step: MaskedStep of `maker`. schedule: optimizer.WarmupCosine with a `scale`. batches: () ->
    iterable of STEPS (inputs, labels), the same each time. cluster: workers.cluster.Cluster, whose
    mean loss counts. judge: () -> loss of images on which nothing was fitted; default: the loss of
    each step's batch counts, compared with that in a pass at rate 0.
    Raises UserError if the loss does not fall by more than noise at any rate.
    """
    rates, before, losses = np.geomspace(LOWEST, HIGHEST, STEPS), [], []

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
                losses.append(loss(batch, rate))
                bar.update()
                if not change_of(losses, before)[-1] <= WORSE:  # also where it is not a number
                    break
    return found_in(rates, np.array(before), np.array(losses))


def change_of(losses, before):
    """Returns (K,), the share by which the moving mean of K losses differs from that before."""
    now = then = 0.0
    found = []
    for loss, old in zip(losses, before):
        now, then = SMOOTHING * now + loss, SMOOTHING * then + old
        found.append(now / then - 1)
    return np.array(found)


def found_in(rates, before, losses):
    """Returns the RangeTest of K losses, (K,); rates and losses before may be more.

    Raises UserError as range_test does.
    """
    losses = losses[np.isfinite(losses)]
    rates, before = rates[:len(losses)], before[:len(losses)]
    change = change_of(losses, before)
    if len(losses) > FLAT:
        noise = (losses / before)[:FLAT].std() / FLAT ** 0.5
        if change.min() < -4 * noise:
            return RangeTest(rates, before, losses, change)
    raise UserError(
        '--learning_rate auto cannot tell: at rates from {:g} to {:g}, the loss did not fall by '
        'more than chance; give a rate'.format(LOWEST, HIGHEST))
