"""Tests reading ahead in a store: same records, losses reported, no thread left."""

import os
import threading

import numpy as np
import pytest

from elastic.cache import stores
from elastic.cache.stores import CacheLost, Field
from small_stores import BATCH, FIELDS, IMAGES, bits, both_kinds, filled, opened, values


@both_kinds
def test_reading_ahead_gives_what_get_gives(kind, tmp_path):
    store, _ = filled(kind, tmp_path, FIELDS)
    batches = np.random.RandomState(1).permutation(IMAGES)[:20].reshape(5, BATCH)
    with store:
        for depth in (1, 2, 9):
            given = list(stores.ahead(store, batches, depth))
            assert [bits(each) for each in given] == [bits(store.get(each)) for each in batches]
        assert list(stores.ahead(store, batches[:0])) == []


def test_reading_ahead_reads_depth_batches_ahead(tmp_path):
    store, _ = filled('file', tmp_path, FIELDS)
    taken = []
    batches = (taken.append(number) or [number] for number in range(IMAGES))
    with store:
        reading = stores.ahead(store, batches, depth=3)
        assert taken == []
        for step in range(5):
            next(reading)
            assert taken == list(range(step + 4))
        reading.close()


def test_reading_ahead_ends_its_thread_when_closed_early(tmp_path):
    store, _ = filled('file', tmp_path, FIELDS)
    threads = threading.active_count()
    with store:
        reading = stores.ahead(store, np.arange(20).reshape(5, BATCH))
        next(reading)
        assert threading.active_count() == threads + 1
        reading.close()
        assert threading.active_count() == threads
        for _ in stores.ahead(store, np.arange(20).reshape(5, BATCH)):
            break  # drops the generator, which closes it
        assert threading.active_count() == threads
        assert store.has(np.arange(20))


def test_reading_ahead_raises_a_loss_at_its_batch(tmp_path):
    store, tensors = filled('file', tmp_path, FIELDS)
    order = np.random.RandomState(0).permutation(IMAGES)  # the order in the file
    os.truncate(store._held.fileno(), 10 * stores.record_bytes(FIELDS))
    threads, seen = threading.active_count(), []
    with pytest.raises(CacheLost, match='cut short'):
        for tensors_read in stores.ahead(store, order[:20].reshape(5, BATCH)):
            seen.append(bits(tensors_read))
    assert seen == [bits([tensor[numbers] for tensor in tensors])
                    for numbers in (order[:4], order[4:8])]
    assert threading.active_count() == threads
    with pytest.raises(CacheLost, match='closed'):
        next(stores.ahead(store, [[1]]))


@both_kinds
def test_one_thread_reads_while_another_writes(kind, tmp_path):
    fields, count = [Field((300,), np.float32), Field((), np.int32)], 2000
    tensors = [values(field, count) for field in fields]
    with opened(kind, tmp_path, fields, count) as store:
        old, new = np.arange(count // 2), np.arange(count // 2, count)
        store.put(old, [tensor[old] for tensor in tensors])
        reading = stores.ahead(store, old.reshape(-1, 10))
        for numbers, given in zip(new.reshape(-1, 10), reading):
            store.put(numbers, [tensor[numbers] for tensor in tensors])
            assert bits(given) == bits([tensor[numbers - count // 2] for tensor in tensors])
        assert bits(store.get(np.arange(count))) == bits(tensors)
