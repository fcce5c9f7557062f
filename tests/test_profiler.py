"""Timing of tensors: which ops each gradient needs, what they take, and what stays untouched."""

import collections
import csv
import functools
import importlib
import json
import os
import re
import tempfile
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import backbone
import backward_graph
import keras_stack
import models
import profiler
from backward_graph import OpTimes, attribute, executed_graph, read_trace, record_trace, serial_ops
from masked_step import StepMaker
from tensor_timings import (
    DEPTH_SCALE,
    TensorTimings,
    Totals,
    build_table,
    chain_timings,
    own_and_shared_scale,
    scaled_by_depth,
    upper_parts,
)
from training_step import make_optimizer

STEPS = 3  # traced


def plain():
    """Convolution -> Dense with ReLU -> Dense. Tensors: 0,1 conv; 2,3 mid; 4,5 head."""
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Flatten()(keras.layers.Conv2D(4, 3, name='conv')(inputs))
    x = keras.layers.Dense(5, activation='relu', name='mid')(x)
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))


def branching():
    """Two branches that are added. Tensors: 0,1 stem; 2,3 left; 4,5 right; 6,7 head."""
    inputs = keras.Input((24, 24, 3))
    stem = keras.layers.Conv2D(16, 3, padding='same', activation='relu', name='stem')(inputs)
    left = keras.layers.Conv2D(16, 3, padding='same', activation='relu', name='left')(stem)
    right = keras.layers.Conv2D(16, 3, padding='same', activation='relu', name='right')(stem)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Add(name='sum')([left, right]))
    return keras.Model(inputs, keras.layers.Dense(3, name='head')(x))


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
Traced = collections.namedtuple('Traced', 'variables step graph times path')


@functools.lru_cache(maxsize=None)
def traced(build, optimizer='sgd'):
    """The executed graph and a real trace of the full step; times: name -> ms."""
    model = build()
    variables = model.trainable_variables
    rng = np.random.RandomState(0)
    images = tf.constant(rng.uniform(0, 1, (4,) + model.input_shape[1:]), tf.float32)
    labels = tf.constant([0, 1, 2, 1])
    maker = StepMaker(model, make_optimizer(optimizer, 1e-3, 100, variables), 5e-4, images, labels,
                      named=True)
    graph = executed_graph(maker, images, labels)
    step = maker.step([True] * len(variables))
    path = record_trace(step, images, labels, tempfile.mkdtemp(), STEPS)
    return Traced(variables, step, graph, read_trace(path, STEPS), path)


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


def test_an_op_whose_events_are_missing_is_estimated_and_its_tensor_flagged():
    case = traced(branching)
    name, = [n for n, mask in case.graph.backward.items() if mask == 1 << LEFT_KERNEL
             and case.graph.nodes[n].op == 'Conv2DBackpropFilter']
    without = {event: ms for event, ms in case.times.items() if event != name}
    assert len(without) == len(case.times) - 1
    whole, guessed = [attribute(case.graph, times, 8) for times in (case.times, without)]
    assert 1 << LEFT_KERNEL not in whole.estimated
    assert 0.1 < guessed.estimated[1 << LEFT_KERNEL] / case.times[name] < 10
    table = table_of(guessed)
    assert table.estimated[LEFT_KERNEL] and not table.estimated[RIGHT_KERNEL]
    assert table.t_dw[LEFT_KERNEL] > 0


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


# --- one op at a time


def meet(seconds):
    """Whether two ops of one function run at the same time: each waits for the other."""
    barrier = threading.Barrier(2)

    def wait(_):
        try:
            barrier.wait(seconds)
            return np.int32(1)
        except threading.BrokenBarrierError:
            return np.int32(0)

    @tf.function
    def pair(x):
        return [tf.compat.v1.py_func(wait, [x + i], tf.int32, stateful=False) for i in range(2)]
    return [int(met) for met in pair(tf.constant(1))] == [1, 1]


needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2,
                                     reason='ops never overlap on one core')


@needs_two_cores
def test_serial_ops_lets_no_two_ops_run_at_once_and_is_undone_afterwards():
    assert meet(20)
    threads = threading.active_count()
    with serial_ops():
        assert not meet(0.5)
    assert meet(20)
    assert threading.active_count() == threads


@needs_two_cores
def test_serial_ops_is_undone_after_an_error():
    with pytest.raises(KeyError):
        with serial_ops():
            raise KeyError
    assert meet(20)


