"""Trains one network with one scheme, fully or elastically.

    python main.py --train_type elastic_training --rho 0.5
    tensorboard --logdir logs

`run` is the page that shows the whole. Everything is checked before anything heavy starts.
"""

import os
import resource
import sys
import tempfile

import numpy as np

from elastic import command_line
from elastic.command_line import UserError
from elastic.data.image_folder import FOLDER
from elastic.device.sensors import NO_ANSWER
from elastic.durations import duration_text
from elastic.files import check_writable, make_folder, printable
from elastic.flags import (
    check_arguments,
    decisive_settings,
    flag_lines,
    is_elastic,
    parse_arguments,
)
from elastic.networks.names import is_saved
from elastic.runs import checkpoint, metered
from elastic.runs.folder import is_finished
from elastic.runs.signals import Signals
from elastic.schemes.fixed import HEAD, SCHEMES, FixedScheme, matching_mask
from elastic.schemes.scheme import Choice
from elastic.settings import CHOSEN, PRUNE, STAGES, run_settings
from elastic.steps.epoch import Diverged
from elastic.workers.addresses import WorkerLost, tables_folder, workers_of

CLASSES_SHOWN = 10  # in the last lines of a run


def join_and_run(settings, signals):
    """Joins the other workers, if there are any, and runs; returns the exit status."""
    command_line.start_tensorflow(settings.inter_op_threads, settings.deterministic,
                                  settings.training.seed)
    from elastic.runs.session import here
    from elastic.workers.agreement import check_flags
    from elastic.workers.cluster import Cluster
    cluster = Cluster(workers_of(settings.workers), settings.workers.worker_timeout)
    cluster.join()
    check_flags(cluster, decisive_settings(settings), here()['stack'])
    if cluster.is_chief:
        return run(settings, settings.records, cluster, signals)
    with tempfile.TemporaryDirectory() as folder:
        return run(settings, settings.records.aside(folder), cluster, signals)


def run(settings, records, cluster, signals):
    """Trains one network with one scheme, from the data to the summary; returns the exit status.

    records: settings.RecordSettings of this worker of the workers.cluster.Cluster.
    """
    training = settings.training
    import train
    from elastic.export.litert import check_converter
    from elastic.export.saving import save_network
    from elastic.runs.session import here, joint_resume, open_session
    from elastic.schemes.solved_head import check_features, features_in_memory, standardise
    from elastic.selection.items import layers_of
    from elastic.steps.training_step import warn_of_probabilities
    from elastic.workers.agreement import check_start, joint_table
    from models import build_model
    if records.export:
        check_converter()
    decisive = decisive_settings(settings)
    resumed = joint_resume(cluster, records.folder, decisive, records.restart)

    images, network = find_images(settings), settings.model
    features = network.head_features
    if resumed is not None:
        features = resumed['about']['head_features']
    elif training.solves and network.head == STAGES:
        features = cluster.of_chief(lambda: features_in_memory(features, images.train.size))
    model = build_model(network.model_name, network.image_shape, len(images.class_names),
                        network.weights, network.alpha, network.bn_statistics,
                        network.trust_model, network.keep_frozen, network.head,
                        features, network.head_start)
    if training.train_tensors is not None:
        matching_mask(training.train_tensors, model)  # a mistake ends here
    dataset = load_data(settings, images)
    check_start(cluster, model, dataset)
    if is_saved(network.model_name):
        warn_of_probabilities(model, next(iter(dataset.test))[0])
    if training.deadline is not None and solves_alone(settings, dataset, resumed):
        settings, training = solving_alone(settings)
    elastic, deadline = is_elastic(training.train_type), None
    timed = elastic or training.train_type == CHOSEN
    table = joint_table(cluster, profile(settings, model, dataset)) if timed else None
    layers = layers_of(model) if elastic and training.granularity == 'layer' else None
    if training.deadline is not None:
        deadline = deadline_of(settings, table, layers, dataset, resumed)
        if resumed is None and deadline.plan.num_epochs == 1:  # there is no time to train
            settings, training = solving_alone(settings)
            elastic, deadline = False, None
        else:
            training = deadline.settings(training)
    if elastic:
        cache = elastic_cache(settings._replace(training=training), table, layers, dataset, resumed)
    else:
        cache = prefix_cache_of(settings, dataset)

    if training.solves and resumed is None:
        check_features(model, dataset)
    about = dict(images=dataset.fingerprint, views=dataset.views, head_features=features)
    with open_session(records, decisive, about, dataset, resumed, signals,
                      cluster.is_chief) as session:
        if session is None:
            return already_finished(records.folder)
        print_start(settings, dataset, model, resumed)
        session.recorder.flags(flag_lines(settings))
        penalty = penalty_of(model, dataset, training, resumed)
        with session.preparing():
            if network.head == STAGES and not training.solves and resumed is None:
                standardise(model, dataset, cluster)
            maker = train.step_maker(model, dataset, training, penalty, cluster)
            scheme = scheme_of(maker, dataset, training, table, cache)
        result, model = train.train(scheme, dataset, training, session, cache, deadline)
        cluster.leave()
        if records.save_txt:
            session.recorder.text()
        if records.save_model or records.export:
            save_network(os.path.join(records.folder, 'checkpoint'), model, dataset,
                         records.export)
        summary = dict(
            decisive, **result, **measured_beside(settings, dataset, cache, session.clock),
            **here(), run_name=records.run_name, scheme=training.train_type)
        if deadline is not None:
            summary.update(rho=deadline.plan.rho, seconds_used=deadline.used)
        session.recorder.classes(images.class_names)  # after memory was measured
        session.recorder.finish(summary)
    print_end(summary, dataset)
    if records.export:
        print_accuracy_of_export(records.folder, dataset)
    if records.meter_csv:
        try:
            metered.add_to_run(records.folder, records.meter_csv)
        except UserError as error:
            print('energy not measured: {}'.format(error), file=sys.stderr)
    return 0


