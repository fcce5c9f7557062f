"""Tests what one training step computes, what it updates, and what stays bit-identical."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import WarmupCosine, make_optimizer
from elastic.steps.training_step import (
    NUM_RESULTS,
    TrainingStep,
    count_correct,
    evaluation_function,
)
from small_models import values
from small_steps import (
    HEAD_BIAS,
    HEAD_KERNEL,
    KERNEL_1,
    KERNEL_2,
    KERNEL_4,
    N,
    batch,
    conv_stack,
    loss_of,
    mask_of,
)


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_switching_the_mask_creates_no_new_slots(optimizer):
    model = conv_stack()
    trained_by = make_optimizer(optimizer, 0.01, 100, model.trainable_variables)
    count = len(keras_stack.optimizer_variables(trained_by))
    for chosen in ((HEAD_BIAS,), (KERNEL_1, KERNEL_4), range(N)):
        TrainingStep(model, trained_by, mask_of(*chosen), 1e-3)(*batch())
    assert len(keras_stack.optimizer_variables(trained_by)) == count
    assert int(keras_stack.raw(trained_by.iterations)) == 3


def test_the_gradients_returned_are_those_of_the_loss():
    model = conv_stack()
    images, labels = batch()
    step = TrainingStep(model, None, mask_of(KERNEL_1, HEAD_KERNEL), outputs_gradients=True)
    gradients = step(images, labels)[NUM_RESULTS:]
    for variable, gradient in zip(step.variables, gradients):
        kernel = keras_stack.raw(variable).numpy()
        direction = gradient.numpy() / np.linalg.norm(gradient)
        ends = []
        for sign in (1, -1):
            variable.assign(kernel + sign * 1e-2 * direction)
            ends.append(loss_of(model, images, labels))
        variable.assign(kernel)
        slope = (ends[0] - ends[1]) / 2e-2
        assert slope == pytest.approx(float(np.linalg.norm(gradient)), rel=0.05)


# --- Adam


def adam_variables():
    """Returns variables and the gradients of 6 steps, of very different sizes, some zero."""
    rng = np.random.RandomState(3)
    model = linear()
    return model.trainable_variables, [
        [tf.constant(rng.normal(size=tuple(v.shape)) * 10.0 ** rng.randint(-5, 3, tuple(v.shape))
                     * (rng.rand(*v.shape) < 0.8), tf.float32)
         for v in model.trainable_variables] for _ in range(6)]


def test_adam_equals_keras_where_all_tensors_train_from_the_start():
    ends = []
    for make in (make_optimizer, lambda _, rate, steps, variables: keras.optimizers.Adam(
            WarmupCosine(rate, steps))):
        variables, gradients = adam_variables()
        optimizer = make('adam', 0.01, 50, variables)
        keras_stack.build_optimizer(optimizer, variables)
        for of_step in gradients:
            optimizer.apply_gradients(zip(of_step, variables))
        ends.append(values(variables))
    for mine, keras_own in zip(*ends):
        # Equal bits on the paper's stack. Keras 3 takes 1 - 0.999 in float32, which is 5e-5 off.
        np.testing.assert_allclose(mine, keras_own, rtol=0, atol=1e-6 * keras_stack.KERAS_3)
        assert np.abs(mine).max() > 0.5


def test_the_first_adam_step_of_a_late_tensor_has_the_usual_size():
    """A correction by all 20,000 steps would make it 3.16 times the learning rate."""
    model = conv_stack()
    optimizer = make_optimizer('adam', 0.01, 10 ** 9, model.trainable_variables)
    keras_stack.raw(optimizer.iterations).assign(20000)
    mask = mask_of(HEAD_BIAS)
    step = StepMaker(model, optimizer, 0.0, *batch()).step(mask)
    gradient = TrainingStep(model, None, mask, outputs_gradients=True)(*batch())[
        NUM_RESULTS]
    before = values(model.trainable_variables)
    step(*batch())
    moved = values(model.trainable_variables)[HEAD_BIAS] - before[HEAD_BIAS]
    np.testing.assert_allclose(moved, -0.01 * np.sign(gradient), rtol=1e-3)


def test_adam_counts_the_updates_of_each_tensor():
    model = conv_stack()
    optimizer = make_optimizer('adam', 0.01, 100, model.trainable_variables)
    maker = StepMaker(model, optimizer, 1e-3, *batch())
    masks = [mask_of(KERNEL_2, HEAD_BIAS), mask_of(KERNEL_2), mask_of(*range(N))]
    for mask in masks:
        maker.step(mask)(*batch())
    counts = [float(keras_stack.raw(slot)) for of_one in keras_stack.slots(
        optimizer, model.trainable_variables) for slot in of_one if not len(slot.shape)]
    assert counts == list(np.sum(masks, axis=0))
    assert int(keras_stack.raw(optimizer.iterations)) == len(masks)
    state = keras_stack.optimizer_variables(optimizer)
    assert sum(not len(v.shape) and float(keras_stack.raw(v)) == 2 for v in state) == 1


@pytest.mark.parametrize('name', ['sgd', 'adam'])
def test_the_gradient_of_an_embedding_is_made_dense(name):
    model = keras.Sequential([keras.Input((3,), dtype='int32'), keras.layers.Embedding(5, 4),
                              keras.layers.Flatten(), keras.layers.Dense(3)])
    optimizer = make_optimizer(name, 0.01, 100, model.trainable_variables)
    before = values(model.trainable_variables)[0]
    tokens, labels = tf.constant([[1, 1, 2], [4, 1, 2]]), tf.constant([0, 1])
    maker = StepMaker(model, optimizer, 0.0, tokens, labels)
    assert maker.gradients()(tokens, labels)[NUM_RESULTS].shape == (5, 4)
    maker.step([True, False, False])(tokens, labels)
    moved = np.abs(values(model.trainable_variables)[0] - before)
    assert moved[[1, 2, 4]].any(axis=1).all() and not moved[[0, 3]].any()


# --- weight decay and clipping


def linear(seed=1):
    """Returns a softmax regression with weights large enough for decay to matter."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    rng = np.random.RandomState(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.uniform(-1, 1, tuple(variable.shape)).astype(np.float32))
    return model


