"""Holds the networks and rows of accuracy.py: what is trained, and in which ways.

A network trains on a source domain first, or starts from ImageNet weights (names with `lite0_`).
The learning rates in TUNED are those that `accuracy.py --networks lite0_fashion --tune` found; the
other networks have one rate that suits full training, tried on seeds 8 and 9.
"""

import functools
import os
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import _path
from _accuracy_table import CACHED_GOALS, FULL, GOALS, IMAGENET_GOALS, RHO, SHORTER, in_a_part
from _solar_cells import write_cells

from elastic import errors
from elastic.settings import CHOSEN, LOGS_DIR

LOGS = os.path.join(LOGS_DIR, 'accuracy')
WARMUP = '60'  # steps; without, full training may fall back to chance in its first steps
RHOS = (0.35, 0.5, 0.7)
METRICS = ('weight_magnitude', 'grad_magnitude', 'fisher', 'random', 'depth')
RULES = ('fisher', 'lisa', 'betti', 'depth', 'autofreeze', 'egeria')  # of other papers
INTERVALS = (1, 2, 8, 0)
LAST = 'block[67]|top|head'  # what a user might choose by hand, of EfficientNet-Lite0
STRONG = ['--prune_penalty_ratio', '0.5', '--prune_threshold', '0.12']  # PruneTrain, see stronger


class Network(NamedTuple):
    """A network, and how it is trained.

    flags: for main.py and profiler.py. source: further flags of training on the source domain; None
    starts from ImageNet weights. target: flags of the target domain.
    learning_rate: on the target domain, tuned on full training.
    epochs: of `steps` steps each. A run trains for less than 90 s on two slow cores; where images
    repeat, selecting takes under 5 % of training at rho 0.5 (MobileNetV2), or three seeds take half
    an hour (EfficientNetB0).
    interval: epochs between selections. own_rates: label of a row -> learning rate of one more row.
    repeated: whether all epochs have the images of the first one, or each has new ones.
    rates: label -> learning rate of that row. goals: rho with the cache -> as in GOALS.
    rules: of other papers, each a row. make_images: function that makes the target's images.
    balanced: whether accuracy is the mean of the accuracies of the classes.
    tuned_on: Network whose test accuracy --tune compares; None: this one's, on validation images.
    weights: to start from, where there is no source domain.
    """
    name: str
    flags: List[str]
    source: List[str]
    learning_rate: float
    epochs: int
    steps: int
    interval: int
    own_rates: Dict[str, float] = {}
    repeated: bool = False
    target: Tuple[str, ...] = ('--dataset_name', 'digits_shifted')
    rates: Dict[str, float] = {}
    goals: Dict = CACHED_GOALS
    num_classes: int = 10
    rules: Tuple[str, ...] = ()
    make_images: Optional[Callable] = None
    balanced: bool = False
    tuned_on: Optional[NamedTuple] = None
    weights: str = 'imagenet'

    @property
    def images(self):
        """Returns the flags that say which images an epoch trains on."""
        batch_size = int(self.flags[self.flags.index('--batch_size') + 1])
        return ['--train_images', str(self.steps * batch_size)] if self.repeated else [
            '--steps_per_epoch', str(self.steps)]

    @property
    def source_name(self):
        return self.name.split('_')[0] + '_source'


NETWORKS = {network.name: network for network in (
    Network('mobilenetv2', ['--model_name', 'mobilenetv2', '--alpha', '0.35', '--input_size', '96',
                            '--batch_size', '32'],
            ['--num_epochs', '3', '--learning_rate', '0.05'], 0.02, 12, 60, 4,
            {'head only': 0.1}),
    Network('efficientnetb0', ['--model_name', 'EfficientNetB0', '--input_size', '48',
                               '--batch_size', '16'],
            ['--num_epochs', '4', '--learning_rate', '0.02'], 0.02, 6, 60, 2))}
for name, steps in (('mobilenetv2', 336), ('efficientnetb0', 96)):  # 10,752 and 1,536 images
    NETWORKS[name + '_repeated'] = NETWORKS[name]._replace(
        name=name + '_repeated', epochs=12, steps=steps, interval=4, own_rates={}, repeated=True)


DIGITS = list(NETWORKS)
FASHION = ('--dataset_name', 'fashion_mnist', '--test_images', '2500', '--augmentation', 'none')
TUNED = {'full': 0.0015, 'full, 1/2 of the epochs': 0.0015, 'full, 1/3 of the epochs': 0.0008,
         'full, 1/4 of the epochs': 0.0015, 'head only': 0.0015, 'BN + bias': 0.024,
         'PruneTrain': 0.0008, 'elastic 0.35, no cache': 0.003, 'elastic 0.5, no cache': 0.003,
         'elastic 0.5': 0.003, 'elastic 0.35': 0.006, 'elastic 0.25': 0.003,
         'elastic 0.15': 0.003, 'elastic 0.35, fisher': 0.003, 'elastic 0.35, lisa': 0.024,
         'elastic 0.35, depth': 0.006, 'elastic 0.35, autofreeze': 0.006,
         'elastic 0.35, egeria': 0.006, 'elastic 0.35, betti': 0.006,
         'the last two stages': 0.006, 'full, 2 times the epochs': 0.0015,
         'full, 4 times the epochs': 0.0015, 'stages, then 0.5': 0.0015,
         'stages, then 0.35': 0.0015, 'stages, then 0.25': 0.0015, 'stages, then 0.15': 0.0015,
         'stages, then BN + bias': 0.003, 'stages, then full': 0.0002,
         'stages, then full, 1/2 of the epochs': 0.0002,
         'stages, then full, 1/3 of the epochs': 0.0002}  # by --tune, on lite0_fashion
