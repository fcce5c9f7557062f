"""The prefix cache of a run: the steps of an epoch, some of which fill it and others read it.

Takes the data set, the steps' maker and a choice of tensors; gives training steps, and what copying
rows takes, of which cache_costs.py makes prices. Rows are kept while the cut stays where it is; a
cache at another cut is filled from the images.
"""

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic.cache import stores
from elastic.cache.copy_costs import RowCosts
from elastic.cache.stores import CacheLost, Row
from elastic.selection.cache_costs import CachePrices, left_over
from elastic.steps.epoch import FILL, READ, Call, plain_calls
from elastic.steps.prefix_cut import READ_MS, ROUNDING
from elastic.steps.prefix_steps import PrefixSteps
from elastic.steps.training_step import NUM_RESULTS, StepResult

TYPICAL_RATES = {'* flops': 1e-7, '* elements': 1e-6}  # ms, of schemes that have no timing table


class PrefixCache(RowCosts):
    """Of one run. Call `attach` once, `begin` after each selection, then `calls` for each epoch.

    dataset: datasets.Dataset. folder, cache_gb, memory_bytes: see RowCosts. exact: whether bits are
    expected to be those of a run without it; it says so where they may not be.
    """

    def __init__(self, dataset, folder, cache_gb=None, memory_bytes=None, exact=False):
        super().__init__(dataset.num_images, int(dataset.train.element_spec[0].shape[0]), folder,
                         cache_gb, memory_bytes)
        self.dataset, self.exact = dataset, exact
        self.prefixes = self.view = None  # see attach; of the images whose rows are stored
        self.skipped = None  # share of the forward pass that a step which reads need not run
        self._cut_step = None
        self.chain_cuts = {}  # of cache_prices: for each deepest tensor, the same in the whole run
        self._apart = None  # see _rows_apart
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
        """The stores.Store of the tensors now in training, or None."""
        return self._store

    @property
    def stored(self):
        """(images,) bool: whose rows are in the store."""
        return self._store.stored

    @property
    def serves(self):
        """(N,) bool: tensors that can be trained with the present cut and its rows."""
        return self.prefixes.serves(self.cut) | self._cut_step.read.mask

    # ------------------------------------------------------------------------------ prices

    def priced(self, table, epoch, until):
        """The TensorTimings with the CachePrice of the epochs from `epoch` to `until` - 1."""
        return CachePrices(self, table, epoch, until).table

    # ------------------------------------------------------------------- of a choice of tensors

    def attach(self, maker):
        """maker: masked_step.StepMaker of the run's steps."""
        self.prefixes = PrefixSteps(maker)

    def begin(self, step, timings=None):
        """Makes the cache for `step`, a MaskedStep, where it pays. Rows are kept where the cut is.

        timings: TensorTimings that `step` was chosen by, with the price of its cut, see
        cache_costs.CachePrices. None for a fixed scheme, of which they are kept for the same mask.
        """
        same = self._cut_step is not None and (self._cut_step.read.mask == step.mask).all()
        if timings is None:
            if not same:
                self._cut_off(step)
            return
        price, k = timings.cache, timings.deepest(step.mask)
        assert price.cut is None or price.serves[step.mask].all()
        if price.cut is None or not timings.is_cached(step.mask):
            self.end()
        elif price.cut != self.cut:
            self._start(price.cut, step.mask)
        elif not same:
            self._cut_step = self.prefixes.cached(step.mask, self.cut)
        self.skipped = float(price.skipped[k]) if self.cut is not None else None

    def _cut_off(self, step):
        """Starts a cache for a step of no known price, where it is sure to pay and rows do not
        depend on their neighbours, as the profile finds out for steps that have a price.
        """
        self.end()
        cut = self.prefixes.cut_off(step.mask, TYPICAL_RATES)
        if cut is None or cut.skipped_ms <= 2 * READ_MS * self._batch_size * cut.nbytes:
            return
        if self._rows_apart() > ROUNDING:
            print('without the prefix cache: what an image gives depends on others of its batch')
        else:
            self._start(cut, step.mask)

    def _rows_apart(self):
        """PrefixSteps.rows_apart on the first batch; measured once a run."""
        if self._apart is None:
            self._apart = self.prefixes.rows_apart(*next(iter(self.dataset.batches(
                self.dataset.order(1)[:1], self.dataset.view(1)))))
        return self._apart

    def _start(self, cut, mask):
        if self.exact and self._rows_apart() > 0:
            print('what an image gives differs by up to {:.1g} of the largest value beside other '
                  'images here: with the prefix cache, this run matches one without it to rounding '
                  'only'.format(self._rows_apart()))
            self.exact = False  # said once
        self.end()
        self.cut, self._cut_step, self.view = cut, self.prefixes.cached(mask, cut), None

    def end(self):
        """Frees the store and the functions."""
        self._close()
        self.cut = self._cut_step = self.skipped = None

    def describe(self, timings=None):
        """One line on the cache of the tensors now in training; timings: as of begin."""
        nbytes = self.cut.nbytes + 4  # and the label
        text = 'prefix cache: {:,.0f} kB an image, {:,.0f} MB in all'.format(
            nbytes / 1e3, nbytes * self.dataset.num_images / 1e6)
        if timings is None:
            return text
        return text + '; {:.0f} % of the forward pass read back in {:.0f} % of the steps'.format(
            100 * self.skipped, 100 * (1 - timings.fill_share(self._cut_step.read.mask)))

    def _close(self):
        if self._store is not None:
            self._totals = self.totals
            self._store.close()
            self._store = None

    def _open(self, view):
        """An empty store for images in `view`."""
        self._close()
        self.view = view
        rows = [Row(tuple(spec.shape[1:]), spec.dtype.as_numpy_dtype)
                for spec in self._cut_step.specs]
        self._store, place = stores.open_store(rows + [Row((), np.int32)], self.dataset.num_images,
                                               self._folder, self._cache_gb, self._memory_bytes)
        if self._store is None:
            self._lose(place)

    # ------------------------------------------------------------------------- checkpoints

    def state(self):
        """What `restore` takes: which rows are there; not the rows, which it computes again."""
        rows = None
        if self.cut is not None:
            rows = dict(cut=self.cut, view=self.view,
                        stored=None if self._store is None else self.stored)
        return dict(self._costs(), apart=self._apart, exact=self.exact, skipped=self.skipped,
                    totals=self.totals, rows=rows, graph=self.prefixes.fingerprint)

    def restore(self, state, step):
        """Goes on from `state`, None where that run had no cache, with `step`, the MaskedStep in
        training.
        """
        if state is None:
            return
        self._restore_costs(state)
        self._apart, self.exact, self._totals = state['apart'], state['exact'], state['totals']
        if state['rows'] is None:
            return
        if state['graph'] != self.prefixes.fingerprint:
            self._lose('this software makes another graph of the network')
            return
        rows, self.skipped = state['rows'], state['skipped']
        self.cut, self._cut_step = rows['cut'], self.prefixes.cached(step.mask, rows['cut'])
        self._cut_step.fill.again = self._cut_step.read.again = True
        if rows['stored'] is not None:
            self._open(rows['view'])
            if self._store is not None:
                self._compute(rows)

    def _compute(self, rows):
        """Stores again, from their images, the rows that were stored."""
        there = np.flatnonzero(rows['stored'])
        numbers = np.resize(there, (-(-len(there) // self._batch_size), self._batch_size))
        batches = self.dataset.batches(numbers, rows['view'])
        for row, (inputs, labels) in zip(numbers, tqdm(
                batches, 'prefix cache', len(numbers), False, unit='batch', disable=None)):
            put_back = np.unique(row, return_index=True)
            tensors = [tensor.numpy()[put_back[1]]
                       for tensor in list(self._cut_step.prefix(inputs, labels)) + [labels]]
            try:
                self._store.put(put_back[0], tensors)
            except CacheLost as error:
                self._lose(error)
                return

    def _lose(self, reason):
        print('without the prefix cache until the next selection: {}'.format(reason))
        self.end()

    # ------------------------------------------------------------------------------- the steps

    def calls(self, step, epoch, done=0):
        """Generator of the Calls of one epoch, but for the `done` first: of `step` where there is
        no cache, or no longer.
        """
        numbers, view = self.dataset.order(epoch), self.dataset.view(epoch)
        steps, numbers = len(numbers), numbers[done:]
        if self._cut_step is not None and view != self.view:
            self._open(view)
        while self._store is not None and len(numbers):
            for call in self._calls_with_rows(numbers, view):
                yield call
                numbers = numbers[1:]
        self._add_left_over(view, steps)
        if len(numbers):
            yield from plain_calls(step, self.dataset.batches(numbers, view))

    def _calls_with_rows(self, numbers, view):
        """Generator of the Calls of these batches, (steps, B) int; ends where rows are lost."""
        stored = self._store.has(numbers)
        rows = stored_of(self._store, numbers[stored])
        images = iter(self.dataset.batches(numbers[~stored], view))
        for row, there in zip(numbers, stored):
            if self._store is None:  # what was read ahead is of no use then
                return
            call = self._reading(row, rows) if there else self._filling(row, images)
            if call is None:
                return
            yield call

    def _reading(self, row, rows):
        """Call; None where the cache is lost."""
        try:
            *tensors, labels = map(tf.constant, next(rows))
        except CacheLost as error:
            self._lose(error)
            return None
        self._totals['cache_hits'] += len(row)
        read = self._cut_step.read
        return Call(READ, lambda: read(tensors, labels), read, len(row))

    def _filling(self, row, images):
        """Call."""
        self._totals['cache_misses'] += len(row)
        (inputs, labels), fill = next(images), self._cut_step.fill

        def run():
            results = fill(inputs, labels)
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
            left = left_over(self.stored, steps, self._batch_size)
            padded = np.resize(left, (min(len(left), 1), self._batch_size))
            for inputs, labels in self.dataset.batches(padded, view):
                self._put(left, list(self._cut_step.prefix(inputs, labels)) + [labels])


def stored_of(store, numbers):
    """Generator of the stored tensors of each batch; from a file it reads ahead."""
    if isinstance(store, stores.FileStore):
        return stores.ahead(store, numbers)
    return map(store.get, numbers)
