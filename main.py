"""Trains one network with one scheme, fully or elastically.

    python main.py --train_type elastic_training --rho 0.5
    tensorboard --logdir logs

Everything is checked before anything heavy starts; records go to logs/<run_name>/ (see runs.py).
"""

import argparse
import gc
import os
import platform
import resource
import sys

import numpy as np

import command_line
import energy
from command_line import UserError, number
from runs import GRANULARITIES, METRICS, TRAIN_TYPES, Recorder, is_finished, open_run

ALIASES = {'prunetrain': 'prune_training'}
ABLATIONS = {'elastic_training_weight_magnitude': 'weight_magnitude',
             'elastic_training_grad_magnitude': 'grad_magnitude'}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split('\n')[0],
        epilog='Flags take real booleans: bare, 1/0 or true/false.')
    command_line.add_model_flags(parser)
    parser.add_argument('--train_type', default='elastic_training', metavar='TYPE',
                        help='{} (default: %(default)s)'.format(', '.join(TRAIN_TYPES)))
    parser.add_argument('--num_classes', type=number(int, low=2), metavar='N',
                        help='checked against the data set, which decides by default')
    parser.add_argument('--learning_rate', type=number(float, low=0), default=1e-4, metavar='X',
                        help='the highest; decays to 0 on a cosine (default: %(default)s)')
    parser.add_argument('--warmup_steps', type=number(int, low=0), default=0, metavar='N',
                        help='raise the learning rate to its highest over the first N steps '
                             '(default: %(default)s)')
    parser.add_argument('--num_epochs', type=number(int, low=1), default=12, metavar='N',
                        help='(default: %(default)s)')
    parser.add_argument('--rho', type=number(float, above=0, high=1), default=0.533, metavar='X',
                        help='elastic: step time as a share of full training, 0.5 = twice as fast; '
                             'with a prefix cache the mean of the run (default: %(default)s)')
    parser.add_argument('--interval', type=number(int, low=0), default=4, metavar='EPOCHS',
                        help='elastic: select anew every so many epochs; 0: once; see also '
                             '--views (default: %(default)s)')
    parser.add_argument('--importance', choices=METRICS, metavar='METRIC',
                        help='elastic: {} (default: gradient_update); fisher squares the '
                             "batch's mean gradient, not each example's".format(
                                 ', '.join(METRICS)))
    parser.add_argument('--granularity', choices=GRANULARITIES, default='tensor',
                        help='elastic: choose single tensors, or all of a layer together '
                             '(default: %(default)s)')
    parser.add_argument('--probe_batches', type=number(int, low=1), default=1, metavar='N',
                        help='elastic: batches each importance is averaged over '
                             '(default: %(default)s)')
    parser.add_argument('--prune_interval', type=number(int, low=0), default=5, metavar='EPOCHS',
                        help='prune_training: remove vanished channels every so many epochs; 0: '
                             'never (default: %(default)s)')
    parser.add_argument('--prune_penalty_ratio', type=number(float, above=0, below=1),
                        default=0.2, metavar='X',
                        help='prune_training: share of the group lasso in loss plus penalty before '
                             'training (default: %(default)s)')
    parser.add_argument('--prune_threshold', type=number(float, above=0), default=1e-4,
                        metavar='X', help='prune_training: a channel has vanished where all its '
                                          'weights are smaller (default: %(default)s)')
    parser.add_argument('--prefix_cache', choices=('auto', 'on', 'off'), default='auto',
                        help='compute the layers in front of the tensors in training once for each '
                             'image and selection, and read the result back: auto where images '
                             'come back unchanged; on holds views for that (default: %(default)s)')
    parser.add_argument('--cache_dir', metavar='DIR',
                        help='of a prefix cache that does not fit into memory (default: '
                             '--logs_dir)')
    parser.add_argument('--cache_gb', type=number(float, above=0), metavar='GB',
                        help='it may take that much disk (default: half of what is free)')
    command_line.add_flag(parser, '--closed_loop',
                          'elastic: measure both passes anew at each selection, so that rho holds '
                          'while the device changes speed; always off with --deterministic',
                          default=True)
    parser.add_argument('--weights', default='imagenet', metavar='imagenet|none|PATH',
                        help='start from ImageNet, from random weights, or from a .npz of this '
                             'project or a .h5 of keras.applications (default: %(default)s)')
    parser.add_argument('--bn_statistics', choices=('frozen', 'train'),
                        help='moving statistics of batch normalization: frozen (default), which '
                             'also turns off dropout and stochastic depth inside the base, as in '
                             'the original, or train (default with --weights none)')
    parser.add_argument('--steps_per_epoch', type=number(int, low=1), metavar='N',
                        help='end an epoch after so many steps, each epoch on other images '
                             '(default: all training images)')
    parser.add_argument('--train_images', type=number(int, low=2), metavar='N',
                        help='train on N images only, of each class equally many as far as it has '
                             'them, the same ones whatever seed and scheme (default: all)')
    parser.add_argument('--views', choices=('fresh', 'held'), default='fresh',
                        help='augment each image anew in every epoch, or as before for --interval '
                             'epochs (0: always), with every scheme (default: %(default)s)')
    parser.add_argument('--validation_steps', type=number(int, low=1), metavar='N',
                        help='test on N batches, evenly spaced among the test images '
                             '(default: all)')
    parser.add_argument('--seed', type=number(int, low=0), default=0, metavar='N',
                        help='of data order, augmentation, dropout, new weights '
                             '(default: %(default)s)')
    command_line.add_flag(parser, '--deterministic',
                          'bit-identical runs of one seed, slower (not with TensorFlow 2.7)')
    parser.add_argument('--run_name', default='auto', metavar='NAME',
                        help='folder under --logs_dir (default: made from model, data and scheme)')
    command_line.add_flag(parser, '--save_model',
                          'keep the trained weights and model in checkpoint/')
    command_line.add_flag(parser, '--save_txt', 'also write epochs.txt, the table of epochs')
    parser.add_argument('--meter_csv', metavar='FILE',
                        help='log of an external power meter, written while training runs: columns '
                             'timestamp (seconds since 1970) and watts')
    return parser.parse_args(argv)


