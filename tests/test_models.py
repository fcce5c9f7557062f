"""Tests build_model: preprocessing, variables, vit, and refusals."""

import json

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import models
from elastic.errors import UserError
from elastic.networks.backbone import statistics_from_batch
from small_models import MOBILENET_VARIABLES, backbones, described, photos, values


@pytest.fixture(scope='module')
def mobilenet():
    return models.build_model('mobilenetv2', (32, 32, 3), 5, 'none', alpha=0.35)


def test_preprocessing_of_the_family_is_part_of_the_model(mobilenet):
    images = tf.constant(photos())
    assert len(mobilenet.trainable_variables) == 158
    statistics_from_batch(mobilenet, images)  # otherwise features vanish, and errors with them
    logits = mobilenet(images, training=False).numpy()
    assert logits.shape == (4, 5) and logits.dtype == np.float32
    base, (kernel, bias) = backbones(mobilenet)[0].base, values(mobilenet.trainable_variables[-2:])

    def by_hand(inputs):
        return base(inputs, training=False).numpy().mean(axis=(1, 2)) @ kernel + bias
    preprocessed = keras.applications.mobilenet_v2.preprocess_input(tf.identity(images))
    scale = np.abs(logits).max()
    assert scale > 1e-2
    np.testing.assert_allclose(by_hand(preprocessed), logits, atol=1e-4 * scale)
    assert np.abs(by_hand(images) - logits).max() > 0.1 * scale


def test_resnet50_has_the_preprocessing_of_its_family():
    model = models.build_model('ResNet50', (32, 32, 3), 4, 'none')
    assert len(model.trainable_variables) == 214 and backbones(model)[0].preprocessing == 'resnet'


def test_mobilenetv2_has_the_same_variables_on_both_stacks(mobilenet):
    with open(MOBILENET_VARIABLES) as stored:
        expected = json.load(stored)
    assert described(mobilenet) == expected


def test_a_width_multiplier_is_refused_where_the_family_has_none():
    with pytest.raises(UserError, match='--alpha 0.5 is for the MobileNet families'):
        models.build_model('vgg16', (32, 32, 3), 3, 'none', alpha=0.5)


def test_a_failed_download_names_the_file_and_its_folder(tmp_path, monkeypatch):
    for name, value in (('HOME', str(tmp_path)), ('KERAS_HOME', str(tmp_path / 'elsewhere')),
                        ('http_proxy', 'http://127.0.0.1:9'), ('no_proxy', ''),
                        ('https_proxy', 'http://127.0.0.1:9')):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        models.build_model('mobilenetv2', (96, 96, 3), 3, 'imagenet', alpha=0.35)
    folder = tmp_path / 'elsewhere' / 'models'
    assert ('put mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_96_no_top.h5 into {} by hand'
            .format(folder)) in str(error.value)
    assert '--weights none' in str(error.value) and folder.is_dir()


def test_vit_refuses_sizes_that_its_patches_do_not_fill():
    pytest.importorskip('vit_keras')
    with pytest.raises(UserError, match='multiples of 16, not 40'):
        models.build_model('vit', (40, 40, 3), 3, 'none')
