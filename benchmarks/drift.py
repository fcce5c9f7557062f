"""Measures what each way to train forgets while the data change (the paper's question 3).

    python benchmarks/drift.py --tune                       (prints RATES, for this module)
    python benchmarks/drift.py --seeds 1 --kept 0 1000      (half an hour on two slow cores)
    python benchmarks/drift.py --seeds 1 --kept 0 --equal epochs
    python benchmarks/drift.py --equal seconds epochs       (all tables and answers, of five seeds)

A stream is a chain of tasks, each of a few hundred new images (_drift_streams.py). All rows start
from the network that full training made of the first task. They then train on one task after the
other, and are tested by the exams of all tasks so far. `all at once` and `kept alone` train once,
at the end, from ImageNet weights. Each task takes the seconds that rho 0.35 needs for its epochs,
by the timing table; or each row trains for these epochs. Selections count; making a step and its
first call do not, as they take the same in every row.

Each result is a line of a CSV file. A line that is there is not measured again: the same command
resumes, and smaller ones add up. At the end come a table of each stream and the answers.
"""

import csv
import functools
import os
import time

import _bench
import _drift_streams as streams
import _path
import numpy as np
from _drift_tables import Results
from tqdm import tqdm

from elastic import command_line, options
from elastic.compat import start
from elastic.data.fashion import FASHION, source_of
from elastic.data.images import check_dataset_name
from elastic.errors import UserError, one_of
from elastic.networks.names import LITE, check_weights
from elastic.settings import LOGS_DIR, TRAINING

LOGS = os.path.join(_path.ROOT, LOGS_DIR, 'drift')
BATCH_SIZE, EXAM, QUICK = 32, 120, 20  # images; QUICK: of each old exam within a task
FIRST_EPOCHS, FIRST_RATE = 8, 0.0015  # of the first task
CHOOSING = 3.0  # full steps, about what an importance takes
FEATURES = 4096  # of the solved head; twice as many take eight times as long
TUNING_SEED = 1000  # no table has it
GRID = (0.0004, 0.0015, 0.006)
# Stream -> row -> learning rates without and with kept images, as --tune prints them; other streams
# have those of domains. Several lie at the edge of GRID.
RATES = {
    'domains': {
        'head': [0.0004, 0.006], 'BN + bias': [0.006, 0.0015], 'full': [0.0004, 0.0004],
        'elastic 0.5': [0.0004, 0.0004], 'elastic 0.35': [0.0004, 0.006],
        'elastic 0.35, cache': [0.0004, 0.0015], 'random 0.35': [0.0004, 0.006],
        'last 0.35': [0.0004, 0.006], 'all at once': [0.006, 0.006],
        'kept alone': [0.0015, 0.0004]},
    'classes': {
        'head': [0.0015, 0.006], 'BN + bias': [0.006, 0.006], 'full': [0.0015, 0.0015],
        'elastic 0.5': [0.0015, 0.0015], 'elastic 0.35': [0.0004, 0.006],
        'elastic 0.35, cache': [0.0004, 0.0015], 'random 0.35': [0.0004, 0.0015],
        'last 0.35': [0.0004, 0.006], 'all at once': [0.0015, 0.0004],
        'kept alone': [0.0015, 0.0015]}}
KEY = ['stream', 'equal', 'row', 'kept', 'seed']
MEASURES = ['end', 'new', 'bwt', 'worst', 'first', 'next', 'gap']
COLUMNS = KEY + ['setup'] + MEASURES + ['seconds', 'steps', 'bytes']


class Exams:
    """Tests a predictor by the exams of all tasks. ahead: whether also by the next one's."""

    def __init__(self, tasks, predictor, ahead):
        self._tasks, self._predictor, self._ahead = tasks, predictor, ahead
        self._found = np.full((len(tasks),) * 2, np.nan)  # after task i, accuracy in exam j
        self._lows, self._gaps = [], []

    def _accuracy(self, task, count=None):
        exam = self._tasks[task].exam.only(slice(count))
        return np.mean(self._predictor.predict(exam.images) == exam.labels)

    def look(self, task):
        """Looks at the old exams while `task` is trained."""
        self._lows.append(np.mean([self._accuracy(old, QUICK) for old in range(task)]))

    def take(self, task):
        """Takes the exams after the training on `task`."""
        if self._lows:
            self.look(task)
            self._gaps.append(min(self._lows) - self._lows[-1])
            self._lows = []
        for exam in range(min(task + 1 + self._ahead, len(self._tasks))):
            self._found[task, exam] = self._accuracy(exam)

    def measures(self):
        """Returns MEASURES -> accuracy, or difference of accuracies; NaN where there is none."""
        found, last, own = self._found, self._found[-1], np.diag(self._found)
        best = np.fmax.reduce(np.where(np.tri(len(found), dtype=bool), found, np.nan))
        return dict(zip(MEASURES, [
            last.mean(), own[1:].mean(), (last - own)[:-1].mean(),
            (best - last)[:-1].max() + 0 * own[0], last[0] - own[0], np.diag(found, 1).mean(),
            np.mean(self._gaps) if self._gaps else np.nan]))


