"""Turns a trained network into one of plain Keras layers, which loads without this project."""

import numpy as np
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.networks.backbone import PREPROCESSING, Backbone


def plain_model(model):
    """Returns the same function as a keras.Model of Keras' own layers, with the same weights.

    Preprocessing becomes a fixed 1x1 convolution. In inference, outputs are equal but for rounding.
    """
    inputs = x = keras.Input(model.input_shape[1:], name='images')
    for layer, _, _ in keras_stack.graph_nodes(model):
        if isinstance(layer, Backbone):
            x = layer.base(_preprocessed(x, layer.preprocessing))
        else:
            x = layer(x)
    return keras.Model(inputs, x)


def foreign_layers(model):
    """Returns the names of layer classes that do not come with Keras, as those of vit-keras."""
    kinds = {type(layer) for layer in keras_stack.flat_layers(model)}
    return sorted(kind.__name__ for kind in kinds
                  if kind.__module__.split('.')[0] not in ('keras', 'tensorflow'))


def _preprocessed(images, family):
    """Returns images, (B, H, W, 3) in 0..255, as the keras.applications module `family` wants them.

    Each family's preprocess_input adds to and scales the channels, and may swap them. So it is one
    3x3 matrix and an offset, found from its results for black and for the pure colours.
    """
    if family is None:
        return images
    preprocess = getattr(keras.applications, family).preprocess_input
    black, *colours = preprocess(255.0 * np.eye(4, 3, -1)[:, None, None]).reshape(4, 3)
    matrix = (np.array(colours) - black) / 255
    if np.array_equal(matrix, np.eye(3)) and not black.any():
        return images
    layer = keras.layers.Conv2D(3, 1, name=PREPROCESSING, trainable=False)
    outputs = layer(images)
    layer.set_weights([matrix[None, None].astype(np.float32), black.astype(np.float32)])
    return outputs
