"""Tensor timing profiler: how long the backward pass needs for each tensor (paper, section 4.1).

    python profiler.py --model_name resnet50 --num_classes 200

Records real training steps with the TensorFlow profiler, attributes op times to tensors through the
graph (attribution.py), and writes trace, table (CSV, JSON) under
logs/<model>_<size>_<classes>_<batch>_profile/. Once per device, model, input, batch and threading:
the table carries a key of all these and is reused only where the key matches exactly. Ends with
what each way to train costs here (costs.py).
"""

import argparse
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import re
import tempfile
import time
from typing import Dict, NamedTuple, Optional

import numpy as np

from elastic import command_line
from elastic.device.host import host_description
from elastic.files import whole_folder
from elastic.settings import MODEL, TRAINING, settings_of, statistics_of
from elastic.steps.prefix_cut import ROUNDING
from elastic.timing.table import TensorTimings, chain_timings
from elastic.timing.totals import build_table, measure_totals

# Variables of the environment that decide how TensorFlow computes, and on how many threads.
ENVIRONMENT = ('TF_ENABLE_ONEDNN_OPTS', 'XLA_FLAGS', 'TF_XLA_FLAGS', 'TF_NUM_INTEROP_THREADS',
               'TF_NUM_INTRAOP_THREADS', 'OMP_NUM_THREADS')
MIN_COVERAGE = 0.95
TABLE_FILE = 'timings.json'


class StepSettings(NamedTuple):
    """What is timed: a network and its training step; see the flags of the same names.

    num_classes, augmentation: of the data set, where the flags leave them open.
    """
    model_name: str
    alpha: float
    input_size: int
    batch_size: int
    num_classes: int
    augmentation: str
    bn_statistics: str
    optimizer: str
    weight_decay: float
    clip_norm: Optional[float]

    @property
    def image_shape(self):
        return self.input_size, self.input_size, 3


class ProfileSettings(NamedTuple):
    """How profile_model measures a step.

    optimizer: 'sgd' or 'adam'. clip_norm: see training_step.make_optimizer.
    folder: where the trace stays; None: it is deleted.
    key: stored in the table. num_steps: traced steps.
    seconds: about how long the untraced, interleaved runs that give the totals may take.
    """
    optimizer: str
    weight_decay: float = TRAINING.weight_decay
    clip_norm: Optional[float] = None
    folder: Optional[str] = None
    key: Dict = {}
    num_steps: int = 5
    seconds: float = 8.0


def profile_model(model, input_shape=None, num_classes=None, batch_size=None,
                  optimizer=TRAINING.optimizer, batch=None, **settings):
    """Returns the TensorTimings of one training step of `model` on this machine.

    Describe the batch in one of two ways:
    input_shape: of one example, (height, width, channels) of an image; num_classes, batch_size.
    batch: (inputs, labels), or tf.TensorSpecs of them. Inputs may be one array, or a list, tuple or
    dict of arrays, as the model takes them.
    optimizer, settings: fields of ProfileSettings.
    The model's variables are afterwards as before.
    """
    import tensorflow as tf
    settings = ProfileSettings(optimizer, **settings)
    if batch is None:
        batch = (tf.TensorSpec((batch_size,) + tuple(input_shape), tf.float32),
                 tf.random.stateless_uniform((batch_size,), (0, 0), 0, num_classes, tf.int32))
    batch = tf.nest.map_structure(_drawn, batch)
    if settings.folder is not None:
        return _profile(model, batch, settings)
    with tempfile.TemporaryDirectory() as folder:
        return _profile(model, batch, settings._replace(folder=folder))


