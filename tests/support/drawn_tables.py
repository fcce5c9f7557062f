"""Draws random timing tables, and lists all masks of a few tensors."""

import itertools

import numpy as np
import pytest

from elastic.selection.items import smallest_rho
from elastic.steps.step_graph import tensor_sets
from elastic.timing.table import CacheCost, Profile, TensorTimings, chain_timings


def all_masks(n):
    masks = np.array(list(itertools.product([False, True], repeat=n)))
    return masks[1:]  # the first is empty


def chain_time(masks, t_dw, t_dy):
    """Returns (M,) ms of masks on a chain: each tensor's t_dw, and t_dy down to the deepest."""
    deepest = masks.argmax(axis=1)
    return masks @ t_dw + np.cumsum(t_dy[::-1])[::-1][deepest]


def table_of(groups, t_up, fixed=5.5):
    """Returns TensorTimings. groups: {bit mask of the tensors that need some ops: ms of these}."""
    n = len(t_up)
    tensors, ms = tensor_sets(sorted(groups), n), np.array([groups[key] for key in sorted(groups)])
    t_dw, t_dy, depth = chain_timings(tensors, ms)
    return TensorTimings(
        ['t%d' % k for k in range(n)], [(1,)] * n, t_dw, t_dy, np.asarray(t_up), fixed - 0.5,
        sum(groups.values()), sum(t_up) + 0.5, depth, tensors, ms, {}, Profile(np.zeros(n, bool)))


def tangled_table(rng, n=20):
    """Draws random groups of ops, with as many branches as possible."""
    groups = {1 << k: rng.rand() for k in range(n)}
    for _ in range(3 * n):
        mask = sum(1 << int(k) for k in set(rng.randint(0, n, rng.randint(2, 6))))
        groups[mask] = groups.get(mask, 0) + rng.rand()
    return table_of(groups, rng.rand(n) * 0.1)


def branching_table(rng, n=10):
    """Draws a network in which one or two later layers read each layer and share its ops."""
    behind = [1 << k for k in range(n)]
    for k in range(1, n):
        for other in set(rng.randint(max(0, k - 3), k, rng.randint(1, 3))):
            behind[k] |= behind[other]
    groups = {1 << k: rng.rand() for k in range(n)}
    for mask in behind:
        groups[mask] = groups.get(mask, 0) + rng.rand()
    return table_of(groups, rng.rand(n) * 0.1)


def chain_table(rng, n=10):
    """Draws a chain, where each op of the error gradient serves all deeper tensors."""
    groups = {1 << k: rng.rand() for k in range(n)}
    groups.update({(2 << k) - 1: rng.rand() for k in range(1, n)})
    return table_of(groups, rng.rand(n) * 0.1)


def cached(rng, table, fill_share=None, uneven=True):
    """Returns the table with a CacheCost that skips more the nearer the mask is to the output.

    Some cuts are impossible; if `uneven`, some are expensive.
    """
    n = len(table.names)
    t_prefix = np.sort(rng.uniform(0, 0.95 * table.t_fp, n))[n - 1 - table.depth]
    read = rng.uniform(0, (0.7 if uneven else 0.05) * table.t_fp, n)
    write = rng.uniform(0, 0.5 * table.t_fp, n)
    read[rng.rand(n) < 0.3] = np.inf
    write[np.isinf(read)] = np.inf
    share = rng.choice([0.0, 0.25, 0.5, 1.0]) if fill_share is None else fill_share
    return table._replace(t_prefix=t_prefix, cut_bytes=np.where(np.isinf(read), np.inf, 100.0),
                          t_loop=rng.rand(), cache=CacheCost(
                              np.full(n, share), t_prefix / table.t_fp, read, write))


each_kind = pytest.mark.parametrize('draw', [tangled_table, branching_table, chain_table])


def random_rho(rng, table, layers=None):
    return rng.uniform(smallest_rho(table, layers), 1)


def within(table, mask, rho):
    """Returns whether the mask trains anything and stays within rho."""
    return mask.any() and table.step_time(mask) <= rho * table.t_step


def assert_leaves_nothing(table, importance, rho, mask, fallback):
    """Asserts that a choice stays within rho, and that no other useful tensor would."""
    assert within(table, mask, rho) and (fallback or (importance[mask] > 0).all())
    for k in np.flatnonzero(~mask & (importance > 0)):
        with_k = mask | (np.arange(len(mask)) == k)
        assert table.step_time(with_k) > rho * table.t_step - 1e-9
