"""Which ops each gradient needs, and what they take of a trace."""

import collections
import re

import pytest
import tensorflow as tf
from tensorflow import keras

import profiler
from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.steps import step_graph
from elastic.steps.masked_step import StepMaker
from elastic.steps.step_graph import Node, analyse, attribute, check_effects, merged
from elastic.steps.training_step import make_optimizer
from timing_tables import by_bits
from traced_networks import branching, plain, traced

LEFT_KERNEL, RIGHT_KERNEL = 2, 4

# For every layer and op type, the sets of tensors that need such an op: written down by hand.
PLAIN_NEEDS = {
    ('conv', 'Conv2DBackpropFilter'): [{0}],
    ('conv', 'BiasAddGrad'): [{1}],
    ('mid', 'MatMul'): [{2}, {0, 1}],  # own kernel; error gradient to the convolution
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


def groups(times):
    return by_bits(times.group_tensors, times.group_ms)


def estimated(times):
    return by_bits(times.group_tensors, times.estimated_ms)


def tensors(mask):
    return {k for k in range(mask.bit_length()) if mask >> k & 1}


@pytest.mark.parametrize('build, expected', [(plain, PLAIN_NEEDS), (branching, BRANCHING_NEEDS)])
def test_each_backward_op_is_needed_by_the_tensors_derived_by_hand(build, expected):
    graph = traced(build).graph
    kinds = {op for _, op in expected} | {'Conv2DBackpropInput'}
    found = collections.defaultdict(list)
    for name, mask in graph.backward.items():
        if graph.nodes[name].op in kinds:
            layer = re.search(r'/(conv|mid|head|stem|left|right)(_\d+)?/', name)
            found[layer.group(1) if layer else '', graph.nodes[name].op].append(tensors(mask))
    assert {key: sorted(map(sorted, sets)) for key, sets in found.items()} == {
        key: sorted(map(sorted, sets)) for key, sets in expected.items()}


@pytest.mark.parametrize('build', [plain, branching])
def test_forward_backward_and_update_split_the_graph_without_overlap(build):
    graph = traced(build).graph
    parts = [set(graph.forward), set(graph.backward), set(graph.update)]
    assert set.union(*parts) == set(graph.nodes)
    assert sum(map(len, parts)) == len(graph.nodes)
    forward_ops = {graph.nodes[name].op for name in graph.forward}
    assert any('MatMul' in op for op in forward_ops)  # fused with bias and ReLU
    assert not any('Grad' in op or 'Backprop' in op for op in forward_ops)


@pytest.mark.parametrize('optimizer', [('sgd',), ('adam',), ('sgd', 0.1)], ids=str)
@pytest.mark.parametrize('build', [plain, branching])
def test_every_tensor_has_the_same_update_ops_attributed_to_it_alone(build, optimizer):
    """The optimizer treats all tensors alike: what one tensor is charged for, all are."""
    graph = traced(build, *optimizer).graph
    own = collections.defaultdict(collections.Counter)
    for name, k in graph.update.items():
        if graph.nodes[name].op not in step_graph.FREE_OPS:
            own[k][graph.nodes[name].op] += 1
    shared = own.pop(None)
    count = len(traced(build, *optimizer).variables)
    assert sorted(own) == list(range(count))
    assert all(own[k] == own[0] for k in range(count))
    writes = {op: n for op, n in own[0].items() if op.startswith(('Assign', 'ResourceApply'))}
    assert sum(writes.values()) >= 2  # decay; slots and weight, on the paper's stack in one kernel
    # Of the shared ops only the iteration count is written: momentum belongs to its tensor.
    assert sum(n for op, n in shared.items() if op.startswith(('Assign', 'ResourceApply'))) == 1


def test_the_shared_update_ops_do_not_grow_with_the_number_of_tensors():
    """Keras 3 has ops that read a tensor's momentum alone: they are that tensor's."""
    few, more = [collections.Counter(graph.nodes[name].op for name, k in graph.update.items()
                                     if k is None)
                 for graph in (traced(plain).graph, traced(branching).graph)]
    for op in set(few + more) - step_graph.FREE_OPS:
        assert few[op] == more[op], op


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
@pytest.mark.parametrize('build', [plain, branching])
def test_every_tensor_takes_update_time_in_a_real_trace(build, optimizer):
    case = traced(build, optimizer)
    times = attribute(case.graph, case.times, len(case.variables))
    assert times.update.shape == (len(case.variables),)
    assert (times.update > 0).all() and times.update_fixed > 0


@pytest.mark.parametrize('build, optimizer', [
    (plain, ('sgd',)), (branching, ('sgd',)), (branching, ('adam',)), (branching, ('sgd', 0.1))])
def test_a_real_trace_is_attributed_to_all_but_a_twentieth(build, optimizer):
    case = traced(build, *optimizer)
    times = attribute(case.graph, case.times, len(case.variables))
    assert times.coverage >= profiler.MIN_COVERAGE
    attributed = times.group_ms.sum() + times.update.sum() + times.update_fixed
    outside = sum(ms for name, ms in case.times.items() if name not in case.graph.forward)
    assert attributed == pytest.approx(times.coverage * outside + times.estimated_ms.sum(),
                                       rel=1e-6)


def test_an_op_whose_events_are_missing_is_estimated():
    case = traced(branching)
    name, = [n for n, mask in case.graph.backward.items() if mask == 1 << LEFT_KERNEL
             and case.graph.nodes[n].op == 'Conv2DBackpropFilter']
    without = {event: ms for event, ms in case.times.items() if event != name}
    assert len(without) == len(case.times) - 1
    whole, guessed = [attribute(case.graph, times, 8) for times in (case.times, without)]
    assert estimated(whole)[1 << LEFT_KERNEL] == 0
    assert 0.1 < estimated(guessed)[1 << LEFT_KERNEL] / case.times[name] < 10


def test_an_op_type_without_any_event_is_estimated_from_the_others():
    case = traced(branching)
    missing = {n for n, node in case.graph.nodes.items() if node.op == 'Conv2DBackpropFilter'}
    without = {event: ms for event, ms in case.times.items() if event not in missing}
    times = attribute(case.graph, without, 8)
    for k in (0, LEFT_KERNEL, RIGHT_KERNEL):
        assert 0 < estimated(times)[1 << k] <= groups(times)[1 << k]


def test_events_that_belong_to_no_node_lower_the_coverage_and_are_listed():
    case = traced(branching)
    whole = attribute(case.graph, case.times, 8)
    outside = sum(ms for name, ms in case.times.items() if name not in case.graph.forward)
    strange = attribute(case.graph, dict(case.times, **{'renamed/op': 3 * outside}), 8)
    assert strange.coverage == pytest.approx(whole.coverage / 4, rel=1e-6)
    assert strange.left_out[0] == ('renamed/op', pytest.approx(3 * outside))
    assert groups(strange) == groups(whole)


def test_only_like_is_estimated_from_like():
    """FLOPs and output elements are no common measure: work of one kind, no rate of the other."""
    nodes = {name: Node(op, [], [], None) for name, op in
             [('slow', 'MatMul'), ('quick', 'Mul'), ('lost', 'Conv2D'), ('gone', 'Cast')]}
    work = {'slow': ('flops', 1000.0), 'quick': ('elements', 10.0), 'lost': ('flops', 500.0),
            'gone': ('elements', 20.0)}
    graph = step_graph.StepGraph(nodes, frozenset(), {'slow': 1, 'quick': 1, 'lost': 2,
                                                          'gone': 4}, {}, work)
    times = attribute(graph, {'slow': 8.0, 'quick': 0.01}, 3)
    assert estimated(times) == {1: 0, 2: pytest.approx(4.0), 4: pytest.approx(0.02)}


# --- the analysis, on graphs written down by hand


def graph_of(lines, results):
    """name -> Node of 'name op source source' lines; results: tensors, in order."""
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
def test_gradients_follow_as_many_results_as_the_step_has(leading):
    graph = analyse(graph_of(TWO_TENSORS, leading + ['grad0:0', 'grad1:0']), 2, OWNERS, {},
                    num_results=len(leading))
    assert graph.backward == {'back': 3, 'grad1': 2, 'error': 1, 'grad0': 1}
    assert ('penalty' in graph.forward) == (len(leading) == 3)


def test_a_variable_belongs_to_a_tensor_only_if_all_its_writers_serve_that_one():
    writes = ['slot0 AssignVariableOp slot grad0', 'shared0 AssignAddVariableOp shared grad0',
              'shared1 AssignAddVariableOp shared grad1', 'of_slot ReadVariableOp slot',
              'of_shared ReadVariableOp shared']
    graph = analyse(graph_of(TWO_TENSORS + writes, ['loss:0', 'loss:0', 'grad0:0', 'grad1:0']), 2,
                    OWNERS, {}, num_results=2)
    assert [graph.update[name] for name in ('slot0', 'of_slot', 'shared0', 'shared1')] == [
        0, 0, 0, 1]
    assert graph.update['of_shared'] is None and graph.update['shared'] is None


def test_a_loop_is_one_node_with_all_that_it_was_taken_apart_into():
    nodes = graph_of(['x _Arg', 'loop/size Const', 'loop/enter Enter x',
                      'loop/merge Merge loop/enter loop/next', 'loop/body/inner/mul Mul loop/merge',
                      'loop/next NextIteration loop/body/inner/mul', 'loop/exit Exit loop/merge:1',
                      'after Mul loop/exit loop/size'], ['after:0'])
    found = merged(nodes, {'loop': 'While', 'loop/body/inner': 'While'}, {'loop/size'})
    assert {name: (node.op, node.tensors) for name, node in found.items()} == {
        'x': ('_Arg', []), 'loop/size': ('Const', []), 'loop': ('While', ['x:0']),
        'after': ('Mul', ['loop:loop/exit:0', 'loop/size:0']), 'result 0': ('_Retval', ['after:0'])}
    assert merged(nodes, {}) is nodes


# --- networks with loops


def recurrent(cell):
    def build():
        inputs = keras.Input((12, 8))
        x = keras.layers.RNN(cell(16), name='rnn')(inputs)
        return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))
    return build


