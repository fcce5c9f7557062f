"""What TensorFlow really executes of a training step: its graph, and how long each op takes.

The graph is the one after TensorFlow's own optimisation: its node names are the event names of a
profiler trace, so that fused and folded ops need no guessing.
"""

import contextlib
import glob
import os
import re
import threading

import numpy as np
import tensorflow as tf
from google.protobuf import message

from elastic.command_line import UserError
from elastic.compat import tf_internals
from elastic.steps.function_graph import work_of
from elastic.steps.step_graph import CONTROL_FLOW, Node, analyse, constants, merged, topological
from elastic.steps.training_step import NUM_RESULTS
from elastic.timing.attribution import attribute
from elastic.timing.gpu_trace import GPU, busy_ps, gpu_work, stats_of

# `<node name>:<op type>`; a runtime event such as `Executor::Process` has no such form.
OP_EVENT = re.compile(r'^([^:]+):(\w+)$')
HOST = '/host:CPU'  # the plane of all its threads; what CUPTI saw of them has another
# Today's event of a call, as of what jit_compile made; the node's name is in its stat `name`.
ASYNCHRONOUS = 'ExecutorState::ProcessAsync::Start'
# Ops that TensorFlow's auto-clustering puts in the place of those it has compiled together.
CLUSTERS = frozenset(('_XlaCompile', '_XlaRun'))
LONGEST = 10 ** 15  # ps: no op takes a quarter of an hour
PATIENCE = 1.0  # seconds within which an op starts that has a thread to run on


def executed_graph(maker, inputs, labels):
    """The StepGraph of what TensorFlow executes for the full step of a masked_step.StepMaker.

    Runs that step once: TensorFlow hands out the optimised graph only while a function is first
    instantiated. UserError where XLA's auto-clustering rewrote the step.
    """
    step = maker.with_gradients()
    graphs = max(tf_internals.executed_graphs(lambda: step(inputs, labels)),
                 key=lambda g: len(g.post_optimization_graph.node))
    _check_clusters(graphs.post_optimization_graph)
    # What the device's own rewriting (oneDNN) fused into a neighbour is gone from the partitions.
    run = {node.name for partition in graphs.partition_graphs for node in partition.node}
    nodes = executed_nodes(graphs)
    folded = constants(nodes, topological(nodes))  # before the first step
    work = {name: amount for name, amount in work_of(maker.concrete.graph).items()
            if name in run and name not in folded}
    return analyse(nodes, len(maker.variables), maker.owners, work, NUM_RESULTS)


def executed_nodes(graphs):
    """name -> step_graph.Node of a FunctionGraphs proto, each loop and branching as one node.

    TensorFlow takes them apart, into nodes `<name of the While>/...` that it runs all or none.
    """
    before = {node.name: node.op for node in graphs.pre_optimization_graph.node}
    loops = {name: op for name, op in before.items() if op in CONTROL_FLOW}
    for node in graphs.post_optimization_graph.node:  # loops in functions that it has inlined
        if node.op == 'Enter':
            loops.setdefault(node.attr['frame_name'].s.decode(), 'While')
    nodes = {node.name: _node(node) for node in graphs.post_optimization_graph.node}
    return merged(nodes, loops, set(before))


def _check_clusters(graph):
    """UserError where ops were put together into clusters that XLA compiled.

    A function that the user had compiled (jit_compile) is none: the same in all steps, it is one
    node of the forward pass and one of the backward pass.
    """
    for node in graph.node:
        if node.op in CLUSTERS:
            raise UserError(
                "XLA's auto-clustering has joined ops of the training step ({}); what it joins "
                'differs from one choice of tensors to the next, so that their times cannot be '
                'told: take --tf_xla_auto_jit out of TF_XLA_FLAGS'.format(node.name))


def _node(node):
    tensors = [name if ':' in name else name + ':0'
               for name in node.input if not name.startswith('^')]
    return Node(node.op, [tensor.split(':')[0] for tensor in tensors], tensors,
                node.attr['index'].i if 'index' in node.attr else None)


@contextlib.contextmanager
def serial_ops():
    """Inside, TensorFlow runs one op at a time: all inter-op threads but one are kept waiting.

    Op times only add up when ops do not overlap. The number of inter-op threads cannot be changed
    once TensorFlow runs, and the totals must be measured with the one that training uses. Nor can
    it be asked for: it follows from flags, environment and container. So threads are taken until
    an op finds none.
    """
    occupied, release, left = [threading.Semaphore(0) for _ in range(3)]

    def wait():
        occupied.release()
        release.acquire()
        left.release()
        return np.int32(0)

    occupy = tf.function(lambda: tf.numpy_function(wait, [], tf.int32)).get_concrete_function()
    waiting, found = [], True
    try:
        while found:
            waiting.append(threading.Thread(target=occupy, daemon=True))
            waiting[-1].start()
            # The first has a thread, however long the start takes.
            found = occupied.acquire(timeout=PATIENCE if len(waiting) > 1 else None)
        for _ in range(2):  # one that found no thread, and one whose thread the step is to have
            release.release()
            left.acquire()
        yield
    finally:
        for _ in waiting:
            release.release()
        for thread in waiting:
            thread.join()


