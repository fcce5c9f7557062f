"""Tests the cost of the prefix cache: of its present activations, and of each mask's own cut.

Timing tables are fixed and slow, so that no choice depends on this machine.
"""

import numpy as np
import pytest

import train
from cached_runs import (
    HEAD,
    HEAD_ALONE,
    IMAGES,
    MIDDLE,
    Watched,
    branches,
    digits,
    kinds,
    maker_of,
    mask_from,
    network,
    ran,
    same_run,
    slow_table,
    watched,
)
from elastic.cache import stores
from elastic.cache.prefix_cache import fill_share
from elastic.compat import keras_stack
from elastic.planning import deadline
from elastic.planning.cache_offers import Budget, CacheOffers
from elastic.runs.recorder import Recorder
from elastic.runs.session import Session
from elastic.schemes.scheme import Choice
from elastic.selection.items import layers_of
from elastic.settings import Settings
from elastic.steps.epoch import FILL, PLAIN, READ, EpochResult
from fixed_tables import COPY_MS
from selection_solver_DP import choose_cached_tensors, choose_tensors
from timing_tables import random_masks

LATE = mask_from(6)  # the last convolution and the head


@pytest.fixture(scope='module')
def table():
    return slow_table(network())


@pytest.fixture(scope='module')
def branching():
    return slow_table(branches())


@pytest.fixture(scope='module')
def dataset():
    return digits()


def compared(folder, dataset, table, masks, num_epochs=4, make=network, before=None, room=None):
    """Trains masks, each at its own cut; returns (Watched, {epoch: Choice}).

    Asserts that the result is that of a run without a cache. before: (epoch, cache) -> None,
    called before each choice. room: of the cache's activations in memory, in bytes.
    """
    cache, choices = Watched(dataset, str(folder), memory_bytes=room), {}
    dates = sorted(masks)

    def choice_of(epoch):
        if before is not None:
            before(epoch, cache)
        until = deadline.until(dates, epoch, num_epochs)
        costs = CacheOffers(cache, table, epoch, until)
        choices[epoch] = Choice(masks[epoch], timings=costs.at_own_cut(masks[epoch]))
        return choices[epoch]
    with_cache, _ = ran(folder, dataset, {epoch: epoch for epoch in masks}, cache, num_epochs,
                        make(), choice_of)
    plain, _ = ran(folder, dataset, masks, None, num_epochs, make())
    assert same_run(with_cache, plain)
    for epoch, choice in choices.items():
        taken = sum(cache.kinds[epoch - 1:deadline.until(dates, epoch, num_epochs) - 1], [])
        assert choice.timings.is_cached(choice.mask) == (PLAIN not in taken)
        if PLAIN not in taken:
            fill = taken.count(FILL)
            assert choice.timings.fill_share(choice.mask) == pytest.approx(fill / len(taken))
    return cache, choices


def attached(folder, dataset, model, **room):
    """Returns a cache that can cut a network's steps."""
    cache = Watched(dataset, str(folder), **room)
    cache.attach(maker_of(model))
    return cache


# ---------------------------------------------------------------- what the run can afford

def test_a_run_that_reads_its_cache_stays_within_budget(tmp_path, dataset, table):
    rho, num_epochs = 0.6, 8
    costs = CacheOffers(attached(tmp_path, dataset, network()), table, 1, num_epochs + 1)
    mask, _, costed = choose_cached_tensors(costs, np.ones(HEAD + 2), rho)
    choice, budget = Choice(mask, timings=costed), Budget(Settings(num_epochs, rho=rho))
    assert budget.rho(1) == rho and costed.is_cached(mask)
    filling, reading = [choice.predicted_of(kind)[0] / table.t_step for kind in (FILL, READ)]
    assert filling + (num_epochs - 1) * reading <= num_epochs * rho
    for epoch in range(1, num_epochs):
        taken = {FILL: [9.0], READ: [1.0, 1.0, 1.0]} if epoch == 1 else {READ: [1.0] * 4}
        budget.spend(choice, EpochResult(0.0, 0.0, 0.0, taken, {}, 0.0))
        assert budget.rho(epoch + 1) >= reading
    spent = (filling + 3 * reading) / 4 + (num_epochs - 2) * reading
    assert budget.rho(num_epochs) == pytest.approx(num_epochs * rho - spent)


