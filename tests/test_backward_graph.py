"""Which ops each gradient needs, and what they take of a trace."""

import collections
import re

import pytest
from traced_networks import branching, plain, traced

import backward_graph
import profiler
from backward_graph import attribute

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


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
@pytest.mark.parametrize('build', [plain, branching])
def test_every_tensor_has_the_same_update_ops_attributed_to_it_alone(build, optimizer):
    """The optimizer treats all tensors alike: what one tensor is charged for, all are."""
    graph = traced(build, optimizer).graph
    own = collections.defaultdict(collections.Counter)
    for name, k in graph.update.items():
        if graph.nodes[name].op not in backward_graph.FREE_OPS:
            own[k][graph.nodes[name].op] += 1
    shared = own.pop(None)
    count = len(traced(build, optimizer).variables)
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
    for op in set(few + more) - backward_graph.FREE_OPS:
        assert few[op] == more[op], op


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
@pytest.mark.parametrize('build', [plain, branching])
def test_every_tensor_takes_update_time_in_a_real_trace(build, optimizer):
    case = traced(build, optimizer)
    times = attribute(case.graph, case.times, len(case.variables))
    assert times.update.shape == (len(case.variables),)
    assert (times.update > 0).all() and times.update_fixed > 0


@pytest.mark.parametrize('build, optimizer', [(plain, 'sgd'), (branching, 'sgd'),
                                              (branching, 'adam')])
def test_a_real_trace_is_attributed_to_all_but_a_twentieth(build, optimizer):
    case = traced(build, optimizer)
    times = attribute(case.graph, case.times, len(case.variables))
    assert times.coverage >= profiler.MIN_COVERAGE
    attributed = sum(times.groups.values()) + times.update.sum() + times.update_fixed
    outside = sum(ms for name, ms in case.times.items() if name not in case.graph.forward)
    assert attributed == pytest.approx(times.coverage * outside + sum(times.estimated.values()),
                                       rel=1e-6)


def test_an_op_whose_events_are_missing_is_estimated():
    case = traced(branching)
    name, = [n for n, mask in case.graph.backward.items() if mask == 1 << LEFT_KERNEL
             and case.graph.nodes[n].op == 'Conv2DBackpropFilter']
    without = {event: ms for event, ms in case.times.items() if event != name}
    assert len(without) == len(case.times) - 1
    whole, guessed = [attribute(case.graph, times, 8) for times in (case.times, without)]
    assert 1 << LEFT_KERNEL not in whole.estimated
    assert 0.1 < guessed.estimated[1 << LEFT_KERNEL] / case.times[name] < 10


def test_an_op_type_without_any_event_is_estimated_from_the_others():
    case = traced(branching)
    missing = {n for n, node in case.graph.nodes.items() if node.op == 'Conv2DBackpropFilter'}
    without = {event: ms for event, ms in case.times.items() if event not in missing}
    times = attribute(case.graph, without, 8)
    for k in (0, LEFT_KERNEL, RIGHT_KERNEL):
        assert times.estimated[1 << k] > 0 and times.groups[1 << k] > 0


def test_events_that_belong_to_no_node_lower_the_coverage_and_are_listed():
    case = traced(branching)
    whole = attribute(case.graph, case.times, 8)
    outside = sum(ms for name, ms in case.times.items() if name not in case.graph.forward)
    strange = attribute(case.graph, dict(case.times, **{'renamed/op': 3 * outside}), 8)
    assert strange.coverage == pytest.approx(whole.coverage / 4, rel=1e-6)
    assert strange.left_out[0] == ('renamed/op', pytest.approx(3 * outside))
    assert strange.groups == whole.groups
