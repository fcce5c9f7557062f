"""Tensor importance: how much loss each tensor's own update takes away (paper, section 4.2)."""

import numpy as np

METRICS = ('gradient_update', 'weight_magnitude', 'grad_magnitude')


def gradient_function(model):
    """Compiled (images, labels) -> gradients of all trainable tensors, in training mode but
    dropout.

    Dropout is off in both passes of a trial: its noise in the loss drowns a first-order drop.
    Everything else is as in a training step. Build it once and hand it to evaluate_importance.
    """
    import keras_stack
    from training_step import TrainingStep
    step = TrainingStep(model, None, np.ones(len(model.trainable_variables), dtype=bool),
                        update=False, outputs_gradients=True)

    def gradients(images, labels):
        with keras_stack.dropout_off(model):
            return step(images, labels)[2]
    return gradients


def evaluate_importance(model, optimizer, batches, metric='gradient_update', gradients=None):
    """(N,) float64: the importance of every trainable tensor, averaged over the probe batches.

    gradient_update (the paper, equation 3): a trial update w -> w + dw of all tensors by the
    optimizer, from the same start for each batch; then I_k = - sum_i dL/dw_i (at w + dw) * dw_i,
    the first-order drop in loss that tensor k's own update is responsible for. dw leaves weight
    decay out. It includes momentum as the first real step would: the momentum of a tensor that was
    left out is as old as its last selection.
    weight_magnitude, grad_magnitude: sum_i |w_i| and sum_i |dL/dw_i|, the paper's ablations.

    optimizer: built on all trainable variables. batches: iterable of (images, labels).
    gradients: a gradient_function, to avoid compiling again.
    No side effect: weights, slots, iteration count, BN statistics and random states are bit for bit
    what they were.
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
    total, count = np.zeros(len(variables)), 0
    for images, labels in batches:
        with keras_stack.restored_afterwards(state):
            total += (_trial(optimizer, variables, gradients, images, labels)
                      if metric == 'gradient_update' else
                      np.array([np.abs(g.numpy()).sum(dtype=np.float64)
                                for g in gradients(images, labels)]))
        count += 1
    if not count:
        raise ValueError('at least one probe batch is needed')
    return total / count


def _trial(optimizer, variables, gradients, images, labels):
    """(N,) float64: - gradient after the update * update, for one batch; leaves the update done."""
    import keras_stack
    before = [keras_stack.raw(v).numpy() for v in variables]
    keras_stack.apply_gradients(optimizer, gradients(images, labels), variables)
    after = [keras_stack.raw(v).numpy() for v in variables]
    return np.array([-np.vdot(g.numpy().astype(np.float64), (new - old).astype(np.float64))
                     for g, new, old in zip(gradients(images, labels), after, before)])
