"""Which tensors to train within the time that rho leaves (paper, section 4.3).

The solver of selection_solver_DP.py works on the chain of t_dw and t_dy; here its problem is posed,
for single tensors or whole layers, and what the chain leaves of the budget is spent at the graph's
price.
"""

from typing import NamedTuple

import numpy as np

from selection_solver_DP import InfeasibleBudget, select_tensors

# Rounding up then wastes at most 1 / BINS_PER_ITEM of the budget, and the largest networks take
# less than 0.1 s (benchmarks/README.md, selector.py --limits).
BINS_PER_ITEM, LEAST_BINS = 50, 10_000


def layers_of(model):
    """(N,) int: which layer each trainable tensor is of."""
    import keras_stack
    paths = [keras_stack.layer_path(v) for v in model.trainable_variables]
    return np.array([paths.index(path) for path in paths])


def out_of_reach(timings, rho, layers=None):
    """Why no tensor can be trained at rho by these timings, in one line; None where one can."""
    least = smallest_rho(timings, layers)
    return None if rho >= least else (
        'rho {:g} is out of reach: the forward pass alone takes {:.3f} of a full step; the '
        'smallest rho that trains a tensor is {:.3f}'.format(
            rho, timings.t_fp / timings.t_step, least + 5e-4))


def reachable(timings, rho, layers=None):
    """rho, or the smallest one at hand where the device has become too slow for it, and says so."""
    least = smallest_rho(timings, layers) * (1 + 1e-9)
    if rho < least:
        print('rho {:g} is out of reach as the device is now: training at {:.3f}'.format(
            rho, least))
    return max(rho, least)


class _Items(NamedTuple):
    """What can be chosen, L items: tensors one by one, or all of a layer together; deepest first.

    member: (N, L) float64, 1 where the tensor belongs to the item. cost: (L,) ms of own gradients
    and updates. t_dy: (L,) ms by which the error gradient goes on to each item.
    """
    member: np.ndarray
    cost: np.ndarray
    t_dy: np.ndarray


def _items(timings, layers):
    """_Items by the chain; layers: (N,) int, None for single tensors."""
    order = timings.order
    of = (np.arange(len(order)) if layers is None else np.asarray(layers))[order]  # deepest first
    _, first = np.unique(of, return_index=True)
    first = np.sort(first)  # where the deepest tensor of each item stands
    member = np.zeros((len(order), len(first)))
    member[order] = of[:, None] == of[first]
    return _Items(member, member.T @ (timings.t_dw + timings.t_up),
                  np.add.reduceat(timings.t_dy[order], first))


def choose_tensors(timings, importance, rho, layers=None):
    """((N,) bool, fallback): the tensors of most importance whose step takes at most rho of full.

    The solver works on the chain, an upper bound of the graph's cost; what it leaves of the budget
    is then spent tensor by tensor, priced on the graph, the most importance per ms first.
    layers: (N,) int, which layer a tensor is of, where those of a layer go together; else None.
    Never over budget. Raises InfeasibleBudget where rho is below smallest_rho.
    """
    budget = rho * timings.t_step - timings.fixed  # ms of backward pass and updates
    if budget <= 0:
        raise InfeasibleBudget(
            budget, smallest_rho(timings, layers) * timings.t_step - timings.fixed)
    items = _items(timings, layers)
    importance = np.asarray(importance) @ items.member
    chosen = select_tensors(items.cost, items.t_dy, importance, budget,
                            max(LEAST_BINS, BINS_PER_ITEM * len(importance)))
    mask = _spend_rest(timings, items, importance, chosen.mask, budget)
    return items.member @ mask > 0, chosen.fallback


def _spend_rest(timings, items, importance, mask, budget):
    """The (L,) mask with every item of positive importance added that still fits, best value first.
    """
    needs = (timings.group_matrix() @ items.member > 0).astype(np.float64)  # (G, L)
    t_up = timings.t_up @ items.member
    mask = mask.copy()
    tensors = items.member @ mask > 0
    left = budget - timings.backward_time(tensors) - timings.t_up[tensors].sum()
    while True:
        unpaid = timings.group_ms * (needs @ mask == 0)         # (G,) ms
        cost = unpaid @ needs + t_up                            # (L,) ms to add each item
        fits = ~mask & (importance > 0) & (cost <= left)
        if not fits.any():
            return mask
        value = np.where(fits, importance / np.maximum(cost, 1e-9), -np.inf)
        best = int(np.argmax(value))
        mask[best] = True
        left -= cost[best]


def smallest_rho(timings, layers=None):
    """The least rho at which some tensor can be trained (DESIGN equation; paper, section 4.3).

    layers: as in choose_tensors.
    """
    items = _items(timings, layers)
    alone = np.array([timings.step_time(member > 0) for member in items.member.T])
    by_chain = timings.fixed + np.cumsum(items.t_dy[::-1])[::-1] + items.cost
    return float(max(alone.min(), by_chain.min()) / timings.t_step)
