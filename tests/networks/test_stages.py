"""Tests which places of a network its head of all stages reads."""

import numpy as np
import pytest
from tensorflow import keras

import models
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.export.plain import plain_model
from elastic.networks.stages import head_of, places, pooled
from small_models import SMALL, photos, saved, sequential, small_base, user_classifier


def residual():
    """Returns a network of a stem, a block with a branch around it, and an output of 5 channels."""
    inputs = keras.Input(SMALL)
    x = start = keras.layers.Conv2D(3, 3, activation='relu', padding='same', name='stem')(inputs)
    x = keras.layers.Conv2D(7, 1, name='inside')(x)
    x = keras.layers.Conv2D(3, 1, name='end')(x)
    x = keras.layers.Add(name='add')([start, x])
    x = keras.layers.Conv2D(5, 3, strides=2, name='last')(x)
    return keras.Model(inputs, keras.layers.ReLU(name='relu')(x))


def makers(tensors):
    return [keras_stack.producer(tensor)[0].name for tensor in tensors]


def test_a_stage_is_what_every_path_passes():
    assert makers(places(residual())[1]) == ['stem', 'add', 'relu']
    assert makers(places(small_base())[1]) == ['stem_relu', 'depthwise_bn', 'project']


def test_a_model_inside_and_the_layers_behind_it_have_stages():
    inner = small_base()
    model = keras.Sequential([keras.Input(SMALL), inner, keras.layers.GlobalAveragePooling2D(),
                              keras.layers.Dense(4, activation='relu')])
    _, found = places(model)
    assert [tensor.shape[-1] for tensor in found] == [6, 6, 8, 4]


def test_tokens_and_vectors_are_pooled_over_positions():
    inputs = keras.Input(SMALL)
    x = keras.layers.Conv2D(4, 4, strides=4)(inputs)
    x = keras.layers.Reshape((16, 4))(x)
    x = keras.layers.Dense(6)(x)
    x = keras.layers.LSTM(5)(x)
    network = pooled(keras.Model(inputs, x), 'stages', 100)
    images = photos(SMALL)
    tokens = keras.Model(inputs, keras_stack.producer(x)[1][0])(images).numpy()
    found = network(images, training=False).numpy()
    assert found.shape == (4, 4 + 6 + 5)
    np.testing.assert_allclose(found[:, 4:10], tokens.mean(axis=1), rtol=1e-5)


def test_the_narrowest_places_are_read_beside_the_last_one():
    base = residual()
    assert pooled(base, 'stages', 22).output_shape == (None, 22)  # means and maxima of 3 + 3 + 5
    network = pooled(residual(), 'stages', 21)  # the earlier one of two that are equal is left out
    assert network.output_shape == (None, 16)
    images = photos(SMALL)
    x = base(images, training=False).numpy()
    found = pooled(base, 'stages', 10)(images, training=False).numpy()
    np.testing.assert_allclose(found, np.hstack([x.mean(axis=(1, 2)), x.max(axis=(1, 2))]),
                               rtol=1e-5)
    with pytest.raises(UserError, match='fewer than the 10 of the last stage; allowed: 10'):
        pooled(base, 'stages', 9)


def test_a_network_with_the_names_of_a_new_process_gets_the_head(tmp_path):
    keras.backend.clear_session()
    inputs = keras.Input(SMALL)
    x = keras.layers.Conv2D(4, 3)(keras.layers.Conv2D(4, 3)(inputs))
    x = keras.layers.GlobalAveragePooling2D()(x)
    path = saved(keras.Model(inputs, keras.layers.Dense(3)(x)), tmp_path)
    keras.backend.clear_session()  # Keras counts its names from the first again
    assert models.build_model(path, SMALL, 3, head='stages').output_shape == (None, 3)


def test_a_network_without_stages_is_refused(tmp_path):
    path = saved(sequential(keras.layers.Dense(3)), tmp_path)
    with pytest.raises(UserError, match='this one has none: leave it out'):
        models.build_model(path, SMALL, 3, head='stages')


def test_a_head_that_cannot_be_replaced_is_refused(tmp_path):
    path = saved(keras.Sequential([keras.Input(SMALL), small_base(), keras.layers.Conv2D(3, 1),
                                   keras.layers.GlobalAveragePooling2D()]), tmp_path)
    with pytest.raises(UserError, match='cannot be replaced: save it without a head'):
        models.build_model(path, SMALL, 3, head='stages')


def test_a_head_that_fits_is_replaced_with_a_warning(tmp_path):
    path = saved(user_classifier(), tmp_path)
    with pytest.warns(UserWarning, match='was replaced'):
        model = models.build_model(path, SMALL, 3, head='stages')
    assert head_of(model) == 'stages' and model.layers[-1].kernel.shape == (40, 3)


@pytest.mark.parametrize('head', ['last', 'stages'])
def test_a_saved_network_keeps_such_a_head(head, tmp_path):
    base = saved(small_base(), tmp_path, 'base' + keras_stack.MODEL_FILE)
    model = models.build_model(base, SMALL, 3, head=head, head_start='solved')
    images = photos(SMALL)
    expected = model(images, training=False).numpy()
    path = saved(plain_model(model), tmp_path)
    for chosen in (head, 'last' if head == 'stages' else head):  # as given, or without the flag
        if chosen == head:
            again = models.build_model(path, SMALL, 3, head=head, head_start='solved')
        else:
            again = models.build_model(path, SMALL, 3)
        np.testing.assert_allclose(again(images, training=False), expected, rtol=1e-5)
        assert head_of(again) == head
    other = dict(last='stages', stages='last')[head]
    with pytest.raises(UserError, match='use --head {}'.format(head)):
        models.build_model(path, SMALL, 3, head=other, head_start='solved')
