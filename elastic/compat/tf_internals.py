"""Holds all private calls into TensorFlow; they are the same from 2.6 to 2.21."""

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute as eager_execute
from tensorflow.python.framework import ops
from tensorflow.python.lib.io import tf_record

try:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2
except ImportError:  # TensorFlow 2.6 and 2.7
    from tensorflow.core.profiler.protobuf import xplane_pb2

xplane_pb2 = xplane_pb2  # the protos of profiler traces


def step_config():
    """Returns the serialised ConfigProto that steps run with."""
    config = eager_context.context().config
    # TensorFlow's graph optimizer takes as long as several steps for each mask, and makes none
    # faster on a CPU. On a GPU it is on, because it chooses the memory layout.
    if not eager_context.context().list_physical_devices('GPU'):
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString()


def read_record(path, offset):
    """Returns the bytes of the record at this offset of a TFRecord file.

    Raises tf.errors.DataLossError if its checksum does not fit, IndexError behind the last record.
    """
    return tf_record.tf_record_random_reader(path).read(offset)[0]


def add_function(definition):
    """Adds the function of a FunctionDef to TensorFlow, under its signature's name."""
    eager_context.context().add_function_def(definition)


def remove_function(name):
    """Frees a function that add_function added."""
    eager_context.context().remove_function(name)


def call_function(name, num_outputs, inputs, config):
    """Runs a function that was added; returns its results, a list.

    inputs: tensors, followed by the captured handles. config: a serialised ConfigProto.
    """
    return eager_execute.execute(
        name, num_outputs=num_outputs, inputs=inputs,
        attrs=('executor_type', '', 'config_proto', config), ctx=eager_context.context())


def executed_graphs(call):
    """Returns the FunctionGraphs protos of every function that first runs within call().

    Each holds the graph as given (pre_optimization_graph), as rewritten (post_optimization_graph)
    and as split onto devices (partition_graphs). tf.summary.trace_on collects the same.
    """
    runtime = eager_context.context()
    runtime.enable_graph_collection()
    try:
        runtime.export_run_metadata()  # drops what others collected, as Keras' TensorBoard does
        call()
        return list(runtime.export_run_metadata().function_graphs)
    finally:
        runtime.disable_graph_collection()


def flops(graph, node_def):
    """Returns the number of floating-point operations of a tf.Graph's node; None if unknown."""
    try:
        return ops.get_stats_for_node_def(graph, node_def, 'flops').value
    except (ValueError, AttributeError, IndexError):  # statistics need fully known shapes
        return None


# ---------------------------------------------------------------- several workers

def join_cluster(addresses, index):
    """Makes this process worker `index` of a cluster; starts its server.

    addresses: 'host:port' of each worker. MultiWorkerMirroredStrategy does the same; today's also
    starts a coordination service, which nothing here needs.
    """
    context = eager_context.context()
    context.configure_collective_ops(
        collective_leader='/job:worker/replica:0/task:0',
        device_filters=('/job:worker/task:{}'.format(index),))
    cluster = tf.train.ClusterSpec({'worker': list(addresses)})
    context.enable_collective_ops(tensorflow_server_pb2.ServerDef(
        cluster=cluster.as_cluster_def(), default_session_config=context.config,
        job_name='worker', task_index=index, protocol='grpc'))
    context.ensure_initialized()


def abort_collectives(message):
    """Ends all sums over the workers that run, and all later ones, with an UnavailableError."""
    eager_context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def is_alive(index, timeout_ms):
    """Returns whether worker `index` of the cluster answers and has not started again."""
    try:
        eager_context.context().check_collective_ops_peer_health(
            '/job:worker/replica:0/task:{}'.format(index), timeout_in_ms=timeout_ms)
        return True
    except tf.errors.OpError:
        return False
