"""Defines the flags of main.py, and which of them decide a run's outcome."""

import argparse
import os
import re
import shlex

from elastic import command_line, errors
from elastic.cache.stores import check_cache_dir
from elastic.data.class_weights import BALANCED, check_class_weight, read_class_weights
from elastic.data.images import augmentation_of, check_dataset_name
from elastic.data.replay import FOLDER as REPLAY
from elastic.device.meter_log import check_meter
from elastic.errors import UserError
from elastic.networks.names import canonical_name, check_weights
from elastic.planning.cache_plan import plan_cache
from elastic.runs.chain import check_place, earlier_run
from elastic.runs.folder import run_folder
from elastic.runs.names import checked_run_name, default_run_name
from elastic.schemes.fixed import HEAD, SCHEMES, is_elastic
from elastic.selection.metrics import METRICS
from elastic.settings import (
    AUTO,
    CACHED,
    CHOSEN,
    DEFAULTS,
    ELASTIC,
    FLAGS,
    KEPT,
    LOGS_DIR,
    PRUNE,
    SOLVED,
    STAGES,
    TRAINING,
    WorkerSettings,
    solves_head,
    statistics_of,
)
from elastic.workers.addresses import check_own_address, workers_of

# Beside command_line.SHARED, in the order of --help: title of a group -> its flags.
GROUPS = {
    None: ('train_type', 'train_tensors', 'num_classes', 'learning_rate', 'warmup_steps',
           'num_epochs', 'micro_batch', 'weights', 'continue_from', 'bn_statistics', 'seed',
           'deterministic',
           'steps_per_epoch', 'train_images', 'test_images', 'skip_bad_images', 'views',
           'validation_steps', 'validation_share', 'keep', 'patience', 'memory'),
    'elastic training': ('rho', 'deadline', 'head_epochs', 'interval', 'importance', 'granularity',
                         'probe_batches', 'closed_loop'),
    'what a run keeps for one that continues it': ('replay', 'replay_share', 'keep_statistics'),
    'prefix cache': ('prefix_cache', 'cache_dir', 'cache_gb'),
    'prune_training': ('prune_interval', 'prune_penalty_ratio', 'prune_threshold'),
    'records of the run': ('run_name', 'checkpoint_minutes', 'restart', 'save_model', 'export',
                           'save_txt', 'meter_csv'),
    'several workers': WorkerSettings._fields}
PLANNED = ('rho', 'num_epochs', 'head_epochs')  # by --deadline
ALIASES = {'prunetrain': PRUNE}
ABLATIONS = {'elastic_training_weight_magnitude': 'weight_magnitude',
             'elastic_training_grad_magnitude': 'grad_magnitude'}


def parse_arguments(argv=None):
    """Returns the arguments as given; check_arguments completes them.

    `planned` lists those of PLANNED that were given or inherited from the run before, even with the
    value of their default.
    """
    parser = argparse.ArgumentParser(
        usage='%(prog)s [--flag VALUE ...]',  # listing all flags would bury the error below
        description='Trains one network with one scheme, fully or elastically.',
        epilog='Flags take real booleans: bare, 1/0 or true/false. ' + command_line.FILES_HELP)
    command_line.add_shared_flags(parser)
    words = dict(importance=list(METRICS), train_type=list(SCHEMES))
    for title, names in GROUPS.items():
        command_line.add_flags(parser.add_argument_group(title) if title else parser, names, words)
    args = parser.parse_args(command_line.with_files(argv),
                             argparse.Namespace(**dict.fromkeys(DEFAULTS)))  # None: not given
    given = {name: value for name, value in vars(args).items() if value is not None}
    if args.continue_from is not None:
        earlier = earlier_run(run_folder(args.continue_from, args.logs_dir or LOGS_DIR))
        given.update(continue_from=earlier.folder, old_classes=earlier.class_names)
        given = dict(earlier.inherited(args), **given)
    defaults = dict(DEFAULTS, importance=None, old_classes=())
    if args.deadline is not None:
        defaults.update(head=STAGES, learning_rate=AUTO)
    planned = [name for name in PLANNED if name in given]
    return argparse.Namespace(**dict(defaults, **given), planned=planned)


def check_arguments(args):
    """Returns the arguments with names and defaults resolved; raises UserError if one is wrong."""
    args.train_type = errors.one_of(ALIASES.get(args.train_type, args.train_type), list(SCHEMES),
                                    'train type')
    check_chosen(args)
    check_head(args)
    check_planned(args)
    check_workers(args)
    metric = ABLATIONS.get(args.train_type)
    if args.importance and metric and args.importance != metric:
        raise UserError('--train_type {} uses {}; leave --importance {} out'.format(
            args.train_type, metric, args.importance))
    args.importance = metric or args.importance or TRAINING.importance
    check_dataset_name(args.dataset_name)
    if args.train_images is not None and args.train_images < args.batch_size:
        raise UserError('--train_images {} is less than a batch; allowed: {} (--batch_size) or more'
                        .format(args.train_images, args.batch_size))
    check_validation(args)
    args.replay_from = args.continue_from and args.replay and os.path.join(
        args.continue_from, REPLAY) or None
    check_class_weight(args.class_weight)
    check_weights(args.weights, args.model_name)
    if args.cache_dir is not None:
        check_cache_dir(args.cache_dir)
    if args.meter_csv:
        check_meter(args.meter_csv)
    args.bn_statistics = statistics_of(args.weights, args.bn_statistics)
    check_micro_batch(args)
    args.closed_loop = args.closed_loop and not args.deterministic
    args.views = views_of(args)
    if args.run_name != DEFAULTS['run_name']:
        args.run_name = checked_run_name(args.run_name, args.logs_dir)
    args.model_name = canonical_name(args.model_name)  # last: it may have to import TensorFlow
    if args.run_name == DEFAULTS['run_name']:
        args.run_name = default_run_name(args)
    if args.continue_from is not None:
        check_place(os.path.join(args.logs_dir, args.run_name), args.continue_from)
    return args