def check_arguments(args):
    """The arguments with aliases and names resolved; UserError for any that cannot work."""
    from datasets import check_dataset_name
    from models import canonical_name, check_weights
    from prefix_cache import check_cache_flags
    args.train_type = command_line.one_of(ALIASES.get(args.train_type, args.train_type),
                                          TRAIN_TYPES, 'train type')
    metric = ABLATIONS.get(args.train_type)
    if args.importance and metric and args.importance != metric:
        raise UserError('--train_type {} uses {}; --importance {} contradicts it'.format(
            args.train_type, metric, args.importance))
    args.importance = metric or args.importance or 'gradient_update'
    args.model_name = canonical_name(args.model_name)
    check_dataset_name(args.dataset_name)
    if args.train_images is not None and args.train_images < args.batch_size:
        raise UserError('--train_images {} is less than a batch; allowed: {} (--batch_size) or more'
                        .format(args.train_images, args.batch_size))
    check_weights(args.weights)
    check_cache_flags(args.cache_dir, args.cache_gb)
    if args.meter_csv:
        energy.check_meter(args.meter_csv)
    args.bn_statistics = args.bn_statistics or ('train' if args.weights == 'none' else 'frozen')
    args.closed_loop = args.closed_loop and not args.deterministic
    if args.prefix_cache == 'on':
        if args.bn_statistics == 'train':
            raise UserError('--prefix_cache on needs --bn_statistics frozen: with statistics of '
                            "the batch, an image's activations depend on the others")
        args.views = 'held'
    args.run_name = run_name(args)
    return args


def is_elastic(args):
    return args.train_type.startswith('elastic')


def may_use_cache(args):
    """Whether a part of the network is frozen; what BN + bias trains begins at the input."""
    return is_elastic(args) or args.train_type == 'traditional_tl_training'


def run_name(args):
    """The name of the run's folder; UserError where it would leave logs/."""
    if args.run_name == 'auto':
        plain = os.path.splitext(os.path.basename(os.path.normpath(args.model_name)))[0]
        data = args.dataset_name.replace('folder:', '').strip('/').replace('/', '-')
        name = '{}_{}_{}'.format(plain, data, args.train_type)
        return name + ('_rho{:g}'.format(args.rho) if is_elastic(args) else '') + (
            '_seed{}'.format(args.seed) if args.seed else '')
    name = args.run_name
    if not name.strip() or os.path.isabs(name) or '..' in name.replace('\\', '/').split('/') or (
            os.path.normpath(name) == '.'):
        raise UserError("run name '{}' leaves {}/; allowed: a name below it".format(
            name, args.logs_dir))
    return os.path.normpath(name)


