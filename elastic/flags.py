"""Defines the flags of main.py, and which of them decide a run's outcome."""

import argparse
import re
import shlex

from elastic import command_line
from elastic.cache.stores import check_cache_dir
from elastic.command_line import UserError, add_flag, add_setting, number
from elastic.data.class_weights import BALANCED, check_class_weight, read_class_weights
from elastic.data.images import augmentation_of, check_dataset_name
from elastic.device.meter_log import check_meter
from elastic.durations import duration
from elastic.export.litert import KINDS
from elastic.networks.names import canonical_name, check_weights
from elastic.planning.cache_plan import plan_cache
from elastic.runs.names import checked_run_name, default_run_name
from elastic.schemes.fixed import HEAD, SCHEMES, is_elastic
from elastic.selection.metrics import METRICS
from elastic.settings import (
    CHOSEN,
    DEFAULTS,
    KEPT,
    LAST,
    PRUNE,
    SOLVED,
    STAGES,
    TRAINING,
    VIEWS,
    statistics_of,
)
from elastic.workers.addresses import add_worker_flags, check_own_address, workers_of

PLANNED = ('rho', 'num_epochs', 'head_epochs')  # by --deadline
ALIASES = {'prunetrain': PRUNE}
ABLATIONS = {'elastic_training_weight_magnitude': 'weight_magnitude',
             'elastic_training_grad_magnitude': 'grad_magnitude'}


def parse_arguments(argv=None):
    """Returns the arguments as given; check_arguments completes them.

    `planned` lists those of PLANNED that were given, even with the value of their default.
    """
    parser = argparse.ArgumentParser(
        usage='%(prog)s [--flag VALUE ...]',  # listing all flags would bury the error below
        description='Trains one network with one scheme, fully or elastically.',
        epilog='Flags take real booleans: bare, 1/0 or true/false. ' + command_line.FILES_HELP)
    command_line.add_model_flags(parser)
    _add_training_flags(parser)
    _add_elastic_flags(parser.add_argument_group('elastic training'))
    _add_cache_flags(parser.add_argument_group('prefix cache'))
    _add_pruning_flags(parser.add_argument_group('prune_training'))
    _add_record_flags(parser.add_argument_group('records of the run'))
    add_worker_flags(parser.add_argument_group('several workers'))
    args = parser.parse_args(command_line.with_files(argv),
                             argparse.Namespace(**dict.fromkeys(PLANNED + ('head',))))
    args.planned = [name for name in PLANNED if getattr(args, name) is not None]
    args.head = args.head or (LAST if args.deadline is None else STAGES)
    for name in set(PLANNED).difference(args.planned):
        setattr(args, name, DEFAULTS[name])
    return args


def _add_training_flags(parser):
    add_setting(parser, 'train_type', str, ', '.join(SCHEMES), 'TYPE')
    add_setting(parser, 'train_tensors', str,
                'train the tensors whose names match this regular expression, such as '
                "'block7|head|gamma', and no others; their step time is predicted first",
                'REGEX')
    parser.add_argument('--num_classes', type=number(int, low=2), metavar='N',
                        help='must match the data set (default: that of the data set)')
    add_setting(parser, 'learning_rate', number(float, low=0), 'the peak; decays to 0 on a cosine')
    add_setting(parser, 'warmup_steps', number(int, low=0),
                'raise the learning rate linearly to its peak over the first N steps')
    add_setting(parser, 'num_epochs', number(int, low=1), 'epochs of training')
    add_setting(parser, 'weights', str,
                'start from ImageNet, from random weights, or from a .npz of this project or a '
                '.h5 of keras.applications', 'imagenet|none|PATH')
    add_setting(parser, 'bn_statistics', ('frozen', 'train'),
                'moving statistics of batch normalization: frozen (default), which also turns off '
                'dropout and stochastic depth inside the base, as in the original, or train '
                '(default with --weights none)')
    add_setting(parser, 'seed', number(int, low=0),
                'fixes data order, augmentation, dropout and new weights')
    add_flag(parser, '--deterministic',
             'give bit-identical runs for one seed; slower, needs TensorFlow 2.9')
    add_setting(parser, 'steps_per_epoch', number(int, low=1),
                'end each epoch after N steps; every epoch has other images (default: all '
                'training images)')
    add_setting(parser, 'train_images', number(int, low=2),
                'train on only N images, the same number of each class where it has enough, and '
                'the same images for every seed and scheme (default: all)')
    add_setting(parser, 'test_images', number(int, low=1),
                'test on only N images, chosen in the same way (default: all)')
    add_flag(parser, '--skip_bad_images', 'leave out images of a folder that cannot be read when '
             'the run starts; the summary counts them')
    add_setting(parser, 'views', VIEWS,
                'fresh: draw new augmentations in every epoch; held: keep those of each image for '
                '--interval epochs (0: for the whole run), with every scheme; auto: held where rho '
                'is out of reach without the prefix cache, else fresh')
    add_setting(parser, 'validation_steps', number(int, low=1),
                'test on N batches, evenly spaced among the test images (default: all)')
    add_setting(parser, 'validation_share', number(float, above=0, below=1),
                'set this share of the training images of each class aside, the same ones for '
                'every seed and scheme; they judge each epoch, and the test images are used once, '
                'at the end (default: the test images judge each epoch, as in the paper)')
    add_setting(parser, 'keep', KEPT,
                'end with the weights of the last epoch, or of the best on the validation images')
    add_setting(parser, 'patience', number(int, low=1),
                'end training after N epochs in a row that are no better on the validation images '
                '(default: train all epochs); the learning rate still follows --num_epochs')


