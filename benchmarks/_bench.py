"""Shared by the benchmarks: a prepared network, interleaved timing, flags, JSON."""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import _path
import numpy as np

from elastic import errors, options
from elastic.compat import start
from elastic.settings import TRAINING
from elastic.timing.stopwatch import milliseconds

BATCH_SIZE = {'mobilenetv2': 8}  # others: 4
NUM_CLASSES = 10
TWO_MODELS = ['resnet50', 'mobilenetv2']
OTHERS_LIMIT = 0.1  # cores; other processes on two cores turned 5 points of error into 20
DISTURBED = 1.15  # times the quickest round; longer ones were slowed down by the machine


class Prepared(NamedTuple):
    """A network with useful batch-normalisation statistics, its step maker, and one batch."""
    model: Any
    maker: Any
    images: Any  # (B, S, S, 3) float32
    labels: Any  # (B,) int32
    batch_size: int

    @property
    def num_tensors(self):
        return len(self.model.trainable_variables)

    @property
    def everything(self):
        return np.ones(self.num_tensors, dtype=bool)

    @property
    def batch(self):
        return self.images, self.labels


def prepare(name, input_size, seed=0, data='noise', bn_statistics='frozen', batch_size=None):
    """Returns the Prepared network `name`, trained by SGD with weight decay.

    data: 'noise', or the name of a data set, whose first batch is used. batch_size: default
    BATCH_SIZE.
    """
    start.quiet_tensorflow()
    import tensorflow as tf

    import models
    from elastic.networks.backbone import statistics_from_batch
    batch_size = batch_size or BATCH_SIZE.get(name, 4)
    shape = (input_size, input_size, 3)
    model = models.build_model(name, shape, NUM_CLASSES, 'none', bn_statistics=bn_statistics)
    rng = np.random.RandomState(seed)
    images = tf.constant(rng.uniform(0, 255, (batch_size,) + shape), tf.float32)
    labels = tf.constant(rng.randint(0, NUM_CLASSES, batch_size), tf.int32)
    if data != 'noise':
        from datasets import load_dataset
        images, labels = next(iter(load_dataset(data, input_size, batch_size, seed=seed).train))
    statistics_from_batch(model, images)
    return Prepared(model, step_maker(model, images, labels), images, labels, batch_size)


def step_maker(model, inputs, labels, **options):
    """Returns the StepMaker of a model that SGD with weight decay trains. options: of StepMaker.

    The learning rate is so small that timed steps leave the network as it is. Hundreds of real
    steps on one batch would kill it, and steps of a dead network take other times: on TensorFlow
    2.7 Relu6Grad takes a third if its branches are predictable.
    """
    from elastic.steps.masked_step import StepMaker
    from elastic.steps.optimizer import make_optimizer
    optimizer = make_optimizer('sgd', 1e-6, 1000, model.trainable_variables)
    return StepMaker(model, optimizer, TRAINING.weight_decay, inputs, labels, **options)


def importance_of(maker, batch):
    """Returns the (N,) importance of the tensors on one batch."""
    from elastic.selection.importance import Evaluator, evaluate_importance
    return evaluate_importance(maker.model, maker.optimizer, [batch], evaluator=Evaluator(maker))


def chosen_by(prepared):
    """Returns what selections are made of: (TensorTimings, importance (N,), ClosedLoop)."""
    from elastic.selection.closed_loop import ClosedLoop
    from profiler import profile_model
    table = profile_model(prepared.model, batch=prepared.batch)
    importance = importance_of(prepared.maker, prepared.batch)
    return table, importance, ClosedLoop(table, prepared.maker)


def machine():
    """Returns a dict of processor, cores and versions."""
    start.quiet_tensorflow()
    import tensorflow as tf
    from tensorflow import keras

    from elastic.device.host import host_description
    return dict(host=host_description(), tensorflow=tf.__version__, keras=keras.__version__,
                numpy=np.__version__, python=sys.version.split()[0])


class OtherLoad:
    """Returns at each call how many cores other processes used since the last one."""

    def __init__(self):
        self.last = self._read()

    @staticmethod
    def _read():
        with open('/proc/stat') as stat:
            fields = [int(x) for x in stat.readline().split()[1:9]]
        ticks = os.sysconf('SC_CLK_TCK')
        busy = (sum(fields) - fields[3] - fields[4]) / ticks  # without idle and iowait
        own = os.times()
        return time.perf_counter(), busy, own.user + own.system

    def __call__(self):
        now, last = self._read(), self.last
        self.last = now
        return max(0.0, (now[1] - last[1]) - (now[2] - last[2])) / max(now[0] - last[0], 1e-9)


def settled_ms(function):
    """Returns the ms of the second of two calls in a row, as a training step follows itself."""
    function()  # else the call would find the processor's caches cold after a larger function
    return milliseconds(function)


def undisturbed(rounds_ms, least=3):
    """Returns the rounds, (rounds, functions) ms, whose sum is within DISTURBED of the quickest.

    Keeps at least the quickest `least` rounds. Other guests of a shared host, invisible from here,
    slow it down by a third for seconds.
    """
    whole = rounds_ms.sum(axis=1)
    limit = max(DISTURBED * whole.min(), np.sort(whole)[:least][-1])
    return rounds_ms[whole <= limit]


