"""Selects the tensors of most importance within a time budget (paper, section 4.3).

`select_tensors` solves the paper's problem exactly. Training costs t_dw of every selected tensor,
its weight gradient, and t_dy of every tensor from the output to the deepest selected one, the path
of the error gradient. The second cost depends on the deepest tensor alone. So the problem is a
family of prefix 0/1 knapsacks on t_dw, and one sweep from the output to the input solves them all
in O(N * resolution). Arrays run from the input to the output: index 0 is the tensor nearest to the
input. `select_tensors_paper` is the paper's own recursion.

`choose_tensors` solves it for a timing table and rho. In a graph with branches the chain is an
upper bound, as it counts every branch above the deepest tensor. So its exact solution only starts a
greedy search. benchmarks/selector.py measures how near to the optimum the best set is.
"""

import warnings
from typing import NamedTuple

import numpy as np

from elastic.selection.items import items_of, rho_or_smallest, smallest_rho
from elastic.selection.search import POWERS, filled, trimmed, within_both

# Rounding up wastes at most 1 / BINS_PER_ITEM of the chain's budget before the greedy search.
BINS_PER_ITEM, LEAST_BINS = 20, 10_000
# With a memory limit, the chain is also solved where filling it costs this share of the time.
PRICES = (0.25, 1.0, 4.0)


class Selection(NamedTuple):
    """Holds a set of tensors to train.

    mask: (N,) bool, True for each selected tensor, in the order of the arguments.
    importance: sum over the selected tensors.
    time: ms of backward time: t_dw of each selected tensor, t_dy down to the deepest.
    fallback: True if no feasible tensor had positive importance, as select_tensors explains.
    """
    mask: np.ndarray
    importance: float
    time: float
    fallback: bool = False


class InfeasibleBudget(ValueError):
    """Says that no tensor fits in the budget; in `smallest_budget`, ms, one does."""

    def __init__(self, budget, smallest_budget):
        super().__init__(
            'no tensor fits in a budget of {:.6g} ms; the smallest feasible budget is {:.6g} ms'
            .format(budget, smallest_budget))
        self.smallest_budget = smallest_budget


def select_tensors(t_dw, t_dy, importance, budget, resolution=10_000, cache_ms=0.0):
    """Returns the Selection with the largest importance within the budget (paper, equation 4).

    Costs are rounded UP to whole bins, so that the result never exceeds the budget. It is at least
    as good as the optimum for a budget smaller by a share N / resolution. A tensor of importance
    <= 0 is never selected, unless no feasible tensor has a positive one. Rather than train nothing,
    the solver then warns, and shifts importances until the worst feasible tensor is just above
    zero, which selects the least harmful ones.

    t_dw: (N,) ms per step, weight gradient of each tensor.
    t_dy: (N,) ms per step, extra time to carry the error gradient back to each tensor.
    importance: (N,) predicted loss drop, any sign.
    budget: ms of backward time, > 0. resolution: number of bins, >= 1.
    cache_ms: (N,) ms per step, any sign, added once for the deepest selected tensor: the effect
    of a prefix cache. With it the budget may be negative.
    Raises InfeasibleBudget if no single tensor fits; ValueError for wrong shapes, negative or
    non-finite times, NaN importance, a budget or resolution that is not positive.
    """
    cache_ms = np.broadcast_to(np.asarray(cache_ms, dtype=np.float64), np.shape(t_dw))
    _require_finite('cache_ms', cache_ms)
    t_dw, t_dy, importance = _checked(t_dw, t_dy, importance, budget, resolution,
                                      signed=cache_ms.any())
    to_reach = _path(t_dy) + t_dw + cache_ms  # (N,) ms, tensor k alone
    feasible = to_reach <= budget
    if not feasible.any():
        raise InfeasibleBudget(budget, float(to_reach.min()))
    value, fallback = _values(importance, feasible)

    # Whole bins that a tensor costs if a deeper one is selected too, and as the deepest. One that
    # takes the whole budget fits, though division may round it up to one bin more.
    whole = max(budget - float(cache_ms[feasible].min()), 1e-300)
    item_bins = np.ceil(t_dw * resolution / whole)
    reach_bins = np.where(feasible, np.clip(np.ceil(
        (to_reach + (whole - budget)) * resolution / whole), 0, resolution), np.inf)
    mask = _prefix_knapsack(item_bins, reach_bins, value, resolution)
    value[np.argmax(mask)] = np.inf  # never trimmed: the deepest fits alone

    def ms_of(mask):
        return _chain_time(mask, t_dw, t_dy) + float(cache_ms[np.argmax(mask)])
    mask = trimmed(mask, value, ms_of, budget)
    return Selection(mask, float(importance[mask].sum()), ms_of(mask), fallback)


def _values(importance, feasible):
    """Returns the values that the solver maximises, (N,) float64, and Selection.fallback."""
    if (importance[feasible] > 0).any():
        return importance.copy(), False
    warnings.warn('no feasible tensor has positive importance: selecting the least bad ones')
    worst = importance[feasible].min()
    span = importance[feasible].max() - worst
    return importance - worst + (1e-3 * span or 1.0), True