def _add_elastic_flags(parser):
    add_setting(parser, 'rho', number(float, above=0, high=1),
                'step time as a share of full training, 0.5 = twice as fast; with a prefix cache '
                'the mean over the run')
    add_setting(parser, 'deadline', duration,
                'train as well as possible until this time after the start of the process, such as '
                '45m, then stop; solves the head, chooses --rho and --num_epochs, and keeps the '
                'best epoch on a tenth of the training images (docs/deadline.md)')
    add_setting(parser, 'head_epochs', number(int, low=0),
                'train the output layer alone in the first N epochs, at the full learning rate',
                'N')
    add_setting(parser, 'interval', number(int, low=0),
                'epochs from one selection to the next; 0: select only once; also used by --views',
                'EPOCHS')
    parser.add_argument('--importance', choices=list(METRICS), metavar='METRIC',
                        help='{} (default: {}); fisher squares the mean gradient of the batch, '
                             "not each example's".format(', '.join(METRICS), TRAINING.importance))
    add_setting(parser, 'granularity', ('tensor', 'layer'),
                'select single tensors, or whole layers')
    add_setting(parser, 'probe_batches', number(int, low=1),
                'batches that each importance is averaged over')
    add_flag(parser, '--closed_loop',
             'time both passes again at each selection, so that rho holds while the device '
             'changes speed; always off with --deterministic', TRAINING.closed_loop)


def _add_cache_flags(parser):
    add_setting(parser, 'prefix_cache', ('auto', 'on', 'off'),
                'compute the frozen layers in front of the trained tensors once for each image '
                'and selection, and reuse their output: auto where images come back unchanged; on '
                'sets --views held')
    add_setting(parser, 'cache_dir', str,
                'folder for a prefix cache that does not fit into memory (default: --logs_dir)',
                'DIR')
    add_setting(parser, 'cache_gb', number(float, above=0),
                'the most disk that it may take (default: half of what is free)', 'GB')


def _add_pruning_flags(parser):
    add_setting(parser, 'prune_interval', number(int, low=0),
                'epochs from one removal of vanished channels to the next; 0: never remove any',
                'EPOCHS')
    add_setting(parser, 'prune_penalty_ratio', number(float, above=0, below=1),
                'share of the group lasso in loss plus penalty before training')
    add_setting(parser, 'prune_threshold', number(float, above=0),
                'a channel has vanished when all its weights are smaller')


def _add_record_flags(parser):
    parser.add_argument('--run_name', default=DEFAULTS['run_name'], metavar='NAME',
                        help='folder under --logs_dir (default: made from model, data and scheme)')
    add_setting(parser, 'checkpoint_minutes', number(float, above=0),
                'write a checkpoint at least this often, besides those at the end of epochs')
    add_flag(parser, '--restart', 'discard the run of this name, interrupted or finished, and '
             'start over')
    add_flag(parser, '--save_model', 'keep the trained weights and model in checkpoint/')
    add_setting(parser, 'export', KINDS, 'save the model, and a LiteRT (TensorFlow Lite) file in '
                'float32, or in int8 calibrated on training images')
    add_flag(parser, '--save_txt', 'also write epochs.txt, the table of epochs')
    add_setting(parser, 'meter_csv', str,
                'log of an external power meter, written while training runs: columns timestamp '
                '(seconds since 1970) and watts', 'FILE')


def check_arguments(args):
    """Returns the arguments with names and defaults resolved; raises UserError if one is wrong."""
    args.train_type = command_line.one_of(ALIASES.get(args.train_type, args.train_type),
                                          list(SCHEMES), 'train type')
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
    check_class_weight(args.class_weight)
    check_weights(args.weights, args.model_name)
    if args.cache_dir is not None:
        check_cache_dir(args.cache_dir)
    if args.meter_csv:
        check_meter(args.meter_csv)
    args.bn_statistics = statistics_of(args.weights, args.bn_statistics)
    args.closed_loop = args.closed_loop and not args.deterministic
    args.views = views_of(args)
    if args.run_name != DEFAULTS['run_name']:
        args.run_name = checked_run_name(args.run_name, args.logs_dir)
    args.model_name = canonical_name(args.model_name)  # last: it may have to import TensorFlow
    if args.run_name == DEFAULTS['run_name']:
        args.run_name = default_run_name(args)
    return args