# ---------------------------------------------------------------- data and model

def find_images(settings):
    """Returns the data set's Images, of which none is decoded yet.

    Raises UserError if --num_classes or --warmup_steps contradicts them.
    """
    import datasets
    name, training, batch_size = settings.dataset_name, settings.training, settings.batch_size
    images = datasets.find_images(name, settings.model.input_size, batch_size,
                                  **settings.data._asdict())
    if settings.num_classes not in (None, len(images.class_names)):
        raise UserError('--num_classes {} contradicts {}, which has {} classes; leave the flag out'
                        .format(settings.num_classes, name, len(images.class_names)))
    steps = training.trained_epochs * datasets.steps_of(images, batch_size, settings.data)
    if training.trained_epochs and training.warmup_steps >= steps:
        raise UserError('--warmup_steps {} is not less than the {} steps of this run; allowed: 0 '
                        'to {}'.format(training.warmup_steps, steps, steps - 1))
    return images


def load_data(settings, images=None):
    """Returns the Dataset of these Images (default: of find_images)."""
    from datasets import load_dataset
    return load_dataset(settings.dataset_name, settings.model.input_size, settings.batch_size,
                        images=images or find_images(settings), **settings.data._asdict())


def prefix_cache_of(settings, dataset, table=None):
    """Returns the prefix_cache.PrefixCache of this run; None if it has none.

    table: TensorTimings of elastic training. Raises UserError if --prefix_cache on is impossible.
    """
    wanted, scheme = settings.cache.prefix_cache, settings.training.train_type
    if wanted == 'off' or not SCHEMES[scheme].frozen_front:
        if wanted == 'on':  # no error: for any scheme, the flag also sets --views held
            print('no prefix cache: {} freezes no layers next to the input'.format(scheme))
        return None
    reason = None
    if not settings.training.trained_epochs:
        return None
    if settings.training.trained_epochs == 1:
        reason = 'no image comes back in one epoch'
    elif dataset.view(1) != dataset.view(2):
        reason = ('each epoch draws new augmentations; --views held keeps them for --interval '
                  'epochs')
    elif table is not None and not np.isfinite(table.cut_bytes).any():
        reason = ('no part of the network can be cut off whose outputs have a row for each image, '
                  'independent of the other images (batch statistics?)')
    if reason and wanted == 'on':
        raise UserError('--prefix_cache on: ' + reason)
    if reason:
        print('no prefix cache: ' + reason)
        return None
    from elastic.cache.prefix_cache import PrefixCache
    logs_dir = settings.records.logs_dir
    make_folder(logs_dir)
    return PrefixCache(dataset, settings.cache.cache_dir or logs_dir, settings.cache.cache_gb,
                       exact=settings.deterministic)


# ---------------------------------------------------------------- timing table and scheme

def profile(settings, model, dataset):
    """Returns the TensorTimings of this run: stored ones if they match, else new ones."""
    import profiler
    batch = next(iter(dataset.probe))  # drawn even if unused, so selections get the same batches
    step, folder = timed_step(settings, dataset)
    return profiler.table_for(step, model, folder, lambda: batch)


def timed_step(settings, dataset):
    """Returns (the profiler.StepSettings of this run, the folder of timing tables)."""
    from profiler import StepSettings
    network, training = settings.model, settings.training
    return StepSettings(
        network.model_name, network.alpha, network.input_size, settings.batch_size,
        dataset.num_classes, dataset.augmentation, network.bn_statistics, training.optimizer,
        training.weight_decay, training.clip_norm, settings.data.class_weight, network.head,
        network.head_start), tables_folder(
            settings.records.logs_dir, settings.workers.worker_index)


