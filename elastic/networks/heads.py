"""Finds the head of a saved model: the layer that turns features into class scores."""

import warnings

from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError

SCORES = ('linear', 'softmax', 'sigmoid')  # activations of a Dense layer that is a head


def features_of(path, model, num_classes, replaced=False):
    """Returns the model without its head if it needs a new one, else None.

    model: with one output, (B, h, w, C) or (B, C). A vector of `num_classes` values counts as
    scores. A Dense layer of another width at the end is a head to be replaced, with a warning. Any
    other output is features, unless it has passed a softmax or sigmoid: then raises UserError.
    replaced: whether a head of `num_classes` scores needs a new one, too.
    """
    shape = model.outputs[0].shape
    if len(shape) == 4:
        return model
    fits = shape[-1] == num_classes
    if fits and not replaced:
        return None
    layer, features, are_scores = _head(model)
    if isinstance(layer, keras.layers.Dense) and activation_of(layer) in SCORES:
        if not fits:
            warnings.warn("'{}' ends in {} output{}, the data has {} classes: its last layer, {}, "
                          'was replaced by a new one'.format(
                              path, shape[-1], 's' * (shape[-1] > 1), num_classes, layer.name))
        return features
    if are_scores or fits:
        raise UserError(
            "'{}' ends in {} {}, the data has {} classes, and its last layer cannot be "
            'replaced: save it without a head'.format(
                path, shape[-1], 'probabilities' if are_scores else 'values', num_classes))
    return model


def _head(model):
    """Returns (last layer that is not an activation, model of its input, whether scores follow it).

    Looks into models inside the model.
    """
    tensor, are_scores = model.outputs[0], False
    while True:
        layer, inputs = keras_stack.producer(tensor)
        are_scores = are_scores or activation_of(layer) in ('softmax', 'sigmoid')
        if len(inputs) != 1 or layer.weights or tuple(inputs[0].shape) != tuple(tensor.shape):
            break
        tensor = inputs[0]
    if isinstance(layer, keras.Model):
        layer, inner, inside = _head(keras_stack.functional(layer))
        return layer, keras.Model(model.inputs, inner(inputs[0])), are_scores or inside
    return layer, keras.Model(model.inputs, inputs[0]), are_scores


def activation_of(layer):
    """Returns the name of a layer's activation; '' if it has none."""
    if isinstance(layer, keras.layers.Softmax):
        return 'softmax'
    return getattr(getattr(layer, 'activation', None), '__name__', '')
