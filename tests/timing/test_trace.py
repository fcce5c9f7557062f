"""Tests traces of real steps: recorded one op at a time, read as ms of each op."""

import os
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from elastic.compat import tf_internals
from elastic.timing.op_times import OP_EVENT, read_trace
from elastic.timing.trace import serial_ops
from small_runs import script
from traced_networks import STEPS, branching, traced
from xplanes import CPU, xplane


def meet(seconds):
    """Returns whether two ops of one function run at once; each waits up to `seconds`."""
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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason='ops never overlap on one core')
def test_serial_ops_lets_one_op_run_at_a_time_and_is_undone_even_after_an_error():
    assert meet(120)
    threads = threading.active_count()
    with pytest.raises(KeyError), serial_ops():
        assert not meet(0.5)
        raise KeyError
    assert meet(120)
    assert threading.active_count() == threads


@pytest.mark.parametrize('threads', [1, 5])
@pytest.mark.thorough
def test_serial_ops_occupies_a_pool_of_any_size(threads):
    """The environment or a container may give fewer threads than cores, or more."""
    code = ('import sys, test_trace as t; seconds = float(sys.argv[1]); before = t.meet(seconds)\n'
            'with t.serial_ops(): inside = t.meet(0.5)\n'
            'print(before, inside, t.meet(seconds))')
    _, out, errors = script('-c', code, '1' if threads == 1 else '120',
                            TF_NUM_INTEROP_THREADS=str(threads),
                            PYTHONPATH=os.pathsep.join(sys.path))
    assert out.split() == [str(threads > 1), 'False', str(threads > 1)], errors


def test_no_two_op_events_of_a_trace_overlap_in_time():
    case = traced(branching)
    space = tf_internals.xplane_pb2.XSpace()
    with open(case.path, 'rb') as trace:
        space.ParseFromString(trace.read())
    events = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if OP_EVENT.match(name):
                    begin = line.timestamp_ns * 1000 + event.offset_ps
                    events.append((begin, begin + event.duration_ps, name))
    events.sort()
    assert len(events) > STEPS * 50
    assert [(a[2], b[2]) for a, b in zip(events, events[1:]) if b[0] < a[1]] == []


# --- reading a trace


def test_one_pre_empted_step_does_not_count(tmp_path):
    path = xplane(tmp_path / 'host.xplane.pb', {CPU: [
        ('model/Relu:Relu', ms, {}) for ms in (1, 1, 50)]})
    assert read_trace(path, num_steps=3)[0] == {'model/Relu': pytest.approx(1)}


CLUSTERED = """
import sys
sys.path.insert(0, 'tests/support')
from elastic import errors
from elastic.compat import start
start.quiet_tensorflow()
from traced_networks import plain, traced
try:
    traced(plain)
except errors.UserError as error:
    print(error)
"""


def test_the_gradient_of_a_bias_is_computed_apart_from_that_of_its_convolution():
    """oneDNN would fuse both into one slower op, named after the kernel's."""
    case = traced(branching)
    biases = [name for name in case.graph.backward if case.graph.nodes[name].op == 'BiasAddGrad']
    assert len(biases) == 4 and all(case.times[name] > 0 for name in biases)


@pytest.mark.thorough
def test_a_step_that_xla_clusters_is_refused():
    _, out, errors = script(
        '-c', CLUSTERED, TF_XLA_FLAGS='--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit')
    assert out.count('\n') == 1 and 'take --tf_xla_auto_jit out of TF_XLA_FLAGS' in out, errors


def test_a_graph_that_something_else_collected_is_left_out():
    larger = tf.function(lambda x: tf.cos(tf.sin(tf.exp(x) + 1) * 2) + tf.tanh(x))
    smaller = tf.function(lambda x: tf.exp(x))
    tf.summary.trace_on(graph=True)  # as Keras' TensorBoard callback does
    larger(tf.zeros(3))
    graphs = tf_internals.executed_graphs(lambda: smaller(tf.zeros(3)))
    assert not any(node.op == 'Tanh' for graph in graphs
                   for node in graph.post_optimization_graph.node)
    assert any(node.op == 'Exp' for graph in graphs for node in graph.post_optimization_graph.node)
    tf.summary.trace_off()