def solves_alone(settings, dataset, resumed):
    """Returns whether a run with a deadline has no time for a profile, and only solves the head."""
    from elastic.runs.deadline import PROFILE, process_seconds
    from profiler import path_of_table
    if resumed is not None:
        return resumed['deadline'] is None
    left = settings.training.deadline - process_seconds()
    if left >= PROFILE or os.path.exists(path_of_table(*timed_step(settings, dataset))):
        return False
    print('deadline: {} left, too little to profile the network: only the head is solved'.format(
        duration_text(max(0.0, left))))
    return True


def solving_alone(settings):
    """Returns RunSettings that only solve the head, and their settings.Settings."""
    training = settings.training._replace(train_type=HEAD, num_epochs=1, deadline=None)
    return settings._replace(training=training), training


def elastic_cache(settings, table, layers, dataset, resumed=None):
    """Returns the PrefixCache of elastic training, or None.

    With --views auto, holds views if rho is out of reach without a cache; a run that resumes keeps
    what it began with. Raises UserError if rho is still out of reach, unless the run resumes.
    table: TensorTimings. layers: as in items.items_of. resumed: as in session.open_session.
    """
    from elastic.selection.cache_costs import CacheCosts
    from elastic.selection.items import out_of_reach
    training = settings.training
    if resumed is not None:
        held = resumed['about'].get('views') == 'held'
    else:
        held = settings.data.views == 'auto' and np.isfinite(table.cut_bytes).any() and (
            out_of_reach(table, training.rho, layers))
    if held:
        dataset.hold_views()
    cache = prefix_cache_of(settings, dataset, table)
    costed = table if cache is None else CacheCosts(cache, table, 1, training.num_epochs + 1).table
    reason = out_of_reach(costed, training.rho, layers)
    if reason and resumed is None:
        raise UserError('--' + reason)
    if settings.data.views == 'auto' and dataset.views == 'held':
        interval = settings.data.interval
        print('--views held, as rho {:g} is out of reach without the prefix cache: each image '
              'keeps its augmentation for {}'.format(training.rho, '{} epochs'.format(
                  interval) if interval else 'the whole run (--interval 4 loses less accuracy)'))
    return cache


def deadline_of(settings, table, layers, dataset, resumed):
    """Returns the Deadline of this run, which holds a plan; prints it.

    The arguments are those of elastic_cache.
    """
    from elastic.runs.deadline import Deadline, first_costs
    from elastic.selection.items import smallest_rho
    training = settings.training
    caches = settings.cache.prefix_cache != 'off' and np.isfinite(table.cut_bytes).any() and (
        settings.data.views != 'fresh' or dataset.view(1) == dataset.view(2))
    least = smallest_rho(table, layers)
    costs, saving = first_costs(table, dataset, settings.batch_size, training.interval,
                                (least, 0.0 if caches else least), settings.records.export)
    if resumed is None:
        deadline = Deadline(training.deadline, costs, saving)
        deadline.begin()
    else:
        before = resumed['deadline']
        deadline = Deadline(training.deadline, costs, saving, before['used'])
        deadline.restore(before)
    return deadline


def penalty_of(model, dataset, settings, resumed):
    """Returns PruneTrain's penalty, with the old coefficient if the run resumes; else None."""
    if settings.train_type != PRUNE:
        return None
    from elastic.schemes.prunetrain import GroupLasso
    penalty = GroupLasso(model, dataset.probe, settings.prune_penalty_ratio,
                         dataset.class_weight)
    if resumed is not None:
        penalty.coefficient = resumed['run']['scheme']['coefficient']
    return penalty


def scheme_of(maker, dataset, settings, table, cache):
    """Returns the scheme.Scheme of --train_type. table, cache: from timing_table."""
    if is_elastic(settings.train_type):
        from train import ElasticScheme
        return ElasticScheme(maker, dataset.probe, table, settings, cache)
    if settings.train_type == PRUNE:
        from elastic.schemes.prunetrain import PruneTrainScheme
        return PruneTrainScheme(maker, dataset, settings)
    choice = chosen(maker, settings, table, cache) if settings.train_type == CHOSEN else None
    return FixedScheme(settings.train_type, maker, choice, 1 + settings.solves)


def chosen(maker, settings, table, cache):
    """Returns the Choice of --train_tensors, with the predicted time of its step."""
    from elastic.selection.cache_costs import CacheCosts
    mask = matching_mask(settings.train_tensors, maker.model)
    if cache is not None:
        cache.attach(maker)
        table = CacheCosts(cache, table, 1, settings.num_epochs + 1).at_own_cut(mask)
    return Choice(mask, timings=table)


# ---------------------------------------------------------------- what a run leaves

