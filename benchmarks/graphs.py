"""Compares ways to fine-tune graph networks in equal time (the paper's first open question).

    python benchmarks/graphs.py                     (20 minutes on two quiet cores)
    python benchmarks/graphs.py --small --seeds 1 --tuning_seeds 0     (1 minute, to try it)

residual: seven residual graph convolutions, on superpixel graphs of clothes (Fashion-MNIST, or
scikit-learn's digits where it is not installed). attention: a graph attention network, on the same.
nodes: four graph convolutions on one graph of digits; a step takes the whole graph, and the loss
50 labelled nodes. Each is trained on classes 0 to 4, then learns 5 to 9 with a new output layer.
molecules, asked for by --networks (`pip install rdkit`): the residual network predicts in which
fifth the polar surface area lies; trained on the smaller half of 5,000, it learns the larger half.

Full training takes --steps steps. Elastic training takes as many within rho, and
selects twice. Its time, selections included, is what the last tensors within the same rho, the
output layer alone, and a shorter full training get. Times are the median step times the number of
steps, and the shortest selection times their number, because other load disturbs these least.
Tracing is left out: each run pays it once.
Each row's learning rate is the best of three on validation examples of other seeds.

The script also says where the smallest rho lies, how it and the cost of the deepest tensor change
without aggregation, and by how much selections miss the optimum.
"""

import importlib.util
import os
import sys
import time
from typing import NamedTuple, Optional

import _bench
import numpy as np
from _accuracy_table import mean_error, plus_minus

from elastic import command_line, errors, options, texts
from elastic.compat import start
from elastic.data.fashion import FASHION, FOLDER
from elastic.schemes.fixed import HEAD, fixed_mask
from elastic.settings import TRAINING

MOLECULES = 'molecules'  # need a package that nothing else needs
NETWORKS = ('residual', 'attention', 'nodes', MOLECULES)
IMAGES = (FASHION, 'digits')
RHOS, MARGIN = (0.7, 0.5, 0.35), 1.05  # rhos below MARGIN * the smallest become that, or 1
SELECTIONS = 2
RATES = {'full': (0.001, 0.003, 0.01), 'elastic': (0.003, 0.01, 0.03), 'last': (0.01, 0.03, 0.1),
         'head': (0.03, 0.1, 0.3)}
SOURCE_RATE = 0.003  # by Adam, which these networks need
TUNING_SEED = 1000  # the first of the seeds that only choose learning rates
LEAST_BY_TRYING = 14  # tensors; for more, HiGHS gives a bound of the optimum


class Row(NamedTuple):
    """One way to train: 'full', 'elastic', 'last' or 'head'.

    rho: whose elastic row gives its time; None: it takes all steps of full training.
    """
    kind: str
    rho: Optional[float] = None

    @property
    def label(self):
        name = {'full': 'full', 'elastic': 'elastic {:.2f}', 'last': 'last tensors, {:.2f}',
                'head': 'head, time of {:.2f}'}[self.kind].format(self.rho or 0)
        return name + (', time of {:.2f}'.format(self.rho) if self.kind == 'full' and self.rho
                       else '')

    @property
    def rates(self):
        return RATES[self.kind]


def rows_of(least):
    """Returns the Rows of a network with this smallest rho; elastic ones come before opponents."""
    rhos = sorted({min(1.0, max(rho, MARGIN * least)) for rho in RHOS}, reverse=True)
    return [Row('full')] + [Row(kind, rho) for rho in rhos
                            for kind in ('elastic', 'full', 'last', 'head')]


def last_tensors(table, rho):
    """Returns the (N,) bool mask of the last tensors, as many as fit in rho; at least one."""
    order, found = np.argsort(table.depth, kind='stable'), None
    for count in range(1, len(order) + 1):
        mask = np.isin(np.arange(len(order)), order[:count])
        if found is not None and table.step_time(mask) > rho * table.t_step:
            break
        found = mask
    return found


