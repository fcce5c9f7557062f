"""Private calls into TensorFlow, the same from 2.6 to 2.21; nothing else is here.

What Keras keeps to itself is in keras_stack.py.
"""

from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute as eager_execute
from tensorflow.python.framework import ops

try:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2
except ImportError:  # TensorFlow 2.6 and 2.7
    from tensorflow.core.profiler.protobuf import xplane_pb2

xplane_pb2 = xplane_pb2  # XSpace: the proto that a profiler trace is written in


def session_config():
    """The ConfigProto that TensorFlow runs functions with unless told otherwise: a copy."""
    config = type(eager_context.context().config)()
    config.CopyFrom(eager_context.context().config)
    return config


def add_function(definition):
    """Makes TensorFlow know the function of a FunctionDef, under its signature's name."""
    eager_context.context().add_function_def(definition)


def remove_function(name):
    """Frees what add_function added; nothing where it is gone, as at interpreter exit."""
    if eager_context is not None:
        try:
            eager_context.context().remove_function(name)
        except (AttributeError, TypeError, KeyError):
            pass


def call_function(name, num_outputs, inputs, config):
    """List of the results of a function that was added.

    inputs: tensors, captured handles behind them. config: a serialised ConfigProto.
    """
    return eager_execute.execute(
        name, num_outputs=num_outputs, inputs=inputs,
        attrs=('executor_type', '', 'config_proto', config), ctx=eager_context.context())


def executed_graphs(call):
    """List of FunctionGraphs protos, of every function that is first run within call().

    Each has pre_optimization_graph, post_optimization_graph and partition_graphs: as given, as
    rewritten, as split onto devices. It is what tf.summary.trace_on collects.
    """
    runtime = eager_context.context()
    runtime.enable_graph_collection()
    try:
        call()
        return list(runtime.export_run_metadata().function_graphs)
    finally:
        runtime.disable_graph_collection()


def flops(graph, node_def):
    """Floating-point operations of a node of a tf.Graph; None where TensorFlow cannot tell."""
    try:
        return ops.get_stats_for_node_def(graph, node_def, 'flops').value
    except (ValueError, AttributeError, IndexError):  # statistics need fully known shapes
        return None
