"""Measures whether rho holds while the device changes speed, with the closed loop and without.

    python benchmarks/throttling.py [--models mobilenetv2] [--rho 0.5]

Each network is profiled on the idle machine. It then runs on one core, beside a program that moves
memory, and beside one that computes. Under each condition, tensors are chosen twice: by the table
as profiled, and by the table that the closed loop corrected in two selections with some steps
between them, as in training. Both steps then run interleaved with the full step; their ratio is the
share of full training. An oracle profiles again under each condition: the table has the importance
of the loop's choice as a share of the oracle's.
"""

import contextlib
import os
import subprocess
import sys
import time

import _bench
import numpy as np

from elastic import command_line, options, texts

WITHIN = 0.10
HOGS = {'memory hog': 'import numpy as np\na = np.ones(8 << 20)\nb = a.copy()\n'
                      'while True: b[:] = a',
        'CPU hog': 'while True: pass'}
SETTLE_SECONDS = 2.0
ORACLE_SECONDS = 3.0
SELECTIONS = 2
STEPS = 20  # between two selections


@contextlib.contextmanager
def condition(name):
    """Leaves the machine idle, confines this process to one core, or runs a program beside it."""
    if name == 'one core':
        cores = os.sched_getaffinity(0)
        _confine({min(cores)})
        try:
            yield
        finally:
            _confine(cores)
    elif name in HOGS:
        hog = subprocess.Popen([sys.executable, '-c', HOGS[name]])
        try:
            time.sleep(SETTLE_SECONDS)
            yield
        finally:
            hog.kill()
            hog.wait()
    else:
        yield


def _confine(cores):
    for thread in os.listdir('/proc/self/task'):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def run_model(name, input_size, rho, rounds, seed):
    """Returns the result of one network: a row for each condition."""
    prepared = _bench.prepare(name, input_size, seed, data='digits')
    from elastic.selection.closed_loop import Steps
    from elastic.selection.items import rho_or_smallest
    from profiler import profile_model
    from selection_solver_DP import choose_tensors
    maker, batch = prepared.maker, prepared.batch
    table, importance, loop = _bench.chosen_by(prepared)
    full = _bench.call(maker.step(prepared.everything), prepared)

    def choose(timings):
        return choose_tensors(timings, importance, rho_or_smallest(timings, rho))[0]
    fixed = choose(table)
    rows = []
    for title in ('idle', 'one core') + tuple(HOGS) + ('idle again',):
        with condition(title):
            ran = None
            for _ in range(SELECTIONS):
                drift = loop.update(*batch, steps=ran)
                held = choose(loop.timings)
                step = maker.step(held)
                ran = Steps(held, [step.milliseconds(*batch) for _ in range(1 + STEPS)][1:])
            oracle = choose(profile_model(prepared.model, batch=batch, seconds=ORACLE_SECONDS))
            steps = [_bench.call(maker.step(mask), prepared) for mask in (fixed, held, oracle)]
            for function in [full] + steps:
                function()
            ms = np.array([[_bench.settled_ms(f) for f in [full] + steps]
                           for _ in range(rounds)])
        ratios = ms[:, 1:] / ms[:, :1]
        shares = dict(zip(('without', 'held', 'oracle'), map(float, np.median(ratios, axis=0))))
        rows.append(dict(condition=title, full_ms=float(np.median(ms[:, 0])), drift=float(drift),
                         quality=float(importance[held].sum() / importance[oracle].sum()),
                         spread=_bench.spread(ratios[:, 1]),
                         same_mask=bool((fixed == held).all()), **shares))
    return dict(_bench.machine(), model=name, input_size=input_size, rho=rho,
                batch_size=prepared.batch_size, rows=rows)


def rows_of(result):
    return [[result['model'], row['condition'], '%.0f' % row['full_ms'],
             '%+.0f' % (100 * row['drift']), '%.3f' % row['without'],
             _bench.with_spread(row['held'], row['spread']),
             '%+.0f' % (100 * (row['held'] / result['rho'] - 1)), '%.3f' % row['oracle'],
             '%.0f' % (100 * row['quality']),
             'met' if abs(row['held'] / result['rho'] - 1) <= WITHIN else 'MISSED']
            for row in result['rows']]


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--rho', type=options.number(float, above=0, high=1), default=0.5)
    _bench.add_flags(parser, 'throttling', ['mobilenetv2', 'resnet50'], rounds=11)
    args = _bench.parsed(parser, argv)
    results = list(_bench.each('throttling', _bench.calls(args, args.rho, args.rounds, args.seed)))
    print('step over full step under each condition; asked: {:g}; goal: within {:g} %'.format(
        args.rho, 100 * WITHIN))
    print(texts.table(
        ['model', 'condition', 'full step (ms)', 'drift (%)', 'without loop',
         'with loop [10 %, 90 %]', 'over asked (%)', 'oracle', "importance of oracle's (%)",
         'goal'], [row for result in results for row in rows_of(result)], '<<>>>>>>><'))
    _bench.write('throttling', results, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
