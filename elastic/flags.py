"""The flags of main.py: what they are and may be, and which of them decide a run's outcome."""

import argparse
import os

from elastic import command_line
from elastic.command_line import UserError, number
from elastic.device.meter_log import check_meter
from elastic.schemes.fixed import SCHEMES
from elastic.selection.metrics import METRICS
from elastic.settings import DATA, MODEL, TRAINING, VIEWS, statistics_of

ALIASES = {'prunetrain': 'prune_training'}
ABLATIONS = {'elastic_training_weight_magnitude': 'weight_magnitude',
             'elastic_training_grad_magnitude': 'grad_magnitude'}


def parse_arguments(argv=None):
    """The arguments as given; check_arguments makes them whole."""
    parser = argparse.ArgumentParser(
        usage='%(prog)s [--flag VALUE ...]',  # all of them would hide the error beneath
        description='Trains one network with one scheme, fully or elastically.',
        epilog='Flags take real booleans: bare, 1/0 or true/false.')
    command_line.add_model_flags(parser)
    _add_training_flags(parser)
    _add_data_flags(parser)
    _add_elastic_flags(parser.add_argument_group('elastic training'))
    _add_cache_flags(parser.add_argument_group('prefix cache'))
    _add_pruning_flags(parser.add_argument_group('prune_training'))
    _add_record_flags(parser.add_argument_group('records of the run'))
    return parser.parse_args(argv)


def _add_training_flags(parser):
    parser.add_argument('--train_type', default='elastic_training', metavar='TYPE',
                        help='{} (default: %(default)s)'.format(', '.join(SCHEMES)))
    parser.add_argument('--num_classes', type=number(int, low=2), metavar='N',
                        help='checked against the data set, which decides by default')
    parser.add_argument('--learning_rate', type=number(float, low=0),
                        default=TRAINING.learning_rate, metavar='X',
                        help='the highest; decays to 0 on a cosine (default: %(default)s)')
    parser.add_argument('--warmup_steps', type=number(int, low=0),
                        default=TRAINING.warmup_steps, metavar='N',
                        help='raise the learning rate to its highest over the first N steps '
                             '(default: %(default)s)')
    parser.add_argument('--num_epochs', type=number(int, low=1), default=TRAINING.num_epochs,
                        metavar='N', help='(default: %(default)s)')
    parser.add_argument('--weights', default=MODEL.weights, metavar='imagenet|none|PATH',
                        help='start from ImageNet, from random weights, or from a .npz of this '
                             'project or a .h5 of keras.applications (default: %(default)s)')
    parser.add_argument('--bn_statistics', choices=('frozen', 'train'),
                        help='moving statistics of batch normalization: frozen (default), which '
                             'also turns off dropout and stochastic depth inside the base, as in '
                             'the original, or train (default with --weights none)')
    parser.add_argument('--seed', type=number(int, low=0), default=TRAINING.seed, metavar='N',
                        help='of data order, augmentation, dropout, new weights '
                             '(default: %(default)s)')
    command_line.add_flag(parser, '--deterministic',
                          'bit-identical runs of one seed, slower (from TensorFlow 2.9)')


def _add_data_flags(parser):
    parser.add_argument('--steps_per_epoch', type=number(int, low=1), metavar='N',
                        help='end an epoch after so many steps, each epoch on other images '
                             '(default: all training images)')
    parser.add_argument('--train_images', type=number(int, low=2), metavar='N',
                        help='train on N images only, of each class equally many as far as it has '
                             'them, the same ones whatever seed and scheme (default: all)')
    command_line.add_flag(parser, '--skip_bad_images', 'leave out images of a folder that cannot '
                          'be read when the run starts; the summary counts them')
    parser.add_argument('--views', choices=VIEWS, default=DATA.views,
                        help='augment each image anew in every epoch, or as before for --interval '
                             'epochs (0: always), with every scheme (default: %(default)s)')
    parser.add_argument('--validation_steps', type=number(int, low=1), metavar='N',
                        help='test on N batches, evenly spaced among the test images '
                             '(default: all)')


def _add_elastic_flags(parser):
    parser.add_argument('--rho', type=number(float, above=0, high=1), default=TRAINING.rho,
                        metavar='X',
                        help='step time as a share of full training, 0.5 = twice as fast; '
                             'with a prefix cache the mean of the run (default: %(default)s)')
    parser.add_argument('--interval', type=number(int, low=0), default=TRAINING.interval,
                        metavar='EPOCHS', help='select again every so many epochs; 0: once; see '
                                               'also --views (default: %(default)s)')
    parser.add_argument('--importance', choices=list(METRICS), metavar='METRIC',
                        help='{} (default: {}); fisher squares the '
                             "batch's mean gradient, not each example's".format(
                                 ', '.join(METRICS), TRAINING.importance))
    parser.add_argument('--granularity', choices=('tensor', 'layer'),
                        default=TRAINING.granularity,
                        help='choose single tensors, or all of a layer together '
                             '(default: %(default)s)')
    parser.add_argument('--probe_batches', type=number(int, low=1),
                        default=TRAINING.probe_batches, metavar='N',
                        help='batches each importance is averaged over (default: %(default)s)')
    command_line.add_flag(parser, '--closed_loop',
                          'measure both passes anew at each selection, so that rho holds '
                          'while the device changes speed; always off with --deterministic',
                          default=TRAINING.closed_loop)


def _add_cache_flags(parser):
    parser.add_argument('--prefix_cache', choices=('auto', 'on', 'off'), default='auto',
                        help='compute the layers in front of the tensors in training once for each '
                             'image and selection, and read the result back: auto where images '
                             'come back unchanged; on holds views for that (default: %(default)s)')
    parser.add_argument('--cache_dir', metavar='DIR',
                        help='of a prefix cache that does not fit into memory (default: '
                             '--logs_dir)')
    parser.add_argument('--cache_gb', type=number(float, above=0), metavar='GB',
                        help='it may take that much disk (default: half of what is free)')