class Trainer:
    """Trains one network many times: its steps are traced once, and each run starts over."""

    def __init__(self, task, seconds):
        import tensorflow as tf

        from elastic.selection.importance import Evaluator
        from elastic.steps.masked_step import StepMaker
        from elastic.steps.optimizer import WarmupCosine, optimizer_with
        from profiler import profile_model
        self.task, self.model = task, task.build()
        self.example = task.batch(task.target, np.arange(task.batch_size))
        self.table = profile_model(self.model, batch=self.example, optimizer='adam',
                                   seconds=seconds)
        self._schedule = WarmupCosine(1.0, 1, movable=True, scaled=True)
        optimizer = optimizer_with('adam', self._schedule, self.model.trainable_variables)
        self.maker = StepMaker(self.model, optimizer, TRAINING.weight_decay, *self.example)
        self._evaluator = Evaluator(self.maker)
        self._blank = [variable.numpy() for variable in self.maker.everything]
        self._scores = tf.function(lambda inputs: self.model(inputs, training=False))
        self.importance = None  # of the last selection
        self._steps = {}

    @property
    def everything(self):
        return np.ones(len(self.maker.variables), dtype=bool)

    def mask_of(self, row):
        """Returns the (N,) bool mask of a row that always trains the same tensors."""
        return {'full': lambda: self.everything, 'last': lambda: last_tensors(self.table, row.rho),
                'head': lambda: fixed_mask(HEAD, self.model)}[row.kind]()

    def fixed_step(self, mask):
        """Returns the MaskedStep of a mask, made once."""
        key = mask.tobytes()
        if key not in self._steps:
            self._steps[key] = self.maker.step(mask)
            self._steps[key](*self.example)  # compiles
        return self._steps[key]

    def start(self, weights, rate, steps):
        """Sets weights, and the optimizer before its first of `steps` steps."""
        self.maker.assign(self._blank)
        self.model.set_weights(weights)
        self._schedule.scale.assign(rate)
        self._schedule.end_at(steps)
        self._evaluator.scale = 1.0

    def train(self, step, batches):
        """Takes a step on each batch; returns the seconds."""
        ms = [step.timed(*batch)[1] for batch in batches]
        return 1e-3 * len(ms) * float(np.median(ms))

    def train_elastic(self, rho, batches):
        """Selects SELECTIONS times within rho; returns the seconds of steps, and of selections."""
        from elastic.selection.importance import evaluate_importance
        from selection_solver_DP import choose_tensors
        seconds, selecting = 0.0, []
        for part in np.array_split(np.arange(len(batches)), SELECTIONS):
            begin, batch = time.perf_counter(), batches[part[0]]
            self.importance = evaluate_importance(self.model, self.maker.optimizer, [batch],
                                                  evaluator=self._evaluator)
            step = self.maker.step(choose_tensors(self.table, self.importance, rho)[0])
            step.timed(*batch)
            selecting.append(time.perf_counter() - begin)
            seconds += self.train(step, [batches[i] for i in part[1:]])
        return seconds, SELECTIONS * min(selecting)

    def batches(self, domain, examples, steps, seed):
        """Returns `steps` batches; each pass over the examples has its own order."""
        rng, size, found = np.random.RandomState(seed), self.task.batch_size, []
        while len(found) < steps:
            order = rng.permutation(examples)
            found += [self.task.batch(domain, order[i:i + size])
                      for i in range(0, len(order) - size + 1, size)]
        return found[:steps]

    def accuracy(self, domain, examples):
        inputs, labels = self.task.batch(domain, examples)
        return float(np.mean(self._scores(inputs).numpy().argmax(1) == labels.numpy()))


class Comparison:
    """Runs all rows on one seed: `weights` from the source, and parts of the target.

    step_seconds: (row) -> seconds of its step.
    """

    def __init__(self, trainer, steps, seed, step_seconds):
        from _graphs import fresh_weights
        self.trainer, self.steps, self.seed = trainer, steps, seed
        self.step_seconds, task = step_seconds, trainer.task
        trainer.start(fresh_weights(task, seed), SOURCE_RATE, steps)
        source = np.arange(len(task.source.labels))
        trainer.train(trainer.fixed_step(trainer.everything),
                      trainer.batches(task.source, source, steps, seed))
        self.source_accuracy = trainer.accuracy(task.source, source)
        head = fixed_mask(HEAD, trainer.model)
        self.weights = [new if of_head else old for new, old, of_head in zip(
            fresh_weights(task, seed + 1), trainer.model.get_weights(), head)]
        order = np.random.RandomState(seed).permutation(len(task.target.labels))
        self.parts = np.split(order[:sum(task.sizes)], np.cumsum(task.sizes)[:-1])

    def run(self, row, rate, seconds, judged):
        """Returns dict(accuracy, seconds, selecting, steps); `selecting` is part of the seconds.

        seconds: its time; elastic training sets that of others.

        judged: part of the target that gives the accuracy, 1 to validate, 2 to test.
        """
        trainer, steps, domain = self.trainer, self.steps, self.trainer.task.target
        if row.kind != 'elastic' and row.rho:
            steps = max(1, int(round(seconds / self.step_seconds(row))))
        batches = trainer.batches(domain, self.parts[0], steps, self.seed)
        trainer.start(self.weights, rate, steps)
        selecting = 0.0
        if row.kind == 'elastic':
            took, selecting = trainer.train_elastic(row.rho, batches)
        else:
            took = trainer.train(trainer.fixed_step(trainer.mask_of(row)), batches)
        return dict(accuracy=trainer.accuracy(domain, self.parts[judged]), steps=steps,
                    seconds=took + selecting, selecting=selecting)

    def all_rows(self, rows, rates, judged):
        """Returns label -> one dict of `run` for each of rates[label]."""
        found, seconds = {}, {}
        for row in rows:
            found[row.label] = [self.run(row, rate, seconds.get(row.rho), judged)
                                for rate in rates[row.label]]
            if row.kind == 'elastic':
                seconds[row.rho] = np.mean([run['seconds'] for run in found[row.label]])
        return found


