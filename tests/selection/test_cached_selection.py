"""Tests selection at the cost of a prefix cache: exact on the chain, within rho on the graph."""

import numpy as np
import pytest

from drawn_tables import (
    all_masks,
    assert_leaves_nothing,
    cached,
    chain_table,
    chain_time,
    each_kind,
    random_rho,
    tangled_table,
    within,
)
from elastic.selection.items import smallest_rho
from elastic.timing.table import CacheCost
from selection_solver_DP import InfeasibleBudget, choose_tensors, select_tensors
from timing_tables import random_masks

pytestmark = pytest.mark.filterwarnings('ignore:no feasible tensor')


# ---------------------------------------------------------------- the exact solver

def instance(rng, whole_numbers):
    """Draws (t_dw, t_dy, importance, cache_ms, budget); cache_ms may be negative."""
    n = rng.randint(1, 10)
    draw = (lambda: rng.randint(0, 6, n).astype(float)) if whole_numbers else (
        lambda: 5 * rng.rand(n))
    t_dw, t_dy, cache_ms = draw(), draw(), draw() * rng.choice([-4, -1, 0, 1], n)
    alone = np.cumsum(t_dy[::-1])[::-1] + t_dw + cache_ms
    budget = rng.uniform(alone.min(), max(alone.max(), t_dw.sum() + t_dy.sum()) + 1)
    return t_dw, t_dy, rng.randn(n), cache_ms, np.floor(budget) if whole_numbers else budget


def times_of(masks, t_dw, t_dy, cache_ms):
    return chain_time(masks, t_dw, t_dy) + cache_ms[masks.argmax(axis=1)]


def test_a_cost_at_the_deepest_tensor_gives_the_brute_force_optimum():
    """Times are whole numbers of bins, so that nothing is rounded."""
    rng, negative, deeper = np.random.RandomState(0), 0, 0
    for _ in range(800):
        t_dw, t_dy, importance, cache_ms, budget = instance(rng, True)
        masks = all_masks(len(t_dw))
        times = times_of(masks, t_dw, t_dy, cache_ms)
        single = masks.sum(axis=1) == 1
        feasible = masks[single & (times <= budget)].any(axis=0)
        whole = budget - cache_ms[feasible].min() if feasible.any() else 1
        try:
            chosen = select_tensors(t_dw, t_dy, importance, budget, max(1, int(whole)), cache_ms)
        except InfeasibleBudget as error:
            assert not feasible.any() and error.smallest_budget == times[single].min()
            continue
        assert chosen.mask.any() and chosen.time <= budget
        assert chosen.time == times_of(chosen.mask[None], t_dw, t_dy, cache_ms)[0]
        if chosen.fallback:
            assert not (importance[feasible] > 0).any()
            continue
        # No tensor of importance <= 0 is selected, even where it would pay as the deepest one.
        fit = (times <= budget) & (masks @ (importance <= 0) == 0)
        assert chosen.importance == pytest.approx((masks @ importance)[fit].max())
        negative += budget < 0
        deeper += bool((chosen.mask & ~feasible).any())
    assert negative > 20 and deeper > 5  # `deeper`: some tensor fits only with a deeper one


def test_rounding_never_exceeds_the_budget_and_costs_little():
    rng = np.random.RandomState(1)
    for _ in range(400):
        t_dw, t_dy, importance, cache_ms, budget = instance(rng, False)
        masks = all_masks(len(t_dw))
        times = times_of(masks, t_dw, t_dy, cache_ms)
        try:
            chosen = select_tensors(t_dw, t_dy, importance, budget, 1000, cache_ms)
        except InfeasibleBudget:
            continue
        assert chosen.mask.any() and chosen.time <= budget
        if not chosen.fallback:
            slack = (len(t_dw) + 1) / 1000 * (budget - cache_ms.min())
            fit = (times <= budget - slack) & (masks @ (importance <= 0) == 0)
            assert chosen.importance >= max((masks @ importance)[fit], default=0) - 1e-9