def check_head(args):
    """Sets which epochs are left beside the one that solves the head.

    Raises UserError for a scheme, epochs or other flags that do not fit --head or --head_start.
    """
    if args.deadline is not None:
        args.head_start = SOLVED
    if args.train_type == PRUNE and (args.head == STAGES or args.head_start == SOLVED):
        raise UserError('prune_training removes channels, so it does not fit --head stages or '
                        '--head_start solved: leave them out')
    if args.head != STAGES and args.head_features != DEFAULTS['head_features']:
        raise UserError('--head_features is for --head stages: add that, or leave it out')
    if args.head_start != SOLVED:
        return
    if 'head_epochs' in args.planned and args.deadline is None:
        raise UserError('--head_epochs trains the output layer first, --head_start solved solves '
                        'it: give one of them')
    if args.train_type == HEAD and 'num_epochs' not in args.planned:
        args.num_epochs = 1  # it is solved; no more is trained
    if args.num_epochs == 1 and args.train_type != HEAD and args.deadline is None:
        raise UserError('--num_epochs 1 leaves no epoch to train after the one that solves the '
                        'head: use 2 or more, or --train_type {}'.format(HEAD))


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
    args.workers, args.worker_index = ','.join(workers.addresses), workers.index
    args.share = (workers.index, len(workers.addresses))
    if args.train_type == PRUNE:
        raise UserError('prune_training does not fit --workers: each would remove other channels; '
                        'train on one')
    if args.deadline is not None:
        raise UserError('--deadline does not fit --workers: it plans for one device; use --rho and '
                        '--num_epochs')
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
    if best and args.train_type == PRUNE:
        raise UserError('--keep best does not fit prune_training, which changes the network: the '
                        'best epoch may be one before channels were removed; leave it out')


def views_of(args):
    """Returns --views; auto only where the timing table has to decide between fresh and held.

    Raises UserError where --prefix_cache on is impossible.
    """
    if args.prefix_cache == 'on' and args.bn_statistics == 'train':
        raise UserError('--prefix_cache on needs --bn_statistics frozen: with batch statistics, an '
                        "image's activations depend on the rest of its batch")
    plan = plan_cache(
        args.prefix_cache, args.views, args.train_type,
        args.num_epochs - (args.head_start == SOLVED), args.interval,
        augmentation_of(args.dataset_name, args.augmentation) != 'none',
        args.bn_statistics == 'train')
    if args.prefix_cache == 'on' and plan.why_not and SCHEMES[args.train_type].frozen_front:
        raise UserError('--prefix_cache on: ' + plan.why_not)
    return plan.views


NOT_DECISIVE = ('logs_dir', 'run_name', 'save_txt', 'meter_csv', 'cache_dir', 'cache_gb',
                'checkpoint_minutes', 'restart', 'trust_model', 'skip_bad_images', 'share',
                'worker_index', 'worker_timeout')


def decisive_settings(settings):
    """Returns a dict of the flags that decide a run's outcome; they must match to reuse its folder.

    settings: RunSettings. A flag that does not apply to the scheme is None.
    """
    found = _by_flag(settings)
    for name in NOT_DECISIVE:
        del found[name]
    if settings.workers.workers is not None:  # another port, or another board, changes nothing
        found['workers'] = settings.data.share[1]
    if found['class_weight'] not in (None, BALANCED):  # the file may have changed
        found['class_weights'] = read_class_weights(found['class_weight'])
    scheme = settings.training.train_type
    irrelevant = [] if is_elastic(scheme) else [
        'rho', 'importance', 'granularity', 'probe_batches', 'closed_loop', 'head_epochs']
    if settings.training.deadline is not None:
        irrelevant += PLANNED
    if not settings.training.head_epochs:
        irrelevant.append('head_epochs')
    irrelevant += [name for name in ('head', 'head_start') if found[name] == DEFAULTS[name]]
    if found['head'] != STAGES:
        irrelevant.append('head_features')
    if not is_elastic(scheme) and settings.data.views != 'held':  # held ones last for `interval`
        irrelevant.append('interval')
    if not SCHEMES[scheme].frozen_front:
        irrelevant.append('prefix_cache')
    if settings.data.validation_share is None:
        irrelevant.append('keep')
    if scheme != PRUNE:
        irrelevant += ['prune_interval', 'prune_penalty_ratio', 'prune_threshold']
    return dict(found, **dict.fromkeys(irrelevant))


def _by_flag(settings):
    """Returns a dict of all flags. settings: RunSettings."""
    found = {}
    for name, value in settings._asdict().items():
        found.update(value._asdict() if hasattr(value, '_asdict') else {name: value})
    return found


def flag_lines(settings):
    """Returns the lines of a file of flags that repeats a run: @FILE of main.py.

    They hold each flag that decides the run's outcome or differs from its default, but not
    --restart. settings: RunSettings.
    """
    decisive, lines = decisive_settings(settings), []
    for name, value in _by_flag(settings).items():
        if value is None or name in ('restart', 'share') or (
                decisive.get(name) is None and value == DEFAULTS[name]):
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        between = '=' if text.startswith('-') else ' '
        lines.append('--{}{}{}'.format(name, between, shlex.quote(text)))
    return lines
