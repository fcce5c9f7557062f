"""Tensor timing profiler: how long the backward pass needs for each tensor (paper, section 4.1).

    python profiler.py --model_name resnet50 --num_classes 200

Records real training steps with the TensorFlow profiler, attributes op times to tensors through the
graph (elastic/timing), and writes the trace and the table (CSV, JSON) to
logs/<model>_<size>_<classes>_<batch>_profile/. The table is reused only where its key matches: the
same device, model, input, batch and threads. Ends with what each way to train costs here.
"""

import argparse
import contextlib
import os
import tempfile
import time
from typing import NamedTuple, Optional

import numpy as np

from elastic import command_line
from elastic.compat import start
from elastic.device.host import release_memory
from elastic.files import alone_in, check_writable, whole_folder
from elastic.options import add_flag, number
from elastic.settings import (
    BASELINES,
    ELASTIC,
    MODEL,
    TRAINING,
    WorkerSettings,
    pools,
    settings_of,
    statistics_of,
)
from elastic.timing.attribution import attribute
from elastic.timing.report import describe, warn_of
from elastic.timing.stored import TABLE_FILE, stored_table, table_key, table_path, wider_table
from elastic.timing.table import TensorTimings  # noqa: F401 (public here)
from elastic.timing.totals import build_table, measure_totals
from elastic.workers.addresses import check_own_address, tables_folder, workers_of


class StepSettings(NamedTuple):
    """Describes what is timed, a network and its training step, by the flags of the same names."""
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
    class_weight: Optional[str] = None
    head: str = MODEL.head
    head_start: str = MODEL.head_start

    @property
    def image_shape(self):
        return self.input_size, self.input_size, 3


class UpdateSettings(NamedTuple):
    """Describes the update of a step, by the flags of main.py of the same names.

    optimizer: 'sgd' or 'adam'. clip_norm: as training_step.make_optimizer takes it.
    class_weight: None, or anything else for a loss with weights, whose values do not matter.
    """
    optimizer: str
    weight_decay: float = TRAINING.weight_decay
    clip_norm: Optional[float] = None
    class_weight: Optional[str] = None


def profile_model(model, input_shape=None, num_classes=None, batch_size=None,
                  optimizer=TRAINING.optimizer, batch=None, folder=None, key=None, num_steps=5,
                  seconds=16.0, **update):
    """Returns the TensorTimings of one training step of `model`, whose variables stay as they were.

    The batch is described by input_shape (of one example, such as (height, width, channels)),
    num_classes and batch_size, and filled with noise; or it is `batch`: (inputs, labels), whose
    inputs are one array, or a list, tuple or dict of arrays, as the model takes them.
    optimizer, update: fields of UpdateSettings. The others: as in profile_step.
    """
    import tensorflow as tf

    from elastic.compat.keras_stack import restored_afterwards
    from elastic.networks.backbone import statistics_from_batch
    from elastic.steps.training_step import as_batch
    if batch is None:
        pixels = np.random.RandomState(0).uniform(0, 255, (batch_size,) + tuple(input_shape))
        batch = (tf.constant(pixels, tf.float32),
                 tf.random.stateless_uniform((batch_size,), (0, 0), 0, num_classes, tf.int32))
    inputs, labels = as_batch(model, *batch)
    with restored_afterwards(model.variables):
        statistics_from_batch(model, inputs)
        maker = step_maker(model, UpdateSettings(optimizer, **update), inputs, labels)
        return profile_step(maker, inputs, labels, folder, key, num_steps, seconds)


def profile_step(maker, inputs, labels, folder=None, key=None, num_steps=5, seconds=16.0):
    """Returns the TensorTimings of the step of a masked_step.StepMaker, which runs many times.

    folder: where the trace stays; None: it is deleted. key: stored in the table.
    num_steps: traced steps. seconds: rough limit of the untraced runs that give the totals.
    """
    from elastic.compat.keras_stack import variable_name
    from elastic.steps.prefix_steps import PrefixSteps
    from elastic.timing.liveness import memory_of
    from elastic.timing.op_times import read_trace
    from elastic.timing.trace import executed_graph, record_trace
    variables = maker.model.trainable_variables
    with contextlib.ExitStack() as stack:
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory())
        graph = executed_graph(maker, inputs, labels)
        release_memory()
        trace = record_trace(maker.step(np.ones(len(variables), dtype=bool)), inputs, labels,
                             folder, num_steps)
        ms, kernel_ms = read_trace(trace, num_steps)
        times = attribute(graph, ms, len(variables), kernel_ms)
        totals = measure_totals(PrefixSteps(maker), times, inputs, labels, seconds)
    return build_table([variable_name(v) for v in variables],
                       [tuple(int(n) for n in v.shape) for v in variables], times, totals,
                       key or {})._replace(memory=memory_of(maker))


