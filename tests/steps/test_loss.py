"""Tests the loss of any classifier, penalties, loss scaling, and models that are refused."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.training_step import (
    LossScale,
    TrainingStep,
    evaluation_function,
    warn_of_probabilities,
)

kinds = keras.layers


def batch(size=6):
    rng = np.random.RandomState(0)
    return tf.constant(rng.rand(size, 4), tf.float32), tf.constant(np.arange(size) % 3, tf.int32)


def classifier(*layers):
    keras_stack.set_seed(0)
    return keras.Sequential([keras.Input((4,))] + list(layers))


def sgd(model, rate=0.1):
    return make_optimizer('sgd', rate, 50, model.trainable_variables)


@pytest.mark.parametrize('clipped', [
    lambda x: tf.clip_by_value(x, 1e-7, 1 - 1e-7), lambda x: tf.minimum(tf.maximum(x, 1e-7), 1.0)])
def test_clipped_probabilities_are_probabilities(clipped):
    inner = classifier(kinds.Dense(3, activation='softmax'))
    inputs, labels = batch()
    outputs = inner(inputs).numpy().astype(np.float64)
    by_hand = -np.log(outputs[np.arange(6), labels.numpy()]).sum()
    model = classifier(inner, kinds.Lambda(clipped))
    assert float(evaluation_function(model)(inputs, labels)[0]) == pytest.approx(by_hand, rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warn_of_probabilities(model, inputs)


def test_probabilities_that_count_as_logits_cause_a_warning():
    inputs, _ = batch()
    squares = kinds.Lambda(lambda x: x * x / tf.reduce_sum(x * x, axis=1, keepdims=True))
    with pytest.warns(UserWarning, match='sum to one.*treats them as logits'):
        warn_of_probabilities(classifier(kinds.Dense(3), squares), inputs)


# ---------------------------------------------------------------- loss scaling

def in_float16():
    return classifier(kinds.Dense(5, activation='relu', dtype='mixed_float16'),
                      kinds.Dense(3, dtype='float32'))


def everything(model):
    return np.ones(len(model.trainable_variables), dtype=bool)


def test_loss_scaling_keeps_small_gradients():
    """Without scaling, the gradient is below 6e-8, the smallest number of float16."""
    model = in_float16()
    head = keras_stack.raw(model.trainable_variables[2])
    head.assign(head * 1e-8)
    inputs, labels = batch()
    maker = StepMaker(model, sgd(model), 0.0, inputs, labels)
    gradient = maker.gradients()(inputs, labels)[3].numpy()
    assert np.abs(gradient).max() > 0
    maker.loss_scale.scale.assign(1.0)
    assert np.abs(maker.gradients()(inputs, labels)[3].numpy()).max() == 0


@pytest.mark.parametrize('mask', [[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0]])
@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_a_step_with_an_overflow_changes_only_the_scale(mask, optimizer):
    model = in_float16()
    inputs, labels = batch()
    trained_by = make_optimizer(optimizer, 0.1, 50, model.trainable_variables)
    maker = StepMaker(model, trained_by, 0.1, inputs, labels)
    step = maker.step(np.array(mask, dtype=bool))
    step(inputs, labels)
    scale = maker.loss_scale
    state = [v for v in maker.state if all(v is not own for own in scale.variables)]
    before = [v.numpy() for v in state]
    scale.scale.assign(3e38)  # infinite in float16
    step(inputs, labels)
    assert all(v.numpy().tobytes() == old.tobytes() for v, old in zip(state, before))
    assert scale.scale.numpy() == np.float32(1.5e38) and scale.good_steps.numpy() == 0
    scale.scale.assign(2.0 ** 10)
    scale.good_steps.assign(LossScale.GROWTH_STEPS - 1)
    step(inputs, labels)
    moved = [(v.numpy() != old).any() for v, old in zip(maker.variables, before)]
    assert moved == [bool(chosen) for chosen in mask]
    assert scale.scale.numpy() == 2.0 ** 11 and scale.good_steps.numpy() == 0


# ---------------------------------------------------------------- what is refused

class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {}


def two_outputs():
    inputs = keras.Input((4,))
    return keras.Model(inputs, [kinds.Dense(3, name='a')(inputs), kinds.Dense(2, name='b')(inputs)])


def compiled(loss):
    model = classifier(kinds.Dense(3))
    model.compile('sgd', loss)
    return model


@pytest.mark.parametrize('build, labels, reason', [
    (two_outputs, None, '2 outputs'),
    (lambda: OwnStep([keras.Input((4,)), kinds.Dense(3)]), None, 'OwnStep overrides train_step'),
    (lambda: compiled('mse'), None, "compiled with the loss '(mse|mean_squared_error)'"),
    (lambda: compiled(keras.losses.CategoricalCrossentropy(label_smoothing=0.1)), None,
     'smoothed labels'),
    (lambda: classifier(kinds.Dense(1, activation='sigmoid')), None, r'shape \(6, 1\)'),
    (lambda: classifier(kinds.Reshape((2, 2)), kinds.Dense(3)), None, r'shape \(6, 2, 3\)'),
    (lambda: classifier(kinds.Dense(3)), tf.one_hot([0, 1, 2, 0, 1, 2], 3), 'argmax'),
    (lambda: classifier(kinds.Dense(3)), tf.zeros(6), 'labels are float32')],
    ids=['outputs', 'train_step', 'loss', 'smoothing', 'one unit', 'rank', 'one-hot', 'float'])
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(build, labels, reason):
    model = build()
    inputs, integers = batch()
    with pytest.raises(UserError, match=reason) as error:
        StepMaker(model, None, 0.0, inputs, integers if labels is None else labels)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('loss', ['sparse_categorical_crossentropy', 'categorical_crossentropy',
                                  None])
def test_models_compiled_for_cross_entropy_can_be_trained(loss):
    model = compiled(loss)
    assert np.isfinite(float(TrainingStep(model, sgd(model), everything(model))(*batch()).loss))


class OnePenaltyForEach(kinds.Layer):
    """Adds a penalty of each example, where Keras wants a number."""

    def call(self, x):
        self.add_loss(tf.reduce_sum(x, axis=1))
        return x


def test_a_penalty_that_is_no_number_is_refused():
    model = classifier(OnePenaltyForEach(), kinds.Dense(3))
    with pytest.raises(UserError, match='the penalty of a step has shape .* allowed is one number'):
        StepMaker(model, sgd(model), 0.0, *batch())
