"""Tests which ops each gradient and each update needs."""

import collections
import re

import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.errors import UserError
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.step_graph import Node, analyse, check_effects, merged
from traced_networks import branching, executed, plain

# Sets of tensors that need an op, by layer and op type, derived by hand.
PLAIN_NEEDS = {
    ('conv', 'Conv2DBackpropFilter'): [{0}],
    ('conv', 'BiasAddGrad'): [{1}],
    ('mid', 'MatMul'): [{2}, {0, 1}],  # weight gradient; error gradient for the convolution
    ('mid', 'BiasAddGrad'): [{3}],
    ('mid', 'ReluGrad'): [{0, 1, 2, 3}],
    ('head', 'MatMul'): [{4}, {0, 1, 2, 3}],
    ('head', 'BiasAddGrad'): [{5}]}
BRANCHING_NEEDS = {
    ('stem', 'Conv2DBackpropFilter'): [{0}],
    ('stem', 'BiasAddGrad'): [{1}],
    ('stem', 'ReluGrad'): [{0, 1}],
    ('left', 'Conv2DBackpropFilter'): [{2}],
    ('left', 'Conv2DBackpropInput'): [{0, 1}],  # not the tensors of the other branch
    ('left', 'BiasAddGrad'): [{3}],
    ('left', 'ReluGrad'): [{0, 1, 2, 3}],
    ('right', 'Conv2DBackpropFilter'): [{4}],
    ('right', 'Conv2DBackpropInput'): [{0, 1}],
    ('right', 'BiasAddGrad'): [{5}],
    ('right', 'ReluGrad'): [{0, 1, 4, 5}],
    ('head', 'MatMul'): [{6}, {0, 1, 2, 3, 4, 5}],
    ('head', 'BiasAddGrad'): [{7}],
    ('', 'AddN'): [{0, 1}]}  # both branches' error gradients meet at the stem


def tensors(mask):
    return {k for k in range(mask.bit_length()) if mask >> k & 1}


@pytest.mark.parametrize('build, expected', [(plain, PLAIN_NEEDS), (branching, BRANCHING_NEEDS)])
def test_each_backward_op_serves_the_tensors_derived_by_hand(build, expected):
    graph = executed(build).graph
    kinds = {op for _, op in expected} | {'Conv2DBackpropInput'}
    found = collections.defaultdict(list)
    for name, mask in graph.backward.items():
        if graph.nodes[name].op in kinds:
            layer = re.search(r'/(conv|mid|head|stem|left|right)(_\d+)?/', name)
            found[layer.group(1) if layer else '', graph.nodes[name].op].append(tensors(mask))
    assert {key: sorted(map(sorted, sets)) for key, sets in found.items()} == {
        key: sorted(map(sorted, sets)) for key, sets in expected.items()}


@pytest.mark.parametrize('build', [plain, branching])
def test_forward_backward_and_update_split_the_graph(build):
    graph = executed(build).graph
    parts = [set(graph.forward), set(graph.backward), set(graph.update)]
    assert set.union(*parts) == set(graph.nodes)
    assert sum(map(len, parts)) == len(graph.nodes)
    forward_ops = {graph.nodes[name].op for name in graph.forward}
    assert any('MatMul' in op for op in forward_ops)  # fused with bias and ReLU
    assert not any('Grad' in op or 'Backprop' in op for op in forward_ops)


# --- graphs written by hand


def graph_of(lines, results):
    """Returns the Nodes of lines 'name op source source'. results: tensors, in order."""
    nodes, arguments = {}, 0
    for line in lines:
        name, op, *tensors = line.split()
        nodes[name] = Node(op, [t.split(':')[0] for t in tensors],
                           [t if ':' in t else t + ':0' for t in tensors],
                           arguments if op == '_Arg' else None)
        arguments += op == '_Arg'
    for i, tensor in enumerate(results):
        nodes['result {}'.format(i)] = Node('_Retval', [tensor.split(':')[0]], [tensor], i)
    return nodes


