"""Runs a LiteRT (TensorFlow Lite) file, of this project or of another tool.

This needs no TensorFlow: an interpreter (ai-edge-litert or tflite-runtime) and NumPy do. Files of
other tools differ: channels first, oblong or grey images, integers, logits.
"""

import os
import re
import warnings
import zipfile

import numpy as np

from elastic.compat.start import quiet, quiet_tensorflow
from elastic.errors import UserError
from elastic.files import names_in

FILE = 'model.tflite'
LABELS = 'labels.txt'  # inside the file, where TensorFlow Lite's metadata keep class names
MOST_LABELS = 10 ** 7  # bytes
PASSED_ON = ('DEQUANTIZE', 'QUANTIZE', 'RESHAPE', 'SQUEEZE', 'CAST')  # ops that keep scores


def check_ops(path):
    """Raises UserError if there is no LiteRT file, or one with ops of TensorFlow itself.

    Some of them write files. They are named in the file as Flex and the op, such as FlexWriteFile.
    """
    if not os.path.isfile(path):
        raise UserError("no LiteRT file at '{}'".format(path))
    with open(path, 'rb') as file:
        found = re.search(rb'Flex[A-Z]\w+', file.read())
    if found:
        raise UserError("'{}' holds the op {}, which may do more than compute: convert the model "
                        'without select TensorFlow ops'.format(path, found.group().decode()[:60]))


class LiteRTModel:
    """Runs a LiteRT file, also of another tool.

    class_names: from the file, else None. input_size: S of the images it is given; None: any.
    """

    def __init__(self, path):
        check_ops(path)
        try:
            self._interpreter = _interpreter(path)
            ends = self._interpreter.get_input_details(), self._interpreter.get_output_details()
            if [len(end) for end in ends] != [1, 1]:
                raise UserError('it has {} inputs and {} outputs'.format(*map(len, ends)))
            (self._input,), (self._output,) = ends
            self._layout = layout_of(self._input['shape_signature'])
        except (IndexError, ValueError, RuntimeError) as error:
            raise UserError("'{}' is no LiteRT file from images to class scores ({})".format(
                path, ' '.join(str(error).split())[:200]))
        ops = self._interpreter._get_ops_details()
        if _reads_one_scale(self._interpreter) and _has_scales(self._interpreter, ops):
            raise UserError("'{}' has integer weights of a Dense layer with a scale for each "
                            'output, of which this interpreter reads one: install ai-edge-litert, '
                            'or convert the model with one scale'.format(path))
        self._maker = maker_of(self._output['index'], ops)
        self.input_size = None if -1 in self._layout else max(self._layout[:2])
        self.class_names = None
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if LABELS in archive.namelist() and (
                        archive.getinfo(LABELS).file_size <= MOST_LABELS):
                    self.class_names = names_in(archive.read(LABELS))

    def probabilities(self, images):
        """Returns (B, C) float32 for images, (B, S, S, 3) in 0..255."""
        scores = np.array([self._scores(image) for image in np.asarray(images, np.float32)])
        return as_probabilities(scores, self._maker)

    def _scores(self, image):
        """Returns the (C,) float32 scores of one image, (S, S, 3) float32."""
        model, index = self._interpreter, self._input['index']
        image = as_input(arranged(image, *self._layout), self._input['dtype'],
                         *self._input['quantization'])
        if -1 in self._layout:
            model.resize_tensor_input(index, (1,) + image.shape)
            model.allocate_tensors()
        model.set_tensor(index, np.resize(image, model.get_input_details()[0]['shape']))
        model.invoke()
        scores = model.get_tensor(self._output['index'])
        scale, zero = self._output['quantization']
        scores = np.squeeze(scores if scores.ndim == 1 else scores[0])  # of the first image
        if scores.ndim > 1:
            raise UserError('the file returns arrays of {}, not a score for each class'.format(
                'x'.join(map(str, scores.shape))))
        return np.atleast_1d((np.float32(scores) - zero) * (scale or 1))


def _reads_one_scale(interpreter):
    """Returns whether an interpreter is of TensorFlow before 2.16, as all of tflite_runtime are."""
    package = type(interpreter).__module__.split('.')[0]
    if package == 'tensorflow':
        from elastic.compat.keras_stack import KERAS_3
        return not KERAS_3
    return package == 'tflite_runtime'


