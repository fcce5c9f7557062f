"""The store of the prefix cache: what the frozen layers give for each training image.

Between two selections the layers nearest the input are frozen: an unchanged image gives the same
activations at the cut in each epoch. The first epoch puts them here, one row an image, by its
number; later epochs get them instead of decoding the image and running those layers. A store that
fails closes, frees all it held and says why in one line (CacheLost): the caller computes on.
"""

import collections
import concurrent.futures
import contextlib
import math
import os
import shutil
import tempfile
import threading
import time
from typing import Any, NamedTuple, Tuple

import numpy as np

from elastic.command_line import UserError
from elastic.device.host import MEMORY_SHARE, available_bytes

GB = 10 ** 9
DISK_SHARE = 0.5  # of the free disk, where --cache_gb does not say
MOST_OF_DISK = 0.9  # of it, whatever --cache_gb says: logs and checkpoints go there too
TRIAL_BYTES = 64 * 10 ** 6  # written and read to measure rates: more than processors' caches hold


class CacheLost(Exception):
    """The store could not be opened, written or read: one line, what failed and why."""


class Row(NamedTuple):
    """One tensor of what is stored of each image."""
    shape: Tuple[int, ...]  # without the batch; () for the label
    dtype: Any  # NumPy's, or TensorFlow's bfloat16 in NumPy

    @property
    def nbytes(self):
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def row_bytes(rows):
    """Bytes that one image takes: whole words of 8, of which FileStore keeps the sum."""
    return 8 * -(-sum(row.nbytes for row in rows) // 8)


class Store(contextlib.AbstractContextManager):
    """Rows by number of the training image. One thread may get while another puts.

    rows: Row of each tensor, in the order of `put` and `get`; num_images: numbers are below it.
    """

    def __init__(self, rows, num_images, held):
        self.rows, self.bytes_written, self.bytes_read = list(rows), 0, 0
        self.seconds_writing = self.seconds_reading = 0.0
        self._stored, self._held = np.zeros(num_images, bool), held  # arrays, or the file
        self._lock = threading.Lock()  # a read that fails closes what another thread may write to

    def __exit__(self, *_):
        self.close()

    def __len__(self):
        """Images stored."""
        return int(np.count_nonzero(self._stored))

    @property
    def stored(self):
        """(num_images,) bool: whose rows are stored."""
        return self._stored.copy()

    @property
    def nbytes(self):
        """Bytes that the stored rows take."""
        return len(self) * row_bytes(self.rows)

    def has(self, numbers):
        """Whether all are stored: (B,) int -> bool, (steps, B) int -> (steps,) bool."""
        return self._stored[np.asarray(numbers)].all(axis=-1)

    def put(self, numbers, tensors):
        """Stores rows; one that is stored already stays as it is, for flash wears. CacheLost.

        numbers: (B,) int, all different; tensors: (B,) + shape of each Row, of its dtype.
        """
        began, numbers = time.perf_counter(), np.asarray(numbers)
        columns = []  # (B, bytes) uint8 each: NumPy then need not know bfloat16
        for row, tensor in zip(self.rows, tensors):
            tensor = np.ascontiguousarray(tensor)
            assert tensor.shape == numbers.shape + tuple(row.shape), (tensor.shape, row)
            assert tensor.dtype == row.dtype, (tensor.dtype, row)
            columns.append(tensor.reshape(len(numbers), -1).view(np.uint8))
        new = ~self._stored[numbers]
        if not new.all():
            numbers, columns = numbers[new], [column[new] for column in columns]
        with self._closing_on_errors('written'):
            self._write(numbers, columns)
        with self._lock:
            self._stored[numbers] = self._held is not None
        self.seconds_writing += time.perf_counter() - began

    def get(self, numbers):
        """Fresh arrays (B,) + shape of each Row for `numbers`, (B,) int, all stored. CacheLost."""
        began, numbers = time.perf_counter(), np.asarray(numbers)
        if not self.has(numbers):
            self._opened()
            raise KeyError('not all stored: {}'.format(numbers))
        with self._closing_on_errors('read'):
            columns = self._read(numbers)
        self.bytes_read += sum(column.nbytes for column in columns)
        self.seconds_reading += time.perf_counter() - began
        return [column.view(row.dtype).reshape(numbers.shape + tuple(row.shape))
                for row, column in zip(self.rows, columns)]

    def close(self):
        """Frees all it held: `has` is False from now on, `put` and `get` raise CacheLost.

        At any time, from any thread, and more than once.
        """
        with self._lock:
            held, self._held = self._held, None
            self._stored[:] = False
            if hasattr(held, 'close'):
                with contextlib.suppress(OSError):  # of rows that nobody reads any more
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
    """Rows in memory, which the system gives page by page as they are first written."""
    place = 'in memory'

    def __init__(self, rows, num_images):
        super().__init__(rows, num_images,
                         [np.empty((num_images, row.nbytes), np.uint8) for row in rows])

    def _write(self, numbers, columns):
        for array, column in zip(self._opened(), columns):
            array[numbers] = column
            self.bytes_written += column.nbytes

    def _read(self, numbers):
        return [np.take(array, numbers, axis=0) for array in self._opened()]


class FileStore(Store):
    """Rows in a file in `folder`, one contiguous record each, in the order in which they came.

    In that order and not by number: a card is then written in one run, and a file system without
    sparse files writes no gaps. The file has no name (O_TMPFILE), or loses it while it is empty:
    the system frees it with this process however that ends, kill -9 included; nothing can remain.
    """

    def __init__(self, rows, num_images, folder):
        super().__init__(rows, num_images, None)
        self.place, self._size = 'in {}'.format(folder), row_bytes(rows)
        with self._closing_on_errors('opened'):
            self._held = tempfile.TemporaryFile(buffering=0, prefix='prefix_cache_', dir=folder)
        ends = np.cumsum([0] + [row.nbytes for row in rows]).tolist()
        self._spans = [slice(*span) for span in zip(ends, ends[1:])]  # of each tensor in a record
        self._offsets, self._end = np.zeros(num_images, np.int64), 0
        # A write that was reported as done can be lost later (a quota on a network disk, a worn
        # card) and zeros read in its place: a record must come back with the sum that it had.
        self._sums = np.zeros(num_images, np.uint64)

    def _write(self, numbers, columns):
        records = np.zeros((len(numbers), self._size), np.uint8)
        for span, column in zip(self._spans, columns):
            records[:, span] = column
        content, done = records.reshape(-1), 0
        while done < len(content):  # a full disk takes a part, and says why at the next call
            with self._lock:
                written = os.pwrite(self._opened().fileno(), content[done:], self._end + done)
            done += written
            self.bytes_written += written
        self._offsets[numbers] = self._end + self._size * np.arange(len(numbers))
        self._sums[numbers] = records.view(np.uint64).sum(axis=1)
        self._end += len(content)

    def _read(self, numbers):
        columns = [np.empty((len(numbers), row.nbytes), np.uint8) for row in self.rows]
        offsets = self._offsets[numbers].tolist()
        order = np.argsort(offsets)
        with self._lock:  # announced together, they come from a disk in two thirds of the time
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
        """Waits until all is on the disk, and has the next read come from there. CacheLost."""
        began = time.perf_counter()
        with self._closing_on_errors('written'), self._lock:
            os.fsync(self._opened().fileno())
            os.posix_fadvise(self._opened().fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.seconds_writing += time.perf_counter() - began


def room(folder, cache_gb=None):
    """(bytes of memory, bytes of disk) that a store may take; cache_gb: GB of disk at most."""
    free = shutil.disk_usage(folder).free
    disk = DISK_SHARE * free if cache_gb is None else min(cache_gb * GB, MOST_OF_DISK * free)
    return int(MEMORY_SHARE * available_bytes()), int(disk)


def room_without(store, folder, cache_gb=None):
    """As room, with what the Store now takes, or None, given back."""
    memory, disk = room(folder, cache_gb)
    if isinstance(store, MemoryStore):
        memory += int(MEMORY_SHARE * store.nbytes)
    elif store is not None and cache_gb is None:
        disk += int(DISK_SHARE * store.nbytes)
    elif store is not None:
        disk = int(min(cache_gb * GB, disk + MOST_OF_DISK * store.nbytes))
    return memory, disk


def no_room(size, memory, disk):
    """One line on a cache of `size` bytes, where these bytes may be taken."""
    return ('the prefix cache would take {:.3g} GB; {:.3g} GB of memory and {:.3g} GB of disk are '
            'allowed'.format(size / GB, memory / GB, disk / GB))


def open_store(rows, num_images, folder, cache_gb=None, memory_bytes=None):
    """(Store, where it is) or (None, why there is none), the latter in one line.

    In memory where all images fit there, else in a file in `folder` where they fit there.
    memory_bytes: that may be taken (None: MEMORY_SHARE of what is available).
    """
    size = num_images * row_bytes(rows)
    try:
        memory, disk = room(folder, cache_gb)
        memory = memory if memory_bytes is None else memory_bytes
        if size <= memory:
            with contextlib.suppress(MemoryError):  # a limit on the process (ulimit -v) is narrower
                return MemoryStore(rows, num_images), MemoryStore.place
        if size <= disk:
            store = FileStore(rows, num_images, folder)
            return store, store.place
    except (CacheLost, OSError) as error:
        return None, str(error)
    return None, no_room(size, memory, disk)


def measured_rates(size, batch_size, folder=None, from_disk=False):
    """(reading, writing) ms a batch of rows of `size` bytes: in memory, or in a file in `folder`.

    from_disk: rows come from the disk itself, as those of a file do that is larger than the memory
    left beside it; else from the system's copy in memory. Takes 0.1 s, on a slow disk the time of
    TRIAL_BYTES. Raises CacheLost.
    """
    count = min(batch_size, max(1, TRIAL_BYTES // (2 * size)))  # rows at once
    batches = min(20, max(2, TRIAL_BYTES // (count * size)))
    rng, rows, images = np.random.RandomState(0), [Row((size,), np.uint8)], count * batches
    values = [np.tile(np.frombuffer(rng.bytes(size), np.uint8), (count, 1))]
    with MemoryStore(rows, images) if folder is None else FileStore(rows, images, folder) as store:
        for numbers in rng.permutation(images).reshape(batches, count):
            store.put(numbers, values)
        if from_disk:
            store.to_disk()
        for numbers in rng.permutation(images).reshape(batches, count):
            store.get(numbers)
    scale = 1000 * batch_size / images
    return scale * store.seconds_reading, scale * store.seconds_writing


def check_cache_flags(cache_dir=None, cache_gb=None):
    """UserError for a --cache_dir that is no folder or cannot be written, a --cache_gb of none."""
    if cache_gb is not None and not (math.isfinite(cache_gb) and cache_gb > 0):
        raise UserError('--cache_gb {:g} is not a number above 0'.format(cache_gb))
    if cache_dir is None:
        return
    if not os.path.isdir(cache_dir):
        raise UserError("--cache_dir '{}' is no folder; give one that exists".format(cache_dir))
    try:
        tempfile.TemporaryFile(dir=cache_dir).close()
    except OSError as error:
        raise UserError("--cache_dir '{}' cannot be written: {}".format(cache_dir, error.strerror))


def ahead(store, batches, depth=2):
    """Yields store.get(numbers) for each of `batches`, (B,) int each, `depth` of them read ahead.

    For a file; from memory, `get` itself is faster than handing arrays from thread to thread. What
    `get` raises is raised here in place of the batch. The thread that reads ends with this
    generator: when all is read, or when it is closed.
    """
    waiting = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        try:
            for numbers in batches:
                waiting.append(reader.submit(store.get, numbers))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for batch in waiting:
                batch.cancel()
