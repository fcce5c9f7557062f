"""Speed and quality of the exact selector against the paper's recursion, measured side by side.

python benchmarks/selector.py                      (under a minute)
python benchmarks/selector.py --tensors 214        (seconds)

Instances are drawn with a fixed seed in the shape of a convolutional network: a kernel with its
gamma and beta, log-normal times, importances with a heavy tail, one in eight of them negative. The
budget is a share of the backward pass of full training. Both solvers see the same instance; their
samples are interleaved, so that a busy moment of the machine hits both.

The recursion rounds times down and so exceeds the budget. Its value is therefore compared twice: as
it is, and with the exact selection for the time that the recursion's selection really takes.
"""

import argparse
import json
import os
import platform
import time

import _path
import numpy as np
from tqdm import tqdm

import command_line
from command_line import UserError
from selection_solver_DP import select_tensors, select_tensors_paper

TENSORS = (161, 214, 600)  # ResNet50 without and with its convolution biases; beyond the paper
BUDGETS = (0.3, 0.5, 0.7)
PAPER_BINS = 1000
EXACT_BINS = (10_000, PAPER_BINS)  # each solver's own default, then both at the paper's
EXACT_CALLS = 10  # per sample of the recursion, which takes longer than all of them
TARGET = {'tensors': 214, 'bins': PAPER_BINS, 'speed_ratio': 100}


def draw_instance(tensors, seed):
    """(t_dw, t_dy, importance), each (tensors,) float64, the first two in ms."""
    random = np.random.default_rng([seed, tensors])
    is_kernel = np.arange(tensors) % 3 == 0
    typical_ms = np.where(is_kernel, 1.0, 0.06)
    t_dw = typical_ms * random.lognormal(0, 0.8, tensors)
    t_dy = typical_ms * random.lognormal(0, 0.8, tensors)
    importance = 1e-4 * random.lognormal(0, 1.5, tensors)
    importance[random.random(tensors) < 1 / 8] *= -1
    return t_dw, t_dy, importance


def measure(instance, budget, repeats, advance):
    """One row per entry of EXACT_BINS; `advance` is called after every repeat."""
    solvers = [lambda bins=bins: select_tensors(*instance, budget, bins) for bins in EXACT_BINS]
    exact = [solve() for solve in solvers]  # the first calls, untimed
    exact_ms = [[] for _ in solvers]
    paper_ms = []
    for _ in range(repeats):
        paper, ms = timed(lambda: select_tensors_paper(*instance, budget, PAPER_BINS))
        paper_ms.append(ms)
        for solve, samples in zip(solvers, exact_ms):
            samples.extend(timed(solve)[1] for _ in range(EXACT_CALLS))
        advance()
    return [{'tensors': len(instance[0]), 'budget_ms': budget,
             'bins_exact': bins, 'bins_paper': PAPER_BINS,
             'exact_ms': float(np.median(samples)), 'exact_spread_ms': spread(samples),
             'paper_ms': float(np.median(paper_ms)), 'paper_spread_ms': spread(paper_ms),
             'speed_ratio': float(np.median(paper_ms) / np.median(samples)),
             'value_ratio': paper.importance / selection.importance,
             'value_ratio_same_time': paper.importance / select_tensors(
                 *instance, paper.time, bins).importance,
             'exact_time_share': selection.time / budget, 'paper_time_share': paper.time / budget,
             'exact_selected': int(selection.mask.sum()), 'paper_selected': int(paper.mask.sum())}
            for bins, selection, samples in zip(EXACT_BINS, exact, exact_ms)]


def timed(call):
    """(result, ms)."""
    start = time.perf_counter()
    result = call()
    return result, 1e3 * (time.perf_counter() - start)


def spread(samples):
    """Half the distance between the quartiles."""
    return float(np.subtract(*np.percentile(samples, [75, 25])) / 2)


def verdict(rows):
    """The target of TARGET against the slowest of its budgets; None where it was not measured."""
    ratios = [row['speed_ratio'] for row in rows if row['tensors'] == TARGET['tensors']
              and row['bins_exact'] == row['bins_paper'] == TARGET['bins']]
    if not ratios:
        return None
    return dict(TARGET, measured=min(ratios), met=min(ratios) >= TARGET['speed_ratio'])


