"""Measures whether steps with a prefix cache take the share of a full step that rho asks for.

    python benchmarks/prefix_cache.py [--models resnet50 mobilenetv2] [--rhos 0.15 0.35]
    python benchmarks/prefix_cache.py --models resnet50@224 vit@224 --places memory

Each network is profiled, and its importance evaluated on real digits. For each rho, tensors are
chosen by their costs with the prefix cache, which one epoch of each interval fills. Epochs of a few
steps then run in turn, as in training: steps of all tensors; steps that fill an empty cache; steps
that read one of 16 batches, from memory or from a file that the system does not hold in memory; and
steps of the tensors that the same rho allows without a cache. All times are shares of a full step.
"""

import argparse
import os

import _bench
import numpy as np

from elastic import command_line
from elastic.settings import TRAINING

MEDIAN_ERROR, WORST_ERROR = 0.04, 0.08
LEAST_RHO, LEAST_RHO_SIZE, LEAST_RHO_INTERVAL = 0.15, 224, 4
DEFAULT_MODELS = ['resnet50', 'vgg16', 'mobilenetv2']
PLACES = ('memory', 'disk')


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
    whole = command_line.number
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--rhos', nargs='+', default=[0.15, 0.25, 0.35, 0.5, 0.7], metavar='RHO',
                        type=whole(float, above=0, high=1))
    parser.add_argument('--places', nargs='+', choices=PLACES, default=PLACES)
    parser.add_argument('--interval', type=whole(int, low=2), default=TRAINING.interval,
                        metavar='EPOCHS',
                        help='the first of them fills the cache (default: %(default)s)')
    parser.add_argument('--cache_dir', metavar='DIR',
                        help='folder of the file (default: benchmarks/results)')
    _bench.add_flags(parser, 'prefix_cache', DEFAULT_MODELS, rounds=5, batch_size=True)
    args = _bench.parsed(parser, argv)
    if args.cache_dir is not None and not os.path.isdir(args.cache_dir):
        raise command_line.UserError("--cache_dir '{}' is no folder; give one that exists".format(
            args.cache_dir))
    return args


def main(argv=None):
    args = parse_arguments(argv)
    results = list(_bench.each('_cached_steps', _bench.calls(
        args, args.rhos, args.places, args.interval, args.rounds, args.seed, args.batch_size,
        args.cache_dir)))
    print('share of the full step, predicted / measured; interval: {} epochs'.format(args.interval))
    print(command_line.table(
        ['model', 'asked', 'place', 'tensors', 'skipped (%)', 'kB per image', 'predicted',
         'measured [10 %, 90 %]', 'error (%)', 'filling', 'reading',
         'full step (ms)', 'still fit', 'without cache', 'its importance'],
        [row for result in results for row in rows_of(result)], '<><>>>>>>>>>>>>'))
    print(command_line.table(
        ['model', 'size', 'smallest rho'] + ['in ' + place for place in args.places],
        [[result['model'], result['input_size'], '%.3f' % result['smallest_rho']]
         + ['%.3f' % result['smallest_rho_cached'][place] for place in args.places]
         for result in results], '<>>' + '>' * len(args.places)))
    print(verdict(results))
    _bench.write('prefix_cache', results, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