# By --tune, on lite0_digits. Fisher, LISA and Betti have half of the rate that it found: at 0.012,
# one seed of five fails.
TUNED_ON_DIGITS = dict(TUNED, **{
    'full, 1/3 of the epochs': 0.003, 'head only': 0.012, 'BN + bias': 0.048, 'PruneTrain': 0.003,
    'elastic 0.5, no cache': 0.006, 'elastic 0.35': 0.003,
    'elastic 0.35, fisher': 0.006, 'elastic 0.35, lisa': 0.006, 'elastic 0.35, depth': 0.003,
    'the last two stages': 0.003, 'stages, then 0.5': 0.003, 'stages, then 0.35': 0.003,
    'stages, then 0.25': 0.003, 'stages, then 0.15': 0.003, 'stages, then full': 0.0015,
    'stages, then full, 1/2 of the epochs': 0.0015,
    'stages, then full, 1/3 of the epochs': 0.0015})
TUNED_ON_12000 = dict(TUNED, **{  # by --tune, on lite0_fashion_12000
    'full': 0.003, 'full, 1/3 of the epochs': 0.0015, 'head only': 0.003, 'PruneTrain': 0.003,
    'elastic 0.25': 0.006, 'elastic 0.15': 0.006})
TUNED_ON_CELLS = dict(TUNED, **{  # by --tune, on lite0_cells
    'head only': 0.003, 'BN + bias': 0.048, 'PruneTrain': 0.0015, 'the last two stages': 0.003,
    'elastic 0.5, no cache': 0.0015, 'elastic 0.35': 0.003})
LITE0 = Network('lite0_fashion', ['--model_name', 'efficientnet_lite0', '--input_size', '64',
                                  '--batch_size', '32'],
                None, 0.006, 6, 94, 3, repeated=True, target=FASHION, rates=TUNED,
                goals=IMAGENET_GOALS, rules=RULES)
CELLS = os.path.join(LOGS, 'solar_cells')


def solar_cells(name, folder, steps, tuning=False):
    """Returns the Network of solar cells in `folder`. steps, tuning: as in Network, write_cells."""
    return LITE0._replace(
        name=name, flags=LITE0.flags[:2] + ['--input_size', '96', '--batch_size', '32'],
        target=('--dataset_name', 'folder:' + folder, '--augmentation', 'none'), steps=steps,
        epochs=8, interval=4, rules=(), num_classes=2, balanced=True, rates=TUNED_ON_CELLS,
        make_images=functools.partial(write_cells, os.path.join(_path.ROOT, folder), tuning))


NETWORKS.update({network.name: network for network in (
    LITE0, LITE0._replace(name='lite0_fashion_12000', steps=375, rules=(),
                          rates=TUNED_ON_12000),
    LITE0._replace(name='lite0_digits', target=('--dataset_name', 'digits_shifted'),
                   rates=TUNED_ON_DIGITS),
    solar_cells('lite0_cells', CELLS, steps=64)._replace(
        tuned_on=solar_cells('lite0_cells_tuning', CELLS + '_tuning', steps=48, tuning=True)),
    LITE0._replace(name='lite0_scratch', weights='none', rates=dict.fromkeys(TUNED, 0.02),
                   rules=()),
    LITE0._replace(name='lite0_batch1', flags=LITE0.flags[:-1] + ['1'], steps=1504, epochs=2,
                   interval=1, rules=(),
                   rates={label: rate / 32 for label, rate in TUNED.items()}),
    LITE0._replace(name='lite0_tiny', flags=LITE0.flags[:-1] + ['8'], steps=40, epochs=12,
                   interval=4, rules=(),
                   rates={label: rate / 4 for label, rate in TUNED.items()}))})


class Row(NamedTuple):
    """One row of the table.

    variant: whether it selects tensors in another way than the paper.
    learning_rate: default the network's. cached: whether it uses the prefix cache.
    """
    label: str
    scheme: str
    flags: List[str] = []
    rho: float = None
    variant: bool = False
    learning_rate: float = None
    cached: bool = False


def elastic(label, rho, *more):
    return Row(label, 'elastic_training', ['--rho', str(rho)] + list(more), rho, bool(more))


