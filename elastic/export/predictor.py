"""Predicts the classes of images with a run, a saved Keras model, or a LiteRT file."""

import os

from elastic.compat.start import quiet_tensorflow
from elastic.errors import UserError
from elastic.export import litert
from elastic.files import names_in

CHECKPOINT = 'checkpoint'  # the folder of the next three, within that of a run
WEIGHTS = 'weights.npz'
KERAS_FILES = ('model.keras', 'model.h5')  # of Keras 3 and 2
CLASS_NAMES = 'class_names.txt'  # beside a saved model, one a line, in the order of its outputs
AT_ONCE = 32  # images in a batch


class KerasModel:
    """Runs a saved Keras model. class_names: from the file beside it, else None. input_size: S."""

    def __init__(self, path, trust):
        quiet_tensorflow()
        from elastic.networks.saved_model import load_saved
        self.model = load_saved(path, trust)
        self.input_size = self.model.input_shape[1]
        names = os.path.join(os.path.dirname(path), CLASS_NAMES)
        self.class_names = None
        if os.path.isfile(names):
            with open(names, 'rb') as file:
                self.class_names = names_in(file.read())
        self._probabilities = probabilities_of(self.model)

    def probabilities(self, images):
        """Returns (B, C) float32 for images, (B, S, S, 3) in 0..255."""
        return self._probabilities(images).numpy()


def probabilities_of(model):
    """Returns a tf.function from images, (B, S, S, 3) float32 in 0..255, to (B, C) float32.

    It adds the softmax that a model without one needs.
    """
    import tensorflow as tf

    from elastic.steps.training_step import class_probabilities
    return tf.function(lambda images: class_probabilities(model(images, training=False)))


def open_predictor(path, input_size=None, trust=False):
    """Returns a LiteRTModel or a KerasModel with class names and input size.

    path: of a run's folder, a saved model or a LiteRT file. input_size: S, for a model that takes
    images of any size. Raises UserError if there is none, or if the size is unknown.
    """
    if os.path.exists(os.path.join(path, 'summary.json')):
        path = _saved_by(path)
    if path.lower().endswith('.tflite'):
        found = litert.LiteRTModel(path)
    else:
        if not (os.path.isfile(path) or os.path.isdir(path)):
            raise UserError("no run or model at '{}'".format(path))
        found = KerasModel(path, trust)
    found.input_size = found.input_size or input_size
    if not found.input_size:
        raise UserError("'{}' takes images of any size: give --input_size".format(path))
    return found


def check_names(names, outputs):
    """Raises UserError unless a model has as many class names as outputs, or no names: None."""
    if names is not None and len(names) != outputs:
        raise UserError('the model names {} classes and has {} outputs: save it again, or correct '
                        'its {} or {}'.format(len(names), outputs, CLASS_NAMES, litert.LABELS))


def _saved_by(folder):
    """Returns the path of the model that a run saved."""
    for name in KERAS_FILES + (litert.FILE,):
        path = os.path.join(folder, CHECKPOINT, name)
        if os.path.exists(path):
            return path
    raise UserError("run '{}' saved no model: run its command again with --save_model, which adds "
                    'it without training'.format(folder))
