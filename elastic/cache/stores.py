"""Stores the activations of the frozen layers, one record an image, in memory or in a file.

A store that fails frees all it holds and raises CacheLost; training then continues without a cache.
"""

import collections
import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import threading
import time
from typing import Any, NamedTuple, Tuple

import numpy as np

from elastic.device.host import MEMORY_SHARE, available_bytes
from elastic.errors import UserError

GB = 10 ** 9
DISK_SHARE = 0.5  # of the free disk, without --cache_gb
MOST_OF_DISK = 0.9  # of the free disk, with any --cache_gb: logs and checkpoints need some, too
TRIAL_BYTES = 64 * 10 ** 6  # to measure rates: more than a processor's caches hold
AHEAD = 2  # batches that wait to be trained on


class CacheLost(Exception):
    """Says in one line why the store could not be opened, written or read."""


class Field(NamedTuple):
    """Describes one tensor of an image's record."""
    shape: Tuple[int, ...]  # without the batch; () for the label
    dtype: Any  # NumPy's, or TensorFlow's bfloat16 in NumPy

    @property
    def nbytes(self):
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def record_bytes(fields):
    """Returns the bytes of one image's record, a multiple of 8: FileStore adds up such words."""
    return 8 * -(-sum(field.nbytes for field in fields) // 8)


class Store(contextlib.AbstractContextManager):
    """Keeps records by the number of their image. One thread may get while another puts.

    fields: Field of each tensor, in order. held: arrays, or the file.
    stored: (num_images,) bool, the images stored.
    """

    def __init__(self, fields, num_images, held):
        self.fields, self.bytes_written, self.bytes_read = list(fields), 0, 0
        self.seconds_writing = self.seconds_reading = 0.0
        self.stored, self._held = np.zeros(num_images, bool), held
        self._lock = threading.Lock()  # a read that fails closes what another thread may write to

    def __exit__(self, *_):
        self.close()

    @property
    def nbytes(self):
        """Returns the bytes of all records."""
        return int(np.count_nonzero(self.stored)) * record_bytes(self.fields)

    def has(self, numbers):
        """Returns whether all images of each batch are stored; numbers: (B,) or (steps, B) int."""
        return self.stored[np.asarray(numbers)].all(axis=-1)

    def put(self, numbers, tensors):
        """Stores the records of these images, except those already stored: flash memory wears.

        numbers: (B,) int, all different. tensors: (B,) + shape of each Field, of its dtype.
        Raises CacheLost.
        """
        began, numbers = time.perf_counter(), np.asarray(numbers)
        columns = []  # (B, bytes) uint8 each: NumPy then need not know bfloat16
        for field, tensor in zip(self.fields, tensors):
            tensor = np.ascontiguousarray(tensor)
            assert tensor.shape == numbers.shape + tuple(field.shape), (tensor.shape, field)
            assert tensor.dtype == field.dtype, (tensor.dtype, field)
            columns.append(tensor.reshape(len(numbers), -1).view(np.uint8))
        new = ~self.stored[numbers]
        if not new.all():
            numbers, columns = numbers[new], [column[new] for column in columns]
        with self._closing_on_errors('written'):
            self._write(numbers, columns)
        with self._lock:
            self.stored[numbers] = self._held is not None
        self.seconds_writing += time.perf_counter() - began

    def get(self, numbers):
        """Returns new arrays, (B,) + shape of each Field, of `numbers`, (B,) int, all stored.

        Raises CacheLost; KeyError if one is not stored.
        """
        began, numbers = time.perf_counter(), np.asarray(numbers)
        if not self.has(numbers):
            self._opened()
            raise KeyError('not all stored: {}'.format(numbers))
        with self._closing_on_errors('read'):
            columns = self._read(numbers)
        self.bytes_read += sum(column.nbytes for column in columns)
        self.seconds_reading += time.perf_counter() - began
        return [column.view(field.dtype).reshape(numbers.shape + tuple(field.shape))
                for field, column in zip(self.fields, columns)]

    def close(self):
        """Frees all it holds, in any thread; `put` and `get` then raise CacheLost."""
        with self._lock:
            held, self._held = self._held, None
            self.stored[:] = False
            if hasattr(held, 'close'):
                with contextlib.suppress(OSError):  # nobody reads these records any more
                    held.close()

    def _opened(self):
        held = self._held
        if held is None:
            raise CacheLost('the prefix cache is closed')
        return held

    @contextlib.contextmanager
    def _closing_on_errors(self, done):
        try:
            yield
        except OSError as error:
            self.close()
            raise CacheLost('the prefix cache {} cannot be {}: {}'.format(
                self.place, done, error.strerror or error))


class MemoryStore(Store):
    """Keeps records in memory, which the system allocates page by page at the first write."""
    place = 'in memory'

    def __init__(self, fields, num_images):
        super().__init__(fields, num_images,
                         [np.empty((num_images, field.nbytes), np.uint8) for field in fields])

    def _write(self, numbers, columns):
        for array, column in zip(self._opened(), columns):
            array[numbers] = column
            self.bytes_written += column.nbytes

    def _read(self, numbers):
        return [np.take(array, numbers, axis=0) for array in self._opened()]


class FileStore(Store):
    """Keeps records in a file in `folder`, in the order in which they were put.

    So an SD card is written sequentially, and a file system without sparse files writes no gaps.
    The file has no name: it is gone when this process ends, even if killed.
    """

    def __init__(self, fields, num_images, folder):
        super().__init__(fields, num_images, None)
        self.place, self._size = 'in {}'.format(folder), record_bytes(fields)
        with self._closing_on_errors('opened'):
            self._held = tempfile.TemporaryFile(buffering=0, prefix='prefix_cache_', dir=folder)
        ends = np.cumsum([0] + [field.nbytes for field in fields]).tolist()
        self._spans = [slice(*span) for span in zip(ends, ends[1:])]  # of each field in a record
        self._offsets, self._end = np.zeros(num_images, np.int64), 0
        # A write that the system reported as done can be lost later (a quota on a network disk, a
        # worn card), and then reads as zeros. The sum of a record shows that.
        self._sums = np.zeros(num_images, np.uint64)

    def _write(self, numbers, columns):
        records = np.zeros((len(numbers), self._size), np.uint8)
        for span, column in zip(self._spans, columns):
            records[:, span] = column
        content, done = records.reshape(-1), 0
        while done < len(content):  # a full disk writes a part and fails at the next call
            with self._lock:
                written = os.pwrite(self._opened().fileno(), content[done:], self._end + done)
            done += written
            self.bytes_written += written
        self._offsets[numbers] = self._end + self._size * np.arange(len(numbers))
        self._sums[numbers] = records.view(np.uint64).sum(axis=1)
        self._end += len(content)

    def _read(self, numbers):
        columns = [np.empty((len(numbers), field.nbytes), np.uint8) for field in self.fields]
        offsets = self._offsets[numbers].tolist()
        order = np.argsort(offsets)
        with self._lock:  # announced together, a disk reads them in two thirds of the time
            for i in order:
                os.posix_fadvise(self._opened().fileno(), offsets[i], self._size,
                                 os.POSIX_FADV_WILLNEED)
        for i in order:
            with self._lock:
                content = os.pread(self._opened().fileno(), self._size, offsets[i])
            if len(content) < self._size:
                raise OSError('the file was cut short')
            record = np.frombuffer(content, np.uint64)
            if np.add.reduce(record) != self._sums[numbers[i]]:
                raise OSError('image {} is not as it was written'.format(numbers[i]))
            for span, column in zip(self._spans, columns):
                column[i] = record.view(np.uint8)[span]
        return columns

    def to_disk(self):
        """Writes all to the disk, so that the next read comes from there; raises CacheLost."""
        began = time.perf_counter()
        with self._closing_on_errors('written'), self._lock:
            os.fsync(self._opened().fileno())
            os.posix_fadvise(self._opened().fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.seconds_writing += time.perf_counter() - began


def room(folder, cache_gb=None, memory_bytes=None, freed=None):
    """Returns the bytes of (memory, disk) that a store may take once the Store `freed` is closed.

    A folder that is gone has no room. cache_gb: GB of disk at most. memory_bytes: of memory; None:
    MEMORY_SHARE of the available.
    """
    memory, disk = available_bytes(), 0
    with contextlib.suppress(OSError):  # in a run of days, a folder may vanish: /tmp is cleaned
        disk = shutil.disk_usage(folder).free
    if isinstance(freed, FileStore):
        disk += freed.nbytes
    elif freed is not None:
        memory += freed.nbytes
    disk = DISK_SHARE * disk if cache_gb is None else min(cache_gb * GB, MOST_OF_DISK * disk)
    return int(MEMORY_SHARE * memory) if memory_bytes is None else memory_bytes, int(disk)


def no_room(size, memory, disk):
    """Returns the line that says that `size` bytes exceed those of memory and disk."""
    return ('the prefix cache would take {:.3g} GB; {:.3g} GB of memory and {:.3g} GB of disk are '
            'allowed'.format(size / GB, memory / GB, disk / GB))


def open_store(fields, num_images, folder, cache_gb=None, memory_bytes=None):
    """Returns a Store in memory if all images fit there, else in a file in `folder`.

    cache_gb, memory_bytes: as in room. Raises CacheLost if there is no room.
    """
    size, (memory, disk) = num_images * record_bytes(fields), room(folder, cache_gb, memory_bytes)
    if size <= memory:
        with contextlib.suppress(MemoryError):  # a limit on the process (ulimit -v) is narrower
            return MemoryStore(fields, num_images)
    if size <= disk:
        return FileStore(fields, num_images, folder)
    raise CacheLost(no_room(size, memory, disk))


def measured_rates(size, batch_size, folder=None):
    """Measures (reading, writing), ms a batch each, for records of `size` bytes.

    folder: of a file, which is read from the disk itself; None: in memory.
    Takes 0.1 s, on a slow disk the time to copy TRIAL_BYTES. Raises CacheLost.
    """
    count = min(batch_size, max(1, TRIAL_BYTES // (2 * size)))  # records at once
    batches = min(20, max(2, TRIAL_BYTES // (count * size)))
    rng, fields, images = np.random.RandomState(0), [Field((size,), np.uint8)], count * batches
    values = [np.tile(np.frombuffer(rng.bytes(size), np.uint8), (count, 1))]
    with MemoryStore(fields, images) if folder is None else (
            FileStore(fields, images, folder)) as store:
        for numbers in rng.permutation(images).reshape(batches, count):
            store.put(numbers, values)
        if folder is not None:
            store.to_disk()
        for numbers in rng.permutation(images).reshape(batches, count):
            store.get(numbers)
    scale = 1000 * batch_size / images
    return scale * store.seconds_reading, scale * store.seconds_writing


def check_cache_dir(path):
    """Raises UserError if --cache_dir is not a writable folder."""
    if not os.path.isdir(path):
        raise UserError("--cache_dir '{}' is no folder; give one that exists".format(path))
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError("--cache_dir '{}' cannot be written: {}".format(path, error.strerror))


def ahead(store, batches):
    """Generates store.get(numbers) for each of `batches`, (B,) int.

    A thread reads a file AHEAD batches ahead; it ends with this generator. From memory, `get` is
    faster than passing arrays between threads.
    """
    if isinstance(store, MemoryStore):
        yield from map(store.get, batches)
        return
    waiting = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        for numbers in batches:
            waiting.append(reader.submit(store.get, numbers))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
