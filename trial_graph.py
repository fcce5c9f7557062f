"""Graphs of a trial update, cut from traced ones: what an importance is made of.

A trial takes a forward and a backward pass at the weights w, the optimizer's update of all tensors,
and both passes again at w plus the update. As a graph each, they cost little more than the passes
themselves (benchmarks/overhead.py).
"""

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.types_pb2 import DT_FLOAT, DT_INT32

import keras_stack
from masked_step import GraphFunction, MaskedStep, add_node, set_inputs


def updates(maker):
    """GraphFunction (N gradients) -> N updates that the optimizer makes of them, nothing changed.

    maker: masked_step.StepMaker with an optimizer. Weight decay is left out. Cut out where the
    gradients enter, which become its arguments; weights and the optimizer's state are put back in
    the same graph.
    """
    names, left_out = _gradients(maker), _outside_update(maker)
    behind, todo = set(), list(names)  # what is computed from a gradient; decay is not
    readers = {}
    for name, node in maker.nodes.items():
        for tensor in node.input:
            # Through control edges too: the new momentum is read back from its variable.
            for source in (tensor, tensor.lstrip('^').split(':')[0]):
                readers.setdefault(source, []).append(name)
    while todo:
        for name in readers.get(todo.pop(), ()):
            if name not in behind and name not in left_out:
                behind.add(name)
                todo.append(name)
    effects = {result: name for result, name in maker.effects(left_out).items()
               if name in behind}
    decay = set(maker.effects(left_out).values()) - behind
    added = _added_to_weights(maker, effects, left_out)
    weights = set(maker.weights.values())
    # The rest, momentum and its like, is written where a weight's update waits for it.
    computed = {result: added[name].split(':')[0] if name in added else name
                for result, name in effects.items() if maker.nodes[name].input[0] in weights}
    cut = _of_gradients(maker, computed, left_out | decay | set(added))
    kept = {node.name for node in cut.node_def}
    _undo(maker, cut, set(computed.values()) | kept.intersection(effects.values()), {
        maker.nodes[name].input[0]: (maker.nodes[name].op, tensor)
        for name, tensor in added.items()})
    return GraphFunction(cut, maker)


def update(maker):
    """GraphFunction (N gradients) -> [], after one update and decay of all tensors by them.

    For the profiler: beside a pass ten times as long, the update is lost in the noise.
    """
    left_out, types = _outside_update(maker), _state_types(maker)
    effects = {result: name for result, name in maker.effects(left_out).items()
               if maker.nodes[name].input[0] in types}  # not the statistics of a normalisation
    return GraphFunction(_of_gradients(maker, effects, left_out), maker)


def _state_types(maker):
    """Argument -> dtype, of the handles of all weights and of the optimizer's state."""
    dtypes = {id(v.handle): v.dtype.as_datatype_enum for v in maker.variables + [
        keras_stack.raw(v) for v in keras_stack.optimizer_variables(maker.optimizer)]}
    return {name: dtypes[id(handle)] for name, handle in zip(maker.handles, maker.captured)
            if id(handle) in dtypes}


def _gradients(maker):
    """Tensor -> name of an argument that stands for it, of the N gradients."""
    return {maker.function.ret[output.name]: 'gradient_{}'.format(k)
            for k, output in enumerate(maker.function.signature.output_arg[2:])}


def _outside_update(maker):
    """Names of all nodes but those of the update, constants, which it may share with the passes,
    and reads, which other nodes wait for.
    """
    return {name for name, node in maker.nodes.items() if name not in maker.graph.update
            and node.op not in ('ReadVariableOp', 'Const')}


def _of_gradients(maker, effects, left_out):
    """FunctionDef of `effects`, cut out where the gradients enter: they become its arguments."""
    cut, names = maker.cut(effects, 0, left_out), _gradients(maker)
    for node in cut.node_def:
        set_inputs(node, [names.get(tensor, tensor) for tensor in node.input])
    arguments = list(cut.signature.input_arg)[2:]
    del cut.signature.input_arg[:]
    cut.arg_attr.clear()
    for k, output in enumerate(maker.function.signature.output_arg[2:]):
        cut.signature.input_arg.add(name='gradient_{}'.format(k), type=output.type)
    cut.signature.input_arg.extend(arguments)
    return cut


def _added_to_weights(maker, effects, left_out):
    """name -> tensor, of the ops that are all that happens to a weight: they add it or subtract it.

    That tensor is the update: such a weight need not be written at all.
    """
    found, weights = {}, set(maker.weights.values())
    written = [tensor for name in effects.values() for tensor in maker.nodes[name].input]
    for name in effects.values():
        node = maker.nodes[name]
        if node.op in ('AssignAddVariableOp', 'AssignSubVariableOp') and node.input[0] in weights:
            source = node.input[1].split(':')[0]
            if written.count(node.input[0]) == 1 and source in maker.nodes and (
                    source not in left_out):
                found[name] = node.input[1]
    return found


