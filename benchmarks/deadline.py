"""Measures what main.py --deadline reaches in a part of full training's time, and when it ends.

    python benchmarks/deadline.py              (6 minutes)
    python benchmarks/deadline.py --seeds 3

EfficientNet-Lite0 is fine-tuned from ImageNet weights on 3,008 images of Fashion-MNIST. Full
training takes 12 epochs at the rate that suits it. Each deadline is a share of the time of its
whole process, start and tests included. It is compared with full training that is planned for that
time: as many epochs as fit, with the whole cosine, at the rate that suits short runs (accuracy.py
--tune). Runs of one seed follow each other.
"""

import os
import time

import _bench
import _path
import numpy as np
from _accuracy_rows import FASHION, LITE0, WARMUP
from accuracy import command

from elastic import command_line, options, texts
from elastic.runs.folder import read_run
from elastic.settings import LOGS_DIR

LOGS = os.path.join(LOGS_DIR, 'deadline')
SHARES = (1 / 5, 1 / 3, 1 / 2)
EPOCHS = 12
GOAL = 0.05  # the largest part of the deadline by which a run may end early or late


def run(name, *flags):
    """Returns (seconds of the process, summary) of a run of main.py, made again."""
    begin = time.perf_counter()
    command('main.py', *LITE0.flags, *FASHION, *LITE0.images, '--warmup_steps', WARMUP,
            '--logs_dir', LOGS, '--run_name', name, '--restart', *map(str, flags))
    seconds = time.perf_counter() - begin
    return seconds, read_run(os.path.join(_path.ROOT, LOGS, name)).summary


def full(seed, epochs, rate):
    return run('full_{}_seed{}'.format(epochs, seed), '--train_type', 'full_training', '--seed',
               seed, '--num_epochs', epochs, '--learning_rate', rate)


def measure(seed, args):
    """Returns the results of one seed, a dict for each deadline."""
    whole, summary = full(seed, EPOCHS, args.rate)
    epoch = (summary['train_seconds'] + summary['validation_seconds']) / EPOCHS
    results = []
    for share in SHARES:
        deadline = share * whole
        seconds, ended = run('deadline_{:.2f}_seed{}'.format(share, seed), '--deadline',
                             '{:.1f}s'.format(deadline), '--seed', seed, '--learning_rate',
                             args.rate)
        fits = max(1, int((deadline - (whole - EPOCHS * epoch)) / epoch))
        cut_seconds, cut = full(seed, fits, args.short_rate)
        results.append(dict(
            share=share, deadline=deadline, seconds=seconds, rho=ended['rho'] or float('nan'),
            epochs=ended['epochs'], accuracy=ended['final_accuracy'], cut_epochs=fits,
            cut_seconds=cut_seconds, cut_accuracy=cut['final_accuracy'],
            full_accuracy=summary['final_accuracy'], full_seconds=whole))
        print('seed {}: {:.1f} s of {:.1f}: {:.1f} %; full training, {} epochs, {:.1f} s: {:.1f} '
              '%; {} epochs, {:.1f} s: {:.1f} %'.format(
                  seed, seconds, deadline, 100 * ended['final_accuracy'], fits, cut_seconds,
                  100 * cut['final_accuracy'], EPOCHS, whole, 100 * summary['final_accuracy']),
              flush=True)
    return results


def report(results):
    """Returns the table: one line for each share."""
    cells = []
    for share in SHARES:
        rows = [row for row in results if row['share'] == share]

        def mean(key, rows=rows):
            return float(np.mean([row[key] for row in rows]))
        ends = [row['seconds'] / row['deadline'] for row in rows]
        cells.append([
            '1/{:.0f}'.format(1 / share), len(rows), '{:.0f}'.format(mean('deadline')),
            '{:.0f} to {:.0f}'.format(100 * min(ends), 100 * max(ends)),
            '{:.2f}'.format(mean('rho')), '{:.1f}'.format(mean('epochs')),
            '{:.1f}'.format(100 * mean('accuracy')), '{:.1f}'.format(mean('cut_epochs')),
            '{:.0f}'.format(mean('cut_seconds')), '{:.1f}'.format(100 * mean('cut_accuracy')),
            '{:.1f}'.format(100 * mean('full_accuracy')),
            _bench.verdict([('ends', all(1 - GOAL <= end <= 1 + GOAL for end in ends)),
                            ('ahead', mean('accuracy') > mean('cut_accuracy'))])])
    return texts.table(
        ['deadline', 'n', '(s)', 'ends at (%)', 'rho', 'epochs', 'accuracy (%)', 'full: epochs',
         '(s)', 'accuracy (%)', 'full, 12 epochs (%)', 'goals'], cells, '<' + '>' * 10 + '<')


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--seeds', type=options.number(int, low=1), default=1)
    parser.add_argument('--rate', type=float, default=0.003,
                        help='learning rate of long runs (default: %(default)s)')
    parser.add_argument('--short_rate', type=float, default=0.0015,
                        help='learning rate of short full training (default: %(default)s)')
    _bench.add_flags(parser, 'deadline', input_size=None)
    args = _bench.parsed(parser, argv)
    run('profiled', '--num_epochs', 2, '--rho', 0.6, '--head', 'stages', '--head_start', 'solved')
    results = [row for seed in range(args.seed, args.seed + args.seeds)
               for row in measure(seed, args)]
    print('\n' + report(results))
    _bench.write('deadline', dict(_bench.machine(), results=results), args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