def points(size=6, seed=2):
    rng = np.random.RandomState(seed)
    return rng.normal(size=(size, 4)).astype(np.float32), rng.randint(0, 3, size).astype(np.int32)


def sgdw_by_hand(weights, bias, x, labels, rate, decay, total_steps, steps, clip_norm=np.inf):
    """Returns [kernel, bias] after SGD with momentum 0.9 and decoupled decay, in float64."""
    parameters = [weights.astype(np.float64), bias.astype(np.float64)]
    momenta = [np.zeros_like(p) for p in parameters]
    for t in range(steps):
        logits = x @ parameters[0] + parameters[1]
        error = np.exp(logits - logits.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(x)), labels] -= 1
        gradients = [gradient * min(1, clip_norm / np.linalg.norm(gradient)) for gradient in (
            x.T @ error / len(x), error.mean(axis=0))]
        now = rate * 0.5 * (1 + np.cos(np.pi * min(t, total_steps) / total_steps))
        for i in range(2):
            momenta[i] = 0.9 * momenta[i] - now * gradients[i]
            parameters[i] = parameters[i] * (1 - now * decay) + momenta[i]
    return parameters


@pytest.mark.parametrize('decay', [0.0, 0.05])
def test_sgd_with_decoupled_decay_equals_the_formula(decay):
    model, (x, labels) = linear(), points()
    start = values(model.trainable_variables)
    step = TrainingStep(model, make_optimizer('sgd', 0.2, 8, model.trainable_variables), [True] * 2,
                        decay)
    for t in range(1, 6):
        step(tf.constant(x), tf.constant(labels))
        by_hand = sgdw_by_hand(start[0], start[1], x, labels, 0.2, decay, 8, t)
        for mine, expected in zip(values(model.trainable_variables), by_hand):
            np.testing.assert_allclose(mine, expected, atol=1e-6)
    without = sgdw_by_hand(start[0], start[1], x, labels, 0.2, 0.05 - decay, 8, 5)
    assert np.abs(values(model.trainable_variables)[0] - without[0]).max() > 1e-3