def run_settings(args):
    """dict of what decides the outcome of a run: a folder is reused only by the same."""
    settings = {flag: value for flag, value in vars(args).items()
                if flag not in ('logs_dir', 'run_name', 'save_txt', 'meter_csv', 'cache_dir',
                             'cache_gb')}
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


def start(args):
    """TensorFlow, its threads, seeds and determinism."""
    command_line.start_tensorflow(args.inter_op_threads)
    import tensorflow as tf

    import keras_stack
    if args.deterministic:
        if not hasattr(tf.config.experimental, 'enable_op_determinism'):
            raise UserError('--deterministic needs TensorFlow 2.9 or later; this is {}'.format(
                tf.__version__))
        tf.config.experimental.enable_op_determinism()
    keras_stack.set_seed(args.seed)


def load_data(args):
    """The Dataset; UserError where --num_classes or --warmup_steps contradicts it."""
    from datasets import load_dataset
    from train import count_steps
    dataset = load_dataset(args.dataset_name, args.input_size, args.batch_size, args.data_dir,
                           args.seed, steps_per_epoch=args.steps_per_epoch,
                           validation_steps=args.validation_steps, views=args.views,
                           interval=args.interval, augmentation=args.augmentation,
                           train_images=args.train_images)
    if args.num_classes not in (None, dataset.num_classes):
        raise UserError('--num_classes {} contradicts {}, which has {} classes; leave the flag out'
                        .format(args.num_classes, args.dataset_name, dataset.num_classes))
    steps = args.num_epochs * count_steps(dataset)
    if args.warmup_steps >= steps:
        raise UserError('--warmup_steps {} leaves nothing of the {} steps of this run; allowed: 0 '
                        'to {}'.format(args.warmup_steps, steps, steps - 1))
    return dataset


def profile(args, model, dataset):
    """TensorTimings of this run, measured where none match, and stored."""
    import profiler
    batch = next(iter(dataset.probe))  # now: selections go on behind it, wherever the table is from
    return profiler.table_for(args, model, dataset.num_classes, dataset.augmentation, lambda: batch)


def timing_table(args, model, dataset, cache):
    """(TensorTimings of this run, its PrefixCache or None); UserError where rho is out of reach."""
    from selection_solver_DP import layers_of, out_of_reach
    table = profile(args, model, dataset)
    layers = layers_of(model) if args.granularity == 'layer' else None
    if cache is not None and not np.isfinite(table.cut_bytes).any():
        cache = None
        no_cache(args, 'no part of the network can be cut off whose outputs have a row for each '
                       'image, independent of the other images (batch statistics?)')
    priced = table if cache is None else cache.priced(table, 1, args.num_epochs + 1)
    reason = out_of_reach(priced, args.rho, layers)
    if reason:
        raise UserError('--' + reason)
    return table, cache


def prefix_cache_of(args, dataset):
    """The cached_epochs.PrefixCache of this run; None where no image comes back unchanged."""
    if args.prefix_cache == 'off' or not may_use_cache(args):
        if args.prefix_cache == 'on':  # no error: with it, views are held as those of other schemes
            print('no prefix cache: {} leaves nothing frozen in front'.format(args.train_type))
        return None
    if args.num_epochs == 1:
        return no_cache(args, 'no image comes back in one epoch')
    if dataset.view(1) != dataset.view(2):
        return no_cache(args, 'images are augmented anew in each epoch; --views held holds them '
                              'for --interval epochs')
    from cached_epochs import PrefixCache
    os.makedirs(args.logs_dir, exist_ok=True)
    return PrefixCache(dataset, args.cache_dir or args.logs_dir, args.cache_gb,
                       exact=args.deterministic)


def no_cache(args, reason):
    """Says why there is none; UserError where it was asked for."""
    if args.prefix_cache == 'on':
        raise UserError('--prefix_cache on: ' + reason)
    print('no prefix cache: ' + reason)


def make_scheme_for(args, model, dataset, table, penalty, cache):
    """(masked_step.StepMaker) -> train.Scheme."""
    import train
    settings = loop_settings(args)

    def make(maker):
        if is_elastic(args):
            return train.elastic_scheme(args.train_type, maker, dataset.probe, table,
                                        settings, args.importance, cache)
        if args.train_type == 'prune_training':
            from prune import prune_scheme
            return prune_scheme(args.train_type, maker, dataset, settings, penalty,
                                args.prune_interval, args.prune_threshold)
        return train.fixed_scheme(args.train_type, train.fixed_mask(args.train_type, model))
    return make


