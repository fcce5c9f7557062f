"""Times the steps of prefix_cache.py: plain ones, and those that fill or read a prefix cache.

They run as in train.py: epoch.run_epoch over the calls of a PrefixCache.
"""

import copy
import itertools
import os

import _bench
import _path
import numpy as np
from tqdm import tqdm

STORED = 16  # batches of distinct images
STEPS = 4    # of a sample; a sample of reading steps has STORED
CACHED = ('fill', 'read')


class Sampler:
    """Samples steps of each kind; a sample is the median ms of a few steps in one epoch.

    full, other: MaskedStep of all tensors, and of those chosen without a cache, or None.
    cached: PrefixCache of a data set with fixed augmentation, after `begin`.
    filling: PrefixCache of the same step, whose images are augmented again in each epoch.
    step: MaskedStep that both cut.
    from_disk: whether the file is read from the disk, not from the system's copy in memory.
    """

    def __init__(self, full, other, step, cached, filling, from_disk):
        self._data, self._step, self._from_disk = cached.dataset, step, from_disk
        self._cached, self._filling = cached, filling
        self.waits = {}
        epochs = itertools.count(1)
        self.samples = {'full': lambda: self._plain('full', full, next(epochs)),
                        'other': other and (lambda: self._plain('other', other, next(epochs)))}
        if cached.cut is None:
            self.samples['uncached'] = lambda: self._plain('uncached', step, next(epochs))
        else:
            self._ran('fill', cached.calls(step, next(epochs)), STORED)
            self.samples.update(fill=lambda: self._fill(next(epochs)),
                                read=lambda: self._read(next(epochs)))
        self.samples = {kind: sample for kind, sample in self.samples.items() if sample}

    def _ran(self, kind, calls, steps):
        from elastic.steps.epoch import run_epoch
        result = run_epoch(calls, steps, kind)
        assert result.kind == (kind if kind in CACHED else 'plain'), result.kind
        self.waits[kind] = result.wait_ms
        return float(np.median(result.step_ms))

    def _plain(self, kind, step, epoch):
        from elastic.steps.epoch import plain_calls
        numbers = self._data.order(epoch)[:STEPS]
        return self._ran(kind, plain_calls(step, self._data.batches(numbers, 1)), STEPS)

    def _fill(self, epoch):
        return self._ran('fill', self._filling.calls(self._step, epoch), STEPS)

    def _read(self, epoch):
        if self._from_disk:
            self._cached.store.to_disk()
        return self._ran('read', self._cached.calls(self._step, epoch), STORED)


def run_model(name, input_size, rhos, places, interval, rounds, seed, batch_size, cache_dir):
    """Returns the result of one network: a row for each place and each rho within reach."""
    prepared = _bench.prepare(name, input_size, seed, data='digits', batch_size=batch_size)
    from datasets import load_dataset
    from elastic.selection.cache_costs import CacheCosts
    from selection_solver_DP import smallest_rho
    maker = prepared.maker
    table, importance, loop = _bench.chosen_by(prepared)
    data = load_dataset('digits', input_size, prepared.batch_size, seed=seed, views='held',
                        interval=0, train_images=STORED * prepared.batch_size)
    full, rows, least = maker.step(prepared.everything), [], {}
    caches_in = {place: caches_of(data, maker, place, cache_dir) for place in places}
    for rho, place in tqdm(list(itertools.product(rhos, places)), desc=name, unit='row',
                           leave=False, disable=None):
        caches = caches_in[place]
        drift = loop.update(*prepared.batch)
        costs = CacheCosts(caches[0], loop.timings, 1, interval + 1)
        least.setdefault(place, float(costs.smallest_rho()))
        if rho >= costs.smallest_rho():
            rows.append(row_of(maker, loop, costs, importance, rho, caches, full, rounds,
                               place == 'disk'))
            rows[-1].update(rho=rho, place=place, drift=float(drift))
        for cache in caches:
            cache.end()
    return dict(_bench.machine(), model=name, input_size=input_size, interval=interval,
                batch_size=prepared.batch_size, tensors=prepared.num_tensors,
                smallest_rho=float(smallest_rho(table)), smallest_rho_cached=least, rows=rows)


def caches_of(data, maker, place, cache_dir):
    """Returns (PrefixCache to read, PrefixCache to fill), in memory or in files in cache_dir."""
    from elastic.cache.prefix_cache import PrefixCache
    folder, memory = cache_dir or _path.RESULTS, None if place == 'memory' else 0
    os.makedirs(folder, exist_ok=True)
    fresh = copy.copy(data)
    fresh.order, fresh.view = (lambda epoch: data.order(epoch)[:STEPS]), (lambda epoch: epoch)
    caches = [PrefixCache(images, folder, memory_bytes=memory) for images in (data, fresh)]
    for cache in caches:
        cache.attach(maker)
    return caches


def row_of(maker, loop, costs, importance, rho, caches, full, rounds, from_disk):
    """Returns the dict of one rho, with shares of the full step."""
    from selection_solver_DP import choose_cached_tensors, choose_tensors, smallest_rho
    now, other, mask_without = loop.timings, None, None
    mask, _, table = choose_cached_tensors(costs, importance, rho)
    wider = [mask | (np.arange(len(mask)) == k) for k in np.flatnonzero(~mask & (importance > 0))]
    fitting = [other for other in wider
               if costs.at_own_cut(other).step_time(other) <= rho * table.t_step]
    if rho >= smallest_rho(now):
        mask_without, _ = choose_tensors(now, importance, rho)
        other = maker.step(mask_without)
    step, (reading, filling) = maker.step(mask), caches
    reading.begin(step, table)
    filling.begin(step, table)
    sampler = Sampler(full, other, step, reading, filling, from_disk)
    samples = sampler.samples
    ms, dropped = _bench.interleaved(list(samples.values()), rounds, warm=1,
                                     sample=lambda epoch: epoch())
    loop.waited(sampler.waits['full'])  # as training does after an epoch
    if 'read' in sampler.waits:
        reading.waited(sampler.waits['read'])
    shares = {kind: column / ms[:, 0] for kind, column in zip(samples, ms.T)}
    fill_share = table.fill_share(mask)
    shares['mean'] = shares['uncached'] if 'uncached' in samples else (
        fill_share * shares['fill'] + (1 - fill_share) * shares['read'])
    k, left = table.deepest(mask), rho * table.t_step - table.step_time(mask)
    cut, cost = reading.cut, (table if table.is_cached(mask) else costs.table).cache
    return dict(
        tensors=int(mask.sum()), deepest=k, fill_share=fill_share,
        full_ms=float(np.median(ms[:, 0])), predicted_full_ms=float(table.t_step),
        predicted=dict(
            {'mean': float(table.step_time(mask) / table.t_step)}, **({} if cut is None else {
                'fill': float(table.filling_time(mask) / table.t_step),
                'read': float(table.reading_time(mask) / table.t_step)})),
        measured={kind: float(np.median(column)) for kind, column in shares.items()},
        spread=_bench.spread(shares['mean']), waits=sampler.waits,
        t_prefix=float(cost.skipped[k]) if cut else 0.0,
        cut_bytes=float(table.cut_bytes[k]), row_bytes=cut.nbytes + 4 if cut else 0,
        read_ms=float(cost.read_ms[k]), write_ms=float(cost.write_ms[k]),
        unspent=float(left / table.t_step), still_fitting=len(fitting), dropped_samples=dropped,
        importance=float(importance[mask].sum()),
        importance_without=None if mask_without is None else float(importance[mask_without].sum()))