def test_the_whole_run_pays_for_filling_the_cache(tmp_path, dataset, table, capsys):
    """The two epochs of one selection could not reach this rho."""
    cache, chosen = attached(tmp_path, dataset, network()), {}
    least = [CacheOffers(cache, table, 1, until).smallest_rho() for until in (3, 9)]
    assert least[1] < 0.9 * least[0]
    settings = Settings(num_epochs=8, interval=2, rho=float(np.mean(least)),
                        learning_rate=0.01, closed_loop=False)
    scheme = train.CachedElasticScheme(train.step_maker(network(), dataset, settings),
                                       dataset.probe, table, settings, cache)
    session = Session(Recorder(str(tmp_path / 'r')))
    train.train(watched(scheme, chosen), dataset, settings, session, cache)
    assert 'out of reach' not in capsys.readouterr().out
    assert list(chosen) == [1, 3, 5, 7] and cache.kinds[0] == [FILL] * 7
    spent = [chosen[max(e for e in chosen if e <= epoch)].predicted_of(kind)[0]
             for epoch, of in enumerate(cache.kinds, 1) for kind in of]
    assert max(spent) > settings.rho * table.t_step
    assert np.mean(spent) <= settings.rho * table.t_step * (1 + 1e-9)


# ---------------------------------------------------------------- the present cache

SUBSET = LATE & (np.arange(HEAD + 2) != 7)  # without a bias
FIRST_OF_DEEP = np.arange(HEAD + 2) == 2
LARGER = MIDDLE & (np.arange(HEAD + 2) != 5)


@pytest.mark.parametrize('room, masks, expected', [
    (0, {1: LATE, 3: HEAD_ALONE, 4: LATE}, (FILL, READ, READ, READ)),
    pytest.param(None, {1: LARGER, 3: MIDDLE}, (FILL, READ, READ, READ),
                 marks=pytest.mark.thorough),
    pytest.param(None, {1: LATE, 3: HEAD_ALONE | FIRST_OF_DEEP}, (FILL, READ, FILL, READ),
                 marks=pytest.mark.thorough)],
    ids=['fewer and back', 'more', 'one below the cut'])
def test_cached_activations_stay_while_nothing_below_their_cut_trains(
        tmp_path, dataset, table, room, masks, expected):
    cache, choices = compared(tmp_path, dataset, table, masks, room=room)
    assert cache.kinds == kinds(*expected)
    assert cache.totals['cache_hits'] == 56 * expected.count(READ)


def test_each_deepest_tensor_has_the_cost_of_its_cheapest_cache(tmp_path, dataset, table):
    """The present cache has been filled for MIDDLE."""
    seen = {}

    def look(epoch, cache):
        if epoch < 3:
            return
        for until in (4, 9):
            seen[until] = CacheOffers(cache, table, 3, until).table
            assert cache.store.stored.all() and cache.skipped > 0
        cache.view, view = 7, cache.view
        seen['view'] = CacheOffers(cache, table, 3, 9).table  # for a new augmentation
        cache.view = view
    compared(tmp_path, dataset, table, {1: MIDDLE, 3: MIDDLE}, before=look)
    new = Watched(dataset, str(tmp_path))
    for until in (4, 9):
        fresh, costed = CacheOffers(new, table, 3, until).table, seen[until]
        assert (fresh.cache.fill_share == fill_share(dataset, 3, until)).all()
        share, old = fill_share(dataset, 3, until), table.t_prefix[MIDDLE].min() / table.t_fp
        kept = (costed.cache.fill_share == 0) & costed.cache.trainable
        # The present cache wins where it skips more than a new one, which must first be filled.
        gain = old * table.t_fp > (1 - share) * table.t_prefix
        assert kept.tolist() == (MIDDLE & gain).tolist() and kept[4]
        assert (until == 9) == (MIDDLE & ~kept).any()
        assert (costed.cache_ms[kept] < fresh.cache_ms[kept]).all()
        np.testing.assert_allclose(costed.cache_ms[~kept], fresh.cache_ms[~kept], rtol=0.05)
        np.testing.assert_allclose(costed.cache.skipped[kept], old)
    fresh = CacheOffers(new, table, 3, 9).table
    np.testing.assert_allclose(seen['view'].cache_ms, fresh.cache_ms, rtol=0.05)


