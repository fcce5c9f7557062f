"""Measures accuracy against training time for each way to train, over several seeds.

    python benchmarks/accuracy.py --quick     (under 15 minutes: one network, one seed)
    python benchmarks/accuracy.py             (over two hours at first; finished runs are kept)
    python benchmarks/accuracy.py --table     (seconds: the table of the finished runs)
    python benchmarks/accuracy.py --networks mobilenetv2 --rows 'elastic 0.5'  (and full)
    python benchmarks/accuracy.py --networks lite0_fashion --seeds 5           (ImageNet weights)
    python benchmarks/accuracy.py --networks lite0_fashion --tune              (its learning rates)
    python benchmarks/accuracy.py --networks lite0_fashion --tune --rows 'elastic 0.5'    (one rate)

Each network is trained on digits once per seed. Every scheme then adapts it to the shifted digits,
which are turned, coloured and noisy. The originals of the 2,250 test images appear in no training
image. All schemes use the learning rate that suits full training best; MobileNetV2's head also has
a row with its own (`lr`). Rates were tuned on seeds 8 and 9, which the table does not use. Full
training also runs with half the epochs.

The networks named `lite0_` start from ImageNet weights instead, and each row has the learning rate
that suits it. --tune finds these on seed 8, by the accuracy on a fifth of the training images,
which that run does not train on; no test image is used. Solar cells of one module look alike, so
there it holds out a quarter in blocks of neighbours, and takes the mean accuracy of the two classes
as the table does. It climbs from the row's present rate to the better neighbour in RATES until none
is better.

Epochs are short, and each has new images, so that the interval of selections can be varied. In the
networks named `_repeated` the same images come back in each epoch, as in real data sets. There the
head and elastic training use the prefix cache, and full training also runs with as much time as
elastic training takes.

The runs are made by main.py in logs/accuracy/. A finished run is not repeated, and a stopped
benchmark resumes. The headline is the final accuracy, not the best epoch.
"""

import os
import subprocess
import sys
import time

import _bench
import _path
import numpy as np
from _accuracy_rows import DIGITS, LOGS, NETWORKS, WARMUP, rows_for, rows_of, stronger
from _accuracy_table import FULL, REACHED, mean_error, report

from elastic import command_line, errors, options
from elastic.runs.classes import CLASSES
from elastic.runs.folder import read_rows, read_run
from plot import check_alike

RATES = (0.00005, 0.0001, 0.0002, 0.0004, 0.0008, 0.0015, 0.003, 0.006, 0.012, 0.024, 0.048, 0.096)
TUNED_ON = 8  # the first seed of --tune: no table uses it


class Untrained(errors.UserError):
    """Raised if rho is out of reach, or the loss became infinite or NaN."""


