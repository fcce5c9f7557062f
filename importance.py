"""Tensor importance: how much loss each tensor's own update takes away (paper, section 4.2)."""

from typing import NamedTuple

import numpy as np

METRICS = ('gradient_update', 'weight_magnitude', 'grad_magnitude')
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
        low, high = sorted((abs(self.predicted_drop), abs(self.real_drop)))
        return high < 1e-6 or (self.predicted_drop * self.real_drop > 0 and high <= 2 * low)


def gradient_function(model):
    """Compiled (images, labels) -> (loss, gradients of all trainable tensors).

    In training mode, but with dropout off, in both passes of a trial: its noise in the loss drowns
    a first-order drop. Build it once and hand it to evaluate_importance.
    """
    import keras_stack
    from training_step import TrainingStep
    step = TrainingStep(model, None, np.ones(len(model.trainable_variables), dtype=bool),
                        update=False, outputs_gradients=True)

    def loss_and_gradients(images, labels):
        with keras_stack.dropout_off(model):
            loss, _, gradients = step(images, labels)
        return float(loss), gradients
    return loss_and_gradients


def evaluate_importance(model, optimizer, batches, metric='gradient_update', gradients=None,
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

    optimizer: built on all trainable variables. batches: iterable of (images, labels).
    gradients: a gradient_function, to avoid compiling again.
    trials: a list that receives the Trial of each batch.
    No side effect: weights, slots, iteration count, BN statistics and random states are bit for bit
    what they were. Raises ValueError for an unknown metric or where there is no batch.
    """
    import keras_stack
    if metric not in METRICS:
        raise ValueError("unknown importance metric '{}'; allowed: {}".format(
            metric, ', '.join(METRICS)))
    variables = model.trainable_variables
    if metric == 'weight_magnitude':
        return np.array([np.abs(keras_stack.raw(v).numpy()).sum(dtype=np.float64)
                         for v in variables])
    gradients = gradients or gradient_function(model)
    state = list(model.variables) + keras_stack.optimizer_variables(optimizer)
    total, count, trial = np.zeros(len(variables)), 0, Trial(1.0, 0.0, 0.0)
    for images, labels in batches:
        with keras_stack.restored_afterwards(state):
            if metric == 'gradient_update':
                importance, trial = _trial(model, optimizer, gradients, images, labels, trial.scale)
                if trials is not None:
                    trials.append(trial)
            else:
                importance = [np.abs(g.numpy()).sum(dtype=np.float64)
                              for g in gradients(images, labels)[1]]
        total += importance
        count += 1
    if not count:
        raise ValueError('at least one probe batch is needed')
    return total / count


def _trial(model, optimizer, gradients, images, labels, scale):
    """((N,) float64, Trial) for one batch, from `scale` of the update down; leaves it done."""
    import keras_stack
    variables = model.trainable_variables
    # Batch statistics and random states move with every pass; each pass starts from the same.
    passing = list(model.non_trainable_variables)
    before = [keras_stack.raw(v).numpy() for v in variables]
    with keras_stack.restored_afterwards(passing):
        loss, first = gradients(images, labels)
    keras_stack.apply_gradients(optimizer, first, variables)
    updates = [keras_stack.raw(v).numpy() - old for v, old in zip(variables, before)]
    while True:
        if scale != 1:
            for variable, old, update in zip(variables, before, updates):
                variable.assign(old + np.asarray(scale, old.dtype) * update)
        with keras_stack.restored_afterwards(passing):
            loss_after, second = gradients(images, labels)
        importance = np.array([-np.vdot(g.numpy().astype(np.float64), update.astype(np.float64))
                               for g, update in zip(second, updates)])
        trial = Trial(scale, scale * float(importance.sum()), loss - loss_after)
        if trial.holds or scale <= SMALLEST_SCALE:
            return importance, trial
        scale /= 2
