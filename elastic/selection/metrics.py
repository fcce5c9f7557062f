"""Defines the metrics of importance: functions that --importance chooses by name.

A metric takes an importance.Probe and returns the (N,) float64 importances, in the order of
model.trainable_variables.
"""

import numpy as np

from elastic.selection.betti import loops

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


# ---------------------------------------------------------------- rules of other papers

BLOCKS = 10  # of tensors, from the input to the output, that AutoFreeze and Egeria freeze
SETTLED = 0.2  # of its largest change so far, below which Egeria freezes a block


@metric
def lisa(probe):
    """Trains the output layer, and whole layers in a new random order, as many as fit.

    LISA (Pan et al., NeurIPS 2024). Deviations: 1. rho decides how many layers are trained, not a
    number. 2. There is no embedding. 3. Layers are drawn every --interval epochs, not steps.
    """
    order = probe.random.permutation(probe.layers.max() + 1)[probe.layers]
    order[probe.head] = -1
    return _in_order(order)


@metric
def betti(probe):
    """Trains whole layers, those first whose outputs have the most loops for their size.

    AdaBet (Tenison et al., 2025). It needs neither labels nor gradients: each image's output is a
    point, and the first Betti number counts the loops that the points of a batch form.
    Deviations: 1. rho is a share of a step's time, not of the layers. 2. The number is the largest
    over Vietoris-Rips complexes at several scales (betti.py). 3. Channels are not selected.
    """
    layers, score = probe.layers, np.zeros(len(probe.layers))
    for outputs in probe.outputs():
        for first in set(layers):  # a layer's number is that of its first tensor
            output = outputs[first]
            if output is not None:
                score[first] += loops(output.reshape(len(output), -1)) / output[0].size
    order = sorted(set(layers), key=lambda layer: -score[layer])
    return _in_order(np.array([order.index(layer) for layer in layers]))


@metric
def autofreeze(probe):
    """Trains the last tensors that fit, without the front blocks whose gradients have settled.

    AutoFreeze (Liu, Agarwal, Venkataraman, 2021). A block is settled if the norm of its gradient
    changes less than that of the median block; a block is frozen for good once it and all blocks
    before it are. Deviations: 1. rho also bounds what is trained. 2. The gradient is that of the
    probe batches, not summed over steps. 3. There are BLOCKS blocks of as many tensors each.
    """
    norms = np.mean([[float(np.linalg.norm(gradient)) for gradient in batch]
                     for batch in probe.gradients()], axis=0)
    norms = np.sqrt(_by_block(norms ** 2))
    before = probe.memory.get('norms')
    probe.memory['norms'] = norms
    if before is None:
        return depth(probe)
    change = np.abs(norms - before) / np.maximum(before, 1e-12)
    return _without_front(probe, change < np.median(change))


@metric
def egeria(probe):
    """Trains the last tensors that fit, without the front blocks whose weights have settled.

    Egeria (Wang et al., EuroSys 2023). A block is settled if its plasticity has fallen below
    SETTLED of its largest; it is frozen as in autofreeze. Deviations: 1. rho also bounds what is
    trained. 2. Plasticity is the relative change of weights since the last selection, not of
    activations against a quantised reference model. 3. Blocks are those of autofreeze. 4. Frozen
    blocks are not thawed when the learning rate falls.
    """
    weights = list(probe.weights)
    before, largest = probe.memory.get('weights'), probe.memory.get('largest')
    probe.memory['weights'] = weights
    if before is None:
        return depth(probe)
    moved = [np.square(new - old).sum(dtype=np.float64) for new, old in zip(weights, before)]
    size = [np.square(old).sum(dtype=np.float64) for old in before]
    change = np.sqrt(_by_block(moved) / np.maximum(_by_block(size), 1e-24))
    largest = probe.memory['largest'] = change if largest is None else np.maximum(largest, change)
    trained = largest > 0  # a block that rho kept out has not settled, but lies in front
    return _without_front(probe, trained & (change < SETTLED * largest))


def _in_order(order):
    """Returns importances by which a tensor outweighs all tensors of later layers together.

    order: (N,) int, the place of each tensor's layer.
    """
    return 0.1 ** (1.0 + order - order.min())


def _by_block(values):
    """Returns the (BLOCKS,) sums of (N,) values; with fewer tensors, each is a block."""
    return np.array([part.sum() for part in _blocks(np.asarray(values))])


def _blocks(values):
    return np.array_split(values, min(BLOCKS, len(values)))


def _without_front(probe, settled):
    """Returns the importance of the last tensors that fit, without blocks frozen now or before.

    settled: (BLOCKS,) bool. The last block is never frozen.
    """
    frozen = int(probe.memory.get('frozen', 0))
    while frozen < len(settled) - 1 and settled[frozen]:
        frozen += 1
    probe.memory['frozen'] = frozen
    importance = depth(probe)
    front = sum(len(part) for part in _blocks(importance)[:frozen])
    importance[:front] = 0
    return importance
