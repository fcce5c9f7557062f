"""Records what TensorFlow really executes in a training step: its graph, and a trace of its ops.

The graph is the one after TensorFlow's own optimisation. Its node names are the event names of a
profiler trace, so that fused and folded ops need no guessing.
"""

import contextlib
import glob
import os
import threading

import numpy as np
import tensorflow as tf

from elastic.compat import tf_internals
from elastic.compat.start import quiet
from elastic.errors import UserError
from elastic.steps.function_graph import work_of
from elastic.steps.step_graph import CONTROL_FLOW, Node, analyse, constants, merged
from elastic.steps.training_step import NUM_RESULTS

# With these ops, TensorFlow's auto-clustering replaces the ops that it compiled together.
CLUSTERS = frozenset(('_XlaCompile', '_XlaRun'))
PATIENCE = 1.0  # seconds within which an op starts if there is a thread for it


def executed_graph(maker, inputs, labels):
    """Returns the StepGraph that TensorFlow executes for the full step of a StepMaker.

    Runs that step once, as TensorFlow gives the optimised graph only when a function is first
    called. Raises UserError if XLA's auto-clustering rewrote the step.
    """
    step = maker.with_gradients()
    graphs = max(tf_internals.executed_graphs(lambda: step(inputs, labels)),
                 key=lambda g: len(g.post_optimization_graph.node))
    _check_clusters(graphs.post_optimization_graph)
    # Ops that the device's own rewriting (oneDNN) fused into others are not in the partitions.
    run = {node.name for partition in graphs.partition_graphs for node in partition.node}
    nodes = executed_nodes(graphs)
    folded = constants(nodes)  # before the first step
    work = {name: amount for name, amount in work_of(maker.concrete.graph).items()
            if name in run and name not in folded}
    return analyse(nodes, len(maker.variables), maker.owners, work, NUM_RESULTS)


def executed_nodes(graphs):
    """Returns name -> step_graph.Node of a FunctionGraphs proto; a loop or branching is one node.

    TensorFlow splits a loop into nodes `<name of the While>/...`, and runs all of them or none.
    """
    before = {node.name: node.op for node in graphs.pre_optimization_graph.node}
    loops = {name: op for name, op in before.items() if op in CONTROL_FLOW}
    for node in graphs.post_optimization_graph.node:  # loops in functions that were inlined
        if node.op == 'Enter':
            loops.setdefault(node.attr['frame_name'].s.decode(), 'While')
    nodes = {node.name: _node(node) for node in graphs.post_optimization_graph.node}
    return merged(nodes, loops, set(before))


def _check_clusters(graph):
    # A function that the user compiles (jit_compile) is no cluster: it has one node in every step.
    for node in graph.node:
        if node.op in CLUSTERS:
            raise UserError(
                "XLA's auto-clustering has joined ops of the training step ({}); it joins others "
                'for another choice of tensors, so that no tensor has a time of its own: take '
                '--tf_xla_auto_jit out of TF_XLA_FLAGS'.format(node.name))


def _node(node):
    tensors = [name if ':' in name else name + ':0'
               for name in node.input if not name.startswith('^')]
    return Node(node.op, [tensor.split(':')[0] for tensor in tensors], tensors,
                node.attr['index'].i if 'index' in node.attr else None)


@contextlib.contextmanager
def serial_ops():
    """Makes TensorFlow run one op at a time within the context: one inter-op thread stays free.

    Op times only add up if ops do not overlap. Once TensorFlow runs, the number of inter-op threads
    can be neither changed nor read, so threads are occupied until an op finds none.
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
            # The first always finds a thread, however long that takes.
            found = occupied.acquire(timeout=PATIENCE if len(waiting) > 1 else None)
        for _ in range(2):  # the op that found no thread, and one that leaves its own to the step
            release.release()
            left.acquire()
        yield
    finally:
        for _ in waiting:
            release.release()
        for thread in waiting:
            thread.join()


def record_trace(step, inputs, labels, folder, num_steps):
    """Traces `num_steps` calls of `step`; returns the path of the xplane file.

    The file lies under <folder>/plugins/profile, where TensorBoard's Profile tab looks for it.
    """
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0, device_tracer_level=1)
    noisy = 'TF_CPP_MIN_LOG_LEVEL' in os.environ  # set by scripts, or by a user who wants notices
    with serial_ops(), contextlib.ExitStack() if noisy else quiet():
        step(inputs, labels)[0].numpy()  # waits, so that none of it runs during the trace
        tf.profiler.experimental.start(folder, options=options)
        try:
            for i in range(num_steps):
                with tf.profiler.experimental.Trace('train', step_num=i, _r=1):
                    step(inputs, labels)[0].numpy()  # waits for the device
        finally:
            tf.profiler.experimental.stop()
    traces = glob.glob(os.path.join(folder, 'plugins', 'profile', '*', '*.xplane.pb'))
    return max(traces, key=os.path.getmtime)
