"""Measures attribution, prediction and kept budgets for a network of every kind.

    python benchmarks/architectures.py [--models lstm DenseNet121] [--masks 8]

Each architecture of _zoo.py runs in its own process, at a size whose step takes 15 ms
or more. For random masks, as in time_model.py, it compares the predicted with the measured share of
backward pass and update. Then it selects tensors for rho 0.5 (or slightly above the smallest rho)
by importances of one batch, and measures their step against the full one. All steps of an
architecture run interleaved.
"""

import time

import _bench
import numpy as np
from time_model import random_masks

from elastic import command_line, errors, options, texts
from elastic.compat import start

RHO, MARGIN = 0.5, 1.05
LEAST_COVERAGE, MEAN_POINTS, BUDGET_SLACK = 0.95, 6.0, 1.08


def zoo():
    """Returns the members of the zoo that this stack has, by name."""
    start.quiet_tensorflow()
    from _zoo import ZOO
    return ZOO


def names():
    """Returns the names of the whole zoo."""
    return list(zoo())


def run_model(name, num_masks, rounds, seconds, seed):
    """Returns the result of one architecture, a dict with one entry per mask."""
    begin, member = time.perf_counter(), zoo()[name]
    from elastic.selection.items import smallest_rho
    from profiler import profile_model
    from selection_solver_DP import choose_tensors
    model, inputs, labels = member.build(member.benchmark)
    table = profile_model(model, batch=(inputs, labels), seconds=seconds)
    maker = _bench.step_maker(model, inputs, labels)
    n, least = len(maker.variables), smallest_rho(table)
    rho = max(RHO, MARGIN * least)
    importance = _bench.importance_of(maker, (inputs, labels))
    masks = [choose_tensors(table, importance, rho)[0]] + random_masks(num_masks, n, seed)
    steps = [maker.forward()] + [maker.step(mask) for mask in [np.ones(n, dtype=bool)] + masks]
    ms, dropped = _bench.interleaved(
        [lambda step=step: step(inputs, labels)[0].numpy() for step in steps], rounds)
    t_fp, t_full, *times = np.median(ms, axis=0)
    rows = [dict(measured=float((t - t_fp) / (t_full - t_fp)),
                 predicted=float((table.step_time(mask) - table.t_fp)
                                 / (table.t_bp + table.t_update)),
                 tensors=int(np.sum(mask))) for mask, t in zip(masks[1:], times[1:])]
    return dict(_bench.machine(), model=name, tensors=n, t_full=float(t_full), t_fp=float(t_fp),
                coverage=table.profile.coverage, left_out=table.profile.left_out[:5], masks=rows,
                rho=float(rho),
                smallest_rho=least, chosen=int(masks[0].sum()),
                predicted_share=float(table.step_time(masks[0]) / table.t_step),
                measured_share=float(times[0] / t_full), dropped_samples=dropped,
                predicted_fp=float(table.t_fp / table.t_step),
                spread=table.profile.spread, seconds=time.perf_counter() - begin)


def summary(result):
    """Returns the table row of one architecture."""
    off = np.array([100 * abs(row['predicted'] - row['measured']) for row in result['masks']])
    missed = [what for what, met in (
        ('attributed', result['coverage'] >= LEAST_COVERAGE),
        ('mean', off.mean() <= MEAN_POINTS),
        ('budget', result['measured_share'] <= BUDGET_SLACK * result['rho'])) if not met]
    return [result['model'], result['tensors'], '%.1f' % result['t_full'],
            '%.1f' % (100 * result['coverage']), '%.1f' % off.mean(), '%.1f' % off.max(),
            '%.2f' % result['smallest_rho'], '%.2f' % result['rho'],
            '%.2f' % result['predicted_share'], '%.2f' % result['measured_share'],
            result['dropped_samples'], 'MISSED: ' + ', '.join(missed) if missed else 'met']


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    _bench.add_flags(parser, 'architectures', input_size=None, rounds=12)
    parser.add_argument('--models', nargs='+', metavar='NAME',
                        help='members of _zoo.py (default: all)')
    parser.add_argument('--masks', type=options.number(int, low=1), default=8)
    parser.add_argument('--seconds', type=options.number(float, above=0), default=4.0,
                        help='for the totals of each timing table (default: %(default)s)')
    args = _bench.parsed(parser, argv)
    known = _bench.in_own_process('architectures', 'names')  # keeps TensorFlow out of this process
    for name in args.models or []:
        errors.one_of(name, known, 'model')
    results, failed = [], []
    for name in args.models or known:
        result = _bench.in_own_process('architectures', 'run_model', name, args.masks, args.rounds,
                                       args.seconds, args.seed)
        if result is None:  # its process printed the error
            failed.append(name)
        else:
            results.append(result)
            print('  '.join(map(str, summary(result))), flush=True)
    print('\ntargets: at least {:.0f} % attributed, mean error within {:g} points, step at most '
          '{:g} of rho'.format(100 * LEAST_COVERAGE, MEAN_POINTS, BUDGET_SLACK))
    print(texts.table(
        ['architecture', 'tensors', 'full step (ms)', 'attributed (%)', 'mean |error| (points)',
         'worst', 'smallest rho', 'rho', 'predicted', 'measured', 'dropped', 'targets'],
        [summary(result) for result in results] + [
            [name] + [''] * 10 + ['FAILED'] for name in failed], '<>>>>>>>>>><'))
    _bench.write('architectures', results, args.json)
    return 1 if failed else 0


if __name__ == '__main__':
    command_line.run(main)