def shares(table):
    """Returns dict of shares of a step: smallest rho, forward pass, deepest tensor alone.

    error_gradient: the share of the backward pass that is no weight gradient.
    """
    from elastic.selection.items import smallest_rho
    deepest = np.arange(len(table.depth)) == np.argmax(table.depth)
    return dict(smallest_rho=smallest_rho(table), forward=float(table.t_fp / table.t_step),
                deepest_alone=float(table.step_time(deepest) / table.t_step),
                error_gradient=float(table.t_dy.sum() / table.t_bp))


def missed_importance(table, importance, rho):
    """Returns the share of the optimum's importance that the selection misses; None: unknown."""
    import scipy.optimize
    from _selector_graph import by_highs, by_trying_all, gaps
    few = len(importance) <= LEAST_BY_TRYING
    if not few and not hasattr(scipy.optimize, 'milp'):  # before SciPy 1.9
        return None
    found = gaps(table, importance, rho, by_trying_all if few else by_highs)
    return found and max(0.0, float(found['chosen']))


def run_model(name, data, seeds, tuning_seeds, steps, small):
    """Returns the result of one network, a dict with the accuracies and seconds of each row.

    seeds, tuning_seeds: lists. Without tuning seeds, each row takes its middle rate.
    """
    begin = time.perf_counter()
    start.quiet_tensorflow()
    from _graphs import make_task

    from profiler import profile_model
    task, profile_seconds = make_task(name, data, small), 0.1 if small else 8.0
    trainer = Trainer(task, profile_seconds)
    where = shares(trainer.table)
    rows, missed = rows_of(where['smallest_rho']), {}
    fixed = [row for row in rows if row.kind != 'elastic']
    timed = [trainer.fixed_step(trainer.mask_of(row)) for row in fixed]
    ms = np.median(_bench.interleaved([lambda step=step: step(*trainer.example)[0].numpy()
                                       for step in timed], 3 if small else 9)[0], axis=0)
    step_seconds = dict(zip(fixed, 1e-3 * ms))

    def compare(seed, rates, judged):
        comparison = Comparison(trainer, steps, seed, step_seconds.__getitem__)
        found = comparison.all_rows(rows, rates, judged)
        print(name, 'seed', seed, {label: [round(run['accuracy'], 3) for run in runs]
                                   for label, runs in found.items()}, file=sys.stderr, flush=True)
        return found, comparison.source_accuracy
    tuned = [compare(seed, {row.label: row.rates for row in rows}, 1)[0] for seed in tuning_seeds]
    rates = {row.label: row.rates[int(np.argmax([
        sum(found[row.label][i]['accuracy'] for found in tuned) for i in range(3)]))]
        if tuned else row.rates[1] for row in rows}
    runs = [compare(seed, {label: [rate] for label, rate in rates.items()}, 2) for seed in seeds]
    for row in rows:
        if row.kind == 'elastic':  # by the importance of the last selection
            missed[row.label] = missed_importance(trainer.table, trainer.importance, row.rho)
    return dict(_bench.machine(), model=name, data=data, tensors=len(trainer.maker.variables),
                where=where, without_aggregation=shares(profile_model(
                    task.build(aggregates=False), batch=trainer.example, optimizer='adam',
                    seconds=profile_seconds)),
                source_accuracy=float(np.mean([source for _, source in runs])), missed=missed,
                coverage=trainer.table.profile.coverage, t_full=float(1e3 * step_seconds[rows[0]]),
                rows=[dict(label=row.label, kind=row.kind, rho=row.rho, rate=rates[row.label],
                           **{key: [found[row.label][0][key] for found, _ in runs] for key in (
                               'accuracy', 'seconds', 'selecting', 'steps')}) for row in rows],
                minutes=(time.perf_counter() - begin) / 60)


# ---------------------------------------------------------------- the report

