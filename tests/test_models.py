"""The networks: names, preprocessing, frozen statistics, saved models, portable weights.

`python tests/test_models.py`, run on the paper's stack, writes the stored files of tests/data that
today's stack is held against.
"""

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import backbone
import keras_stack
import models
from command_line import UserError
from training_step import TrainingStep, evaluation_function, make_optimizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, 'tests', 'data')
MOBILENET_VARIABLES = os.path.join(DATA, 'mobilenetv2_035_variables.json')
PAPER_WEIGHTS = os.path.join(DATA, 'small_classifier_keras_2_7.npz')
PAPER_OUTPUT = os.path.join(DATA, 'small_classifier_keras_2_7.json')
SMALL = (16, 16, 3)


def photos(shape=(32, 32, 3), batch=4, seed=0):
    """(B, H, W, 3) float32 in 0..255."""
    return np.random.RandomState(seed).uniform(0, 255, (batch,) + shape).astype(np.float32)


def small_base(shape=SMALL, filters=6):
    """Convolution, depthwise convolution, batch normalisation: (B, 16, 16, 3) -> (B, 8, 8, 8)."""
    inputs = keras.Input(shape)
    x = keras.layers.Rescaling(1 / 255.0)(inputs)
    x = keras.layers.Conv2D(filters, 3, strides=2, padding='same', use_bias=False, name='stem')(x)
    x = keras.layers.BatchNormalization(name='stem_bn')(x)
    x = keras.layers.ReLU(name='stem_relu')(x)
    x = keras.layers.DepthwiseConv2D(3, padding='same', use_bias=False, name='depthwise')(x)
    x = keras.layers.BatchNormalization(name='depthwise_bn')(x)
    x = keras.layers.Conv2D(8, 1, activation='relu', name='project')(x)
    return keras.Model(inputs, x, name='small_base')


def small_classifier(num_classes=3, bn_statistics='frozen', filters=6):
    return backbone.classifier(small_base(filters=filters), None, SMALL, num_classes, bn_statistics)


def user_classifier(num_classes=3, activation='softmax'):
    """What a user may have saved: a nested network that ends in probabilities."""
    return keras.Sequential([keras.Input(SMALL), small_base(),
                             keras.layers.GlobalAveragePooling2D(), keras.layers.Dropout(0.3),
                             keras.layers.Dense(num_classes, activation=activation)])


def sequential(*layers):
    return keras.Sequential([keras.Input(SMALL), keras.layers.Rescaling(1 / 255.0),
                             keras.layers.Flatten()] + list(layers))


def saved(model, folder, name=None):
    path = os.path.join(str(folder), name or keras_stack.MODEL_FILE)
    model.save(path)
    return path


def set_to_distinct_values(model, seed=0):
    """Every array different, variances positive: a swap of any two would show."""
    rng = np.random.RandomState(seed)
    for variable in model.weights:
        variable.assign(rng.uniform(0.1, 0.9, tuple(variable.shape)).astype(np.float32))


def values(variables):
    return [keras_stack.raw(v).numpy().copy() for v in variables]


def train(model, images, num_classes=3, steps=3, rate=0.05):
    labels = tf.constant(np.arange(len(images)) % num_classes, tf.int32)
    variables = model.trainable_variables
    step = TrainingStep(model, make_optimizer('sgd', rate, 100, variables),
                        np.ones(len(variables), bool), weight_decay=5e-4)
    return [float(step(tf.constant(images), labels)[0]) for _ in range(steps)]


def backbones(model):
    return [layer for layer in keras_stack.flat_layers(model)
            if isinstance(layer, backbone.Backbone)]


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


def test_a_mistyped_name_is_answered_without_importing_tensorflow():
    code = ('import sys, models\n'
            'try:\n'
            '    models.canonical_name("rennet50")\n'
            'except models.UserError as error:\n'
            '    print("resnet50" in str(error), "EfficientNetB0" in models.application_names())\n'
            'print("tensorflow" in sys.modules, "keras" in sys.modules)')
    output = subprocess.check_output([sys.executable, '-c', code], cwd=ROOT)
    assert output.decode().split() == ['True', 'True', 'False', 'False']


def test_application_names_are_what_keras_exports():
    exported = [name for name, value in vars(keras.applications).items()
                if callable(value) and name[0].isupper()]
    assert models.application_names() == sorted(exported)


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


