"""The networks: names, preprocessing, frozen statistics."""

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
from elastic.compat import keras_stack
from elastic.networks import backbone
from small_models import (
    MOBILENET_VARIABLES,
    ROOT,
    SMALL,
    backbones,
    described,
    photos,
    saved,
    small_base,
    small_classifier,
    train,
    user_classifier,
    values,
)

# --- names


@pytest.mark.parametrize('given, canonical', [
    ('resnet50', 'resnet50'), ('ResNet50', 'resnet50'), ('MobileNetV2', 'mobilenetv2'),
    ('VIT', 'vit'), ('Vgg16', 'vgg16'), ('densenet121', 'DenseNet121'),
    ('NASNETMOBILE', 'NASNetMobile'), ('EfficientNetB0', 'EfficientNetB0')])
def test_names_are_found_whatever_their_case(given, canonical):
    assert models.canonical_name(given) == canonical


@pytest.mark.parametrize('typo, meant', [
    ('resnet5O', 'ResNet50'), ('mobilnetv2', 'MobileNetV2'), ('DenseNet112', 'DenseNet121'),
    ('efficientnet-b0', 'EfficientNetB0')])
def test_a_mistyped_name_is_answered_with_the_nearest_one(typo, meant):
    with pytest.raises(UserError) as error:
        models.canonical_name(typo)
    assert "unknown model '{}' (did you mean '{}'?)".format(typo, meant) in str(error.value)


def test_names_of_the_paper_and_paths_are_checked_without_importing_tensorflow(tmp_path):
    code = ('import sys, models\n'
            'print(models.canonical_name("ResNet50"), models.canonical_name(sys.argv[1]))\n'
            'try:\n'
            '    models.canonical_name("mine.keras")\n'
            'except models.UserError as error:\n'
            '    print(error)\n'
            'print([name for name in ("tensorflow", "keras") if name in sys.modules])')
    output = subprocess.check_output([sys.executable, '-c', code, str(tmp_path)], cwd=ROOT)
    assert output.decode().splitlines() == [
        'resnet50 {}'.format(tmp_path), "no saved model at 'mine.keras'", '[]']


def test_a_missing_saved_model_and_missing_weights_are_told_apart(tmp_path):
    with pytest.raises(UserError, match='no saved model at'):
        models.canonical_name(str(tmp_path / 'mine.keras'))
    with pytest.raises(UserError, match='no weights file at'):
        models.build_model('mobilenetv2', (32, 32, 3), 3, str(tmp_path / 'mine.npz'))


# --- applications


@pytest.fixture(scope='module')
def mobilenet():
    return models.build_model('mobilenetv2', (32, 32, 3), 5, 'none', alpha=0.35)


@pytest.fixture(scope='module')
def resnet():
    return models.build_model('ResNet50', (32, 32, 3), 4, 'none')


@pytest.mark.parametrize('name, num_classes, tensors, module', [
    ('mobilenet', 5, 158, 'mobilenet_v2'), ('resnet', 4, 214, 'resnet')])
def test_the_family_s_preprocessing_is_part_of_the_model(request, name, num_classes, tensors,
                                                         module):
    model = request.getfixturevalue(name)
    images = tf.constant(photos())
    assert len(model.trainable_variables) == tensors
    backbone.statistics_from_batch(model, images)  # else the features vanish, and so would errors
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


def test_variables_of_mobilenetv2_have_the_same_names_shapes_and_order_on_both_stacks(mobilenet):
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
def test_a_failed_download_names_the_file_and_the_folder_that_keras_looks_in(tmp_path, keras_home):
    """The folder is one that Keras made for the download, so a file put there will be found."""
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
            '    folder = re.search("file into (.*) by hand", str(error)).group(1)\n'
            '    print(error)\n'
            '    print(os.listdir(os.path.expanduser(folder)))')
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE, universal_newlines=True)
    assert result.returncode == 0, result.stderr[-500:]
    message = result.stdout.split('\n')[-3]
    assert 'wanted mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_96_no_top.h5;' in message
    assert '--weights none' in message


# --- vit


def test_vit_has_200_trainable_tensors():
    pytest.importorskip('vit_keras')
    model = models.build_model('vit', (32, 32, 3), 3, 'none')
    assert len(model.trainable_variables) == 200
    assert model(tf.constant(photos(batch=2)), training=False).shape == (2, 3)


def test_vit_refuses_sizes_that_are_not_multiples_of_its_patch():
    pytest.importorskip('vit_keras')
    with pytest.raises(UserError, match='multiples of 16; got 40'):
        models.build_model('vit', (40, 40, 3), 3, 'none')


# --- frozen means frozen


@pytest.mark.parametrize('bn_statistics', ['frozen', 'train'])
def test_moving_statistics_of_mobilenetv2_stay_bit_identical_exactly_when_frozen(bn_statistics):
    model = models.build_model('mobilenetv2', (32, 32, 3), 3, 'none', 0.35, bn_statistics)
    images = photos()
    backbone.statistics_from_batch(model, tf.constant(images))
    trained = model.trainable_variables
    before, trained_before = values(model.non_trainable_weights), values(trained)
    assert len(before) == 104
    assert np.isfinite(train(model, images)).all()
    same = [np.array_equal(a, b) for a, b in zip(before, values(model.non_trainable_weights))]
    assert all(same) if bn_statistics == 'frozen' else not any(same)
    affine = [not np.array_equal(a, b) for v, a, b in zip(trained, trained_before, values(trained))
              if keras_stack.variable_name(v).split('/')[-1] in ('gamma', 'beta')]
    assert len(affine) == 104 and all(affine)


