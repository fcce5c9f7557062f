"""PruneTrain (Lym et al., SC'19): channels that training makes vanish are removed as it goes on.

A group lasso on the input and the output channels of every convolution draws whole channels to
zero. Every few epochs those whose weights have all fallen below a threshold are removed and the
network is rebuilt smaller; weights, momentum and BN statistics of what stays are carried over.

Which channels belong together follows from the graph, whatever the network: tensors that are added
share one set of channels, and a channel goes only where every convolution that writes it and every
one that reads it has let go of it (the paper's channel union). Transformer blocks lose hidden units
of their MLP. What uses channels in any other way keeps all of them.

The defaults of main.py (interval 5, ratio 0.2, threshold 1e-4) are those of the authors' own
configurations for ImageNet; for CIFAR theirs has an interval of 10.
"""

from itertools import islice
from typing import Dict, List, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

import keras_stack
from backbone import Backbone
from masked_step import StepMaker
from train import Choice, Scheme, optimizer_for
from training_step import loss_function

FIRST_BATCHES = 4  # whose loss sets the penalty
EPSILON = 1e-12  # under the root of a norm: its gradient at zero


class Channels:
    """Channels that stand or fall together.

    judged: (variable, axis) of what writes or reads them, an index of the axis for each channel.
    carried: (variable, axis) that only follow: biases, batch normalization, depthwise kernels.
    fixed: something else uses them, so that all of them stay. size: None where it is not known.
    """

    def __init__(self, size):
        self.size, self.fixed = size, False
        self.judged, self.carried = [], []
        self._part_of = None

    def whole(self):
        """The Channels that these have become part of."""
        return self if self._part_of is None else self._part_of.whole()

    def join(self, other):
        """Both become one; returns it."""
        first, second = self.whole(), other.whole()
        if first is not second:
            first.fixed |= second.fixed
            first.judged += second.judged
            first.carried += second.carried
            second._part_of = first
        return first

    @property
    def free(self):
        """Whether channels may go."""
        return bool(self.judged) and not self.fixed

    def kept(self, threshold):
        """Indices of the channels with a judged weight of at least `threshold`; never none."""
        largest = np.zeros(self.size)
        for variable, axis in self.judged:
            weights = np.abs(keras_stack.raw(variable).numpy())
            largest = np.maximum(largest, np.moveaxis(weights, axis, 0).reshape(
                self.size, -1).max(axis=1))
        kept = np.flatnonzero(largest >= threshold)
        return kept if len(kept) else np.array([int(np.argmax(largest))])


class Structure(NamedTuple):
    """channels: all of a network. widths: layer name -> (field of its configuration, Channels)."""
    channels: List
    widths: Dict


def structure(network):
    """The Structure of a functional keras.Model, from its graph."""
    of, ends, widths, every = {}, {}, {}, []  # of: id of a tensor -> its Channels

    def new(size):
        every.append(Channels(size))
        return every[-1]

    def fixed(tensor):
        channels = new(tensor.shape[-1] if len(tensor.shape) else None)
        channels.fixed = True
        return channels

    images = [fixed(tensor) for tensor in network.inputs]
    of.update((id(tensor), channels) for tensor, channels in zip(network.inputs, images))
    for layer, inputs, outputs in keras_stack.graph_nodes(network):
        into = [of[id(tensor)].whole() for tensor in inputs]
        called_before, out = layer.name in ends, None
        if _is_convolution(layer):
            out = new(layer.filters)
            if not called_before:
                out.judged.append((layer.kernel, 3))
                if into[0] not in images:
                    into[0].judged.append((layer.kernel, 2))
                if layer.use_bias:
                    out.carried.append((layer.bias, 0))
                widths[layer.name] = 'filters', out
        elif _keeps_channels(layer) and len({channels.size for channels in into}) == 1:
            out = into[0]
            for channels in into[1:]:
                out = out.join(channels)
            if not called_before:
                out.carried += [(weight, 2 if len(weight.shape) == 4 else 0)
                                for weight in layer.weights]
        else:
            for channels in into:
                channels.fixed = True
            for tensor in outputs:
                of[id(tensor)] = fixed(tensor)
            hidden = _hidden_layers(layer)
            if hidden and not called_before:
                units = new(hidden[0].units)
                units.judged += [(hidden[0].kernel, 1), (hidden[1].kernel, 0)]
                units.carried.append((hidden[0].bias, 0))
                widths[layer.name] = 'mlp_dim', units
        if out is not None:
            if called_before and layer.weights:  # one layer, several places: the same channels
                into[0].join(ends[layer.name][0])
                out = out.join(ends[layer.name][1])
            of[id(outputs[0])] = out
        ends[layer.name] = into[0], out
    for tensor in network.outputs:
        of[id(tensor)].whole().fixed = True
    return Structure(list({id(c.whole()): c.whole() for c in every}.values()),
                     {name: (field, c.whole()) for name, (field, c) in widths.items()})


