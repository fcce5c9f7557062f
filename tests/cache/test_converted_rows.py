"""A new cache that is filled from the rows of the one before: the same bits, for less."""

import copy
import os

import numpy as np
import pytest
from test_cache_costs import LATE, branches, compared, mask_of, table_of

from cached_runs import (
    BATCH,
    DEEP,
    HEAD,
    HEAD_ALONE,
    IMAGES,
    MIDDLE,
    Watched,
    digits,
    in_a_file,
    kinds,
    mask_from,
    network,
)
from elastic.cache import stores
from elastic.schemes.scheme import Choice
from elastic.selection.cache_costs import CachePrices, fill_share, fill_shares
from elastic.steps.epoch import CONVERT, FILL, READ

GOES_UP = {1: DEEP, 3: HEAD_ALONE}
FROM_ROWS = FILL, READ, CONVERT, READ, READ


@pytest.fixture(scope='module')
def table():
    return table_of(network())


@pytest.fixture(scope='module')
def dataset():
    return digits()


def recording(data, steps):
    """The data set, which appends (view, numbers) of what is prepared to `steps`."""
    recorded = copy.copy(data)
    recorded.batches = lambda numbers, view: steps.extend(
        (view, row) for row in numbers.tolist()) or data.batches(numbers, view)
    return recorded


# ---------------------------------------------------------------- the same bits

@pytest.mark.parametrize('place', ['memory', 'file'])
@pytest.mark.parametrize('masks, expected', [
    (GOES_UP, FROM_ROWS),
    ({1: DEEP, 3: MIDDLE, 5: HEAD_ALONE}, (FILL, READ, CONVERT, READ, CONVERT, READ)),
    ({1: LATE, 3: DEEP, 5: HEAD_ALONE}, (FILL, READ, FILL, READ, CONVERT, READ, READ)),
    ({1: DEEP, 3: HEAD_ALONE, 5: DEEP}, (FILL, READ, CONVERT, READ, FILL, READ))],
    ids=['less deep', 'twice', 'deeper before', 'deeper behind'])
def test_a_run_that_converts_rows_is_the_uncached_one(tmp_path, dataset, table, monkeypatch, place,
                                                      masks, expected):
    if place == 'file':
        in_a_file(monkeypatch)
    cache, choices = compared(tmp_path, dataset, table, masks, len(expected))
    assert cache.kinds == kinds(*expected)
    for kind, name in ((READ, 'hits'), (CONVERT, 'converted'), (FILL, 'misses')):
        assert cache.totals['cache_' + name] == 7 * BATCH * expected.count(kind)
    for epoch, choice in choices.items():
        assert choice.timings.cache.converted == (expected[epoch - 1] == CONVERT)


def test_no_image_is_prepared_for_it_not_even_one_that_was_in_no_batch(tmp_path, dataset, table):
    """Of the 60, each epoch leaves four over."""
    prepared = {}

    def note(epoch, cache):
        prepared[epoch] = []
        cache.dataset = recording(dataset, prepared[epoch])
    cache, _ = compared(tmp_path, dataset, table, GOES_UP, 5, before=note)
    assert cache.kinds == kinds(*FROM_ROWS)
    assert {number for _, row in prepared[1] for number in row} == set(range(IMAGES))
    assert prepared[3] == []
    assert set(dataset.order(4).ravel()) - set(dataset.order(3).ravel())


def test_tensors_that_both_cuts_store_are_passed_on(tmp_path, dataset):
    """What the other branches give, beside the first branch's input and then its middle."""
    model, branching = branches(), table_of(branches())
    masks = {1: mask_of(model, 'a1', 'head'), 3: mask_of(model, 'a2', 'head')}
    cache, choices = compared(tmp_path, dataset, branching, masks, 8, branches)
    old, new = [set(choices[epoch].timings.cache.cut.tensors) for epoch in (1, 3)]
    assert old & new and new - old
    assert cache.kinds == kinds(FILL, READ, CONVERT, *[READ] * 5)


def test_batches_whose_images_are_not_all_there_are_filled_from_images(tmp_path, table):
    data, old = digits(steps_per_epoch=5), {}

    def look(epoch, cache):
        old[epoch] = cache.store
    cache, choices = compared(tmp_path, data, table, {1: DEEP, 6: HEAD_ALONE}, 12, before=look)
    assert {CONVERT, FILL} == set(cache.kinds[5]) and READ in sum(cache.kinds[6:], [])
    assert any(CONVERT in epoch for epoch in cache.kinds[6:])  # the old rows are there until then
    assert 0 < choices[6].timings.cache.converted < 1
    assert not len(old[6])


