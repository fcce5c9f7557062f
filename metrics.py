"""Importance metrics beside the paper's own: what tensors are worth by their weights and gradients.

Each is a function of
    weights: N arrays, model.trainable_variables order, each read when its turn comes;
    gradients: () -> for each probe batch, N arrays, one by one; computed when called;
    random: np.random.RandomState of the run;
and gives (N,) float64: the larger, the sooner a tensor is trained. To add one is to write it here.
"""

import numpy as np

METRICS = {'gradient_update': None}  # the paper's, by a trial update: importance.py


def metric(function):
    """Makes the function an --importance of its name."""
    METRICS[function.__name__] = function
    return function


@metric
def weight_magnitude(weights, gradients, random):
    """sum_i |w_i|, an ablation of the paper."""
    return np.array([np.abs(weight).sum(dtype=np.float64) for weight in weights])


@metric
def grad_magnitude(weights, gradients, random):
    """sum_i |dL/dw_i|, an ablation of the paper."""
    return np.mean([[np.abs(gradient).sum(dtype=np.float64) for gradient in batch]
                    for batch in gradients()], axis=0)


@metric
def fisher(weights, gradients, random):
    """sum_i (dL/dw_i w_i)^2, of the batch's mean gradient, not of each example's."""
    return np.mean([[np.square(gradient * weight).sum(dtype=np.float64)
                     for gradient, weight in zip(batch, weights)] for batch in gradients()],
                   axis=0)


@metric
def random(weights, gradients, random):
    """Drawn anew each time."""
    return random.random_sample(len(weights))


@metric
def depth(weights, gradients, random):
    """The variable nearest the output outweighs all that are farther from it together."""
    return 0.5 ** np.minimum(np.arange(len(weights))[::-1], 1000)
