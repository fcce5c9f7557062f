"""Tests that the prefix cache never changes the bits of a run, whatever happens to the cache.

Where the activations of an image depend by rounding on its batch, as on some processors, weights
may differ by rounding.
"""

import contextlib
import os

import numpy as np
import pytest
from tensorflow import keras

import train
from cached_runs import (
    BATCH,
    DEEP,
    HEAD,
    HEAD_ALONE,
    IMAGES,
    MIDDLE,
    NearlyAlone,
    Watched,
    behind,
    bits,
    digits,
    files_of_at_most,
    images_apart,
    kinds,
    mask_from,
    network,
    ran,
    ran_as_plain,
    same_run,
    slow_table,
    watched,
)
from elastic.cache.prefix_cache import PrefixCache, fill_share, left_over
from elastic.planning.cache_offers import CacheOffers
from elastic.runs.recorder import Recorder
from elastic.runs.session import Session
from elastic.settings import Settings
from elastic.steps.epoch import FILL, PLAIN, READ
from small_steps import Centred


@pytest.fixture(scope='module')
def dataset():
    return digits()


@pytest.fixture(scope='module')
def timings():
    return slow_table(network())


# ---------------------------------------------------------------- the same bits

@pytest.mark.parametrize('place, masks, expected', [
    pytest.param('memory', {1: MIDDLE, 2: DEEP, 4: MIDDLE}, (FILL, FILL, READ, FILL),
                 id='in mid-interval'),
    pytest.param('file', {1: DEEP, 3: HEAD_ALONE}, (FILL, READ, FILL, READ), id='less deep'),
    pytest.param('memory', {1: MIDDLE, 3: MIDDLE}, (FILL, READ, READ, READ), id='the same',
                 marks=pytest.mark.thorough)])
def test_a_cached_run_gives_the_bits_of_an_uncached_run(
        tmp_path, dataset, place, masks, expected):
    cache = Watched(dataset, str(tmp_path), memory_bytes=0 if place == 'file' else None)
    orders = [set(dataset.order(epoch).ravel()) for epoch in (1, 2)]
    assert orders[1] - orders[0]  # images outside the full batches of an epoch are cached, too
    result = ran_as_plain(tmp_path, dataset, masks, cache)
    assert cache.kinds == kinds(*expected)
    hits = sum(kind == READ for kind in expected) * 7 * BATCH
    assert result['cache_hits'] == hits and result['cache_misses'] == 4 * 7 * BATCH - hits
    assert result['cache_bytes_read'] > 0 < result['cache_bytes_written']
    assert {kind + '_step_ms' for kind in expected} <= set(result)
    assert sorted(os.listdir(str(tmp_path))) == ['cached', 'plain']  # no file of the cache is left


def test_steps_that_drift_bring_a_new_choice_and_keep_the_cache(tmp_path, dataset, timings):
    settings = Settings(num_epochs=4, interval=4, rho=0.6, learning_rate=0.01)
    cache, model, chosen = Watched(dataset, str(tmp_path)), network(), {}
    scheme = train.CachedElasticScheme(train.step_maker(model, dataset, settings), dataset.probe,
                                       timings, settings, cache)
    # The device is as fast as in the table, except that reading steps take three times as long.
    scheme._loop.measure = lambda *_: (timings.t_fp, timings.t_bp)

    def seen(last, choice):
        return last._replace(ms={
            kind: [(3 if kind == READ else 1) * choice.predicted_of(kind)[0]] * len(ms)
            for kind, ms in last.ms.items()})
    session = Session(Recorder(str(tmp_path / 'r')))
    result, model = train.train(watched(scheme, chosen, seen), dataset, settings, session, cache)
    assert list(chosen) == [1, 3, 4] and chosen[1].trials
    for epoch in (3, 4):  # selected again by the same importance
        assert not chosen[epoch].trials
        np.testing.assert_array_equal(chosen[epoch].importance, chosen[1].importance)
    assert cache.kinds == kinds(FILL, READ, READ, READ)
    assert result['cache_hits'] == 3 * 7 * BATCH
    plain, _ = ran(tmp_path, dataset, {epoch: choice.mask for epoch, choice in chosen.items()},
                   learning_rate=0.01)
    assert same_run(bits(model), plain[4:])


