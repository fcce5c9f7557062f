"""Measures who fits into the memory of a small machine, and how well memory is predicted.

    python benchmarks/memory.py            runs each scheme in a control group (about 3 hours)
    python benchmarks/memory.py --masks    compares predicted with measured working memory (2 hours)
    python benchmarks/memory.py --networks mobilenetv2 --datasets digits --schemes head \\
        --input_size 32 --epochs 1 --train_images 64      the smallest case (minutes)

A run gets the limit of a board, without swap, and is killed if it exceeds it; where control groups
are not allowed, it runs without one. Full training also runs without a limit, as the measure. The
peak of a group leaves out libraries that other processes have loaded; that of a process has them.
"""

import contextlib
import json
import os
import subprocess
import sys
import time

import _bench
import _path
import numpy as np

from elastic import command_line, options, texts
from elastic.files import read_json
from elastic.settings import LOGS_DIR

LOGS = os.path.join(LOGS_DIR, 'memory')
NETWORKS = {'mobilenetv2': [], 'efficientnet_lite0': []}
DATASETS = ('digits', 'fashion_mnist')
MICRO = '4'  # images: the memory of elastic training at rho 0.35
WITHIN = ['--memory', '{limit}B']
FULL = ['--train_type', 'full_training', '--learning_rate', '0.0015']  # rates of accuracy.py
SCHEMES = {
    'full, no limit': FULL,
    'full': FULL,
    'full, micro-batches': FULL + ['--micro_batch', MICRO] + WITHIN,
    'BN + bias': ['--train_type', 'bn_plus_bias_training', '--prefix_cache', 'off',
                  '--learning_rate', '0.024'] + WITHIN,
    'head': ['--train_type', 'traditional_tl_training', '--prefix_cache', 'off',
             '--learning_rate', '0.012'] + WITHIN}
SCHEMES.update({'elastic {}{}'.format(rho, ' cache' * cached): [
    '--rho', rho, '--prefix_cache', 'on' if cached else 'off', '--learning_rate', '0.003'] + WITHIN
    for rho in ('0.5', '0.35', '0.25') for cached in (False, True)})
GROUPS = (  # folder; files of the limit, of that of swap (memsw: of both together), of the peak
    ('/sys/fs/cgroup', 'memory.max', 'memory.swap.max', 'memory.peak'),
    ('/sys/fs/cgroup/memory', 'memory.limit_in_bytes', 'memory.memsw.limit_in_bytes',
     'memory.max_usage_in_bytes'))
MASK_NETWORKS = {  # input size, batch size
    'efficientnet_lite0': (224, 16), 'mobilenetv2': (224, 16), 'resnet50': (224, 4),
    'vgg16': (224, 4), 'EfficientNetB0': (224, 4), 'DenseNet121': (224, 4),
    'ConvNeXtTiny': (224, 4), 'vit': (224, 4)}


@contextlib.contextmanager
def group(limit):
    """Yields (path, None) of a new control group with this limit in bytes, or (None, why not)."""
    for root, most, swap, peak in GROUPS:
        path, memory = os.path.join(root, 'elastic_{}'.format(os.getpid())), str(int(limit))
        if not os.path.exists(os.path.join(root, 'cgroup.procs')):
            continue
        try:
            os.mkdir(path)
        except OSError as error:
            yield None, 'no control group: {}'.format(error.strerror)
            return
        try:
            if not os.path.exists(os.path.join(path, most)):
                continue
            for name, value in ((most, memory), (swap, memory if 'memsw' in swap else '0')):
                with contextlib.suppress(FileNotFoundError), open(
                        os.path.join(path, name), 'w') as file:
                    file.write(value)
            yield (path, os.path.join(path, peak)), None
            return
        except OSError as error:
            yield None, 'no control group: {}'.format(error.strerror)
            return
        finally:
            os.rmdir(path)
    yield None, 'no control group: this system has none'