def opponents(row, result):
    """Returns the rows that have the time of an elastic row."""
    return [other for other in result['rows']
            if other['rho'] == row['rho'] and other is not row]


def verdict(row, result):
    """Returns whether an elastic row ends above all others of its time, by two standard errors."""
    leads = [mean_error(100 * (np.array(row['accuracy']) - other['accuracy']))
             for other in opponents(row, result)]
    points, error = min(leads)
    if np.isnan(error):
        return 'one seed'
    if all(lead > 2 * its_error for lead, its_error in leads):
        return 'pays'
    return 'does not pay' if points < -2 * error else 'no clear difference'


def cells(row, result):
    """Returns one line of the table of accuracies."""
    accuracy, error = mean_error(100 * np.array(row['accuracy']))
    to = dict(full='', last='', head='')
    if row['kind'] == 'elastic':
        for other in opponents(row, result):
            to[other['kind']] = plus_minus(*mean_error(
                100 * (np.array(row['accuracy']) - other['accuracy'])), '{:+.1f}')
    return [result['model'], row['label'], '%g' % row['rate'],
            plus_minus(accuracy, error, '{:.1f}'), '%.1f' % np.mean(row['seconds']),
            '%.1f' % np.mean(row['selecting']), '%.0f' % np.mean(row['steps']),
            to['full'], to['last'], to['head'],
            verdict(row, result) if row['kind'] == 'elastic' else '']


def where_line(result):
    """Returns the sentences on the smallest rho, and why it lies there."""
    found, plain = result['where'], result['without_aggregation']
    low = [rho for rho in RHOS if rho < found['smallest_rho']]
    text = ('{}: {} tensors, full step {:.1f} ms. Smallest rho {:.2f}; the forward pass takes '
            '{:.2f} of a step. {:.0f} % of the backward pass carry the error gradient; aggregation '
            'adds to it alone, as it has no weights. The deepest tensor alone takes {:.2f} of a '
            'step. Without aggregation: smallest rho {:.2f}, deepest tensor {:.2f}.').format(
                result['model'], result['tensors'], result['t_full'], found['smallest_rho'],
                found['forward'], 100 * found['error_gradient'], found['deepest_alone'],
                plain['smallest_rho'], plain['deepest_alone'])
    if low:
        text += ' Out of reach: rho {}.'.format(' and '.join('%g' % rho for rho in low))
    missed = {label: share for label, share in result['missed'].items() if share is not None}
    if missed:
        text += ' Missed of the best importance: {}.'.format(', '.join(
            '{:.2f} % ({})'.format(100 * share, label) for label, share in missed.items()))
    return text


def report(result):
    """Returns the table of the rows of one network, and what was found about the smallest rho."""
    return texts.table(
        ['network', 'row', 'rate', 'final (%)', 'train (s)', 'selecting', 'steps', 'to full',
         'to last', 'to head', 'elastic'],
        [cells(row, result) for row in result['rows']], '<<>>>>>>>><') + '\n\n' + where_line(result)


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    whole = options.number
    parser.add_argument('--networks', nargs='+', default=NETWORKS[:-1], metavar='NAME',
                        help='of {} (default: all but the last)'.format(', '.join(NETWORKS)))
    parser.add_argument('--data', choices=IMAGES, help='default: the first that is installed')
    parser.add_argument('--seeds', type=whole(int, low=1), default=5)
    parser.add_argument('--tuning_seeds', type=whole(int, low=0), default=2,
                        help='0: the middle learning rate (default: %(default)s)')
    parser.add_argument('--steps', type=whole(int, low=2 * SELECTIONS), default=250,
                        help='of full training (default: %(default)s)')
    parser.add_argument('--small', action='store_true', help='tiny networks, to try the script')
    _bench.add_flags(parser, 'graphs', input_size=None)
    args = _bench.parsed(parser, argv)
    for name in args.networks:
        errors.one_of(name, NETWORKS, 'network')
    if MOLECULES in args.networks and importlib.util.find_spec('rdkit') is None:
        raise errors.UserError('molecules come with the package rdkit; `pip install rdkit`')
    data = args.data or IMAGES[not os.path.isdir(FOLDER)]
    seeds = list(range(args.seed, args.seed + args.seeds))
    tuning = list(range(TUNING_SEED + args.seed, TUNING_SEED + args.seed + args.tuning_seeds))
    print('final test accuracy, means ± standard error; differences are in points, paired by seed, '
          'to rows of the same time\n')
    results = []
    for result in _bench.each('graphs', [
            (name, data, seeds, tuning, args.steps, args.small) for name in args.networks]):
        results.append(result)
        print(report(result) + '\n', flush=True)
    _bench.write('graphs', results, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
