"""Measures what it costs in accuracy to keep the augmentation of each image for an interval.

    python benchmarks/views.py             (20 minutes at first; finished runs are kept)

MobileNetV2 (width 0.35, 64x64, batches of 32) is trained on digits once. It then adapts to 1,920
turned and coloured digits, which are flipped and rotated, for 12 epochs with selections every four.
Runs of one seed differ in --views alone: fresh draws a new augmentation in each epoch, held in each
interval. `held for the whole run` shows what it costs to see one augmentation of each image only.

The runs are made by main.py in logs/views/, without a prefix cache. The headline is the difference
of the final accuracies, paired by seed.
"""

import os
from typing import List, NamedTuple

import _bench
import _path
import numpy as np
from _accuracy_table import mean_error, plus_minus
from accuracy import command

from elastic import command_line, options, texts
from elastic.runs.folder import read_run
from elastic.settings import LOGS_DIR

LOGS = os.path.join(LOGS_DIR, 'views')
NETWORK = ['--model_name', 'mobilenetv2', '--alpha', '0.35', '--input_size', '64',
           '--batch_size', '32', '--logs_dir', LOGS]
SOURCE = ['--dataset_name', 'digits', '--weights', 'none', '--train_type', 'full_training',
          '--num_epochs', '3', '--learning_rate', '0.05', '--run_name', 'source', '--save_model']
TARGET = ['--dataset_name', 'digits_shifted', '--train_images', '1920', '--num_epochs', '12',
          '--augmentation', 'flip+rotate', '--learning_rate', '0.02', '--warmup_steps', '60',
          '--prefix_cache', 'off', '--weights',
          os.path.join(LOGS, 'source', 'checkpoint', 'weights.npz')]
FULL = ['--train_type', 'full_training']
ELASTIC = ['--train_type', 'elastic_training', '--rho', '0.5']
HELD = ['--views', 'held', '--interval', '4']


class Row(NamedTuple):
    """One way to train. against: label of the row with fresh views; None: this is one."""
    label: str
    flags: List[str]
    against: str = None


ROWS = (Row('full, fresh', FULL + ['--views', 'fresh']),
        Row('full, held', FULL + HELD, 'full, fresh'),
        Row('full, held for the whole run', FULL + ['--views', 'held', '--interval', '0'],
            'full, fresh'),
        Row('elastic 0.5, fresh', ELASTIC + ['--views', 'fresh', '--interval', '4']),
        Row('elastic 0.5, held', ELASTIC + HELD, 'elastic 0.5, fresh'))


def flags_of(row, seed):
    """Returns the flags of main.py."""
    name = '{}_seed{}'.format(row.label.replace(',', '').replace(' ', '_'), seed)
    return NETWORK + TARGET + row.flags + ['--seed', str(seed), '--run_name', name]


def measure(seeds):
    """Trains what is missing; returns label -> summaries, in the order of the seeds."""
    command('main.py', *(NETWORK + SOURCE))
    found = {row.label: [] for row in ROWS}
    for seed in seeds:
        for row in ROWS:
            flags = flags_of(row, seed)
            command('main.py', *flags)
            summary = read_run(os.path.join(_path.ROOT, LOGS, flags[-1])).summary
            found[row.label].append(summary)
            print('{:<30} seed {}   {:5.1f} %   {:6.1f} s trained'.format(
                row.label, seed, 100 * summary['final_accuracy'], summary['train_seconds']),
                flush=True)
    return found


def result_of(row, found):
    """Returns the dict of one row. found: label -> summaries, in the order of the seeds."""
    runs = found[row.label]

    def of(key, runs=runs):
        return np.array([run[key] for run in runs])
    result = dict(label=row.label, n=len(runs), seconds=float(of('train_seconds').mean()),
                  finals=of('final_accuracy').tolist())
    values = dict(accuracy=of('final_accuracy'), best=of('best_accuracy'))
    if row.against:
        values['to_fresh'] = of('final_accuracy') - of('final_accuracy', found[row.against])
    for name, value in values.items():
        result[name], result[name + '_se'] = mean_error(value)
    return result


def report(results):
    """Returns the table of the results."""
    def cell(result, name, form):
        if name not in result:
            return ''
        return plus_minus(100 * result[name], 100 * result[name + '_se'], form)
    return texts.table(
        ['', 'n', 'final (%)', 'best (%)', 'to fresh (points)', 'train (s)'],
        [[r['label'], r['n'], cell(r, 'accuracy', '{:.1f}'), cell(r, 'best', '{:.1f}'),
          cell(r, 'to_fresh', '{:+.1f}'), '{:.1f}'.format(r['seconds'])] for r in results])


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--seeds', type=options.number(int, low=1), default=3)
    _bench.add_flags(parser, 'views', input_size=None)
    args = _bench.parsed(parser, argv)
    found = measure(range(args.seed, args.seed + args.seeds))
    results = [result_of(row, found) for row in ROWS]
    print('\nfinal test accuracy, means ± standard error; differences are paired by seed\n')
    print(report(results))
    _bench.write('views', dict(_bench.machine(), results=results), args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