def _has_scales(interpreter, ops):
    """Returns whether the weights of a Dense layer have several scales."""
    tensors = {tensor['index']: tensor for tensor in interpreter.get_tensor_details()}
    return any(len(tensors[op['inputs'][1]]['quantization_parameters']['scales']) > 1
               for op in ops if op['op_name'] == 'FULLY_CONNECTED')


def _interpreter(path):
    """Returns the interpreter of the smallest package that has one."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        try:
            from tflite_runtime.interpreter import Interpreter
        except ImportError:
            quiet_tensorflow()
            import tensorflow as tf
            Interpreter = tf.lite.Interpreter
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # TensorFlow's says that ai_edge_litert will replace it
        interpreter = Interpreter(path)
        interpreter.allocate_tensors()
    return interpreter


# ---------------------------------------------------------------- images in, scores out

def layout_of(shape):
    """Returns (height, width, channels, whether these come first) of an input; -1: any size."""
    sizes = [int(size) for size in shape[1:]] + [1] * (len(shape) == 3)  # grey, without its axis
    if len(sizes) == 3 and sizes[2] in (1, 3):
        return tuple(sizes) + (False,)
    if len(sizes) == 3 and sizes[0] in (1, 3):
        return sizes[1], sizes[2], sizes[0], True
    raise UserError('it takes arrays of {}, not images'.format('x'.join(map(str, shape))))


def arranged(image, height, width, channels, first):
    """Returns an (S, S, 3) float32 image in a layout: (H, W, C) or, with `first`, (C, H, W)."""
    shape = [len(image) if size < 0 else size for size in (height, width)] + [channels]
    if list(image.shape) != shape:
        from PIL import Image
        image = Image.fromarray(np.uint8(np.rint(image))).convert('L' if channels == 1 else 'RGB')
        image = np.float32(image.resize(shape[1::-1], Image.BILINEAR)).reshape(shape)
    return image.transpose(2, 0, 1) if first else image


def as_input(image, kind, scale, zero):
    """Returns an image of values 0 to 255 as the numbers that an input of this dtype takes.

    scale, zero: value = scale * (number - zero); scale 0: numbers are values. The values that
    integers can stand for show whether the network takes 0 to 255, 0 to 1, or -1 to 1.
    """
    if not np.issubdtype(kind, np.integer) or not scale:
        return (image - 128 if kind == np.int8 else image).astype(kind)
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    low, high = scale * (least - zero), scale * (most - zero)
    centred = abs(low + high) < 0.1 * high
    if low < -0.1 * high and not centred:
        raise UserError('the file takes values of {:.3g} to {:.3g}, and not 0 to 255, 0 to 1, or '
                        '-1 to 1: convert it with its preprocessing inside'.format(low, high))
    if high < 2:
        image = image / 127.5 - 1 if centred else image / 255
    return np.clip(np.rint(image / scale + zero), least, most).astype(kind)


def maker_of(tensor, ops):
    """Returns the name of the op that made the scores in this tensor, by its number; else None.

    ops: of the interpreter's _get_ops_details.
    """
    makers = {output: op for op in ops if op['op_name'] != 'DELEGATE' for output in op['outputs']}
    while tensor in makers and makers[tensor]['op_name'] in PASSED_ON:
        tensor = makers[tensor]['inputs'][0]
    return makers[tensor]['op_name'] if tensor in makers else None


def as_probabilities(scores, maker):
    """Returns (B, C) float32 scores as probabilities; those of a sigmoid stay. maker: of maker_of.

    A single score is that of the second of two classes.
    """
    if scores.shape[1] == 1:
        scores = np.hstack([1 - scores if maker == 'LOGISTIC' else 0 * scores, scores])
    if maker in ('SOFTMAX', 'LOGISTIC') or (
            scores.min() >= 0 and np.allclose(scores.sum(axis=1), 1, atol=1e-3)):
        return scores
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))  # also of LOG_SOFTMAX
    return powers / powers.sum(axis=1, keepdims=True)
