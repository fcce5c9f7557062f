"""PruneTrain (Lym et al., SC'19): channels that training makes vanish are removed as it goes on.

A group lasso on the input and the output channels of the convolutions draws whole channels to
zero. Every few epochs those whose weights have all fallen below a threshold are removed and the
network is rebuilt smaller; weights, momentum and BN statistics of what stays are carried over.

Which channels belong together follows from the graph, whatever the network: tensors that are added
share one set of channels, and a channel goes only where every convolution that writes it and every
one that reads it has let go of it (the paper's channel union). Pooling, dropout and squeeze-and-
excitation pass channels on; a Dense layer reads and writes them as a convolution does, so that the
classifier's kernel shrinks with the last convolutions. Transformer blocks lose hidden units of
their MLP. What uses channels in any other way keeps all of them, as do the image and the classes.

The defaults of main.py (interval 5, ratio 0.2, threshold 1e-4) are those of the authors' own
configurations for ImageNet; for CIFAR theirs has an interval of 10.
"""

from functools import reduce
from itertools import islice
from typing import Dict, List, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

import keras_stack
from backbone import Backbone
from command_line import UserError
from masked_step import StepMaker
from train import Choice, Scheme, optimizer_for
from training_step import evaluation_function

FIRST_BATCHES = 4  # whose loss sets the penalty
EPSILON = 1e-12  # under the root of a norm: its gradient at zero
ACROSS_CHANNELS = ('softmax', 'log_softmax', 'sparsemax', 'glu')  # activations that mix channels


class Channels:
    """Channels that stand or fall together.

    judged: (variable, axis) of what writes or reads them, an index of the axis for each channel.
    carried: (variable, axis) that only follow: biases, batch normalization, depthwise kernels.
    fixed: something else uses them, so that all of them stay. size: None where it is not known.
    """

    def __init__(self, size, fixed=False):
        self.size, self.fixed = size, fixed
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
    """channels: those that may go. widths: id of a layer -> (configuration field, Channels)."""
    channels: List
    widths: Dict

    @property
    def size(self):
        """How many channels may go."""
        return sum(channels.size for channels in self.channels)


def structure(model):
    """The Structure of a functional or Sequential keras.Model, networks inside it included."""
    found = _Analysis()
    images = [found.fixed(tensor) for tensor in model.inputs]
    for channels in found.network(model, images):
        channels.whole().fixed = True
    channels = {id(c.whole()): c.whole() for c in found.every}.values()
    return Structure([c for c in channels if c.free],
                     {name: (field, c.whole()) for name, (field, c) in found.widths.items()
                      if c.whole().free})