def _add_pruning_flags(parser):
    parser.add_argument('--prune_interval', type=number(int, low=0),
                        default=TRAINING.prune_interval, metavar='EPOCHS',
                        help='remove vanished channels every so many epochs; 0: '
                             'never (default: %(default)s)')
    parser.add_argument('--prune_penalty_ratio', type=number(float, above=0, below=1),
                        default=TRAINING.prune_penalty_ratio, metavar='X',
                        help='share of the group lasso in loss plus penalty before '
                             'training (default: %(default)s)')
    parser.add_argument('--prune_threshold', type=number(float, above=0),
                        default=TRAINING.prune_threshold,
                        metavar='X', help='a channel has vanished where all its '
                                          'weights are smaller (default: %(default)s)')


def _add_record_flags(parser):
    parser.add_argument('--run_name', default='auto', metavar='NAME',
                        help='folder under --logs_dir (default: made from model, data and scheme)')
    parser.add_argument('--checkpoint_minutes', type=number(float, above=0), default=10,
                        metavar='X', help='an interrupted run resumes from the end of its last '
                        'epoch, or from where it was at most so long ago (default: %(default)s)')
    command_line.add_flag(parser, '--restart', 'start over what is there under this name, '
                          'interrupted or finished')
    command_line.add_flag(parser, '--save_model',
                          'keep the trained weights and model in checkpoint/')
    command_line.add_flag(parser, '--save_txt', 'also write epochs.txt, the table of epochs')
    parser.add_argument('--meter_csv', metavar='FILE',
                        help='log of an external power meter, written while training runs: columns '
                             'timestamp (seconds since 1970) and watts')


def check_arguments(args):
    """The arguments with aliases and names resolved; UserError for any that cannot work."""
    from elastic.cache.stores import check_cache_flags
    from elastic.data.images import check_dataset_name
    from elastic.networks.names import canonical_name, check_weights
    args.train_type = command_line.one_of(ALIASES.get(args.train_type, args.train_type),
                                          list(SCHEMES), 'train type')
    metric = ABLATIONS.get(args.train_type)
    if args.importance and metric and args.importance != metric:
        raise UserError('--train_type {} uses {}; --importance {} contradicts it'.format(
            args.train_type, metric, args.importance))
    args.importance = metric or args.importance or TRAINING.importance
    check_dataset_name(args.dataset_name)
    if args.train_images is not None and args.train_images < args.batch_size:
        raise UserError('--train_images {} is less than a batch; allowed: {} (--batch_size) or more'
                        .format(args.train_images, args.batch_size))
    check_weights(args.weights)
    check_cache_flags(args.cache_dir, args.cache_gb)
    if args.meter_csv:
        check_meter(args.meter_csv)
    args.bn_statistics = statistics_of(args.weights, args.bn_statistics)
    args.closed_loop = args.closed_loop and not args.deterministic
    if args.prefix_cache == 'on':
        if args.bn_statistics == 'train':
            raise UserError('--prefix_cache on needs --bn_statistics frozen: with statistics of '
                            "the batch, an image's activations depend on the others")
        args.views = 'held'
    if args.run_name != 'auto':
        check_run_name(args.run_name, args.logs_dir)
    args.model_name = canonical_name(args.model_name)  # last: it may have to import TensorFlow
    args.run_name = run_name(args)
    return args


def is_elastic(args):
    """Whether tensors are chosen anew while the run trains."""
    return args.train_type.startswith('elastic')


def may_use_cache(args):
    """Whether layers next to the input may be frozen."""
    return SCHEMES[args.train_type].frozen_front


def check_run_name(name, logs_dir):
    """UserError where a run of this name would not lie below `logs_dir`."""
    if not name.strip() or os.path.isabs(name) or '..' in name.replace('\\', '/').split('/') or (
            os.path.normpath(name) == '.'):
        raise UserError("run name '{}' leaves {}/; allowed: a name below it".format(name, logs_dir))


def run_name(args):
    """Returns the path of the run's folder below --logs_dir."""
    if args.run_name == 'auto':
        plain = os.path.splitext(os.path.basename(os.path.normpath(args.model_name)))[0]
        data = args.dataset_name.replace('folder:', '').strip('/').replace('/', '-')
        name = '{}_{}_{}'.format(plain, data, args.train_type)
        return name + ('_rho{:g}'.format(args.rho) if is_elastic(args) else '') + (
            '_seed{}'.format(args.seed) if args.seed else '')
    return os.path.normpath(args.run_name)


NO_SETTINGS = ('logs_dir', 'run_name', 'save_txt', 'meter_csv', 'cache_dir', 'cache_gb',
               'checkpoint_minutes', 'restart', 'trust_model', 'skip_bad_images')


def run_settings(args):
    """dict of what decides the outcome of a run: a folder is reused only by the same."""
    settings = {flag: value for flag, value in vars(args).items()
                if flag not in NO_SETTINGS}
    if not is_elastic(args):
        settings.update(dict.fromkeys(('rho', 'interval', 'importance', 'granularity',
                                       'probe_batches', 'closed_loop')))
    if args.views == 'held':  # of every scheme
        settings['interval'] = args.interval
    if not may_use_cache(args):
        settings['prefix_cache'] = None
    if args.train_type != 'prune_training':
        settings.update(dict.fromkeys(('prune_interval', 'prune_penalty_ratio',
                                       'prune_threshold')))
    return settings