def test_two_uncached_runs_give_the_same_bits(tmp_path, dataset):
    """Otherwise the comparisons above would prove nothing."""
    assert ran(tmp_path, dataset, {1: DEEP})[0] == ran(tmp_path, dataset, {1: DEEP})[0]


# ---------------------------------------------------------------- which images are cached

def test_only_a_whole_epoch_has_images_left_over():
    stored = np.arange(10) < 8
    assert left_over(stored, 5, 2).tolist() == []  # the two left make a batch
    assert left_over(stored, 3, 3).tolist() == [8, 9]
    assert left_over(stored, 2, 3).tolist() == []  # the epoch was not whole
    assert left_over(np.ones(10, bool), 3, 3).tolist() == []


@pytest.mark.parametrize('steps, epochs', [(5, 5)] + [
    pytest.param(*case, marks=pytest.mark.thorough) for case in ((None, 1), (None, 5), (3, 2))])
def test_epochs_of_other_images_give_the_same_bits_and_their_filling_is_known_ahead(
        tmp_path, steps, epochs):
    data = digits(steps_per_epoch=steps)
    cache = Watched(data, str(tmp_path))
    ran_as_plain(tmp_path, data, {1: MIDDLE}, cache, num_epochs=epochs)
    found = [kind for epoch in cache.kinds for kind in epoch]
    assert set(found) <= {FILL, READ} and len(found) == epochs * (steps or 7)
    assert fill_share(data, 1, epochs + 1) == pytest.approx(found.count(FILL) / len(found))
    if steps == 5:
        assert any(set(epoch) == {FILL, READ} for epoch in cache.kinds)


def test_a_new_augmentation_fills_the_cache_again(tmp_path):
    data = digits(views='held', interval=2, augmentation='flip+rotate')
    assert [data.view(epoch) for epoch in (1, 2, 3, 4)] == [0, 0, 1, 1]
    cache = Watched(data, str(tmp_path))
    ran_as_plain(tmp_path, data, {1: MIDDLE}, cache)
    assert cache.kinds == kinds(FILL, READ, FILL, READ)
    assert fill_share(data, 1, 5) == 0.5 and fill_share(data, 2, 4) == 1


# ---------------------------------------------------------------- disks that fail

def lost_once(printed):
    lines = [line for line in printed.splitlines() if 'without the prefix cache' in line]
    assert len(lines) == 1 and 'until the next selection: the prefix cache in' in lines[0]
    return lines[0]


@pytest.mark.thorough
def test_a_disk_that_fills_up_costs_only_the_cache(tmp_path, dataset, capsys):
    masks = {1: MIDDLE, 3: HEAD_ALONE}
    plain, _ = ran(tmp_path, dataset, masks)
    cache = Watched(dataset, str(tmp_path), memory_bytes=0)
    with files_of_at_most(30_000):  # enough for the cache of the second selection
        cached, result = ran(tmp_path, dataset, masks, cache)
    assert same_run(cached, plain)
    assert 'cannot be written' in lost_once(capsys.readouterr().out)
    first = cache.kinds[0]
    assert first == sorted(first) and 0 < first.count(FILL) < 7
    assert cache.kinds[1:] == kinds(PLAIN, FILL, READ)
    assert result['cache_misses'] == (first.count(FILL) + 7) * BATCH


@pytest.mark.parametrize('failure', ['cut short', 'closed'])
@pytest.mark.thorough
def test_a_read_that_fails_costs_only_the_cache(tmp_path, dataset, capsys, failure):
    def fail(cache):
        file = cache.store._held
        if failure == 'closed':
            os.close(file.fileno())
        else:
            os.ftruncate(file.fileno(), 0)
    cache = Watched(dataset, str(tmp_path), at={(2, 3): fail}, memory_bytes=0)
    ran_as_plain(tmp_path, dataset, {1: MIDDLE}, cache)
    assert 'cannot be read' in lost_once(capsys.readouterr().out)
    assert cache.kinds[::2] == kinds(FILL, PLAIN) and cache.kinds[3] == [PLAIN] * 7
    assert cache.kinds[1][:4] == [READ] * 4 and cache.kinds[1][-1] == PLAIN