def _prefix_knapsack(item_bins, reach_bins, value, resolution):
    """Returns the best (N,) bool mask; tries every tensor as the deepest selected one."""
    n = len(value)
    reach_bins = np.where(value > 0, reach_bins, np.inf)
    # The most bins that a deeper tensor leaves: `best` is never read beyond them.
    room = resolution - np.minimum.accumulate(np.append(np.inf, reach_bins[:-1]))
    best = np.zeros(resolution + 1)  # best[c]: most value in c bins, of the tensors seen so far
    taken = {}  # k -> packed bits: whether the best set for (k's own + i) bins has tensor k
    best_value, deepest = 0.0, None
    for k in range(n - 1, -1, -1):  # from the output to the input
        if not value[k] > 0:
            continue
        if reach_bins[k] <= resolution:
            total = best[resolution - int(reach_bins[k])] + value[k]
            if total > best_value:  # strict: of equal sets, the one nearer to the output is cheaper
                best_value, deepest = total, k
        if item_bins[k] <= room[k]:
            bins, size = int(item_bins[k]), int(room[k]) + 1
            with_k, without = best[:size - bins] + value[k], best[bins:size]
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
    """Returns the Selection of the paper's recursion (section 4.3): O(N^2 * resolution), inexact.

    P[k, t] is the best importance among the k tensors nearest to the output in t bins:
    P[k, t] = max(P[k-1, t], max over k_c of P[k_c, t - t_dw[k] - sum of t_dy from k_c to k] + I_k),
    where k_c is the last tensor selected before k. It keeps one solution for each P[k_c, t], so it
    cannot extend a k_c that this solution leaves out, and loses value. Times are rounded DOWN to
    whole bins as in the paper, so the result can exceed the budget.

    Arguments, result and errors as for select_tensors, but the mask can be empty.
    """
    t_dw, t_dy, importance = _checked(t_dw, t_dy, importance, budget, resolution)
    n, size = len(importance), resolution + 1
    scale = resolution / budget
    # From here on index 1 is nearest to the output; index 0 means that nothing is selected.
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
    return Selection(mask, float(importance[mask].sum()), _chain_time(mask, t_dw, t_dy))


def _path(t_dy):
    """Returns the (N,) ms to carry the error gradient to each tensor."""
    return np.cumsum(t_dy[::-1])[::-1]


def _chain_time(mask, t_dw, t_dy):
    return float(t_dw[mask].sum() + _path(t_dy)[np.argmax(mask)]) if mask.any() else 0.0


def _checked(t_dw, t_dy, importance, budget, resolution, signed=False):
    arrays = [np.asarray(a, dtype=np.float64) for a in (t_dw, t_dy, importance)]
    shapes = [a.shape for a in arrays]
    if arrays[0].ndim != 1 or len(set(shapes)) != 1 or arrays[0].size == 0:
        raise ValueError('t_dw, t_dy and importance must have one dimension and one length N >= 1; '
                         'got shapes {}, {}, {}'.format(*shapes))
    for name, array in zip(('t_dw', 't_dy', 'importance'), arrays):
        _require_finite(name, array)
        if name != 'importance' and (array < 0).any():
            raise ValueError('{} holds a negative time: {:.6g}'.format(name, array.min()))
    if not (np.isfinite(budget) and (signed or budget > 0)):
        raise ValueError('the budget must be a positive number of ms; got {}'.format(budget))
    if int(resolution) != resolution or resolution < 1:
        raise ValueError('resolution must be a whole number >= 1; got {}'.format(resolution))
    return arrays


def _require_finite(name, array):
    if not np.isfinite(array).all():
        raise ValueError('{} holds a value that is not finite'.format(name))


# ---------------------------------------------------------------- on the graph of a timing table


def choose_tensors(timings, importance, rho, layers=None, room=None):
    """Returns ((N,) bool mask, fallback): most importance in a step of at most rho of a full one.

    Costs are the graph's: each op that a chosen tensor needs counts once. The result is the best of
    the chain's exact solution, filled up, and the sets built from nothing by each of POWERS.
    layers: (N,) int, the layer of each tensor, to choose whole layers; else None.
    room: timing.memory.Room, what the step may hold; None: all that it needs.
    fallback: as in Selection. Raises InfeasibleBudget if rho is below smallest_rho, or no tensor
    that fits into the room can be trained in time.
    """
    _require_finite('importance', importance)
    items = items_of(timings, layers)
    limit = rho * timings.t_step if rho < 1 else np.inf  # no mask takes more than a full step
    budget = limit - timings.fixed  # ms of backward pass and updates

    def ms_of(mask):
        return timings.step_time(mask[items.of])

    numbers = np.arange(len(items.own))
    members = items.of == numbers[:, None]  # (L, N) bool
    if room is not None and room.fits(members.any(axis=0)):
        room = None  # even a full step fits
    fitting = np.array([room is None or room.fits(tensors) for tensors in members])
    cheapest = numbers == np.argmin(np.where(fitting, items.alone, np.inf))
    if ms_of(cheapest) > limit or not fitting.any():
        raise InfeasibleBudget(budget, ms_of(cheapest) - timings.fixed)
    feasible = cheapest | (items.alone <= budget) & fitting
    value, fallback = _values(np.bincount(items.of, importance), feasible)
    # With a cache, a deeper tensor can save more time than it costs.
    feasible = (feasible | (items.least_ms_beside_deeper <= budget) & fitting) & (value > 0)
    mask = np.zeros(len(value), dtype=bool)
    if room is None:
        mask[feasible] = _search(items.only(feasible), value[feasible], budget)
    else:
        mask[feasible] = _search_in(room, items, members, feasible, value, budget)
    mask = trimmed(mask, value, ms_of, limit)
    return (mask if mask.any() else cheapest)[items.of], fallback


