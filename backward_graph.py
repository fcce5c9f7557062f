"""Which tensors need which ops of the training step, and how long those ops take.

Timings are derived from the graph, not from layer names, so that any Keras model works. In the
graph of the step, B_k is every ancestor of gradient k that is not an ancestor of the loss. The
backward pass of any set of tensors is the union of their B_k, and an op belongs to the group of
tensors whose B_k hold it. The graph is the one TensorFlow executes, after its own optimisation:
its node names are the event names of a profiler trace, so that fused and folded ops need no
guessing.
"""

import contextlib
import glob
import os
import re
import threading
from typing import Dict, List, NamedTuple, Optional

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import op_def_registry

# Nodes that the executor passes through without running a kernel of their own: no event, no cost.
FREE_OPS = frozenset(('Const', '_Arg', '_Retval', 'Identity', 'IdentityN', 'NoOp', 'Reshape',
                      'Shape', 'ShapeN', 'Placeholder', 'StopGradient', 'PreventGradient',
                      'Squeeze', 'ExpandDims', '_DeviceArg', '_DeviceRetval', 'VarHandleOp',
                      'Size', 'Rank'))
# `<node name>:<op type>`; a runtime event such as `Executor::Process` has no such form.
OP_EVENT = re.compile(r'^([^:]+):(\w+)$')


class Node(NamedTuple):
    """op: type; data: names of the nodes it reads; tensors: the same with the output, `name:0`.

    index: of an argument or result. Control edges are left out: they order side effects, and tie
    the loss to every update.
    """
    op: str
    data: List[str]
    tensors: List[str]
    index: Optional[int]


class StepGraph(NamedTuple):
    """The executed graph of a training step, each node with the part of the step it belongs to.

    nodes: name -> Node.
    forward: names of the ancestors of the loss and of the count of correct answers.
    backward: name -> bit mask, bit k set where gradient k needs the node (trainable order).
    update: name -> k where the node serves the update of tensor k alone, None where of several or
        of none (learning rate, iteration count, BN statistics).
    work: name -> floating-point operations, or output elements where TensorFlow registers none.
    """
    nodes: Dict[str, Node]
    forward: frozenset
    backward: Dict[str, int]
    update: Dict[str, Optional[int]]
    work: Dict[str, float]


class OpTimes(NamedTuple):
    """Backward and update ops with their times.

    groups: bit mask of the tensors that need the ops -> ms per step.
    update: (N,) ms, update ops of one tensor. update_fixed: ms, update ops of none or of several.
    estimated: bit mask -> ms of `groups` that had no event and were estimated.
    coverage: share of the traced time outside the forward set that was attributed, 0..1.
    left_out: (event name, ms) that belongs to no node, the longest first.
    """
    groups: Dict[int, float]
    update: np.ndarray
    update_fixed: float
    estimated: Dict[int, float]
    coverage: float
    left_out: List


def executed_graph(maker, images, labels):
    """The StepGraph of what TensorFlow executes for the full step of a masked_step.StepMaker.

    Runs that step once. TensorFlow hands out the optimised graph only while a function is first
    instantiated, through the call that tf.summary.trace_on uses; it is the same in 2.7 and 2.21.
    """
    step = maker.with_gradients()
    runtime = eager_context.context()
    runtime.enable_graph_collection()
    try:
        step(images, labels)
        graphs = runtime.export_run_metadata().function_graphs
    finally:
        runtime.disable_graph_collection()
    graph = max(graphs, key=lambda g: len(g.post_optimization_graph.node))
    # What the device's own rewriting (oneDNN) fused into a neighbour is gone from the partitions.
    run = {node.name for partition in graph.partition_graphs for node in partition.node}
    nodes = {node.name: _node(node) for node in graph.post_optimization_graph.node}
    folded = _constants(nodes)
    work = {name: amount for name, amount in _work(maker.concrete.graph).items()
            if name in run and name not in folded}
    return analyse(nodes, len(maker.variables), maker.owners, work, 3)


def _constants(nodes):
    """Names of the nodes computed from constants alone: evaluated once, before the first step."""
    constants = set()
    for name in _topological(nodes):
        node = nodes[name]
        definition = op_def_registry.get(node.op)
        if node.op == 'Const' or (node.data and constants.issuperset(node.data)
                                  and definition is not None and not definition.is_stateful):
            constants.add(name)
    return constants