def check_head(args):
    """Sets which epochs are left beside the one that solves the head.

    Raises UserError for a scheme, epochs or other flags that do not fit --head or --head_start.
    """
    if args.deadline is not None and args.continue_from is not None:
        raise UserError('--deadline solves the head, which would lose the classes of run {}: give '
                        '--rho and --num_epochs'.format(args.continue_from))
    if args.deadline is not None:
        args.head_start = SOLVED
    if args.train_type == PRUNE and (args.head == STAGES or args.head_start == SOLVED):
        raise UserError('prune_training removes channels, so it does not fit --head stages or '
                        '--head_start solved: leave them out')
    if args.head != STAGES and args.head_features != DEFAULTS['head_features']:
        raise UserError('--head_features is for --head stages: add that, or leave it out')
    if args.keep_statistics:
        check_statistics(args)
    if not solves_head(args):
        return
    if 'head_epochs' in args.planned and args.deadline is None:
        raise UserError('--head_epochs trains the output layer first, --head_start solved solves '
                        'it: give one of them')
    if args.train_type == HEAD and 'num_epochs' not in args.planned:
        args.num_epochs = 1  # it is solved; no more is trained
    if args.num_epochs == 1 and args.train_type != HEAD and args.deadline is None:
        raise UserError('--num_epochs 1 leaves no epoch to train after the one that solves the '
                        'head: use 2 or more, or --train_type {}'.format(HEAD))


def check_statistics(args):
    """Raises UserError for flags that do not fit --keep_statistics."""
    for wrong, text in (
            (args.head_start != SOLVED, 'needs --head_start solved, which computes the sums'),
            (args.deadline is not None, 'does not fit --deadline: give --rho and --num_epochs'),
            (args.class_weight is not None, 'sums up all images alike: leave --class_weight out')):
        if wrong:
            raise UserError('--keep_statistics ' + text)


def check_planned(args):
    """Sets what --deadline decides.

    Raises UserError if one of that was given, and for head epochs that do not fit.
    """
    if args.deadline is not None:
        if args.planned:
            raise UserError('--deadline chooses {0}: leave {0} out'.format(
                ' and '.join(map('--{}'.format, args.planned))))
        if not is_elastic(args.train_type):
            raise UserError('--deadline fits elastic training alone, not {}: leave --train_type out'
                            .format(args.train_type))
        args.keep = KEPT[1]
        args.validation_share = args.validation_share or 0.1
    elif args.head_epochs and not is_elastic(args.train_type):
        raise UserError('--head_epochs fits elastic training alone, not {}'.format(args.train_type))
    elif args.head_epochs >= args.num_epochs:
        raise UserError('--head_epochs {} is not less than --num_epochs {}'.format(
            args.head_epochs, args.num_epochs))


def check_workers(args):
    """Sets which part of the images this worker has; raises UserError for what excludes workers."""
    workers = workers_of(args)
    if workers is None:
        args.workers = args.worker_index = None
        args.share = (0, 1)
        return
    if args.replay or args.keep_statistics:
        raise UserError('--replay and --keep_statistics do not fit --workers: each would keep '
                        'other images; give --replay 0 and --keep_statistics 0, or train on one')
    args.workers, args.worker_index = ','.join(workers.addresses), workers.index
    args.share = (workers.index, len(workers.addresses))
    if args.train_type == PRUNE:
        raise UserError('prune_training does not fit --workers: each would remove other channels; '
                        'train on one')
    if args.deadline is not None:
        raise UserError('--deadline does not fit --workers: it plans for one device; use --rho and '
                        '--num_epochs')
    if args.memory is not None:
        raise UserError('--memory does not fit --workers: it plans for one device; leave it out')
    check_own_address(workers)


def check_chosen(args):
    """Sets --train_type to chosen_tensors if --train_tensors is given.

    Raises UserError for an invalid expression, for another train type, and for one without the
    other.
    """
    if args.train_tensors is None:
        if args.train_type == CHOSEN:
            raise UserError("--train_type {} needs --train_tensors, such as 'head|gamma'".format(
                CHOSEN))
        return
    if args.train_type not in (CHOSEN, TRAINING.train_type):
        raise UserError('--train_tensors and --train_type {} both say what is trained; give one '
                        'of them'.format(args.train_type))
    try:
        re.compile(args.train_tensors)
    except re.error as error:
        raise UserError("--train_tensors '{}' is not a regular expression: {}".format(
            args.train_tensors, error))
    args.train_type = CHOSEN


