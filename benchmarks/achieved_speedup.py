"""Measures whether a step takes the share of full training that rho asks for.

    python benchmarks/achieved_speedup.py [--models resnet50 mobilenetv2] [--rhos 0.4 0.6 0.8]
    python benchmarks/achieved_speedup.py --bn_statistics train --models resnet50@64 --batch_size 8

Each network is profiled, and its importance evaluated on real digits. For each rho, tensors are
chosen as in training, with the closed loop. Their step and the full step then run interleaved. The
table has the share that was asked for, predicted and measured; the unspent budget; and how much
importance the cost on the graph adds to a choice by the chain's upper bound.
"""

import _bench
import numpy as np
from tqdm import tqdm

from elastic import command_line, options, texts

PREDICTION_ERROR = 0.04
OVER_ASKED = 0.08


def run_model(name, input_size, rhos, rounds, seed, bn_statistics, batch_size):
    """Returns the result of one network: a row for each rho within reach."""
    prepared = _bench.prepare(name, input_size, seed, data='digits', bn_statistics=bn_statistics,
                              batch_size=batch_size)
    from elastic.selection.items import smallest_rho
    from selection_solver_DP import choose_tensors, select_tensors
    table, importance, loop = _bench.chosen_by(prepared)
    full = _bench.call(prepared.maker.step(prepared.everything), prepared)
    rows, dropped = [], 0
    for rho in tqdm(rhos, desc=name, unit='rho', leave=False, disable=None):
        drift = loop.update(*prepared.batch)
        now = loop.timings
        if rho < smallest_rho(now):
            continue
        mask, _ = choose_tensors(now, importance, rho)
        order = np.argsort(-now.depth)  # from the input to the output
        chain = select_tensors((now.t_dw + now.t_up)[order], now.t_dy[order], importance[order],
                               rho * now.t_step - now.fixed)
        step = _bench.call(prepared.maker.step(mask), prepared)
        ms, noisy = _bench.interleaved([full, step], rounds)
        dropped += noisy
        left = rho * now.t_step - now.step_time(mask)
        fitting = [k for k in np.flatnonzero(~mask & (importance > 0))
                   if now.step_time(mask | (np.arange(len(mask)) == k)) <= rho * now.t_step]
        rows.append(dict(
            rho=rho, tensors=int(mask.sum()), drift=float(drift),
            full_ms=float(np.median(ms[:, 0])), predicted_full_ms=float(now.t_step),
            predicted=float(now.step_time(mask) / now.t_step),
            measured=float(np.median(ms[:, 1] / ms[:, 0])),
            spread=_bench.spread(ms[:, 1] / ms[:, 0]),
            unspent=float(left / now.t_step), still_fitting=len(fitting),
            importance=float(importance[mask].sum()),
            chain_importance=float(importance[order][chain.mask].sum())))
    return dict(_bench.machine(), model=name, input_size=input_size,
                batch_size=prepared.batch_size, smallest_rho=float(smallest_rho(table)), rows=rows,
                dropped_samples=dropped, tensors=prepared.num_tensors)


def rows_of(result):
    return [[result['model'], '%.2f' % row['rho'], '%d/%d' % (row['tensors'], result['tensors']),
             '%.3f' % row['predicted'], _bench.with_spread(row['measured'], row['spread']),
             '%+.0f' % (100 * row['drift']),
             '%.0f / %.0f' % (row['predicted_full_ms'], row['full_ms']),
             '%+.1f' % (100 * (row['measured'] / row['predicted'] - 1)),
             '%+.1f' % (100 * (row['measured'] / row['rho'] - 1)),
             '%.1f' % (100 * row['unspent']), row['still_fitting'],
             '%+.1f' % (100 * (row['importance'] / row['chain_importance'] - 1))
             if row['chain_importance'] > 0 else '']
            for row in result['rows']]


def verdict(results):
    """Returns whether each goal is met, over all rows."""
    rows = [row for result in results for row in result['rows']]
    if not rows:
        return 'no rho within reach'
    errors = [abs(row['measured'] / row['predicted'] - 1) for row in rows]
    over = max(row['measured'] / row['rho'] - 1 for row in rows)
    checks = [('median prediction error {:.1f} % ({:g})'.format(
                  100 * np.median(errors), 100 * PREDICTION_ERROR),
               np.median(errors) <= PREDICTION_ERROR),
              ('slowest {:+.1f} % over asked ({:g})'.format(100 * over, 100 * OVER_ASKED),
               over <= OVER_ASKED),
              ('{} tensors still fit (0)'.format(sum(row['still_fitting'] for row in rows)),
               not any(row['still_fitting'] for row in rows))]
    return _bench.verdict(checks)


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--rhos', nargs='+', default=[0.4, 0.5, 0.6, 0.7, 0.8], metavar='RHO',
                        type=options.number(float, above=0, high=1))
    parser.add_argument('--bn_statistics', choices=('frozen', 'train'), default='frozen')
    _bench.add_flags(parser, 'achieved_speedup', _bench.TWO_MODELS, rounds=11, batch_size=True)
    args = _bench.parsed(parser, argv)
    results = list(_bench.each('achieved_speedup', _bench.calls(
        args, args.rhos, args.rounds, args.seed, args.bn_statistics, args.batch_size)))
    print('step over full step; goals in brackets')
    print(texts.table(
        ['model', 'asked', 'tensors', 'predicted', 'measured [10 %, 90 %]', 'drift (%)',
         'full step (ms)', 'error (%)', 'over asked (%)', 'unspent (%)', 'still fit',
         'importance by graph (%)'],
        [row for result in results for row in rows_of(result)], '<>>>>>>>>>>>'))
    print(verdict(results))
    _bench.write('achieved_speedup', results, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
