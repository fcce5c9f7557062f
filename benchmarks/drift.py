"""Measures what each way to train forgets while the data change (the paper's question 3).

    python benchmarks/drift.py --streams domains classes --seeds 3   (an hour on two slow cores)
    python benchmarks/drift.py --equal epochs --kept 0               (more lines of the same table)
    python benchmarks/drift.py --tune                                (prints the RATES)

A stream is a chain of tasks, each of a few hundred new images. All rows start from one network,
which full training made of the first task. They then train on one task after the other, and are
tested by the exams of all tasks so far. Each row has the seconds that rho 0.35 takes for the epochs
of a task, or the same epochs. Selections count; making a step and its first call do not.

Each result is a line of a CSV file. A line that is there is not measured again, so the same command
resumes. At the end come a table of each stream, and the answers (_drift_tables.py).
"""

import argparse
import csv
import os
import time
from typing import Any, NamedTuple

import _path
import numpy as np
from _drift_tables import answers, table_of
from tqdm import tqdm

from elastic import command_line, options
from elastic.compat import start
from elastic.data.fashion import FASHION
from elastic.errors import UserError, one_of
from elastic.settings import LOGS_DIR, TRAINING

LOGS = os.path.join(_path.ROOT, LOGS_DIR, 'drift')
STREAMS = ('domains', 'classes', 'gradual', 'solar')
EQUAL = ('seconds', 'epochs')
CHOOSING = 3.0  # full steps, about what an importance takes
QUICK = 30  # images of each old exam that are looked at within a task
TUNING_SEED = 1000  # no table has it
GRID = (0.0015, 0.006, 0.024)
# Stream -> row -> learning rate without and with kept images. Not tuned yet: from the rates that
# accuracy.py found for Fashion-MNIST. Streams that are not listed have those of domains.
RATES = {'domains': {
    'head': (0.006, 0.006), 'BN + bias': (0.024, 0.024), 'full': (0.0015, 0.0015),
    'elastic 0.5': (0.003, 0.003), 'elastic 0.35': (0.003, 0.003),
    'elastic 0.35, cache': (0.006, 0.006), 'random 0.35': (0.003, 0.003),
    'last 0.35': (0.006, 0.006), 'all at once': (0.0015, 0.0015),
    'kept alone': (0.0015, 0.0015)}}
KEY = ('stream', 'equal', 'row', 'kept', 'seed')
COLUMNS = KEY + ('setup', 'end', 'new', 'bwt', 'worst', 'first', 'next', 'gap', 'seconds', 'steps',
                 'bytes')


class Exams:
    """Tests a predictor, images -> labels, by the exams of all tasks."""

    def __init__(self, tasks, predict, ahead):
        self._tasks, self._predict, self._lows, self._gaps = tasks, predict, [], []
        self._ahead = ahead
        self._found = np.full((len(tasks),) * 2, np.nan)  # after task i, exam j

    def _accuracy(self, task, count=None):
        exam = self._tasks[task].exam.only(slice(count))
        return np.mean(self._predict(exam.images) == exam.labels)

    def look(self, task):
        """Looks at the old exams while `task` is trained."""
        self._lows.append(np.mean([self._accuracy(old, QUICK) for old in range(task)]))

    def take(self, task, whole=True):
        """Takes all exams up to that of `task`, after training on it; of the next if `ahead`."""
        if self._lows:
            self.look(task)
            self._gaps.append(min(self._lows) - self._lows[-1])
            self._lows = []
        for exam in range(task + 1 + (self._ahead and task + 1 < len(self._tasks))) if whole else ():
            self._found[task, exam] = self._accuracy(exam)

    def columns(self):
        """Returns name -> accuracy or difference of accuracies, NaN where there is none."""
        found, last = self._found, self._found[-1]
        own, later = np.diag(found), np.arange(len(found))[:, None] >= np.arange(len(found))
        best = np.where(later & np.isfinite(found), found, -1).max(axis=0)
        return dict(
            end=last.mean(), new=own[1:].mean(), bwt=(last - own)[:-1].mean(),
            worst=(best - last)[:-1].max() if np.isfinite(own[0]) else np.nan,
            first=last[0] - own[0], next=np.diag(found, 1).mean(),
            gap=np.mean(self._gaps) if self._gaps else np.nan)