def test_no_two_op_events_of_a_trace_overlap_in_time():
    case = traced(branching)
    space = backward_graph._xplane_proto().XSpace()
    with open(case.path, 'rb') as trace:
        space.ParseFromString(trace.read())
    events = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if backward_graph.OP_EVENT.match(name):
                    begin = line.timestamp_ns * 1000 + event.offset_ps
                    events.append((begin, begin + event.duration_ps, name))
    events.sort()
    assert len(events) > STEPS * 50
    assert [(a[2], b[2]) for a, b in zip(events, events[1:]) if b[0] < a[1]] == []


def test_the_step_runs_on_normally_after_a_trace():
    case = traced(branching)
    images = tf.zeros((4, 24, 24, 3))
    assert np.isfinite(float(case.step(images, tf.constant([0, 1, 2, 1]))[0]))


# --- reading a trace


def xplane(path, planes):
    """planes: name -> list of (event name, duration in ms, {stat: str or ('ref', str)})."""
    space = backward_graph._xplane_proto().XSpace()
    for plane_name, events in planes.items():
        plane = space.planes.add(name=plane_name)
        line, ids = plane.lines.add(name='a line'), {}

        def stat_id(text, plane=plane, ids=ids):
            ids.setdefault(text, len(ids) + 1)
            plane.stat_metadata[ids[text]].name = text
            return ids[text]
        for i, (name, ms, stats) in enumerate(events, 1):
            plane.event_metadata[i].name = name
            event = line.events.add(metadata_id=i, duration_ps=int(ms * 1e9))
            for key, value in stats.items():
                stat = event.stats.add(metadata_id=stat_id(key))
                if isinstance(value, tuple):
                    stat.ref_value = stat_id(value[1])
                else:
                    stat.str_value = value
    with open(str(path), 'wb') as out:
        out.write(space.SerializeToString())
    return str(path)


@pytest.mark.parametrize('reference', [False, True])
def test_time_on_the_gpu_wins_over_the_launch_on_the_host(reference, tmp_path):
    def op(text):
        return {'tf_op': ('ref', text) if reference else text, 'other': 'model/x:Add'}
    path = xplane(tmp_path / 'host.xplane.pb', {
        '/host:CPU': [('model/conv/Conv2D:Conv2D', 0.5, {}), ('model/conv/Conv2D:Conv2D', 0.5, {}),
                      ('model/Cast:Cast', 0.25, {}), ('Executor::Process', 9, {})],
        '/device:GPU:0': [('volta_sgemm', 2, op('model/conv/Conv2D:Conv2D')),
                          ('im2col', 1, op('model/conv/Conv2D:Conv2D')),
                          ('volta_sgemm', 4, op('model/conv/Conv2D:Conv2D')),
                          ('MemcpyHtoD', 8, {}), ('model/y:Mul', 16, {'other': 'model/y:Mul'})]})
    assert read_trace(path, num_steps=2) == {'model/conv/Conv2D': pytest.approx(7 / 2),
                                             'model/Cast': pytest.approx(0.25 / 2)}


def test_one_pre_empted_step_does_not_count(tmp_path):
    path = xplane(tmp_path / 'host.xplane.pb', {'/host:CPU': [
        ('model/Relu:Relu', ms, {}) for ms in (1, 1, 50)]})
    assert read_trace(path, num_steps=3) == {'model/Relu': pytest.approx(1)}


def test_ops_of_a_real_trace_are_nodes_of_the_graph():
    case = traced(branching)
    assert len(case.times) > 50
    assert all(ms >= 0 for ms in case.times.values())
    convolutions = {n for n, mask in case.graph.backward.items()
                    if case.graph.nodes[n].op.startswith('Conv2DBackprop')}
    assert len(convolutions) == 5 and convolutions <= set(case.times)


# --- the table


def op_times(groups, num_tensors, update=None):
    if update is None:
        update = np.full(num_tensors, 0.25)
    return OpTimes(groups, update, 0.5, {}, 1.0, [])


def table_of(times):
    n = len(times.update)
    total = sum(times.groups.values())
    deepest = int(chain_timings(times.groups, n)[2][0])
    bit = 1 << deepest
    chain = sum(ms for mask, ms in times.groups.items() if mask & bit)
    return build_table(['layer/{}'.format(k) for k in range(n)], [(k + 1, 2) for k in range(n)],
                       times, Totals(2.0, total, 1.5, chain, deepest), {'model': 'test'})


def random_masks(n, count, seed=0):
    masks = np.random.RandomState(seed).rand(count, n) < np.linspace(0.05, 0.9, count)[:, None]
    masks[np.arange(count), np.random.RandomState(seed + 1).randint(n, size=count)] = True
    return masks


@pytest.fixture(scope='module')
def branching_table():
    return table_of(attribute(traced(branching).graph, traced(branching).times, 8))