def step_maker(model, settings, inputs, labels):
    """Returns a masked_step.StepMaker whose learning rate hardly changes the weights.

    settings: StepSettings or UpdateSettings.
    """
    from elastic.steps.masked_step import StepMaker
    from elastic.steps.optimizer import make_optimizer
    from elastic.steps.training_step import Objective
    optimizer = make_optimizer(settings.optimizer, 1e-6, 1000, model.trainable_variables,
                               clip_norm=settings.clip_norm)
    weights = None if settings.class_weight is None else np.ones(model.output_shape[-1])
    return StepMaker(model, optimizer, settings.weight_decay, inputs, labels,
                     Objective(class_weight=weights))


def path_of_table(settings, logs_dir):
    """Returns the table_path of StepSettings."""
    return table_path(logs_dir, settings.model_name, settings.input_size, settings.num_classes,
                      settings.batch_size, settings.head if pools(
                          settings.head, settings.head_start) else '')


def table_for(settings, model, logs_dir, draw, again=False, known=0):
    """Returns the stored TensorTimings if its key matches; else measures and stores it.

    settings: StepSettings. again: measure in any case. known: number of classes of the run that is
    continued; a table of as many, or of fewer as in runs before it, serves where there is no other.
    draw: () -> (images, labels) to time steps on, or None for noise, whose step time may differ.
    """
    key, path, table = table_key(settings, model), path_of_table(settings, logs_dir), None
    for classes in range(0 if again or os.path.exists(path) else known, 1, -1):
        fewer = settings._replace(num_classes=classes)
        place = path_of_table(fewer, logs_dir)
        if table is None and os.path.exists(place):
            table = wider_table(place, table_key(fewer, model), model)
    if table is None and not again:
        table = stored_table(path, key)
    if table is not None:
        return table
    with alone_in(logs_dir, 'another process is profiling: waiting for it') as waited:
        table = stored_table(path, key) if waited and not again else None
        return table or _profiled(settings, model, path, key, draw())


def _profiled(settings, model, path, key, batch):
    begin = time.perf_counter()
    with whole_folder(os.path.dirname(path)) as new:
        table = profile_model(model, settings.image_shape, settings.num_classes,
                              settings.batch_size, settings.optimizer, batch, folder=new, key=key,
                              weight_decay=settings.weight_decay, clip_norm=settings.clip_norm,
                              class_weight=settings.class_weight)
        table.save(os.path.join(new, TABLE_FILE))
    release_memory()
    print('profiled in {:.1f} s: {}'.format(time.perf_counter() - begin, path))
    warn_of(table.profile)
    return table


def batch_for(settings, dataset_name, data_dir=None):
    """Returns (images, labels) of the data set, or None if it is not at hand; prints which."""
    from datasets import batch_at_hand
    batch, reason = batch_at_hand(dataset_name, settings.input_size, settings.batch_size,
                                  settings.num_classes, data_dir, settings.augmentation)
    print('steps are timed on',
          f'a batch of {dataset_name}' if reason is None else f'noise: {reason}')
    return batch


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(usage='%(prog)s [--flag VALUE ...]',
                                     description=__doc__.split('\n')[0],
                                     epilog=command_line.FILES_HELP)
    command_line.add_shared_flags(parser)
    parser.add_argument('--num_classes', type=number(int, low=2), metavar='N',
                        help='width of the head (default: that of the data set); steps are timed '
                             'on a batch of --dataset_name if that has this number of classes and '
                             'can be prepared, else on noise')
    parser.add_argument('--num_epochs', type=number(int, low=1),
                        default=TRAINING.num_epochs, metavar='N',
                        help='epochs of a training run, for the table of what each way to train '
                             'costs (default: %(default)s)')
    parser.add_argument('--bn_statistics', choices=('frozen', 'train'),
                        default=statistics_of(MODEL.weights),
                        help='as in training: frozen (without dropout and stochastic depth inside '
                             'the base) for pretrained weights, train from scratch '
                             '(default: %(default)s)')
    add_flag(parser, '--plot', 'also draw t_dw and t_dy of every tensor')
    add_flag(parser, '--force', 'measure again even if a table matches')
    command_line.add_flags(parser, WorkerSettings._fields)
    return parser.parse_args(command_line.with_files(argv))


