"""Defines the metrics of importance: functions that --importance chooses by name.

A metric takes an importance.Probe and returns the (N,) float64 importances, in the order of
model.trainable_variables.
"""

import numpy as np

METRICS = {}  # name -> function


def metric(function):
    """Registers a metric under its name."""
    METRICS[function.__name__] = function
    return function


@metric
def gradient_update(probe):
    """Returns - sum_i dL/dw_i (at w + dw) * dw_i, the paper's metric (equation 3)."""
    return np.mean(probe.drops(), axis=0)


@metric
def weight_magnitude(probe):
    """Returns sum_i |w_i|, an ablation of the paper."""
    return np.array([np.abs(weight).sum(dtype=np.float64) for weight in probe.weights])


@metric
def grad_magnitude(probe):
    """Returns sum_i |dL/dw_i|, an ablation of the paper."""
    return np.mean([[np.abs(gradient).sum(dtype=np.float64) for gradient in batch]
                    for batch in probe.gradients()], axis=0)


@metric
def fisher(probe):
    """Returns sum_i (dL/dw_i w_i)^2, by the mean gradient of a batch, not of each example."""
    return np.mean([[np.square(gradient * weight).sum(dtype=np.float64)
                     for gradient, weight in zip(batch, probe.weights)]
                    for batch in probe.gradients()], axis=0)


@metric
def random(probe):
    """Returns new random numbers at each selection."""
    return probe.random.random_sample(len(probe.variables))


@metric
def depth(probe):
    """Returns powers of two: each tensor outweighs all tensors nearer to the input together."""
    return 0.5 ** np.minimum(np.arange(len(probe.variables))[::-1], 1000)