def _profile(model, batch, settings):
    from elastic.compat.keras_stack import restored_afterwards, variable_name
    from elastic.networks.backbone import statistics_from_batch
    from elastic.steps.prefix_steps import PrefixSteps
    from elastic.timing.trace import executed_graph, op_times, record_trace
    variables, (inputs, labels) = model.trainable_variables, batch
    everything = np.ones(len(variables), dtype=bool)
    with restored_afterwards(model.variables):
        statistics_from_batch(model, inputs)
        maker = step_maker(model, settings, inputs, labels)
        graph = executed_graph(maker, inputs, labels)
        release_memory()
        trace = record_trace(maker.step(everything), inputs, labels, settings.folder,
                             settings.num_steps)
        times = op_times(graph, trace, settings.num_steps, len(variables))
        prefixes = PrefixSteps(maker)
        cuts = prefix_cuts(prefixes, times) if (
            prefixes.rows_apart(inputs, labels) <= ROUNDING) else [None] * len(variables)
        prefix = prefix_costs(cuts, times)
        release_memory()
        totals = measure_totals(prefixes, times, inputs, labels, settings.seconds, cuts, prefix[0])
    return build_table([variable_name(v) for v in variables],
                       [tuple(int(n) for n in v.shape) for v in variables], times, totals,
                       settings.key, prefix)


def step_maker(model, settings, inputs, labels):
    """Returns a masked_step.StepMaker whose learning rate hardly changes the weights.

    settings: StepSettings or ProfileSettings.
    """
    from elastic.steps.masked_step import StepMaker
    from elastic.steps.training_step import make_optimizer
    optimizer = make_optimizer(settings.optimizer, 1e-6, 1000, model.trainable_variables,
                               clip_norm=settings.clip_norm)
    return StepMaker(model, optimizer, settings.weight_decay, inputs, labels)


