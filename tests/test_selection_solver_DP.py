import contextlib
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_tables import (
    all_masks,
    assert_leaves_nothing,
    branching_table,
    cached,
    chain_table,
    chain_time,
    each_kind,
    random_rho,
    table_of,
    tangled_table,
    within,
)
from elastic.selection.items import layers_of, out_of_reach, rho_or_smallest, smallest_rho
from selection_solver_DP import (
    InfeasibleBudget,
    choose_tensors,
    select_tensors,
    select_tensors_paper,
)

pytestmark = pytest.mark.filterwarnings('ignore:no feasible tensor')


def chain_bins(masks, t_dw, t_dy, budget, resolution):
    """Returns (M,) bins with the solver's rounding: the deepest with its path, others alone.

    A tensor that takes the whole budget takes all bins; rounding never adds one.
    """
    deepest = masks.argmax(axis=1)
    item = np.ceil(t_dw * resolution / budget)
    alone = np.cumsum(t_dy[::-1])[::-1] + t_dw
    reach = np.minimum(np.ceil(alone * resolution / budget), resolution)
    reach[alone > budget] = np.inf
    return masks @ item - item[deepest] + reach[deepest]


@st.composite
def instances(draw, positive=False):
    n = draw(st.integers(1, 12))
    times = st.floats(0, 10, allow_nan=False) | st.integers(0, 5).map(float)
    t_dw = np.array(draw(st.lists(times, min_size=n, max_size=n)))
    t_dy = np.array(draw(st.lists(times, min_size=n, max_size=n)))
    gain = st.floats(0.001, 5) if positive else st.floats(-1, 5)
    importance = np.array(draw(st.lists(gain, min_size=n, max_size=n)))
    total = t_dw.sum() + t_dy.sum()
    budget = draw(st.floats(0.02, 1.2)) * max(total, 0.1)
    return t_dw, t_dy, importance, budget, draw(st.sampled_from([20, 100, 1000]))


@settings(max_examples=600, deadline=None)
@given(instances())
def test_value_equals_brute_force(instance):
    t_dw, t_dy, importance, budget, resolution = instance
    masks = all_masks(len(t_dw))
    times = chain_time(masks, t_dw, t_dy)
    single = masks.sum(axis=1) == 1
    try:
        chosen = select_tensors(t_dw, t_dy, importance, budget, resolution)
    except InfeasibleBudget as error:
        assert times[single].min() > budget
        assert error.smallest_budget == pytest.approx(times[single].min())
        return
    assert chosen.mask.any()
    assert chosen.time <= budget
    assert chosen.time == pytest.approx(chain_time(chosen.mask[None], t_dw, t_dy)[0])
    assert chosen.importance == pytest.approx(importance[chosen.mask].sum())
    values = masks @ np.maximum(importance, -np.inf)
    rounded = values[chain_bins(masks, t_dw, t_dy, budget, resolution) <= resolution]
    if not chosen.fallback:
        assert chosen.importance == pytest.approx(rounded.max())
        shrunk = times <= budget * (1 - len(t_dw) / resolution)
        assert chosen.importance >= max(0, values[shrunk].max() if shrunk.any() else 0) - 1e-9
    else:
        assert not (importance[masks[single & (times <= budget)].any(axis=0)] > 0).any()


def test_the_deepest_tensor_pays_for_the_whole_path():
    t_dw, t_dy = np.ones(3), np.array([10.0, 1.0, 0.0])
    shallow = select_tensors(t_dw, t_dy, [9.0, 1.0, 1.0], budget=4.0)
    assert shallow.mask.tolist() == [False, True, True] and shallow.time == 3.0
    deep = select_tensors(t_dw, t_dy, [9.0, 1.0, 1.0], budget=12.0)
    assert deep.mask.tolist() == [True, False, False] and deep.time == 12.0


def test_no_positive_importance_still_trains_the_least_bad_and_says_so():
    with pytest.warns(UserWarning, match='least bad'):
        chosen = select_tensors([1.0] * 3, [0.0] * 3, [-3.0, -1.0, -2.0], budget=2.0)
    assert chosen.fallback and chosen.mask.tolist() == [False, True, True]
    assert chosen.importance == -3.0
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        zero = select_tensors([1.0] * 3, [0.0] * 3, [0.0] * 3, budget=2.0)
    assert zero.fallback and zero.mask.sum() == 2


def test_positive_importance_out_of_reach_falls_back_to_what_fits():
    chosen = select_tensors([1.0, 1.0], [50.0, 0.0], [5.0, -1.0], budget=2.0)
    assert chosen.fallback and chosen.mask.tolist() == [False, True]