@pytest.mark.parametrize('chosen', [(True, True), (False, True)])
def test_each_gradient_is_clipped_by_its_own_norm(chosen):
    model, (x, labels) = linear(), points()
    start, clip_norm = values(model.trainable_variables), 0.5
    step = TrainingStep(model, make_optimizer('sgd', 0.2, 8, model.trainable_variables,
                                              clip_norm=clip_norm), list(chosen))
    step(tf.constant(x), tf.constant(labels))
    clipped, plain = [sgdw_by_hand(start[0], start[1], x, labels, 0.2, 0, 8, 1, norm)
                      for norm in (clip_norm, np.inf)]
    expected = [new if trained else old for new, old, trained in zip(clipped, start, chosen)]
    for mine, by_hand in zip(values(model.trainable_variables), expected):
        np.testing.assert_allclose(mine, by_hand, atol=1e-6)
    assert np.linalg.norm(plain[0] - start[0]) > 0.1 > np.linalg.norm(plain[1] - start[1])


def test_the_learning_rate_rises_in_a_line_then_falls_as_a_cosine():
    def rates(warmup_steps):
        optimizer = make_optimizer('sgd', 0.2, 12, linear().trainable_variables, warmup_steps)
        for step in range(13):
            keras_stack.raw(optimizer.iterations).assign(step)
            yield float(keras_stack.learning_rate(optimizer))
    cosine = [0.1 * (1 + np.cos(np.pi * share)) for share in np.arange(9) / 8]
    np.testing.assert_allclose(list(rates(4)), [0.05, 0.1, 0.15, 0.2] + cosine, atol=1e-7)
    np.testing.assert_allclose(list(rates(0))[6], 0.1, atol=1e-7)
    np.testing.assert_allclose(list(rates(20)), 0.01 * np.arange(1, 14), rtol=1e-6)


# --- evaluation


class Calls(keras.layers.Layer):
    """Counts how often it is traced; needs the size of the batch if `static`."""

    def __init__(self, static=False):
        super().__init__()
        self.count, self.static = 0, static

    def call(self, x):
        self.count += 1
        return tf.reshape(x, [x.shape[0] if self.static else -1, 4])


@pytest.mark.parametrize('activation, probability', [
    (None, tf.nn.softmax), ('softmax', tf.nn.softmax), ('sigmoid', tf.sigmoid)])
def test_batches_of_all_sizes_are_evaluated_by_one_trace(activation, probability):
    layer = Calls()
    model = keras.Sequential([keras.Input((2, 2)), layer, keras.layers.Dropout(0.5),
                              keras.layers.Dense(3, activation=activation)])
    x, labels = points(size=11)
    kernel, bias = model.get_weights()
    scores = probability(x @ kernel + bias).numpy()
    evaluate, before = evaluation_function(model), layer.count
    batches = [evaluate(x[i:i + 4].reshape(-1, 2, 2), labels[i:i + 4]) for i in (0, 4, 8)]
    assert layer.count == before + 1
    losses, correct, predicted, found = [[each.numpy() for each in part] for part in zip(*batches)]
    np.testing.assert_array_equal(np.concatenate(predicted), scores.argmax(axis=1))
    np.testing.assert_allclose(np.concatenate(found), scores.max(axis=1), rtol=1e-5)
    assert sum(correct) == (scores.argmax(axis=1) == labels).sum()
    if activation != 'sigmoid':  # their scores do not sum to 1, which Keras treats in its own way
        shares = scores[np.arange(11), labels]
        assert sum(losses) == pytest.approx(-np.log(shares).sum(), rel=1e-4)


def test_saturated_sigmoids_are_ranked_as_without_their_probabilities():
    """TensorFlow compares the logits, unless something else than argmax reads the sigmoids."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation='sigmoid')])
    model.set_weights([np.zeros((4, 3), np.float32), np.float32([30, 50, 40])])  # all become 1
    x, labels = tf.zeros((5, 4)), tf.ones(5, tf.int32)

    @tf.function
    def counted():
        return count_correct(labels, model(x))
    _, correct, predicted, probability = evaluation_function(model)(x, labels)
    assert correct == counted() == 5
    assert set(predicted.numpy()) == {1} and set(probability.numpy()) == {1.0}


def test_a_model_that_needs_the_size_of_a_batch_is_traced_for_each_size():
    class Static(keras.Model):
        def __init__(self):
            super().__init__()
            self.flatten, self.dense = Calls(static=True), keras.layers.Dense(3)

        def call(self, x, training=False):
            return self.dense(self.flatten(x))
    model = Static()
    model(np.ones((4, 2, 2), np.float32))
    evaluate = evaluation_function(model)
    for size in (4, 3):
        *_, predicted, _ = evaluate(np.ones((size, 2, 2), np.float32), np.zeros(size, np.int32))
        assert predicted.shape == (size,)