def release_memory():
    """Has the C library give back what was freed. glibc keeps it in pools of TensorFlow's threads:
    of ResNet50, 64x64, 780 MB behind a profile on the paper's stack. Others know no such call.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def prefix_cuts(prefixes, times):
    """(N,) list of prefix_cut.Cut where tensor k is the deepest in training; None where there is
    none.

    Each is that of a step which trains all that is nearer the output: an upper bound, as t_dy.
    prefixes: PrefixSteps of a masked_step.StepMaker. times: its OpTimes.
    """
    depth = chain_timings(times.group_tensors, times.group_ms)[2]
    return [prefixes.cut_off(depth <= depth[k], times.rates) for k in range(len(depth))]


def prefix_costs(cuts, times):
    """(traced ms, bytes), (N,) each: what a step need not compute, and reads for each image
    instead, by the cuts of prefix_cuts; see TensorTimings.
    """
    skipped = [sum(times.forward.get(name, 0.0) for name in sorted(cut.skipped)) if cut else 0.0
               for cut in cuts]  # sorted: equal bits in every process
    return np.array(skipped), np.array([cut.nbytes if cut else np.inf for cut in cuts])


def _drawn(leaf):
    """The array itself, or one drawn for a TensorSpec: floats as pixels have them, integers 0 or 1,
    which any vocabulary and any list of classes or nodes has.
    """
    import tensorflow as tf
    if not isinstance(leaf, tf.TensorSpec):
        return leaf
    shape, high = leaf.shape.as_list(), 255 if leaf.dtype.is_floating else 2
    drawn = np.random.RandomState(0).uniform(0, high, shape)
    return tf.cast(tf.constant(np.floor(drawn) if high == 2 else drawn), leaf.dtype)


def table_key(settings, model):
    """Returns what a timing table is valid for: the network, the step, this machine, this software.

    settings: StepSettings. A saved model is known by its content, not its path: see fingerprint.
    """
    import tensorflow as tf
    from tensorflow import keras

    from elastic.compat.keras_stack import flat_layers
    from elastic.networks.names import is_saved
    dtypes = {dtype for layer in flat_layers(model) if layer.weights
              for dtype in (layer.compute_dtype, layer.variable_dtype)}
    return dict(
        model='saved' if is_saved(settings.model_name) else settings.model_name,
        network=fingerprint(model), alpha=settings.alpha, input_size=settings.input_size,
        batch_size=settings.batch_size, num_classes=settings.num_classes,
        optimizer=settings.optimizer, decay=bool(settings.weight_decay),
        clipped=settings.clip_norm is not None, bn_statistics=settings.bn_statistics,
        augmentation=settings.augmentation, dtype=', '.join(sorted(dtypes)),
        inter_op_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        intra_op_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        host=host_description(), tensorflow=tf.__version__, keras=keras.__version__)


def fingerprint(model):
    """Hash of what a step computes: classes, settings and dtypes of all layers in order, names,
    shapes and dtypes of all weights; not of their values, nor of the numbers in Keras' names.
    """
    from tensorflow import keras

    from elastic.compat.keras_stack import flat_layers, variable_name

    def plain(value):
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, dict):  # an activation, a regulariser
            return value.get('class_name')
        return value if isinstance(value, (str, int, float, type(None))) else type(value).__name__

    def settings(layer):
        inside = [layer] + flat_layers(layer)
        try:
            config = {} if any(isinstance(part, keras.Model) for part in inside) else (
                layer.get_config())
        except Exception:  # a layer of the user's own may have none, or a broken one
            config = {}
        return {key: plain(value) for key, value in config.items() if key != 'name'}
    content = [[type(layer).__name__, layer.compute_dtype, settings(layer)]
               for layer in flat_layers(model)]
    weights = [[re.sub(r'_\d+(?=/)', '', variable_name(v)), list(v.shape), str(v.dtype)]
               for v in model.trainable_variables + model.non_trainable_variables]
    text = json.dumps([content, weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table_path(logs_dir, model_name, input_size, num_classes, batch_size):
    """logs/<model>_<size>_<classes>_<batch>_profile/timings.json; the trace is beside it."""
    name = os.path.splitext(os.path.basename(os.path.normpath(model_name)))[0]
    return os.path.join(logs_dir, '{}_{}_{}_{}_profile'.format(
        name, input_size, num_classes, batch_size), TABLE_FILE)


def stored_table(path, key):
    """The TensorTimings at `path` if its key is exactly `key`; else None, and prints why."""
    if not os.path.exists(path):
        print('no timing table at {}: profiling'.format(path))
        return None
    try:
        table = TensorTimings.load(path)
    except (ValueError, KeyError, TypeError) as error:
        print('the timing table cannot be used ({}): profiling again'.format(error))
        return None
    differing = sorted(k for k in set(key) | set(table.key) if key.get(k) != table.key.get(k))
    if differing:
        print('the timing table at {} is for other settings ({}): profiling again'.format(
            path, ', '.join('{}: {} there, {} now'.format(k, table.key.get(k), key.get(k))
                            for k in differing)))
        return None
    print('timing table: {}'.format(path))
    return table


def path_of_table(settings, logs_dir):
    """Returns the table_path of StepSettings."""
    return table_path(logs_dir, settings.model_name, settings.input_size, settings.num_classes,
                      settings.batch_size)


def table_for(settings, model, logs_dir, draw, again=False):
    """Returns the stored TensorTimings if its key matches; else measures and stores it.

    settings: StepSettings. draw: () -> (images, labels) to time steps on; None: noise, on which
    steps may take more or less time than on images. again: measure in any case.
    """
    key, path = table_key(settings, model), path_of_table(settings, logs_dir)
    table = None if again else stored_table(path, key)
    if table is None:
        begin = time.perf_counter()
        with whole_folder(os.path.dirname(path)) as new:
            table = profile_model(model, settings.image_shape, settings.num_classes,
                                  settings.batch_size, settings.optimizer, draw(), folder=new,
                                  weight_decay=settings.weight_decay, key=key,
                                  clip_norm=settings.clip_norm)
            table.save(os.path.join(new, TABLE_FILE))
        release_memory()
        print('profiled in {:.1f} s: {}'.format(time.perf_counter() - begin, path))
        warn_of(table.profile)
    return table


def batch_for(settings, dataset_name, data_dir=None):
    """Returns (images, labels) of the data set; None, for noise, where it is not at hand.

    Prints which. settings: StepSettings.
    """
    from datasets import batch_at_hand
    batch, reason = batch_at_hand(dataset_name, settings.input_size, settings.batch_size,
                                  settings.num_classes, data_dir, settings.augmentation)
    print('steps are timed on ' + ('a batch of {}'.format(dataset_name) if reason is None
                                   else 'noise: {}'.format(reason)))
    return batch


def warn_of(profile):
    """Warns of steps that varied, of steps that wait for a GPU's launches, and of traced time that
    belongs to no tensor.
    """
    if profile.disturbed:
        print('warning: the same step took {:.0f} % more or less from one call to the next; is '
              'something else running? On a quiet machine, profiler.py --force measures again'
              .format(100 * profile.spread))
    if profile.launch_bound:
        print('warning: the GPU runs kernels during only {:.0f} % of a step and waits for launches '
              'in the rest: leaving out tensors then saves launches more than the kernel time that '
              'they are priced by, so that rho may be missed; a larger --batch_size helps'.format(
                  100 * profile.kernel_share))
    if profile.coverage < MIN_COVERAGE:
        print('warning: only {:.1f} % of the traced time outside the forward pass was attributed '
              '(at least {:.0f} % is usual); left out: {}'.format(
                  100 * profile.coverage, 100 * MIN_COVERAGE, ', '.join(
                      '{} ({:.2f} ms)'.format(name, ms) for name, ms in profile.left_out[:10])))


def describe(table):
    """Text of the table: a row a tensor, then the totals."""
    rows = [[k, name, 'x'.join(map(str, shape)), '%.3f' % dw, '%.3f' % dy, '%.3f' % up,
             '%.2f' % (100 * (dw + dy) / table.t_bp), 'estimated' if guess else 'measured']
            for k, (name, shape, dw, dy, up, guess) in enumerate(zip(
                table.names, table.shapes, table.t_dw, table.t_dy, table.t_up,
                table.profile.estimated))]
    tensors = command_line.table(
        ['', 'tensor', 'shape', 't_dw (ms)', 't_dy (ms)', 't_up (ms)', 'backward (%)', 'time'],
        rows, '><>>>>><')
    full = table.t_step
    totals = command_line.table(['per step', 'ms', '%'], [
        [name, '%.2f' % ms, '%.1f' % (100 * ms / full)] for name, ms in (
            ('forward pass (t_fp)', table.t_fp), ('backward pass (t_bp)', table.t_bp),
            ('update (t_update)', table.t_update), ('full step', full))])
    kernels = '' if table.profile.kernel_share is None else (
        '\nkernels run during {:.1f} % of a full step'.format(100 * table.profile.kernel_share))
    return '{}\n\n{}\n\nattributed: {:.1f} % of the traced time outside the forward pass{}'.format(
        tensors, totals, 100 * table.profile.coverage, kernels)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(usage='%(prog)s [--flag VALUE ...]',
                                     description=__doc__.split('\n')[0])
    command_line.add_model_flags(parser)
    parser.add_argument('--num_classes', type=command_line.number(int, low=2), metavar='N',
                        help='width of the head (default: that of the data set); steps are timed '
                             'on a batch of --dataset_name where that has so many classes and need '
                             'not be prepared first, else on noise')
    parser.add_argument('--num_epochs', type=command_line.number(int, low=1),
                        default=TRAINING.num_epochs,
                        metavar='N', help='that training shall take, for the table of what each '
                                          'way to train costs (default: %(default)s)')
    parser.add_argument('--bn_statistics', choices=('frozen', 'train'),
                        default=statistics_of(MODEL.weights),
                        help='as in training: frozen, without dropout and stochastic depth inside '
                             'the base, for pretrained weights, train from scratch '
                             '(default: %(default)s)')
    command_line.add_flag(parser, '--plot', 'also draw t_dw and t_dy of every tensor')
    command_line.add_flag(parser, '--force', 'measure again even where a table matches')
    return parser.parse_args(argv)


def peak_bytes(settings, model):
    """Returns train type -> the most bytes held while it trains; changes the weights."""
    import tensorflow as tf

    from elastic import costs
    from elastic.compat.keras_stack import variable_name
    from elastic.networks.backbone import statistics_from_batch
    begin = time.perf_counter()
    images = tf.random.stateless_uniform(
        (settings.batch_size,) + settings.image_shape, (0, 0), 0, 255)
    labels = tf.zeros((settings.batch_size,), tf.int32)
    statistics_from_batch(model, images[:1])  # of one image: a batch would be more than a step
    maker = step_maker(model, settings, images, labels)
    peaks = costs.peaks_of(maker, [variable_name(v) for v in model.trainable_variables], images,
                           labels)
    print('peak memory measured in {:.1f} s'.format(time.perf_counter() - begin))
    return peaks


def print_costs(way, table, path, images, peaks):
    """Prints what each way to train costs, and stores in the table what was measured for it.

    way: costs.Way to compare others like it. path: of the table. images: (training, test) images.
    peaks: train type -> bytes.
    """
    from elastic import costs
    from elastic.cache.copy_costs import CopyCosts
    from elastic.cache.stores import room
    folder, row_ms = os.path.dirname(path), dict(table.profile.row_ms)
    copy_costs = CopyCosts(images[0], way.batch_size, folder, memory_bytes=room(folder)[0],
                         measured=row_ms)
    found = [costs.cost_of(each, table, copy_costs, images, peaks)
             for each in costs.ways_like(way, table)]
    profile = table.profile._replace(peak_bytes=peaks, row_ms=row_ms)
    if (peaks, row_ms) != (table.profile.peak_bytes, table.profile.row_ms):
        table._replace(profile=profile).save(path)
    print(costs.describe(found))
    print('\n' + '\n'.join(costs.notes_on(way, table)))


def main(argv=None):
    args = parse_arguments(argv)
    from elastic import costs
    from elastic.data.images import augmentation_of
    from elastic.networks.names import canonical_name
    args.augmentation = augmentation_of(args.dataset_name, args.augmentation)
    args.model_name = canonical_name(args.model_name)
    command_line.start_tensorflow(args.inter_op_threads)
    from models import build_model
    classes, *images = costs.sizes_of(args.dataset_name, args.input_size, args.batch_size,
                                      args.data_dir)
    args.num_classes = args.num_classes or classes
    settings = settings_of(args, StepSettings)
    saved = os.path.exists(args.model_name)
    model = build_model(args.model_name, settings.image_shape, args.num_classes,
                        'imagenet' if saved else 'none', args.alpha, args.bn_statistics,
                        args.trust_model)
    peaks = {}

    def draw():
        peaks.update(peak_bytes(settings, model))  # first: later, the profile's would count
        return batch_for(settings, args.dataset_name, args.data_dir)
    table = table_for(settings, model, args.logs_dir, draw, args.force)
    print(describe(table))
    path = path_of_table(settings, args.logs_dir)
    if args.plot:
        from elastic.timing.bars import timing_bars
        print('\n'.join(timing_bars(path, os.path.join(os.path.dirname(path), 'figure'))))
    peaks = table.profile.peak_bytes or peaks or peak_bytes(settings, model)
    print('\n{} on {} on this device, {} epoch{} of {:,} images, {} at a time\n'.format(
        args.model_name, args.dataset_name, args.num_epochs, 's' * (args.num_epochs > 1), images[0],
        args.batch_size))
    way = costs.Way('full_training', args.dataset_name, args.batch_size, args.num_epochs,
                    augmentation=args.augmentation)
    print_costs(way, table, path, images, peaks)
    return 0


if __name__ == '__main__':
    command_line.run(main)