def test_the_smallest_budget_that_an_error_names_is_enough():
    """Dividing by it would round some tensors that take the whole budget up by a bin too many."""
    rng = np.random.RandomState(0)
    for _ in range(1000):
        t_dw, t_dy, importance = rng.rand(3, rng.randint(1, 9))
        resolution = int(rng.choice([20, 100, 1000, 10_000]))
        with pytest.raises(InfeasibleBudget, match='no tensor fits .* the smallest') as caught:
            select_tensors(t_dw, t_dy, importance, 1e-9, resolution)
        least = caught.value.smallest_budget
        chosen = select_tensors(t_dw, t_dy, importance, least, resolution)
        assert chosen.mask.any() and chosen.time <= least
        with pytest.raises(InfeasibleBudget):
            select_tensors(t_dw, t_dy, importance, np.nextafter(least, 0), resolution)


def test_a_budget_filled_to_the_last_bin_is_not_exceeded_by_rounding_either():
    """Floating point cannot hold tenths of a ms: 0.1 + 0.2 > 0.3."""
    rng = np.random.RandomState(0)
    for _ in range(3000):
        tenths = rng.randint(1, 9, rng.randint(2, 6))
        bins = int(rng.randint(tenths.min(), tenths.sum() + 1))
        with contextlib.suppress(InfeasibleBudget):  # which rounding may cause as well
            chosen = select_tensors(tenths * 0.1, tenths * 0.0, tenths * 1.0, bins * 0.1, bins)
            assert chosen.mask.any() and chosen.time <= bins * 0.1


@pytest.mark.parametrize('change, message', [
    (dict(t_dw=[1.0]), 'shapes'), (dict(t_dy=[[1.0, 1.0]]), 'shapes'),
    (dict(t_dw=[], t_dy=[], importance=[]), 'shapes'),
    (dict(t_dw=[-1.0, 1.0]), 'negative'), (dict(t_dy=[1.0, np.nan]), 'finite'),
    (dict(importance=[np.nan, 1.0]), 'finite'), (dict(budget=0), 'budget'),
    (dict(budget=np.nan), 'budget'), (dict(budget=-1), 'budget'),
    (dict(resolution=0), 'resolution'),
])
@pytest.mark.parametrize('solver', [select_tensors, select_tensors_paper])
def test_bad_input_is_rejected(solver, change, message):
    arguments = dict(t_dw=[1.0, 1.0], t_dy=[1.0, 1.0], importance=[1.0, 1.0], budget=3.0)
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        solver(**arguments)


def test_paper_recursion_is_never_better_and_sometimes_worse():
    """Times are whole numbers, so that rounding plays no part."""
    rng = np.random.RandomState(0)
    worse = 0
    for _ in range(200):
        t_dw, t_dy = rng.randint(1, 8, (2, 8)).astype(float)
        importance = rng.rand(8)
        budget = float(rng.randint(12, 40))
        exact = select_tensors(t_dw, t_dy, importance, budget, int(budget))
        paper = select_tensors_paper(t_dw, t_dy, importance, budget, int(budget))
        assert paper.time <= budget and paper.importance <= exact.importance + 1e-9
        worse += paper.importance < exact.importance - 1e-9
    assert 0 < worse < 100


# ---------------------------------------------------------------- times of the graph


@each_kind
def test_choice_never_exceeds_rho_and_leaves_nothing_that_fits(draw):
    rng = np.random.RandomState(0)
    for _ in range(60):
        table = draw(rng)
        importance = rng.randn(len(table.names))
        rho = random_rho(rng, table)
        assert_leaves_nothing(table, importance, rho, *choose_tensors(table, importance, rho))


def test_tensors_of_a_layer_are_chosen_together_within_the_same_budget():
    rng = np.random.RandomState(0)
    for _ in range(60):
        table, importance = tangled_table(rng), rng.randn(20)
        layers = np.repeat(rng.permutation(8), 4)[:20] * 3  # not numbered consecutively
        rho = random_rho(rng, table, layers)
        mask, _ = choose_tensors(table, importance, rho, layers)
        assert within(table, mask, rho)
        for layer in set(layers):
            of_layer = layers == layer
            assert mask[of_layer].all() or not mask[of_layer].any()
            if not mask[of_layer].any() and importance[of_layer].sum() > 0:
                assert table.step_time(mask | of_layer) > rho * table.t_step - 1e-9


def gaps(draw, count, seed=0):
    """Yields the relative gap between each choice's importance and that of the best mask."""
    rng = np.random.RandomState(seed)
    for _ in range(count):
        table, importance = draw(rng, 10), rng.randn(10)
        rho = random_rho(rng, table)
        mask, fallback = choose_tensors(table, importance, rho)
        if not fallback:
            best = max(importance[other].sum() for other in all_masks(10)
                       if table.step_time(other) <= rho * table.t_step)
            yield 1 - importance[mask].sum() / best


@pytest.mark.parametrize('draw, mean, worst', [
    (chain_table, 0.001, 0.01), (branching_table, 0.002, 0.05), (tangled_table, 0.005, 0.1)])
def test_choice_is_near_the_best_of_all_masks(draw, mean, worst):
    found = list(gaps(draw, 40))
    assert len(found) >= 30 and min(found) > -1e-9
    assert np.mean(found) < mean and max(found) < worst


