"""Tests the stores of the prefix cache: records, limits, and disks that fill up or fail."""

import os
import signal
import subprocess
import threading

import numpy as np
import pytest
import tensorflow as tf

from elastic.cache import stores
from elastic.cache.stores import CacheLost, Field, FileStore, MemoryStore
from small_runs import script
from small_stores import BATCH, FIELDS, IMAGES, bits, both_kinds, filled, opened, values

DTYPES = (np.float32, np.float16, tf.bfloat16.as_numpy_dtype, np.int64, np.uint8, np.bool_)


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
def test_a_partly_filled_store_knows_what_it_has(kind, tmp_path):
    with opened(kind, tmp_path, FIELDS) as store:
        numbers = np.array([[3, 0, 22, 7], [1, 2, 4, 5]])
        assert not store.has(numbers[0]) and not store.has(numbers).any()
        store.put(numbers[0], [values(field, BATCH) for field in FIELDS])
        assert store.has(numbers[0]) and store.has(numbers).tolist() == [True, False]
        assert store.has([[3, 7], [7, 6]]).tolist() == [True, False]
        assert store.stored.sum() == BATCH
        with pytest.raises(KeyError, match='not all stored'):
            store.get([3, 1])
        assert store.has(numbers[0])  # a wrong request loses nothing


@both_kinds
def test_a_stored_record_is_not_written_again(kind, tmp_path):
    store, tensors = filled(kind, tmp_path, FIELDS)
    with store:
        written = store.bytes_written
        store.put(np.arange(6), [values(field, 6, seed=99) for field in FIELDS])
        assert store.bytes_written == written and store.stored.all()
        assert bits(store.get(np.arange(6))) == bits([tensor[:6] for tensor in tensors])


@both_kinds
def test_a_batch_that_is_partly_stored_adds_the_rest(kind, tmp_path):
    first, second = [[values(field, BATCH, seed) for field in FIELDS] for seed in (1, 2)]
    with opened(kind, tmp_path, FIELDS) as store:
        store.put([0, 1, 2, 3], first)
        store.put([2, 9, 3, 8], second)
        assert bits(store.get([2, 3])) == bits([tensor[2:] for tensor in first])
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


FILL = '''
import resource, signal, sys, numpy as np
from elastic.cache.stores import CacheLost, FileStore, Field
folder, limit = sys.argv[1], int(sys.argv[2])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = FileStore([Field((1000,), np.float32)], 1000, folder)
try:
    for number in range(1000):
        store.put([number], [np.full((1, 1000), number, np.float32)])
        assert store.get([number])[0][0, 0] == number
except CacheLost as error:
    print(error)
assert not store.has([0]) and store.nbytes == 0 and 0 < store.bytes_written < 1000 * 4000
'''


def test_a_file_that_may_not_grow_ends_the_cache_with_one_line(tmp_path):
    assert script('-c', FILL, str(tmp_path), '99999') == (  # not a whole number of records
        0, 'the prefix cache in {} cannot be written: File too large\n'.format(tmp_path), '')


@pytest.fixture
def small_disk(tmp_path):
    """Yields a folder on a file system of 1 MB."""
    folder = str(tmp_path / 'disk')
    os.mkdir(folder)
    if subprocess.call(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', folder],
                       stderr=subprocess.DEVNULL):
        pytest.skip('may not mount a file system here')
    yield folder
    subprocess.check_call(['umount', folder])


def test_a_full_disk_ends_the_cache_with_one_line_and_frees_it(small_disk):
    assert script('-c', FILL, small_disk, '0') == (
        0, 'the prefix cache in {} cannot be written: No space left on device\n'.format(small_disk),
        '')
    fields = [Field((1000,), np.float32)]
    store = FileStore(fields, 1000, small_disk)
    with pytest.raises(CacheLost, match='No space left'):
        store.put(np.arange(1000), [np.zeros((1000, 1000), np.float32)])
    usage = os.statvfs(small_disk)
    assert usage.f_bfree == usage.f_blocks and os.listdir(small_disk) == []


def test_the_disk_of_the_folder_limits_a_file(small_disk):
    fields = [Field((1000,), np.float32)]
    for gigabytes, images in ((None, 131), (1, 235), (0.0005, 125)):
        with stores.open_store(fields, images, small_disk, gigabytes, memory_bytes=0) as store:
            assert isinstance(store, FileStore) and store.place == 'in ' + small_disk
        with pytest.raises(CacheLost, match='of disk are allowed'):
            stores.open_store(fields, images + 1, small_disk, gigabytes, 0)


def test_a_file_that_was_cut_short_is_lost(tmp_path):
    store, _ = filled('file', tmp_path, FIELDS)
    os.truncate(store._held.fileno(), store.nbytes - 10)
    with pytest.raises(CacheLost, match='in {} cannot be read: .* cut short'.format(tmp_path)):
        store.get(np.arange(IMAGES))
    assert not store.has([0])


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
    with pytest.raises(CacheLost, match=r'^[^\n]*No such file or directory[^\n]*$'):
        stores.open_store(FIELDS, 10, str(tmp_path / 'none'), None, 0)
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


@both_kinds
def test_closing_while_another_thread_reads_or_writes_is_safe(kind, tmp_path):
    fields, count, failed = [Field((5000,), np.float32)], 400, []
    tensor = values(fields[0], count)
    other = tmp_path / 'other'
    for _ in range(5):
        store = opened(kind, tmp_path, fields, count)
        store.put(np.arange(200), [tensor[:200]])

        def read(store=store):
            try:
                while True:
                    assert bits(store.get(np.arange(200))) == bits([tensor[:200]])
            except CacheLost:
                pass
            except BaseException as error:
                failed.append(error)

        def write(store=store):
            try:
                for start in range(200, count, 2):
                    store.put(np.arange(start, start + 2), [tensor[start:start + 2]])
            except CacheLost:
                pass
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=target) for target in (read, write)]
        for thread in threads:
            thread.start()
        store.get([1, 2, 3])
        store.close()
        with open(str(other), 'wb+') as file:  # likely to get the descriptor just closed
            for thread in threads:
                thread.join()
            assert file.read() == b'' and failed == []
        assert store.nbytes == 0
