"""Tests LiteRT files as other tools write them: layouts, integers, and kinds of scores."""

import os

import numpy as np
import pytest
import tensorflow as tf

from elastic.compat.keras_stack import KERAS_3
from elastic.errors import UserError
from elastic.export import litert
from elastic.export.litert import LiteRTModel
from elastic.export.saving import write_litert
from small_models import DATA

SIZE = 24
RED, BLUE = (200, 60, 40), (30, 50, 140)  # what all files here tell apart: classes 0 and 1


def squares():
    """Returns a red and a blue image, (2, S, S, 3) float32."""
    return np.float32([np.full((SIZE, SIZE, 3), colour) for colour in (RED, BLUE)])


def logits(images):
    mean = tf.reduce_mean(tf.cast(images, tf.float32), [1, 2])
    score = 0.03 * (mean[:, 0] - mean[:, 2])
    return tf.stack([score, -score], 1)


def softmax(images):
    return tf.nn.softmax(logits(images))


def of_grey(images):
    """Returns the probabilities by brightness: red is brighter. images: (B, ...)."""
    score = 0.1 * (tf.reduce_mean(images, list(range(1, len(images.shape)))) - 80)
    return tf.nn.softmax(tf.stack([score, -score], 1))


def last(images):
    return tf.transpose(images, [0, 2, 3, 1])


def written(folder, function, shape, kind=tf.float32, integers=None, values=(0, 255)):
    """Writes a LiteRT file of a function; returns its path.

    integers: dtype of inputs and outputs of a file quantised for inputs of these values.
    """
    spec = [tf.TensorSpec(shape, kind)]
    converter = tf.lite.TFLiteConverter.from_concrete_functions([
        tf.function(function, input_signature=spec).get_concrete_function()])
    if integers:
        grid = np.linspace(*values, num=10, dtype=np.float32)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: (
            [np.full(shape, [red, green, blue], np.float32)]
            for red in grid for green in grid[::9] for blue in grid)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = converter.inference_output_type = integers
    path = folder / 'model.tflite'
    path.write_bytes(converter.convert())
    return str(path)


COLOUR, GREY = (1, SIZE, SIZE, 3), (1, SIZE, SIZE, 1)
FILES = {
    'logits': (logits, COLOUR),
    'free batch': (softmax, (None,) + COLOUR[1:]),
    'batch of 4': (softmax, (4,) + COLOUR[1:]),
    'oblong, channels first': (lambda x: softmax(last(x)), (1, 3, 16, 40)),
    'grey': (of_grey, GREY), 'grey, channels first': (of_grey, (1, 1, SIZE, SIZE)),
    'grey, no channels': (of_grey, (1, SIZE, SIZE)),
    'log softmax': (lambda x: tf.nn.log_softmax(logits(x)), COLOUR),
    'sigmoids': (lambda x: tf.sigmoid(logits(x)), COLOUR),
    'one sigmoid': (lambda x: tf.sigmoid(2 * logits(x)[:, 1:]), COLOUR),
    'one logit': (lambda x: 2 * logits(x)[:, 1:], COLOUR),
    'scores in a map': (lambda x: softmax(x)[:, None, None], COLOUR),
    'uint8': (softmax, COLOUR, tf.uint8),
    'int8': (lambda x: softmax(tf.cast(x, tf.float32) + 128), COLOUR, tf.int8),
    'float16': (softmax, COLOUR, tf.float16)}
QUICK = ('logits', 'oblong, channels first', 'grey', 'one sigmoid', 'uint8')


@pytest.mark.parametrize('name', [name if name in QUICK else pytest.param(
    name, marks=pytest.mark.thorough) for name in FILES])
def test_a_file_of_another_tool_gives_probabilities(tmp_path, name):
    if name in ('int8', 'float16') and not KERAS_3:
        pytest.skip('the converter of this TensorFlow cannot write such a file')
    model = LiteRTModel(written(tmp_path, *FILES[name]))
    side = 40 if 'oblong' in name else SIZE
    assert model.input_size == side
    images = np.repeat(np.repeat(squares()[:, :1, :1], side, 1), side, 2)
    found = model.probabilities(images)
    assert found.argmax(axis=1).tolist() == [0, 1]
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-3)
    if 'grey' not in name and name != 'sigmoids':
        np.testing.assert_allclose(found, softmax(images), atol=2e-3)


@pytest.mark.parametrize('integers', [tf.uint8, tf.int8])
@pytest.mark.parametrize('values, function', [
    ((0, 255), softmax), ((0, 1), lambda x: softmax(255 * x)),
    ((-1, 1), lambda x: softmax(127.5 * (x + 1)))])
def test_integers_show_which_values_they_stand_for(tmp_path, integers, values, function):
    path = written(tmp_path, function, COLOUR, tf.float32, integers, values)
    found = LiteRTModel(path).probabilities(squares())
    np.testing.assert_allclose(found, softmax(squares()), atol=0.05)


def of_columns(images):
    """Returns probabilities by a Dense layer whose columns differ in size. images: (B, S, S, 3)."""
    kernel = [[0.03, -0.003], [0.0, 0.0], [-0.03, 0.003]]
    return tf.nn.softmax(tf.matmul(tf.reduce_mean(images, [1, 2]), kernel))


def test_one_scale_for_each_column_is_read_or_refused():
    """The file is what `written` made of of_columns on TensorFlow 2.21, as uint8.

    Interpreters before TensorFlow 2.16 read the first scale: they find 0.5 for both classes.
    """
    path = os.path.join(DATA, 'dense_scales.tflite')
    if not KERAS_3:
        with pytest.raises(UserError, match='a scale for each output, of which this interpreter'):
            LiteRTModel(path)
    else:
        np.testing.assert_allclose(LiteRTModel(path).probabilities(squares()),
                                   of_columns(squares()), atol=0.02)


def test_our_own_files_have_one_scale_for_all_columns(tmp_path):
    path, images = str(tmp_path / 'model.tflite'), squares()
    write_litert(path, of_columns, SIZE, 'ab', [image[None] for image in images] * 20)
    interpreter = litert._interpreter(path)
    assert not litert._has_scales(interpreter, interpreter._get_ops_details())
    np.testing.assert_allclose(LiteRTModel(path).probabilities(images), of_columns(images),
                               atol=0.05)


def test_an_image_of_any_size_is_taken(tmp_path):
    model = LiteRTModel(written(tmp_path, softmax, (1, None, None, 3)))
    assert model.input_size is None
    for images in squares(), squares()[:, :20, :20]:
        np.testing.assert_allclose(model.probabilities(images), softmax(images), atol=1e-5)


@pytest.mark.parametrize('function, shape, kind, said', [
    (lambda x: x, (1, 5), None, 'it takes arrays of 1x5, not images'),
    (lambda x: (x, softmax(x)), COLOUR, None, 'it has 1 inputs and 2 outputs'),
    (lambda x: 2 * x, COLOUR, None, 'returns arrays of 24x24x3, not a score for each class'),
    (lambda x: softmax(x + 110), COLOUR, tf.uint8, 'takes values of -124 to 151, and not 0 to')])
def test_a_file_that_is_no_classifier_of_images_is_refused(tmp_path, function, shape, kind, said):
    path = written(tmp_path, function, shape, tf.float32, kind, (-124, 151))
    with pytest.raises(UserError, match=said):
        LiteRTModel(path).probabilities(squares())