def described(model):
    """kind -> [name, shape] of every variable in order."""
    return {kind: [[keras_stack.variable_name(v), [int(n) for n in v.shape]] for v in variables]
            for kind, variables in (('trainable', model.trainable_weights),
                                    ('statistics', model.non_trainable_weights))}


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
    code = ('import command_line, os; command_line.quiet_tensorflow(); import models, re\n'
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



# --- saved models


def test_our_saved_classifier_comes_back_with_its_weights_and_is_not_wrapped_again(tmp_path):
    model = small_classifier()
    set_to_distinct_values(model)
    images = photos(SMALL)
    again = models.build_model(saved(model, tmp_path), SMALL, 3)
    np.testing.assert_allclose(again(images, training=False), model(images, training=False),
                               rtol=1e-5)
    assert len(backbones(again)) == 1
    assert described(again) == described(model)


@pytest.mark.parametrize('build, in_logits', [
    (lambda: user_classifier(activation='softmax'), False),
    (lambda: user_classifier(activation=None), True),
    (lambda: sequential(keras.layers.Dense(3), keras.layers.Softmax()), False),
    (lambda: sequential(keras.layers.Dense(3), keras.layers.Activation('softmax')), False),
    (lambda: sequential(keras.layers.Dense(3, activation='softmax')), False),
    (lambda: sequential(keras.layers.Dense(7, activation='softmax'), keras.layers.Dense(3)), True)],
    ids=['nested softmax', 'nested logits', 'Softmax layer', 'Activation layer', 'softmax',
         'softmax inside'])
def test_the_loss_of_a_saved_classifier_is_that_of_what_it_outputs(build, in_logits, tmp_path):
    model = models.build_model(saved(build(), tmp_path), SMALL, 3)
    images, labels = photos(SMALL), np.array([0, 1, 2, 1])
    outputs = model(images, training=False).numpy().astype(np.float64)
    if in_logits:
        outputs = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(outputs.sum(axis=1), 1, atol=1e-5)
    by_hand = -np.log(outputs[np.arange(4), labels]).sum()
    loss, _ = evaluation_function(model)(tf.constant(images), tf.constant(labels, tf.int32))
    assert float(loss) == pytest.approx(by_hand, rel=1e-4)


def test_a_saved_feature_map_gets_a_new_head_and_keeps_its_weights(tmp_path):
    base = small_base()
    set_to_distinct_values(base)
    model = models.build_model(saved(base, tmp_path), SMALL, 7)
    assert model.output_shape == (None, 7)
    assert [keras_stack.variable_name(v) for v in model.trainable_weights[-2:]] == [
        'head/kernel', 'head/bias']
    for mine, loaded in zip(values(base.trainable_weights), values(model.trainable_weights)):
        np.testing.assert_array_equal(mine, loaded)


def test_a_saved_classifier_for_another_number_of_classes_is_refused(tmp_path):
    path = saved(user_classifier(num_classes=4), tmp_path)
    with pytest.raises(UserError, match='tells 4 classes apart, the data has 3'):
        models.build_model(path, SMALL, 3)


def test_a_saved_model_for_another_input_size_is_refused(tmp_path):
    path = saved(user_classifier(), tmp_path)
    with pytest.raises(UserError, match='takes images of 16x16x3, not 32x32x3: set --input_size'):
        models.build_model(path, (32, 32, 3), 3)


def test_a_file_that_is_no_saved_model_is_refused(tmp_path):
    path = str(tmp_path / keras_stack.MODEL_FILE)
    with open(path, 'wb') as out:
        out.write(b'not a model')
    with pytest.raises(UserError, match='is not a saved Keras model that this stack can read'):
        models.build_model(path, SMALL, 3)


def test_weights_given_beside_a_saved_model_are_used_or_refused_but_never_ignored(tmp_path):
    path = saved(user_classifier(), tmp_path)
    with pytest.raises(UserError, match='saved model .* brings its weights'):
        models.build_model(path, SMALL, 3, 'none')
    h5 = str(tmp_path / 'other.h5')
    with open(h5, 'wb') as out:
        out.write(b'any weights')
    with pytest.raises(UserError):
        models.build_model(path, SMALL, 3, h5)


# --- portable weights


@pytest.fixture
def weights_file(tmp_path):
    model = small_classifier()
    set_to_distinct_values(model)
    path = str(tmp_path / 'weights.npz')
    models.save_weights(model, path)
    return model, path


def assert_untouched_by(model, path, match):
    before = values(model.weights)
    with pytest.raises(UserError, match=match) as error:
        models.load_weights(model, path)
    for mine, now in zip(before, values(model.weights)):
        np.testing.assert_array_equal(mine, now)
    return str(error.value)


def test_weights_round_trip_exactly(weights_file):
    model, path = weights_file
    other = small_classifier()
    models.load_weights(other, path)
    assert len(values(model.weights)) == len(values(other.weights)) == 14
    for mine, loaded in zip(values(model.weights), values(other.weights)):
        np.testing.assert_array_equal(mine, loaded)
    assert not os.path.exists(path + '.part')


@pytest.mark.parametrize('name', ['weights.npz', keras_stack.MODEL_FILE, 'model.h5'])
def test_what_normalization_was_set_to_survives_saving(name, tmp_path):
    """Keras' layer of that name, in EfficientNet, reads its weights only when told to."""
    def build(*weights):
        return models.build_model('EfficientNetB0', (32, 32, 3), 3, *weights,
                                  bn_statistics='frozen')
    keras_stack.set_seed(0)
    model, images = build('none'), photos(batch=16)
    layer = next(layer for layer in keras_stack.flat_layers(model)
                 if isinstance(layer, keras.layers.Normalization))
    layer.set_weights([np.array([0.2, 0.5, 0.7]), np.array([0.1, 0.4, 0.9]), np.array(1)])
    layer.finalize_state()
    backbone.statistics_from_batch(model, images)  # else the image does not show in the output
    path = str(tmp_path / name)
    if name.endswith('.npz'):
        models.save_weights(model, path)
        again = build(path)
    else:
        model.save(path)
        again = models.build_model(path, (32, 32, 3), 3)
    expected = model(images, training=False).numpy()
    assert np.ptp(expected, axis=0).max() > 0.1 * np.abs(expected).max()
    np.testing.assert_allclose(again(images, training=False).numpy(), expected, rtol=0,
                               atol=1e-5 * np.abs(expected).max())


def test_weights_are_read_by_build_model(tmp_path):
    path = str(tmp_path / 'weights.npz')
    model = models.build_model('mobilenetv2', (32, 32, 3), 3, 'none', alpha=0.35)
    set_to_distinct_values(model)
    models.save_weights(model, path)
    again = models.build_model('mobilenetv2', (32, 32, 3), 3, path, alpha=0.35)
    for mine, loaded in zip(values(model.weights), values(again.weights)):
        np.testing.assert_array_equal(mine, loaded)


def test_weights_are_read_without_pickle(weights_file, tmp_path):
    model, path = weights_file
    with np.load(path) as stored:
        arrays = dict(stored)

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'executed'),)
    key = next(iter(sorted(k for k in arrays if k.startswith('trainable/'))))
    arrays[key] = np.array([Payload()], dtype=object)
    np.savez(path, **arrays)
    assert_untouched_by(model, path, 'cannot be read')
    assert not (tmp_path / 'executed').exists()


