"""Saves a trained network for use elsewhere."""

import errno
import os
import re
import shutil
import tempfile
import types
import warnings
import zipfile
from unittest import mock

import numpy as np
import tensorflow as tf

from elastic.compat.keras_stack import MODEL_FILE
from elastic.compat.start import quiet
from elastic.errors import UserError, first_line
from elastic.export.litert import FILE, LABELS, LiteRTModel
from elastic.export.plain import foreign_layers, plain_model
from elastic.export.predictor import CLASS_NAMES, WEIGHTS, probabilities_of
from elastic.files import printable, whole, whole_folder
from elastic.networks.weights import save_weights

INT8 = 'litert_int8'
CALIBRATION_IMAGES = 100
LOST = 0.02  # of accuracy; if int8 loses more, a warning says so
# Stands for the module `time`: files in a zip archive have no time before 1980.
YEAR_1980 = types.SimpleNamespace(time=int, localtime=lambda _: (1980, 1, 1, 0, 0, 0))


def check_converter():
    """Raises UserError if this TensorFlow cannot write LiteRT files."""
    if not hasattr(getattr(tf, 'lite', None), 'TFLiteConverter'):
        raise UserError('--export needs the LiteRT converter, which TensorFlow {} of this machine '
                        'lacks: use --save_model, and convert the model elsewhere'.format(
                            tf.__version__))


def write_litert(path, probabilities, input_size, class_names, calibration=None, kind=''):
    """Writes a LiteRT file: images (1, S, S, 3) float32 in 0..255 -> (1, C) float32 probabilities.

    probabilities: function of a batch of images, as from probabilities_of.
    class_names: go into the file as LABELS, one a line: `unzip model.tflite labels.txt`.
    calibration: iterable of (1, S, S, 3) float32 training images; with them, weights and
    activations become int8, and inputs and outputs stay float32. kind: the last bytes of the file.
    Raises UserError if LiteRT cannot express the network.
    """
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


def check_export(model, kind):
    """Raises UserError unless this network, trained or not, can become a LiteRT file.

    kind: one of settings.EXPORTS.
    """
    check_converter()
    noise = np.random.RandomState(0).uniform(0, 255, (1,) + model.input_shape[1:])
    with tempfile.TemporaryDirectory() as folder:
        write_litert(os.path.join(folder, FILE), probabilities_of(plain_model(model)),
                     noise.shape[1], (), [noise.astype(np.float32)] if kind == INT8 else None)


def keep_weights(folder, model, class_names):
    """Writes a new folder, whole: WEIGHTS for each stack, and CLASS_NAMES in output order."""
    with whole_folder(folder) as new:
        save_weights(model, os.path.join(new, WEIGHTS))
        with open(os.path.join(new, CLASS_NAMES), 'w', encoding='utf-8') as file:
            file.writelines(printable(name) + '\n' for name in class_names)


def save_network(folder, model, class_names, kind=None, dataset=None):
    """Adds the model to a folder of keep_weights; prints what the folder then holds.

    MODEL_FILE: a plain Keras model of this stack's Keras, from images in 0..255 to the outputs of
    `model`. kind: one of settings.EXPORTS, to add a LiteRT file too, or None. dataset:
    datasets.Dataset, for calibration.
    Raises OSError before it writes the model if there is too little room.
    """
    plain = plain_model(model)
    foreign = foreign_layers(plain)
    if foreign:
        warnings.warn('{} holds layers that do not come with Keras: {}'.format(
            MODEL_FILE, ', '.join(foreign)))
    needed = 2 ** 20 + 1.5 * os.path.getsize(os.path.join(folder, WEIGHTS))
    if shutil.disk_usage(folder).free < needed:  # HDF5 would end in a traceback
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
    ending = os.path.splitext(MODEL_FILE)[1]  # without it, Keras refuses the name
    with whole(os.path.join(folder, MODEL_FILE), ending=ending) as part, (
            mock.patch.object(zipfile, 'time', YEAR_1980)):  # the clock may be before it
        plain.save(part)
    if kind is not None:
        calibration = [images.numpy() for images, _ in dataset.calibration(
            CALIBRATION_IMAGES)] if kind == INT8 else None
        with whole(os.path.join(folder, FILE)) as part:
            write_litert(part, probabilities_of(plain), plain.input_shape[1], class_names,
                         calibration, kind)
    print('saved {}: {}'.format(folder, ', '.join(sorted(os.listdir(folder)))))


def report_export(path, kind, dataset, in_float):
    """Prints the test accuracy of a LiteRT file; warns if int8 has lost more than LOST.

    kind: one of settings.EXPORTS. in_float: test accuracy of the network, 0..1.
    """
    from tqdm import tqdm
    predictor, correct = LiteRTModel(path), 0
    for images, labels in tqdm(dataset.test, 'LiteRT', leave=False, disable=None):
        predicted = predictor.probabilities(images.numpy()).argmax(axis=1)
        correct += int(np.sum(predicted == labels.numpy()))
    accuracy = correct / dataset.test_size
    print('{}: test accuracy {:.1f} %, {:.1f} MB'.format(
        path, 100 * accuracy, os.path.getsize(path) / 1e6))
    if kind == INT8 and accuracy < in_float - LOST:
        warnings.warn('int8 has a test accuracy of {:.1f} %, float {:.1f} %: use --export litert'
                      .format(100 * accuracy, 100 * in_float))
