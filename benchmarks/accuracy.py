"""What each way to spend training time is worth: accuracy against time, several seeds, paired.

    python benchmarks/accuracy.py --quick     (under 15 minutes: one network, one seed)
    python benchmarks/accuracy.py             (hours the first time; finished runs are kept)

Each network is trained on digits once, then adapted to the shifted digits (turned, coloured, noisy;
2,250 test images whose originals the source training never saw) by every scheme, from the same
weights at the same learning rate. Epochs are short, of images newly drawn, so that the interval of
selections can be varied. Runs are those of main.py, under logs/accuracy/; a finished one is not
repeated, so that a stopped benchmark goes on where it was, and prints the table of what is there
when all of it is. The test set is used once an epoch for the curves; final accuracy is what counts,
not the best epoch.
"""

import argparse
import os
import subprocess
import sys
import time
from typing import List, NamedTuple

import _bench
import _path
import numpy as np

import command_line

LOGS = os.path.join('logs', 'accuracy')
FULL = 'full'
EPOCHS, STEPS, INTERVAL, RHO = 12, 70, 4, 0.5  # epochs of so many steps
RHOS = (0.35, 0.5, 0.7)
METRICS = ('weight_magnitude', 'grad_magnitude', 'fisher', 'random', 'depth')
INTERVALS = (1, 2, 8, 0)
PRUNE_INTERVAL = '3'
STRONG = ['--prune_penalty_ratio', '0.9', '--prune_threshold', '1e-3']
REACHED = (0.95, 0.99)  # of full training's final accuracy
POINTS = {0.5: 1.0, 0.35: 2.0}  # that elastic training may lose, by rho
SPEED_UP = {0.5: 1.9, 0.35: 2.6}
HEAD_LOSES = 5.0  # points, or the task is too easy to tell anything


class Network(NamedTuple):
    """flags: of main.py and profiler.py. source, target: of training in each domain."""
    name: str
    flags: List[str]
    source: List[str]
    target: List[str]


NETWORKS = {network.name: network for network in (
    Network('mobilenetv2', ['--model_name', 'mobilenetv2', '--alpha', '0.35', '--input_size', '96',
                            '--batch_size', '32'],
            ['--num_epochs', '3', '--learning_rate', '0.05'], ['--learning_rate', '0.01']),
    Network('mobilenet', ['--model_name', 'MobileNet', '--alpha', '0.25', '--input_size', '96',
                          '--batch_size', '32'],
            ['--num_epochs', '3', '--learning_rate', '0.05'], ['--learning_rate', '0.01']))}


class Row(NamedTuple):
    """One line of the table. variant: another choice of tensors than the paper's."""
    label: str
    scheme: str
    flags: List[str] = []
    rho: float = None
    variant: bool = False


def elastic(label, rho, *more):
    return Row(label, 'elastic_training', ['--rho', str(rho)] + list(more), rho, bool(more))


def rows_of(variants):
    """The lines of one network; variants: also other metrics, intervals and whole layers."""
    rows = [Row(FULL, 'full_training'), Row('head only', 'traditional_tl_training'),
            Row('BN + bias', 'bn_plus_bias_training'),
            Row('PruneTrain', 'prune_training', ['--prune_interval', PRUNE_INTERVAL])]
    rows += [elastic('elastic {:g}'.format(rho), rho) for rho in RHOS]
    if variants:
        rows += [elastic('elastic {:g}, {}'.format(RHO, metric), RHO, '--importance', metric)
                 for metric in METRICS]
        rows += [elastic('elastic {:g}, {}'.format(
            RHO, 'selected once' if interval == 0 else 'interval {}'.format(interval)), RHO,
                         '--interval', str(interval)) for interval in INTERVALS]
        rows += [elastic('elastic {:g}, whole layers'.format(RHO), RHO, '--granularity', 'layer')]
    return rows


STRONGER = Row('PruneTrain, strong', 'prune_training',
               ['--prune_interval', PRUNE_INTERVAL] + STRONG)


