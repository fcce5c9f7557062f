"""Trains one network with one scheme, fully or elastically.

    python main.py --train_type elastic_training --rho 0.5
    tensorboard --logdir logs

`run` is the page that shows the whole. Everything is checked before anything heavy starts.
"""

import os
import sys
import tempfile
import warnings

from elastic import command_line
from elastic.compat import start
from elastic.data.image_folder import FOLDER
from elastic.data.photo_list import check_unchanged
from elastic.data.tfds import is_prepared
from elastic.device.host import return_large_tensors
from elastic.errors import UserError
from elastic.files import check_writable, read_json
from elastic.flags import check_arguments, decisive_settings, flag_lines, parse_arguments
from elastic.networks.names import is_saved
from elastic.runs import checkpoint
from elastic.runs.chain import earlier_run
from elastic.runs.folder import is_finished
from elastic.runs.kept import add_model, keep, kept_model, lacks_model
from elastic.runs.metered import add_metered_energy, measured_beside
from elastic.runs.signals import Signals
from elastic.schemes.fixed import FixedScheme, is_elastic, matching_mask
from elastic.schemes.scheme import Choice
from elastic.settings import CHOSEN, PRUNE, STAGES, run_settings
from elastic.steps.epoch import Diverged
from elastic.workers.addresses import WorkerLost, tables_folder, workers_of


def join_and_run(settings, signals):
    """Joins the other workers, if there are any, and runs; returns the exit status."""
    if settings.training.memory is not None:
        return_large_tensors()
    start.start_tensorflow(settings.inter_op_threads, settings.deterministic,
                           settings.training.seed)
    from elastic.planning.memory_plan import set_limit
    from elastic.runs.session import here
    from elastic.workers.cluster import Cluster
    if settings.training.memory is not None:
        set_limit(settings.training.memory)
    cluster = Cluster(workers_of(settings.workers), settings.workers.worker_timeout)
    cluster.join()
    stack = here()['stack']
    cluster.check_same(dict({'version': command_line.VERSION, 'software': stack},
                            **decisive_settings(settings)))
    if settings.training.continue_from is not None:
        earlier_run(settings.training.continue_from).check_stack(stack)
    if cluster.is_chief:
        return run(settings, settings.records, cluster, signals)
    with tempfile.TemporaryDirectory() as folder:
        aside = settings.records._replace(logs_dir=folder, save_model=False, export=None,
                                          save_txt=False, meter_csv=None)
        return run(settings, aside, cluster, signals)


def run(settings, records, cluster, signals):
    """Trains one network with one scheme, from the data to the summary; returns the exit status.

    records: settings.RecordSettings of this worker of the workers.cluster.Cluster.
    """
    import train
    from elastic.export.saving import check_export
    from elastic.planning.plans import plans_of
    from elastic.runs.exams import continued, hold_exams, report
    from elastic.runs.progress import print_end, print_start
    from elastic.runs.session import here, joint_resume, open_session
    from elastic.workers.agreement import joint_table
    from profiler import path_of_table
    decisive = decisive_settings(settings)
    resumed = joint_resume(cluster, records.folder, records.restart)

    images = images_of(settings)
    features = features_to_read(settings, images, cluster, resumed)
    model = model_of(settings, len(images.class_names), features)
    if records.export:
        check_export(model, records.export)
    dataset = load_data(settings, images)
    check_model(settings, model, dataset, cluster)
    at_once = images_to_profile(settings, model, dataset, resumed)
    plans = plans_of(settings, model, dataset, resumed,
                     path_of_table(*timed_step(settings, dataset, at_once)),
                     lambda: joint_table(cluster, profile(settings, model, dataset, at_once)))

    about = dict(images=dataset.fingerprint, views=dataset.views, head_features=features,
                 at_once=at_once)
    with open_session(records, decisive, about, dataset, resumed, signals,
                      cluster.is_chief) as session:
        if session is None:
            return already_finished(settings)
        print_start(settings, dataset, model, resumed)
        session.recorder.flags(flag_lines(settings))
        with session.preparing():
            maker = maker_of(model, dataset, plans.settings, cluster, resumed)
            scheme = scheme_of(maker, dataset, plans.settings.training, plans.table, plans.cache)
        result, model = train.train(scheme, dataset, plans.settings.training, session, plans.cache,
                                    plans.epochs)
        cluster.leave()
        keep(records.folder, settings, session.statistics, images, model, dataset)
        scores = hold_exams(settings, model, dataset, session) if cluster.is_chief else []
        summary = dict(
            decisive, **result, **measured_beside(plans, dataset, session.clock), **here(),
            run_name=records.run_name, scheme=plans.settings.training.train_type,
            head_features=decisive['head_features'] and features, **plans.epochs.summary,
            **continued(scores, settings.training.continue_from, records.folder))
        if records.save_txt:
            session.recorder.text()
        session.recorder.classes(images.class_names)  # after memory was measured
        session.recorder.finish(summary)
    print_end(summary, dataset)
    for line in report(scores):
        print(line)
    add_metered_energy(records)
    if lacks_model(records):
        add_model(records, summary, lambda: model, lambda: dataset)
    return 0


