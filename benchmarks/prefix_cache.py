"""Measures whether steps with a prefix cache take the share of a full step that rho asks for.

    python benchmarks/prefix_cache.py [--models resnet50 mobilenetv2] [--rhos 0.15 0.35]
    python benchmarks/prefix_cache.py --models resnet50@224 vit@224 --places memory

Each network is profiled, and its importance evaluated on real digits. For each rho, tensors are
chosen by their costs with the prefix cache, which one epoch of each interval fills. Epochs of a few
steps then run in turn, as in training: steps of all tensors; steps that fill an empty cache; steps
that read one of 16 batches, from memory or from a file that the system does not hold in memory; and
steps of the tensors that the same rho allows without a cache. All times are shares of a full step.
"""

import copy
import itertools
import os

import _bench
import _path
import numpy as np
from tqdm import tqdm

from elastic import command_line, errors, options, texts
from elastic.settings import TRAINING

MEDIAN_ERROR, WORST_ERROR = 0.04, 0.08
LEAST_RHO, LEAST_RHO_SIZE, LEAST_RHO_INTERVAL = 0.15, 224, 4
DEFAULT_MODELS = ['resnet50', 'vgg16', 'mobilenetv2']
PLACES = ('memory', 'disk')
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
    from elastic.planning.cache_offers import CacheOffers
    from elastic.selection.items import smallest_rho
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
        costs = CacheOffers(caches[0], loop.timings, 1, interval + 1)
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
    from elastic.selection.items import smallest_rho
    from selection_solver_DP import choose_cached_tensors, choose_tensors
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


def rows_of(result):
    return [[result['model'], '%.2f' % row['rho'], row['place'],
             '%d/%d' % (row['tensors'], result['tensors']),
             '%.0f' % (100 * row['t_prefix']), '%.0f' % (row['row_bytes'] / 1e3),
             '%.3f' % row['predicted']['mean'],
             _bench.with_spread(row['measured']['mean'], row['spread']),
             '%+.1f' % (100 * error(row)), both(row, 'fill'), both(row, 'read'),
             '%.0f' % row['full_ms'], row['still_fitting'],
             '%.3f' % row['measured']['other'] if 'other' in row['measured'] else 'out of reach',
             '%.2f' % (row['importance_without'] / row['importance'])
             if row['importance_without'] is not None and row['importance'] > 0 else '']
            for row in result['rows']]


def both(row, kind):
    """Returns the predicted and the measured share of a kind of step; '' without a cache."""
    return '%.3f / %.3f' % (row['predicted'][kind], row['measured'][kind]) if (
        kind in row['predicted']) else ''


def error(row):
    return row['measured']['mean'] / row['predicted']['mean'] - 1


def verdict(results):
    """Returns whether each goal is met, over all rows."""
    rows = [row for result in results for row in result['rows']]
    if not rows:
        return 'no rho within reach'
    errors = [abs(error(row)) for row in rows]
    fitting = sum(row['still_fitting'] for row in rows)
    checks = [('prediction error: median {:.1f} % ({:g}), worst {:.1f} % ({:g})'.format(
                  100 * np.median(errors), 100 * MEDIAN_ERROR, 100 * max(errors),
                  100 * WORST_ERROR),
               np.median(errors) <= MEDIAN_ERROR and max(errors) <= WORST_ERROR),
              ('{} tensors still fit (0)'.format(fitting), not fitting)]
    least = [rho for result in results if (result['input_size'], result['interval']) == (
        LEAST_RHO_SIZE, LEAST_RHO_INTERVAL) for rho in result['smallest_rho_cached'].values()]
    if least:
        checks.append(('largest smallest rho at {0}x{0} {1:.3f} ({2:g})'.format(
            LEAST_RHO_SIZE, max(least), LEAST_RHO), max(least) <= LEAST_RHO))
    return _bench.verdict(checks)


def parse_arguments(argv):
    whole = options.number
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--rhos', nargs='+', default=[0.15, 0.25, 0.35, 0.5, 0.7], metavar='RHO',
                        type=whole(float, above=0, high=1))
    parser.add_argument('--places', nargs='+', choices=PLACES, default=PLACES)
    parser.add_argument('--interval', type=whole(int, low=2), default=TRAINING.interval,
                        metavar='EPOCHS',
                        help='the first of them fills the cache (default: %(default)s)')
    parser.add_argument('--cache_dir', type=os.path.expanduser, metavar='DIR',
                        help='folder of the file (default: benchmarks/results)')
    _bench.add_flags(parser, 'prefix_cache', DEFAULT_MODELS, rounds=5, batch_size=True)
    args = _bench.parsed(parser, argv)
    if args.cache_dir is not None and not os.path.isdir(args.cache_dir):
        raise errors.UserError("--cache_dir '{}' is no folder; give one that exists".format(
            args.cache_dir))
    return args


def main(argv=None):
    args = parse_arguments(argv)
    results = list(_bench.each('prefix_cache', _bench.calls(
        args, args.rhos, args.places, args.interval, args.rounds, args.seed, args.batch_size,
        args.cache_dir)))
    print('share of the full step, predicted / measured; interval: {} epochs'.format(args.interval))
    print(texts.table(
        ['model', 'asked', 'place', 'tensors', 'skipped (%)', 'kB per image', 'predicted',
         'measured [10 %, 90 %]', 'error (%)', 'filling', 'reading',
         'full step (ms)', 'still fit', 'without cache', 'its importance'],
        [row for result in results for row in rows_of(result)], '<><>>>>>>>>>>>>'))
    print(texts.table(
        ['model', 'size', 'smallest rho'] + ['in ' + place for place in args.places],
        [[result['model'], result['input_size'], '%.3f' % result['smallest_rho']]
         + ['%.3f' % result['smallest_rho_cached'][place] for place in args.places]
         for result in results], '<>>' + '>' * len(args.places)))
    print(verdict(results))
    _bench.write('prefix_cache', results, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
