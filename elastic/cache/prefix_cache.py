"""Runs the prefix cache: steps of one epoch fill it, and steps of later epochs read it.

A store keeps the activations of each image at the cut of prefix_steps.py, while the cut stays.
"""

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic.cache import stores
from elastic.cache.copy_times import CopyTimes
from elastic.cache.stores import CacheLost, Field
from elastic.steps.epoch import FILL, READ, Call, plain_calls
from elastic.steps.prefix_cut import READ_MS, ROUNDING
from elastic.steps.prefix_steps import PrefixSteps
from elastic.steps.step_graph import TYPICAL_RATES
from elastic.steps.training_step import NUM_RESULTS, StepResult


class NoCache:
    """Stands for the PrefixCache of a run that has none: every step computes all of it."""
    used, totals = False, {}

    def __init__(self, dataset):
        self.dataset = dataset

    def attach(self, maker):
        """Cuts the steps of this masked_step.StepMaker from now on."""

    def begin(self, step, timings=None):
        """Prepares the cache for a MaskedStep."""

    def end(self):
        """Frees what it holds."""

    def lines(self, timings=None):
        """Returns the lines that describe the cache at the present cut; timings: as in begin."""
        return []

    def state(self):
        """Returns the tree that `restore` takes."""

    def restore(self, state, step):
        """Resumes from `state`."""

    def calls(self, step, epoch, done=0):
        """Returns an iterator over the Calls of an epoch, without its first `done`."""
        numbers, view = self.dataset.order(epoch)[done:], self.dataset.view(epoch)
        return plain_calls(step, self.dataset.batches(numbers, view))