TWO_TENSORS = ['x _Arg', 'w0 _Arg', 'w1 _Arg', 'slot _Arg', 'shared _Arg',
               'read0 ReadVariableOp w0', 'read1 ReadVariableOp w1',
               'hidden MatMul x read0', 'loss MatMul hidden read1', 'penalty Mul read0 read1',
               'back Mul loss', 'grad1 MatMul back hidden', 'error MatMul back read1',
               'grad0 MatMul error x']
OWNERS = {1: 0, 2: 1}


@pytest.mark.parametrize('leading', [['loss:0', 'loss:0'], ['loss:0', 'loss:0', 'penalty:0']])
def test_gradients_follow_the_results_of_the_step(leading):
    graph = analyse(graph_of(TWO_TENSORS, leading + ['grad0:0', 'grad1:0']), 2, OWNERS, {},
                    num_results=len(leading))
    assert graph.backward == {'back': 3, 'grad1': 2, 'error': 1, 'grad0': 1}
    assert ('penalty' in graph.forward) == (len(leading) == 3)


def test_a_variable_belongs_to_the_tensor_that_all_writers_serve():
    writes = ['slot0 AssignVariableOp slot grad0', 'shared0 AssignAddVariableOp shared grad0',
              'shared1 AssignAddVariableOp shared grad1', 'of_slot ReadVariableOp slot',
              'of_shared ReadVariableOp shared']
    graph = analyse(graph_of(TWO_TENSORS + writes, ['loss:0', 'loss:0', 'grad0:0', 'grad1:0']), 2,
                    OWNERS, {}, num_results=2)
    assert [graph.update[name] for name in ('slot0', 'of_slot', 'shared0', 'shared1')] == [
        0, 0, 0, 1]
    assert graph.update['of_shared'] is None and graph.update['shared'] is None


def test_the_parts_of_a_loop_merge_into_one_node():
    nodes = graph_of(['x _Arg', 'loop/size Const', 'loop/enter Enter x',
                      'loop/merge Merge loop/enter loop/next', 'loop/body/inner/mul Mul loop/merge',
                      'loop/next NextIteration loop/body/inner/mul', 'loop/exit Exit loop/merge:1',
                      'after Mul loop/exit loop/size'], ['after:0'])
    found = merged(nodes, {'loop': 'While', 'loop/body/inner': 'While'}, {'loop/size'})
    assert {name: (node.op, node.tensors) for name, node in found.items()} == {
        'x': ('_Arg', []), 'loop/size': ('Const', []), 'loop': ('While', ['x:0']),
        'after': ('Mul', ['loop:loop/exit:0', 'loop/size:0']), 'result 0': ('_Retval', ['after:0'])}
    assert merged(nodes, {}) == nodes


# --- effects


def with_backward(backward):
    """Returns a StepMaker of two Dense layers around a layer with the given backward pass."""
    @tf.custom_gradient
    def pass_on(x):
        return tf.identity(x), backward
    inputs = keras.Input((6,))
    x = keras.layers.Dense(5, name='below')(inputs)
    x = keras.layers.Lambda(pass_on)(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name='above')(x))
    return StepMaker(model, make_optimizer('sgd', 1e-3, 100, model.trainable_variables), 5e-4,
                     tf.zeros((4, 6)), tf.constant([0, 1, 2, 1]))


def effects_of(maker):
    return maker.effects(set()).values()


def test_noise_in_a_backward_pass_serves_the_tensors_below_it():
    maker = with_backward(lambda error: error + tf.random.normal(tf.shape(error)))
    check_effects(maker.graph, effects_of(maker))
    noise, = [name for name, node in maker.graph.nodes.items() if node.op == 'RandomStandardNormal']
    assert maker.graph.backward[noise] == 0b11


def test_a_variable_changed_by_the_backward_pass_is_refused_by_name():
    seen = tf.Variable(0.0, name='seen')

    def backward(error):
        seen.assign_add(tf.reduce_sum(tf.square(error)), name='note_the_error')
        return error
    with pytest.raises(UserError, match=r'(?s)note_the_error.*Assign.*trained in part') as error:
        with_backward(backward)
    assert '\n' not in str(error.value)