def measured_beside(settings, dataset, cache, clock):
    """Returns what the summary says of sensors, memory, cache, images and classes."""
    found = dict(clock.meter.result(), device_note=clock.monitor.note, views=dataset.views,
                 augmentation=dataset.augmentation, class_names=list(dataset.class_names),
                 peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if settings.records.meter_csv:  # read only once the run is safe, because it may be damaged
        found.update(energy_joules=None, energy_source=None,
                     energy_note='{} was not read'.format(settings.records.meter_csv))
    if SCHEMES[settings.training.train_type].frozen_front:
        found['prefix_cache'] = 'off' if cache is None else 'on'
    if dataset.class_weights is not None:
        found['class_weights'] = dataset.class_weights.records(dataset.class_names)
    if settings.data.skip_bad_images:
        found['images_left_out'] = len(dataset.left_out)
    return found


# ---------------------------------------------------------------- what a person sees

def print_start(settings, dataset, model, resumed):
    """Prints what is trained, on which data, and from where it resumes."""
    from elastic.networks.saved_model import count_trainable
    tensors = len(model.trainable_variables)
    if settings.model.keep_frozen:
        tensors = '{} of {}'.format(tensors, count_trainable(model))
    print('{}: {} on {}, {} images, {} tensors'.format(
        settings.records.run_name, settings.model.model_name, settings.dataset_name,
        dataset.train_size, tensors))
    for note in dataset.notes:
        print(note)
    if dataset.class_weights is not None:
        print(dataset.class_weights.describe(dataset.class_names))
    if resumed is not None:
        progress = resumed['run']['progress']
        print('resumes in epoch {} after step {}'.format(
            resumed['run']['epoch'], progress['count'] if progress else 0))


def print_end(summary, dataset):
    """Prints how the run ended, and which output is which class. summary: of summary.json."""
    names = summary['class_names']
    shown = names[:CLASSES_SHOWN] + ['... (all {} in summary.json)'.format(len(names))] * (
        len(names) > CLASSES_SHOWN)
    print('classes in the order of the outputs: ' + ', '.join(shown))
    if dataset.left_out:
        print('{} images could not be read and were left out: {}'.format(
            len(dataset.left_out), ', '.join(map(printable, dataset.left_out[:10]))))
    joules = summary['energy_joules']
    for note in (summary['device_note'], summary['energy_note']):
        if note is not None and NO_ANSWER in note:
            print('not recorded: {}'.format(note))
    if summary['best_accuracy'] is None:
        beside = 'epoch {}, validation {:.1f} %'.format(
            summary['kept_epoch'], 100 * summary['validation_accuracy'])
    else:
        beside = 'best {:.1f} %'.format(100 * summary['best_accuracy'])
    print('final test accuracy {:.1f} % ({}), trained in {:.1f} s (selection {:.1f} s)'
          .format(100 * summary['final_accuracy'], beside,
                  summary['train_seconds'], summary['selection_seconds'])
          + ('' if joules is None else ', {:,.0f} J'.format(joules)))


def print_accuracy_of_export(folder, dataset):
    """Prints the test accuracy of the LiteRT file that a run has saved."""
    from elastic.export import litert
    from elastic.export.saving import accuracy_of
    path = os.path.join(folder, 'checkpoint', litert.FILE)
    print('{}: test accuracy {:.1f} %, {:.1f} MB'.format(
        path, 100 * accuracy_of(path, dataset), os.path.getsize(path) / 1e6))


def already_finished(folder):
    """Removes the checkpoints of a finished run; returns the exit status."""
    checkpoint.remove(folder)  # there are some if the process ended right after its summary
    print('already finished with the same settings: {}'.format(folder))
    return 0


def main(argv=None):
    settings = run_settings(check_arguments(parse_arguments(argv)))
    records = settings.records
    chief = not settings.workers.worker_index  # the others keep no records
    finished = chief and is_finished(records.folder, decisive_settings(settings), records.restart)
    if chief and not finished:
        check_writable(records.folder, '--logs_dir or --run_name', folder=True)
    if settings.dataset_name.startswith(FOLDER):
        find_images(settings)  # reports in a second what TensorFlow's start would delay
    if finished:
        return already_finished(records.folder)
    with Signals() as signals:
        try:
            return join_and_run(settings, signals)
        except (Diverged, WorkerLost) as error:
            print('stopped: {}'.format(error), file=sys.stderr)
            return 1
        except BaseException as error:  # an interrupted import may raise anything
            if not signals.stop() or signals.deferred and not isinstance(
                    error, checkpoint.Interrupted):
                raise
            print('\nstopped by {}{}'.format(signals.name, checkpoint.where_it_stopped(
                error, records.folder, records.restart)), file=sys.stderr)
        return 128 + signals.caught


if __name__ == '__main__':
    command_line.run(main)
