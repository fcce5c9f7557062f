"""Writes a LiteRT (TensorFlow Lite) file of a trained network, and runs such a file.

Running one needs no TensorFlow: an interpreter (ai-edge-litert or tflite-runtime) and NumPy do.
"""

import os
import re
import warnings
import zipfile

import numpy as np

from elastic.compat.start import quiet, quiet_tensorflow
from elastic.errors import UserError, first_line
from elastic.export.tensors import arranged, as_input, as_probabilities, layout_of, maker_of
from elastic.files import names_in, printable

FILE = 'model.tflite'
MOST_LABELS = 10 ** 7  # bytes
LABELS = 'labels.txt'  # inside the file, where TensorFlow Lite's metadata keep class names
CALIBRATION_IMAGES = 100


def check_converter():
    """Raises UserError if this TensorFlow cannot write LiteRT files."""
    import tensorflow as tf
    if not hasattr(getattr(tf, 'lite', None), 'TFLiteConverter'):
        raise UserError('--export needs the LiteRT converter, which TensorFlow {} of this machine '
                        'lacks: use --save_model, and convert the model elsewhere'.format(
                            tf.__version__))


def write_litert(path, probabilities, input_size, class_names, calibration=None, kind=''):
    """Writes a LiteRT file: images (1, S, S, 3) float32 in 0..255 -> (1, C) float32 probabilities.

    probabilities: function of a batch of images, as from scores.probabilities_of.
    class_names: go into the file as LABELS, one a line: `unzip model.tflite labels.txt`.
    calibration: iterable of (1, S, S, 3) float32 training images; with them, weights and
    activations become int8, and inputs and outputs stay float32. kind: the last bytes of the file.
    Raises UserError if LiteRT cannot express the network.
    """
    import tensorflow as tf
    signature = [tf.TensorSpec((1, input_size, input_size, 3), tf.float32, name='images')]
    function = tf.function(probabilities, input_signature=signature).get_concrete_function()
    if calibration is not None and b'While' in function.graph.as_graph_def().SerializeToString():
        raise UserError('LiteRT cannot express loops, as of recurrent layers, in int8: use '
                        '--export litert')  # the converter would end the process
    with quiet(after_error=True), quiet(after_error=True, descriptor=1):
        converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
        if calibration is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.representative_dataset = lambda: ([image] for image in calibration)
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            # Older interpreters and those of microcontrollers read one scale of a Dense layer.
            converter._experimental_disable_per_channel_quantization_for_dense_layers = True
        try:
            content = converter.convert()
        except Exception as error:  # of many types
            ops = re.search(r'(?:Select|Flex|Custom) ops: *([\w, ]+)', str(error))
            raise UserError('LiteRT cannot express {} of this network{}: leave --export out, or '
                            'use --save_model'.format(
                                ops.group(1).strip() if ops else first_line(error),
                                ', which computes in float16' * ('xf16>' in str(error))))
    with open(path, 'wb') as file:
        file.write(content)
    with zipfile.ZipFile(path, 'a') as archive:
        archive.comment = kind.encode()
        # ZipInfo: else the time is that of the clock, and must not be before 1980.
        archive.writestr(zipfile.ZipInfo(LABELS), ''.join(
            printable(name) + '\n' for name in class_names))


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