def random_table(seed, n=9):
    rng = np.random.RandomState(seed)
    groups = {int(mask): float(ms) for mask, ms in
              zip(rng.randint(1, 1 << n, 25), rng.exponential(size=25))}
    groups.update({1 << k: float(rng.exponential()) for k in range(n)})
    return table_of(op_times(groups, n))


def test_chain_timings_of_a_chain():
    # Tensor 2 nearest the output; all need the first group, 0 and 1 the second.
    t_dw, t_dy, order = chain_timings({0b001: 1, 0b010: 2, 0b100: 3, 0b111: 10, 0b011: 20}, 3)
    assert (t_dw.tolist(), t_dy.tolist(), order.tolist()) == ([1, 2, 3], [0, 20, 10], [0, 1, 2])


def test_chain_timings_of_two_branches():
    # stem 0, left 1, right 2, head 3; right has more shared time, so it counts as deeper.
    groups = {0b0001: 1, 0b0010: 2, 0b0100: 3, 0b1000: 4,
              0b1111: 5, 0b0111: 6, 0b0011: 7, 0b0101: 8}
    t_dw, t_dy, order = chain_timings(groups, 4)
    assert t_dw.tolist() == [1, 2, 3, 4]
    assert order.tolist() == [0, 2, 1, 3]
    assert t_dy.tolist() == [0, 6 + 7, 8, 5]
    table = table_of(op_times(groups, 4))
    right = [False, False, True, False]
    assert table.backward_time(right) == pytest.approx(3 + 5 + 6 + 8)
    assert table.chain_time(right) == pytest.approx(3 + 5 + (6 + 7) + 8)


@pytest.mark.parametrize('seed', [None, 0, 1, 2])
def test_the_chain_is_never_cheaper_than_the_graph_and_equal_for_all_tensors(seed, branching_table):
    table = branching_table if seed is None else random_table(seed)
    n = len(table.names)
    masks = random_masks(n, 200)
    graph = np.array([table.backward_time(mask) for mask in masks])
    chain = np.array([table.chain_time(mask) for mask in masks])
    assert (chain >= graph - 1e-9).all() and (chain > graph + 1e-9).any()
    everything = np.ones(n, dtype=bool)
    assert table.chain_time(everything) == pytest.approx(table.backward_time(everything))
    assert table.backward_time(everything) == pytest.approx(table.t_bp)


def test_backward_time_is_the_union_and_grows_with_the_mask():
    table = random_table(5)
    n = len(table.names)
    assert table.backward_time(np.zeros(n, bool)) == table.chain_time(np.zeros(n, bool)) == 0
    for mask in random_masks(n, 50):
        by_hand = sum(ms for members, ms in zip(table.group_tensors, table.group_ms)
                      if mask[members].any())
        assert table.backward_time(mask) == pytest.approx(by_hand)
        assert table.backward_time(mask | (np.arange(n) == 3)) >= table.backward_time(mask)


def test_step_time_adds_forward_backward_and_the_update_of_the_selected():
    table = table_of(op_times({0b01: 1.0, 0b10: 2.0, 0b11: 4.0}, 2, np.array([0.5, 1.0])))
    # 1.5 ms of update measured for 0.5 + 1 + 0.5 fixed traced: 0.375 and 0.75, fixed 0.375.
    assert table.t_up == pytest.approx([0.375, 0.75])
    assert table.fixed == pytest.approx(2 + 0.375)
    assert table.step_time([True, False]) == pytest.approx(2.375 + 5 + 0.375)
    assert table.step_time([True, True]) == pytest.approx(2 + 7 + 1.5)
    assert table.t_step == pytest.approx(2 + 7 + 1.5)


def test_own_and_shared_ops_are_scaled_to_the_two_measured_totals():
    groups = {0b01: 2.0, 0b10: 1.0, 0b11: 4.0}
    # All: 0.5 * 3 + 2 * 4 = 9.5; the deepest, tensor 0: 0.5 * 2 + 2 * 4 = 9.
    totals = Totals(1.0, 9.5, 1.0, 9.0, 0)
    assert own_and_shared_scale(groups, totals) == pytest.approx((0.5, 2.0))
    table = build_table(['a', 'b'], [(1,), (2,)], op_times(groups, 2), totals, {})
    assert table.backward_time([True, True]) == pytest.approx(9.5)
    assert table.backward_time([True, False]) == pytest.approx(9.0)


