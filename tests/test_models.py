"""Tests build_model: preprocessing, variables, vit, and refusals."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import models
from elastic.command_line import UserError
from elastic.networks.backbone import statistics_from_batch
from small_models import MOBILENET_VARIABLES, ROOT, backbones, described, photos, values


@pytest.fixture(scope='module')
def mobilenet():
    return models.build_model('mobilenetv2', (32, 32, 3), 5, 'none', alpha=0.35)


@pytest.fixture(scope='module')
def resnet():
    return models.build_model('ResNet50', (32, 32, 3), 4, 'none')


@pytest.mark.parametrize('name, num_classes, tensors, module', [
    ('mobilenet', 5, 158, 'mobilenet_v2'), ('resnet', 4, 214, 'resnet')])
def test_preprocessing_of_the_family_is_part_of_the_model(request, name, num_classes, tensors,
                                                          module):
    model = request.getfixturevalue(name)
    images = tf.constant(photos())
    assert len(model.trainable_variables) == tensors
    statistics_from_batch(model, images)  # otherwise features vanish, and errors with them
    logits = model(images, training=False).numpy()
    assert logits.shape == (4, num_classes) and logits.dtype == np.float32

    base, (kernel, bias) = backbones(model)[0].base, values(model.trainable_variables[-2:])

    def by_hand(inputs):
        return base(inputs, training=False).numpy().mean(axis=(1, 2)) @ kernel + bias
    preprocessed = getattr(keras.applications, module).preprocess_input(tf.identity(images))
    scale = np.abs(logits).max()
    assert scale > 1e-2
    np.testing.assert_allclose(by_hand(preprocessed), logits, atol=1e-4 * scale)
    assert np.abs(by_hand(images) - logits).max() > 0.1 * scale


def test_mobilenetv2_has_the_same_variables_on_both_stacks(mobilenet):
    with open(MOBILENET_VARIABLES) as stored:
        expected = json.load(stored)
    assert described(mobilenet) == expected


def test_an_input_too_small_for_the_network_is_a_user_error():
    with pytest.raises(UserError, match='resnet50 cannot take images of 16x16'):
        models.build_model('resnet50', (16, 16, 3), 3, 'none')


def test_a_width_multiplier_is_refused_where_the_family_has_none():
    with pytest.raises(UserError, match='--alpha 0.5 is for the MobileNet families'):
        models.build_model('vgg16', (32, 32, 3), 3, 'none', alpha=0.5)


@pytest.mark.parametrize('keras_home', [None, 'elsewhere'])
def test_a_failed_download_names_the_file_and_its_folder(tmp_path, keras_home):
    """Keras creates the folder for the download itself, so it finds a file put there."""
    env = dict(os.environ, HOME=str(tmp_path), http_proxy='http://127.0.0.1:9',
               https_proxy='http://127.0.0.1:9', no_proxy='')
    env.pop('KERAS_HOME', None)
    if keras_home:
        env['KERAS_HOME'] = str(tmp_path / keras_home)
    code = ('from elastic.command_line import quiet_tensorflow; quiet_tensorflow()\n'
            'import models, os, re\n'
            'try:\n'
            '    models.build_model("mobilenetv2", (96, 96, 3), 3, "imagenet", alpha=0.35)\n'
            'except models.UserError as error:\n'
            '    folder = re.search("no_top.h5 into (.*) by hand", str(error)).group(1)\n'
            '    print(error)\n'
            '    print(os.listdir(os.path.expanduser(folder)))')
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE, universal_newlines=True)
    assert result.returncode == 0, result.stderr[-500:]
    message = result.stdout.split('\n')[-3]
    assert 'put mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_96_no_top.h5 into' in message
    assert '--weights none' in message


def test_vit_has_200_trainable_tensors():
    pytest.importorskip('vit_keras')
    model = models.build_model('vit', (32, 32, 3), 3, 'none')
    assert len(model.trainable_variables) == 200
    assert model(tf.constant(photos(batch=2)), training=False).shape == (2, 3)


def test_vit_refuses_sizes_that_its_patches_do_not_fill():
    pytest.importorskip('vit_keras')
    with pytest.raises(UserError, match='multiples of 16, not 40'):
        models.build_model('vit', (40, 40, 3), 3, 'none')
