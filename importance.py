"""Tensor importance: how much loss each tensor's own update takes away (paper, section 4.2)."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

import keras_stack
import trial_graph
from masked_step import StepMaker
from runs import METRICS

SMALLEST_SCALE = 2.0 ** -10


class Trial(NamedTuple):
    """One trial update: its scale, at which the first-order prediction held, and the drops.

    predicted_drop: sum of the importances times scale; real_drop: loss before - loss after.
    """
    scale: float
    predicted_drop: float
    real_drop: float

    @property
    def holds(self):
        """Both drops have one sign and are within a factor of two, or are mere rounding."""
        return self._agree_within(2)

    @property
    def holds_easily(self):
        """They are so close that an update twice as large would likely hold too."""
        return self._agree_within(1.25)

    def _agree_within(self, factor):
        low, high = sorted((abs(self.predicted_drop), abs(self.real_drop)))
        return high < 1e-6 or (self.predicted_drop * self.real_drop > 0 and high <= factor * low)


class Evaluator:
    """What evaluate_importance needs compiled: make it once for a run and hand it over.

    The forward pass is in training mode, but with dropout off, in both passes of a trial: its noise
    in the loss drowns a first-order drop.
    maker: masked_step.StepMaker of the training step. scale: of the trial update that held last;
    where it held with room to spare, twice that. seed: of the metric `random`.
    """

    def __init__(self, maker, seed=0):
        self.maker = maker
        self.random = np.random.RandomState(seed)
        self.scale = 1.0
        self.variables = maker.variables
        self.pass_ms = []  # of every forward and backward pass but a first one, which compiles
        self._pass = self._trial = None
        self._update = trial_graph.updates(maker)

    def gradients(self, images, labels):
        """(loss, N gradients); changes nothing, neither random states nor BN statistics."""
        if self._pass is None:
            self._pass = self.maker.gradients()
            self._pass(images, labels)[0].numpy()  # compiles; usual times are wanted
        loss, _, *gradients = self._timed(self._pass, images, labels)
        return float(loss), gradients

    def updates(self, gradients):
        """N updates that the optimizer would make, without weight decay; changes nothing."""
        return self._update(*gradients)

    def trial(self, images, labels, updates, scale):
        """(loss, (N,) float64 drops) at w + scale * updates; changes nothing.

        A drop is the first-order drop in loss of one tensor's whole update, - sum_i g_i dw_i.
        """
        scale = tf.constant(scale, tf.float32)
        if self._trial is None:
            self._trial = trial_graph.drops(self.maker)
            self._trial(images, labels, scale, *updates)[0].numpy()  # compiles
        loss, _, drops = self._timed(self._trial, images, labels, scale, *updates)
        return float(loss), drops.numpy().astype(np.float64)

    def _timed(self, function, *arguments):
        results, ms = function.timed(*arguments)
        self.pass_ms.append(ms)
        return results


def evaluate_importance(model, optimizer, batches, metric='gradient_update', evaluator=None,
                        trials=None):
    """(N,) float64: the importance of every trainable tensor, averaged over the probe batches.

    gradient_update (the paper, equation 3): a trial update w -> w + dw of all tensors by the
    optimizer, from the same start for each batch; then I_k = - sum_i dL/dw_i (at w + dw) * dw_i,
    the first-order drop in loss that tensor k's own update is responsible for. Where the update of
    all tensors at once overshoots, every gradient behind it points back and says nothing: the trial
    is then halved until the predicted and the real drop of its loss agree (Trial.holds). dw leaves
    weight decay out. It includes momentum as the first real step would: the momentum of a tensor
    that was left out is as old as its last selection.
    weight_magnitude, grad_magnitude: sum_i |w_i| and sum_i |dL/dw_i|, the paper's ablations.
    fisher: sum_i (dL/dw_i w_i)^2, of the batch's mean gradient, not of each example's. random:
    drawn anew each time. depth: the variable nearest the output outweighs all that are farther from
    it together.

    optimizer: built on all trainable variables. batches: iterable of (images, labels).
    evaluator: an Evaluator of the two, to avoid tracing again.
    trials: a list that receives the Trial of each batch.
    No side effect: weights, slots, iteration count, BN statistics and random states are bit for bit
    what they were. Raises ValueError for an unknown metric or where there is no batch.
    """
    if metric not in METRICS:
        raise ValueError("unknown importance metric '{}'; allowed: {}".format(
            metric, ', '.join(METRICS)))
    # The model's own list takes Keras milliseconds to gather.
    variables = evaluator.variables if evaluator else model.trainable_variables
    if metric == 'weight_magnitude':
        return np.array([np.abs(keras_stack.raw(v).numpy()).sum(dtype=np.float64)
                         for v in variables])
    if metric == 'random':
        random = evaluator.random if evaluator else np.random.RandomState()
        return random.random_sample(len(variables))
    if metric == 'depth':
        return 0.5 ** np.minimum(np.arange(len(variables))[::-1], 1000)
    total, count = np.zeros(len(variables)), 0
    for images, labels in batches:
        evaluator = evaluator or Evaluator(StepMaker(model, optimizer, 0.0, images, labels))
        if metric == 'gradient_update':
            importance, trial = _trial(evaluator, images, labels)
            if trials is not None:
                trials.append(trial)
        else:
            score = _fisher if metric == 'fisher' else _magnitude
            importance = [score(gradient.numpy(), variable) for gradient, variable in zip(
                evaluator.gradients(images, labels)[1], evaluator.variables)]
        total += importance
        count += 1
    if not count:
        raise ValueError('at least one probe batch is needed')
    if metric == 'gradient_update' and trial.holds_easily:
        evaluator.scale = min(1.0, 2 * trial.scale)
    return total / count


def _magnitude(gradient, variable):
    return np.abs(gradient).sum(dtype=np.float64)


def _fisher(gradient, variable):
    return np.square(gradient * variable.numpy()).sum(dtype=np.float64)


def _trial(evaluator, images, labels):
    """((N,) float64, Trial) for one batch, from the evaluator's scale of the update down."""
    loss, gradients = evaluator.gradients(images, labels)
    updates = evaluator.updates(gradients)
    while True:
        scale = evaluator.scale
        loss_after, importance = evaluator.trial(images, labels, updates, scale)
        trial = Trial(scale, scale * float(importance.sum()), loss - loss_after)
        if trial.holds or scale <= SMALLEST_SCALE:
            return importance, trial
        evaluator.scale = scale / 2