def rows_of(network, variants):
    """Returns the Rows of one network.

    variants: whether to add other metrics, intervals and whole layers.
    """
    if network.source is None:
        return [row._replace(learning_rate=network.rates.get(row.label))
                for row in rows_from_imagenet(network)]
    if network.repeated:
        return rows_of_repeated(network)
    rows = [Row(FULL, 'full_training'),
            Row('full, half the epochs', 'full_training',
                ['--num_epochs', str(network.epochs // 2)]),
            Row('head only', 'traditional_tl_training'),
            Row('BN + bias', 'bn_plus_bias_training'),
            Row('PruneTrain', 'prune_training')]
    rows += [elastic('elastic {:g}'.format(rho), rho) for rho in RHOS]
    by_label = {row.label: row for row in rows}
    rows += [by_label[label]._replace(label='{}, lr {:g}'.format(label, rate), learning_rate=rate)
             for label, rate in network.own_rates.items()]
    if variants:
        rows += [elastic('elastic {:g}, {}'.format(RHO, metric), RHO, '--importance', metric)
                 for metric in METRICS]
        rows += [elastic('elastic {:g}, {}'.format(
            RHO, 'selected once' if interval == 0 else 'interval {}'.format(interval)), RHO,
                         '--interval', str(interval)) for interval in INTERVALS]
        rows += [elastic('elastic {:g}, whole layers'.format(RHO), RHO, '--granularity', 'layer')]
    return rows


def rows_of_repeated(network):
    """Returns the Rows of a network with repeated images.

    BN + bias and PruneTrain are left out: they train tensors next to the input, so they have no
    cache.
    """
    return [Row(FULL, 'full_training')] + [
        Row(in_a_part(n), 'full_training', part_of(network, n)) for n in SHORTER.values()] + [
            Row('head only', 'traditional_tl_training', cached=True),
            elastic('elastic {:g}, no cache'.format(RHO), RHO)] + [
                elastic('elastic {:g}'.format(rho), rho)._replace(cached=True) for rho in SHORTER]


def part_of(network, n):
    """Returns the flags of training for 1/n of the steps."""
    epochs = -(-network.epochs // n)
    flags = ['--num_epochs', str(epochs)]
    if epochs * n != network.epochs:
        flags += ['--steps_per_epoch', str(network.steps * network.epochs // (n * epochs))]
    return flags


def rows_from_imagenet(network):
    """Returns the Rows of a network with ImageNet weights."""
    rows = rows_of_repeated(network)
    at = 1 + [row.label for row in rows].index('head only')
    return rows[:at] + longer(network) + [
                        Row('BN + bias', 'bn_plus_bias_training'),
                        Row('PruneTrain', 'prune_training'),
                        Row('the last two stages', CHOSEN, ['--train_tensors', LAST], cached=True),
                        elastic('elastic 0.35, no cache', 0.35)] + rows[at:] + [
                            elastic('elastic 0.15', 0.15)._replace(cached=True)] + [
                                elastic('elastic 0.35, {}'.format(rule), 0.35, '--importance',
                                        rule)._replace(cached=True) for rule in network.rules
                                ] + rows_from_a_solved_head(network) * (network.weights != 'none')


def longer(network):
    """Returns the Rows of full training that shows what more time reaches."""
    return [Row('full, {} times the epochs'.format(n), 'full_training',
                ['--num_epochs', str(n * network.epochs)]) for n in (2, 4)]


def rows_from_a_solved_head(network):
    """Returns the Rows whose head is solved, and then trained for as many epochs as others."""
    def after(n):
        name, epochs, *more = part_of(network, n)
        return [name, str(1 + int(epochs))] + more
    alone, stages = 'traditional_tl_training', ['--head', 'stages', '--head_start', 'solved']
    rows = [Row('head, solved', alone, stages[2:] + ['--num_epochs', '1']),
            Row('stages, solved', alone, stages + ['--num_epochs', '1'])]
    rows += [elastic('stages, then {:g}'.format(rho), rho, *stages, *after(1))._replace(cached=True)
             for rho in (0.5, 0.35, 0.25, 0.15)]
    rows += [Row('stages, then BN + bias', 'bn_plus_bias_training', stages + after(1))]
    return rows + [Row('stages, then {}'.format(FULL if n == 1 else in_a_part(n)), 'full_training',
                       stages + after(n)) for n in (1, 2, 3)]


def rows_for(network, args):
    """Returns the rows of --quick or --rows, and full training to compare with, unless --tune.

    Raises UserError for an unknown label.
    """
    rows = rows_of(network, network.name == list(NETWORKS)[0] and not args.quick)
    if args.quick:
        rows = [row for row in rows if row.learning_rate is None
                and (row.rho is None or row.rho in GOALS)]
    labels = [row.label for row in rows]
    for label in args.rows or ():
        if label not in labels:
            raise errors.UserError("--rows '{}' is no row of {}; allowed: {}".format(
                label, network.name, ', '.join(map("'{}'".format, labels))))
    return [row for row in rows if not args.rows or row.label in args.rows or
            row.label == FULL and not args.tune]


def stronger(network):
    """Returns the Row of PruneTrain at a setting that removes channels, once, at half-time."""
    return Row('PruneTrain, strong', 'prune_training',
               STRONG + ['--prune_interval', str(network.epochs // 2)])