def _is_convolution(layer):
    return (type(layer) is keras.layers.Conv2D and getattr(layer, 'groups', 1) == 1
            and layer.data_format == 'channels_last')


def _keeps_channels(layer):
    """Whether channel c of the output depends on channel c of the inputs alone."""
    kinds = keras.layers
    if isinstance(layer, kinds.DepthwiseConv2D):
        return layer.depth_multiplier == 1 and layer.data_format == 'channels_last'
    activation = getattr(getattr(layer, 'activation', None), '__name__', '')
    return activation != 'softmax' and isinstance(layer, (
        kinds.BatchNormalization, kinds.Activation, kinds.ReLU, kinds.LeakyReLU, kinds.Dropout,
        kinds.MaxPooling2D, kinds.AveragePooling2D, kinds.GlobalAveragePooling2D,
        kinds.GlobalMaxPooling2D, kinds.ZeroPadding2D, kinds.Add, kinds.Multiply))


def _hidden_layers(layer):
    """The two Dense layers of a vit-keras transformer block's MLP, else None."""
    dense = [part for part in getattr(getattr(layer, 'mlpblock', None), 'layers', ())
             if isinstance(part, keras.layers.Dense)]
    return dense if len(dense) == 2 else None


def network_of(model):
    """What is pruned of a model: the network inside its Backbone, else the model itself."""
    return next((layer.base for layer in model.layers if isinstance(layer, Backbone)), model)


class GroupLasso:
    """The penalty on a model, a scalar tensor: coefficient * sum of the norms of all groups.

    A group is the weights of one output channel or of one input channel of a convolution, or those
    into or out of one hidden unit of a transformer block. The image's own channels are none.
    batches: iterable of (images, labels). ratio: what share of loss plus penalty the penalty is on
    the first FIRST_BATCHES, before training: the paper's way to set the coefficient.
    """

    def __init__(self, model, batches, ratio):
        loss = loss_function(model)
        losses = [float(loss(labels, model(images, training=False)))
                  for images, labels in islice(batches, FIRST_BATCHES)]
        self.coefficient = (ratio / (1 - ratio) * float(np.mean(losses))
                            / max(float(self.norms(model)), EPSILON))

    @staticmethod
    def norms(model):
        """Sum of the norms of all groups, a scalar tensor."""
        norms = []
        for channels in structure(network_of(model)).channels:
            for variable, axis in channels.judged:
                others = [i for i in range(len(variable.shape)) if i != axis]
                squares = tf.reduce_sum(tf.square(keras_stack.raw(variable)), axis=others)
                norms.append(tf.reduce_sum(tf.sqrt(squares + EPSILON)))
        return tf.add_n(norms) if norms else tf.zeros(())

    def __call__(self, model):
        return self.coefficient * self.norms(model)


class Pruned(NamedTuple):
    """A model without its vanished channels. removed, channels: how many of how many there were."""
    model: keras.Model
    optimizer: object
    removed: int
    channels: int


