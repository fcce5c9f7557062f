"""Compares the rate that `--learning_rate auto` finds with the tuned one, by the final accuracy.

    python benchmarks/learning_rate.py                       (two hours; finished runs are kept)
    python benchmarks/learning_rate.py --networks lite0_digits --seeds 2
    python benchmarks/learning_rate.py --table               (seconds: the finished runs)

Networks, rows and tuned rates of EfficientNet-Lite0 are those of accuracy.py. MobileNetV2 starts
from digits; its rates are tuned here, as accuracy.py --tune does. Elastic training keeps its first
timing table, so that both runs of a row choose alike on a busy machine.
"""

import os

import _bench
import _path
import accuracy
from _accuracy_rows import LITE0, NETWORKS, rows_of

from elastic import command_line, options, texts
from elastic.runs.folder import read_rows

ROWS = ('full', 'elastic 0.5', 'elastic 0.35', 'head only')
WITHIN = 1.0  # points below the tuned rate: the goal, in 14 of 16 rows
CHANCE = 1.2  # times chance: no better than guessing
ON_LITE0 = ['lite0_fashion', 'lite0_digits', 'lite0_cells', 'lite0_fashion_12000']
SMALL = NETWORKS['mobilenetv2_repeated']._replace(steps=94, epochs=6, interval=3)
KNOWN = {network.name: network for network in [NETWORKS[name] for name in ON_LITE0] + [
    SMALL._replace(name='mobilenetv2_digits'),
    SMALL._replace(name='mobilenetv2_fashion', target=LITE0.target)]}


def pairs_of(network, table):
    """Returns [(Row whose rate is found, Row with its tuned rate)]. table: train nothing."""
    rows = [row._replace(flags=row.flags + ['--closed_loop', 'false'] * (row.rho is not None))
            for row in rows_of(network, False) if row.label in ROWS]
    if not (table or rows[0].learning_rate):
        rates = accuracy.tune(network, rows, [accuracy.TUNED_ON])
        rows = [row._replace(learning_rate=rates[row.label]) for row in rows]
    return [(row._replace(label=row.label + ', auto', learning_rate='auto'), row) for row in rows]


def result_of(network, pair, seed):
    """Returns [network, row, seed, rate and accuracy found, rate and accuracy tuned, points]."""
    runs = [accuracy.finished_runs(network, [row], [seed])[row.label].get(seed) for row in pair]
    if None in runs:
        return None
    auto, tuned = [100 * accuracy.accuracy_of(network, row, seed, run)
                   for row, run in zip(pair, runs)]
    chosen = read_rows(accuracy.folder_of(network, pair[0], seed), 'rates.csv', dict(chosen=float))
    return [network.name, pair[1].label, seed, chosen[-1]['chosen'], auto,
            runs[1].summary['learning_rate'], tuned, auto - tuned]


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--networks', nargs='+', choices=list(KNOWN), default=ON_LITE0,
                        help='default: those of EfficientNet-Lite0')
    parser.add_argument('--seeds', type=options.number(int, low=1), default=1)
    options.add_flag(parser, '--table', 'train nothing; print the table of the finished runs')
    args = parser.parse_args(argv)
    os.chdir(_path.ROOT)
    found, seeds = [], range(args.seeds)
    for network in map(KNOWN.get, args.networks):
        if not args.table:
            accuracy.prepare(network, list(seeds) + [accuracy.TUNED_ON])
        pairs = pairs_of(network, args.table)
        if not args.table:
            accuracy.measure(network, [row for pair in pairs for row in pair], seeds)
        found += [result_of(network, pair, seed) for pair in pairs for seed in seeds]
    found = [result for result in found if result is not None]
    print(texts.table(
        ['network', 'row', 'seed', 'rate found', 'accuracy (%)', 'rate tuned', 'accuracy (%)',
         'points'],
        [result[:3] + [form.format(number) for form, number in zip(
            ('{:.2g}', '{:.1f}', '{:.2g}', '{:.1f}', '{:+.1f}'), result[3:])] for result in found],
        '<<>>>>>>'))
    print('at most {:g} point below the tuned rate: {} of {}; at chance: {}'.format(
        WITHIN, sum(result[-1] >= -WITHIN for result in found), len(found),
        sum(result[4] <= CHANCE * 100 / KNOWN[result[0]].num_classes for result in found)))
    return 0


if __name__ == '__main__':
    command_line.run(main)