class _Analysis:
    """What `structure` gathers on its way through the graph: every Channels, Structure.widths."""

    def __init__(self):
        self.every, self.widths, self._of_layer = [], {}, {}

    def new(self, size, fixed=False):
        self.every.append(Channels(size, fixed))
        return self.every[-1]

    def fixed(self, tensor):
        return self.new(tensor.shape[-1] if len(tensor.shape) else None, fixed=True)

    def network(self, network, into):
        """The Channels of its outputs, from those of its inputs: lists."""
        of = {id(tensor): channels for tensor, channels in zip(network.inputs, into)}
        for layer, inputs, outputs in keras_stack.graph_nodes(network):
            after = self._call(layer, [of[id(tensor)] for tensor in inputs], inputs, outputs)
            of.update((id(tensor), channels) for tensor, channels in zip(outputs, after))
        return [of[id(tensor)] for tensor in network.outputs]

    def _call(self, layer, into, inputs, outputs):
        """The Channels of the outputs of one call of a layer, from those of its inputs: lists."""
        if _network_of(layer) is not None:
            return self.network(_network_of(layer), into)
        if _reads_and_writes(layer):
            reads, writes = self._once(self._around_kernel, layer)
            into[0].join(reads)
            return [writes]
        if _keeps_channels(layer, inputs, outputs):
            out = reduce(Channels.join, into)
            if layer.weights or isinstance(layer, keras.layers.Reshape):
                out = out.join(self._once(self._along, layer, out.size))
            return [out]
        for channels in into:
            channels.whole().fixed = True
        self._once(self._hidden, layer)
        return [self.fixed(tensor) for tensor in outputs]

    def _once(self, make, layer, *rest):
        """make(layer, *rest) of the first call: the same channels wherever a layer is called."""
        if id(layer) not in self._of_layer:
            self._of_layer[id(layer)] = make(layer, *rest)
        return self._of_layer[id(layer)]

    def _around_kernel(self, layer):
        """(Channels it reads, Channels it writes): the last two axes of a kernel."""
        rank = len(layer.kernel.shape)
        reads, writes = [self.new(size) for size in layer.kernel.shape[-2:]]
        reads.judged.append((layer.kernel, rank - 2))
        writes.judged.append((layer.kernel, rank - 1))
        if layer.use_bias:
            writes.carried.append((layer.bias, 0))
        writes.fixed = _activation(layer) in ACROSS_CHANNELS
        self.widths[id(layer)] = 'filters' if rank == 4 else 'units', writes
        return reads, writes

    def _along(self, layer, size):
        """The `size` Channels that a layer keeps, with its weights for each."""
        channels = self.new(size)
        channels.carried += [(weight, 2 if len(weight.shape) == 4 else 0)
                             for weight in layer.weights]
        if isinstance(layer, keras.layers.Reshape):
            self.widths[id(layer)] = 'target_shape', channels
        return channels

    def _hidden(self, layer):
        """The hidden units of a transformer block's MLP."""
        dense = _hidden_layers(layer)
        if dense:
            units = self.new(dense[0].units)
            units.judged += [(dense[0].kernel, 1), (dense[1].kernel, 0)]
            units.carried.append((dense[0].bias, 0))
            self.widths[id(layer)] = 'mlp_dim', units


def _network_of(layer):
    """The network that a layer, a Backbone or itself a model, stands for; None for others."""
    return keras_stack.functional(layer.base if isinstance(layer, Backbone) else layer)


def _activation(layer):
    return getattr(getattr(layer, 'activation', None), '__name__', '')


def _channels_last(layer):
    return getattr(layer, 'data_format', 'channels_last') == 'channels_last'


def _reads_and_writes(layer):
    """Whether every channel of the output is computed from all those of the input, by a kernel."""
    return type(layer) is keras.layers.Dense or (
        type(layer) is keras.layers.Conv2D and getattr(layer, 'groups', 1) == 1
        and _channels_last(layer))


def _keeps_channels(layer, inputs, outputs):
    """Whether channel c of the output depends on channel c of the inputs alone."""
    kinds = keras.layers
    if isinstance(layer, kinds.Reshape):
        return _wide_axes(inputs[0]) == _wide_axes(outputs[0])
    if isinstance(layer, kinds.DepthwiseConv2D) and layer.depth_multiplier != 1:
        return False
    return (_channels_last(layer) and _activation(layer) not in ACROSS_CHANNELS
            and len({tensor.shape[-1] for tensor in inputs}) == 1 and isinstance(layer, (
                kinds.DepthwiseConv2D, kinds.BatchNormalization, kinds.Activation, kinds.ReLU,
                kinds.LeakyReLU, kinds.Dropout, kinds.MaxPooling2D, kinds.AveragePooling2D,
                kinds.GlobalAveragePooling2D, kinds.GlobalMaxPooling2D, kinds.ZeroPadding2D,
                kinds.Add, kinds.Multiply)))


def _wide_axes(tensor):
    """Sizes of the axes of one image, without those of 1 before the channels."""
    sizes = list(tensor.shape)[1:]
    return [size for size in sizes[:-1] if size != 1] + sizes[-1:]


def _hidden_layers(layer):
    """The two Dense layers of a vit-keras transformer block's MLP, else None."""
    dense = [part for part in getattr(getattr(layer, 'mlpblock', None), 'layers', ())
             if isinstance(part, keras.layers.Dense)]
    return dense if len(dense) == 2 else None


