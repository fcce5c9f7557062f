"""Tensor importance: how much loss each tensor's own update takes away (paper, section 4.2)."""

import contextlib
import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import keras_stack
from masked_step import StepMaker
from metrics import METRICS
from training_step import NUM_RESULTS, StepResult

SMALLEST_SCALE = 2.0 ** -10


class Trial(NamedTuple):
    """One trial update: its scale, at which the first-order prediction held, and the drops.

    predicted_drop: sum of the importances times scale; real_drop: objective before - after.
    """
    scale: float
    predicted_drop: float
    real_drop: float

    @property
    def holds(self):
        """Both are drops and within a factor of two, or mere rounding.

        That both go uphill is no agreement: such a trial says which tensors do least harm.
        """
        return self._agree_within(2)

    @property
    def holds_easily(self):
        """They are so close that an update twice as large would likely hold too."""
        return self._agree_within(1.25)

    def _agree_within(self, factor):
        low, high = sorted((self.predicted_drop, self.real_drop))
        return max(abs(low), abs(high)) < 1e-6 or (low > 0 and high <= factor * low)


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
        self._momenta = keras_stack.momenta(maker.optimizer, maker.model.trainable_variables)
        self._others = maker.state[len(maker.variables):]  # that an update changes
        self._pass = None
        self._update = maker.update_alone(decay=False)

    def gradients(self, inputs, labels):
        """(objective, N gradients); changes nothing, neither random states nor BN statistics."""
        if self._pass is None:
            self._pass = self.maker.gradients()
            self._pass(inputs, labels)[0].numpy()  # compiles; usual times are wanted
        results, ms = self._pass.timed(inputs, labels)
        self.pass_ms.append(ms)
        result = StepResult(*results[:NUM_RESULTS])
        return float(result.objective), results[NUM_RESULTS:]

    @contextlib.contextmanager
    def updated(self, gradients):
        """Within, all tensors hold the optimizer's update by the N gradients, a list, which it
        empties: at no time is more held than needed. Yields what they were, N tensors. Weight decay
        and momentum are left out: only what was trained of late has any, and importances would not
        be on one scale. Afterwards everything is as before, bit for bit.
        """
        with keras_stack.restored_afterwards(self.variables) as before:
            with keras_stack.restored_afterwards(self._others):
                for momentum in self._momenta:
                    momentum.assign(tf.zeros_like(momentum), read_value=False)
                self._update(*gradients)
            del gradients[:]
            yield before

    def trial(self, inputs, labels, scale=None):
        """((N,) float64 importance, Trial) of one batch: at the evaluator's scale, which is halved
        until the prediction holds, or at `scale` alone.
        """
        objective, gradients = self.gradients(inputs, labels)
        with self.updated(gradients) as before:
            updates, tried = None, scale or self.scale
            while True:
                if tried != 1.0:  # else the update is the difference, and need not be held
                    updates = updates or list(self.changes(before))
                    for variable, old, update in zip(self.variables, before, updates):
                        variable.assign(old + tried * update, read_value=False)
                after, gradients = self.gradients(inputs, labels)
                drops = -tf.stack([tf.reduce_sum(gradient * update) for gradient, update in zip(
                    gradients, updates or self.changes(before))]).numpy().astype(np.float64)
                trial = Trial(tried, tried * float(drops.sum()), objective - after)
                if scale or trial.holds or tried <= SMALLEST_SCALE:
                    break
                tried = self.scale = tried / 2
                del gradients
        return drops, trial

    def changes(self, before):
        """Generator of what was added to the N tensors since they were `before`."""
        return (variable.read_value() - old for variable, old in zip(self.variables, before))


def evaluate_importance(model, optimizer, batches, metric='gradient_update', evaluator=None,
                        trials=None):
    """(N,) float64: the importance of every trainable tensor, averaged over the probe batches.

    gradient_update (the paper, equation 3): a trial update w -> w + dw of all tensors by the
    optimizer, from the same start for each batch; then I_k = - sum_i dL/dw_i (at w + dw) * dw_i,
    the first-order drop in loss that tensor k's own update is responsible for. Where the update of
    all tensors at once overshoots, every gradient behind it points back and says nothing: the trial
    is then halved until the predicted and the real drop of its loss agree (Trial.holds). dw leaves
    weight decay and SGD's momentum out.
    Others: metrics.py.

    optimizer: built on all trainable variables. batches: iterable of (images, labels).
    evaluator: an Evaluator of the two, to avoid tracing again.
    trials: a list that receives the Trial of each batch.
    No side effect: weights, slots, iteration count, BN statistics and random states are bit for bit
    what they were. Raises ValueError for an unknown metric or where there is no batch.
    """
    if metric not in METRICS:
        raise ValueError("unknown importance metric '{}'; allowed: {}".format(
            metric, ', '.join(METRICS)))
    random = evaluator.random if evaluator else np.random.RandomState()
    # The model's own list takes Keras milliseconds to gather.
    variables = evaluator.variables if evaluator else model.trainable_variables

    @functools.lru_cache(maxsize=None)
    def with_evaluator():
        """(Evaluator, list of the batches): made only where gradients are wanted."""
        found = list(batches)
        if not found:
            raise ValueError('at least one probe batch is needed')
        return evaluator or Evaluator(StepMaker(model, optimizer, 0.0, *found[0])), found

    def gradients():
        passes, found = with_evaluator()
        for inputs, labels in found:
            yield (gradient.numpy() for gradient in passes.gradients(inputs, labels)[1])
    if METRICS[metric] is None:
        return _mean_importance(*with_evaluator(), trials)
    return METRICS[metric](_Weights(variables), gradients, random)


class _Weights:
    """Arrays of N variables, each read when its turn comes; len() reads none."""

    def __init__(self, variables):
        self._variables = variables

    def __len__(self):
        return len(self._variables)

    def __iter__(self):
        return (keras_stack.raw(variable).numpy() for variable in self._variables)


def _mean_importance(evaluator, batches, trials):
    """(N,) float64, of trials at one scale: where a later batch halves it, all are tried again."""
    while True:
        found = [evaluator.trial(*batch) for batch in batches]
        if len({trial.scale for _, trial in found}) == 1:
            break
    if trials is not None:
        trials.extend(trial for _, trial in found)
    if all(trial.holds_easily for _, trial in found):
        evaluator.scale = min(1.0, 2 * evaluator.scale)
    return np.mean([drops for drops, _ in found], axis=0)