@pytest.mark.parametrize('groups, t_bp, t_chain', [
    ({0b01: 2.0, 0b10: 1.0}, 6.0, 3.0),  # no shared op
    ({0b01: 2.0, 0b11: 4.0}, 6.0, 6.0),  # the deepest needs everything: nothing to tell apart
    ({0b01: 2.0, 0b10: 1.0, 0b11: 4.0}, 7.0, 50.0),  # a noisy measurement
    ({0b01: 2.0, 0b10: 1.0, 0b11: 4.0}, 7.0, 1e-3)])
def test_one_scale_serves_both_where_the_two_totals_do_not_tell_them_apart(groups, t_bp, t_chain):
    own, shared = own_and_shared_scale(groups, Totals(1.0, t_bp, 1.0, t_chain, 0))
    assert own == shared == pytest.approx(t_bp / sum(groups.values()))


@pytest.mark.parametrize('seed', [None, 0])
def test_a_saved_table_prices_every_mask_identically(seed, branching_table, tmp_path):
    table = branching_table if seed is None else random_table(seed)
    path = str(tmp_path / 'timings.json')
    table.save(path)
    again = TensorTimings.load(path)
    for mask in random_masks(len(table.names), 100):
        assert again.backward_time(mask) == table.backward_time(mask)
        assert again.chain_time(mask) == table.chain_time(mask)
        assert again.step_time(mask) == table.step_time(mask)
    assert (again.names, again.shapes, again.key) == (table.names, table.shapes, table.key)
    for field in ('t_dw', 't_dy', 't_up', 'order', 'estimated'):
        assert getattr(again, field).dtype == getattr(table, field).dtype
    assert sorted(os.listdir(str(tmp_path))) == ['timings.csv', 'timings.json']


def test_the_csv_beside_the_table_has_one_row_per_tensor(branching_table, tmp_path):
    branching_table.save(str(tmp_path / 'timings.json'))
    with open(str(tmp_path / 'timings.csv'), newline='') as source:
        rows = list(csv.DictReader(source))
    assert [row['name'] for row in rows] == branching_table.names
    assert rows[1]['shape'] == '2x2' and {row['time'] for row in rows} == {'measured'}
    for column, expected in (('t_dw_ms', branching_table.t_dw), ('t_dy_ms', branching_table.t_dy),
                             ('t_up_ms', branching_table.t_up)):
        np.testing.assert_allclose([float(row[column]) for row in rows], expected, atol=1e-5)
    assert sum(float(row['share']) for row in rows) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize('content', ['{"a": 1}', '[1, 2]', 'null', '7', '"text"', '{', ''])
def test_a_foreign_file_is_no_timing_table(content, tmp_path):
    path = str(tmp_path / 'timings.json')
    with open(path, 'w') as out:
        out.write(content)
    with pytest.raises(ValueError):
        TensorTimings.load(path)


def test_a_table_with_a_field_missing_is_refused(branching_table, tmp_path):
    path = str(tmp_path / 'timings.json')
    branching_table.save(path)
    with open(path) as source:
        content = json.load(source)
    del content['t_up']
    with open(path, 'w') as out:
        json.dump(content, out)
    with pytest.raises(ValueError, match='is not a timing table of this version'):
        TensorTimings.load(path)


# --- the whole profiler


def values(variables):
    return [keras_stack.raw(v).numpy().copy() for v in variables]


def small_classifier():
    """With batch normalisation and dropout: statistics and random state to be kept."""
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(8, 3, strides=2, use_bias=False, name='stem')(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(name='bn')(x))
    x = keras.layers.DepthwiseConv2D(3, use_bias=False, name='depthwise')(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(name='depthwise_bn')(x))
    return backbone.classifier(keras.Model(inputs, x), None, (32, 32, 3), 3, 'frozen')


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_profiling_leaves_the_model_bit_identical_and_a_trace_in_the_folder(optimizer, tmp_path):
    model = small_classifier()
    state = list(model.variables) + keras_stack.random_state_variables(model)
    norms = [layer for layer in keras_stack.flat_layers(model)
             if isinstance(layer, keras.layers.BatchNormalization)]
    before, momenta = values(state), [layer.momentum for layer in norms]
    table = profiler.profile_model(model, (32, 32, 3), 3, 4, optimizer, folder=str(tmp_path),
                                   key={'batch': 4}, num_steps=3, seconds=0)
    assert len(state) > len(model.trainable_variables) + 3
    for was, now in zip(before, values(state)):
        np.testing.assert_array_equal(was, now)
    assert momenta == [layer.momentum for layer in norms]
    assert not model.get_layer('backbone').train_statistics
    files = [name for _, _, names in os.walk(str(tmp_path)) for name in names]
    assert [name for name in files if name.endswith('.xplane.pb')]

    assert table.names == ['stem/kernel', 'bn/gamma', 'bn/beta', 'depthwise/kernel',
                           'depthwise_bn/gamma', 'depthwise_bn/beta', 'head/kernel', 'head/bias']
    assert table.shapes == [tuple(v.shape) for v in model.trainable_variables]
    assert table.key == {'batch': 4} and table.coverage >= profiler.MIN_COVERAGE
    assert table.t_fp > 0 and table.t_bp > 0 and table.t_update > 0 and table.t_dw[0] > 0
    everything = np.ones(8, dtype=bool)
    assert table.backward_time(everything) == pytest.approx(table.t_bp)
    assert table.backward_time(np.arange(8) >= 6) < table.backward_time(np.arange(8) == 0)


