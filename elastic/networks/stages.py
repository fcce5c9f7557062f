"""Makes a network whose output is what its stages give: their pooled, standardised outputs.

A linear classifier of all stages takes one forward pass, and often beats training the last layer
(the idea of Head2Toe, Evci et al., ICML 2022). solved_head.py solves it.
"""

from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.settings import STAGES

STANDARDISED = 'standardised'  # name of the layer that scales the features; never trained
TINY = 1e-12  # added to variances, which are never 0 (solved_head.py)


def pooled(network, head, most):
    """Returns the network with one output, (B, F) float32: its pooled features, standardised.

    network: functional keras.Model of any output. head: LAST takes the mean over positions of its
    output; STAGES the mean and, of maps, the maximum of places that every path from input to output
    passes. most: the most features. Places of few channels are taken first, because the same number
    of features then comes from more places; the last one is always taken.
    Until the features are standardised, the last layer changes nothing.
    Raises UserError if there is no such place, or if the last one has too many features.
    """
    inputs, tensors = network.inputs, [network.outputs[0]]
    if head == STAGES:
        if not keras_stack.functional(network):
            raise UserError('--head stages needs a functional model, whose layers can be seen; '
                            'this is a {}: leave it out'.format(type(network).__name__))
        inputs, found = places(network)
        tensors = _chosen(found, most)
    features = [feature for number, tensor in enumerate(tensors, 1)
                for feature in _pooled(tensor, head, 'stage{}_'.format(number))]
    x = features[0] if len(features) == 1 else keras.layers.Concatenate(
        dtype='float32', name='stages_joined')(features)
    x = keras.layers.BatchNormalization(epsilon=TINY, center=False, scale=False, trainable=False,
                                        dtype='float32', name=STANDARDISED)(x)
    return keras.Model(inputs, x, name=head)


def head_of(model):
    """Returns which head a network has that `pooled` made, also inside the model; else None."""
    for network in [model] + keras_stack.flat_layers(model):
        if isinstance(network, keras.Model) and network.layers[-1].name == STANDARDISED:
            return network.name
    return None


def standardisation(model):
    """Returns the layer of a `pooled` network inside the model that standardises its features."""
    return next(layer for layer in keras_stack.flat_layers(model) if layer.name == STANDARDISED)


def places(network):
    """Returns (inputs, the tensors of a functional model that are stages, from the input on).

    A stage is what every path from input to output passes: here the last such tensor before a layer
    that mixes channels, before a fork, and at the end. A model inside, as of transfer learning, is
    searched too, if a plain chain of layers follows it.
    """
    nodes = list(keras_stack.graph_nodes(network))
    inputs, readers = keras_stack.functional(network).inputs, {}  # id of tensor -> who reads it
    for number, (_, tensors, _) in enumerate(nodes):
        for tensor in tensors:
            readers.setdefault(id(tensor), []).append(number)
    farthest = max(readers.get(id(inputs[0]), [0]))
    found, mixed = [], False
    for number, (layer, tensors, outputs) in enumerate(nodes):
        used = [tensor for tensor in outputs if id(tensor) in readers] or outputs[:1]
        passed = farthest <= number and len(used) == 1  # nothing leads around this tensor
        farthest = max([farthest] + [max(readers.get(id(tensor), [0])) for tensor in used])
        mixed, rest = mixed or _mixes(layer), nodes[number + 1:]
        if passed and isinstance(layer, keras.Model) and keras_stack.functional(layer) and (
                all(len(node[1]) == 1 for node in rest)):
            inner, deeper = places(layer)
            if deeper:
                return inputs, found + _continued(keras.Model(
                    inner, deeper + keras_stack.functional(layer).outputs)(tensors[0]), rest)
        after = readers.get(id(used[0]), [])
        if passed and mixed and (len(after) != 1 or _mixes(nodes[after[0]][0])):
            found, mixed = found + [used[0]], False
    return inputs, found


def _continued(tensors, rest):
    """Returns the stages of a model inside and of the chain of layers that follows it.

    tensors: its stages, and its output. rest: these layers, as graph_nodes yields them.
    """
    *found, x = tensors
    for layer, _, _ in rest:
        x = layer(x)
        found += [x] * _mixes(layer)
    return found


def _mixes(layer):
    """Returns whether a layer does more than scale each channel."""
    return any(len(weight.shape) > 1 for weight in layer.weights)


def _chosen(found, most):
    """Returns those of these tensors that `pooled` reads, in order."""
    found = [tensor for tensor in found if 2 <= len(tensor.shape) <= 4 and tensor.shape[-1]]
    if not found:
        raise UserError('--head stages needs a network with layers before its head whose outputs '
                        'it can read; this one has none: leave it out')
    widths = [tensor.shape[-1] * (2 if len(tensor.shape) == 4 else 1) for tensor in found]
    last, chosen = len(found) - 1, []
    for number in sorted(range(len(found)), key=lambda n: (n != last, found[n].shape[-1], -n)):
        total = sum(widths[n] for n in chosen + [number])
        if total <= most:
            chosen.append(number)
        elif number == last:
            raise UserError('{} features (--head_features, or what fits into memory) are fewer '
                            'than the {} of the last stage; allowed: {} or more, or --head last'
                            .format(most, total, total))
    return [found[number] for number in sorted(chosen)]


def _pooled(tensor, head, name):
    """Returns the features of a place, [(B, C)].

    name: how names of layers begin. A name of Keras' own could be one in the user's network.
    """
    mean = dict(dtype='float32', name=name + 'mean')
    if len(tensor.shape) == 2:
        return [tensor]
    if len(tensor.shape) == 3:  # tokens, or steps of a sequence
        return [keras.layers.GlobalAveragePooling1D(**mean)(tensor)]
    found = [keras.layers.GlobalAveragePooling2D(**mean)(tensor)]
    if head == STAGES:
        found.append(keras.layers.GlobalMaxPooling2D(dtype='float32', name=name + 'max')(tensor))
    return found