def choose_cached_tensors(costs, importance, rho, layers=None, room=None):
    """Returns ((N,) bool, fallback, TensorTimings): a choice with a prefix cache, and its table.

    Chooses by each table of `costs`. The better choice gets its cheapest cut. The budget that this
    leaves buys further tensors, the most important first, each at the cut of the wider mask.
    costs: cache_offers.CacheOffers. importance, rho, layers, fallback, room: as in choose_tensors;
    if rho has become too small, the smallest rho takes its place.
    The table has the CacheCost of the chosen cut, whose `cut` is None if no cache pays.
    """
    least = [smallest_rho(table, layers) for table in costs.tables]
    rho = rho_or_smallest(costs.tables[int(np.argmin(least))], rho, layers)
    found = [choose_tensors(table, importance, rho, layers, room)
             for table, smallest in zip(costs.tables, least) if smallest <= rho]
    mask, fallback = max(found, key=lambda choice: (
        not choice[1], float(importance[choice[0]].sum())))
    table = costs.at_own_cut(mask)
    if fallback or rho >= 1:
        return mask, fallback, table
    of = items_of(table, layers).of
    worth = np.bincount(of, importance)
    for item in np.argsort(-worth)[:np.count_nonzero(worth > 0)]:
        wider, limit = mask | (of == item), rho * table.t_step
        # A wider mask's cut saves no more. Making one takes milliseconds, so rule out items first.
        at_least = table.plain_time(wider) + float(table.cache_ms[table.deepest(mask)])
        if wider.sum() > mask.sum() and at_least <= limit and (room is None or room.fits(wider)):
            at_wider = costs.at_own_cut(wider)
            if at_wider.step_time(wider) <= limit:
                mask, table = wider, at_wider
    return mask, fallback, table


def _search(items, value, budget):
    """Returns the (L,) bool mask of the best set found; each item has positive value and fits."""
    if items.own.sum() + items.group_ms.sum() + items.cache_ms[
            np.argmax(items.depth)] <= budget:
        return np.ones(len(value), dtype=bool)
    starts = [(on_chain(items, value, budget), POWERS[0])]
    starts += [(np.zeros(len(value), dtype=bool), power) for power in POWERS]
    return max((filled(items, value, mask, budget, power) for mask, power in starts),
               key=lambda mask: value[mask].sum())


def _search_in(room, items, members, feasible, value, budget):
    """Returns the mask of the best set found of the feasible items that fits in time and room.

    Memory only adds starts to _search, at several prices of a byte, and exchanges at the end: time
    and bytes of the graph are true at every step. members: (L, N) bool, the tensors of each item.
    """
    some = items.only(feasible)
    # At rho 1 only memory limits.
    budget = min(budget, float(some.own.sum() + some.group_ms.sum() + abs(some.cache_ms).max()))
    spare = budget - min(0.0, float(some.cache_ms.min()))
    chains = [on_chain(items.priced(room.memory, members, price * spare / room.nbytes).only(
        feasible), value[feasible], budget + price * spare) for price in (0.0,) + PRICES]
    return within_both(some, value[feasible], budget, chains, lambda mask: room.fits(
        members[feasible][mask].any(axis=0)))


def on_chain(items, value, budget):
    """Returns the (L,) bool mask of select_tensors for the items as a chain.

    The chain is as in table.chain_timings, without groups that no item of positive value needs.
    """
    order = np.argsort(-items.depth)  # from the input to the output
    nearest = len(order) - 1 - np.argmax(items.needs[:, order[::-1]], axis=1)  # pays the group
    t_dy = np.bincount(nearest, items.group_ms, len(order))
    mask = np.zeros(len(order), dtype=bool)
    try:
        mask[order] = select_tensors(items.own[order], t_dy, value[order], budget,
                                     max(LEAST_BINS, BINS_PER_ITEM * len(order)),
                                     items.cache_ms[order]).mask
    except InfeasibleBudget:  # no item fits at the upper bound
        pass
    return mask