def test_shares_are_counted_in_the_order_of_the_epochs():
    data, old = digits(steps_per_epoch=5), np.arange(IMAGES) < 40
    assert fill_shares(data, 3, 9)[0] == fill_share(data, 3, 9)
    assert fill_shares(data, 3, 9)[1] == 0
    assert fill_shares(data, 3, 9, None, 0, np.ones(IMAGES, bool)) == (fill_share(data, 3, 9), 1)
    in_first = np.isin(np.arange(IMAGES), data.order(3)[:2])
    assert fill_shares(data, 3, 4, None, 0, in_first) == (1, pytest.approx(2 / 5))
    assert fill_shares(data, 3, 9, None, 1, old)[1] == 0  # rows of another view


# ---------------------------------------------------------------- where it cannot be

def test_views_that_changed_are_filled_from_images(tmp_path, table):
    data = digits(views='held', interval=4, augmentation='flip+rotate')
    cache, _ = compared(tmp_path, data, table, {1: DEEP, 5: HEAD_ALONE}, 6)
    assert cache.kinds == kinds(FILL, READ, READ, READ, FILL, READ)
    cache, _ = compared(tmp_path, data, table, {1: DEEP, 3: HEAD_ALONE}, 6)
    assert cache.kinds == kinds(FILL, READ, CONVERT, READ, FILL, READ)


@pytest.mark.parametrize('second', [mask_from(3), HEAD_ALONE | (np.arange(HEAD + 2) == 2)],
                         ids=['all from below the cut', 'one below the cut'])
def test_rows_below_which_something_was_trained_are_of_no_use(tmp_path, dataset, table, second):
    cache, choices = compared(tmp_path, dataset, table, {1: MIDDLE, 3: second, 5: MIDDLE}, 7)
    assert cache.kinds[2] == [FILL] * 7 and not choices[3].timings.cache.converted
    # What is there in the end are the rows of the deeper cut.
    assert choices[5].timings.cache.converted == (CONVERT in cache.kinds[4])
    assert cache.totals['cache_misses'] == 2 * 7 * BATCH


@pytest.mark.parametrize('spare, expected', [(2.1, CONVERT), (1.1, FILL)])
def test_where_both_do_not_fit_the_old_rows_make_room(tmp_path, dataset, table, spare, expected):
    """Memory for the larger of both caches and some; no disk."""
    class Small(Watched):
        def _room(self, beside=False):
            return super()._room(beside)[0], 0
    sizes = {}

    def limit(epoch, cache):
        cache._cache_gb = 1e-9
        row = stores.row_bytes([stores.Row((16, 16, 16), np.float32)]) + 8
        cache._memory_bytes = int(spare * IMAGES * row)
        sizes[epoch] = cache._memory_bytes
    cache, choices = compared(tmp_path, dataset, table, {1: mask_from(2), 3: mask_from(6)}, 6,
                              before=limit)
    assert cache.kinds == kinds(FILL, READ, expected, READ, READ, READ)
    taken = [IMAGES * (choices[epoch].timings.cache.cut.nbytes + 4) for epoch in (1, 3)]
    assert max(taken) < sizes[3] and (sum(taken) > sizes[3]) == (expected == FILL)
    assert cache.totals['cache_bytes'] >= (sum(taken) if expected == CONVERT else max(taken))


def test_room_that_has_gone_since_the_choice_is_made_by_the_old_rows(tmp_path, dataset, table):
    class Later(Watched):
        def begin(self, step, timings=None):
            if self.store is not None:
                self._cache_gb, self._memory_bytes = 1e-9, self.store.nbytes + 10
            super().begin(step, timings)
    cache, choices = compared(tmp_path, dataset, table, GOES_UP, 5, make_cache=Later)
    assert choices[3].timings.cache.converted == 1
    assert cache.kinds == kinds(FILL, READ, FILL, READ, READ)


def test_what_the_old_rows_take_of_the_disk_is_not_given_twice(tmp_path, dataset, table):
    fits, limit = {}, 5e6  # bytes, of which the first rows take 1e6

    def look(epoch, cache):
        cache._cache_gb, cache._memory_bytes = limit / stores.GB, 0
        if epoch == 3:
            assert isinstance(cache.store, stores.FileStore)
            for beside in (False, True):
                for whole in (0.95 * limit - cache.store.nbytes, 0.95 * limit):
                    there = np.isfinite(cache.copying(np.array([whole / IMAGES - 4]), beside)[0])
                    fits.setdefault(beside, []).append(bool(there))
    compared(tmp_path, dataset, table, GOES_UP, 5, before=look)
    assert fits == {False: [True, True], True: [True, False]}


