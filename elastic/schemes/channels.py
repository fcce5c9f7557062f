"""Finds in the graph which channels of a network can only be removed together.

Tensors that are added share one set of channels. A channel is removed only if its weights have
vanished in all convolutions that write or read it (PruneTrain's channel union). Dense layers count
as convolutions; pooling, dropout and squeeze-and-excitation pass channels on. Transformer blocks
lose hidden units of their MLP. All other layers keep their channels, as do image and classes.
"""

from functools import reduce

import numpy as np
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.networks.backbone import Backbone
from elastic.networks.heads import activation_of

ACROSS_CHANNELS = ('softmax', 'log_softmax', 'sparsemax', 'glu')  # activations that mix channels


class Channels:
    """Holds a set of channels that several variables share.

    judged: (variable, axis of the channels) of the kernels that write or read them.
    carried: the same of variables that only follow: biases, batch normalization, depthwise kernels.
    fixed: whether all channels must stay. size: number of channels; None if unknown.
    """

    def __init__(self, size, fixed=False):
        self.size, self.fixed = size, fixed
        self.judged, self.carried = [], []
        self._part_of = None

    def whole(self):
        """Returns the Channels into which these were joined."""
        return self if self._part_of is None else self._part_of.whole()

    def join(self, other):
        """Joins these Channels with others; returns the result."""
        first, second = self.whole(), other.whole()
        if first is not second:
            first.fixed |= second.fixed
            first.judged += second.judged
            first.carried += second.carried
            second._part_of = first
        return first

    @property
    def free(self):
        """Returns whether channels can be removed."""
        return bool(self.judged) and not self.fixed

    def kept(self, threshold):
        """Returns the indices, at least one, of channels with a weight of at least `threshold`."""
        largest = np.zeros(self.size)
        for variable, axis in self.judged:
            weights = np.abs(keras_stack.raw(variable).numpy())
            largest = np.maximum(largest, np.moveaxis(weights, axis, 0).reshape(
                self.size, -1).max(axis=1))
        kept = np.flatnonzero(largest >= threshold)
        return kept if len(kept) else np.array([int(np.argmax(largest))])


class Structure:
    """Finds the channels of a model that can be removed.

    model: functional or Sequential keras.Model, with the networks in it.
    channels: the removable Channels. widths: id of layer -> (config field, Channels) of these.
    """

    def __init__(self, model):
        self._every, self.widths, self._of_layer = [], {}, {}
        for channels in self._network(model, [self._fixed(tensor) for tensor in model.inputs]):
            channels.whole().fixed = True
        whole = {id(c.whole()): c.whole() for c in self._every}.values()
        self.channels = [channels for channels in whole if channels.free]
        self.widths = {layer: (field, channels.whole())
                       for layer, (field, channels) in self.widths.items()
                       if channels.whole().free}

    @property
    def size(self):
        """Returns the number of removable channels."""
        return sum(channels.size for channels in self.channels)

    def _new(self, size, fixed=False):
        self._every.append(Channels(size, fixed))
        return self._every[-1]

    def _fixed(self, tensor):
        return self._new(tensor.shape[-1] if len(tensor.shape) else None, fixed=True)

    def _network(self, network, into):
        """Returns the Channels of a network's outputs. into: the Channels of its inputs."""
        of = {id(tensor): channels for tensor, channels in zip(network.inputs, into)}
        for layer, inputs, outputs in keras_stack.graph_nodes(network):
            after = self._call(layer, [of[id(tensor)] for tensor in inputs], inputs, outputs)
            of.update((id(tensor), channels) for tensor, channels in zip(outputs, after))
        return [of[id(tensor)] for tensor in network.outputs]

    def _call(self, layer, into, inputs, outputs):
        if network_of(layer) is not None:
            return self._network(network_of(layer), into)
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
        return [self._fixed(tensor) for tensor in outputs]

    def _once(self, make, layer, *rest):
        """Returns make(layer, *rest), made once per layer, however often the layer is called."""
        if id(layer) not in self._of_layer:
            self._of_layer[id(layer)] = make(layer, *rest)
        return self._of_layer[id(layer)]

    def _around_kernel(self, layer):
        """Returns the Channels that a layer reads and writes: the last two axes of its kernel."""
        rank = len(layer.kernel.shape)
        reads, writes = [self._new(size) for size in layer.kernel.shape[-2:]]
        reads.judged.append((layer.kernel, rank - 2))
        writes.judged.append((layer.kernel, rank - 1))
        if layer.use_bias:
            writes.carried.append((layer.bias, 0))
        writes.fixed = activation_of(layer) in ACROSS_CHANNELS
        self.widths[id(layer)] = 'filters' if rank == 4 else 'units', writes
        return reads, writes

    def _along(self, layer, size):
        """Returns the Channels of a layer that passes them on; its weights are `carried`."""
        channels = self._new(size)
        channels.carried += [(weight, 2 if len(weight.shape) == 4 else 0)
                             for weight in layer.weights]
        if isinstance(layer, keras.layers.Reshape):
            self.widths[id(layer)] = 'target_shape', channels
        return channels

    def _hidden(self, layer):
        """Adds the hidden units of the MLP if the layer is a vit-keras block."""
        dense = [part for part in getattr(getattr(layer, 'mlpblock', None), 'layers', ())
                 if isinstance(part, keras.layers.Dense)]
        if len(dense) == 2:
            units = self._new(dense[0].units)
            units.judged += [(dense[0].kernel, 1), (dense[1].kernel, 0)]
            units.carried.append((dense[0].bias, 0))
            self.widths[id(layer)] = 'mlp_dim', units


def network_of(layer):
    """Returns the network in a Backbone, or the layer if it is a model itself, else None."""
    return keras_stack.functional(layer.base if isinstance(layer, Backbone) else layer)


def _channels_last(layer):
    return getattr(layer, 'data_format', 'channels_last') == 'channels_last'


def _reads_and_writes(layer):
    """Returns whether a kernel computes each output channel from all input channels."""
    return type(layer) is keras.layers.Dense or (
        type(layer) is keras.layers.Conv2D and getattr(layer, 'groups', 1) == 1
        and _channels_last(layer))


def _keeps_channels(layer, inputs, outputs):
    """Returns whether each output channel depends only on the same channel of the inputs."""
    kinds = keras.layers
    if isinstance(layer, kinds.Reshape):
        return _wide_axes(inputs[0]) == _wide_axes(outputs[0])
    if isinstance(layer, kinds.DepthwiseConv2D) and layer.depth_multiplier != 1:
        return False
    return (_channels_last(layer) and activation_of(layer) not in ACROSS_CHANNELS
            and len({tensor.shape[-1] for tensor in inputs}) == 1 and isinstance(layer, (
                kinds.DepthwiseConv2D, kinds.BatchNormalization, kinds.Activation, kinds.ReLU,
                kinds.LeakyReLU, kinds.Dropout, kinds.MaxPooling2D, kinds.AveragePooling2D,
                kinds.GlobalAveragePooling2D, kinds.GlobalMaxPooling2D, kinds.ZeroPadding2D,
                kinds.Add, kinds.Multiply)))


def _wide_axes(tensor):
    """Returns the sizes of an image's axes, without those of size 1 before the channels."""
    sizes = list(tensor.shape)[1:]
    return [size for size in sizes[:-1] if size != 1] + sizes[-1:]