def command(script, *flags):
    """Runs a script of the repository; SystemExit with its own words where it fails."""
    child = subprocess.run([sys.executable, script] + list(flags), cwd=_path.ROOT,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if child.returncode:
        print(child.stdout[-2000:] + child.stderr[-2000:], file=sys.stderr)
        raise SystemExit(child.returncode)


def run_name(network, row, seed):
    return '{}_{}_seed{}'.format(network.name, row.label.replace(' ', '_').replace(',', ''), seed)


def summary_of(network, row, seed, epochs):
    """The finished run, made now where it is not there; its runs.Run."""
    from runs import read_run
    name = run_name(network, row, seed)
    command('main.py', *(network.flags + network.target + row.flags + [
        '--dataset_name', 'digits_shifted', '--train_type', row.scheme, '--num_epochs',
        str(epochs), '--steps_per_epoch', str(STEPS), '--seed', str(seed), '--logs_dir', LOGS,
        '--run_name', name, '--weights',
        os.path.join(LOGS, network.name + '_source', 'checkpoint', 'weights.npz')]
        + ([] if row.rho is None or '--interval' in row.flags else ['--interval', str(INTERVAL)])))
    return read_run(os.path.join(_path.ROOT, LOGS, name))


def prepare(network):
    """Source weights and timing table, made once."""
    print('{}: source weights and timing table'.format(network.name), flush=True)
    command('main.py', *(network.flags + network.source + [
        '--dataset_name', 'digits', '--weights', 'none', '--train_type', 'full_training',
        '--logs_dir', LOGS, '--run_name', network.name + '_source', '--save_model']))
    command('profiler.py', *(network.flags + ['--dataset_name', 'digits_shifted', '--num_classes',
                                              '10', '--logs_dir', LOGS]))


def measure(network, rows, seeds, epochs):
    """label -> list of runs.Run, one a seed; seed by seed, so that a seed's rows lie close in time.
    """
    runs = {}
    for seed in seeds:
        for row in rows:
            begin = time.perf_counter()
            run = summary_of(network, row, seed, epochs)
            runs.setdefault(row.label, []).append(run)
            print('{:<34} seed {}   {:5.1f} %   {:6.1f} s trained   {:6.1f} s in all'.format(
                row.label, seed, 100 * run.summary['final_accuracy'],
                run.summary['train_seconds'], time.perf_counter() - begin), flush=True)
    return runs


def seconds_to(run, accuracy):
    """Training seconds at the end of the first epoch that tests at `accuracy`; NaN for never."""
    return next((seconds for seconds, tested in zip(
        run.epochs['train_seconds'], run.epochs['test_accuracy']) if tested >= accuracy),
                float('nan'))


def mean_error(values):
    """(mean, standard error); the latter NaN for one value."""
    values = np.asarray(values, dtype=float)
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float('nan')
    return float(values.mean()), float(error)


def result_of(network, row, runs, full):
    """dict of one line; full: the runs of full training, seed by seed."""
    def of(key):
        return [run.summary[key] for run in runs]
    accuracy, accuracy_se = mean_error(of('final_accuracy'))
    seconds, seconds_se = mean_error(of('train_seconds'))
    lost, lost_se = mean_error([run.summary['final_accuracy'] - whole.summary['final_accuracy']
                                for run, whole in zip(runs, full)])
    speed, speed_se = mean_error([whole.summary['train_seconds'] / run.summary['train_seconds']
                                  for run, whole in zip(runs, full)])
    return dict(
        model=network.name, label=row.label, scheme=row.scheme, rho=row.rho, variant=row.variant,
        n=len(runs), accuracy=accuracy, accuracy_se=accuracy_se,
        best=mean_error(of('best_accuracy'))[0], to_full=lost, to_full_se=lost_se,
        seconds=seconds, seconds_se=seconds_se, speed_up=speed, speed_up_se=speed_se,
        reached=[mean_error([seconds_to(run, share * whole.summary['final_accuracy'])
                             for run, whole in zip(runs, full)])[0] for share in REACHED],
        peak_memory_mb=max(of('peak_memory_mb')), joules=_mean_joules(runs),
        channels_removed=mean_error([run.summary.get('channels_removed', 0) for run in runs])[0])


def _mean_joules(runs):
    joules = [run.summary.get('energy_joules') for run in runs]
    return None if None in joules else float(np.mean(joules))


def verdict(result, results):
    """Text of the targets that one line is held to."""
    checks = []
    head = [other for other in results if other['label'] == 'head only']
    if result['label'] == FULL and head:
        gain = 100 * (result['accuracy'] - head[0]['accuracy'])
        checks.append(('head only {:+.1f}'.format(-gain), gain >= HEAD_LOSES))
    if result['scheme'] == 'elastic_training' and not result['variant'] and (
            result['rho'] in POINTS):
        lost = -100 * result['to_full']
        checks += [('{:+.1f} ({:+g})'.format(-lost, -POINTS[result['rho']]),
                    lost <= POINTS[result['rho']]),
                   ('{:.2f}x ({:g})'.format(result['speed_up'], SPEED_UP[result['rho']]),
                    result['speed_up'] >= SPEED_UP[result['rho']])]
    if result['label'] == 'elastic {:g}'.format(RHO):
        better = [other['label'] for other in results if other['accuracy'] > result['accuracy']
                  and other['seconds'] <= result['seconds']]
        checks.append(('best for its time' if not better else 'behind ' + ', '.join(better),
                       not better))
    if result['scheme'] == 'prune_training':
        checks.append(('{:,.0f} channels removed'.format(result['channels_removed']), True))
    return '; '.join(text + ('' if met else ' MISSED') for text, met in checks)


def plus_minus(mean, error, form):
    return form.format(mean) + (' ± ' + form.format(error).lstrip('+') if error == error else '')


def report(results):
    """Aligned text of the lines of one network; energy where it was measured."""
    metered = any(r['joules'] is not None for r in results)
    cells = [[r['label'], r['n'], plus_minus(100 * r['accuracy'], 100 * r['accuracy_se'], '{:.1f}'),
              '{:.1f}'.format(100 * r['best']),
              '' if r['label'] == FULL else plus_minus(
                  100 * r['to_full'], 100 * r['to_full_se'], '{:+.1f}'),
              plus_minus(r['seconds'], r['seconds_se'], '{:.1f}'),
              plus_minus(r['speed_up'], r['speed_up_se'], '{:.2f}')]
             + ['never' if seconds != seconds else '{:.0f}'.format(seconds)
                for seconds in r['reached']]
             + ['{:,.0f}'.format(r['peak_memory_mb'])]
             + ['' if r['joules'] is None else '{:,.0f}'.format(r['joules'])] * metered
             + [verdict(r, results)] for r in results]
    return command_line.table(
        [results[0]['model'], 'n', 'final (%)', 'best (%)', 'to full', 'train (s)', 'speed-up']
        + ['to {:.0%} (s)'.format(share) for share in REACHED] + ['peak (MB)']
        + ['energy (J)'] * metered + ['target'], cells, '<>>>>>>>>>' + '>' * metered + '<')


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--networks', nargs='+', choices=sorted(NETWORKS),
                        default=list(NETWORKS), help='default: all; the first one also with other '
                        'metrics, intervals and whole layers')
    parser.add_argument('--seeds', type=command_line.number(int, low=1), default=3)
    parser.add_argument('--epochs', type=command_line.number(int, low=1), default=EPOCHS)
    command_line.add_flag(parser, '--quick', 'one seed of the schemes on the first network')
    _bench.add_flags(parser, 'accuracy', input_size=None)
    args = _bench.parsed(parser, argv)
    if args.quick:
        args.networks, args.seeds = args.networks[:1], 1
    seeds = range(args.seed, args.seed + args.seeds)
    results, tables = [], []
    for name in args.networks:
        network = NETWORKS[name]
        rows = rows_of(variants=name == args.networks[0] and not args.quick)
        prepare(network)
        runs = measure(network, rows, seeds, args.epochs)
        if not any(run.summary['channels_removed'] for run in runs['PruneTrain']):
            rows.insert(4, STRONGER)
            runs.update(measure(network, [STRONGER], seeds, args.epochs))
        of_network = [result_of(network, row, runs[row.label], runs[FULL]) for row in rows]
        results += of_network
        tables.append(report(of_network))
    import plot
    paths = plot.accuracy_against_time(
        results, os.path.join(_path.ROOT, 'figures', 'accuracy_vs_time'))
    print('\nfinal test accuracy, means ± standard error; differences and speed-up are paired by '
          'seed; targets in brackets\n')
    print('\n\n'.join(tables))
    print()
    print('\n'.join(os.path.relpath(path) for path in paths))
    _bench.write('accuracy', dict(_bench.machine(), epochs=args.epochs, results=results), args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
