"""Tests LiteRT files: their outputs, class names, quantisation, and files that are none."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from elastic.errors import UserError
from elastic.export.litert import LABELS, LiteRTModel
from elastic.export.plain import plain_model
from elastic.export.predictor import probabilities_of
from elastic.export.saving import check_converter, write_litert
from small_models import SMALL, photos, small_classifier, user_classifier

NAMES = ('cat', 'dog', 'maçã')


@pytest.mark.parametrize('build', [small_classifier, user_classifier], ids=['logits', 'softmax'])
def test_a_file_gives_the_probabilities_of_the_model(tmp_path, build):
    model, path = build(), str(tmp_path / 'model.tflite')
    predict, images = probabilities_of(model), photos(SMALL, batch=3)
    write_litert(path, predict, SMALL[0], NAMES)
    file = LiteRTModel(path)
    assert file.input_size == SMALL[0] and file.class_names == list(NAMES)
    found = file.probabilities(images)
    np.testing.assert_allclose(found, predict(images), atol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [LABELS]


def test_int8_is_smaller_and_near(tmp_path):
    model = plain_model(small_classifier(filters=64))
    predict, images = probabilities_of(model), photos(SMALL, batch=20)
    sizes = []
    for name, calibration in (('float', None), ('int8', [image[None] for image in images])):
        path = tmp_path / name
        write_litert(str(path), predict, SMALL[0], NAMES, calibration)
        sizes.append(path.stat().st_size)
    assert sizes[1] < sizes[0]
    found = LiteRTModel(str(path)).probabilities(images)
    assert np.abs(found - predict(images)).max() < 0.05
    assert not np.array_equal(found, predict(images))


def test_the_predictor_imports_no_tensorflow():
    """A device may have the interpreter alone."""
    check = 'import sys, elastic.export.predictor; assert "tensorflow" not in sys.modules'
    subprocess.run([sys.executable, '-c', check], check=True)


def test_export_is_refused_where_tensorflow_has_no_converter(monkeypatch):
    check_converter()
    monkeypatch.setattr(tf, 'lite', None)
    with pytest.raises(UserError, match='--export needs the LiteRT converter'):
        check_converter()


@pytest.mark.parametrize('content', [b'', b'not a model', bytes(1000)])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    path = tmp_path / 'model.tflite'
    path.write_bytes(content)
    with pytest.raises(UserError, match='is no LiteRT file'):
        LiteRTModel(str(path))
