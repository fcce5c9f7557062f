"""Tests that the rules of other papers choose what those papers say."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.selection import metrics
from elastic.selection.betti import first_betti, loops
from elastic.selection.importance import Evaluator, Probe, evaluate_importance
from elastic.selection.items import layers_of
from elastic.selection.metrics import METRICS
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer

N = 12  # tensors of the network: five convolutions and a head


@pytest.fixture(scope='module')
def parts():
    """Returns (model, optimizer, batch, StepMaker)."""
    keras_stack.set_seed(0)
    x = inputs = keras.Input((8, 8, 3))
    for _ in range(5):
        x = keras.layers.Conv2D(4, 3, padding='same', activation='relu')(x)
    outputs = keras.layers.Dense(3, name='head')(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    optimizer = make_optimizer('sgd', 0.1, 10, model.trainable_variables)
    rng = np.random.RandomState(0)
    batch = (tf.constant(rng.uniform(0, 1, (4, 8, 8, 3)), tf.float32),
             tf.constant(rng.randint(0, 3, 4), tf.int32))
    return model, optimizer, batch, StepMaker(model, optimizer, 0.0, *batch)


@pytest.fixture
def probe(parts):
    return probe_of(parts)


def probe_of(parts, kind=Probe):
    model, optimizer, batch, maker = parts
    return kind(model, optimizer, [batch], Evaluator(maker))


def by_rank(importance):
    """Asserts that each value outweighs all smaller ones; returns their ranks, 0 for the most."""
    values = np.unique(importance)[::-1]
    for value in values:
        assert value > importance[importance < value].sum()
    return np.searchsorted(-values, -importance)


def test_lisa_draws_whole_layers_after_the_head(parts, probe):
    layers, drawn = layers_of(parts[0]), set()
    for _ in range(20):
        ranks = by_rank(METRICS['lisa'](probe))
        assert (ranks[-2:] == 0).all() and (ranks[:-2] > 0).all()  # the head first
        assert all(len(set(ranks[layers == layer])) == 1 for layer in layers)
        drawn.add(tuple(ranks))
    assert len(drawn) > 10
    assert tuple(by_rank(METRICS['lisa'](probe_of(parts)))) in drawn  # the same seed


def test_autofreeze_freezes_the_front_whose_gradients_change_least(parts):
    """The norms of blocks 0, 1 and 3 stay; only 0 and 1 lie in front."""
    norms = [np.full(N, 2.0), np.full(N, 2.0), np.full(N, 2.0)]
    blocks = np.array_split(np.arange(N), metrics.BLOCKS)
    for block in set(range(metrics.BLOCKS)) - {0, 1, 3}:
        norms[1][blocks[block]] = 30.0 - block  # block 2 changes most
    norms[2] = norms[1] * np.linspace(2, 1, N)  # now the front changes most
    given = iter(norms)

    class Drawn(Probe):
        def gradients(self):
            return [iter(next(given)[:, None])]
    probe = probe_of(parts, Drawn)
    trained = [METRICS['autofreeze'](probe) > 0 for _ in norms]
    front = len(blocks[0]) + len(blocks[1])
    assert trained[0].all()
    assert not trained[1][:front].any() and trained[1][front:].all()
    assert (trained[2] == trained[1]).all()  # what is frozen stays frozen


def test_egeria_freezes_the_front_whose_weights_have_settled(parts):
    blocks = np.array_split(np.arange(N), metrics.BLOCKS)
    moves = np.ones((3, N))
    moves[1, blocks[0]] = 0.1  # below SETTLED of its largest; block 2 too, behind block 1
    moves[1, blocks[2]] = 0.1
    weights = iter(100 + np.cumsum(np.concatenate([np.zeros((1, N)), moves]), axis=0))

    class Moved(Probe):
        @property
        def weights(self):
            return iter(next(weights)[:, None])
    probe = probe_of(parts, Moved)
    trained = [METRICS['egeria'](probe) > 0 for _ in range(4)]
    assert trained[0].all() and trained[1].all()
    for later in trained[2:]:
        assert not later[blocks[0]].any() and later[len(blocks[0]):].all()


def test_egeria_does_not_freeze_what_was_never_trained(parts, probe):
    """Nothing moves: rho may have kept it out so far."""
    for _ in range(2):
        assert (METRICS['egeria'](probe) > 0).all()


@pytest.mark.parametrize('metric', ['autofreeze', 'egeria', 'lisa'])
def test_the_output_is_always_of_use(parts, metric):
    model, optimizer, batch, maker = parts
    evaluator = Evaluator(maker)
    for _ in range(4):
        importance = evaluate_importance(model, optimizer, [batch], metric, evaluator)
        assert importance[-2:].min() > 0


def ring(points, radius=1.0, centre=0.0):
    angle = 2 * np.pi * np.arange(points) / points
    return np.stack([centre + radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def test_betti_counts_loops():
    square = np.eye(4, dtype=bool)
    for i in range(4):
        square[i, (i + 1) % 4] = square[(i + 1) % 4, i] = True
    assert first_betti(square) == 1
    square[0, 2] = square[2, 0] = True  # two triangles fill it
    assert first_betti(square) == 0
    assert first_betti(np.eye(4, dtype=bool)) == 0
    assert loops(ring(16)) == 1
    assert loops(np.concatenate([ring(16), ring(16, centre=9.0)])) == 2
    assert loops(np.arange(16.0)[:, None]) == 0  # a line
    assert loops(ring(3)) == 0


def test_betti_trains_whole_layers_with_the_most_loops_for_their_size(parts):
    model, optimizer, _, maker = parts
    images = np.random.RandomState(1).uniform(0, 1, (12, 8, 8, 3)).astype(np.float32)
    batch = tf.constant(images), tf.zeros(12, tf.int32)
    ranks = by_rank(METRICS['betti'](Probe(model, optimizer, [batch], Evaluator(maker))))
    layers = layers_of(model)
    assert all(len(set(ranks[layers == layer])) == 1 for layer in layers)
    outputs = keras_stack.outputs_by_variable(model, batch[0])
    score = [loops(output.reshape(12, -1)) / output[0].size for output in (
        outputs[id(keras_stack.raw(variable))] for variable in model.trainable_variables)]
    assert max(score) > 0
    assert (np.diff(np.array(score)[np.argsort(ranks)]) <= 0).all()
    head = model.get_layer('head')
    np.testing.assert_allclose(outputs[id(keras_stack.raw(head.kernel))],
                               model(batch[0], training=False), rtol=1e-6)
    assert 'call' not in vars(head)  # the model is as it was