def nasnet_of_one_block_per_stage():
    """NASNetMobile's cells, a quarter of its depth: the whole one takes over a minute to trace."""
    build = importlib.import_module(keras.applications.NASNetMobile.__module__).NASNet
    base = build(input_shape=(32, 32, 3), penultimate_filters=96, num_blocks=1,
                 stem_block_filters=32, skip_reduction=False, include_top=False, weights=None)
    return backbone.classifier(base, 'nasnet', (32, 32, 3), 3, 'frozen')


def whole(name):
    return lambda: models.build_model(name, (32, 32, 3), 3, 'none', bn_statistics='frozen')


@pytest.mark.parametrize('build', [
    whole('EfficientNetB0'), whole('DenseNet121'), nasnet_of_one_block_per_stage,
    pytest.param(whole('NASNetMobile'), marks=pytest.mark.skipif(
        'SLOW_TESTS' not in os.environ, reason='takes over a minute; set SLOW_TESTS to run it'))],
    ids=['EfficientNetB0', 'DenseNet121', 'NASNet cells', 'NASNetMobile'])
def test_other_families_are_profiled_without_any_table_of_their_layers(build):
    model = build()
    before = values(model.variables)
    table = profiler.profile_model(model, (32, 32, 3), 3, 2, num_steps=2, seconds=0)
    n = len(model.trainable_variables)
    assert table.coverage >= profiler.MIN_COVERAGE and len(table.names) == n
    kernels = np.array([name.endswith('kernel') for name in table.names])
    assert (table.t_dw[kernels] > 0).all()
    for mask in random_masks(n, 30):
        assert 0 < table.backward_time(mask) <= table.chain_time(mask) + 1e-9
    for was, now in zip(before, values(model.variables)):
        np.testing.assert_array_equal(was, now)


def test_times_follow_what_was_measured_between_two_depths():
    # Tensor 3 is nearest the output; a shared group serves every tensor below it.
    groups = {0b0001: 4.0, 0b0010: 3.0, 0b0100: 2.0, 0b1000: 1.0,
              0b0111: 5.0, 0b0011: 3.0, 0b0001 | 0b0010 | 0b0100 | 0b1000: 2.0}
    totals = Totals(1.0, 20.0, 0.0, 10.0, 0, (([2, 3], 10.0), ([3], 3.6)))
    scaled = scaled_by_depth(groups, totals)

    def needed(tensors):
        bits = sum(1 << k for k in tensors)
        return sum(ms for mask, ms in scaled.items() if mask & bits)
    assert needed([3]) == pytest.approx(3.6) and needed([2, 3]) == pytest.approx(10.0)
    assert needed([0, 1, 2, 3]) == pytest.approx(20.0)
    assert scaled[0b0001] / scaled[0b0010] == pytest.approx(4 / 3)

    wild = scaled_by_depth(groups, totals._replace(upper=(([3], 1e6),)))
    limit = DEPTH_SCALE ** 2
    assert sum(wild.values()) == pytest.approx(20.0)
    assert wild[0b1000] / wild[0b0001] == pytest.approx(limit / 4)


def test_upper_parts_are_nested_and_end_at_the_output():
    # From the output on, the tensors' shares of it are 1/6, 1/2, 5/6 and all.
    groups = {0b0001: 1.0, 0b0010: 1.0, 0b0100: 1.0, 0b1000: 1.0, 0b0111: 1.0, 0b0011: 1.0}
    assert upper_parts(*chain_timings(groups, 4)) == [[2, 3], [3]]
    assert upper_parts(*chain_timings({0b1: 1.0}, 1)) == []


def test_a_disturbed_profile_says_so(branching_table, capsys):
    profiler.warn_of(branching_table._replace(spread=0.02, coverage=1.0))
    assert capsys.readouterr().out == ''
    profiler.warn_of(branching_table._replace(spread=0.3, coverage=1.0))
    assert 'took 30 % more or less' in capsys.readouterr().out
