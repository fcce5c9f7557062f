"""Tests the prefix of the forward pass: which nodes belong to it, and where a cut is cheapest."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.steps.masked_step import StepMaker
from elastic.steps.prefix_cut import cheapest_cut, read_outside, repeatable
from elastic.steps.prefix_steps import PrefixSteps
from elastic.steps.step_graph import Node, StepGraph
from small_steps import batch, conv_stack, residual

CHEAP, DEAR = 1e-9, 1.0  # ms per byte or operation


def graph_of(nodes, left_out=()):
    """Returns a StepGraph. nodes: {name: (op, tensors that it reads)}.

    left_out: names outside the forward pass.
    """
    made, arguments = {}, itertools.count()
    for name, (op, tensors) in nodes.items():
        made[name] = Node(op, [tensor.split(':')[0] for tensor in tensors], list(tensors),
                          next(arguments) if op == '_Arg' else None)
    return StepGraph(made, frozenset(nodes).difference(left_out), {}, {}, {})


def reading(*names):
    return [name + ':0' for name in names]


# ---------------------------------------------------------------- what may be stored

ARGUMENTS = {name: ('_Arg', []) for name in ('images', 'labels', 'kernel', 'moving', 'constant')}


def found_in(more, left_out=(), called=None):
    """Returns the Repeatable of two convolutions and the nodes `more`.

    The second convolution has the weight `kernel`, the first of two trainable tensors.
    """
    nodes = dict(ARGUMENTS, weight=('ReadVariableOp', reading('kernel')),
                 first=('Conv2D', reading('images', 'constant')),
                 second=('Conv2D', reading('first', 'weight')), **more)
    return repeatable(graph_of(nodes, left_out), {2: 0}, 2, [0], [1], called or {})


def test_each_op_depends_on_the_tensors_before_it():
    found = found_in({'third': ('Relu', reading('second'))})
    assert set(found.needs) == {'images', 'first', 'second', 'third'}
    assert found.prefix_of([True, False]) == {'images', 'first'}
    assert found.prefix_of([False, True]) == set(found.needs)
    assert [found.tensors_of(names).tolist() for names in ([], ['first'], ['first', 'third'])] == [
        [False, False], [False, False], [True, False]]


@pytest.mark.parametrize('op', ['RandomUniform', 'StatelessRandomUniformV2', 'Multinomial',
                                'StatefulStandardNormalV2', 'RngReadAndSkip', 'EagerPyFunc'])
def test_random_ops_and_all_after_them_are_not_repeatable(op):
    found = found_in({'drawn': (op, reading('constant')),
                      'sum': ('AddV2', reading('first', 'drawn')),
                      'after': ('Relu', reading('sum')), 'beside': ('Relu', reading('first'))})
    assert set(found.needs) == {'images', 'first', 'second', 'beside'}


@pytest.mark.parametrize('op', ['While', 'StatelessIf', 'StatefulPartitionedCall'])
def test_a_function_is_repeatable_unless_it_draws_or_writes(op):
    for inside, there in (({'MatMul', 'TensorListSetItem'}, True), ({'RandomUniform'}, False),
                          ({'MatMul', 'AssignVariableOp'}, False)):
        found = found_in({'loop': (op, reading('first'))}, called={'loop': inside})
        assert ('loop' in found.needs) == there


def test_readers_of_changing_variables_are_not_repeatable():
    mean = {'mean': ('ReadVariableOp', reading('moving')),
            'normal': ('Sub', reading('first', 'mean')), 'after': ('Relu', reading('normal'))}
    assert {'normal', 'after'} <= set(found_in(mean).needs)
    for write in ('AssignSubVariableOp', 'ResourceScatterUpdate', 'ResourceApplyGradientDescent'):
        changed = dict(mean, write=(write, reading('moving', 'first')))
        assert set(found_in(changed, left_out=['write']).needs) == {'images', 'first', 'second'}


def test_an_op_that_reads_a_trainable_weight_is_repeatable():
    update = {'update': ('ResourceApplyGradientDescent', reading('kernel', 'first'))}
    found = found_in(update, left_out=['update'])
    assert found.tensors_of(['second']).tolist() == [True, False]


def test_ops_that_read_labels_are_not_repeatable():
    found = found_in({'mixed': ('Mul', reading('first', 'labels')),
                      'loss': ('Sum', reading('mixed'))})
    assert not {'labels', 'mixed', 'loss'} & set(found.needs)


# ---------------------------------------------------------------- what the rest of the step reads

def test_read_outside_finds_what_the_rest_of_the_step_reads():
    graph = graph_of({'x': ('_Arg', []), 'a': ('Relu', reading('x')), 'b': ('Split', reading('a')),
                      'c': ('Mul', ['b:1', 'x:0']), 'loss': ('Sum', ['c:0', 'b:0']),
                      'unwanted': ('Neg', reading('a'))})
    prefix = frozenset(('x', 'a', 'b'))
    assert read_outside(graph, prefix, ['loss']) == ['b:0', 'b:1', 'x:0']
    assert read_outside(graph, prefix, ['loss', 'unwanted']) == ['a:0', 'b:0', 'b:1', 'x:0']
    assert read_outside(graph, prefix, []) == []


# ---------------------------------------------------------------- the cheapest cut

def random_instance(rng):
    """Draws (graph, prefix, wanted, nbytes, ms) of a few nodes with one output each."""
    count, arguments = rng.randint(2, 8), rng.randint(1, 3)
    nodes, names = {}, ['n{}'.format(i) for i in range(count)]
    for i, name in enumerate(names):
        sources = set(rng.randint(0, i, rng.randint(1, 4)).tolist()) if i >= arguments else ()
        nodes[name] = ('Op' if sources else '_Arg', reading(*(names[j] for j in sorted(sources))))
    wanted = reading(*rng.choice(names, rng.randint(1, min(4, count) + 1), replace=False))
    nbytes = {name + ':0': int(rng.randint(1, 10)) for name in names if rng.rand() < 0.7}
    ms = {name: float(rng.choice([0, rng.randint(1, 10), rng.rand()])) for name in names}
    return graph_of(nodes), frozenset(names), sorted(wanted), nbytes, ms


def least_cost(graph, prefix, wanted, nbytes, ms):
    """Tries all sets of stored and recomputed nodes; returns the least cost, inf if none works."""
    least, names = np.inf, sorted(prefix)
    needed = {tensor.split(':')[0] for tensor in wanted}
    for states in itertools.product('-sr', repeat=len(names)):
        state = dict(zip(names, states))
        there = {name for name in names if state[name] != '-'}
        again = [name for name in names if state[name] == 'r']
        if needed <= there and all(there.issuperset(graph.nodes[name].data)
                                   and graph.nodes[name].op != '_Arg' for name in again):
            least = min(least, sum(ms[name] for name in again) + sum(
                nbytes.get(name + ':0', np.inf) for name in names if state[name] == 's'))
    return least


def assert_gives_all(graph, prefix, wanted, cut):
    """Asserts that the recomputed nodes can compute all wanted tensors from the stored."""
    def given(tensor):
        name = tensor.split(':')[0]
        return tensor in cut.tensors or name in cut.recomputed or name not in prefix
    assert all(map(given, wanted))
    for name in cut.recomputed:
        assert graph.nodes[name].op != '_Arg' and all(map(given, graph.nodes[name].tensors))


def test_the_cut_is_the_cheapest_of_all():
    rng, impossible, again = np.random.RandomState(0), 0, 0
    for _ in range(250):
        graph, prefix, wanted, nbytes, ms = random_instance(rng)
        least = least_cost(graph, prefix, wanted, nbytes, ms)
        cut = cheapest_cut(graph, prefix, wanted, nbytes, ms, float)
        if cut is None:
            assert np.isinf(least)
            impossible += 1
            continue
        assert_gives_all(graph, prefix, wanted, cut)
        cost = sum(nbytes[tensor] for tensor in cut.tensors) + sum(
            ms[name] for name in cut.recomputed)
        assert cost == pytest.approx(least, abs=1e-3)
        assert cut.nbytes == sum(nbytes[tensor] for tensor in cut.tensors)
        assert cut.skipped == prefix - cut.recomputed
        assert cut.skipped_ms == pytest.approx(sum(ms[name] for name in cut.skipped))
        again += bool(cut.recomputed)
    assert impossible > 20 and again > 50


def test_only_outputs_that_are_read_are_stored():
    graph = graph_of({'x': ('_Arg', []), 'split': ('Split', reading('x')),
                      'relu': ('Relu', ['split:2'])})
    nbytes = {'x:0': 99, 'split:0': 1, 'split:1': 1, 'split:2': 1, 'relu:0': 9}
    cut = cheapest_cut(graph, frozenset(graph.nodes), ['relu:0', 'split:0'], nbytes,
                       {'split': 50.0, 'relu': 1.0}, float)
    assert cut.tensors == ['split:0', 'split:2'] and cut.recomputed == {'relu'}


# ---------------------------------------------------------------- real networks

ALL_DEAR = {'* flops': DEAR, '* elements': DEAR}


def cut_of(model, trained, rates=ALL_DEAR):
    """Returns (PrefixSteps, Cut) for a step that trains the tensors `trained`."""
    prefixes = PrefixSteps(StepMaker(model, None, 0.0, *batch()))
    mask = np.isin(np.arange(len(model.trainable_variables)), trained)
    return prefixes, prefixes.cut_off(mask, rates, lambda size: CHEAP * size)


def test_all_layers_before_the_deepest_trained_tensor_are_skipped():
    model = conv_stack()
    _, cut = cut_of(model, [2, 4])
    assert [any(layer in name for name in cut.skipped) for layer in (
        'conv1', 'conv2', 'conv3', 'conv4')] == [True, True, False, False]
    assert cut.nbytes == 12 * 12 * 5 * 4 and len(cut.tensors) == 1 and not cut.recomputed


def test_full_training_stores_only_the_images():
    _, cut = cut_of(conv_stack(), range(6))
    assert cut.nbytes == 12 * 12 * 3 * 4 and cut.skipped_ms == 0


def test_the_sum_of_two_branches_is_stored_once():
    _, cut = cut_of(residual(), [2, 3, 4], {'Conv2D flops': DEAR})  # the average is recomputed
    assert len(cut.tensors) == 1 and cut.nbytes == 12 * 12 * 4 * 4 and cut.recomputed
    _, cut = cut_of(residual(), [2, 3, 4])
    assert len(cut.tensors) == 2 and cut.nbytes == 12 * 12 * 4 * 4 + 4 * 4 and not cut.recomputed


def test_training_the_head_stores_averages_and_no_maps():
    _, cut = cut_of(residual(), [3, 4])
    assert cut.nbytes == 8 * 4


def dropout_in(place):
    inputs = keras.Input((12, 12, 3))
    x = keras.layers.Dropout(0.5)(inputs) if place == 'front' else inputs
    x = keras.layers.Conv2D(4, 3)(x)
    x = keras.layers.Flatten()(keras.layers.Dropout(0.5)(x) if place == 'middle' else x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


@pytest.mark.parametrize('place, nbytes', [('front', 12 * 12 * 3 * 4), ('middle', 10 * 10 * 4 * 4)])
def test_dropout_is_drawn_after_the_cut(place, nbytes):
    prefixes, cut = cut_of(dropout_in(place), [2, 3])
    assert cut.nbytes == nbytes
    read = prefixes.cached(np.arange(4) >= 2, cut).read
    assert any('Random' in op for op in read.nodes.values())
    assert any(op == 'Conv2D' for op in read.nodes.values()) == (place == 'front')


def test_a_recurrent_layer_with_dropout_is_not_in_the_prefix():
    def deepest(**dropout):
        inputs = keras.Input((12, 36))
        x = keras.layers.LSTM(4, **dropout)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(3)(x))
        sequences, labels = batch()
        maker = StepMaker(model, None, 0.0, tf.reshape(sequences, (4, 12, 36)), labels)
        return PrefixSteps(maker).cut_off(np.arange(5) >= 3, ALL_DEAR,
                                          lambda size: CHEAP * size).nbytes
    # Keras 2.7 traces the layer as a function, in which shapes are unknown.
    assert deepest() == (4 * 4 if keras_stack.KERAS_3 else 12 * 36 * 4)
    assert deepest(dropout=0.5) > 4 * 4 and deepest(recurrent_dropout=0.5) > 4 * 4