def _undo(maker, cut, updating, added):
    """Turns a graph that updates weights into one that returns the updates and undoes them.

    updating: names of what writes, or gives what is added. added: argument -> (op, tensor) for
    weights that are not written.
    """
    types = _state_types(maker)
    written = {}  # handle argument -> type, of every variable that an effect may change
    for name in updating:
        for argument in maker.nodes[name].input:
            if argument in types:
                written[argument] = types[argument]
    for node in cut.node_def:
        if node.name in updating:
            node.input.append('^undo/all_before')
    for argument, dtype in written.items():
        add_node(cut, 'ReadVariableOp', 'undo/before/' + argument, [argument], dtype=dtype)
    add_node(cut, 'NoOp', 'undo/all_before', ['^undo/before/' + a for a in written])
    add_node(cut, 'NoOp', 'undo/all_updated', ['^' + name for name in updating])
    read = ['^undo/all_updated']
    for k, argument in sorted(maker.weights.items()):
        output = cut.signature.output_arg.add(name='update_{}'.format(k), type=types[argument])
        op, tensor = added.get(argument, (None, None))
        if op == 'AssignAddVariableOp':
            cut.ret[output.name] = tensor
            continue
        update = 'undo/update/' + argument
        if op == 'AssignSubVariableOp':
            add_node(cut, 'Neg', update, [tensor], T=types[argument])
            cut.ret[output.name] = update + ':y:0'
            continue
        add_node(cut, 'ReadVariableOp', 'undo/after/' + argument,
                 [argument, '^undo/all_updated'], dtype=types[argument])
        add_node(cut, 'Sub', update, ['undo/after/{}:value:0'.format(argument),
                                      'undo/before/{}:value:0'.format(argument)],
                 T=types[argument])
        cut.ret[output.name] = update + ':z:0'
        read.append('^' + update)
    add_node(cut, 'NoOp', 'undo/all_read', read)
    del cut.signature.control_output[:]
    cut.control_ret.clear()
    for argument, dtype in written.items():
        name = 'undo/restore/' + argument
        add_node(cut, 'AssignVariableOp', name,
                 [argument, 'undo/before/{}:value:0'.format(argument), '^undo/all_read'],
                 dtype=dtype)
        cut.signature.control_output.append(name)
        cut.control_ret[name] = name


def drops(maker):
    """MaskedStep (images, labels, scale, N updates) -> [loss, number correct, (N,) drops].

    All at the weights w + scale * update: what the graph reads of each variable is replaced by the
    sum. A drop is - sum_i g_i update_i of one tensor, scale left out.
    """
    cut = maker.quiet(2 + len(maker.variables))
    argument_of = {argument: k for k, argument in maker.weights.items()}
    moved = {}  # what a read gives -> what stands for it
    for node in cut.node_def:
        if node.op == 'ReadVariableOp' and node.input[0] in argument_of:
            moved[node.name + ':value:0'] = 'trial/weights/{}:z:0'.format(
                argument_of[node.input[0]])
    for node in cut.node_def:
        set_inputs(node, [moved.get(tensor, tensor) for tensor in node.input])
    gradients = [cut.ret.pop(output.name) for output in cut.signature.output_arg[2:]]
    handles = list(cut.signature.input_arg)[2:]
    del cut.signature.output_arg[2:], cut.signature.input_arg[2:]
    cut.arg_attr.clear()
    cut.signature.input_arg.add(name='scale', type=DT_FLOAT)
    constants, found = {}, []

    def axes(rank):
        if rank not in constants:
            constants[rank] = 'trial/axes/{}'.format(rank)
            node = add_node(cut, 'Const', constants[rank], [], dtype=DT_INT32)
            node.attr['value'].tensor.CopyFrom(tf.make_tensor_proto(
                np.arange(rank, dtype=np.int32)))
        return constants[rank] + ':output:0'

    for k, (variable, gradient) in enumerate(zip(maker.variables, gradients)):
        dtype, update = variable.dtype.as_datatype_enum, 'update_{}'.format(k)
        cut.signature.input_arg.add(name=update, type=dtype)
        name = ('trial/{}/%d' % k).format
        add_node(cut, 'ReadVariableOp', name('read'), [maker.weights[k]], dtype=dtype)
        add_node(cut, 'Mul', name('scaled'), ['scale', update], T=dtype)
        add_node(cut, 'AddV2', name('weights'),
                 [name('read') + ':value:0', name('scaled') + ':z:0'], T=dtype)
        add_node(cut, 'Mul', name('product'), [moved.get(gradient, gradient), update], T=dtype)
        add_node(cut, 'Sum', name('sum'), [name('product') + ':z:0', axes(len(variable.shape))],
                 T=dtype, Tidx=DT_INT32)
        found.append(name('sum') + ':output:0')
    cut.signature.input_arg.extend(handles)
    add_node(cut, 'Pack', 'trial/sums', found, T=DT_FLOAT).attr['N'].i = len(found)
    add_node(cut, 'Neg', 'trial/drops', ['trial/sums:output:0'], T=DT_FLOAT)
    cut.signature.output_arg.add(name='drops', type=DT_FLOAT)
    cut.ret['drops'] = 'trial/drops:y:0'
    return MaskedStep(cut, None, maker)
