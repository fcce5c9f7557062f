"""The networks: an ImageNet backbone with frozen BN statistics, pooling, dropout and a new head.

build_model takes the paper's four (resnet50, vgg16, mobilenetv2, vit), any other keras.applications
class by name, or the path of a saved Keras model. Images go in as float32 0..255; the family's own
preprocessing is part of the model.
"""

import os
import warnings

from elastic.command_line import UserError, nearest, quiet_tensorflow
from elastic.files import read_npz, write_npz
from elastic.settings import MODEL, statistics_of

PAPER_MODELS = ('resnet50', 'vgg16', 'mobilenetv2', 'vit')
MODEL_FILES = ('.keras', '.h5', '.hdf5')
WEIGHTS_FORMAT = 'elastic-weights-1'


def application_names():
    """Returns the names of the networks in keras.applications, sorted.

    Imports TensorFlow, which takes seconds: command lines check everything else first.
    """
    quiet_tensorflow()
    from elastic.networks import backbone
    return sorted(backbone.applications())


def is_saved(name):
    """Whether a model's name is the path of a saved model."""
    return name.lower().endswith(MODEL_FILES) or os.path.isdir(name)


def canonical_name(name):
    """Returns the name as build_model takes it; UserError naming the nearest one.

    Case does not matter: 'densenet121' is DenseNet121. Paths of saved models are returned as given.
    Only a name that is neither a path nor one of the paper's four needs TensorFlow.
    """
    if name.lower() in PAPER_MODELS:
        return name.lower()
    if is_saved(name):
        if not os.path.exists(name):
            raise UserError("no saved model at '{}'".format(name))
        return name
    applications = application_names()
    for application in applications:
        if application.lower() == name.lower():
            return application
    raise UserError("unknown model '{}'{}; allowed: {}, any keras.applications class, or the path "
                    'of a saved Keras model ({} or a folder)'.format(
                        name, nearest(name, list(PAPER_MODELS) + applications),
                        ', '.join(PAPER_MODELS), ', '.join(MODEL_FILES)))


def check_weights(weights):
    """`weights` itself if it is imagenet, none or an existing file; UserError otherwise."""
    if weights in ('imagenet', 'none') or os.path.isfile(weights):
        return weights
    raise UserError("no weights file at '{}'; allowed: imagenet, none, or the path of a .npz or "
                    '.h5 file'.format(weights))


def build_model(name, input_shape, num_classes, weights=MODEL.weights,
                alpha=MODEL.alpha, bn_statistics=None, trust=False):
    """A classifier that ends in logits, every tensor trainable.

    name: resnet50, vgg16, mobilenetv2, vit, a keras.applications class, or a saved model's path.
    input_shape: (height, width, 3).
    weights: 'imagenet'; 'none' (random); the path of a portable .npz of this project, from either
        stack (a head for another number of classes is replaced by a new one, and said so), or of a
        .h5 file of keras.applications weights without top.
    alpha: width multiplier of the MobileNet families.
    bn_statistics: 'frozen' (batch normalization uses its moving statistics and never changes them;
        gamma and beta still train; dropout inside the base is off), 'train' (batch statistics,
        moving ones updated), or None: see settings.statistics_of.
    trust: run the code in a saved model that has some, see backbone.from_saved_model.
    Returns a keras.Model: (B, H, W, 3) float32 in 0..255 -> (B, num_classes) float32.
    Raises UserError for a name, size, weights file or class count that cannot be used.
    """
    from elastic.compat import keras_stack
    from elastic.networks import backbone
    name = canonical_name(name)
    check_weights(weights)
    bn_statistics = statistics_of(weights, bn_statistics)
    if is_saved(name):
        if weights == 'none' or weights.lower().endswith('.h5'):
            raise UserError("the saved model '{}' brings its weights: leave --weights {} out, or "
                            'give a .npz of this project'.format(name, weights))
        model = backbone.from_saved_model(name, input_shape, num_classes, bn_statistics, trust)
        keras_stack.weights_were_set(model)  # on loading an .h5 file Keras may leave it out
    else:
        start = weights if weights == 'imagenet' or weights.lower().endswith('.h5') else None
        base, preprocessing = backbone.build_base(name, input_shape, start, alpha)
        model = backbone.classifier(base, preprocessing, input_shape, num_classes, bn_statistics)
    if weights.lower().endswith('.npz'):
        load_weights(model, weights)
    elif weights not in ('imagenet', 'none') and not weights.lower().endswith('.h5'):
        raise UserError("weights file '{}' is neither a .npz of this project nor a .h5 of "
                        'keras.applications'.format(weights))
    return model


def save_weights(model, path):
    """Writes a portable .npz: trainable arrays, then BN statistics, in variable order with names.

    Both Keras stacks list variables in one order, so that either reads the other's file. The file
    appears whole or not at all.
    """
    from elastic.compat.keras_stack import variable_name
    arrays = {}
    for kind, variables in _kinds(model):
        for i, variable in enumerate(variables):
            arrays['{}/{:05d}/{}'.format(kind, i, variable_name(variable))] = variable
    write_npz(path, WEIGHTS_FORMAT, arrays)


def load_weights(model, path):
    """Reads a file of save_weights into the model; nothing is assigned unless everything fits.

    A head (the last two trainable arrays) of another width is left freshly initialised, with a
    warning: that is a network trained on other classes. Any other mismatch raises UserError, which
    names each of them. Arrays are loaded without pickle.
    """
    from elastic.compat.keras_stack import variable_name, weights_were_set
    stored = read_npz(path, WEIGHTS_FORMAT)
    assignments, mismatches = [], []
    for kind, variables in _kinds(model):
        arrays = [(key.split('/', 2)[2], stored[key]) for key in sorted(stored)
                  if key.startswith(kind + '/')]
        if len(arrays) != len(variables):
            mismatches.append('{} {} arrays in the file, {} in the model'.format(
                len(arrays), kind, len(variables)))
        for variable, (name, array) in zip(variables, arrays):
            own = variable_name(variable)
            if tuple(variable.shape) != array.shape or own.split('/')[-1] != name.split('/')[-1]:
                mismatches.append('{} {} in the file, {} {} in the model'.format(
                    name, 'x'.join(map(str, array.shape)), own, 'x'.join(map(str, variable.shape))))
            else:
                assignments.append((variable, array))
    head = [variable_name(v) for v in model.trainable_variables[-2:]]
    new_head = [m for m in mismatches if any(', {} '.format(name) in m for name in head)]
    if mismatches and len(new_head) == len(mismatches) and len(new_head) <= 2:
        warnings.warn('{}: trained on other classes, the head starts anew ({})'.format(
            path, '; '.join(new_head)))
    elif mismatches:
        raise UserError("'{}' holds weights of another architecture ({} mismatches):\n  {}".format(
            path, len(mismatches), '\n  '.join(mismatches)))
    for variable, array in assignments:
        variable.assign(array)
    weights_were_set(model)


def _kinds(model):
    return (('trainable', model.trainable_weights), ('statistics', model.non_trainable_weights))
