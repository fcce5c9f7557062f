"""Tests that reduced steps equal traced steps, and have no other ops."""

import gc
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras
from tensorflow.python.eager import context

import profiler
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.training_step import NUM_RESULTS, TrainingStep
from small_models import assert_same_values, values
from small_steps import (
    HEAD_BIAS,
    HEAD_KERNEL,
    KERNEL_2,
    KERNEL_4,
    N,
    batch,
    batches,
    conv_stack,
    layers_with_backprop,
    loss_of,
    maker_of,
    mask_of,
    small_model,
    state_of,
)


@pytest.mark.parametrize('mask, expected', [
    (mask_of(HEAD_BIAS), {'BiasAddGrad': ['head']}),
    (mask_of(HEAD_KERNEL), {'MatMul': ['head']}),
    (mask_of(KERNEL_4), {'MatMul': ['head'], 'ReluGrad': ['conv4'],
                         'Conv2DBackpropFilter': ['conv4']}),
    (mask_of(KERNEL_2, KERNEL_4, HEAD_KERNEL), {
        'MatMul': ['head', 'head'], 'ReluGrad': ['conv2', 'conv3', 'conv4'],
        'Conv2DBackpropFilter': ['conv2', 'conv4'], 'Conv2DBackpropInput': ['conv3', 'conv4']}),
    (mask_of(*range(N)), {
        'MatMul': ['head', 'head'], 'BiasAddGrad': ['head'],
        'ReluGrad': ['conv1', 'conv2', 'conv3', 'conv4'],
        'Conv2DBackpropFilter': ['conv1', 'conv2', 'conv3', 'conv4'],
        'Conv2DBackpropInput': ['conv2', 'conv3', 'conv4']})],
    ids=['head bias', 'head kernel', 'last convolution', 'three tensors', 'all'])
def test_a_reduced_step_has_exactly_the_ops_its_gradients_need(mask, expected):
    model = conv_stack()
    step = maker_of(model).step(mask)
    assert layers_with_backprop(step.nodes.items()) == expected


@pytest.mark.parametrize('optimizer, clip_norm, bn_statistics', [
    ('sgd', None, 'frozen'), ('adam', 0.05, 'train')] + [
        pytest.param(*case, marks=pytest.mark.thorough) for case in (
            ('sgd', 0.05, 'train'), ('adam', None, 'frozen'))])
def test_a_reduced_step_equals_the_traced_step_of_its_mask(optimizer, clip_norm, bn_statistics):
    # The gradient of a bias before batch statistics is only rounding error. Adam divides it by its
    # own size, so the bias may move anywhere.
    model = small_model(bn_statistics, bias=bn_statistics == 'frozen' or optimizer == 'sgd')
    for layer in keras_stack.flat_layers(model):
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0  # each traced function would draw other numbers
    n = len(model.trainable_variables)
    trained_by = make_optimizer(optimizer, 1e-2, 50, model.trainable_variables,
                                clip_norm=clip_norm)
    rng = np.random.RandomState(0)
    images, labels = batches(1)[0]
    maker = StepMaker(model, trained_by, 0.01, images, labels)
    state = state_of(model, trained_by)
    start = values(state)
    for mask in (np.ones(n, bool), np.arange(n) == n - 1, np.arange(n) % 3 == 0, rng.rand(n) < 0.5):
        outcomes = []
        for step in (TrainingStep(model, trained_by, mask, 0.01), maker.step(mask)):
            keras_stack.assign_arrays(state, start)
            results = [[float(result) for result in step(images, labels)] for _ in range(2)]
            outcomes.append((results, values(state)))
        (traced_results, traced), (cut_results, cut) = outcomes
        np.testing.assert_allclose(cut_results, traced_results, rtol=1e-4)
        for before, expected, found in zip(start, traced, cut):
            moved = np.abs(expected.astype(float) - before).max()
            assert np.abs(found.astype(float) - expected).max() <= 0.02 * moved + 1e-6