class PrefixCache(CopyTimes):
    """Caches for one run: call `attach` once, `begin` after each selection, `calls` each epoch.

    dataset: datasets.Dataset. folder, cache_gb, memory_bytes, measured: as in CopyTimes.
    exact: whether the run should give the bits of one without a cache; it prints if it may not.
    """
    used = True

    def __init__(self, dataset, folder, cache_gb=None, memory_bytes=None, exact=False,
                 measured=None):
        super().__init__(dataset.num_images, int(dataset.train.element_spec[0].shape[0]), folder,
                         cache_gb, memory_bytes, measured)
        self.dataset, self.exact = dataset, exact
        self.prefixes = None  # PrefixSteps, once attached
        self.view = None      # dataset.view of the cached images
        self.skipped = None   # share of the forward pass that a reading step skips
        self.chain_cuts = {}  # of CacheOffers, the same in the whole run
        self._cut_step = self._apart = None
        self._computed = []   # image numbers of each batch in the store, in the order of computing
        self._totals = dict(cache_hits=0, cache_misses=0, cache_bytes=0, cache_bytes_written=0,
                            cache_bytes_read=0, cache_seconds_writing=0.0,
                            cache_seconds_reading=0.0)

    @property
    def totals(self):
        """Returns name -> number, over the run so far.

        Hits are images read, misses are images computed. cache_bytes is the most held at once.
        """
        totals, store = dict(self._totals), self.store
        if store is not None:
            totals['cache_bytes'] = max(totals['cache_bytes'], store.nbytes)
            for name in ('bytes_written', 'bytes_read', 'seconds_writing', 'seconds_reading'):
                totals['cache_' + name] += getattr(store, name)
        return totals

    @property
    def trainable(self):
        """Returns the (N,) bool of the tensors that can be trained at the present cut."""
        return self.prefixes.trainable_at(self.cut) | self._cut_step.read.mask

    # ------------------------------------------------------------------- of a choice of tensors

    def attach(self, maker):
        """Cuts the steps of this masked_step.StepMaker from now on."""
        self.prefixes = PrefixSteps(maker)

    def begin(self, step, timings=None):
        """Prepares the cache for the MaskedStep `step`, if a cache pays.

        timings: TensorTimings with the CacheCost that `step` was chosen by; None: a fixed scheme.
        """
        same = self.cut is not None and (self._cut_step.read.mask == step.mask).all()
        if timings is None:
            if not same:
                self._begin_without_costs(step)
            return
        cost = timings.cache
        if cost.cut is None or not timings.is_cached(step.mask):
            self.end()
            return
        assert cost.trainable[step.mask].all()
        if cost.cut != self.cut:
            self._start(cost.cut, step.mask)
        elif not same:
            self._cut_step = self.prefixes.cached(step.mask, self.cut)
        self.skipped = float(cost.skipped[timings.deepest(step.mask)])

    def _begin_without_costs(self, step):
        """Starts a cache if it is sure to pay and, as the profiler checks, no images interact."""
        self.end()
        cut = self.prefixes.cut_off(step.mask, TYPICAL_RATES)
        if cut is None or cut.skipped_ms <= 2 * READ_MS * self._batch_size * cut.nbytes:
            return
        if self._images_apart() > ROUNDING:
            print('without the prefix cache: what an image gives depends on others of its batch')
        else:
            self._start(cut, step.mask)

    def _images_apart(self):
        """Returns PrefixSteps.rows_apart of the first batch, computed once a run."""
        if self._apart is None:
            self._apart = self.prefixes.rows_apart(*next(iter(self.dataset.batches(
                self.dataset.order(1)[:1], self.dataset.view(1)))))
        return self._apart

    def _start(self, cut, mask):
        if self.exact and self._images_apart() > 0:
            print('what an image gives differs by up to {:.1g} of the largest value beside other '
                  'images here: with the prefix cache, this run matches one without it to rounding '
                  'only'.format(self._images_apart()))
            self.exact = False  # print it once
        self.end()
        self.cut, self._cut_step, self.view = cut, self.prefixes.cached(mask, cut), None

    def end(self):
        """Frees the store and the functions."""
        self._close()
        self.cut = self._cut_step = self.skipped = None

    def lines(self, timings=None):
        """Returns the lines that describe the cache at the present cut; timings: as in begin."""
        if self.cut is None:
            why = None if timings is None else self.too_large(timings.cut_bytes)
            return [] if why is None else ['without the prefix cache: ' + why]
        nbytes = self.cut.nbytes + 4  # and the label
        text = 'prefix cache: {:,.0f} kB an image, {:,.0f} MB in all'.format(
            nbytes / 1e3, nbytes * self.dataset.num_images / 1e6)
        if timings is not None:
            text += '; {:.0f} % of the forward pass read back in {:.0f} % of the steps'.format(
                100 * self.skipped, 100 * (1 - timings.fill_share(self._cut_step.read.mask)))
        return [text]

    def _open(self, view):
        """Opens an empty store for images with the augmentation `view`."""
        self._close()
        self.view, self._computed = view, []
        fields = [Field(tuple(spec.shape[1:]), spec.dtype.as_numpy_dtype)
                  for spec in self._cut_step.specs] + [Field((), np.int32)]
        try:
            self.store = stores.open_store(fields, self.dataset.num_images, self._folder,
                                           self._cache_gb, self._memory_bytes)
        except CacheLost as error:
            self._lose(error)

    def _close(self):
        if self.store is not None:
            self._totals = self.totals
            self.store.close()
            self.store = None

    def _lose(self, reason):
        print('without the prefix cache until the next selection: {}'.format(reason))
        self.end()

    # ------------------------------------------------------------------------- checkpoints

    def state(self):
        """Returns the state for `restore`: which images are cached, without their activations."""
        cached = None if self.cut is None else dict(
            cut=self.cut, view=self.view,
            computed=None if self.store is None else np.concatenate(
                [np.zeros(0, int)] + self._computed))
        return dict(measured=self._measured, wait_ms=self._wait_ms, apart=self._apart,
                    exact=self.exact, skipped=self.skipped, totals=self.totals, cached=cached,
                    graph=self.prefixes.fingerprint)

    def restore(self, state, step):
        """Resumes from `state`, None if that run had no cache; computes its activations again.

        The batches are the same: on some processors, an image's rounding depends on its batch.
        """
        if state is None:
            return
        self._measured, self._wait_ms = state['measured'], state['wait_ms']
        self._apart, self.exact, self._totals = state['apart'], state['exact'], state['totals']
        cached = state['cached']
        if cached is None:
            return
        if state['graph'] != self.prefixes.fingerprint:
            self._lose('this software makes another graph of the network')
            return
        self.skipped, self.cut = state['skipped'], cached['cut']
        self._cut_step = self.prefixes.cached(step.mask, self.cut)
        self._cut_step.fill.remade = self._cut_step.read.remade = True
        if cached['computed'] is not None:
            self._open(cached['view'])
        if self.store is not None:
            self._compute(cached['computed'])

    # ------------------------------------------------------------------------------- the steps

    def calls(self, step, epoch, done=0):
        """Generates the Calls of an epoch, without its first `done`; of `step` without a cache."""
        numbers, view = self.dataset.order(epoch), self.dataset.view(epoch)
        steps, numbers = len(numbers), numbers[done:]
        if self.cut is not None and view != self.view:
            self._open(view)
        for call in self._cached_calls(numbers) if self.store is not None else ():
            yield call
            numbers = numbers[1:]
        if self.store is not None:
            self._compute(left_over(self.store.stored, steps, self._batch_size))
        if len(numbers):
            yield from plain_calls(step, self.dataset.batches(numbers, view))

    def _cached_calls(self, numbers):
        """Generates the Calls of these batches, (steps, B) int, until the cache is lost."""
        stored = self.store.has(numbers)
        cached = stores.ahead(self.store, numbers[stored])
        images = iter(self.dataset.batches(numbers[~stored], self.view))
        for batch, read in zip(numbers, stored):
            if self.store is None:  # batches that were read ahead are then of no use
                return
            try:
                call = self._reading(*next(cached)) if read else self._filling(batch, *next(images))
            except CacheLost as error:
                self._lose(error)
                return
            yield call

    def _reading(self, *tensors):
        *tensors, labels = map(tf.constant, tensors)
        self._totals['cache_hits'] += len(labels)
        read = self._cut_step.read
        return Call(READ, lambda: read(tensors, labels), read)

    def _filling(self, numbers, inputs, labels):
        self._totals['cache_misses'] += len(numbers)
        fill = self._cut_step.fill

        def run():
            results = fill(inputs, labels)
            self._put(numbers, results[NUM_RESULTS:] + [labels])
            return StepResult(*results[:NUM_RESULTS])
        return Call(FILL, run, fill)

    def _compute(self, numbers):
        """Stores the activations of these images, (images,) int, without training on them."""
        size = self._batch_size
        batches = [numbers[i:i + size] for i in range(0, len(numbers), size)]
        whole = np.array([np.resize(batch, size) for batch in batches], int).reshape(-1, size)
        bar = tqdm(self.dataset.batches(whole, self.view), 'prefix cache', len(whole), False,
                   unit='batch', disable=None if len(whole) > 1 else True)
        for batch, (inputs, labels) in zip(batches, bar):
            if self.store is None:
                break
            self._put(batch, list(self._cut_step.prefix(inputs, labels)) + [labels])

    def _put(self, numbers, tensors):
        try:
            self.store.put(numbers, [tensor.numpy()[:len(numbers)] for tensor in tensors])
            self._computed.append(numbers)
        except CacheLost as error:
            self._lose(error)


def left_over(stored, steps, batch_size):
    """Returns the numbers of the images that a whole epoch left out of its full batches.

    stored: (images,) bool. A shorter epoch returns none.
    """
    left = np.flatnonzero(~stored)
    whole = steps == len(stored) // batch_size
    return left if whole and len(left) < batch_size else left[:0]


def fill_share(dataset, epoch, until, stored=None, view=None):
    """Returns the share of the steps from `epoch` to `until` - 1 that fill the cache.

    stored: (images,) bool, cached before, with the augmentation `view`; None: no image.
    With --steps_per_epoch each epoch has other images; a batch is read or computed as a whole.
    """
    stored = np.zeros(dataset.num_images, bool) if stored is None else stored.copy()
    computed, steps = 0, (until - epoch) * len(dataset.order(epoch))
    for number in range(epoch, until):
        if dataset.view(number) == view and stored.all():
            continue  # most epochs of a long run
        order = dataset.order(number)
        if dataset.view(number) != view:
            stored[:], view = False, dataset.view(number)
        missing = ~stored[order].all(axis=1)
        stored[order[missing]] = True
        stored[left_over(stored, len(order), order.shape[1])] = True
        computed += missing.sum()
    return float(computed / steps)