class Course(NamedTuple):
    """Holds what the rows of one stream and seed share. seconds: of a task; None: as in `limit`."""
    tasks: Any
    learner: Any
    seed: int
    seconds: float
    stages: Any  # () -> model for the solved head
    ahead: bool  # whether each task is also tested by the exam of the next one
    start: Any = None  # weights after the first task

    def begun(self, rate):
        """Returns this Course after full training on the first task."""
        from _drift_rows import FIRST_EPOCHS, FULL, ROWS, Limit
        self.learner.restart(self.seed)
        self.learner.train(ROWS[FULL], self.tasks[0].new, None, [self.seed, 0], Limit(
            steps=FIRST_EPOCHS * self._epoch(self.tasks[0].new)), rate)
        return self._replace(start=self.learner.weights)

    def _epoch(self, pixels, kept=False):
        return len(pixels) // (self.learner.batch_size // (1 + bool(kept)))

    def limit(self, equal, pixels, kept=None, tasks=1):
        """Returns the Limit of training on `pixels`, new ones of this number of tasks."""
        from _drift_rows import EPOCHS, Limit
        steps = EPOCHS * self._epoch(pixels, kept)
        if equal == 'epochs':
            return Limit(steps=steps)
        full = 1e-3 * self.learner.table.t_step
        return Limit(self.seconds * tasks if self.seconds else full * (
            0.35 * EPOCHS * self._epoch(self.tasks[-1].new) + CHOOSING) * tasks)

    def measure(self, row, count, equal, rate):
        """Returns the results of one row, as in COLUMNS. count: of kept images."""
        from _drift_rows import MEANS, SOLVED, STATISTICS, Kept, Means, Solved
        learner, tasks, kept = self.learner, self.tasks, Kept(count, self.seed)
        learner.restart(self.seed, None if row.label == MEANS else self.start)
        frozen = {MEANS: lambda: Means(learner.run, learner.classes),
                  SOLVED: lambda: Solved(self.stages, learner.classes)}.get(row.label)
        frozen = frozen and frozen()
        exams, spent = Exams(tasks, (frozen or learner).predict, self.ahead), np.zeros(2)
        for number, task in enumerate(tasks):
            begin = time.perf_counter()
            if frozen:
                frozen.learn(task.new)
            elif number and row.label == STATISTICS:
                learner.adapt_statistics(task.new)
            elif number and row.trains and not row.at_once:
                spent += learner.train(
                    row, task.new, kept.pixels, [self.seed, number],
                    self.limit(equal, task.new, kept.pixels), rate, lambda: exams.look(number))
            if row.trains is None and row.label != 'nothing':
                spent[0] += time.perf_counter() - begin
            if count:
                kept.add(task.new)
            exams.take(number, whole=not row.at_once)
        if row.at_once:
            pixels = kept.pixels if row.at_once == 'kept' else sum(
                [task.new for task in tasks[1:]], tasks[0].new)
            learner.restart(self.seed)
            spent += learner.train(row, pixels, None, [self.seed, 0], self.limit(
                equal, pixels, tasks=len(tasks)), rate)
            exams.take(len(tasks) - 1)
        return dict(exams.columns(), seconds=spent[0], steps=int(spent[1]),
                    bytes=kept.pixels.images.nbytes if count else frozen.nbytes if frozen else 0)


def rate_of(stream, row, count):
    """Returns the learning rate of a row in a stream, None if it has none."""
    return RATES.get(stream, RATES['domains']).get(row.label, (None, None))[count > 0]


class Bench:
    """Makes the Courses. make: (classes, whether for the solved head) -> (model, TensorTimings)."""

    def __init__(self, make, source, seconds=None, batch_size=32):
        self._make, self.source, self._seconds = make, source, seconds
        self._batch_size, self._learners, self._runs = batch_size, {}, {}

    def course(self, stream, seed):
        from _drift_rows import Learner
        from _drift_streams import STREAMS as KINDS
        kind = KINDS[stream]
        if kind.classes not in self._learners:
            self._learners[kind.classes] = Learner(
                *self._make(kind.classes, False), self._batch_size, LOGS)
        tasks = kind.tasks(self.source, np.random.RandomState(seed))
        return Course(tasks, self._learners[kind.classes], seed, self._seconds,
                      self._stages(kind.classes), kind.ahead).begun(
                          RATES['domains']['full'][0])


    def _stages(self, classes):
        """Returns `run` of Solved."""
        from _drift_rows import outputs_of
        if classes not in self._runs:
            self._runs[classes] = outputs_of(self._make(classes, True)[0])
        return self._runs[classes]


def read(path):
    """Returns {(stream, equal, row, kept, seed): line} of a CSV file, {} if there is none."""
    if not os.path.exists(path):
        return {}
    with open(path, newline='') as file:
        lines = list(csv.DictReader(file))
    if lines and tuple(lines[0]) != COLUMNS:
        raise UserError("'{}' is not a table of this benchmark: use another --csv".format(path))
    return {tuple(line[name] for name in KEY): line for line in lines}


def measure(bench, wanted, path, setup):
    """Measures the results that are not in the CSV file yet, and appends each.

    wanted: [(stream, equal, Row, kept, seed)]. setup: (stream, Row, kept) -> str; raises UserError
    where a line there has another setup.
    """
    done, missing, course, at = read(path), [], None, None
    for stream, equal, row, count, seed in wanted:
        line = done.get((stream, equal, row.label, str(count), str(seed)))
        if line is None:
            missing.append((stream, equal, row, count, seed))
        elif line['setup'] != setup(stream, row, count):
            raise UserError("'{}' has results of another setup, {}, not {}: use another --csv".format(
                path, line['setup'], setup(stream, row, count)))
    missing.sort(key=lambda each: (each[0], each[4]))  # stable: one course after the other
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for stream, equal, row, count, seed in tqdm(missing, disable=None, unit='row'):
        if at != (stream, seed):
            at, course = (stream, seed), bench.course(stream, seed)
        found = course.measure(row, count, equal, rate_of(stream, row, count))
        found.update(zip(KEY, (stream, equal, row.label, count, seed)),
                     setup=setup(stream, row, count))
        new = not os.path.exists(path)
        with open(path, 'a', newline='') as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(found)


