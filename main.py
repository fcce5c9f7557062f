"""Trains one network with one scheme, fully or elastically.

    python main.py --train_type elastic_training --rho 0.5
    tensorboard --logdir logs

Everything is checked before anything heavy starts; records go to logs/<run_name>/ (see folder.py).
"""

import contextlib
import errno
import gc
import os
import platform
import resource
import shutil
import sys

import numpy as np

from elastic import command_line
from elastic.command_line import UserError, settings_of
from elastic.device import energy, thermal
from elastic.device.host import host_description
from elastic.files import whole_folder
from elastic.flags import check_arguments, is_elastic, may_use_cache, parse_arguments, run_settings
from elastic.runs import checkpoint, metered
from elastic.runs.clock import Clock
from elastic.runs.folder import changed_settings, is_finished
from elastic.runs.recorder import Recorder, open_run
from elastic.runs.session import Session
from elastic.runs.signals import Signals
from elastic.schemes.fixed import FixedScheme
from elastic.settings import DataSettings, Settings
from elastic.steps.epoch import Diverged


def start(inter_op_threads, deterministic, seed):
    """Starts TensorFlow, with its threads, seeds and determinism."""
    command_line.start_tensorflow(inter_op_threads)
    import tensorflow as tf

    from elastic.compat import keras_stack
    if deterministic:
        if not hasattr(tf.config.experimental, 'enable_op_determinism'):
            raise UserError('--deterministic needs TensorFlow 2.9 or later; this is {}'.format(
                tf.__version__))
        tf.config.experimental.enable_op_determinism()
    keras_stack.set_seed(seed)


def load_data(args):
    """Returns the Dataset; UserError where --num_classes or --warmup_steps contradicts it."""
    from datasets import load_dataset
    dataset = load_dataset(args.dataset_name, args.input_size, args.batch_size,
                           **settings_of(args, DataSettings)._asdict())
    if args.num_classes not in (None, dataset.num_classes):
        raise UserError('--num_classes {} contradicts {}, which has {} classes; leave the flag out'
                        .format(args.num_classes, args.dataset_name, dataset.num_classes))
    steps = args.num_epochs * dataset.steps
    if args.warmup_steps >= steps:
        raise UserError('--warmup_steps {} leaves nothing of the {} steps of this run; allowed: 0 '
                        'to {}'.format(args.warmup_steps, steps, steps - 1))
    return dataset


def profile(args, model, dataset):
    """TensorTimings of this run, measured where none match, and stored."""
    import profiler
    batch = next(iter(dataset.probe))  # now: selections go on behind it, wherever the table is from
    step = settings_of(args, profiler.StepSettings)._replace(
        num_classes=dataset.num_classes, augmentation=dataset.augmentation)
    return profiler.table_for(step, model, args.logs_dir, lambda: batch)


def timing_table(args, model, dataset, cache, resumes=False):
    """Returns (TensorTimings of this run, its PrefixCache or None); UserError where rho is out of
    reach, unless the run resumes.
    """
    from selection_solver_DP import layers_of, out_of_reach
    table = profile(args, model, dataset)
    layers = layers_of(model) if args.granularity == 'layer' else None
    if cache is not None and not np.isfinite(table.cut_bytes).any():
        cache = None
        no_cache(args, 'no part of the network can be cut off whose outputs have a row for each '
                       'image, independent of the other images (batch statistics?)')
    priced = table if cache is None else cache.priced(table, 1, args.num_epochs + 1)
    reason = out_of_reach(priced, args.rho, layers)
    if reason and not resumes:
        raise UserError('--' + reason)
    return table, cache


def prefix_cache_of(args, dataset):
    """The prefix_cache.PrefixCache of this run; None where no image comes back unchanged."""
    if args.prefix_cache == 'off' or not may_use_cache(args):
        if args.prefix_cache == 'on':  # no error: with it, views are held as those of other schemes
            print('no prefix cache: {} leaves nothing frozen in front'.format(args.train_type))
        return None
    if args.num_epochs == 1:
        return no_cache(args, 'no image comes back in one epoch')
    if dataset.view(1) != dataset.view(2):
        return no_cache(args, 'images are augmented anew in each epoch; --views held holds them '
                              'for --interval epochs')
    from elastic.cache.prefix_cache import PrefixCache
    os.makedirs(args.logs_dir, exist_ok=True)
    return PrefixCache(dataset, args.cache_dir or args.logs_dir, args.cache_gb,
                       exact=args.deterministic)


def no_cache(args, reason):
    """Says why there is none; UserError where it was asked for."""
    if args.prefix_cache == 'on':
        raise UserError('--prefix_cache on: ' + reason)
    print('no prefix cache: ' + reason)