def analyse(nodes, num_tensors, owners, work, num_results=2):
    """StepGraph of a graph whose results are the loss, the count of correct, N gradients.

    nodes, work: see StepGraph. owners: argument index -> k for the argument that is the handle of
    tensor k.
    """
    results = {node.index: node.tensors[0] for node in nodes.values() if node.op == '_Retval'}
    roots = [_through_identities(nodes, results[i + num_results]) for i in range(num_tensors)]
    forward = _ancestors(nodes, [results[i].split(':')[0] for i in range(num_results)])

    backward = {}
    for k, root in enumerate(roots):
        bit = 1 << k
        for name in _ancestors(nodes, [root.split(':')[0]], stop=forward):
            backward[name] = backward.get(name, 0) | bit

    touches = _touches(nodes, forward, backward, roots, owners)
    update = {name: next(iter(ks)) if len(ks) == 1 else None for name, ks in touches.items()}
    return StepGraph(nodes, frozenset(forward), backward, update, work)


def _node(node):
    tensors = [name if ':' in name else name + ':0'
               for name in node.input if not name.startswith('^')]
    return Node(node.op, [tensor.split(':')[0] for tensor in tensors], tensors,
                node.attr['index'].i if 'index' in node.attr else None)


def _through_identities(nodes, tensor):
    """The tensor that `tensor` is passed on from: tf.function returns Identity nodes."""
    while nodes[tensor.split(':')[0]].op == 'Identity':
        tensor = nodes[tensor.split(':')[0]].tensors[0]
    return tensor


def _ancestors(nodes, roots, stop=frozenset()):
    """Names of the roots and of everything they are computed from, without those in `stop`."""
    seen, stack = set(), [r for r in roots if r not in stop]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        stack.extend(n for n in nodes[name].data if n not in seen and n not in stop)
    return seen


def _touches(nodes, forward, backward, roots, owners):
    """name -> set of k for every node outside both passes: tensors it reads, writes or descends
    from.

    Two rounds: what the first finds written for tensor k alone (its momentum, say) is owned by k in
    the second, so that the ops which only read it are counted for k too.
    """
    by_root = {}
    for k, root in enumerate(roots):
        by_root.setdefault(root, set()).add(k)
    owned = {name: {owners[node.index]} for name, node in nodes.items()
             if node.op == '_Arg' and owners.get(node.index) is not None}
    order = [name for name in _topological(nodes) if name not in forward and name not in backward]
    touches = _propagate(nodes, order, by_root, owned)
    for name in order:
        argument = nodes[name].data[0] if nodes[name].data else name
        if (nodes[argument].op == '_Arg' and argument not in owned and len(touches[name]) == 1
                and nodes[name].op != 'ReadVariableOp'):
            owned[argument] = touches[name]
    return _propagate(nodes, order, by_root, owned)


def _propagate(nodes, order, by_root, owned):
    touches = {}
    for name in order:
        found = set(owned.get(name, ()))
        for source, tensor in zip(nodes[name].data, nodes[name].tensors):
            if source in owned:
                found |= owned[source]
            elif source in touches:
                found |= touches[source]
            elif nodes[source].op == 'ReadVariableOp':  # of the forward pass, and shared with it
                found |= owned.get(nodes[source].data[0], set())
            else:
                found |= by_root.get(tensor, set())
        touches[name] = found
    return touches


def _topological(nodes):
    """Names so ordered that each follows the nodes whose data it reads."""
    order, seen = [], set()
    for start in nodes:
        stack = [(start, False)]
        while stack:
            name, done = stack.pop()
            if done:
                order.append(name)
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                stack.extend((n, False) for n in nodes[name].data if n not in seen)
    return order


def _work(graph):
    """name -> floating-point operations that TensorFlow registers, else elements of the output."""
    from tensorflow.python.framework import ops
    work = {}
    for op in graph.get_operations():
        if op.type in FREE_OPS or not op.outputs:
            continue
        try:
            flops = ops.get_stats_for_node_def(graph, op.node_def, 'flops').value
        except (ValueError, AttributeError, IndexError):  # statistics need fully known shapes
            flops = None
        work[op.name] = float(flops or op.outputs[0].shape.num_elements() or 1)
    return work