def check_validation(args):
    """Raises UserError for flags that need validation images, without any."""
    best = args.keep == KEPT[1]
    if args.validation_share is None and (best or args.patience is not None):
        raise UserError('{} needs --validation_share, such as 0.1: an epoch chosen by the test '
                        'images would make their accuracy optimistic'.format(
                            '--keep best' if best else '--patience'))
    if args.validation_share is None and solves_head(args) and args.num_epochs > 1 and (
            args.learning_rate == AUTO):
        raise UserError('--learning_rate auto needs --validation_share, such as 0.1, beside '
                        '--head_start solved: the head is right on the training images already')
    if best and args.train_type == PRUNE:
        raise UserError('--keep best does not fit prune_training, which changes the network: the '
                        'best epoch may be one before channels were removed; leave it out')


def check_micro_batch(args):
    """Turns the prefix cache off if batches are divided; UserError for what excludes that.

    A micro-batch that is the whole batch becomes None.
    """
    size, whole = args.micro_batch, args.batch_size
    if size == whole:
        args.micro_batch = None
    if args.micro_batch is None:
        return
    if whole % size:
        raise UserError('--micro_batch {} does not divide --batch_size {}; allowed: {}'.format(
            size, whole, ', '.join(str(each) for each in range(1, whole + 1) if not whole % each)))
    reason = ('batch statistics are those of a whole batch: add --bn_statistics frozen'
              if args.bn_statistics == 'train' else
              '--workers average whole batches: use a smaller --batch_size'
              if args.workers is not None else
              'a prefix cache reads whole batches: leave --prefix_cache on out'
              if args.prefix_cache == 'on' else None)
    if reason:
        raise UserError('--micro_batch {} does not fit: {}'.format(size, reason))
    args.prefix_cache = 'off'


def views_of(args):
    """Returns --views; auto only where the timing table has to decide between fresh and held.

    Raises UserError where --prefix_cache on is impossible.
    """
    if args.prefix_cache == 'on' and args.bn_statistics == 'train':
        raise UserError('--prefix_cache on needs --bn_statistics frozen: with batch statistics, an '
                        "image's activations depend on the rest of its batch")
    plan = plan_cache(
        args.prefix_cache, args.views, args.train_type,
        args.num_epochs - solves_head(args), args.interval,
        augmentation_of(args.dataset_name, args.augmentation) != 'none',
        args.bn_statistics == 'train')
    if args.prefix_cache == 'on' and plan.why_not and SCHEMES[args.train_type].frozen_front:
        raise UserError('--prefix_cache on: ' + plan.why_not)
    return plan.views


def decisive_settings(settings):
    """Returns a dict of the flags that decide a run's outcome; they must match to reuse its folder.

    settings: RunSettings. A flag that does not apply to the scheme is None.
    """
    found = {name: value for name, value in _by_flag(settings).items() if FLAGS[name].decides}
    if settings.workers.workers is not None:  # another port, or another board, changes nothing
        found['workers'] = settings.data.share[1]
    if found['class_weight'] not in (None, BALANCED):  # the file may have changed
        found['class_weights'] = read_class_weights(found['class_weight'])
    scheme, held = settings.training.train_type, settings.data.views == 'held'
    applies = {None: True, ELASTIC: is_elastic(scheme), PRUNE: scheme == PRUNE,
               CACHED: SCHEMES[scheme].frozen_front}
    irrelevant = [name for name in found if name in FLAGS and not applies[FLAGS[name].of]]
    irrelevant += PLANNED if settings.training.deadline is not None else ()
    irrelevant += [name for name in ('head', 'head_start', 'head_epochs', 'replay',
                                     'keep_statistics') if found[name] == DEFAULTS[name]]
    irrelevant += [name for name, is_irrelevant in (
        ('head_features', found['head'] != STAGES),
        ('interval', not is_elastic(scheme) and not held),  # held views last for `interval`
        ('keep', settings.data.validation_share is None),
        ('replay_share', not found['replay'])) if is_irrelevant]
    return dict(found, **dict.fromkeys(irrelevant))


def _by_flag(settings):
    """Returns a dict of all flags. settings: RunSettings."""
    found = {}
    for name, value in settings._asdict().items():
        found.update(value._asdict() if hasattr(value, '_asdict') else {name: value})
    return {name: value for name, value in found.items() if name in FLAGS}


def flag_lines(settings):
    """Returns the lines of a file of flags that repeats a run: @FILE of main.py.

    They hold each flag that decides the run's outcome or differs from its default, but not
    --restart. settings: RunSettings.
    """
    decisive, lines = decisive_settings(settings), []
    for name, value in _by_flag(settings).items():
        if value is None or name == 'restart' or (
                decisive.get(name) is None and value == DEFAULTS[name]):
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        between = '=' if text.startswith('-') else ' '
        lines.append('--{}{}{}'.format(name, between, shlex.quote(text)))
    return lines