def peak_bytes(settings, model):
    """Returns train type -> the most bytes held while it trains, None if unknown.

    They include Python, TensorFlow, weights and the optimizer's state, but no data set. TensorFlow
    keeps its memory, so small masks run first; call this before the process runs a larger step.
    Changes the weights.
    """
    import tensorflow as tf

    from elastic.device import host
    from elastic.networks.backbone import statistics_from_batch
    from elastic.schemes.fixed import fixed_mask
    from elastic.selection.importance import Evaluator
    begin = time.perf_counter()
    release_memory()
    host.reset_peak()  # which preparing a data set may have raised
    images = tf.random.stateless_uniform(
        (settings.batch_size,) + settings.image_shape, (0, 0), 0, 255)
    labels = tf.zeros((settings.batch_size,), tf.int32)
    statistics_from_batch(model, images[:1])  # one image: a batch would hold more than a step
    maker = step_maker(model, settings, images, labels)
    peaks, masks = {}, {name: fixed_mask(name, model) for name in BASELINES}
    for name, mask in sorted(masks.items(), key=lambda item: item[1].sum()):
        maker.step(mask)(images, labels)[0].numpy()
        peaks[name] = host.peak_bytes()
    Evaluator(maker).trial(images, labels, 0.5)  # a halved trial update needs most
    peaks[ELASTIC] = host.peak_bytes()
    print('peak memory measured in {:.1f} s'.format(time.perf_counter() - begin))
    return peaks


def print_costs(way, table, path, images, peaks, joint):
    """Prints what each way to train costs, and stores measured copy costs and peaks in the table.

    way: ways.Way that others derive from. path: of the table. peaks: train type -> bytes.
    images: numbers of (training, test) images. joint: TensorTimings of several workers, whose costs
    are printed.
    """
    from elastic.cache.copy_times import CopyTimes
    from elastic.planning import ways
    folder, profile = os.path.dirname(path), table.profile
    row_ms = dict(profile.row_ms)
    copy_times = CopyTimes(images[0], way.batch_size, folder, measured=row_ms)
    found = [ways.forecast_of(each, joint, copy_times, images, peaks)
             for each in ways.ways_like(way, joint)]
    if (peaks, row_ms) != (profile.peak_bytes, profile.row_ms):
        table._replace(profile=profile._replace(peak_bytes=peaks, row_ms=row_ms)).save(path)
    print(ways.describe(found))
    print('\n' + '\n'.join(ways.notes_on(way, table)))


def main(argv=None):
    args = parse_arguments(argv)
    from elastic.data.class_weights import check_class_weight
    from elastic.data.images import augmentation_of, check_dataset_name
    from elastic.networks.names import canonical_name
    from elastic.planning import ways
    check_class_weight(args.class_weight)
    check_writable(args.logs_dir, '--logs_dir', folder=True)
    args.augmentation = augmentation_of(check_dataset_name(args.dataset_name),
                                        args.augmentation)
    args.model_name = canonical_name(args.model_name)
    workers = workers_of(args)
    if workers is not None:
        check_own_address(workers)
        args.logs_dir = tables_folder(args.logs_dir, workers.index)
    start.start_tensorflow(args.inter_op_threads)
    from elastic.workers.agreement import joint_table
    from elastic.workers.cluster import Cluster
    from models import build_model
    cluster = Cluster(workers, args.worker_timeout)
    cluster.join()
    classes, *images = ways.sizes_of(args.dataset_name, args.input_size, args.batch_size,
                                      args.data_dir)
    args.num_classes = args.num_classes or classes
    settings = settings_of(args, StepSettings)
    saved = os.path.exists(args.model_name)
    model = build_model(args.model_name, settings.image_shape, args.num_classes,
                        'imagenet' if saved else 'none', args.alpha, args.bn_statistics,
                        args.trust_model, args.keep_frozen, args.head, args.head_features,
                        args.head_start)
    peaks = {}

    def draw():
        peaks.update(peak_bytes(settings, model))  # first: later, the profile's would count
        return batch_for(settings, args.dataset_name, args.data_dir)
    table = table_for(settings, model, args.logs_dir, draw, args.force)
    joint = joint_table(cluster, table._replace(memory=None))._replace(memory=table.memory)
    print(describe(joint))
    path = path_of_table(settings, args.logs_dir)
    if args.plot:
        from elastic.figures.bars import timing_bars
        print('\n'.join(timing_bars(path, os.path.join(os.path.dirname(path), 'figure'))))
    peaks = table.profile.peak_bytes or peaks or peak_bytes(settings, model)
    epochs = f'{args.num_epochs} epoch' + 's' * (args.num_epochs > 1)
    images[0] //= cluster.size
    print(f'\n{args.model_name} on {args.dataset_name} on this device, {epochs} of {images[0]:,} '
          f'images, {args.batch_size} at a time\n')
    way = ways.Way('full_training', args.dataset_name, args.batch_size, args.num_epochs,
                    augmentation=args.augmentation)
    print_costs(way, table, path, images, peaks, joint)
    return 0


if __name__ == '__main__':
    command_line.run(main)
