"""Tensor selection: which tensors buy the most importance within a time budget (paper, section
4.3).

Training tensor k costs t_dw[k], the time of its own gradient, and needs the error gradient carried
back to it: t_dy of every tensor from the output down to the deepest selected one. That second cost
depends on the deepest selected tensor alone, so the problem is a family of prefix 0/1 knapsacks on
t_dw, and one sweep from the output to the input solves all of them exactly in O(N * resolution).

Arrays have shape (N,) and run from the input to the output: index 0 is the tensor nearest the
input.
"""

import warnings
from typing import NamedTuple

import numpy as np


class Selection(NamedTuple):
    """A set of tensors to train.

    mask: (N,) bool, True where the tensor is trained, in the order of the arguments.
    importance: sum of the importance of the selected tensors.
    time: ms of backward time they take, t_dw of each plus t_dy down to the deepest.
    fallback: True when no feasible tensor had positive importance (see select_tensors).
    """
    mask: np.ndarray
    importance: float
    time: float
    fallback: bool = False


class InfeasibleBudget(ValueError):
    """No tensor fits in the budget. `smallest_budget`, in ms, is the least at which one does."""

    def __init__(self, budget, smallest_budget):
        super().__init__(
            'no tensor fits in a budget of {:.6g} ms; the smallest feasible budget is {:.6g} ms'
            .format(budget, smallest_budget))
        self.budget = budget
        self.smallest_budget = smallest_budget


def select_tensors(t_dw, t_dy, importance, budget, resolution=10_000):
    """The feasible set of tensors with the largest total importance (paper, equation 4).

    The budget is cut into `resolution` bins and every cost is rounded UP to whole bins, so that the
    result never exceeds the budget; it is the exact optimum for the rounded costs, and at least as
    good as the optimum for a budget smaller by N / resolution of itself. A tensor of importance <=
    0 is never selected, except by the fallback: where no feasible tensor has positive importance,
    an empty mask would silently train nothing, so importances are shifted until the worst feasible
    tensor is just above zero, which fills the budget with the least bad ones. A warning says so.

    t_dw: (N,) ms per step, own gradient of each tensor.
    t_dy: (N,) ms per step, extra time to carry the error gradient back to each tensor.
    importance: (N,) predicted loss drop, any sign.
    budget: ms of backward time, > 0.
    resolution: number of bins, >= 1.
    Returns a Selection. Raises InfeasibleBudget when no single tensor fits, ValueError for wrong
    shapes, negative or non-finite times, NaN importance, a budget or resolution that is not
    positive.
    """
    t_dw, t_dy, importance = _checked(t_dw, t_dy, importance, budget, resolution)
    to_reach = np.cumsum(t_dy[::-1])[::-1] + t_dw  # (N,) ms, tensor k alone
    feasible = to_reach <= budget
    if not feasible.any():
        raise InfeasibleBudget(budget, float(to_reach.min()))

    fallback = not (importance[feasible] > 0).any()
    value = importance
    if fallback:
        warnings.warn('no feasible tensor has positive importance: selecting the least bad ones')
        worst = importance[feasible].min()
        span = importance[feasible].max() - worst
        value = importance - worst + (1e-3 * span or 1.0)

    item_bins = np.ceil(t_dw * resolution / budget)
    reach_bins = np.ceil(to_reach * resolution / budget)
    mask = _prefix_knapsack(item_bins, reach_bins, value, resolution)
    return _selection(mask, t_dw, t_dy, importance, fallback)