@pytest.mark.thorough
def test_images_that_are_not_cached_yet_count_as_filling(tmp_path, table):
    data = digits(steps_per_epoch=5)
    cache, choices = compared(tmp_path, data, table, {1: LATE, 7: SUBSET}, num_epochs=10)
    assert 0 < choices[7].timings.fill_share(SUBSET) < fill_share(data, 7, 11)
    assert choices[1].timings.cache.cut == choices[7].timings.cache.cut


@pytest.mark.parametrize('on_disk', [False, True])
def test_a_new_cache_may_take_the_room_of_the_present_one(tmp_path, on_disk):
    """The store counts as full without being written: other programs take much less meanwhile."""
    rows, count = [stores.Field((10 ** 6,), np.uint8)], 10 ** 4
    with stores.FileStore(rows, count, str(tmp_path)) if on_disk else (
            stores.MemoryStore(rows, count)) as store:
        store.stored[:] = True
        for cache_gb, share in ((None, stores.DISK_SHARE), (1e-4, 0), (1e9, stores.MOST_OF_DISK)):
            now = stores.room(str(tmp_path), cache_gb)
            then = stores.room(str(tmp_path), cache_gb, freed=store)
            more = (0, share) if on_disk else (stores.MEMORY_SHARE, 0)
            np.testing.assert_allclose(np.subtract(then, now), np.multiply(more, store.nbytes),
                                       atol=0.1 * store.nbytes)


# ---------------------------------------------------------------- a mask's own cut

def mask_of(model, *layers):
    paths = [keras_stack.layer_path(v).split('/')[-1] for v in model.trainable_variables]
    assert set(layers) <= set(paths)
    return np.isin(paths, layers)


def test_the_own_cut_of_a_mask_costs_no_more_than_that_of_its_chain(tmp_path, dataset, branching):
    model = branches()
    cache, better = attached(tmp_path, dataset, model), 0
    costs = CacheOffers(cache, branching, 1, 5)
    for mask in list(random_masks(len(branching.names), 20)) + [
            mask_of(model, name, 'head') for name in ('a1', 'b1', 'c1', 'a2')]:
        costed, chain = costs.at_own_cut(mask), costs.table
        cut, k = costed.cache.cut, costed.deepest(mask)
        assert costed.step_time(mask) <= chain.step_time(mask) + 1e-9
        better += costed.step_time(mask) < chain.step_time(mask) - 1e-6
        if cut is None:
            assert not costed.is_cached(mask)
            continue
        assert costed.cache.trainable[mask].all()
        assert costed.cache.read_ms[k] == cache.copying(np.array([float(cut.nbytes)]))[0]
        assert chain.cache.skipped[k] - 1e-9 <= costed.cache.skipped[k] <= 1
    assert better >= 4


@pytest.mark.thorough
def test_a_cut_serves_masks_other_than_its_own_bit_for_bit(tmp_path, dataset, branching):
    model = branches()
    one = mask_of(model, 'a1', 'head')
    masks = {1: one, 3: mask_of(model, 'a1', 'a2', 'head'), 4: mask_of(model, 'a2'), 5: one}
    cache, choices = compared(tmp_path, dataset, branching, masks, 5, branches)
    assert cache.kinds == kinds(FILL, READ, READ, READ, READ)
    cut = choices[1].timings.cache.cut
    assert all(choice.timings.cache.cut == cut for choice in choices.values())
    assert choices[1].timings.cache.trainable.tolist() == mask_of(
        model, 'a1', 'a2', 'head').tolist()  # the other branches are skipped