def record_trace(step, inputs, labels, folder, num_steps):
    """Traces `num_steps` calls of `step`; writes <folder>/plugins/profile/<time>/*.xplane.pb.

    Returns the path of the xplane file. TensorBoard's Profile tab opens the folder.
    """
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0, device_tracer_level=1)
    with serial_ops():
        step(inputs, labels)[0].numpy()  # nothing of it runs on into the trace
        tf.profiler.experimental.start(folder, options=options)
        try:
            for i in range(num_steps):
                with tf.profiler.experimental.Trace('train', step_num=i, _r=1):
                    step(inputs, labels)[0].numpy()  # waits for the device
        finally:
            tf.profiler.experimental.stop()
    traces = glob.glob(os.path.join(folder, 'plugins', 'profile', '*', '*.xplane.pb'))
    return max(traces, key=os.path.getmtime)


def op_times(graph, path, num_steps, num_tensors, gpu=None):
    """attribution.OpTimes of an xplane file; gpu: see read_trace."""
    space = _space(path)
    work = _work(space, gpu)
    return attribute(graph, _ms_of_ops(path, space, work, num_steps), num_tensors,
                     busy_ps(work) / 1e9 / num_steps if work else None)


def read_trace(path, num_steps, gpu=None):
    """name -> ms per step of every op event in an xplane file.

    On the host an op's time is the median over its events times events per step: one pre-empted
    step does not count. Where a GPU ran the op, the sum of its kernels counts, and not the launch
    on the host. In a GPU's trace an op that has an event on the host and no kernel ran there, and
    takes its time there: ops that are placed on a GPU have no such event at record_trace's level.
    gpu: whether ops ran on a GPU (default: whether TensorFlow sees one). UserError where the trace
    then has no kernels: times of launches say nothing.
    """
    space = _space(path)
    return _ms_of_ops(path, space, _work(space, gpu), num_steps)


def _work(space, gpu):
    """gpu_trace.gpu_work; gpu, error: see read_trace."""
    work = gpu_work(space)
    planes = [plane.name for plane in space.planes if plane.name.startswith(GPU)]
    if not work and (planes or tf.config.list_physical_devices('GPU') if gpu is None else gpu):
        raise UserError(
            'the trace has no kernels ({}): the driver lets only root look at them; load its '
            'module with NVreg_RestrictProfilingToAdminUsers=0, run as root, or run on the CPU '
            "with CUDA_VISIBLE_DEVICES=''".format(
                '{} is empty'.format(planes[0]) if planes else 'no plane of a GPU'))
    return work


def _ms_of_ops(path, space, work, num_steps):
    host, device = {}, {}
    for times, name, ps in [(device, item.op, item.duration) for item in work] + [
            (host, name, ps) for name, ps in _host_events(space)]:
        if not 0 <= ps <= LONGEST:
            raise UserError("'{}' is damaged: {} took {} ps".format(path, name, ps))
        times.setdefault(name, []).append(ps / 1e9)
    result = {name: float(np.median(ms)) * len(ms) / num_steps for name, ms in host.items()}
    # One op may launch several kernels.
    result.update({name: float(np.sum(ms)) / num_steps for name, ms in device.items()})
    return result


def _space(path):
    """The XSpace in a file; UserError where it is none."""
    space = tf_internals.xplane_pb2.XSpace()
    try:
        with open(path, 'rb') as trace:
            space.ParseFromString(trace.read())
    except (OSError, message.DecodeError, UnicodeDecodeError) as error:
        raise UserError("'{}' is no trace that can be read: {}".format(path, error))
    return space


def _host_events(space):
    """(node, ps) of every event of an op on the host; none of the runtime's own."""
    for plane in space.planes:
        if plane.name == HOST:
            stat_names = {i: metadata.name for i, metadata in plane.stat_metadata.items()}
            for event in (event for line in plane.lines for event in line.events):
                name = plane.event_metadata[event.metadata_id].name
                op = OP_EVENT.match(name)
                node = stats_of(event, stat_names).get('name') if name == ASYNCHRONOUS else (
                    op and op.group(1))
                if node:
                    yield node, event.duration_ps