class GroupLasso:
    """The penalty on a model, a scalar tensor: coefficient * sum of the norms of all groups.

    A group is the weights of one output channel or of one input channel of a convolution or a
    Dense layer, or those into or out of one hidden unit of a transformer block. Only channels that
    can go have one: drawing others to zero would cost accuracy for nothing.
    batches: iterable of (images, labels). ratio: what share of loss plus penalty the penalty is on
    the first FIRST_BATCHES, before training: the paper's way to set the coefficient.
    """

    def __init__(self, model, batches, ratio):
        evaluate = evaluation_function(model)
        if not structure(model).channels:
            raise UserError('prune_training finds no channels to remove from this model: it needs '
                            'convolutions, in a functional or Sequential Keras model')
        losses = [float(evaluate(images, labels)[0]) / len(labels)
                  for images, labels in islice(batches, FIRST_BATCHES)]
        self.coefficient = (ratio / (1 - ratio) * float(np.mean(losses))
                            / float(self.norms(model)))

    @staticmethod
    def norms(model):
        """Sum of the norms of all groups, a scalar tensor."""
        norms = []
        for channels in structure(model).channels:
            for variable, axis in channels.judged:
                others = [i for i in range(len(variable.shape)) if i != axis]
                squares = tf.reduce_sum(tf.square(keras_stack.raw(variable)), axis=others)
                norms.append(tf.reduce_sum(tf.sqrt(squares + EPSILON)))
        return tf.add_n(norms)

    def __call__(self, model):
        return self.coefficient * self.norms(model)


class Pruned(NamedTuple):
    """A model without its vanished channels. removed, channels: how many of how many there were;
    widths: how many were kept of each of the Channels of `structure`, in its order.
    """
    model: keras.Model
    optimizer: object
    removed: int
    channels: int
    widths: List = []


def prune(model, optimizer, threshold, make_optimizer):
    """Pruned: the model and its optimizer without the channels that have vanished.

    The same objects where none has. threshold: a channel has vanished where none of its weights
    is as large. make_optimizer: (variables) -> new optimizer of the same kind.
    Weights, optimizer slots, iteration count and BN statistics are carried over: the output is that
    of the model with the vanished weights set to 0.
    """
    found = structure(model)
    kept = {id(channels): channels.kept(threshold) for channels in found.channels}
    removed = found.size - sum(map(len, kept.values()))
    if not removed:
        return Pruned(model, optimizer, 0, found.size)
    indices = {}  # id of a variable -> [(axis, indices that stay)]
    for channels in found.channels:
        for variable, axis in channels.judged + channels.carried:
            indices.setdefault(id(keras_stack.raw(variable)), []).append(
                (axis, kept[id(channels)]))
    smaller = _rebuilt(model, {layer: (field, len(kept[id(channels)]))
                               for layer, (field, channels) in found.widths.items()})
    for old, new in zip(model.weights, smaller.weights):
        new.assign(_sliced(old, indices.get(id(keras_stack.raw(old)), ())))
    keras_stack.weights_were_set(smaller)
    new_optimizer = make_optimizer(smaller.trainable_variables)
    new_optimizer.iterations.assign(optimizer.iterations)
    for variable, of_old, of_new in zip(
            model.trainable_variables, keras_stack.slots(optimizer, model.trainable_variables),
            keras_stack.slots(new_optimizer, smaller.trainable_variables)):
        for old, new in zip(of_old, of_new):
            new.assign(_sliced(old, indices.get(id(keras_stack.raw(variable)), ())))
    return Pruned(smaller, new_optimizer, removed, found.size,
                  [len(kept[id(channels)]) for channels in found.channels])