def command(script, *flags):
    """Runs a script of the repository; prints its output and exits if it fails."""
    child = subprocess.run([sys.executable, script] + list(flags), cwd=_path.ROOT,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    last = (child.stdout + child.stderr).strip().split('\n')[-1]
    if child.returncode and ('is out of reach' in last or 'the loss is' in last):
        raise Untrained(last)
    if child.returncode:
        print(child.stdout[-2000:] + child.stderr[-2000:], file=sys.stderr)
        raise SystemExit(child.returncode)


def run_name(network, row, seed):
    label = row.label.replace(',', '').replace(' ', '_').replace('/', '_')
    return '{}_{}_seed{}'.format(network.name, label, seed)


def folder_of(network, row, seed):
    return os.path.join(_path.ROOT, LOGS, run_name(network, row, seed))


def source_name(network, seed):
    return '{}_seed{}'.format(network.source_name, seed)


def flags_of(network, row, seed):
    """Returns the flags of main.py; PruneTrain keeps its published interval."""
    elastic = row.scheme == 'elastic_training' and '--interval' not in row.flags
    return network.flags + [
        '--learning_rate', str(row.learning_rate or network.learning_rate),
        '--warmup_steps', WARMUP, '--prefix_cache', 'auto' if row.cached else 'off',
        '--train_type', row.scheme,
        '--num_epochs', str(network.epochs), '--seed', str(seed),
        '--logs_dir', LOGS, '--run_name', run_name(network, row, seed),
        '--weights', network.weights if network.source is None else
        os.path.join(LOGS, source_name(network, seed), 'checkpoint', 'weights.npz')
    ] + list(network.target) + network.images + (
        ['--interval', str(network.interval)] if elastic else []) + row.flags


def prepare(network, seeds):
    """Makes the source weights of each seed and the timing table, unless they exist."""
    print('{}: source weights and timing table'.format(network.name), flush=True)
    if network.make_images is not None:
        network.make_images()
    for seed in seeds if network.source is not None else ():
        command('main.py', *(network.flags + network.source + [
            '--dataset_name', 'digits', '--weights', 'none', '--train_type', 'full_training',
            '--seed', str(seed), '--logs_dir', LOGS, '--run_name', source_name(network, seed),
            '--save_model']))
    augmentation = network.target[network.target.index('--augmentation'):] if (
        '--augmentation' in network.target) else ()
    command('profiler.py', *(network.flags + list(network.target[:2]) + list(augmentation) + [
        '--num_classes', str(network.num_classes), '--logs_dir', LOGS]))


def tune(network, rows, seeds):
    """Prints the accuracy of each row on held-out images at the rates tried; returns the best."""
    rates, begin = {}, time.perf_counter()
    for row in rows:
        found, at = {}, nearest(row.learning_rate or network.learning_rate)
        while True:
            for near in range(max(0, at - 1), min(len(RATES), at + 2)):
                if RATES[near] not in found:
                    found[RATES[near]] = _judged(network, row, RATES[near], seeds)
            best = RATES.index(max(found, key=found.get))
            if best == at:
                break
            at = best
        rates[row.label] = RATES[at]
        print('{:<34} {}'.format(row.label, '   '.join('{:g}: {:.1f} %'.format(
            rate, 100 * found[rate]) for rate in sorted(found))), flush=True)
    print('took {:.0f} s; rates: {}'.format(time.perf_counter() - begin, rates))
    return rates


def nearest(rate):
    """Returns the index in RATES of the one nearest to `rate`, by their ratio."""
    return int(np.argmin(np.abs(np.log(np.divide(RATES, rate)))))


def _judged(network, row, rate, seeds):
    """Returns a row's mean accuracy on held-out images; 0 if a loss became infinite or NaN."""
    on = network.tuned_on or network
    tried = row._replace(
        label='{} tried at {:g}'.format(row.label, rate), learning_rate=rate,
        flags=row.flags + ([] if network.tuned_on else ['--validation_share', '0.2']))
    try:
        for seed in seeds:
            command('main.py', *flags_of(on, tried, seed))
    except Untrained:
        return 0.0
    runs = {seed: read_run(folder_of(on, tried, seed)) for seed in seeds}
    return float(np.mean([accuracy_of(on, tried, seed, run) if network.tuned_on else
                          run.summary['validation_accuracy'] for seed, run in runs.items()]))


def measure(network, rows, seeds):
    """Trains the unfinished runs, seed by seed, so that the rows of a seed are close in time."""
    for seed in seeds:
        for row in rows:
            begin = time.perf_counter()
            try:
                command('main.py', *flags_of(network, row, seed))
            except Untrained as error:
                print('{:<34} seed {}   {}'.format(row.label, seed, error), flush=True)
                continue
            summary = read_run(folder_of(network, row, seed)).summary
            print('{:<34} seed {}   {:5.1f} %   {:6.1f} s trained   {:6.1f} s in all'.format(
                row.label, seed, 100 * summary['final_accuracy'], summary['train_seconds'],
                time.perf_counter() - begin), flush=True)


def finished_runs(network, rows, seeds):
    """Returns label -> {seed: folder.Run} of the finished runs."""
    return {row.label: {seed: read_run(folder_of(network, row, seed)) for seed in seeds
                        if os.path.exists(os.path.join(folder_of(network, row, seed),
                                                       'summary.json'))} for row in rows}


def nothing_pruned(network, seeds):
    """Returns whether PruneTrain as published removed no channel in any finished run."""
    published = [row for row in rows_of(network, False) if row.scheme == 'prune_training']
    runs = [run for of in finished_runs(network, published, seeds).values() for run in of.values()]
    return bool(runs) and not any(run.summary['channels_removed'] for run in runs)


def seconds_to(run, accuracy):
    """Returns the training seconds until an epoch first tests at `accuracy`; NaN for never."""
    return next((seconds for seconds, tested in zip(
        run.epochs['train_seconds'], run.epochs['test_accuracy']) if tested >= accuracy),
                float('nan'))


def accuracy_of(network, row, seed, run):
    """Returns a run's final test accuracy; the mean of its classes' if `network` is balanced."""
    if not network.balanced:
        return run.summary['final_accuracy']
    classes = read_rows(folder_of(network, row, seed), CLASSES, dict(accuracy=float))
    return float(np.mean([each['accuracy'] for each in classes]))


def unfinished(network, rows, seeds):
    """Returns a line of text for each row with runs that started and did not finish."""
    begun = {row.label: [str(seed) for seed in seeds if os.path.isdir(folder_of(
        network, row, seed))] for row in rows}
    ended = finished_runs(network, rows, seeds)
    return ['{}: seed {} is unfinished: it was stopped, or its loss became infinite or NaN'.format(
        label, ', '.join(seed for seed in of if int(seed) not in ended[label]))
            for label, of in begun.items() if len(of) > len(ended[label])]


def beyond(network, rows):
    """Returns a line of text for each row whose rho is out of reach."""
    from elastic.selection.items import out_of_reach
    from elastic.timing.table import TensorTimings
    from profiler import table_path
    flags = dict(zip(network.flags[::2], network.flags[1::2]))
    path = os.path.join(_path.ROOT, table_path(LOGS, flags['--model_name'], flags['--input_size'],
                                               network.num_classes, flags['--batch_size']))
    if not os.path.exists(path):
        return []
    plain = TensorTimings.load(path)
    best = plain.cached_at_best(network.epochs)
    reasons = [(row.label, out_of_reach(best if row.cached else plain, row.rho))
               for row in rows if row.rho]
    return ['{}: {}'.format(label, reason) for label, reason in reasons if reason]


def result_of(network, row, runs, full):
    """Returns the dict of one row, each run paired with full training of the same seed.

    runs, full: seed -> folder.Run. Raises UserError if a pair was made on different devices or
    software stacks.
    """
    pairs = [(run, full[seed]) for seed, run in runs.items() if seed in full]
    for run, whole in pairs:
        check_alike([whole, run], 'host', 'stack')
    final = {seed: accuracy_of(network, row, seed, run) for seed, run in runs.items()
             if seed in full}
    whole_row = row._replace(label=FULL)
    of_full = {seed: accuracy_of(network, whole_row, seed, full[seed]) for seed in final}
    runs = [run for run, _ in pairs]

    def of(key):
        return [run.summary[key] for run in runs]

    def ratios(key):
        return [whole.summary[key] / (run.summary[key] or float('nan')) for run, whole in pairs]
    result = dict(
        model=network.name, label=row.label, scheme=row.scheme, flags=row.flags, rho=row.rho,
        variant=row.variant, cached=row.cached, n=len(runs), cached_goals=network.goals,
        learning_rate=row.learning_rate or network.learning_rate,
        accuracies=final,
        selection_seconds=float(np.mean(of('selection_seconds'))),
        reached=[[seconds_to(run, share * whole.summary['final_accuracy'])
                  for run, whole in pairs] for share in REACHED],
        peak_memory_mb=max(of('peak_memory_mb')), joules=_mean_joules(runs),
        cache_mb=max(run.summary.get('cache_bytes', 0) for run in runs) / 2 ** 20,
        channels_removed=mean_error([run.summary.get('channels_removed', 0) for run in runs])[0])
    for name, values in dict(
            accuracy=list(final.values()), best=of('best_accuracy'), seconds=of('train_seconds'),
            to_full=[final[seed] - of_full[seed] for seed in final],
            speed_up=ratios('train_seconds'), steps_speed_up=ratios('step_seconds')).items():
        result[name], result[name + '_se'] = mean_error(values)
    return result


def _mean_joules(runs):
    joules = [run.summary['energy_joules'] for run in runs]
    return None if None in joules else float(np.mean(joules))


def table_of(network, rows, seeds, args):
    """Trains what is missing unless --table; returns (results of the rows, text of the table)."""
    if not args.table:
        prepare(network, seeds)
        measure(network, rows, seeds)
    if not (args.quick or args.rows) and nothing_pruned(network, seeds):
        strong = stronger(network)
        rows.insert(1 + [row.scheme for row in rows].index(strong.scheme), strong)
        if not args.table:
            measure(network, [strong], seeds)
    runs = finished_runs(network, rows, seeds)
    results = [result_of(network, row, runs[row.label], runs[FULL]) for row in rows
               if set(runs[row.label]) & set(runs[FULL])]
    lacking = [row for row in rows if not runs[row.label]]
    return results, '\n'.join([report(results)] + beyond(network, lacking)
                              + unfinished(network, rows, seeds)) if results else ''


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--networks', nargs='+', choices=sorted(NETWORKS),
                        default=DIGITS, help='default: those that start from digits; the first '
                        'one also has rows with other metrics, intervals and whole layers')
    parser.add_argument('--seeds', type=options.number(int, low=1), default=3)
    options.add_flag(parser, '--quick', 'one seed of the first network, without variants; '
                          'only each rho that has a goal')
    options.add_flag(parser, '--tune', 'print the learning rate that suits each row')
    parser.add_argument('--tune_seeds', type=options.number(int, low=1), default=1,
                        help='--tune compares means of so many seeds, from {} on (default: 1)'
                        .format(TUNED_ON))
    options.add_flag(parser, '--table', 'train nothing; print the table of the finished runs')
    _bench.add_flags(parser, 'accuracy', input_size=None)
    parser.add_argument('--rows', nargs='+', metavar='LABEL', help='only these rows, such as '
                        "'elastic 0.5', and full training (default: all)")
    args = _bench.parsed(parser, argv)
    if args.quick:
        args.networks, args.seeds = args.networks[:1], 1
    seeds = range(args.seed, args.seed + args.seeds)
    if args.tune:
        seeds = range(TUNED_ON, TUNED_ON + args.tune_seeds)
        for network in map(NETWORKS.get, args.networks):
            prepare(network.tuned_on or network, seeds)
            tune(network, rows_for(network, args), seeds)
        return 0
    results, tables = [], []
    for name, rows in [(name, rows_for(NETWORKS[name], args)) for name in args.networks]:
        try:
            of_network, text = table_of(NETWORKS[name], rows, seeds, args)
        except Untrained as error:
            print('{}: its source: {}'.format(name, error), flush=True)
            continue
        results += of_network
        tables += [text] if text else []
    if not results:
        raise errors.UserError('no finished run of full training in {}; leave out --table to '
                                     'make one'.format(LOGS))
    from _accuracy_figure import accuracy_against_time
    paths = accuracy_against_time(
        results, os.path.join(_path.ROOT, 'figures', 'accuracy_vs_time'))
    print('\nfinal test accuracy, means ± standard error; differences and speed-up are paired by '
          'seed; goals in brackets\n')
    print('\n\n'.join(tables))
    print()
    print('\n'.join(os.path.relpath(path) for path in paths))
    _bench.write('accuracy', dict(_bench.machine(), results=results), args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