LSTM, GRU = recurrent(keras.layers.LSTMCell), recurrent(keras.layers.GRUCell)


@pytest.mark.parametrize('build', [LSTM, GRU], ids=['LSTM', 'GRU'])
def test_a_loop_is_priced_whole_for_the_tensors_that_need_it(build):
    """TensorFlow runs all of a loop or nothing: kernel, recurrent kernel and bias are one."""
    case = traced(build)
    loops = {name: node for name, node in case.graph.nodes.items()
             if node.op in step_graph.CONTROL_FLOW}
    assert not {'Enter', 'Switch', 'NextIteration'}.intersection(
        node.op for node in case.graph.nodes.values())
    backward, = [name for name in loops if name in case.graph.backward]
    assert case.graph.backward[backward] == 0b111 and len(loops) == 2
    assert set(loops) - {backward} <= case.graph.forward
    events = {name: ms for name, ms in case.times.items() if name.startswith(backward + '/')}
    assert len(events) > 20
    times = attribute(case.graph, case.times, 5)
    assert times.coverage >= profiler.MIN_COVERAGE
    assert groups(times)[0b111] >= sum(events.values()) > 0
    assert groups(times).get(0b1, 0) < sum(events.values()) / 10


# --- what XLA compiles, and what happens beside the gradients


@keras_stack.register
class Compiled(keras.layers.Dense):
    """A Dense layer that the user has XLA compile."""

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


def with_backward(backward):
    """Dense -> layer whose backward pass is `backward` (error gradient -> the same) -> Dense."""
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


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
@pytest.mark.parametrize('build', [plain, branching])
def test_no_effect_of_an_optimizer_is_refused(build, optimizer):
    graph = traced(build, optimizer).graph
    writes = [name for name in graph.update if graph.nodes[name].op.startswith(
        ('Assign', 'ResourceApply'))]
    assert len(writes) > 2 * len(traced(build, optimizer).variables)
    check_effects(graph, writes)
