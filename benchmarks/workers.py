"""Measures steps of several workers on links of several speeds, and what crosses the wire.

    sudo python benchmarks/workers.py              (15 minutes; Linux with ip and tc, as root)
    sudo python benchmarks/workers.py --steps_only (8 minutes: without times to an accuracy)

Each worker is a process in a network namespace of its own, on one core, behind a link that is
shaped by a token bucket. The network is MobileNetV2 (alpha 0.35, 96x96, 32 images a worker). The
first table compares the predicted with the measured step. For the second one, a network that was
trained on digits adapts to turned and coloured ones, until the test accuracy that one worker alone
reaches. Two workers take as many steps, of twice the images, at twice the learning rate.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile

import _bench
import _path
import numpy as np
from _worker import ALPHA, BATCH_SIZE, INPUT_SIZE

from elastic import command_line, options, texts
from elastic.device import host
from elastic.errors import UserError
from elastic.runs.folder import read_run
from elastic.settings import LOGS_DIR

LOGS, SOURCE = os.path.join(LOGS_DIR, 'workers'), 'source'
SIZES = (2, 3)
MBITS = (1000, 100, 20)
TRAINED_AT = (1000, 100)  # Mbit/s of the runs to an accuracy
GOALS = dict(predicted=0.08, sent=0.02, faster=3.0)
NETWORK, PORT, INTERFACE = '10.77.0.', 2222, 'eth0'


def ip(*words):
    subprocess.run(['ip'] + ' '.join(map(str, words)).split(), check=True)


@contextlib.contextmanager
def namespaces(count, mbit):
    """Yields the names of `count` network namespaces on one switch, each with a shaped link."""
    names, switch = ['elastic{}'.format(i) for i in range(count)], 'elastic_switch'
    burst = max(16, mbit // 8)  # kB; what passes in 1 ms
    try:
        ip('link add', switch, 'type bridge')
        ip('link set', switch, 'up')
        for i, name in enumerate(names):
            ip('netns add', name)
            ip('link add elastic_port{}'.format(i), 'type veth peer name', INTERFACE, 'netns', name)
            ip('link set elastic_port{}'.format(i), 'master', switch, 'up')
            ip('-n', name, 'addr add', '{}{}/24'.format(NETWORK, i + 1), 'dev', INTERFACE)
            ip('-n', name, 'link set', INTERFACE, 'up')
            ip('-n', name, 'link set lo up')
            subprocess.run('ip netns exec {} tc qdisc add dev {} root tbf rate {}mbit burst {}kb '
                           'latency 200ms'.format(name, INTERFACE, mbit, burst).split(), check=True)
        yield names
    finally:
        for i, name in enumerate(names):  # a namespace alone would take its link with it later
            for words in ('link del elastic_port{}'.format(i), 'netns del ' + name):
                subprocess.run(['ip'] + words.split(), stderr=subprocess.DEVNULL)
        subprocess.run(['ip', 'link', 'del', switch], stderr=subprocess.DEVNULL)


def run_workers(names, command):
    """Runs command(index, addresses) in each namespace, on one core; exits if one fails."""
    addresses = ','.join('{}{}:{}'.format(NETWORK, i + 1, PORT) for i in range(len(names)))
    cores = sorted(host.usable_cpus())
    children = [subprocess.Popen(
        ['ip', 'netns', 'exec', name, 'taskset', '-c', str(cores[i % len(cores)]), sys.executable]
        + command(i, addresses), cwd=_path.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        universal_newlines=True) for i, name in enumerate(names)]
    outputs = [child.communicate()[0] for child in children]
    for child, output in zip(children, outputs):
        if child.returncode:
            raise SystemExit(output[-2000:])


def measure_steps(count, mbit):
    """Returns the results of each rho on the slowest of `count` workers."""
    with namespaces(count, mbit) as names, tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in names]
        run_workers(names, lambda i, addresses: [
            os.path.join('benchmarks', '_worker.py'), addresses, str(i), INTERFACE, paths[i]])
        found = []
        for path in paths:
            with open(path) as file:
                found.append(json.load(file))
    rows = [dict(max(of_rho, key=lambda result: result['step_ms']), workers=count, mbit=mbit)
            for of_rho in zip(*found)]
    for row in rows:
        row['ideal_bytes'] = 2 * (count - 1) / count * row['gradient_bytes']
        print('{} workers, {} Mbit/s, rho {:g}: {:.0f} ms, predicted {:.0f}'.format(
            count, mbit, row['rho'], row['step_ms'], row['predicted_ms']), flush=True)
    return rows


def steps_table(rows):
    """Returns the table of measured and predicted steps, and the verdict."""
    cells = []
    for row in rows:
        full = next(other for other in rows if other['rho'] == 1 and all(
            other[key] == row[key] for key in ('workers', 'mbit')))
        row['sent_share'] = row['sent_bytes'] / full['sent_bytes']
        row['gradient_share'] = row['gradient_bytes'] / full['gradient_bytes']
        row['speed_up'] = full['step_ms'] / row['step_ms']
        cells.append([
            row['workers'], row['mbit'], '{:g}'.format(row['rho']), row['tensors'],
            '{:.0f}'.format(row['predicted_ms']),
            '{:.0f} ({:.0f} to {:.0f})'.format(row['step_ms'], row['low_ms'], row['high_ms']),
            '{:+.0f}'.format(100 * (row['predicted_ms'] / row['step_ms'] - 1)),
            '{:.2f}'.format(row['speed_up']), '{:.0f}'.format(row['sent_bytes'] / 1e3),
            '{:.1f}'.format(100 * row['sent_share']), '{:.1f}'.format(100 * row['gradient_share'])])
    error = np.median([abs(row['predicted_ms'] / row['step_ms'] - 1) for row in rows])
    apart = max(abs(row['sent_share'] - row['gradient_share']) for row in rows)
    faster = [row['speed_up'] for row in rows if row['mbit'] == 100 and row['rho'] == 0.35]
    return texts.table(
        ['workers', 'Mbit/s', 'rho', 'tensors', 'predicted (ms)', 'step (ms)', 'error (%)',
         'speed-up', 'sent (kB)', 'of rho 1 (%)', 'gradients, of all (%)'], cells, '>' * 11) + (
             '\nmedian error {:.1f} %; sent bytes and gradients differ by at most {:.1f} % of all; '
             'rho 0.35 at 100 Mbit/s is {} times as fast as rho 1: {}').format(
                 100 * error, 100 * apart, ' and '.join(map('{:.2f}'.format, faster)),
                 _bench.verdict([('predicted', error <= GOALS['predicted']),
                                 ('sent', apart <= GOALS['sent']),
                                 ('faster', min(faster) >= GOALS['faster'])]))


def flags(name, *more):
    """Returns the command line of a run of main.py."""
    return ['main.py', '--model_name', 'mobilenetv2', '--alpha', str(ALPHA), '--input_size',
            str(INPUT_SIZE), '--batch_size', str(BATCH_SIZE), '--test_images', '500', '--logs_dir',
            LOGS, '--run_name', name] + list(more)


def on_target(name, *more):
    """Returns the command line of a run that adapts the source network, from its beginning."""
    return flags(name, '--dataset_name', 'digits_shifted', '--weights', os.path.join(
        LOGS, SOURCE, 'checkpoint', 'weights.npz'), '--train_images', '2688', '--interval', '3',
                 '--warmup_steps', '40', '--prefix_cache', 'off', '--restart', *more)


def measure_training():
    """Returns the results of training alone, then of two workers at each speed and rho."""
    subprocess.run([sys.executable] + flags(
        SOURCE, '--dataset_name', 'digits', '--weights', 'none', '--train_type', 'full_training',
        '--num_epochs', '3', '--learning_rate', '0.05', '--save_model'), cwd=_path.ROOT, check=True)
    with namespaces(1, MBITS[0]) as names:
        run_workers(names, lambda i, addresses: on_target(
            'alone', '--train_type', 'full_training', '--num_epochs', '6', '--learning_rate',
            '0.02'))
    runs = [('one worker', None, None, 'alone')]
    for mbit in TRAINED_AT:
        with namespaces(2, mbit) as names:
            for rho in (1.0, 0.35):
                name = 'two_{}_{:g}'.format(mbit, rho)
                run_workers(names, lambda i, addresses, rho=rho, name=name: on_target(
                    name, '--rho', str(rho), '--num_epochs', '12', '--learning_rate', '0.04',
                    '--workers', addresses, '--worker_index', str(i)))
                runs.append(('two workers', mbit, rho, name))
    found = [read_run(os.path.join(_path.ROOT, LOGS, name)) for *_, name in runs]
    wanted = found[0].summary['final_accuracy']
    results = []
    for (who, mbit, rho, _), run in zip(runs, found):
        seconds = next((after for after, accuracy in zip(
            run.epochs['train_seconds'], run.epochs['test_accuracy']) if accuracy >= wanted), None)
        results.append(dict(who=who, mbit=mbit, rho=rho, seconds_to=seconds, step_ms=run.summary[
            'step_ms'], accuracy=run.summary['final_accuracy'], seconds=run.summary[
                'train_seconds']))
    return results


def training_table(results):
    return texts.table(
        ['', 'Mbit/s', 'rho', 'step (ms)', 'final accuracy (%)', 'training (s)',
         "(s) to one worker's accuracy"],
        [[row['who'], row['mbit'] or '', '' if row['rho'] is None else '{:g}'.format(row['rho']),
          '{:.0f}'.format(row['step_ms']), '{:.1f}'.format(100 * row['accuracy']),
          '{:.1f}'.format(row['seconds']), 'never' if row['seconds_to'] is None else
          '{:.1f}'.format(row['seconds_to'])] for row in results])


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    options.add_flag(parser, '--steps_only', 'leave out the runs to an accuracy')
    _bench.add_flags(parser, 'workers', input_size=None)
    args = _bench.parsed(parser, argv)
    if os.geteuid():
        raise UserError('network namespaces need root: run this with sudo')
    rows = [row for count in SIZES for mbit in MBITS for row in measure_steps(count, mbit)]
    print('\n' + steps_table(rows))
    results = [] if args.steps_only else measure_training()
    if results:
        print('\n' + training_table(results))
    _bench.write('workers', dict(_bench.machine(), steps=rows, training=results), args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