@pytest.mark.parametrize('kind', ['our classifier', "a user's classifier", "a user's feature map"])
def test_moving_statistics_of_a_saved_model_stay_bit_identical_when_frozen(kind, tmp_path):
    build = {'our classifier': lambda: small_classifier(bn_statistics='train'),
             "a user's classifier": user_classifier, "a user's feature map": small_base}[kind]
    path = saved(build(), tmp_path)
    for bn_statistics, stays in (('frozen', True), (None, True), ('train', False)):
        model = models.build_model(path, SMALL, 3, bn_statistics=bn_statistics)
        before, trained = values(model.non_trainable_weights), values(model.trainable_weights)
        assert len(before) == 4
        train(model, photos(SMALL))
        after = values(model.non_trainable_weights)
        assert [np.array_equal(a, b) for a, b in zip(before, after)] == [stays] * 4
        assert not any(np.array_equal(a, b)
                       for a, b in zip(trained, values(model.trainable_weights)))


def test_statistics_default_to_training_for_random_weights_only(tmp_path):
    def mode(weights):
        model = models.build_model('mobilenetv2', (32, 32, 3), 3, weights, alpha=0.35)
        path = str(tmp_path / 'weights.npz')
        models.save_weights(model, path)
        return backbones(model)[0].train_statistics, path
    trained, path = mode('none')
    assert trained is True
    assert mode(path)[0] is False


def test_statistics_from_batch_are_those_of_the_batch_and_leave_the_mode_alone():
    model = small_classifier(bn_statistics='frozen')
    images = photos(SMALL)
    momenta = [layer.momentum for layer in keras_stack.flat_layers(model)
               if isinstance(layer, keras.layers.BatchNormalization)]
    backbone.statistics_from_batch(model, tf.constant(images))
    features = keras.layers.Conv2D(6, 3, strides=2, padding='same', use_bias=False)
    features.build((None,) + SMALL)
    features.set_weights([keras_stack.raw(model.trainable_weights[0]).numpy()])
    stem = features(images / 255.0).numpy()
    by_name = {keras_stack.variable_name(v): keras_stack.raw(v).numpy()
               for v in model.non_trainable_weights}
    np.testing.assert_allclose(by_name['stem_bn/moving_mean'], stem.mean((0, 1, 2)), atol=1e-5)
    # The fused kernel stores the unbiased variance.
    np.testing.assert_allclose(by_name['stem_bn/moving_variance'], stem.var((0, 1, 2)), rtol=0.01)
    assert backbones(model)[0].train_statistics is False
    assert momenta == [layer.momentum for layer in keras_stack.flat_layers(model)
                       if isinstance(layer, keras.layers.BatchNormalization)]


def modes_of(model):
    return [layer.train_statistics for layer in backbones(model)] + [
        layer.momentum for layer in keras_stack.flat_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)]


def test_statistics_from_batch_restore_modes_also_where_the_model_fails():
    model = small_classifier(bn_statistics='frozen')
    before = modes_of(model)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        backbone.statistics_from_batch(model, tf.zeros((2, 16, 16, 5)))
    assert modes_of(model) == before == [False, 0.99, 0.99]


@pytest.mark.parametrize('kind', [list, dict])
def test_statistics_from_batch_take_several_inputs(kind):
    inputs = {'left': keras.Input((4,), name='left'), 'right': keras.Input((4,), name='right')}
    joined = keras.layers.Concatenate()([keras.layers.BatchNormalization(name=name + '_bn')(each)
                                         for name, each in sorted(inputs.items())])
    model = keras.Model(list(inputs.values()) if kind is list else inputs, joined)
    batch = {name: np.random.RandomState(i).normal(i, 1, (64, 4)).astype(np.float32)
             for i, name in enumerate(sorted(inputs))}
    backbone.statistics_from_batch(model, list(map(tf.constant, batch.values())) if kind is list
                                   else {name: tf.constant(x) for name, x in batch.items()})
    for name, x in batch.items():
        np.testing.assert_allclose(keras_stack.raw(model.get_layer(name + '_bn').moving_mean),
                                   x.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize('bn_statistics', ['frozen', 'train'])
def test_frozen_statistics_turn_off_dropout_and_stochastic_depth_inside_the_base(bn_statistics):
    model = models.build_model('EfficientNetB0', (32, 32, 3), 3, 'none', 1.0, bn_statistics)
    base = model.get_layer('backbone')
    images = tf.constant(photos(batch=8))
    backbone.statistics_from_batch(model, images)  # else the features vanish
    assert sum(isinstance(layer, keras.layers.Dropout) and layer.noise_shape is not None
               for layer in keras_stack.flat_layers(base.base)) == 9  # stochastic depth
    first, second = [base(images, training=True).numpy() for _ in range(2)]
    assert np.ptp(first, axis=0).max() > 0.1
    assert (np.abs(first - second).max() > 0.1) == (bn_statistics == 'train')
    dropped = [model(images, training=True).numpy() for _ in range(2)]
    assert (dropped[0] != dropped[1]).any()  # that of the head stays