@pytest.mark.thorough
def test_a_write_that_fails_while_reading_ahead_loses_the_cache_once(tmp_path, capsys):
    data = digits(steps_per_epoch=5)
    plain, _ = ran(tmp_path, data, {1: MIDDLE}, num_epochs=5)
    with contextlib.ExitStack() as limits:
        def limit(cache):
            size = os.fstat(cache.store._held.fileno()).st_size
            limits.enter_context(files_of_at_most(size))
        probe = Watched(data, str(tmp_path), memory_bytes=0)
        ran(tmp_path, data, {1: MIDDLE}, probe, num_epochs=5)
        mixed = next(i for i, epoch in enumerate(probe.kinds)
                     if FILL in epoch and READ in epoch[epoch.index(FILL):])
        capsys.readouterr()
        cache = Watched(data, str(tmp_path), memory_bytes=0,
                        at={(mixed + 1, probe.kinds[mixed].index(FILL)): limit})
        assert same_run(ran(tmp_path, data, {1: MIDDLE}, cache, num_epochs=5)[0], plain)
    lost_once(capsys.readouterr().out)
    assert cache.kinds[:mixed] == probe.kinds[:mixed] and cache.kinds[mixed][-1] == PLAIN


def test_a_run_without_room_for_a_cache_says_so_and_trains(tmp_path, dataset, capsys):
    cache = Watched(dataset, str(tmp_path), memory_bytes=0, cache_gb=1e-5)
    ran_as_plain(tmp_path, dataset, {1: MIDDLE}, cache)
    assert 'of disk are allowed' in capsys.readouterr().out
    assert cache.kinds == kinds(PLAIN, PLAIN, PLAIN, PLAIN)


@pytest.mark.parametrize('trial_fails', [False, True])
def test_caches_for_which_there_is_no_room_have_infinite_cost(
        tmp_path, dataset, capsys, timings, trial_fails):
    """There is room for 100 kB on a disk; or in memory, and none on a disk that takes no more."""
    if trial_fails:
        cache = PrefixCache(dataset, str(tmp_path), memory_bytes=10 ** 5)
        with files_of_at_most(10 ** 5):
            cost = CacheOffers(cache, timings, 1, 3).table.cache
        said = capsys.readouterr().out
        assert said.startswith('the prefix cache stays in memory: ') and said.count('\n') == 1
    else:
        cache = PrefixCache(dataset, str(tmp_path), cache_gb=1e-4, memory_bytes=0)
        cost = CacheOffers(cache, timings, 1, 3).table.cache
    fits = (timings.cut_bytes + 4) * IMAGES <= 10 ** 5
    assert fits.any() and not fits.all()
    assert (np.isfinite(cost.read_ms) == fits).all() and (np.isfinite(cost.write_ms) == fits).all()


def test_the_store_is_freed_at_a_new_cut_and_at_the_end(tmp_path, dataset):
    stores = []

    def keep(cache):
        stores.append(cache.store)
    cache = Watched(dataset, str(tmp_path), at={(2, 0): keep, (4, 0): keep})
    ran(tmp_path, dataset, {1: MIDDLE, 3: DEEP}, cache)
    assert stores[0] is not stores[1] and not any(store.nbytes for store in stores)
    assert cache.cut is None


@pytest.mark.parametrize('exact, layer, said', [
    (True, NearlyAlone, 1), (False, NearlyAlone, 0), (True, keras.layers.ReLU, 0)])
@pytest.mark.thorough
def test_a_deterministic_run_says_once_that_it_differs_by_rounding(
        tmp_path, dataset, capsys, exact, layer, said):
    cache = Watched(dataset, str(tmp_path), exact=exact)
    ran(tmp_path, dataset, {1: HEAD_ALONE, 3: mask_from(HEAD + 1)}, cache, model=behind(layer()))
    assert cache.kinds == kinds(FILL, READ, FILL, READ)
    lines = [line for line in capsys.readouterr().out.splitlines() if 'to rounding only' in line]
    assert len(lines) == (said or exact and images_apart() > 0)
    for line in lines:
        apart = float(line.split('differs by up to ')[1].split()[0])
        assert 1e-8 < apart < 1e-5


def test_a_fixed_scheme_caches_no_images_that_depend_on_their_batch(tmp_path, dataset, capsys):
    cache = Watched(dataset, str(tmp_path))
    ran(tmp_path, dataset, {1: HEAD_ALONE}, cache, 2, behind(Centred()))
    assert cache.kinds == kinds(PLAIN, PLAIN)
    assert capsys.readouterr().out.count('depends on others of its batch') == 1