def tune(bench, streams, rows, counts):
    """Prints the RATES that are best on images for validation of the first two tasks."""
    for stream in streams:
        course, best = bench.course(stream, TUNING_SEED), {}
        course = course._replace(tasks=course.tasks[:2])
        for row in rows:
            for count in counts if row.trains else ():
                ends = [course.measure(row, count, 'seconds', rate)['end'] for rate in GRID]
                best.setdefault(row.label, []).append(GRID[int(np.argmax(ends))])
                print('{}, {}, {} kept: {}'.format(stream, row.label, count, ', '.join(
                    '{:g}: {:.1f} %'.format(rate, 100 * end) for rate, end in zip(GRID, ends))),
                    flush=True)
        print("    '{}': {},".format(stream, best))


def network(args):
    """Returns `make` of Bench: builds a network and reads or measures its timing table."""
    import models
    import profiler

    def make(classes, stages):
        shape, frozen = (args.input_size, args.input_size, 3), 'frozen'
        model = models.build_model(
            args.model_name, shape, classes, args.weights, bn_statistics=frozen,
            **dict(head='stages', head_start='solved') if stages else {})
        settings = profiler.StepSettings(args.model_name, 1.0, args.input_size, 32, classes, 'none',
                                         frozen, 'sgd', TRAINING.weight_decay, None)
        return model, None if stages else profiler.table_for(settings, model, LOGS, lambda: None)
    return make


def parsed(argv):
    whole = options.number
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--streams', nargs='+', choices=STREAMS, default=list(STREAMS[:2]))
    parser.add_argument('--rows', nargs='+', metavar='ROW', help='default: all')
    parser.add_argument('--kept', nargs='+', type=whole(int, low=0), default=[0, 200, 1000],
                        metavar='N', help='kept images (default: 0 200 1000)')
    parser.add_argument('--seeds', type=whole(int, low=1, high=TUNING_SEED), default=5)
    parser.add_argument('--equal', nargs='+', choices=EQUAL, default=[EQUAL[0]])
    parser.add_argument('--seconds', type=whole(float, above=0), metavar='X', help='of each task '
                        '(default: what rho 0.35 takes for two epochs, by the timing table)')
    parser.add_argument('--images', type=whole(int, low=32), default=384, metavar='N',
                        help='new images of each task (default: %(default)s)')
    parser.add_argument('--exam', type=whole(int, low=10), default=200, metavar='N',
                        help='images of each exam (default: %(default)s)')
    parser.add_argument('--input_size', type=whole(int, low=32), default=48)
    parser.add_argument('--dataset_name', default=FASHION, help='of ten classes, such as digits')
    parser.add_argument('--model_name', default='efficientnet_lite0')
    parser.add_argument('--weights', default='imagenet')
    parser.add_argument('--csv', type=options.as_path, metavar='PATH',
                        default=os.path.join(_path.RESULTS, 'drift.csv'))
    options.add_flag(parser, '--tune', 'print the best learning rates, by a seed of their own')
    return parser.parse_args(argv)


def main(argv=None):
    args = parsed(argv)
    start.quiet_tensorflow()
    from _drift_rows import EPOCHS, ROWS
    from _drift_streams import STREAMS as KINDS
    from _drift_streams import Source
    rows = [ROWS[one_of(label, tuple(ROWS), 'row')] for label in args.rows or ROWS]
    source = Source(args.dataset_name, args.input_size, args.images, args.exam, args.tune)
    bench = Bench(network(args), source, args.seconds)
    if args.tune:
        tune(bench, args.streams, rows, args.kept[:1] + args.kept[-1:])
        return 0

    def setup(stream, row, count):
        return '{} {} {}px {}x{} exam {} seconds {} rate {}'.format(
            args.model_name, args.dataset_name, args.input_size, args.images, EPOCHS, args.exam,
            args.seconds, rate_of(stream, row, count))
    measure(bench, [(stream, equal, row, count, seed) for stream in args.streams
                    for seed in range(args.seeds) for equal in args.equal for row in rows
                    for count in args.kept if (row.keeps or not count)
                    and (count or row.at_once != 'kept')], args.csv, setup)
    from _drift_tables import Results
    for stream in args.streams:
        results = Results(read(args.csv), stream)
        for equal in args.equal:
            print('\n{}: {}; equal {}\n'.format(stream, KINDS[stream].title, equal))
            print(table_of(results, equal, list(ROWS)))
        print('\n' + '\n'.join(answers(results)))
    return 0


if __name__ == '__main__':
    command_line.run(main)
