"""The prefix cache of a run: what it would cost for each choice of tensors, and the steps of an
epoch, some of which fill it and others read it.

Takes the data set, the steps' maker and a choice of tensors; gives prices (CachePrice of
tensor_timings) and training steps. The cut is masked_step's, the rows are kept by prefix_cache.
"""

import numpy as np
import tensorflow as tf

import prefix_cache
from epoch import FILL, READ, Call, plain_calls
from prefix_cache import CacheLost, Row
from tensor_timings import CachePrice
from training_step import NUM_RESULTS, StepResult

TRIED_ROWS = (1 << 12, 1 << 18)  # bytes, whose reading and writing is measured
TYPICAL_RATES = {'* flops': 1e-7, '* elements': 1e-6}  # ms, of schemes that have no timing table


class PrefixCache:
    """Of one run. Call `attach` once, `begin` after each selection, then `calls` for each epoch.

    dataset: datasets.Dataset.
    folder: for a cache that does not fit into memory. cache_gb: see prefix_cache.room.
    memory_bytes: see prefix_cache.open_store.
    """

    def __init__(self, dataset, folder, cache_gb=None, memory_bytes=None):
        self.dataset = dataset
        self._folder, self._cache_gb, self._memory_bytes = folder, cache_gb, memory_bytes
        self._batch_size = int(dataset.train.element_spec[0].shape[0])
        self.cut = None  # of the tensors now in training: forward_graph.Cut
        self._maker = self._cut_step = self._store = self._view = None
        self._measured = {}  # whether on disk -> functions of _rates
        self._wait_ms = 0.0  # see waited
        self._totals = dict(cache_hits=0, cache_misses=0, cache_bytes=0, cache_bytes_written=0,
                            cache_bytes_read=0, cache_seconds_writing=0.0,
                            cache_seconds_reading=0.0)

    @property
    def totals(self):
        """name -> number, of the run so far; cache_bytes: the most that it took at once. Hits and
        misses are images that were read back, and that could not be.
        """
        totals, store = dict(self._totals), self._store
        if store is not None:
            totals['cache_bytes'] = max(totals['cache_bytes'], store.nbytes)
            for name in ('bytes_written', 'bytes_read', 'seconds_writing', 'seconds_reading'):
                totals['cache_' + name] += getattr(store, name)
        return totals

    @property
    def store(self):
        """The prefix_cache.Store of the tensors now in training, or None."""
        return self._store

    # ------------------------------------------------------------------------------ prices

    def priced(self, table, epoch, until):
        """The TensorTimings with the CachePrice of the epochs from `epoch` to `until` - 1."""
        share = fill_share(self.dataset, epoch, until)
        nbytes = np.where(np.isfinite(table.cut_bytes), table.cut_bytes, 0) + 4  # and the label
        memory, disk = prefix_cache.room(self._folder, self._cache_gb)
        if self._memory_bytes is not None:
            memory = self._memory_bytes
        elif isinstance(self._store, prefix_cache.MemoryStore):
            memory += self._store.nbytes  # goes before the next comes
        whole = nbytes * self.dataset.num_images
        read, write = [ms(nbytes) for ms in self._rates(False)]
        on_disk = np.isfinite(table.cut_bytes) & (whole > memory) & (whole <= disk)
        if on_disk.any():
            read, write = [np.where(on_disk, ms(nbytes), of_memory)
                           for ms, of_memory in zip(self._rates(True), (read, write))]
        read = read + self._wait_ms
        there_is_none = ~np.isfinite(table.cut_bytes) | (whole > max(memory, disk))
        return table._replace(cache=CachePrice(
            share, np.where(there_is_none, np.inf, read), np.where(there_is_none, np.inf, write)))

    def waited(self, wait_ms):
        """From now on a step that reads waits so long for its rows, and for Python, if they are as
        large as those now stored: of these, all that copying such rows does not explain.
        """
        if self.cut is not None and self._store is not None:
            on_disk = isinstance(self._store, prefix_cache.FileStore)
            self._wait_ms = max(0.0, wait_ms - float(self._rates(on_disk)[0](self.cut.nbytes + 4)))

    def _rates(self, on_disk):
        """(reading, writing): functions, bytes of a row -> ms a batch; measured once a run.

        Of a file, where all that does not fit into memory goes, rows come from the disk itself.
        """
        if on_disk not in self._measured:
            small, large = TRIED_ROWS
            try:
                found = [prefix_cache.measured_rates(
                    size, self._batch_size, self._folder if on_disk else None, on_disk)
                    for size in TRIED_ROWS]
            except CacheLost as error:
                print('the prefix cache stays in memory: {}'.format(error))
                found = [(np.inf, np.inf)] * 2

            def line(low, high):
                slope = max(0.0, (high - low) / (large - small)) if np.isfinite(high) else 0.0
                return lambda nbytes: low + slope * np.maximum(nbytes - small, 0)
            self._measured[on_disk] = [line(low, high) for low, high in zip(*found)]
        return self._measured[on_disk]

    # ------------------------------------------------------------------- of a choice of tensors

    def attach(self, maker):
        """maker: masked_step.StepMaker of the run's steps."""
        self._maker = maker

    def begin(self, step, timings=None):
        """Makes the cache for `step`, a MaskedStep, where it pays. Rows are kept where the tensors
        in training are those of the last call.

        timings: priced TensorTimings that `step` was chosen by, None for a fixed scheme.
        """
        if self._cut_step is not None and (self._cut_step.read.mask == step.mask).all():
            return
        self.end()
        if timings is not None and not timings.is_cached(step.mask):
            return
        cut = self._maker.cut_off(_bits(step.mask),
                                  TYPICAL_RATES if timings is None else timings.op_rates)
        if cut is not None and (timings is not None or cut.skipped_ms > 2 * self._rates(False)[0](
                cut.nbytes)):
            self.cut, self._cut_step, self._view = cut, self._maker.cached(step.mask, cut), None

    def end(self):
        """Frees the store and the functions."""
        self._close()
        self.cut = self._cut_step = None

    def describe(self, timings=None):
        """One line on the cache of the tensors now in training; timings: as of begin."""
        nbytes = self.cut.nbytes + 4  # and the label
        text = 'prefix cache: {:,.0f} kB an image, {:,.0f} MB in all'.format(
            nbytes / 1e3, nbytes * self.dataset.num_images / 1e6)
        if timings is None:
            return text
        share = timings.t_prefix[timings.deepest(self._cut_step.read.mask)] / timings.t_fp
        return text + '; {:.0f} % of the forward pass read back in {:.0f} % of the steps'.format(
            100 * share, 100 * (1 - timings.cache.fill_share))

    def _close(self):
        self._totals = self.totals
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _open(self, view):
        """An empty store for images in `view`."""
        self._close()
        rows = [Row(tuple(spec.shape[1:]), spec.dtype.as_numpy_dtype)
                for spec in self._cut_step.specs] + [Row((), np.int32)]
        self._view = view
        self._store, place = prefix_cache.open_store(rows, self.dataset.num_images, self._folder,
                                                     self._cache_gb, self._memory_bytes)
        if self._store is None:
            self._lose(place)

    def _lose(self, reason):
        print('without the prefix cache until the next selection: {}'.format(reason))
        self.end()

    # ------------------------------------------------------------------------------- the steps

    def calls(self, step, epoch):
        """Generator of the Calls of one epoch: of `step` where there is no cache, or no longer."""
        numbers, view = self.dataset.order(epoch), self.dataset.view(epoch)
        if self._cut_step is not None and view != self._view:
            self._open(view)
        done = 0
        if self._store is not None:
            stored = self._store.has(numbers)
            rows = self._rows(numbers[stored])
            images = iter(self.dataset.batches(numbers[~stored], view))
            for row, there in zip(numbers, stored):
                call = self._reading(row, rows) if there else self._filling(row, images)
                if call is None:
                    break
                yield call
                done += 1
            self._add_left_over(view, len(numbers))
        if done < len(numbers):
            yield from plain_calls(step, self.dataset.batches(numbers[done:], view))

    def _rows(self, numbers):
        """Generator of the stored tensors of each batch; from a file it reads ahead."""
        if isinstance(self._store, prefix_cache.FileStore):
            return prefix_cache.ahead(self._store, numbers)
        return map(self._store.get, numbers)

    def _reading(self, row, rows):
        """Call; None where the cache is lost."""
        if self._store is None:  # what was read ahead is of no use then
            return None
        try:
            *tensors, labels = [tf.constant(array) for array in next(rows)]
        except CacheLost as error:
            self._lose(error)
            return None
        self._totals['cache_hits'] += len(row)
        read = self._cut_step.read
        return Call(READ, lambda: read(tensors, labels), read, len(row))

    def _filling(self, row, batches):
        """Call; None where the cache is lost."""
        if self._store is None:
            return None
        images, labels = next(batches)
        fill = self._cut_step.fill
        self._totals['cache_misses'] += len(row)

        def run():
            results = fill(images, labels)
            self._put(row, results[NUM_RESULTS:] + [labels])
            return StepResult(*results[:NUM_RESULTS])
        return Call(FILL, run, fill, len(row))

    def _put(self, numbers, tensors):
        try:
            self._store.put(numbers, [tensor.numpy()[:len(numbers)] for tensor in tensors])
        except CacheLost as error:
            self._lose(error)

    def _add_left_over(self, view, steps):
        """Stores the images that were in no batch of a whole epoch: later ones have them."""
        if self._store is not None:
            left = left_over(self._store.has(np.arange(self.dataset.num_images)[:, None]), steps,
                             self._batch_size)
            padded = np.resize(left, (min(len(left), 1), self._batch_size))
            for images, labels in self.dataset.batches(padded, view):
                self._put(left, list(self._cut_step.prefix(images, labels)) + [labels])


def left_over(stored, steps, batch_size):
    """Numbers of the images that an epoch of all full batches did not store; none otherwise."""
    left = np.flatnonzero(~stored)
    whole = steps == len(stored) // batch_size
    return left if whole and len(left) < batch_size else left[:0]


def fill_share(dataset, epoch, until):
    """Share of the steps from `epoch` to `until` - 1 that compute what the others read back.

    Counted in the very order of these epochs: with --steps_per_epoch each has other images, and a
    batch is read whole or computed whole.
    """
    stored, computed, steps, view = np.zeros(dataset.num_images, bool), 0, 0, None
    for number in range(epoch, until):
        order = dataset.order(number)
        if dataset.view(number) != view:
            stored[:], view = False, dataset.view(number)
        missing = ~stored[order].all(axis=1)
        stored[order[missing]] = True
        stored[left_over(stored, len(order), order.shape[1])] = True
        computed, steps = computed + missing.sum(), steps + len(missing)
    return float(computed / steps)


def _bits(mask):
    return sum(1 << int(k) for k in np.flatnonzero(mask))