@pytest.mark.parametrize('share', [0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_a_file_cut_anywhere_is_refused_and_nothing_is_assigned(weights_file, share):
    _, path = weights_file
    with open(path, 'rb') as whole:
        content = whole.read()
    with open(path, 'wb') as cut:
        cut.write(content[:int(share * len(content))])
    assert_untouched_by(small_classifier(), path, 'cannot be read, it may be cut short')


@pytest.mark.parametrize('content', [
    b'PK\x03\x04 not a zip', b'not even close', b'\x89HDF\r\n\x1a\n'])
def test_a_file_that_is_no_archive_is_refused(content, tmp_path):
    path = str(tmp_path / 'weights.npz')
    with open(path, 'wb') as out:
        out.write(content)
    assert_untouched_by(small_classifier(), path, 'cannot be read')


def test_a_single_array_under_the_name_of_an_archive_is_refused(tmp_path):
    path = str(tmp_path / 'weights.npz')
    with open(path, 'wb') as out:
        np.save(out, np.ones(3))
    assert_untouched_by(small_classifier(), path, 'weights.npz')


def test_any_damaged_byte_is_refused_or_harmless_but_never_crashes(weights_file):
    model, path = weights_file
    with open(path, 'rb') as whole:
        content = whole.read()
    expected = values(model.weights)
    rng = np.random.RandomState(0)
    refused = 0
    for position in rng.randint(len(content), size=300):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randint(8)
        with open(path, 'wb') as out:
            out.write(damaged)
        try:
            models.load_weights(model, path)
        except UserError:
            refused += 1
        for mine, now in zip(expected, values(model.weights)):
            np.testing.assert_array_equal(mine, now)
    assert refused > 150


def test_another_program_s_npz_is_refused(tmp_path):
    path = str(tmp_path / 'weights.npz')
    np.savez(path, kernel=np.ones((3, 3)))
    assert_untouched_by(small_classifier(), path, 'is not a weights file of this project')


def test_every_mismatch_of_another_architecture_is_named(weights_file):
    message = assert_untouched_by(small_classifier(filters=7), weights_file[1],
                                  'weights of another architecture')
    for name, own in (('stem/kernel 3x3x3x6', 'stem/kernel 3x3x3x7'),
                      ('stem_bn/gamma 6', 'stem_bn/gamma 7'), ('stem_bn/beta 6', 'stem_bn/beta 7'),
                      ('depthwise/kernel 3x3x6x1', 'depthwise/kernel 3x3x7x1'),
                      ('depthwise_bn/gamma 6', 'depthwise_bn/gamma 7'),
                      ('depthwise_bn/beta 6', 'depthwise_bn/beta 7'),
                      ('project/kernel 1x1x6x8', 'project/kernel 1x1x7x8'),
                      ('stem_bn/moving_mean 6', 'stem_bn/moving_mean 7'),
                      ('stem_bn/moving_variance 6', 'stem_bn/moving_variance 7'),
                      ('depthwise_bn/moving_mean 6', 'depthwise_bn/moving_mean 7'),
                      ('depthwise_bn/moving_variance 6', 'depthwise_bn/moving_variance 7')):
        assert '{} in the file, {} in the model'.format(name, own) in message
    assert '(11 mismatches)' in message.split('\n')[0]


def test_a_file_with_fewer_arrays_says_how_many(weights_file):
    model, path = weights_file
    with np.load(path) as stored:
        arrays = dict(stored)
    del arrays[sorted(key for key in arrays if key.startswith('trainable/'))[-1]]
    np.savez(path, **arrays)
    assert_untouched_by(model, path, '9 trainable arrays in the file, 10 in the model')


def test_another_number_of_classes_starts_the_head_anew_and_says_so(weights_file):
    model, path = weights_file
    other = small_classifier(num_classes=9)
    head = values(other.trainable_weights[-2:])
    with pytest.warns(UserWarning, match='the head starts anew .*head/kernel 8x3 in the file'):
        models.load_weights(other, path)
    for mine, now in zip(head, values(other.trainable_weights[-2:])):
        np.testing.assert_array_equal(mine, now)
    for kind in ('trainable_weights', 'non_trainable_weights'):
        end = -2 if kind == 'trainable_weights' else None
        for mine, loaded in zip(values(getattr(model, kind)[:end]),
                                values(getattr(other, kind)[:end])):
            np.testing.assert_array_equal(mine, loaded)


def test_the_same_number_of_classes_loads_without_a_warning(weights_file):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        models.load_weights(small_classifier(), weights_file[1])


def test_weights_written_on_the_paper_s_stack_give_the_stored_output():
    with open(PAPER_OUTPUT) as stored:
        expected = np.array(json.load(stored))
    model = small_classifier(num_classes=5)
    models.load_weights(model, PAPER_WEIGHTS)
    assert np.ptp(expected, axis=0).min() > 0.01
    np.testing.assert_allclose(model(stored_images(), training=False).numpy(), expected, atol=1e-5)


def stored_images():
    """(4, 16, 16, 3) float32, the same on every version of NumPy, each of another brightness."""
    return photos(SMALL) * np.array([0.1, 0.4, 0.7, 1], np.float32).reshape((4, 1, 1, 1))


def write_stored_files():
    assert not keras_stack.KERAS_3, "run this on the paper's stack"
    model = small_classifier(num_classes=5)
    backbone.statistics_from_batch(model, tf.constant(stored_images()))
    train(model, stored_images(), num_classes=5, rate=0.01, steps=10)
    models.save_weights(model, PAPER_WEIGHTS)
    with open(PAPER_OUTPUT, 'w') as out:
        json.dump(model(stored_images(), training=False).numpy().tolist(), out)
    mobilenet = models.build_model('mobilenetv2', (32, 32, 3), 5, 'none', alpha=0.35)
    with open(MOBILENET_VARIABLES, 'w') as out:
        json.dump(described(mobilenet), out, separators=(',', ':'))


if __name__ == '__main__':
    write_stored_files()