def test_unselected_tensors_and_their_slots_stay_bit_identical():
    model = conv_stack()
    maker = maker_of(model, 'adam', 0.01)
    maker.step(mask_of(*range(N)))(*batch())  # fills every slot
    mask = mask_of(KERNEL_2, HEAD_BIAS)
    state = state_of(model, maker.optimizer)
    before = values(state)
    maker.step(mask)(*batch())
    shapes = {tuple(v.shape) for v, chosen in zip(model.trainable_variables, mask) if chosen}
    for variable, old, new in zip(state, before, values(state)):
        if tuple(variable.shape) not in shapes | {()}:
            assert old.tobytes() == new.tobytes()
        elif tuple(variable.shape) in shapes:  # the weight and both of its slots
            assert not np.array_equal(old, new)


@pytest.mark.parametrize('bn_statistics', ['frozen', 'train'])
def test_passes_without_update_change_nothing(bn_statistics):
    model = small_model(bn_statistics)
    optimizer = make_optimizer('sgd', 0.1, 50, model.trainable_variables)
    images, labels = batches(1)[0]
    maker = StepMaker(model, optimizer, 0.01, images, labels)
    before = values(state_of(model, optimizer))
    for function in (maker.forward(), maker.forward(dropout=False), maker.gradients()):
        assert np.isfinite(float(function(images, labels)[0]))
        assert_same_values(before, values(state_of(model, optimizer)))


class LostMean:
    """Stands for a mean over workers one of which is lost: after a while, the exchange fails."""

    def __call__(self, shapes, dtypes, tag, mask):
        def exchange(*results):
            lost = [tf.compat.v1.py_func(self.wait, [gradient], gradient.dtype, stateful=False)
                    for gradient in results[NUM_RESULTS:]]
            for gradient, shape in zip(lost, shapes):
                gradient.set_shape(shape)
            return list(results[:NUM_RESULTS]) + lost
        specs = [tf.TensorSpec((), dtype) for dtype in (tf.float32, tf.int32, tf.float32)]
        specs += [tf.TensorSpec(*spec) for spec in zip(shapes, dtypes)]
        return tf.function(exchange, input_signature=specs).get_concrete_function()

    def wait(self, gradient):
        time.sleep(0.1)
        raise OSError('lost')


def test_a_step_whose_exchange_fails_changes_nothing():
    model = conv_stack()
    optimizer = make_optimizer('sgd', 0.1, 50, model.trainable_variables)
    maker = StepMaker(model, optimizer, 0.01, *batch(), mean=LostMean())
    before = values(state_of(model, optimizer))
    with pytest.raises(tf.errors.OpError, match='lost'):
        maker.step(mask_of(*range(N)))(*batch())
    assert_same_values(before, values(state_of(model, optimizer)))


def test_the_forward_pass_has_no_backward_op():
    model = conv_stack()
    maker = maker_of(model)
    forward = maker.forward()
    assert not any('Grad' in op or 'Backprop' in op for op in forward.nodes.values())
    assert float(forward(*batch())[0]) == pytest.approx(loss_of(model, *batch()), rel=1e-5)


