"""Tests the stores of the prefix cache: records, limits, disks that fail, and reading ahead."""

import itertools
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from cached_runs import files_of_at_most
from elastic.cache import stores
from elastic.cache.stores import CacheLost, Field, FileStore, MemoryStore
from small_runs import script

IMAGES, BATCH = 23, 4
DTYPES = (np.float32, tf.bfloat16.as_numpy_dtype, np.bool_)
FIELDS = [Field((3, 5, 2), np.float32), Field((7,), np.float16), Field((), np.int32)]
both_kinds = pytest.mark.parametrize('kind', ['memory', 'file'])


def values(field, count=IMAGES, seed=0):
    """Returns a (count,) + field.shape array of random bits, NaN and infinity among them."""
    size = max(1, int(np.prod(field.shape))) * np.dtype(field.dtype).itemsize
    bits = np.random.RandomState(seed).randint(0, 256, (count, size)).astype(np.uint8)
    if field.dtype == np.bool_:
        bits &= 1
    return bits.view(field.dtype).reshape((count,) + field.shape)


def bits(tensors):
    return [(tensor.shape, tensor.dtype, tensor.tobytes()) for tensor in tensors]


def opened(kind, folder, fields, num_images=IMAGES):
    if kind == 'memory':
        return MemoryStore(fields, num_images)
    return FileStore(fields, num_images, str(folder))


def filled(kind, folder, fields, seed=0):
    """Returns a store of IMAGES records, written in shuffled order, and the tensors by image."""
    tensors = [values(field, seed=seed + i) for i, field in enumerate(fields)]
    store = opened(kind, folder, fields)
    order = np.random.RandomState(seed).permutation(IMAGES)
    for numbers in (order[:9], order[9:]):
        store.put(numbers, [tensor[numbers] for tensor in tensors])
    return store, tensors