def interleaved(functions, rounds, warm=2, sample=settled_ms):
    """Calls the functions in turn; returns ((kept, functions) ms, number of dropped rounds).

    Keeps undisturbed rounds during which no other process ran; if there are none, undisturbed ones.
    functions: take no argument, and wait for the device. sample: function -> ms of a call.
    """
    for function in functions:
        for _ in range(warm):
            function()
    kept, noisy, load = [], [], OtherLoad()
    for _ in range(3 * rounds):
        row = [sample(function) for function in functions]
        (kept if load() <= OTHERS_LIMIT else noisy).append(row)
        if kept and len(undisturbed(np.array(kept), least=1)) == rounds:
            break
    quiet = undisturbed(np.array(kept or noisy))
    return quiet, len(kept) + len(noisy) - len(quiet)


def call(step, prepared):
    """Returns a function that runs `step` on the batch and waits for it."""
    return lambda: step(*prepared.batch)[0].numpy()


def spread(values):
    """Returns [10 %, 90 %] of the values."""
    return [float(np.percentile(values, q)) for q in (10, 90)]


def with_spread(value, bounds, digits=3):
    return '{:.{d}f} [{:.{d}f}, {:.{d}f}]'.format(value, *bounds, d=digits)


def verdict(checks):
    """Returns the texts of some (text, whether the goal is met), which mark goals MISSED."""
    return '; '.join(text + ('' if met else ' MISSED') for text, met in checks)


def in_own_process(module, function, *arguments):
    """Returns the result of module.function(*arguments) from a new process; None if that failed.

    Each network has its own process, so that memory and state of one do not affect the next.
    """
    code = ('import json, sys; sys.path.insert(0, sys.argv[1]); import {0}; '
            'print(json.dumps({0}.{1}(*json.loads(sys.argv[2]))))').format(module, function)
    child = subprocess.run(
        [sys.executable, '-c', code, os.path.dirname(os.path.abspath(__file__)),
         json.dumps(arguments)], stdout=subprocess.PIPE, universal_newlines=True)
    return json.loads(child.stdout.splitlines()[-1]) if child.returncode == 0 else None


def parser_for(doc):
    """Returns the argparse parser of a benchmark; its --help begins with the whole docstring."""
    return argparse.ArgumentParser(description=doc,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


def add_flags(parser, name, models=None, input_size=96, rounds=None, batch_size=False):
    """Adds the flags that benchmarks share; a default of None leaves a flag out.

    name: of the JSON file.
    """
    whole = options.number
    if batch_size:
        parser.add_argument('--batch_size', type=whole(int, low=1), metavar='N',
                            help='default: {}, others 4'.format(', '.join(
                                '{} {}'.format(*item) for item in BATCH_SIZE.items())))
    if models:
        parser.add_argument('--models', nargs='+', default=models, type=_model,
                            metavar='NAME[@SIZE]', help='default: ' + ' '.join(models))
    if input_size:
        parser.add_argument('--input_size', type=whole(int, low=32), default=input_size)
    if rounds:
        parser.add_argument('--rounds', type=whole(int, low=3), default=rounds,
                            help='interleaved samples of each row (default: %(default)s)')
    parser.add_argument('--seed', type=whole(int, low=0), default=0)
    parser.add_argument('--json', type=os.path.expanduser, metavar='PATH',
                        help='default: benchmarks/results/{}.json'.format(name))


def parsed(parser, argv):
    """Returns the arguments; raises UserError if --json cannot be written."""
    args = parser.parse_args(argv)
    if args.json:
        folder = os.path.dirname(os.path.abspath(args.json))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise errors.UserError("--json '{}': its folder cannot be made ({})".format(
                args.json, error))
        if os.path.isdir(args.json) or not os.access(folder, os.W_OK):
            raise errors.UserError(
                "--json '{}' is not a file that can be written".format(args.json))
    return args


def _model(text):
    _, at, size = text.partition('@')
    if at:
        options.number(int, low=32)(size)
    return text


def calls(args, *more):
    """Yields the arguments of run_model for each of args.models: (name, input size) + more.

    A model is NAME or NAME@SIZE.
    """
    for model in args.models:
        name, _, size = model.partition('@')
        yield (name, int(size or args.input_size)) + more


def each(module, calls):
    """Yields module.run_model(*call) for each call, each from its own process.

    Exits with status 1 if one fails; that process has printed its error.
    """
    for arguments in calls:
        result = in_own_process(module, 'run_model', *arguments)
        if result is None:
            raise SystemExit(1)
        yield result


def write(name, content, path=None):
    """Writes benchmarks/results/<name>.json, or `path`, with null for NaN; prints where."""
    path = path or os.path.join(_path.RESULTS, name + '.json')
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    content = json.loads(json.dumps(content), parse_constant=lambda text: (
        None if text == 'NaN' else float(text)))
    with open(path, 'w') as out:
        json.dump(content, out, indent=1)
    print('written: {}'.format(os.path.relpath(path)))