@pytest.mark.parametrize('cache_ms', [[np.nan, 0.0], [0.0, np.inf], [-np.inf, 0.0]])
def test_a_cost_that_is_not_finite_is_refused(cache_ms):
    with pytest.raises(ValueError, match='cache_ms.*not finite'):
        select_tensors([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], 3.0, cache_ms=cache_ms)


# ---------------------------------------------------------------- the cost of a cache

@each_kind
def test_a_step_costs_the_mean_of_filling_and_reading_steps(draw):
    rng, seen = np.random.RandomState(0), 0
    for seed in range(20):
        table = cached(rng, draw(rng))
        for mask in random_masks(len(table.names), 20, seed):
            plain = table._replace(cache=None).step_time(mask)
            if table.is_cached(mask):
                share = table.fill_share(mask)
                assert table.step_time(mask) == pytest.approx(
                    share * table.filling_time(mask) + (1 - share) * table.reading_time(mask))
                assert table.step_time(mask) < plain < table.filling_time(mask)
                assert table.reading_time(mask) < plain
                seen += 1
            else:
                assert table.step_time(mask) == table.filling_time(mask) == pytest.approx(plain)
    assert seen > 30


def test_a_cache_that_does_not_pay_or_cannot_be_costs_nothing():
    rng = np.random.RandomState(1)
    table = cached(rng, chain_table(rng))
    there = np.isfinite(table.cache.read_ms)
    gain = np.where(there, table.t_prefix + table.t_loop - table.cache.read_ms, -np.inf)
    for share in (0.0, 0.3, 0.9):
        more = table._replace(cache=table.cache._replace(
            fill_share=np.full(len(gain), share))).cache_ms
        whole = share * table.cache.write_ms[there] - (1 - share) * gain[there]
        np.testing.assert_allclose(more[there], np.minimum(whole, 0))
        assert (more[~there] == 0).all() and (share or (more < 0).any())
    all_fill = table.cache._replace(fill_share=np.ones(len(gain)))
    for cache in (None, all_fill):
        assert (table._replace(cache=cache).cache_ms == 0).all()


@each_kind
def test_a_choice_never_exceeds_rho_and_leaves_nothing_that_fits(draw):
    rng, cached_ones, below = np.random.RandomState(3), 0, 0
    for i in range(60):
        table = cached(rng, draw(rng))
        importance, rho = rng.randn(len(table.names)), random_rho(rng, table)
        rho = (smallest_rho(table) + rho) / 2 if i % 2 else rho
        mask, fallback = choose_tensors(table, importance, rho)
        assert_leaves_nothing(table, importance, rho, mask, fallback)
        cached_ones += table.is_cached(mask)
        below += rho * table.t_step < table.fixed
    assert cached_ones > 10 and (below or draw is tangled_table)  # its tensors need many ops


@each_kind
def test_an_ideal_cache_costs_no_more_than_any_cache(draw):
    rng = np.random.RandomState(7)
    for _ in range(30):
        table, epochs = cached(rng, draw(rng)), rng.randint(1, 9)
        table = table._replace(cache=table.cache._replace(
            fill_share=np.full(len(table.names), 1 / epochs)))
        best = table.cached_at_best(epochs)
        assert (best.cache_ms <= table.cache_ms).all()
        assert smallest_rho(best) <= smallest_rho(table)
        assert (best.cache_ms[np.isinf(table.cut_bytes)] == 0).all()


def test_a_tensor_that_fits_only_with_a_deeper_one_is_chosen_with_it():
    """The network can be cut only far from the output; that cut pays for both."""
    table = chain_table(np.random.RandomState(6))
    n, first = len(table.names), int(np.argmax(table.depth))
    read, write = np.full(n, np.inf), np.full(n, np.inf)
    read[first] = write[first] = 0.0
    table = table._replace(t_fp=100.0, t_prefix=np.full(n, 90.0), cut_bytes=read,
                           cache=CacheCost(
                               np.full(n, 0.25), np.full(n, 0.9), read, write))
    rho = 0.6
    assert rho * table.t_step < table.fixed
    mask, fallback = choose_tensors(table, np.ones(n), rho)
    assert mask.all() and not fallback and within(table, mask, rho)