def _prefix_knapsack(item_bins, reach_bins, value, resolution):
    """(N,) bool: the best mask, found by trying every tensor as the deepest selected one.

    item_bins: (N,) whole bins a tensor costs where a deeper one is selected too.
    reach_bins: (N,) whole bins tensor k costs as the deepest one, error gradient included.
    """
    n = len(value)
    best = np.zeros(resolution + 1)  # best[c]: most value of the tensors seen so far in c bins
    taken = {}  # k -> bits: whether the best for as many bins more than k's own has tensor k
    best_value, deepest = 0.0, None
    for k in range(n - 1, -1, -1):  # from the output to the input
        if not value[k] > 0:
            continue
        if reach_bins[k] <= resolution:
            total = best[resolution - int(reach_bins[k])] + value[k]
            if total > best_value:  # strict: of equal sets, the one nearest the output is cheaper
                best_value, deepest = total, k
        if item_bins[k] <= resolution:
            bins = int(item_bins[k])
            with_k, without = best[:resolution + 1 - bins] + value[k], best[bins:]
            taken[k] = np.packbits(with_k > without)
            np.maximum(with_k, without, out=without)  # with_k is a copy: no aliasing

    mask = np.zeros(n, dtype=bool)
    mask[deepest] = True
    capacity = resolution - int(reach_bins[deepest])
    for k in range(deepest + 1, n):  # the sweep in reverse: deepest items were decided last
        spare = capacity - int(item_bins[k])
        if k in taken and spare >= 0 and taken[k][spare // 8] >> (7 - spare % 8) & 1:
            mask[k] = True
            capacity = spare
    return mask


def select_tensors_paper(t_dw, t_dy, importance, budget, resolution=1000):
    """The paper's recursion, kept as the reference: O(N^2 * resolution), and not optimal.

    P[k, t] is the best importance among the k tensors nearest the output in t bins:
    P[k, t] = max(P[k-1, t], max over k_c of P[k_c, t - t_dw[k] - sum of t_dy from k_c to k] + I_k),
    k_c being the last tensor selected before k. One solution is kept for each P[k_c, t], so a k_c
    that the best solution leaves out cannot be extended: value is lost. Times are rounded DOWN to
    whole bins as in the paper, so the result can exceed the budget: at N >= 1000 nearly all times
    become zero. (Paper, section 4.3; its published code corrects with a factor on the budget.)

    Arguments, result and errors as for select_tensors; the empty mask is possible here.
    """
    t_dw, t_dy, importance = _checked(t_dw, t_dy, importance, budget, resolution)
    n, size = len(importance), resolution + 1
    scale = resolution / budget
    # Index 1 is nearest the output from here on; index 0 stands for "nothing selected".
    dw = np.concatenate([[0], np.floor(t_dw[::-1] * scale)])
    reach = np.concatenate([[0], np.cumsum(np.floor(t_dy[::-1] * scale))])
    gain = np.concatenate([[0.0], importance[::-1]])

    value = np.zeros((n + 1, size))
    last = np.zeros((n + 1, size), dtype=np.int32)      # tensor selected last in the solution
    previous = np.zeros((n + 1, size), dtype=np.int32)  # the one before it
    for k in range(1, n + 1):
        value[k], last[k], previous[k] = value[k - 1], last[k - 1], previous[k - 1]
        for k_c in range(k):
            bins = dw[k] + reach[k] - reach[k_c]
            if bins > resolution:
                continue
            bins = int(bins)
            extended = value[k_c, :size - bins] + gain[k]
            better = (last[k_c, :size - bins] == k_c) & (extended > value[k, bins:])
            value[k, bins:][better] = extended[better]
            last[k, bins:][better] = k
            previous[k, bins:][better] = k_c

    mask = np.zeros(n, dtype=bool)
    row, t = n, resolution
    while last[row, t] > 0:
        k, k_c = last[row, t], previous[row, t]
        mask[n - k] = True
        t -= int(dw[k] + reach[k] - reach[k_c])
        row = k_c
    return _selection(mask, t_dw, t_dy, importance, False)


def _selection(mask, t_dw, t_dy, importance, fallback):
    deepest = int(np.argmax(mask)) if mask.any() else len(mask)
    time = float(t_dw[mask].sum() + t_dy[deepest:].sum())
    return Selection(mask, float(importance[mask].sum()), time, fallback)


def _checked(t_dw, t_dy, importance, budget, resolution):
    arrays = [np.asarray(a, dtype=np.float64) for a in (t_dw, t_dy, importance)]
    shapes = [a.shape for a in arrays]
    if arrays[0].ndim != 1 or len(set(shapes)) != 1 or arrays[0].size == 0:
        raise ValueError('t_dw, t_dy and importance must be one-dimensional, of one length N >= 1; '
                         'got shapes {}, {}, {}'.format(*shapes))
    for name, array in zip(('t_dw', 't_dy', 'importance'), arrays):
        if not np.isfinite(array).all():
            raise ValueError('{} holds a value that is not finite'.format(name))
        if name != 'importance' and (array < 0).any():
            raise ValueError('{} holds a negative time: {:.6g}'.format(name, array.min()))
    if not (np.isfinite(budget) and budget > 0):
        raise ValueError('the budget must be a positive number of ms; got {}'.format(budget))
    if int(resolution) != resolution or resolution < 1:
        raise ValueError('resolution must be a whole number >= 1; got {}'.format(resolution))
    return arrays