def test_a_path_worth_it_only_for_all_behind_it_together_is_found():
    """A greedy search would not start deep: the tensor nearest the output beats each deep one."""
    groups = {1 << k: 1.0 for k in range(4)}
    groups.update({1 << 4: 4.0, 0b1111: 8.0})
    table = table_of(groups, [0.0] * 5)
    mask, _ = choose_tensors(table, [1.0, 1.0, 1.0, 1.0, 2.0], (table.fixed + 12) / table.t_step)
    assert mask.tolist() == [True] * 4 + [False]


def test_a_tensor_that_only_the_graph_makes_affordable_is_trained():
    """Two branches share one head; the chain stacks one on the other."""
    groups = {0b0011: 4.0, 0b1100: 4.0, 0b1111: 1.0}
    table = table_of(groups, [0.1] * 4)
    rho = smallest_rho(table)
    assert rho * table.t_step == pytest.approx(table.fixed + 5.1)
    for best in range(4):
        mask, _ = choose_tensors(table, np.eye(4)[best] + 0.1, rho)
        assert np.flatnonzero(mask).tolist() == [best]


@each_kind
def test_rho_1_trains_every_tensor_of_positive_importance(draw):
    rng = np.random.RandomState(1)
    for _ in range(20):
        table = draw(rng)
        importance = rng.randn(len(table.names))
        mask, fallback = choose_tensors(table, importance, 1.0)
        assert mask.tolist() == (importance > 0).tolist() and not fallback
        assert choose_tensors(table, np.abs(importance), 1.0)[0].all()


@each_kind
@pytest.mark.parametrize('in_layers', [False, True])
@pytest.mark.parametrize('with_cache', [False, True])
def test_exactly_the_smallest_rho_trains_and_no_smaller_one_does(draw, in_layers, with_cache):
    rng = np.random.RandomState(2)
    for _ in range(50 if with_cache else 100):
        table = draw(rng)
        if with_cache:
            table = cached(rng, table, rng.choice([0.25, 0.5]), uneven=False)
        layers = rng.randint(0, 5, len(table.names)) if in_layers else None
        least = smallest_rho(table, layers)
        assert least <= smallest_rho(table._replace(cache=None), layers)
        mask, _ = choose_tensors(table, rng.rand(len(table.names)), least, layers)
        assert within(table, mask, least)
        assert out_of_reach(table, least, layers) is None
        if not in_layers:
            times = [table.step_time(other) for other in np.eye(len(table.names), dtype=bool)]
            assert least * table.t_step == pytest.approx(min(times))
        below = np.nextafter(least, 0) * (1 - 1e-15)
        with pytest.raises(InfeasibleBudget) as caught:
            choose_tensors(table, rng.rand(len(table.names)), below, layers)
        assert caught.value.smallest_budget == pytest.approx(
            least * table.t_step - table.fixed)
        reason = out_of_reach(table, below, layers)
        assert '{:.3f}'.format(least + 5e-4) in reason
        assert ('prefix cache' in reason) == with_cache


def test_a_rho_below_the_forward_pass_is_infeasible_and_reachable_says_what_is_taken(capsys):
    table = chain_table(np.random.RandomState(3))
    least = smallest_rho(table)
    with pytest.raises(InfeasibleBudget):
        choose_tensors(table, np.ones(10), 0.5 * table.fixed / table.t_step)
    assert rho_or_smallest(table, 0.01) == least and '%.3f' % least in capsys.readouterr().out
    assert choose_tensors(table, np.ones(10), rho_or_smallest(table, 0.01))[0].any()
    assert rho_or_smallest(table, 0.99) == 0.99 and not capsys.readouterr().out.count('0.990')


def test_no_positive_importance_on_the_graph_trains_the_least_bad_and_says_so():
    table = tangled_table(np.random.RandomState(4))
    importance = -np.random.RandomState(4).rand(20) - 0.1
    with pytest.warns(UserWarning, match='least bad'):
        mask, fallback = choose_tensors(table, importance, 0.7)
    assert fallback and within(table, mask, 0.7) and mask.sum() > 1


def test_an_importance_that_is_not_finite_is_refused():
    table = chain_table(np.random.RandomState(5))
    with pytest.raises(ValueError, match='importance.*not finite'):
        choose_tensors(table, np.where(np.arange(10) == 3, np.nan, 1.0), 0.7)


def test_layers_are_those_of_the_network():
    from elastic.compat import keras_stack
    from models import build_model
    model = build_model('mobilenetv2', (32, 32, 3), 10, 'none', alpha=0.35, bn_statistics='train')
    layers, names = layers_of(model), [keras_stack.variable_name(v).split('/')[0]
                                       for v in model.trainable_variables]
    assert [name == names[layer] for name, layer in zip(names, layers)] == [True] * len(names)
    assert len(set(layers)) == len(set(names)) < len(names)
