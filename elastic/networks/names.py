"""Checks names of networks and paths of weights before TensorFlow is loaded."""

import os

from elastic.command_line import UserError, nearest, quiet_tensorflow

PAPER_MODELS = ('resnet50', 'vgg16', 'mobilenetv2', 'vit')
MODEL_FILES = ('.keras', '.h5', '.hdf5')


def is_saved(name):
    """Returns whether a model name is the path of a saved model."""
    return name.lower().endswith(MODEL_FILES) or os.path.isdir(name)


def canonical_name(name):
    """Returns a model name, in any case, in the spelling of build_model; a path stays unchanged.

    Loads TensorFlow only for a name that is neither a path nor one of the paper's four. Raises
    UserError with the nearest name for an unknown one.
    """
    if name.lower() in PAPER_MODELS:
        return name.lower()
    if is_saved(name):
        if not (os.path.isfile(name) or os.path.isdir(name)):
            raise UserError("no saved model at '{}'".format(name))
        return name
    quiet_tensorflow()
    from elastic.networks.backbone import applications
    known = sorted(applications())
    for application in known:
        if application.lower() == name.lower():
            return application
    raise UserError("unknown model '{}'{}; allowed: {}, any keras.applications class, or the path "
                    'of a saved Keras model ({} or a folder)'.format(
                        name, nearest(name, list(PAPER_MODELS) + known),
                        ', '.join(PAPER_MODELS), ', '.join(MODEL_FILES)))


def check_weights(weights):
    """Raises UserError unless `weights` is imagenet, none or an existing .npz or .h5 file."""
    if weights in ('imagenet', 'none'):
        return
    if not os.path.isfile(weights):
        raise UserError("no weights file at '{}'; allowed: imagenet, none, or the path of a .npz "
                        'or .h5 file'.format(weights))
    if not weights.lower().endswith(('.npz', '.h5')):
        raise UserError("weights file '{}' is neither a .npz of this project nor a .h5 of "
                        'keras.applications'.format(weights))