def prune(model, optimizer, threshold, make_optimizer):
    """Pruned: the model and its optimizer without the channels that have vanished.

    The same objects where none has. threshold: a channel has vanished where none of its weights
    is as large. make_optimizer: (variables) -> new optimizer of the same kind.
    Weights, optimizer slots, iteration count and BN statistics are carried over: the output is that
    of the model with the vanished weights set to 0.
    """
    found = structure(network_of(model))
    kept = {id(channels): channels.kept(threshold) for channels in found.channels if channels.free}
    total = sum(channels.size for channels in found.channels if channels.free)
    removed = total - sum(map(len, kept.values()))
    if not removed:
        return Pruned(model, optimizer, 0, total)
    indices = {}  # id of a variable -> [(axis, indices that stay)]
    for channels in found.channels:
        for variable, axis in channels.judged + channels.carried if channels.free else ():
            indices.setdefault(id(keras_stack.raw(variable)), []).append(
                (axis, kept[id(channels)]))
    widths = {name: (field, len(kept[id(channels)]))
              for name, (field, channels) in found.widths.items() if channels.free}
    smaller = _rebuilt(model, widths)
    for old, new in zip(model.weights, smaller.weights):
        new.assign(_sliced(old, indices.get(id(keras_stack.raw(old)), ())))
    new_optimizer = make_optimizer(smaller.trainable_variables)
    new_optimizer.iterations.assign(optimizer.iterations)
    for variable, of_old, of_new in zip(
            model.trainable_variables, keras_stack.slots(optimizer, model.trainable_variables),
            keras_stack.slots(new_optimizer, smaller.trainable_variables)):
        for old, new in zip(of_old, of_new):
            new.assign(_sliced(old, indices.get(id(keras_stack.raw(variable)), ())))
    return Pruned(smaller, new_optimizer, removed, total)


def _rebuilt(model, widths):
    """The model with new weights; widths: layer name -> (field of its configuration, value)."""
    network = network_of(model)

    def narrower(layer):
        if isinstance(layer, keras.layers.Lambda):
            return layer  # has no weights; Keras 3 takes its function for a risk
        config = layer.get_config()
        if layer.name in widths:
            field, value = widths[layer.name]
            config[field] = value
        return layer.__class__.from_config(config)

    def around(layer):
        if isinstance(layer, Backbone):
            return Backbone(keras.models.clone_model(network, clone_function=narrower),
                            layer.preprocessing, layer.train_statistics, name=layer.name)
        return layer.__class__.from_config(layer.get_config())
    return keras.models.clone_model(model, clone_function=narrower if network is model else around)


def _sliced(variable, indices):
    array = keras_stack.raw(variable).numpy()
    for axis, stay in indices:
        array = np.take(array, stay, axis=axis)
    return array


def prune_scheme(name, maker, dataset, settings, penalty, interval, threshold):
    """A train.Scheme: all tensors, with the penalty; every `interval` epochs the network shrinks.

    maker: masked_step.StepMaker with the penalty. dataset, settings: of the run. interval 0: never.
    threshold: as in prune.
    """
    everything = np.ones(len(maker.model.trainable_variables), dtype=bool)

    def select(epoch, last):
        if epoch == 1:
            return Choice(everything)
        if not interval or (epoch - 1) % interval:
            return None
        pruned = prune(select.maker.model, select.maker.optimizer, threshold,
                       lambda variables: optimizer_for(dataset, settings, variables))
        select.summary['channels_removed'] += pruned.removed
        print('{:,} of {:,} channels have vanished{}'.format(
            pruned.removed, pruned.channels,
            ': the network is rebuilt without them' if pruned.removed else ''))
        if not pruned.removed:
            return None
        select.maker = StepMaker(pruned.model, pruned.optimizer, settings.weight_decay,
                                 *dataset.train.element_spec, penalty=penalty)
        return Choice(everything, maker=select.maker)
    select.maker = maker
    select.summary = dict(channels_removed=0)
    return Scheme(name, select)