def test_the_cut_of_the_chain_is_used_where_the_own_cut_does_not_fit(tmp_path, dataset, branching):
    model, room = branches(), dict(measured=dict(COPY_MS))
    cache = attached(tmp_path, dataset, model, **room)
    first = branching.names[branching.deepest(mask_of(model, 'a1', 'b1', 'c1'))][0]
    # The chain's cut stores the stem's output; this one stores those of other branches as well.
    mask = mask_of(model, first + '1', *[other + '2' for other in 'abc'.replace(first, '')])
    costs = CacheOffers(cache, branching, 1, 5)
    own, chain = costs.at_own_cut(mask).cache.cut, costs.table
    k = chain.deepest(mask)
    assert own.nbytes > branching.cut_bytes[k] > 0
    between = int(IMAGES * ((own.nbytes + branching.cut_bytes[k]) / 2 + 4))
    room.update(memory_bytes=between, cache_gb=between / stores.GB)
    cache = attached(tmp_path, dataset, model, **room)
    costed = CacheOffers(cache, branching, 1, 5).at_own_cut(mask)
    assert costed.cache.cut.nbytes == branching.cut_bytes[k]
    assert costed.step_time(mask) == pytest.approx(chain.step_time(mask))
    cache = attached(tmp_path, dataset, model, memory_bytes=0, cache_gb=1e-8)
    costed = CacheOffers(cache, branching, 1, 5).at_own_cut(mask)
    assert costed.cache.cut is None and not costed.is_cached(mask)


def test_a_selection_without_room_for_a_cache_says_so(tmp_path, dataset, branching, capsys):
    from elastic.runs.progress import announce
    model, mask = branches(), np.arange(len(branching.names)) > 0
    least = int((branching.cut_bytes.min() + 4) * IMAGES)
    for disk, said in ((least - 1, 1), (least + 1, 0)):
        cache = attached(tmp_path, dataset, model, memory_bytes=0, cache_gb=disk / stores.GB)
        choice = Choice(mask, np.ones(len(mask)), branching, rho=0.5)
        announce(choice, Settings(rho=0.5), 1.0, cache)
        assert capsys.readouterr().out.count('of disk are allowed') == said


@pytest.mark.parametrize('layers', [None, 'layer'])
@pytest.mark.thorough
def test_no_unselected_tensor_fits_and_no_choice_exceeds_rho(
        tmp_path, dataset, branching, layers):
    model, rng, more, n = branches(), np.random.RandomState(1), 0, len(branching.names)
    cache, of = attached(tmp_path, dataset, model), layers_of(model)
    group, given = (of, of) if layers else (np.arange(n), None)
    costs = CacheOffers(cache, branching, 1, 5)
    for _ in range(240):
        importance = rng.randn(n)
        rho = rng.uniform(costs.smallest_rho(given), 0.8)
        limit = rho * branching.t_step
        mask, fallback, costed = choose_cached_tensors(costs, importance, rho, given)
        assert costed.step_time(mask) <= limit
        if fallback:
            continue
        first, _ = choose_tensors(costs.table, importance, rho, given)
        assert importance[mask].sum() >= importance[first].sum()
        more += importance[mask].sum() > importance[first].sum()
        for item in np.unique(group):
            if importance[group == item].sum() > 0 and not mask[group == item].all():
                wider = mask | (group == item)
                assert costs.at_own_cut(wider).step_time(wider) > limit
    assert more > 2  # the own cut left time for more tensors


def test_a_cut_is_placed_by_the_measured_cost_of_copying(tmp_path, dataset, branching):
    model = branches()
    cache, mask = attached(tmp_path, dataset, model), mask_of(model, 'a1', 'head')
    read_ms = cache.read_ms_by_size(1e3)
    expected = float(cache.copying(np.array([5e4]))[0][0])
    assert float(read_ms(5e4 + 4)) == pytest.approx(expected) and expected > 0
    own = CacheOffers(cache, branching, 1, 5).at_own_cut(mask).cache.cut
    assert own == cache.prefixes.cut_off(mask, branching.op_rates, read_ms)
