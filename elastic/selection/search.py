"""Searches sets of items greedily, within one budget or two. Needs NumPy alone."""

import itertools

import numpy as np

from elastic.timing.table import time_of_groups

# The greedy searches add the largest importance / ms ** power; power 0 ignores the cost.
POWERS = (1.0, 0.5, 0.0)
# Divided by the number of items: how many of the most valuable are starts, and how many of the
# least valuable chosen ones are left out on trial. Small networks try all of them.
TRIALS = 300


def trimmed(mask, value, ms_of, budget):
    """Returns the mask without its least valuable items that rounding puts over the budget."""
    mask = mask.copy()
    while mask.any() and ms_of(mask) > budget:
        mask[np.argmin(np.where(mask, value, np.inf))] = False
    return mask


def filled(items, value, mask, budget, power=1.0, fits=None):
    """Returns the (L,) mask with items added, largest value / cost ** power first, while one fits.

    An item costs its ops that no chosen item needs, and the change of cache_ms.
    fits: (mask) -> bool, a further limit, which a larger mask never meets again; or None.
    """
    mask, value = mask.copy(), np.where(mask, 0, value)
    paid = items.needs[:, mask].any(axis=1)
    # (L,) ms to add each item
    cost = items.own + time_of_groups(items.group_ms * ~paid, items.needs)
    deepest = list(zip(items.depth, items.cache_ms))
    depth, cache_ms = max(itertools.compress(deepest, mask), default=(-1, 0.0))
    left = budget - items.own[mask].sum() - items.group_ms[paid].sum() - cache_ms
    needed_by = np.ascontiguousarray(items.needs.T)  # (L, G)
    while True:
        whole = cost + np.where(items.depth > depth, items.cache_ms - cache_ms, 0.0)
        rate = value / np.maximum(whole, 1e-9) ** power
        rate[whole > left] = 0
        best = int(np.argmax(rate))
        if not rate[best] > 0:
            return mask
        mask[best], value[best] = True, 0
        if fits is not None and not fits(mask):
            mask[best] = False
            continue
        left -= whole[best]
        depth, cache_ms = max((depth, cache_ms), deepest[best])
        new = np.flatnonzero(needed_by[best] & ~paid)
        paid[new] = True
        cost -= time_of_groups(items.group_ms[new], items.needs[new])


def within_both(items, value, budget, chains, fits):
    """Returns the (L,) bool mask of the best set found within the budget, in ms, that also fits.

    chains: masks to start from, beside nothing and single items. fits: as in filled.
    """
    def best_of(found):
        return max(found, key=lambda mask: value[mask].sum())
    numbers, tried = np.arange(len(value)), max(2, TRIALS // len(value))
    first = [numbers < 0] + [numbers == item for item in np.argsort(-value)[:tried]]
    starts = [(start, power) for start in first if not start.any() or items.time(start) <= budget
              for power in POWERS]
    starts += [(trimmed(chain, value, lambda mask: (
        items.time(mask) if fits(mask) else np.inf), budget), POWERS[0]) for chain in chains]
    mask = best_of([filled(items, value, start, budget, power, fits) for start, power in starts])
    for item in np.argsort(np.where(mask, value, np.inf))[:min(tried, mask.sum())]:
        others, left = np.where(numbers == item, 0, value), mask & (numbers != item)
        mask = best_of([mask] + [filled(items, others, left, budget, power, fits)
                                 for power in POWERS])
    return mask