def test_dropout_changes_with_each_call_and_can_be_omitted():
    inputs = keras.Input((12, 12, 3))
    x = keras.layers.Dropout(0.5)(keras.layers.Flatten()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    optimizer = make_optimizer('sgd', 0.1, 50, model.trainable_variables)
    with_dropout = StepMaker(model, optimizer, 0.0, *batch()).step([False, True])
    start = values(model.trainable_variables)

    def losses(function):
        found = []
        for _ in range(3):
            keras_stack.assign_arrays(model.trainable_variables, start)
            found.append(float(function(*batch())[0]))
        return found
    assert len(set(losses(with_dropout))) == 3
    without = StepMaker(model, None, 0.0, *batch()).gradients()
    assert len(set(losses(without))) == 1
    images, labels = batch()
    usual = loss_of(model, images, labels, training=False)
    assert losses(without)[0] == pytest.approx(float(usual), rel=1e-5)
    assert not any('Random' in op for op in without.nodes.values())


@pytest.mark.parametrize('noise_shape', [None, (None, 1)])
def test_dropout_is_traced_as_the_layer_computes_it(noise_shape):
    layer = keras.layers.Dropout(0.25, noise_shape=noise_shape)
    model = keras.Sequential([keras.Input((200,)), layer])
    inputs = tf.random.stateless_uniform((50, 200), (0, 1), 0.5, 1.5)
    with keras_stack.dropout_as_product(model) as products:
        @tf.function
        def dropped(inputs):
            return model(inputs, training=True)
        factor = (dropped(inputs) / inputs).numpy()
    assert len(products) == 1 and 'call' not in vars(layer)
    dropout = np.abs(factor) < 1e-6
    np.testing.assert_allclose(factor[~dropout], 1 / 0.75, rtol=1e-5)
    assert 0.1 < dropout.mean() < 0.4
    if noise_shape:
        assert (dropout == dropout[:, :1]).all()
    np.testing.assert_array_equal(model(inputs, training=False), inputs)


def test_the_graph_of_a_step_is_freed_with_its_object():
    maker = maker_of(conv_stack())
    step = maker.step(mask_of(HEAD_BIAS))
    step(*batch())
    name, gone = step._name, weakref.ref(step)
    assert context.context().has_function(name)
    del step
    gc.collect()
    assert gone() is None and not context.context().has_function(name)


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_the_graph_of_a_step_maker_is_freed_with_it(optimizer):
    maker = maker_of(conv_stack(), optimizer)
    graph = weakref.ref(maker.concrete.graph)
    del maker
    gc.collect()
    assert graph() is None


def test_wrong_masks_and_batches_are_refused():
    maker = maker_of(conv_stack())
    with pytest.raises(ValueError, match='at least one selected tensor'):
        maker.step(mask_of())
    with pytest.raises(ValueError, match='trainable tensors'):
        maker.step([True] * (N + 1))
    with pytest.raises(ValueError, match='of shapes .*4, 12, 12, 3.*not .*3, 12'):
        maker.step(mask_of(HEAD_BIAS))(*batch(size=3))


# ---------------------------------------------------------------- batches as people have them

def classifier_of_bytes():
    return keras.Sequential([
        keras.Input((8, 8, 1)), keras.layers.Rescaling(1 / 255), keras.layers.Conv2D(2, 3),
        keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)])


IMAGES = np.random.RandomState(0).randint(0, 255, (6, 8, 8, 1))
LABELS = np.arange(6) % 3


@pytest.mark.parametrize('inputs, labels', [
    (IMAGES.astype(np.float32), LABELS), (IMAGES.astype(np.uint8), LABELS.astype(np.uint8)),
    (IMAGES.astype(np.float64), LABELS.astype(np.int16)), (IMAGES.tolist(), LABELS.tolist()),
    (list(IMAGES.astype(np.float32)), LABELS.astype(np.uint64)),
    (tf.constant(IMAGES, tf.float32), tf.constant(LABELS, tf.int8))],
    ids=['arrays', 'bytes', 'float64', 'lists', 'list of images', 'tensors'])
def test_arrays_lists_and_any_integers_train_alike(inputs, labels):
    model = classifier_of_bytes()
    before = values(model.variables)
    results = []
    for given in ((inputs, labels), (tf.constant(IMAGES, tf.float32), tf.constant(LABELS))):
        keras_stack.assign_arrays(model.variables, before)
        optimizer = make_optimizer('sgd', 0.1, 10, model.trainable_variables)
        maker = StepMaker(model, optimizer, 0.0, *given)
        importance = evaluate_importance(model, optimizer, [given], evaluator=Evaluator(maker))
        step = maker.step(np.ones(len(importance), bool))
        results.append([importance, float(step(*given).loss), float(step(inputs, labels).loss)])
        assert profiler.profile_model(model, batch=given, num_steps=2, seconds=0).t_fp > 0
    for mine, usual in zip(*results):
        np.testing.assert_allclose(mine, usual, rtol=1e-4)


@pytest.mark.parametrize('labels', [
    np.eye(3)[LABELS], LABELS[:, None], LABELS / 1.0, list('abcabc'), 3],
    ids=['one-hot', 'column', 'floats', 'names', 'one number'])
def test_labels_that_are_no_class_numbers_are_refused_where_they_are_given(labels):
    model, images = classifier_of_bytes(), IMAGES.astype(np.float32)
    optimizer = make_optimizer('sgd', 0.1, 10, model.trainable_variables)
    step = StepMaker(model, optimizer, 0.0, images, LABELS).step([1, 1, 1, 1])
    for give in (lambda: StepMaker(model, optimizer, 0.0, images, labels),
                 lambda: profiler.profile_model(model, batch=(images, labels)),
                 lambda: evaluate_importance(model, optimizer, [(images, labels)]),
                 lambda: step(images, labels)):
        with pytest.raises(UserError, match='labels'):
            give()
