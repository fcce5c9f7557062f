"""Draws instances for selector.py, and compares selections at the graph's cost with the best."""

import contextlib
import itertools
import os
import sys
import time

import _path  # noqa: F401
import numpy as np
from tqdm import tqdm

from elastic.selection.items import items_of, smallest_rho
from elastic.timing.table import Profile, TensorTimings, chain_timings
from selection_solver_DP import POWERS, choose_tensors, filled, on_chain

GRAPH_RHO = (0.4, 0.5, 0.6, 0.7, 0.8)
SMALL, SMALL_TENSORS = 200, 12  # drawn networks, small enough to try all sets of tensors
HIGHS_SECONDS = 20


def draw_instance(tensors, seed):
    """Returns (t_dw, t_dy, importance), each (tensors,) float64, the first two in ms."""
    random = np.random.default_rng([seed, tensors])
    is_kernel = np.arange(tensors) % 3 == 0
    typical_ms = np.where(is_kernel, 1.0, 0.06)
    t_dw = typical_ms * random.lognormal(0, 0.8, tensors)
    t_dy = typical_ms * random.lognormal(0, 0.8, tensors)
    importance = 1e-4 * random.lognormal(0, 1.5, tensors)
    importance[random.random(tensors) < 1 / 8] *= -1
    return t_dw, t_dy, importance


def timed(function, *arguments):
    """Returns (result, ms) of a call."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, 1e3 * (time.perf_counter() - start)


def draw_table(tensors, random, per_layer=3, tangled=False):
    """Returns the TensorTimings of a drawn network; each layer reads one or two of the last three.

    An op of the error gradient serves all layers that the gradient reaches through it. tangled:
    random sets of two to five tensors instead, which no network has.
    """
    layers = -(-tensors // per_layer)
    behind = np.eye(layers, dtype=bool)  # [i, j]: the error gradient of j comes through i
    for i in range(1, layers):
        for j in random.integers(max(0, i - 3), i, random.integers(1, 3)):
            behind[i] |= behind[j]
    shared = np.repeat(np.repeat(behind, per_layer, 0), per_layer, 1)[:tensors, :tensors]
    shared &= ~np.triu(np.ones_like(shared), 1)  # kernel, gamma and beta follow one another
    if tangled:
        shared = [np.isin(np.arange(tensors), random.integers(0, tensors, random.integers(2, 6)))
                  for _ in range(3 * tensors)]
    groups = {}
    for needs in np.vstack([np.eye(tensors, dtype=bool), shared]):
        groups[tuple(needs)] = groups.get(tuple(needs), 0) + random.lognormal(0, 0.8)
    group_tensors, group_ms = np.array(list(groups)), np.array(list(groups.values()))
    t_dw, t_dy, depth = chain_timings(group_tensors, group_ms)
    t_bp, t_up = sum(group_ms), 0.05 * random.random(tensors)
    return TensorTimings(
        ['t%d' % k for k in range(tensors)], [(1,)] * tensors, t_dw, t_dy, t_up, t_bp / 2, t_bp,
        t_up.sum(), depth, group_tensors, group_ms, {}, Profile(np.zeros(tensors, bool)))


def selection_time(tensors, seed, repeats=15):
    """Returns a row with the ms of smallest_rho and choose_tensors at the slowest of GRAPH_RHO."""
    table = draw_table(tensors, np.random.default_rng([seed, tensors]))
    importance = draw_instance(tensors, seed)[2]
    least_ms, choose_ms = [], []
    for rho in GRAPH_RHO:
        samples = [(timed(smallest_rho, table)[1], timed(choose_tensors, table, importance, rho)[1])
                   for _ in range(repeats + 1)][1:]
        ms = np.median(samples, axis=0)
        least_ms.append(float(ms[0]))
        choose_ms.append(float(ms[1]))
    return dict(tensors=tensors, groups=len(table.group_ms), smallest_rho_ms=max(least_ms),
                choose_ms=max(choose_ms), together_ms=max(least_ms) + max(choose_ms))


def gaps(table, importance, rho, optimum):
    """Returns way -> missed share of the optimum's importance; None if no tensor is useful.

    optimum: function of Items, value, budget -> the most importance, or an upper bound.
    """
    items, budget = items_of(table), rho * table.t_step - table.fixed
    useful = (items.alone <= budget) & (importance > 0)
    if not useful.any():
        return None
    items, value = items.only(useful), importance[useful] / importance[useful].sum()
    chain, none = on_chain(items, value, budget), np.zeros(len(value), dtype=bool)
    masks = {'chain': [chain], 'chain, filled': [filled(items, value, chain, budget)],
             'from nothing': [filled(items, value, none, budget, power) for power in POWERS],
             'chosen': [choose_tensors(table, importance, rho)[0][useful]]}
    best = optimum(items, value, budget)
    return {way: 1 - max(value[mask].sum() for mask in found) / best
            for way, found in masks.items()}


def by_trying_all(items, value, budget):
    """Returns the most value of any set."""
    masks = np.array(list(itertools.product([0.0, 1.0], repeat=len(value))))
    cost = masks @ items.own + (masks @ items.needs.T > 0) @ items.group_ms
    return (masks @ value)[cost <= budget].max()


def by_highs(items, value, budget):
    """Returns an upper bound of the value of any set: the optimum if HiGHS finds it in time."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix, vstack
    groups, tensors = np.nonzero(items.needs)
    pairs, columns = np.arange(len(groups)), len(value) + len(items.group_ms)
    paid = csr_matrix((np.ones(len(pairs)), (pairs, tensors)), (len(pairs), columns))
    paid -= csr_matrix((np.ones(len(pairs)), (pairs, len(value) + groups)), paid.shape)
    cost = csr_matrix(np.append(items.own, items.group_ms))
    with _no_output():
        solution = milp(
            -np.append(value, np.zeros(len(items.group_ms))), bounds=Bounds(0, 1),
            integrality=np.arange(columns) < len(value), options={'time_limit': HIGHS_SECONDS},
            constraints=LinearConstraint(vstack([paid, cost]), -np.inf,
                                         np.append(np.zeros(len(pairs)), budget)))
    return -solution.mip_dual_bound


@contextlib.contextmanager
def _no_output():
    """Hides standard output: HiGHS prints names of its functions, whatever its options."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, 'w') as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def gap_row(name, found):
    """Returns the row with the mean and worst of each way over the dicts of gaps()."""
    found = [gap for gap in found if gap]
    return dict(name=name, instances=len(found), **{
        way: {'mean': float(np.mean([gap[way] for gap in found])),
              'worst': float(max(gap[way] for gap in found))} for way in found[0]})


def small_gaps(tangled, seed, count=SMALL, tensors=SMALL_TENSORS):
    """Returns the gap_row of `count` drawn networks with `tensors` tensors each."""
    random, found = np.random.default_rng(seed), []
    for _ in tqdm(range(count), desc='small', leave=False, disable=None):
        table = draw_table(tensors, random, 1, tangled)
        importance = draw_instance(tensors, int(random.integers(1 << 30)))[2]
        rho = random.uniform(smallest_rho(table), 1)
        found.append(gaps(table, importance, rho, by_trying_all))
    return gap_row('{} of {}'.format('tangled' if tangled else 'branching', tensors), found)
