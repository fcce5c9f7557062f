"""Tests that saved models need nothing of this project, and give the same outputs without it."""

import os
import subprocess
import sys

import numpy as np
import pytest

import models
from elastic.compat import keras_stack
from elastic.export.plain import foreign_layers, plain_model
from elastic.networks.backbone import Backbone, classifier
from small_models import (
    SMALL,
    assert_same_values,
    backbones,
    photos,
    saved,
    set_to_distinct_values,
    small_base,
    user_classifier,
    values,
)

# Loads the models in a folder without this project, and writes their outputs there.
ELSEWHERE = '''
import sys, numpy as np
from tensorflow import keras
for name in sys.argv[1:]:
    model = keras.models.load_model(name)
    np.save(name + '.outputs.npy', model.predict(np.load(name + '.npy'), verbose=0))
assert not any(name.split('.')[0] in ('elastic', 'models') for name in sys.modules)
'''


def family(preprocessing):
    return classifier(small_base(), preprocessing, SMALL, 3, 'frozen')


@pytest.mark.thorough
def test_saved_models_give_the_same_outputs_without_this_project(tmp_path):
    built = {
        'caffe_' + keras_stack.MODEL_FILE: family('resnet50'),
        'small_' + keras_stack.MODEL_FILE: models.build_model(
            'MobileNetV3Small', (32, 32, 3), 3, 'none', alpha=0.75)}
    for name, model in built.items():
        np.save(str(tmp_path / (name + '.npy')), photos(model.input_shape[1:]))
        plain_model(model).save(str(tmp_path / name))
    subprocess.run([sys.executable, '-c', ELSEWHERE] + list(built), cwd=str(tmp_path), check=True,
                   env={key: value for key, value in os.environ.items() if key != 'PYTHONPATH'})
    for name, model in built.items():
        np.testing.assert_allclose(
            np.load(str(tmp_path / (name + '.outputs.npy'))),
            model(photos(model.input_shape[1:]), training=False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('preprocessing', [
    None, 'resnet50', 'densenet', 'mobilenet_v2', 'efficientnet'])
def test_preprocessing_of_each_kind_becomes_a_layer(preprocessing):
    model = family(preprocessing)
    set_to_distinct_values(model)
    plain, images = plain_model(model), photos(SMALL)
    assert not [layer for layer in keras_stack.flat_layers(plain) if isinstance(layer, Backbone)]
    assert foreign_layers(plain) == []
    np.testing.assert_allclose(plain(images, training=False), model(images, training=False),
                               rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('build', [user_classifier, small_base])
def test_a_users_model_comes_back_as_plain_as_it_was(build, tmp_path):
    model = models.build_model(saved(build(), tmp_path), SMALL, 3)
    plain, images = plain_model(model), photos(SMALL)
    np.testing.assert_allclose(plain(images, training=False), model(images, training=False),
                               rtol=1e-5)
    assert foreign_layers(plain) == []


def test_a_plain_model_can_be_trained_again_with_frozen_statistics(tmp_path):
    model = family('resnet50')
    again = models.build_model(saved(plain_model(model), tmp_path), SMALL, 3)
    assert len(backbones(again)) == 1
    assert_same_values(values(model.trainable_weights), values(again.trainable_weights))
    before = values(again.non_trainable_weights)
    again(photos(SMALL), training=True)
    assert_same_values(before, values(again.non_trainable_weights))