class Bench:
    """Measures rows on a stream, whose network and first training they share.

    make: (classes, whether for the solved head) -> keras.Model, and with False its TensorTimings.
    seconds: of a task; None: those of rho 0.35.
    """

    def __init__(self, make, source, seconds=None, batch_size=BATCH_SIZE):
        self._make, self._source, self._seconds = make, source, seconds
        self._batch_size, self._learners, self._begun = batch_size, {}, None

    def begin(self, stream, seed):
        """Makes the tasks, and trains on the first one, unless that was the last call."""
        from _drift_learner import Learner, Solved
        if self._begun == (stream, seed):
            return
        self._begun, self._seed, self._ahead = (stream, seed), seed, stream in streams.AHEAD
        classes = streams.CLASSES.get(stream, 10)
        if classes not in self._learners:
            self._learners[classes] = Learner(
                *self._make(classes, False), self._batch_size, LOGS), Solved(
                    self._make(classes, True), self._batch_size, LOGS)
        self.learner, self.solved = self._learners[classes]
        self.tasks = streams.STREAMS[stream](self._source, np.random.RandomState(seed))
        self.learner.restart(seed)
        total = FIRST_EPOCHS * self._epoch(self.tasks[0].new)
        self.learner.train(streams.ROWS[streams.FULL], self.tasks[0].new, None, [seed, 0],
                           lambda seconds, steps: steps / total, FIRST_RATE)
        self._start = self.learner.weights

    def _epoch(self, pixels, kept=None):
        return len(pixels) // (self._batch_size // (2 if kept else 1))

    def _share_of(self, equal, pixels, kept=None, tasks=1):
        """Returns (seconds, steps) -> share of the training. tasks: whose seconds it has."""
        if equal == 'epochs':
            return lambda seconds, steps: steps / (streams.EPOCHS * self._epoch(pixels, kept))
        whole = tasks * (self._seconds or 1e-3 * self.learner.table.t_step * (
            0.35 * streams.EPOCHS * self._epoch(self.tasks[-1].new) + CHOOSING))
        return lambda seconds, steps: seconds / whole

    def measure(self, row, count, equal, rate):
        """Returns the dict of one result, without KEY. count: of kept images."""
        from _drift_learner import Kept, Means
        learner, kept, spent = self.learner, Kept(count, self._seed), np.zeros(2)
        fresh = row.label == streams.MEANS or row.at_once
        learner.restart(self._seed, None if fresh else self._start)
        self.solved.nbytes = 0
        used = Means(learner.model) if row.label == streams.MEANS else (
            self.solved if row.label == streams.SOLVED else learner)
        learn = learner.adapt_statistics if row.label == streams.STATISTICS else getattr(
            used, 'learn', lambda new: None)
        exams = Exams(self.tasks, used, self._ahead)
        for number, task in enumerate(self.tasks):
            if number and row.trains and not row.at_once:
                spent += learner.train(
                    row, task.new, kept.pixels, [self._seed, number], self._share_of(
                        equal, task.new, kept.pixels), rate, functools.partial(exams.look, number))
            elif number or used is not learner:
                begin = time.perf_counter()
                learn(task.new)
                spent[0] += time.perf_counter() - begin
            if count:
                kept.add(task.new)
            if not row.at_once:
                exams.take(number)
        if row.at_once:
            pixels = kept.pixels or sum([task.new for task in self.tasks[1:]], self.tasks[0].new)
            spent += learner.train(row, pixels, None, [self._seed, 0], self._share_of(
                equal, pixels, tasks=len(self.tasks)), rate)
            exams.take(len(self.tasks) - 1)
        return dict(exams.measures(), seconds=spent[0], steps=int(spent[1]),
                    bytes=kept.pixels.images.nbytes if count else used.nbytes)

    def tune(self, stream, rows, counts):
        """Returns the RATES of a stream: best on images for validation of the first two tasks."""
        self.begin(stream, TUNING_SEED)
        self.tasks, best = self.tasks[:2], {}
        for row in tqdm([row for row in rows if row.trains], stream, disable=None):
            best[row.label] = [max(GRID, key=lambda rate, row=row, count=count: self.measure(
                row, count, 'seconds', rate)['end']) for count in counts]
        return best


def rate_of(stream, label, count):
    """Returns the learning rate of a row, that of full training if it has none."""
    found = dict(RATES['domains'], **RATES.get(stream, {}))
    return found.get(label, found['full'])[count > 0]