# ---------------------------------------------------------------- data and model

def images_of(settings):
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
    if training.continue_from is not None and not training.solves:
        earlier_run(training.continue_from).check_known(images, name)
    steps = training.trained_epochs * datasets.steps_of(images, batch_size, settings.data)
    if training.trained_epochs and training.warmup_steps >= steps:
        raise UserError('--warmup_steps {} is not less than the {} steps of this run; allowed: 0 '
                        'to {}'.format(training.warmup_steps, steps, steps - 1))
    return images


def load_data(settings, images=None, cache='auto'):
    """Returns the Dataset of these Images (default: of images_of). cache: as in load_dataset."""
    from datasets import load_dataset
    return load_dataset(settings.dataset_name, settings.model.input_size, settings.batch_size,
                        cache, images or images_of(settings), **settings.data._asdict())


def features_to_read(settings, images, cluster, resumed):
    """Returns the most features that the head reads; the same when a run resumes."""
    network, training = settings.model, settings.training
    if resumed is not None:
        return resumed['about']['head_features']
    if network.head != STAGES or not training.solves or training.continue_from is not None:
        return network.head_features
    from elastic.schemes.solved_head import features_in_memory
    most = network.head_features  # sums that are kept take the memory of five images a feature
    return cluster.of_chief(lambda: features_in_memory(
        most, max(images.train.size, 5 * most * training.keep_statistics)))


def model_of(settings, num_classes, features):
    """Returns the model of a run. features: the most that its head reads."""
    from models import build_model
    network, known = settings.model, len(settings.data.old_classes)
    shape = network.input_size, network.input_size, 3
    with warnings.catch_warnings():
        if known:  # its rows are those of the run before
            warnings.filterwarnings('ignore', '.*was replaced')
        return build_model(network.model_name, shape, num_classes, network.weights, network.alpha,
                           network.bn_statistics, network.trust_model, network.keep_frozen,
                           network.head, features, network.head_start, known)


def check_model(settings, model, dataset, cluster):
    """Raises UserError for what the run would find out late; warns of outputs that sum to 1."""
    from elastic.schemes import statistics
    from elastic.schemes.solved_head import check_features
    from elastic.steps.training_step import warn_of_probabilities
    from elastic.workers.agreement import check_start
    if settings.training.train_tensors is not None:
        matching_mask(settings.training.train_tensors, model)
    check_start(cluster, model, dataset)
    if settings.training.solves:
        check_features(model, dataset)
        if settings.training.continue_from is not None:
            statistics.check(model, dataset, settings.training.continue_from)
    if is_saved(settings.model.model_name):
        warn_of_probabilities(model, next(iter(dataset.test))[0])


# ---------------------------------------------------------------- timing table and scheme

def images_to_profile(settings, model, dataset, resumed):
    """Returns the number of images in a timed step: with --memory, what fits of a step's images.

    It is the same when a run resumes. Raises UserError if --memory is too small to train anything.
    """
    if resumed is not None:
        return resumed['about']['at_once']
    if settings.training.memory is None or not settings.training.trained_epochs:
        return settings.at_once
    from elastic.data.batches import specs_of
    from elastic.planning.memory_plan import BESIDE_PROFILE, check_memory
    from profiler import step_maker
    step, _ = timed_step(settings, dataset)
    memory = check_memory(settings.training, step_maker(
        model, step, *specs_of(dataset.train, step.batch_size)))
    return memory.at_once(BESIDE_PROFILE)


