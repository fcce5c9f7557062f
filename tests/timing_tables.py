"""Timing tables of a few tensors: of groups made up, and of a network that was traced."""

import numpy as np
from traced_networks import branching, traced

from backward_graph import OpTimes, attribute
from measured_totals import Totals, build_table
from tensor_timings import chain_timings


def op_times(groups, num_tensors, update=None):
    if update is None:
        update = np.full(num_tensors, 0.25)
    return OpTimes(groups, update, 0.5, {}, 1.0, [])


def table_of(times):
    n = len(times.update)
    total = sum(times.groups.values())
    deepest = int(chain_timings(times.groups, n)[2][0])
    bit = 1 << deepest
    chain = sum(ms for mask, ms in times.groups.items() if mask & bit)
    return build_table(['layer/{}'.format(k) for k in range(n)], [(k + 1, 2) for k in range(n)],
                       times, Totals(2.0, total, 1.2, 0.3, chain, deepest), {'model': 'test'})


def table_of_branching():
    return table_of(attribute(traced(branching).graph, traced(branching).times, 8))


def random_masks(n, count, seed=0):
    masks = np.random.RandomState(seed).rand(count, n) < np.linspace(0.05, 0.9, count)[:, None]
    masks[np.arange(count), np.random.RandomState(seed + 1).randint(n, size=count)] = True
    return masks