def report(rows, repeats):
    """What the terminal shows."""
    header = ['N', 'budget', 'bins exact', 'bins paper', 'exact ms', 'paper ms', 'speed ratio',
              'paper overrun', 'value ratio', 'at same time']
    cells = [[row['tensors'], '{:.0%}'.format(row['budget_share']),
              '{:,}'.format(row['bins_exact']), '{:,}'.format(row['bins_paper']),
              '{:.2f} ± {:.2f}'.format(row['exact_ms'], row['exact_spread_ms']),
              '{:,.1f} ± {:.1f}'.format(row['paper_ms'], row['paper_spread_ms']),
              '{:,.0f}x'.format(row['speed_ratio']),
              '{:+.1%}'.format(row['paper_time_share'] - 1),
              '{:.1%}'.format(row['value_ratio']),
              '{:.1%}'.format(row['value_ratio_same_time'])] for row in rows]
    calls = '{} calls (exact), {} (paper)'.format(EXACT_CALLS * repeats, repeats)
    used = [row['exact_time_share'] for row in rows]
    notes = [
        'budget         share of the backward pass of full training',
        'ms             median ± half the interquartile range of ' + calls,
        "paper overrun  time of the paper's selection over the budget; the exact one keeps to it",
        '               and uses {:.1%} to {:.1%} of it'.format(min(used), max(used)),
        'value ratio    importance selected by the paper / by the exact selector',
        "at same time   the same, the exact selector given the time the paper's one really takes;",
        '               above 100% where rounding up to its bins leaves part of that unspent']
    result = verdict(rows)
    if result is None:
        line = 'Target not measured: it needs --tensors {tensors}.'.format(**TARGET)
    else:
        line = ('Target {}: at N = {tensors} and {bins:,} bins the exact selector is '
                '{measured:,.0f}x as fast (slowest budget; at least {speed_ratio}x wanted).')
        line = line.format('met' if result['met'] else 'MISSED', **result)
    text = command_line.table(header, cells, '>' * len(header))
    return '\n'.join([text, ''] + notes + ['', line])


def main(argv=None):
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--repeats', type=command_line.number(int, low=1), default=15,
                        help='samples of the recursion per instance (default: 15)')
    parser.add_argument('--tensors', type=command_line.number(int, low=1), nargs='+', metavar='N',
                        default=TENSORS, help='default: {} {} {}'.format(*TENSORS))
    parser.add_argument('--seed', type=command_line.number(int, low=0), default=0)
    parser.add_argument('--json', metavar='PATH', default=os.path.join(_path.RESULTS,
                                                                       'selector.json'),
                        help='where the numbers go (default: benchmarks/results/selector.json)')
    args = parser.parse_args(argv)
    folder = os.path.dirname(os.path.abspath(args.json))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError("--json '{}': no such folder can be made ({})".format(args.json, error))
    if os.path.isdir(args.json) or not os.access(folder, os.W_OK):
        raise UserError("--json '{}' is not a file that can be written".format(args.json))

    rows = []
    work = sum(tensors ** 2 for tensors in args.tensors) * len(BUDGETS) * args.repeats
    with tqdm(total=work, bar_format='{desc} {percentage:3.0f}% |{bar:30}| {elapsed}<{remaining}',
              leave=False, disable=None) as progress:
        for tensors in args.tensors:
            instance = draw_instance(tensors, args.seed)
            for share in BUDGETS:
                progress.set_description_str('N = {}, budget {:.0%}'.format(tensors, share))
                budget = share * float(instance[0].sum() + instance[1].sum())
                for row in measure(instance, budget, args.repeats,
                                   lambda step=tensors ** 2: progress.update(step)):
                    rows.append(dict(row, budget_share=share))
    print(report(rows, args.repeats))
    machine = {'python': platform.python_version(), 'numpy': np.__version__,
               'machine': platform.machine(), 'system': platform.system(), 'cpus': os.cpu_count()}
    with open(args.json, 'w', encoding='utf-8') as file:
        json.dump({'seed': args.seed, 'repeats': args.repeats, 'machine': machine,
                   'target': verdict(rows), 'rows': rows}, file, indent=1)
        file.write('\n')
    print('written: {}'.format(os.path.relpath(args.json)))


if __name__ == '__main__':
    command_line.run(main)
