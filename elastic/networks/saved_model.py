"""Turns a saved Keras model into a classifier that can be trained."""

import re
import textwrap
import warnings
import zipfile

import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.backbone import PREPROCESSING, Backbone, classifier
from elastic.networks.heads import features_of
from elastic.networks.model_files import check_model, unknown
from elastic.networks.stages import STANDARDISED, head_of, pooled

MOST_TEXT = 300  # characters of an error of Keras in one line


def from_saved_model(path, input_shape, num_classes, bn_statistics, trust=False,
                     keep_frozen=False, pool=None):
    """Returns a classifier made from a saved model, of this project or any other.

    A network that ends in features (a map, or a vector) gets a new head. One that ends in scores of
    `num_classes` classes keeps its own; one for another number gets a new one, with a warning.
    input_shape, num_classes, bn_statistics: as for models.build_model.
    trust: whether the model may hold code, which then runs (model_files.py).
    keep_frozen: whether layers that were frozen before saving stay frozen.
    pool: what the head reads, as in _pooled; None: the output of the network.
    Raises UserError if there is code and no trust, and for a model that cannot be used.
    """
    model = load_saved(path, trust, input_shape)
    if not keep_frozen:
        _unfreeze(model)
    keras_stack.weights_were_set(model)  # on loading an .h5 file Keras may leave it out
    ours = [layer for layer in model.layers if isinstance(layer, Backbone)]
    train = bn_statistics == 'train'
    if ours:
        ours[0].set_statistics(train)
    if pool is not None:
        return _pooled(path, model, input_shape, num_classes, bn_statistics, pool)
    features = features_of(path, model, num_classes)
    if features is not None and ours:
        model = keras.Model(features.inputs, keras.layers.Dense(num_classes, name='head')(
            features.outputs[0]))
    elif features is not None:
        model = classifier(features, None, input_shape, num_classes, bn_statistics)
    elif not ours:
        inputs = keras.Input(input_shape)
        model = keras.Model(inputs, Backbone(model, None, train, name='backbone')(inputs))
    if not model.trainable_weights:
        raise UserError("all layers of '{}' are frozen: leave --keep_frozen out".format(path)
                        if keep_frozen else "'{}' has no weights to train".format(path))
    return model


def _pooled(path, model, input_shape, num_classes, bn_statistics, pool):
    """Returns a classifier of pooled features.

    pool: (head, most) of stages.pooled. A network that has such features keeps them, and the
    weights of its head if they fit.
    """
    before = head_of(model)
    features = features_of(path, model, num_classes, replaced=True)
    fits, head = model.outputs[0].shape[-1] == num_classes, model.layers[-1]
    ours = [layer for layer in features.layers if isinstance(layer, Backbone)]
    base, preprocessing = (ours[0].base, ours[0].preprocessing) if ours else (features, None)
    if before is None:
        base = pooled(base, *pool)
    elif before != pool[0]:
        raise UserError("the head of '{0}' was made by --head {1}: use --head {1}".format(
            path, before))
    found = classifier(base, preprocessing, input_shape, num_classes, bn_statistics)
    if before is not None and fits:
        found.layers[-1].set_weights(head.get_weights())
    elif features is not model and fits:
        warnings.warn("the head of '{}' was replaced, by --head {} or --head_start".format(
            path, pool[0]))
    return found


def _unfreeze(model):
    """Makes all layers trainable, but for preprocessing and standardisation of our own."""
    layers = [model] + keras_stack.flat_layers(model)
    for layer in layers:
        layer.trainable = True
    for layer in layers:  # afterwards, because in Keras 2 a model sets its layers, too
        if layer.name in (PREPROCESSING, STANDARDISED):
            layer.trainable = False


def count_trainable(model):
    """Returns the number of tensors that would be trainable if no layer was frozen."""
    layers = [model] + keras_stack.flat_layers(model)
    return sum(len(keras_stack.own_variables(layer)) for layer in layers
               if layer.name != PREPROCESSING)


def load_saved(path, trust=False, input_shape=None):
    """Returns the saved Keras model at `path`; raises UserError as from_saved_model does."""
    if not keras_stack.KERAS_3 and path.endswith('.keras') and zipfile.is_zipfile(path):
        raise UserError("'{}' was written by a newer Keras than that of TensorFlow {}: use the "
                        'TensorFlow that wrote it, or make the model with this one and save it as '
                        '.h5'.format(path, tf.__version__))
    try:
        if not trust:
            check_model(path)
        model = keras_stack.without_dicts(keras_stack.load_model(path, trust))
    except Exception as error:
        raise error if isinstance(error, UserError) else _readable(path, error)
    fault = _fault(model, input_shape)
    if fault is not None:
        raise UserError("'{}' {}".format(path, fault))
    return model


def _readable(path, error):
    """Returns the UserError for an error of Keras while it loads a model."""
    text = ' '.join(str(error).split('Exception encountered: ')[-1].split())
    missing = re.search(r"(?:Could not locate (?:class|function)|Unknown \w+:?) ['\"]?([\w>]+)",
                        text)
    if missing:
        return unknown(path, missing.group(1))
    return UserError("'{}' is not a saved Keras model that this stack can read: {}".format(
        path, textwrap.shorten(text, MOST_TEXT, placeholder=' ...')))


def _fault(model, input_shape):
    """Returns why a model does not map such images to scores or a feature map; None if it does.

    input_shape: None for any square of pixels.
    """
    inputs, outputs = [getattr(model, ends, None) or [] for ends in ('inputs', 'outputs')]
    if len(inputs) != 1 or len(outputs) != 1:
        return ('has {} inputs and {} outputs; needed is a functional or Sequential model from one '
                'batch of images to one output'.format(len(inputs) or 'unknown',
                                                       len(outputs) or 'unknown'))
    given, output = tuple(inputs[0].shape[1:]), tuple(outputs[0].shape)
    size = next(filter(None, given), None)
    input_shape = input_shape or (size, size, 3)
    shown, wanted = ['x'.join(map(str, shape)) for shape in (given, input_shape)]
    if len(given) != 3 or given[2] not in (None, input_shape[2]):
        first = ': put keras.layers.Permute((3, 1, 2)) in front of it' * (given[:1] == (3,))
        return ('takes arrays of {}; needed is a model of colour images, height x width x 3{}'
                .format(shown, first))
    if any(own not in (None, asked) for own, asked in zip(given, input_shape)):
        if len(set(given[:2]) - {None}) > 1:
            return ('takes images of {}, but all are squares here: put keras.layers.Resizing({}, '
                    '{}) in front of it, and set --input_size'.format(shown, *given))
        return 'takes images of {}, not {}: set --input_size {}'.format(
            shown, wanted, given[0] or given[1])
    fixed = inputs[0].shape[0] or output[0]
    try:
        taken = fixed and model(keras.Input(given, fixed + 1)).shape[0] - 1
    except Exception:  # of any layer
        taken = None
    if taken != fixed:
        return ('computes only on {} image(s) at once, by the shape in one of its layers: build it '
                'without that number, from keras.Input({})'.format(fixed, given))
    return None if len(output) in (2, 4) else (
        'returns arrays of {}; needed is a vector of class scores, or a feature map, for each '
        'image'.format('x'.join(map(str, output[1:]))))
