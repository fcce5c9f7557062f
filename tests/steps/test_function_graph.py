"""Tests simplified graphs: nested calls become nodes, and reduced graphs keep their order."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.steps.inlining import CALLS
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.training_step import TrainingStep
from small_models import values


@keras_stack.register
class Nested(keras.layers.Layer):
    """Computes a Dense layer in a function within a function, which counts its calls."""

    def __init__(self, units, jit_compile=None, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        options = {'jit_compile': True} if jit_compile else {}
        self.scaled = tf.function(self._scaled, **options)
        self.counted = tf.function(self._counted)

    def build(self, input_shape):
        self.kernel = self.add_weight(name='kernel', shape=(input_shape[-1], self.units),
                                      initializer='glorot_uniform')
        self.scale = self.add_weight(name='scale', shape=(self.units,), initializer='ones')
        self.calls = self.add_weight(name='calls', shape=(), initializer='zeros', trainable=False)
        super().build(input_shape)

    def _scaled(self, x):
        return tf.nn.tanh(tf.matmul(x, keras_stack.raw(self.kernel))) * keras_stack.raw(self.scale)

    def _counted(self, x):
        keras_stack.raw(self.calls).assign_add(1.0)
        return self.scaled(x) / keras_stack.raw(self.calls)

    def call(self, inputs):
        return self.counted(inputs)


def nested_model(**options):
    keras_stack.set_seed(0)
    inputs = keras.Input((4,))
    x = Nested(5, name='first', **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(Nested(6, name='second')(x)))


def batch():
    rng = np.random.RandomState(0)
    return tf.constant(rng.rand(4, 4), tf.float32), tf.constant([0, 1, 2, 0], tf.int32)


def maker_of(model):
    optimizer = make_optimizer('sgd', 0.1, 50, model.trainable_variables)
    return StepMaker(model, optimizer, 1e-2, *batch())


def test_nested_functions_become_nodes_with_the_same_effect():
    ends = []
    for cut in (False, True):
        model = nested_model()
        maker = maker_of(model)
        everything = np.ones(len(maker.variables), dtype=bool)
        step = maker.step(everything) if cut else TrainingStep(
            model, maker.optimizer, everything, 1e-2)
        losses = [float(step(*batch()).loss) for _ in range(3)]
        ends.append((losses, values(model.variables)))
        if cut:
            assert not set(step.nodes.values()) & set(CALLS)
            assert model.get_layer('first').calls.numpy() == 3  # one per step
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-6)
    for plain, inlined in zip(ends[0][1], ends[1][1]):
        np.testing.assert_allclose(inlined, plain, rtol=1e-5, atol=1e-7)


def assert_each_tensor_trains_alone(maker):
    n = len(maker.variables)
    for k in range(n):
        before = values(maker.variables)
        maker.step(np.arange(n) == k)(*batch())
        moved = [(v.numpy() != old).any() for v, old in zip(maker.variables, before)]
        assert moved == [i == k for i in range(n)]


def test_an_unselected_weight_in_a_nested_function_stays():
    assert_each_tensor_trains_alone(maker_of(nested_model()))


@pytest.mark.skipif(not keras_stack.KERAS_3,
                    reason='TensorFlow 2.6 and 2.7 compile no gradients on a CPU')
def test_a_function_that_xla_compiles_stays_one_node():
    model = nested_model(jit_compile=True)
    maker = maker_of(model)
    plain = TrainingStep(model, None, np.ones(len(maker.variables)))
    expected = float(plain(*batch()).loss)
    model.get_layer('first').calls.assign(0)
    model.get_layer('second').calls.assign(0)
    step = maker.step(np.ones(len(maker.variables)))
    assert set(step.nodes.values()) & set(CALLS)
    assert float(step(*batch()).loss) == pytest.approx(expected, rel=1e-5)


@keras_stack.register
class Latest(keras.layers.Layer):
    """Writes a variable and adds it, three times; the result depends on the order."""

    def build(self, input_shape):
        self.memory = self.add_weight(name='memory', shape=(), initializer='zeros',
                                      trainable=False)
        super().build(input_shape)

    def call(self, inputs):
        memory = keras_stack.raw(self.memory)
        for value in (1.0, 5.0, 2.0):
            memory.assign(value)
            inputs = inputs + memory.read_value()
        return inputs


def test_a_reduced_step_keeps_the_order_of_writes_and_reads():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(Latest()(inputs)))
    maker = maker_of(model)
    plain = TrainingStep(model, None, [True, True])
    for mask in ([True, False], [False, True], [True, True]):
        expected = float(plain(*batch()).loss)
        assert float(maker.step(mask)(*batch()).loss) == pytest.approx(expected, rel=1e-6)


@keras_stack.register
class Offsets(keras.layers.Layer):
    """Adds two weights of equal shape, which share one gradient tensor."""

    def build(self, input_shape):
        self.offsets = [self.add_weight(name=name, shape=(4, 4), initializer='zeros')
                        for name in ('a', 'b')]
        super().build(input_shape)

    def call(self, inputs):
        first, second = map(keras_stack.raw, self.offsets)
        return inputs + (tf.identity(first) + tf.identity(second))


def test_weights_that_share_a_gradient_are_trained_separately():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(Offsets()(inputs)))
    assert_each_tensor_trains_alone(maker_of(model))


@keras_stack.register
class Noise(keras.layers.Layer):
    """Adds the noise of TensorFlow's stateful random ops."""

    def call(self, inputs):
        shape = tf.shape(inputs)
        whole = tf.random.uniform(shape, 0, 3, tf.int32)
        return inputs + tf.random.uniform(shape) * tf.random.normal(shape) + (
            tf.random.truncated_normal(shape) + tf.cast(whole, inputs.dtype))


def test_unseeded_noise_repeats_in_a_trial_and_changes_in_steps():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(Noise()(inputs)))
    maker = StepMaker(model, None, 0.0, tf.ones((6, 4)), tf.zeros(6, tf.int32))
    batch = tf.ones((6, 4)), tf.zeros(6, tf.int32)
    quiet, noisy = maker.gradients(), maker.forward()
    assert len({float(quiet(*batch)[0]) for _ in range(4)}) == 1
    assert len({float(noisy(*batch)[0]) for _ in range(4)}) == 4