def _rebuilt(model, widths):
    """The model with new weights; widths: id of a layer -> (field of its configuration, size)."""
    def narrower(layer):
        if isinstance(layer, keras.layers.Lambda):
            return layer  # has no weights; Keras 3 takes its function for a risk
        if isinstance(layer, Backbone):
            return Backbone(narrower(layer.base), layer.preprocessing, layer.train_statistics,
                            name=layer.name)
        if _network_of(layer) is not None:
            return _rebuilt(layer, widths)
        config = layer.get_config()
        if id(layer) in widths:
            field, size = widths[id(layer)]
            config[field] = (tuple(config[field][:-1]) + (size,) if field == 'target_shape'
                             else size)
        return layer.__class__.from_config(config)
    return keras.models.clone_model(model, clone_function=narrower)


def _sliced(variable, indices):
    array = keras_stack.raw(variable).numpy()
    for axis, stay in indices if array.ndim else ():  # Adam's count of updates has no channels
        array = np.take(array, stay, axis=axis)
    return array


def prune_scheme(name, maker, dataset, settings, penalty, interval, threshold):
    """A train.Scheme: all tensors, with the penalty; every `interval` epochs the network shrinks.

    maker: masked_step.StepMaker with the penalty. dataset, settings: of the run. interval 0: never.
    threshold: as in prune.
    """
    selection = _Shrinking(maker, dataset, settings, penalty, interval, threshold)
    return Scheme(name, selection, selection.state, selection.restore)


class _Shrinking:
    """The `select` of a prune_scheme, with its arguments. summary: for the run's.

    widths: of each network that was rebuilt, how many of each of the Channels of the one before it
    kept, in the order of `structure`.
    """

    def __init__(self, maker, dataset, settings, penalty, interval, threshold):
        self._maker, self._dataset, self._settings = maker, dataset, settings
        self._penalty, self._interval, self._threshold = penalty, interval, threshold
        self._everything = Choice(np.ones(len(maker.model.trainable_variables), dtype=bool))
        self.summary = dict(channels=structure(maker.model).size, channels_removed=0)
        self._widths = []

    def __call__(self, epoch, last):
        if epoch == 1:
            if self._interval >= self._settings.num_epochs:
                print('No channels will be removed: the first would be after epoch {} of {}'.format(
                    self._interval, self._settings.num_epochs))
            return self._everything
        if not self._interval or (epoch - 1) % self._interval:
            return None
        pruned = prune(self._maker.model, self._maker.optimizer, self._threshold, self._optimizer)
        self.summary['channels_removed'] += pruned.removed
        print('{:,} of {:,} channels have vanished{}'.format(
            pruned.removed, pruned.channels,
            ': the network is rebuilt without them' if pruned.removed else ''))
        if not pruned.removed:
            return None
        self._widths.append(pruned.widths)
        self._maker = self._maker_of(pruned.model, pruned.optimizer)
        return self._everything._replace(maker=self._maker)

    def _optimizer(self, variables):
        return optimizer_for(self._dataset, self._settings, variables)

    def _maker_of(self, model, optimizer):
        return StepMaker(model, optimizer, self._settings.weight_decay,
                         *self._dataset.train.element_spec, penalty=self._penalty,
                         loss_scale=self._maker.loss_scale)

    def state(self):
        return dict(summary=self.summary, widths=self._widths)

    def restore(self, state, choice, assign):
        """Rebuilds the network as often as it was; see train.Scheme."""
        self.summary, self._widths = state['summary'], state['widths']
        model = self._maker.model
        for widths in self._widths:
            found = structure(model)
            size_of = {id(channels): size for channels, size in zip(found.channels, widths)}
            smaller = _rebuilt(model, {layer: (field, size_of[id(channels)])
                                       for layer, (field, channels) in found.widths.items()})
            for old, new in zip(model.weights, smaller.weights):
                if old.shape == new.shape:  # of what is a constant in the graph: Normalization's
                    new.assign(old)
            keras_stack.weights_were_set(smaller)
            model = smaller
        if self._widths:
            self._maker = self._maker_of(model, self._optimizer(model.trainable_variables))
        assign(self._maker)
        return self._maker
