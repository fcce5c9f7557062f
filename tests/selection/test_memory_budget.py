"""Tests the selection within two budgets, time and memory."""

import itertools

import numpy as np
import pytest

from drawn_tables import table_of
from elastic.timing.memory import Memory, Room
from selection_solver_DP import InfeasibleBudget, choose_tensors


def instance(seed):
    """Returns (timing table, Memory, importance): a chain with a few branches, random costs."""
    rng = np.random.RandomState(seed)
    n = rng.randint(2, 9)
    groups = {1 << k: rng.exponential() for k in range(n)}
    groups.update(((1 << k) - 1, rng.exponential()) for k in range(2, n + 1))
    groups.update((bits, rng.exponential()) for bits in rng.randint(1, 1 << n, 3).tolist())
    table, size = table_of(groups, 0.1 * rng.rand(n), fixed=3.5), 60
    all_sets = np.vstack([table.group_tensors, np.ones((1, n), bool)])
    of, begin = rng.randint(len(all_sets), size=size), rng.randint(0, 30, size)
    end = begin + rng.randint(1, 20, size)
    fixed = rng.exponential(size=size) * 1e6
    kept = np.bincount(of, fixed * ((begin <= 15) & (end > 15)), len(all_sets))
    memory = Memory(all_sets, of, begin, end, fixed, np.zeros(size), kept, 4, 0)
    return table, memory, rng.randn(n) + 0.5


def feasible_masks(table, rho, room, layers=None):
    n = len(table.names)
    layers = np.arange(n) if layers is None else layers
    of = np.unique(layers, return_inverse=True)[1]
    for chosen in itertools.product([False, True], repeat=of.max() + 1):
        mask = np.array(chosen)[of]
        if mask.any() and table.step_time(mask) <= rho * table.t_step and room.fits(mask):
            yield mask


@pytest.mark.parametrize('by_layer', [False, True])
def test_the_choice_is_the_brute_force_optimum_of_both_budgets(by_layer):
    found = 0
    for seed in range(60):
        table, memory, importance = instance(seed)
        n, rng = len(importance), np.random.RandomState(1000 + seed)
        layers = np.arange(n) // 2 if by_layer else None
        rho, least = rng.uniform(0.4, 0.95), min(memory.peak(np.eye(n, dtype=bool)[k])
                                                 for k in range(n))
        room = Room(memory, rng.uniform(least, memory.peak(np.ones(n, bool))))
        masks = list(feasible_masks(table, rho, room, layers))
        if not masks:
            with pytest.raises(InfeasibleBudget):
                choose_tensors(table, importance, rho, layers, room)
            continue
        mask, fallback = choose_tensors(table, importance, rho, layers, room)
        assert table.step_time(mask) <= rho * table.t_step * (1 + 1e-12), seed
        assert room.fits(mask), seed
        if not fallback:
            best = max(importance[each].sum() for each in masks)
            assert importance[mask].sum() == pytest.approx(best), seed
            found += 1
    assert found > 20


def test_room_for_a_full_step_changes_nothing():
    for seed in range(20):
        table, memory, importance = instance(seed)
        room = Room(memory, memory.peak(np.ones(len(importance), bool)))
        try:
            expected = choose_tensors(table, importance, 0.7)
        except InfeasibleBudget:
            continue
        mask, fallback = choose_tensors(table, importance, 0.7, room=room)
        assert mask.tolist() == expected[0].tolist() and fallback == expected[1]