def profile(settings, model, dataset, at_once=None):
    """Returns the TensorTimings of this run: stored ones if they match, else new ones.

    at_once: images in a timed step, from images_to_profile; default: a batch.
    """
    import profiler
    images, labels = next(iter(dataset.probe))  # drawn even if unused: selections get the same ones
    step, folder = timed_step(settings, dataset, at_once)
    size = step.batch_size
    table = profiler.table_for(step, model, folder, lambda: (images[:size], labels[:size]),
                               known=len(settings.data.old_classes))
    if size < settings.at_once:
        print('--memory: steps of {} images are timed'.format(size))
    return table.repeated(settings.batch_size // size)._replace(memory=None)


def timed_step(settings, dataset, at_once=None):
    """Returns (the profiler.StepSettings of this run, the folder of timing tables)."""
    from profiler import StepSettings
    network, training = settings.model, settings.training
    return StepSettings(
        network.model_name, network.alpha, network.input_size,
        at_once or settings.at_once, dataset.num_classes, dataset.augmentation,
        network.bn_statistics, training.optimizer, training.weight_decay, training.clip_norm,
        settings.data.class_weight, network.head, network.head_start), tables_folder(
            settings.records.logs_dir, settings.workers.worker_index)


def maker_of(model, dataset, settings, cluster, resumed):
    """Returns the StepMaker of a run; a random head of all stages reads standardised features."""
    import train
    from elastic.schemes.solved_head import standardise
    if settings.model.head == STAGES and not settings.training.solves and resumed is None:
        standardise(model, dataset, cluster)
    return train.step_maker(model, dataset, settings.training, cluster, resumed)


def scheme_of(maker, dataset, settings, table, cache):
    """Returns the scheme.Scheme of --train_type.

    maker: StepMaker. settings: settings.Settings. table: TensorTimings of elastic training and of
    chosen tensors. cache: PrefixCache or NoCache.
    """
    if is_elastic(settings.train_type):
        from train import CachedElasticScheme, ElasticScheme
        arguments = maker, dataset.probe, table, settings
        return CachedElasticScheme(*arguments, cache) if cache.used else ElasticScheme(*arguments)
    if settings.train_type == PRUNE:
        from elastic.schemes.prunetrain import PruneTrainScheme
        return PruneTrainScheme(maker, dataset, settings)
    choice = chosen(maker, settings, table, cache) if settings.train_type == CHOSEN else None
    return FixedScheme(settings.train_type, maker, choice, 1 + settings.solves)


def chosen(maker, settings, table, cache):
    """Returns the Choice of --train_tensors, with the predicted time of its step."""
    from elastic.planning.cache_offers import CacheOffers
    mask = matching_mask(settings.train_tensors, maker.model)
    if cache.used:
        cache.attach(maker)
        table = CacheOffers(cache, table, 1, settings.num_epochs + 1).at_own_cut(mask)
    return Choice(mask, timings=table)


# ---------------------------------------------------------------- what a run leaves

def already_finished(settings):
    """Removes the checkpoints of a finished run; adds the model that was asked for.

    Returns the exit status.
    """
    records = settings.records
    checkpoint.remove(records.folder)  # there are some if it ended right after its summary
    print('already finished with the same settings: {}'.format(records.folder))
    if lacks_model(records):
        start.start_tensorflow(settings.inter_op_threads)
        summary = read_json(os.path.join(records.folder, 'summary.json'))
        add_model(records, summary, lambda: kept_model(settings, summary, model_of),
                  lambda: load_data(settings, cache='unread'))
    return 0


def main(argv=None):
    settings = run_settings(check_arguments(parse_arguments(argv)))
    records = settings.records
    chief = not settings.workers.worker_index  # the others keep no records
    finished = chief and is_finished(records.folder, decisive_settings(settings), records.restart)
    if chief and not finished:
        check_writable(records.folder, '--logs_dir or --run_name', folder=True)
    begun = finished or chief and not records.restart and checkpoint.stamps(records.folder)
    if settings.dataset_name.startswith(FOLDER) or begun and is_prepared(
            settings.dataset_name, settings.data.data_dir):
        photos = images_of(settings).photos  # reports early what TensorFlow's start would delay
        if begun:
            check_unchanged(records.folder, photos, settings.data.skip_bad_images)
    if finished:
        return already_finished(settings)
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