def penalty_for(args, model, dataset):
    """The penalty beside the loss of this run's training, or None."""
    if args.train_type != 'prune_training':
        return None
    from prune import GroupLasso
    return GroupLasso(model, dataset.probe, args.prune_penalty_ratio)


def loop_settings(args):
    from train import Settings
    return Settings(**{field: getattr(args, field) for field in Settings._fields})


def summarise(args, result, cache):
    """The content of summary.json; its prefix_cache tells whether there was one."""
    import tensorflow as tf
    from tensorflow import keras

    from profiler import host_description
    summary = run_settings(args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if may_use_cache(args):
        summary['prefix_cache'] = 'off' if cache is None else 'on'
    summary.update(result, run_name=args.run_name, scheme=args.train_type, peak_memory_mb=peak,
                   host=host_description(), stack='TensorFlow {}, Keras {}, Python {}.{}'.format(
                       tf.__version__, keras.__version__, *platform.python_version_tuple()[:2]))
    return summary


def save(folder, model):
    """checkpoint/: portable weights, and the model in this stack's own format; whole or not at all.
    """
    import keras_stack
    from models import save_weights
    checkpoint = os.path.join(folder, 'checkpoint')
    os.makedirs(checkpoint + '.part', exist_ok=True)
    save_weights(model, os.path.join(checkpoint + '.part', 'weights.npz'))
    model.save(os.path.join(checkpoint + '.part', keras_stack.MODEL_FILE))
    os.rename(checkpoint + '.part', checkpoint)
    print('saved {}'.format(os.path.join(checkpoint, 'weights.npz')))


def already_finished(folder):
    print('already finished with the same settings: {}'.format(folder))
    return 0


def main(argv=None):
    args = check_arguments(parse_arguments(argv))
    folder, settings = os.path.join(args.logs_dir, args.run_name), run_settings(args)
    if is_finished(folder, settings):
        return already_finished(folder)
    start(args)
    from models import build_model
    dataset = load_data(args)
    model = build_model(args.model_name, (args.input_size, args.input_size, 3),
                        dataset.num_classes, args.weights, args.alpha, args.bn_statistics)
    cache, table = prefix_cache_of(args, dataset), None
    if is_elastic(args):
        table, cache = timing_table(args, model, dataset, cache)
    lock = open_run(folder, settings)
    if lock is None:
        return already_finished(folder)
    print('{}: {} on {}, {} images, {} tensors'.format(
        args.run_name, args.model_name, args.dataset_name, dataset.train_size,
        len(model.trainable_variables)))
    with Recorder(folder, lock) as recorder:
        return train_and_record(args, folder, recorder, model, dataset, table, cache)


def train_and_record(args, folder, recorder, model, dataset, table, cache):
    """Trains, prints and records; returns the exit status."""
    import train
    penalty, meter = penalty_for(args, model, dataset), energy.Meter(*energy.find_sensors())
    gc.collect()
    getattr(gc, 'freeze', int)()  # from here on, releasing an old step need not scan TensorFlow
    try:
        result, model = train.train(
            model, dataset, make_scheme_for(args, model, dataset, table, penalty, cache),
            loop_settings(args), recorder, penalty, meter, cache)
    except train.Diverged as error:
        print('stopped: {}'.format(error), file=sys.stderr)
        return 1
    if args.save_txt:
        recorder.text()
    if args.save_model:
        save(folder, model)
    used = meter.result()
    if args.meter_csv:  # alone counts; read once the run is safe, however damaged it may be
        used.update(energy_joules=None, energy_source=None,
                    energy_note='{} was not read'.format(args.meter_csv))
    recorder.finish(summarise(args, dict(result, **used), cache))
    print('final test accuracy {:.1f} % (best {:.1f} %), trained in {:.1f} s (selection {:.1f} s)'
          .format(100 * result['final_accuracy'], 100 * result['best_accuracy'],
                  result['train_seconds'], result['selection_seconds'])
          + ('' if used['energy_joules'] is None else ', {:,.0f} J'.format(used['energy_joules'])))
    if args.meter_csv:
        try:
            energy.add_to_run(folder, args.meter_csv)
        except UserError as error:
            print('energy not measured: {}'.format(error), file=sys.stderr)
    return 0


if __name__ == '__main__':
    command_line.run(main)