def run(network, dataset, scheme, limit, args):
    """Returns the results of one run of main.py, a dict."""
    name = '{}_{}_{}'.format(network, dataset, scheme).replace(' ', '').replace(',', '_')
    flags = [flag.format(limit=int(limit)) for flag in SCHEMES[scheme]]
    command = [sys.executable, 'main.py', '--model_name', network, '--dataset_name', dataset,
               '--input_size', str(args.input_size), '--batch_size', str(args.batch_size),
               '--num_epochs', str(args.epochs), '--weights', args.weights, '--bn_statistics',
               'frozen', '--augmentation', 'none', '--logs_dir', LOGS, '--run_name', name,
               '--restart', '--warmup_steps', '60' if args.train_images is None else str(
                   args.epochs * args.train_images // args.batch_size // 4)] + flags
    command += ['--train_images', str(args.train_images), '--test_images',
                str(args.train_images)] if args.train_images else []
    row = dict(network=network, dataset=dataset, scheme=scheme, limit=limit)
    limited = 'no limit' not in scheme
    with group(limit if limited else 1 << 40) as (found, why_not):
        shell = 'echo $$ > {}/cgroup.procs && exec "$@"'.format(found[0]) if found else 'exec "$@"'
        begin = time.perf_counter()
        child = subprocess.run(['sh', '-c', shell, 'sh'] + command, cwd=_path.ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               universal_newlines=True)
        row.update(seconds=time.perf_counter() - begin, status=child.returncode, why_not=why_not)
        with contextlib.suppress(FileNotFoundError):  # control groups of Linux before 5.19
            if found:
                with open(found[1]) as file:
                    row['peak'] = int(file.read())
    last = child.stdout.strip().splitlines()[-1:]
    row['last_line'] = last[0] if last else ''
    if child.returncode == 0:
        summary = read_json(os.path.join(_path.ROOT, LOGS, name, 'summary.json'))
        row.update(accuracy=summary['final_accuracy'], process_mb=summary['peak_memory_mb'])
    return row


def outcome(row):
    """Returns what happened, in a few words."""
    if row['status'] == 0:
        return 'fits' if row['why_not'] is None else row['why_not']
    return {2: 'refused', -9: 'killed', 137: 'killed'}.get(
        row['status'], 'failed: {}'.format(row['last_line'][:60]))


def report(rows):
    """Returns the table of runs."""
    return texts.table(
        ['network', 'data', 'scheme', 'limit (MB)', 'outcome', 'group (MB)', 'process (MB)',
         'accuracy (%)', 'seconds'],
        [[row['network'], row['dataset'], row['scheme'], '{:.0f}'.format(row['limit'] / 1e6),
          outcome(row), '{:.0f}'.format(row['peak'] / 1e6) if 'peak' in row else '',
          '{:.0f}'.format(row['process_mb']) if 'process_mb' in row else '',
          '{:.1f}'.format(100 * row['accuracy']) if 'accuracy' in row else '',
          '{:.0f}'.format(row['seconds'])] for row in rows], '<<<><>>>>')


def measured_masks(networks, args):
    """Returns rows of one mask each: predicted, counted and resident bytes."""
    rows = []
    for network in networks:
        size, batch = MASK_NETWORKS[network]
        flags = [network, str(args.alpha), str(args.input_size or size), str(args.batch or batch)]
        for name, row in sorted(worker(*flags).items(), key=lambda item: item[1]['predicted']):
            row.update(network=network, mask=name, **worker(*flags + [name])[name])
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def worker(*flags):
    child = subprocess.run(
        [sys.executable, os.path.join('benchmarks', '_memory_worker.py')] + list(flags),
        cwd=_path.ROOT, stdout=subprocess.PIPE, universal_newlines=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def mask_report(rows):
    """Returns the table of masks, and a line of the worst and median errors."""
    errors = {kind: np.array([row['predicted'] / row[kind] - 1 for row in rows if row.get(kind)])
              for kind in ('counted', 'resident')}
    table = texts.table(
        ['network', 'mask', 'predicted (MB)', 'counted (MB)', 'resident (MB)'],
        [[row['network'], row['mask']] + ['{:.1f}'.format((row.get(kind) or np.nan) / 1e6)
                                          for kind in ('predicted', 'counted', 'resident')]
         for row in rows], '<<>>>')
    return '\n'.join([table] + ['predicted against {}: worst {:+.1f} %, median {:.1f} %'.format(
        kind, 100 * found[np.argmax(abs(found))], 100 * np.median(abs(found)))
        for kind, found in errors.items() if len(found)])


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--masks', action='store_true', help='predicted and measured memory')
    parser.add_argument('--networks', nargs='+', choices=sorted(set(NETWORKS) | set(MASK_NETWORKS)))
    parser.add_argument('--datasets', nargs='+', default=DATASETS, choices=DATASETS)
    parser.add_argument('--schemes', nargs='+', default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument('--limit_mb', type=float, default=1500, help='of a board with 2 GB')
    parser.add_argument('--input_size', type=int, default=None, help='default: 224')
    parser.add_argument('--batch', type=int, default=None)
    parser.add_argument('--alpha', type=float, default=1.0)
    parser.add_argument('--weights', default='imagenet')
    parser.add_argument('--epochs', type=options.number(int, low=1), default=6)
    parser.add_argument('--train_images', type=int, default=None)
    parser.add_argument('--json', metavar='PATH', help='where the results go')
    args = _bench.parsed(parser, argv)
    if args.masks:
        rows = measured_masks(args.networks or list(MASK_NETWORKS), args)
        print(mask_report(rows))
    else:
        args.input_size, args.batch_size = args.input_size or 224, args.batch or 16
        rows = [run(network, dataset, scheme, 1e6 * args.limit_mb, args)
                for network in args.networks or NETWORKS for dataset in args.datasets
                for scheme in args.schemes]
        print(report(rows))
    _bench.write('memory', dict(_bench.machine(), results=rows), args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