def read(path):
    """Returns {(stream, equal, row, kept, seed): line} of the CSV file, {} if there is none."""
    if not os.path.exists(path):
        return {}
    with open(path, newline='') as file:
        lines = list(csv.DictReader(file))
    if lines and list(lines[0]) != COLUMNS:
        raise UserError("'{}' is no table of this benchmark: use another --csv".format(path))
    return {tuple(line[name] for name in KEY): line for line in lines}


def measure(bench, wanted, path, setup=''):
    """Adds the results that the CSV file lacks. wanted: [(stream, equal, Row, kept, seed)].

    setup: what all results must share. Raises UserError where a line has another one.
    """
    done, missing = read(path), []
    for stream, equal, row, count, seed in wanted:
        key = tuple(map(str, (stream, equal, row.label, count, seed)))
        rate = rate_of(stream, row.label, count)
        found = dict(zip(KEY, key), setup='{}, rate {:g}'.format(setup, rate))
        if key not in done:
            missing.append((stream, seed, equal, row, count, rate, found))
        elif done[key]['setup'] != found['setup']:
            raise UserError("'{}' has results of another setup ({}; now {}): use another --csv"
                            .format(path, done[key]['setup'], found['setup']))
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    for stream, seed, equal, row, count, rate, found in tqdm(missing, disable=None, unit='row'):
        bench.begin(stream, seed)
        found.update(bench.measure(row, count, equal, rate))
        new = not os.path.exists(path)
        with open(path, 'a', newline='') as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(found)


def make_of(size):
    """Returns `make` of Bench, of EfficientNet-Lite0 with ImageNet weights. size: of images."""
    import models
    import profiler

    def make(classes, stages):
        shape, frozen, solved = (size, size, 3), 'frozen', dict(
            head='stages', head_features=FEATURES, head_start='solved')
        model = models.build_model(LITE, shape, classes, 'imagenet', bn_statistics=frozen,
                                   **solved if stages else {})
        settings = profiler.StepSettings(LITE, 1.0, size, BATCH_SIZE, classes, 'none', frozen,
                                         'sgd', TRAINING.weight_decay, None)
        return model if stages else (
            model, profiler.table_for(settings, model, LOGS, lambda: None))
    return make


def parsed(argv):
    whole, own = options.number, source_of(FASHION) == FASHION
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--streams', nargs='+', choices=list(streams.STREAMS),
                        default=['domains', 'classes'])
    parser.add_argument('--rows', nargs='+', metavar='ROW', help='default: all')
    parser.add_argument('--kept', nargs='+', type=whole(int, low=0), default=[0, 200, 1000])
    parser.add_argument('--seeds', type=whole(int, low=1, high=TUNING_SEED), default=5)
    parser.add_argument('--equal', nargs='+', choices=('seconds', 'epochs'), default=['seconds'])
    parser.add_argument('--seconds', type=whole(float, above=0), help='of each task (see above)')
    parser.add_argument('--images', type=whole(int, low=BATCH_SIZE), default=320,
                        help='new ones of each task (default: %(default)s)')
    parser.add_argument('--input_size', type=whole(int, low=32), default=48)
    parser.add_argument('--dataset_name', default=FASHION if own else 'digits',
                        help='of ten classes (default: fashion_mnist where it is, else digits)')
    parser.add_argument('--csv', type=options.as_path, metavar='PATH',
                        default=os.path.join(_path.RESULTS, 'drift.csv'))
    options.add_flag(parser, '--tune', 'print the best learning rates instead')
    return parser.parse_args(argv)


def main(argv=None):
    args = parsed(argv)
    check_dataset_name(args.dataset_name)
    known = streams.ROWS
    rows = [known[one_of(label, tuple(known), 'row')] for label in args.rows or known]
    check_weights('imagenet', LITE)
    start.quiet_tensorflow()
    source = streams.Source(args.dataset_name, args.input_size, args.images, EXAM, args.tune)
    bench = Bench(make_of(args.input_size), source, args.seconds)
    if args.tune:
        print('\n'.join("    '{}': {},".format(stream, bench.tune(
            stream, rows, (0, max(args.kept)))) for stream in args.streams))
        return 0
    wanted = [(stream, equal, row, count, seed) for stream in args.streams
              for seed in range(args.seeds) for equal in args.equal for row in rows
              for count in args.kept if (row.keeps or not count) and (
                  count or row.at_once != 'kept') and (row.trains or equal == 'seconds')]
    measure(bench, wanted, args.csv, '{0.dataset_name}, {0.input_size} px, '
            '{0.images} images, {0.seconds} s'.format(args))
    for stream in args.streams:
        results = Results(read(args.csv), stream)
        for equal in args.equal:
            print('\n{}: {} Equal {}.\n'.format(stream, streams.STREAMS[stream].__doc__, equal))
            print(results.table(equal, list(known)))
        print('\n' + '\n'.join(results.answers()))
    return 0


if __name__ == '__main__':
    command_line.run(main)