def penalty_of(train_type, model, dataset, settings, resumed):
    """Returns the penalty that is trained beside the loss, as strong as before where the run
    resumes; None for all schemes but PruneTrain.
    """
    if train_type != 'prune_training':
        return None
    from elastic.schemes.prunetrain import GroupLasso
    penalty = GroupLasso(model, dataset.probe, settings.prune_penalty_ratio)
    if resumed is not None:
        penalty.coefficient = resumed['run']['scheme']['coefficient']
    return penalty


def scheme_of(train_type, maker, dataset, settings, table, cache):
    """Returns the scheme.Scheme of --train_type.

    maker: masked_step.StepMaker. settings: Settings. table, cache: of timing_table.
    """
    if table is not None:
        from train import ElasticScheme
        return ElasticScheme(maker, dataset.probe, table, settings, cache)
    if train_type == 'prune_training':
        from elastic.schemes.prunetrain import PruneTrainScheme
        return PruneTrainScheme(maker, dataset, settings)
    return FixedScheme(train_type, maker)


def summarise(args, result, cache, dataset):
    """The content of summary.json; its prefix_cache tells whether there was one."""
    summary = run_settings(args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if may_use_cache(args):
        summary['prefix_cache'] = 'off' if cache is None else 'on'
    if args.skip_bad_images:
        summary['images_left_out'] = len(dataset.left_out)
    summary.update(result, run_name=args.run_name, scheme=args.train_type, peak_memory_mb=peak,
                   host=host_description(), stack=stack_description())
    return summary


def save(folder, model):
    """checkpoint/: portable weights, and the model in this stack's own format; whole or not at all.
    """
    from elastic.compat import keras_stack
    from models import save_weights
    path = os.path.join(folder, 'checkpoint')
    with whole_folder(path) as new:
        weights = os.path.join(new, 'weights.npz')
        save_weights(model, weights)
        needed = 2 ** 20 + 1.5 * os.path.getsize(weights)
        if shutil.disk_usage(new).free < needed:  # HDF5 would end in a traceback
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        model.save(os.path.join(new, keras_stack.MODEL_FILE))
    print('saved {}'.format(os.path.join(path, 'weights.npz')))


def already_finished(folder):
    checkpoint.remove(folder)  # where the process ended just behind its summary
    print('already finished with the same settings: {}'.format(folder))
    return 0


def interrupted_run(folder, decisive, restart=False):
    """Returns the checkpoint that this run resumes from, see checkpoint.read; None for a new one.

    decisive: dict of flags, see flags.run_settings.
    """
    from train import RECORDS
    resumed = None if restart else checkpoint.read(folder, RECORDS)
    if resumed is None:
        return None
    about, before = about_this(decisive), resumed['about']
    changed = changed_settings(before['settings'], about['settings'])
    if changed:
        raise UserError('the checkpoint in {} is of other settings; start over with --restart ({})'
                        .format(folder, ', '.join(changed)))
    if resumed['damaged']:
        print('warning: {}: resuming from the checkpoint before it'.format(resumed['damaged']))
    for what, differs in (('stack', 'the next weights by rounding, and noise of dropout'),
                          ('host', 'times, and with them what is selected')):
        if before[what] != about[what]:
            print('warning: interrupted on {}, resumes on {}: {} will differ'.format(
                before[what], about[what], differs))
    return resumed


def about_this(decisive):
    """Returns what should be the same when a run resumes: settings, host, stack."""
    return dict(settings=decisive, host=host_description(), stack=stack_description())


def stack_description():
    import tensorflow as tf
    from tensorflow import keras
    return 'TensorFlow {}, Keras {}, Python {}.{}'.format(
        tf.__version__, keras.__version__, *platform.python_version_tuple()[:2])


def main(argv=None):
    args = check_arguments(parse_arguments(argv))
    folder, decisive = os.path.join(args.logs_dir, args.run_name), run_settings(args)
    if is_finished(folder, decisive, args.restart):
        return already_finished(folder)
    with Signals() as signals:
        try:
            return run(args, folder, decisive, signals)
        except Diverged as error:
            print('stopped: {}'.format(error), file=sys.stderr)
            return 1
        except BaseException as error:  # an import that is cut short may make anything of it
            if not signals.stop() or signals.deferred and not isinstance(
                    error, checkpoint.Interrupted):
                raise
            print_stop(folder, signals, error, args.restart)
        return 128 + signals.caught


def print_stop(folder, signals, error, restart):
    """Prints by which of the Signals the run was stopped, where, and how to resume it."""
    if not isinstance(error, checkpoint.Interrupted):
        text = ' before training began; run the same command to {}'.format(
            'resume' if checkpoint.stamps(folder) else 'start again')
    else:
        epoch, step, kept = error.args
        text = ' in epoch {} after step {}; run the same command{} to resume{}'.format(
            epoch, step, ' without --restart' if restart else '',
            '' if kept else ' from the last checkpoint, if there is one')
    print('\nstopped by {}{}'.format(signals.name, text), file=sys.stderr)


def check_images(resumed, fingerprint):
    """UserError where a run resumes on other images; fingerprint: of the Dataset."""
    if resumed is not None and resumed['about']['images'] != fingerprint:
        raise UserError('the images are others than when the run was interrupted: put them back '
                        'or start over with --restart')


def print_start(title, dataset, model, resumed):
    """Prints what is trained on what, and from where it resumes."""
    print('{}, {} images, {} tensors'.format(title, dataset.train_size,
                                             len(model.trainable_variables)))
    if resumed is not None:
        progress = resumed['run']['progress']
        print('resumes in epoch {} after step {}'.format(
            resumed['run']['epoch'], progress['count'] if progress else 0))


@contextlib.contextmanager
def bad_image_named(dataset):
    """Raises UserError that names the image where training fails because it became unreadable."""
    import tensorflow as tf
    try:
        yield
    except tf.errors.OpError as error:
        about_memory = isinstance(error, tf.errors.ResourceExhaustedError)
        bad = None if about_memory else dataset.first_fault()
        if bad is None:
            raise
        raise UserError("cannot read image '{}' any more ({}); to leave it out and resume from the "
                        'last checkpoint, run the same command with --skip_bad_images'.format(*bad))


def energy_of(meter, meter_csv):
    """Returns what the Meter measured, a dict. The log of an external meter alone counts where
    there is one: it is read once the run is safe, however damaged it may be.
    """
    used = meter.result()
    if meter_csv:
        used.update(energy_joules=None, energy_source=None,
                    energy_note='{} was not read'.format(meter_csv))
    return used


def print_end(summary):
    """Prints how the run ended; summary: of summary.json."""
    joules = summary['energy_joules']
    print('final test accuracy {:.1f} % (best {:.1f} %), trained in {:.1f} s (selection {:.1f} s)'
          .format(100 * summary['final_accuracy'], 100 * summary['best_accuracy'],
                  summary['train_seconds'], summary['selection_seconds'])
          + ('' if joules is None else ', {:,.0f} J'.format(joules)))


def add_meter(folder, meter_csv):
    """Adds the energy that an external meter's log shows to the finished run."""
    try:
        metered.add_to_run(folder, meter_csv)
    except UserError as error:
        print('energy not measured: {}'.format(error), file=sys.stderr)


def run(args, folder, decisive, signals):
    """Trains one network with one scheme, from the data to the summary; returns the exit status.

    folder: of the run. decisive: dict of flags, see flags.run_settings. signals: signals.Signals.
    """
    start(args.inter_op_threads, args.deterministic, args.seed)
    import train
    from models import build_model
    settings = settings_of(args, Settings)
    resumed = interrupted_run(folder, decisive, args.restart)

    dataset = load_data(args)
    model = build_model(args.model_name, (args.input_size, args.input_size, 3),
                        dataset.num_classes, args.weights, args.alpha, args.bn_statistics,
                        args.trust_model)
    table, cache = None, prefix_cache_of(args, dataset)
    if is_elastic(args):
        table, cache = timing_table(args, model, dataset, cache, resumed is not None)

    check_images(resumed, dataset.fingerprint)
    lock = open_run(folder, decisive, resumed, args.restart)
    if lock is None:
        return already_finished(folder)
    print_start('{}: {} on {}'.format(args.run_name, args.model_name, args.dataset_name), dataset,
                model, resumed)
    keeper = checkpoint.Keeper(folder, args.checkpoint_minutes,
                               dict(about_this(decisive), images=dataset.fingerprint),
                               signals.stop, resumed and resumed['written'])
    with Recorder(folder, lock, resumed and resumed['records']) as recorder:
        signals.deferred = True
        meter = energy.Meter(*energy.find_sensors())
        clock = Clock(meter, thermal.Monitor(thermal.find_device()))
        session = Session(recorder, clock, keeper, resumed)

        penalty = penalty_of(args.train_type, model, dataset, settings, resumed)
        gc.collect()
        getattr(gc, 'freeze', int)()  # releasing an old step need not scan TensorFlow from now on
        with session.preparing():
            scheme = scheme_of(args.train_type, train.step_maker(model, dataset, settings, penalty),
                               dataset, settings, table, cache)
        with bad_image_named(dataset):
            result, model = train.train(scheme, dataset, settings, session, cache)

        if dataset.left_out:
            print('{} images could not be read and were left out: {}'.format(
                len(dataset.left_out), ', '.join(dataset.left_out[:10])))
        if args.save_txt:
            recorder.text()
        if args.save_model:
            save(folder, model)
        result.update(energy_of(meter, args.meter_csv))
        summary = summarise(args, result, cache, dataset)
        recorder.finish(summary)
    print_end(summary)
    if args.meter_csv:
        add_meter(folder, args.meter_csv)
    return 0


if __name__ == '__main__':
    command_line.run(main)