# ---------------------------------------------------------------- rows that are lost

@pytest.mark.parametrize('step', [0, 2, 6])
def test_old_rows_that_are_lost_leave_the_rest_to_the_images(tmp_path, dataset, table, monkeypatch,
                                                             capsys, step):
    """At the last step all batches are read ahead, and what was in none is missing."""
    in_a_file(monkeypatch)

    def fail(cache):
        os.ftruncate(cache._old.store._held.fileno(), 0)
    cache, _ = compared(tmp_path, dataset, table, GOES_UP, 5, at={(3, step): fail})
    assert cache.kinds[:2] == kinds(FILL, READ) and cache.kinds[3:] == kinds(READ, READ)
    found = cache.kinds[2]
    assert found == sorted(found) and (found.count(FILL) > 0) == (step < 6)
    assert found.count(CONVERT) >= step and len(found) == 7
    lines = [line for line in capsys.readouterr().out.splitlines() if 'from the images' in line]
    assert len(lines) == 1 and 'cannot be read' in lines[0]
    assert cache.totals['cache_converted'] == BATCH * found.count(CONVERT)
    assert cache.totals['cache_misses'] == BATCH * (7 + found.count(FILL))


def test_new_rows_that_are_lost_cost_the_cache_and_nothing_else(tmp_path, dataset, table,
                                                                monkeypatch):
    in_a_file(monkeypatch)

    def fail(cache):
        os.close(cache.store._held.fileno())
    cache, _ = compared(tmp_path, dataset, table, GOES_UP, 5, at={(3, 3): fail})
    assert cache.kinds[2][:4] == [CONVERT] * 4 and set(cache.kinds[2][5:]) == {'plain'}
    assert cache.kinds[3:] == kinds('plain', 'plain') and cache._old is None


def test_both_stores_exist_for_one_epoch_alone(tmp_path, dataset, table):
    seen = {}

    def keep(name):
        def look(cache):
            seen[name] = cache._old and cache._old.store
        return look
    compared(tmp_path, dataset, table, GOES_UP, 5, at={(3, 6): keep('in'), (4, 0): keep('behind')})
    assert seen['behind'] is None and not len(seen['in'])


# ---------------------------------------------------------------- its price

def test_it_is_predicted_to_take_less_than_from_images(tmp_path, dataset, table):
    seen = {}

    def look(epoch, cache):
        prices = CachePrices(cache, table, epoch, epoch + 3)
        seen[epoch] = prices.at_own_cut(HEAD_ALONE), cache.skipped
    _, choices = compared(tmp_path, dataset, table, {1: DEEP, 4: HEAD_ALONE}, 6, before=look)
    (anew, _), (converted, skipped) = seen[1], seen[4]
    assert anew.cache.cut == converted.cache.cut
    assert converted.filling_time(HEAD_ALONE) == pytest.approx(anew.filling_time(HEAD_ALONE),
                                                               rel=0.01)
    assert converted.reading_time(HEAD_ALONE) == pytest.approx(anew.reading_time(HEAD_ALONE),
                                                               rel=0.01)
    saved = anew.step_time(HEAD_ALONE) - converted.step_time(HEAD_ALONE)
    assert saved == pytest.approx(skipped * table.t_fp / 3, rel=0.01) and skipped > 0
    choice = Choice(HEAD_ALONE, timings=converted)
    ms, wrong_by = choice.predicted_of(CONVERT)
    assert ms == converted.converting_time(HEAD_ALONE) < choice.predicted_of(FILL)[0]
    assert wrong_by == pytest.approx(3 * choice.predicted_ms)


def test_rho_that_only_old_rows_bring_into_reach_is_reached(tmp_path, dataset, table):
    """A last interval of two epochs, within which the images would be too dear to begin with."""
    found = []

    def look(epoch, cache):
        if epoch == 3:
            prices = CachePrices(cache, table, 3, 5)
            rho = 1.01 * prices.smallest_rho()
            found.append((rho, prices.chosen(np.ones(HEAD + 2), rho),
                          Watched(dataset, str(tmp_path)).priced(table, 3, 5)))
    compared(tmp_path, dataset, table, {1: DEEP, 3: HEAD_ALONE}, before=look)
    (rho, (mask, fallback, priced), anew), = found
    assert priced.cache.converted == 1 and not fallback
    assert priced.step_time(mask) <= rho * table.t_step
    assert min(anew.step_time(one) for one in np.eye(HEAD + 2, dtype=bool)) > rho * table.t_step