@both_kinds
@pytest.mark.parametrize('dtype', DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_records_come_back_bit_for_bit_in_any_order(kind, dtype, tmp_path):
    fields = [Field((3, 5), dtype), Field((), np.int32), Field((1,), dtype)]  # an odd size
    store, tensors = filled(kind, tmp_path, fields)
    with store:
        for seed in range(3):
            numbers = np.random.RandomState(seed).permutation(IMAGES)[:BATCH]
            assert bits(store.get(numbers)) == bits([tensor[numbers] for tensor in tensors])


@both_kinds
def test_a_partly_filled_store_knows_what_it_has_and_adds_the_rest(kind, tmp_path):
    first, second = [[values(field, BATCH, seed) for field in FIELDS] for seed in (1, 2)]
    with opened(kind, tmp_path, FIELDS) as store:
        assert not store.has([3, 0, 22, 7])
        store.put([3, 0, 22, 7], first)
        assert store.has([[3, 0, 22, 7], [7, 3, 6, 0]]).tolist() == [True, False]
        written = store.bytes_written
        store.put([22, 9, 7, 8], second)
        assert store.bytes_written == 1.5 * written  # those that are stored are not written again
        assert store.stored.sum() == 6
        assert bits(store.get([22, 7])) == bits([tensor[2:] for tensor in first])
        assert bits(store.get([9, 8])) == bits([tensor[1::2] for tensor in second])


@both_kinds
def test_a_store_counts_bytes_and_seconds(kind, tmp_path):
    store, _ = filled(kind, tmp_path, FIELDS)
    with store:
        row = 4 * 30 + 2 * 7 + 4
        assert 0 <= store.bytes_written - IMAGES * row < IMAGES * 8
        assert store.nbytes == IMAGES * stores.record_bytes(FIELDS)
        assert store.bytes_read == 0 and store.seconds_reading == 0 < store.seconds_writing
        store.get([1, 2, 3])
        assert store.bytes_read == 3 * row and store.seconds_reading > 0


@both_kinds
def test_a_wrong_shape_or_dtype_is_refused_and_never_cast(kind, tmp_path):
    with opened(kind, tmp_path, [Field((2,), np.float32)]) as store:
        for wrong in (np.zeros((3, 3), np.float32), np.zeros((3, 2), np.int32),
                      np.zeros((3, 2, 1), np.float32), np.zeros((2, 2), np.float32)):
            with pytest.raises(AssertionError):
                store.put([0, 1, 2], [wrong])
        assert store.nbytes == 0


@both_kinds
def test_a_closed_store_has_nothing_and_says_so(kind, tmp_path):
    store, tensors = filled(kind, tmp_path, FIELDS)
    descriptors = len(os.listdir('/proc/self/fd'))
    written = store.bytes_written
    store.close()
    store.close()
    assert len(os.listdir('/proc/self/fd')) == descriptors - (kind == 'file')
    assert not store.has([0, 1]) and store.nbytes == 0
    assert store.bytes_written == written
    with pytest.raises(CacheLost, match='closed'):
        store.get([0, 1])
    with pytest.raises(CacheLost, match='closed'):
        store.put([0, 1], [tensor[:2] for tensor in tensors])
    assert not store.has([0, 1])


def test_kill_9_leaves_no_file(tmp_path):
    code = ('import os, signal, sys, numpy as np; from elastic.cache import stores as p\n'
            'store = p.FileStore([p.Field((1000,), np.float32)], 100, sys.argv[1])\n'
            'store.put(np.arange(50), [np.ones((50, 1000), np.float32)])\n'
            'assert store.bytes_written == 200000\n'
            'os.kill(os.getpid(), signal.SIGKILL)')
    status, _, errors = script('-c', code, str(tmp_path))
    assert status == -signal.SIGKILL, errors
    assert os.listdir(str(tmp_path)) == []


def test_a_file_that_may_not_grow_ends_the_cache_with_one_line(tmp_path):
    fields = [Field((1000,), np.float32)]
    store = FileStore(fields, 100, str(tmp_path))
    file = store._held
    with files_of_at_most(99999):  # not a whole number of records
        with pytest.raises(CacheLost) as lost:
            for number in range(100):
                store.put([number], [np.full((1, 1000), number, np.float32)])
                assert store.get([number])[0][0, 0] == number
    assert str(lost.value) == 'the prefix cache in {} cannot be written: File too large'.format(
        tmp_path)
    assert not store.has([0]) and store.nbytes == 0 and store.bytes_written == 99999
    assert file.closed  # so the disk has room for checkpoints at once


def test_the_free_disk_and_cache_gb_limit_a_file(tmp_path):
    folder = str(tmp_path)
    free = shutil.disk_usage(folder).free
    for gigabytes, expected in ((None, 0.5 * free), (10 ** 9, 0.9 * free), (0.0005, 500000)):
        assert stores.room(folder, gigabytes)[1] == pytest.approx(expected, rel=0.05)
    other = shutil.disk_usage('/dev/shm').free  # another disk
    assert stores.room('/dev/shm')[1] == pytest.approx(0.5 * other, rel=0.05)


def test_a_record_that_the_disk_lost_or_changed_is_noticed(tmp_path):
    for damage in (b'\0' * 64, b'x'):
        store, tensors = filled('file', tmp_path, FIELDS)
        first = int(np.random.RandomState(0).permutation(IMAGES)[0])
        os.pwrite(store._held.fileno(), damage, 0)
        others = [number for number in range(IMAGES) if number != first]
        assert bits(store.get(others)) == bits([tensor[others] for tensor in tensors])
        with pytest.raises(CacheLost, match='image {} is not as it was'.format(first)):
            store.get([first])


def test_a_store_lies_in_memory_else_on_disk_else_nowhere(tmp_path):
    fields, folder = [Field((1000,), np.float32)], str(tmp_path)
    assert isinstance(stores.open_store(fields, 1000, folder), MemoryStore)
    assert isinstance(stores.open_store(fields, 10, folder, 1, 40000), MemoryStore)
    with stores.open_store(fields, 10, folder, 1, 39999) as store:
        assert isinstance(store, FileStore)
    with pytest.raises(CacheLost, match='^the prefix cache would take 12.3 GB; 4 GB of memory and '
                                        '2.1 GB of disk are allowed$'):
        stores.open_store(fields, 3075000, folder, 2.1, 4 * 10 ** 9)


def test_a_folder_that_takes_no_file_gives_the_reason(tmp_path):
    gone = str(tmp_path / 'gone')
    with pytest.raises(CacheLost, match=r'^[^\n]* 0 GB of disk are allowed$'):
        stores.open_store(FIELDS, 10, gone, None, 0)
    stores.open_store(FIELDS, 10, gone).close()  # in memory
    with pytest.raises(CacheLost, match='cannot be opened: No such file or directory'):
        FileStore(FIELDS, 10, '/proc/self')


def test_a_memory_limit_of_the_process_sends_the_cache_to_disk(tmp_path):
    code = ('import resource, sys, numpy as np; from elastic.cache import stores as p\n'
            'resource.setrlimit(resource.RLIMIT_AS, (3 * 10 ** 9,) * 2)\n'
            'if resource.getrlimit(resource.RLIMIT_AS)[0] != 3 * 10 ** 9: sys.exit("no limits")\n'
            'fields = [p.Field((1000, 1000), np.float32)]\n'
            'try: print(type(p.open_store(fields, 1000, sys.argv[1], 10 ** 6, 10 ** 13)).__name__)'
            '\nexcept p.CacheLost: print()')
    _, out, errors = script('-c', code, str(tmp_path))
    if errors == 'no limits\n':
        pytest.skip('an emulator of processors takes no limit on memory')
    free = stores.room(str(tmp_path), 10 ** 6)[1]
    assert out == ('FileStore\n' if free >= 4 * 10 ** 9 else '\n'), errors


# ---------------------------------------------------------------- threads

@both_kinds
def test_reading_ahead_gives_what_get_gives(kind, tmp_path):
    store, _ = filled(kind, tmp_path, FIELDS)
    batches = np.random.RandomState(1).permutation(IMAGES)[:20].reshape(5, BATCH)
    with store:
        given = list(stores.ahead(store, batches))
        assert [bits(each) for each in given] == [bits(store.get(each)) for each in batches]
        assert list(stores.ahead(store, batches[:0])) == []


def test_reading_ahead_takes_no_more_batches_than_it_says(tmp_path):
    store, taken = filled('file', tmp_path, FIELDS)[0], []
    batches = (taken.append(number) or [number] for number in range(IMAGES))
    with store:
        for step, _ in zip(range(5), stores.ahead(store, batches)):
            assert len(taken) == step + 1 + stores.AHEAD


def test_reading_ahead_ends_its_thread_when_closed_early(tmp_path):
    store, _ = filled('file', tmp_path, FIELDS)
    threads = threading.active_count()
    with store:
        for _ in stores.ahead(store, np.arange(20).reshape(5, BATCH)):
            assert threading.active_count() == threads + 1
            break  # drops the generator, which closes it
        assert threading.active_count() == threads


def test_reading_ahead_raises_a_loss_at_its_batch(tmp_path):
    store, tensors = filled('file', tmp_path, FIELDS)
    order = np.random.RandomState(0).permutation(IMAGES)  # the order in the file
    file, threads, seen = store._held, threading.active_count(), []
    os.truncate(file.fileno(), 10 * stores.record_bytes(FIELDS))
    with pytest.raises(CacheLost, match='in {} cannot be read: .* cut short'.format(tmp_path)):
        for tensors_read in stores.ahead(store, order[:20].reshape(5, BATCH)):
            seen.append(bits(tensors_read))
    assert seen == [bits([tensor[numbers] for tensor in tensors])
                    for numbers in (order[:4], order[4:8])]
    assert threading.active_count() == threads and file.closed and store.nbytes == 0
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


@both_kinds
def test_closing_while_another_thread_reads_or_writes_is_safe(kind, tmp_path):
    fields, count = [Field((5000,), np.float32)], 400
    tensor = values(fields[0], count)
    store = opened(kind, tmp_path, fields, count)
    store.put(np.arange(200), [tensor[:200]])

    def read():
        while True:
            assert bits(store.get(np.arange(200))) == bits([tensor[:200]])

    def write():
        for start in itertools.cycle(range(200, count, 2)):
            store.put(np.arange(start, start + 2), [tensor[start:start + 2]])
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(call) for call in (read, write)]
        store.get([1, 2, 3])
        store.close()
        with open(str(tmp_path / 'other'), 'wb+') as file:  # may get the descriptor just closed
            for each in running:
                with pytest.raises(CacheLost, match='closed'):
                    each.result()
            assert file.read() == b'' and store.nbytes == 0
