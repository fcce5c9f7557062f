"""Tests the attribution of op times: real traces, missing events, loops, ops compiled by XLA."""

import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.steps.step_graph import CONTROL_FLOW, Node, StepGraph
from elastic.timing import report
from elastic.timing.attribution import attribute
from timing_tables import by_bits
from traced_networks import branching, plain, traced


def groups(times):
    return by_bits(times.group_tensors, times.group_ms)


def estimated(times):
    return by_bits(times.group_tensors, times.estimated_ms)


@pytest.mark.parametrize('build, optimizer', [
    (plain, ('sgd',)), (branching, ('sgd',)), (branching, ('adam',)), (branching, ('sgd', 0.1))])
def test_a_real_trace_is_attributed_to_all_but_a_twentieth(build, optimizer):
    case = traced(build, *optimizer)
    times = attribute(case.graph, case.times, len(case.variables))
    assert times.coverage >= report.MIN_COVERAGE
    of_all_steps = sum(case.times.get(name, 0) for name, k in case.graph.update.items()
                       if k is None)
    attributed = times.group_ms.sum() + times.update.sum() + of_all_steps
    outside = sum(ms for name, ms in case.times.items() if name not in case.graph.forward)
    assert attributed == pytest.approx(times.coverage * outside + times.estimated_ms.sum(),
                                       rel=1e-6)


def test_events_that_belong_to_no_node_lower_the_coverage_and_are_listed():
    case = traced(branching)
    whole = attribute(case.graph, case.times, 8)
    outside = sum(ms for name, ms in case.times.items() if name not in case.graph.forward)
    strange = attribute(case.graph, dict(case.times, **{'renamed/op': 3 * outside}), 8)
    assert strange.coverage == pytest.approx(whole.coverage / 4, rel=1e-6)
    assert strange.left_out[0] == ('renamed/op', pytest.approx(3 * outside))
    assert groups(strange) == groups(whole)


def test_an_op_without_events_is_estimated_from_like_ops():
    """By ops of its type, else by all; FLOPs and output elements do not compare."""
    nodes = {name: Node(op, [], [], None) for name, op in
             [('slow', 'MatMul'), ('found', 'Relu'), ('quick', 'Mul'), ('alike', 'MatMul'),
              ('lost', 'Conv2D'), ('gone', 'Cast')]}
    work = {'slow': ('flops', 1000.0), 'found': ('flops', 1000.0), 'quick': ('elements', 10.0),
            'alike': ('flops', 250.0), 'lost': ('flops', 500.0), 'gone': ('elements', 20.0)}
    backward = {'slow': 1, 'quick': 1, 'found': 1, 'lost': 2, 'gone': 4, 'alike': 8}
    graph = StepGraph(nodes, frozenset(), backward, {}, work)
    times = attribute(graph, {'slow': 8.0, 'quick': 0.01, 'found': 2.0}, 4)
    assert estimated(times) == {1: 0, 2: pytest.approx(2.5), 4: pytest.approx(0.02),
                                8: pytest.approx(2.0)}


def recurrent():
    inputs = keras.Input((12, 8))
    x = keras.layers.RNN(keras.layers.LSTMCell(16), name='rnn')(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))


@pytest.mark.thorough
def test_a_loop_is_priced_whole_for_the_tensors_that_need_it():
    """TensorFlow runs a whole loop or nothing: kernel, recurrent kernel and bias share its cost."""
    case = traced(recurrent)
    loops = {name: node for name, node in case.graph.nodes.items()
             if node.op in CONTROL_FLOW}
    assert not {'Enter', 'Switch', 'NextIteration'}.intersection(
        node.op for node in case.graph.nodes.values())
    backward, = [name for name in loops if name in case.graph.backward]
    assert case.graph.backward[backward] == 0b111 and len(loops) == 2
    assert set(loops) - {backward} <= case.graph.forward
    events = {name: ms for name, ms in case.times.items() if name.startswith(backward + '/')}
    assert len(events) > 20
    times = attribute(case.graph, case.times, 5)
    assert times.coverage >= report.MIN_COVERAGE
    assert groups(times)[0b111] >= sum(events.values()) > 0
    assert groups(times).get(0b1, 0) < sum(events.values()) / 10


@keras_stack.register
class Compiled(keras.layers.Dense):
    """Computes a Dense layer in a function that XLA compiles, as a user may write it."""

    def build(self, input_shape):
        super().build(input_shape)
        self.function = tf.function(lambda x, w, b: tf.nn.relu(x @ w + b), jit_compile=True)

    def call(self, inputs):
        return self.function(inputs, tf.convert_to_tensor(self.kernel),
                             tf.convert_to_tensor(self.bias))


def compiled():
    inputs = keras.Input((64,))
    x = Compiled(128, name='second')(Compiled(128, name='first')(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))


def test_a_layer_that_xla_compiles_is_priced_as_the_one_op_it_is():
    case = traced(compiled)
    calls = {mask: name for name, mask in case.graph.backward.items()
             if case.graph.nodes[name].op == 'PartitionedCall'}
    assert sorted(calls) == [0b11, 0b1111]
    times = attribute(case.graph, case.times, 6)
    for mask, name in calls.items():
        assert case.times[name] > 0 and groups(times)[mask] >= case.times[name]
