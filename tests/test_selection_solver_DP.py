import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selection_solver_DP import InfeasibleBudget, select_tensors, select_tensors_paper

pytestmark = pytest.mark.filterwarnings('ignore:no feasible tensor')


def all_masks(n):
    masks = np.array(list(itertools.product([False, True], repeat=n)))
    return masks[1:]  # the first is empty


def chain_time(masks, t_dw, t_dy):
    """(M,) ms: t_dw of the selected plus t_dy from the deepest selected to the output."""
    deepest = masks.argmax(axis=1)
    return masks @ t_dw + np.cumsum(t_dy[::-1])[::-1][deepest]


def chain_bins(masks, t_dw, t_dy, budget, resolution):
    """(M,) bins with the solver's rounding: the deepest tensor with its path, others alone."""
    deepest = masks.argmax(axis=1)
    item = np.ceil(t_dw * resolution / budget)
    reach = np.ceil((np.cumsum(t_dy[::-1])[::-1] + t_dw) * resolution / budget)
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
    assert chosen.time <= budget * (1 + 1e-12)
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


@settings(max_examples=200, deadline=None)
@given(instances(positive=True))
def test_order_of_tensors_is_preserved(instance):
    """Tensors of equal importance: taking the reversed problem apart must not move the mask."""
    t_dw, t_dy, importance, budget, _ = instance
    t_dy = t_dy * 0  # without the chain the problem has no direction
    try:
        forward = select_tensors(t_dw, t_dy, importance, budget)
    except InfeasibleBudget:
        return
    backward = select_tensors(t_dw[::-1], t_dy, importance[::-1], budget)
    assert forward.importance == pytest.approx(backward.importance)
    assert importance[forward.mask].sum() == pytest.approx(importance[::-1][backward.mask].sum())


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


def test_nothing_fits_names_the_smallest_budget():
    with pytest.raises(InfeasibleBudget, match='3 ms') as caught:
        select_tensors([5.0, 2.0], [1.0, 1.0], [1.0, 1.0], budget=0.5)
    assert caught.value.smallest_budget == 3.0


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
    """Whole-numbered times, so that rounding plays no part."""
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


def test_paper_recursion_finds_the_optimum_of_a_simple_chain():
    chosen = select_tensors_paper([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [3.0, 1.0, 2.0], 5.0, 5)
    assert chosen.mask.tolist() == [True, False, True] or chosen.importance == 5.0