@contextlib.contextmanager
def serial_ops():
    """Inside, TensorFlow runs one op at a time: all inter-op threads but one are kept waiting.

    Op times only add up when ops do not overlap. The number of inter-op threads cannot be changed
    once TensorFlow runs, and the totals must be measured with the one that training uses.
    """
    threads = tf.config.threading.get_inter_op_parallelism_threads() or len(
        os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else [0] * os.cpu_count())
    release, occupied = threading.Event(), threading.Semaphore(0)

    def wait():
        occupied.release()
        release.wait()
        return np.int32(0)

    occupy = tf.function(lambda: tf.numpy_function(wait, [], tf.int32))
    occupy_function = occupy.get_concrete_function()
    waiting = [threading.Thread(target=occupy_function, daemon=True) for _ in range(threads - 1)]
    try:
        for thread in waiting:
            thread.start()
            occupied.acquire()
        yield
    finally:
        release.set()
        for thread in waiting:
            thread.join()


def record_trace(step, images, labels, folder, num_steps):
    """Traces `num_steps` calls of `step`; writes <folder>/plugins/profile/<time>/*.xplane.pb.

    Returns the path of the xplane file. TensorBoard's Profile tab opens the folder.
    """
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0, device_tracer_level=1)
    with serial_ops():
        step(images, labels)
        tf.profiler.experimental.start(folder, options=options)
        try:
            for i in range(num_steps):
                with tf.profiler.experimental.Trace('train', step_num=i, _r=1):
                    step(images, labels)[0].numpy()  # waits for the device
        finally:
            tf.profiler.experimental.stop()
    traces = glob.glob(os.path.join(folder, 'plugins', 'profile', '*', '*.xplane.pb'))
    return max(traces, key=os.path.getmtime)


def read_trace(path, num_steps):
    """name -> ms per step of every op event in an xplane file.

    An op's time is the median over its events times events per step: one pre-empted step does not
    count. Where a device (GPU) ran the op, its kernels' time counts and not the host's launch.
    """
    space = _xplane_proto().XSpace()
    with open(path, 'rb') as trace:
        space.ParseFromString(trace.read())
    host, device = {}, {}
    for plane in space.planes:
        on_device = plane.name.startswith('/device:')
        stats = {i: m.name for i, m in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                text = plane.event_metadata[event.metadata_id].name
                if on_device:
                    text = next((_stat_text(s, stats) for s in event.stats
                                 if stats.get(s.metadata_id) == 'tf_op'), '')
                match = OP_EVENT.match(text)
                if match:
                    times = device if on_device else host
                    times.setdefault(match.group(1), []).append(event.duration_ps / 1e9)
    result = {name: float(np.median(ms)) * len(ms) / num_steps for name, ms in host.items()}
    # One op may launch several kernels: their sum counts.
    result.update({name: float(np.sum(ms)) / num_steps for name, ms in device.items()})
    return result


def _stat_text(stat, names):
    return stat.str_value or names.get(stat.ref_value, '')


def _xplane_proto():
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError:  # TensorFlow 2.7
        from tensorflow.core.profiler.protobuf import xplane_pb2
    return xplane_pb2


def attribute(graph, times, num_tensors):
    """OpTimes from a StepGraph and op times (name -> ms, of read_trace).

    A compute op without an event is estimated from its work and the measured rate of its op type.
    """
    rates = _rates(graph, times)
    groups, estimated = {}, {}
    update, update_fixed = np.zeros(num_tensors), 0.0
    for name, mask in graph.backward.items():
        ms = times.get(name)
        if ms is None:
            ms = _estimate(graph, name, rates)
            if ms:
                estimated[mask] = estimated.get(mask, 0.0) + ms
        groups[mask] = groups.get(mask, 0.0) + ms
    for name, k in graph.update.items():
        ms = times[name] if name in times else _estimate(graph, name, rates)
        if k is None:
            update_fixed += ms
        else:
            update[k] += ms
    outside = {name: ms for name, ms in times.items() if name not in graph.forward}
    left_out = sorted(((name, ms) for name, ms in outside.items() if name not in graph.nodes),
                      key=lambda item: -item[1])
    total = sum(outside.values())
    coverage = 1 - sum(ms for _, ms in left_out) / total if total else 0.0
    return OpTimes(groups, update, update_fixed, estimated, coverage, left_out)


def _rates(graph, times):
    """op type -> measured ms per unit of work; key None: over all types."""
    spent, work = {}, {}
    for name, ms in times.items():
        if name in graph.nodes and name in graph.work:
            for key in (graph.nodes[name].op, None):
                spent[key] = spent.get(key, 0.0) + ms
                work[key] = work.get(key, 0.0) + graph.work[name]
    return {key: spent[key] / work[key] for key in spent}


def _estimate(graph, name, rates):
    op = graph.nodes[name].op
    if op in FREE_OPS or name not in graph.work:
        return 0.0
    return graph.work[name] * rates.get(op, rates.get(None, 0.0))
