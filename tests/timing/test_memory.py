"""Tests the predicted working memory: entries of a traced step, peaks of masks, storage."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.timing.liveness import memory_of
from elastic.timing.memory import Memory, Room, largest_batch
from elastic.timing.table import TensorTimings
from small_runs import script
from small_steps import KERNEL_1, KERNEL_2, KERNEL_3, KERNEL_4, conv_stack, maker_of, mask_of
from timing_tables import by_bits, random_masks, table_of_branching


@pytest.fixture(scope='module')
def memory():
    return memory_of(maker_of(conv_stack()))


def made_up():
    """Returns a Memory of two tensors: 100 bytes are kept for tensor 0, 30 an image for any."""
    return Memory(np.array([[True, False], [True, True]]), np.array([0, 1, 1]),
                  np.array([0, 0, 2]), np.array([6, 3, 5]), np.array([100.0, 0, 0]),
                  np.array([0.0, 30, 20]), np.array([100.0, 0]), 4, 7)


def test_peak_is_the_most_that_is_held_at_once():
    memory = made_up()
    assert memory.peak([True, False]) == 100 + 4 * 50
    assert memory.peak([False, True]) == memory.forward_peak() == 4 * 50
    assert memory.peak([True, False], images=1) == 150
    assert memory.importance_peak(1) == 150 + 2 * 7
    assert Room(memory, 300).fits([True, True]) and not Room(memory, 299).fits([True, True])


def test_a_layer_with_a_function_of_its_own_is_no_obstacle():
    class Own(keras.layers.Layer):
        def build(self, shape):
            self.run = tf.function(tf.nn.relu)

        def call(self, inputs):
            return self.run(inputs)
    inputs = keras.Input((64,))
    model = keras.Model(inputs, keras.layers.Dense(3)(Own()(keras.layers.Dense(64)(inputs))))
    maker = StepMaker(model, make_optimizer('sgd', 0.01, 50, model.trainable_variables), 0.0,
                      tf.zeros((64, 64)), tf.zeros((64,), tf.int32))
    assert memory_of(maker).peak(np.ones(4, bool)) >= 4 * 64 * 64


def test_largest_batch():
    assert largest_batch(lambda images: images <= 5, 16) == 5
    assert largest_batch(lambda images: images <= 5, 16, 16) == 4
    assert largest_batch(lambda images: images <= 7, 7, 16) == 4  # 7, 6 and 5 are no part of it
    assert largest_batch(lambda images: False, 16) is None


def test_each_activation_is_kept_for_the_tensors_that_need_it(memory):
    """The outputs of ReLU: for the next kernel, and to carry the error gradient further back."""
    kept = {bits: nbytes for bits, nbytes in by_bits(memory.sets, memory.kept).items() if nbytes}
    pixels, k1, k2, k3, k4 = [4 * 4 * 144] + [1 << k for k in (
        KERNEL_1, KERNEL_2, KERNEL_3, KERNEL_4)]
    assert kept == {k1 | k2: 4 * pixels, k1 | k2 | k3: 5 * pixels,
                    k1 | k2 | k3 | k4: (6 + 7) * pixels}


def test_a_wider_mask_never_needs_less(memory):
    for mask in random_masks(6, 40):
        for k in range(6):
            assert memory.peak(mask | mask_of(k)) >= memory.peak(mask)
    assert memory.forward_peak() <= memory.peak(mask_of(5)) < memory.peak(mask_of(0))
    assert memory.peak(mask_of(0), 2) < memory.peak(mask_of(0))


def test_a_table_keeps_memory(tmp_path, memory):
    table = table_of_branching()
    table.save(str(tmp_path / 't.json'))
    assert TensorTimings.load(str(tmp_path / 't.json')).memory is None
    content = json.loads(json.dumps(memory.stored()))
    restored = Memory.restored(content)
    for mask in random_masks(6, 10):
        assert restored.peak(mask) == memory.peak(mask)


@pytest.mark.thorough
def test_the_prediction_is_what_the_allocator_counts():
    status, output, errors = script(
        os.path.join('benchmarks', '_memory_worker.py'), 'mobilenetv2', '0.35', '64', '4')
    assert status == 0, errors
    rows = json.loads(output.splitlines()[-1])
    assert {'forward', 'head', 'full'} <= set(rows)
    if rows['full']['counted'] is None:
        pytest.skip('the trace of this TensorFlow has no allocations')
    for name in ('last 60 %', 'BN + bias', 'full'):  # fewer tensors: the order of ops may differ
        assert rows[name]['predicted'] == pytest.approx(rows[name]['counted'], rel=0.1), name
