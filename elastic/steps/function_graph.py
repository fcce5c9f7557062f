"""Simplifies the graph of a traced function (FunctionDef) once, then cuts parts out of it.

Nothing runs here. As in the protocol buffer, a tensor is named `argument` or `node:output:index`,
and a control edge `^node`.
"""

import copy

import tensorflow as tf
from tensorflow.core.framework.types_pb2 import DT_INT32

from elastic.compat import tf_internals
from elastic.steps.inlining import redirect, redirect_results, set_inputs, without_nodes
from elastic.steps.step_graph import CONTROL_FLOW, FREE_OPS, Node, reachable

STATELESS = {'RandomUniform': 'StatelessRandomUniform',
             'RandomUniformInt': 'StatelessRandomUniformInt',
             'RandomStandardNormal': 'StatelessRandomNormal',
             'TruncatedNormal': 'StatelessTruncatedNormal'}


def untie(function_def):
    """Changes a FunctionDef so that no node ties all tensors together.

    In Keras 2, all gradients pass through one IdentityN before the optimizer; results pass Identity
    nodes that wait for all updates: readers now read from the source. Equal constants become one. A
    read after the only write becomes the value written. Fewer nodes make the first call shorter.
    """
    _unfuse_biases(function_def)
    nodes = {node.name: node for node in function_def.node_def}
    tuples, single = _passed_on(nodes, 'IdentityN'), _passed_on(nodes, 'Identity')
    redirect_results(function_def, dict(tuples, **single))
    results = set(function_def.ret.values())  # equal gradients that are constants stay apart
    stands_for = dict(tuples, **_equal_constants(nodes, results), **_read_back(nodes))
    redirect(function_def, stands_for)
    redirect_results(function_def, dict(stands_for, **single))


def _passed_on(nodes, op):
    """Returns output -> input of the nodes of the type `op`, which change nothing."""
    return {'{}:output:{}'.format(name, i): tensor for name, node in nodes.items()
            if node.op == op for i, tensor in enumerate(node.input)}


def _unfuse_biases(function_def):
    """Inserts an Identity node before each bias gradient that shares its input with a kernel's."""
    # If they share it, oneDNN computes both in one op. That op is slower than two (full steps of
    # plain convolutional networks took 2 to 24 % longer) and hides their separate times.
    kernels = {node.input[2] for node in function_def.node_def if node.op == 'Conv2DBackpropFilter'}
    for node in list(function_def.node_def):
        if node.op == 'BiasAddGrad' and node.input[0] in kernels:
            apart = add_node(function_def, 'Identity', node.name + '/apart', [node.input[0]],
                             T=node.attr['T'].type)
            node.input[0] = apart.name + ':output:0'


def _equal_constants(nodes, apart):
    """Returns constant -> the first equal one, for constants that are not in `apart`."""
    first, same = {}, {}
    for name, node in nodes.items():
        tensor = name + ':output:0'
        if node.op == 'Const' and not node.input and tensor not in apart:
            value = node.device, node.attr['value'].SerializeToString(deterministic=True)
            if first.setdefault(value, tensor) != tensor:
                same[tensor] = first[value]
    return same


def _read_back(nodes):
    """Returns read -> value written, for reads that wait for the only write of their variable."""
    writers, same = {}, {}  # argument -> nodes whose first input it is, but for reads
    for node in nodes.values():
        if node.op != 'ReadVariableOp' and node.input:
            writers.setdefault(node.input[0], []).append(node)
    for node in nodes.values():
        if node.op == 'ReadVariableOp' and len(writers.get(node.input[0], ())) == 1:
            writer, = writers[node.input[0]]
            if writer.op == 'AssignVariableOp' and '^' + writer.name in node.input:
                same[node.name + ':value:0'] = writer.input[1]
    return same


def analysable(function_def):
    nodes = {}
    for i, argument in enumerate(function_def.signature.input_arg):
        nodes[argument.name] = Node('_Arg', [], [], i)
    for node in function_def.node_def:
        tensors = [tensor for tensor in node.input if not tensor.startswith('^')]
        nodes[node.name] = Node(node.op, [tensor.split(':')[0] for tensor in tensors], tensors,
                                None)
    for i, output in enumerate(function_def.signature.output_arg):
        tensor = function_def.ret[output.name]
        nodes['result {}'.format(i)] = Node('_Retval', [tensor.split(':')[0]], [tensor], i)
    return nodes


class Cutter:
    """Copies the part of an untied FunctionDef that given results and effects need.

    nodes: name -> NodeDef. analysable: name -> step_graph.Node, with arguments and results.
    """

    def __init__(self, function_def):
        self.function = function_def
        self.nodes = {node.name: node for node in function_def.node_def}
        self.analysable = analysable(function_def)
        self._waits_for = {name: [source[1:] for source in node.input if source[0] == '^']
                           for name, node in self.nodes.items()}
        self._frame = without_nodes(function_def)
        self._frame.ret.clear()
        self._made = 0

    def cut(self, effects, num_results, left_out, extra=()):
        """Returns the FunctionDef of the first `num_results` results and of `effects`.

        effects: result name -> name of a node that changes a variable. left_out: names of nodes to
        omit. extra: (tensor, dtype enum) of each additional result. A control edge from an omitted
        node is replaced by edges from the nodes it waits for, so the order of execution stays.
        """
        cut = copy.deepcopy(self._frame)
        self._made += 1
        cut.signature.name += '_masked_{}'.format(self._made)
        del cut.signature.output_arg[num_results:]
        for output in cut.signature.output_arg:
            cut.ret[output.name] = self.function.ret[output.name]
        for i, (tensor, dtype) in enumerate(extra):
            cut.signature.output_arg.add(name='extra_{}'.format(i), type=dtype)
            cut.ret['extra_{}'.format(i)] = tensor
        cut.signature.control_output.extend(effects)
        for result, name in effects.items():
            cut.control_ret[result] = name
        ends = list(effects.values()) + [tensor.split(':')[0] for tensor in cut.ret.values()]
        kept = reachable(ends, lambda name: (
            () if name in left_out else self.analysable[name].data)).difference(left_out)
        cut.node_def.extend(node for name, node in self.nodes.items() if name in kept)
        for node in cut.node_def:
            if not kept.issuperset(self._waits_for[node.name]):
                before = reachable(self._waits_for[node.name], lambda name: (
                    () if name in kept else self._waits_for[name]))
                set_inputs(node, [source for source in node.input if source[0] != '^']
                           + ['^' + name for name in sorted(before.intersection(kept))])
        return cut


def take_from_outside(function_def, tensors, num_inputs):
    """Replaces tensors of a FunctionDef by new arguments, in place of its first `num_inputs`.

    tensors: (tensor, dtype enum) of each. If a tensor is listed twice (added weights share a
    gradient), the last of its arguments replaces it.
    """
    given = add_arguments(function_def, num_inputs, [dtype for _, dtype in tensors])
    redirect(function_def, dict(zip((tensor for tensor, _ in tensors), given)))
    del function_def.signature.input_arg[:num_inputs]


def add_arguments(function_def, place, dtypes):
    """Adds arguments of these dtypes (enums) in front of the one at `place`; returns names."""
    after = list(function_def.signature.input_arg)[place:]
    del function_def.signature.input_arg[place:]
    function_def.arg_attr.clear()  # by place
    names = ['given_{}'.format(i) for i in range(len(dtypes))]
    for name, dtype in zip(names, dtypes):
        function_def.signature.input_arg.add(name=name, type=dtype)
    function_def.signature.input_arg.extend(after)
    return names


def take_results(function_def, num_results):
    """Removes results after the first ones, but no nodes; returns [(tensor, dtype enum)]."""
    outputs = list(function_def.signature.output_arg)[num_results:]
    del function_def.signature.output_arg[num_results:]
    return [(function_def.ret.pop(output.name), output.type) for output in outputs]


def add_node(function_def, op, name, inputs, **types):
    """Adds a node to a FunctionDef and returns it. types: its type attributes."""
    node = function_def.node_def.add(name=name, op=op)
    node.input.extend(inputs)
    for key, value in types.items():
        node.attr[key].type = value
    return node


def add_constant(function_def, name, value, dtype):
    """Adds a constant, a number or a list, to a FunctionDef; returns its tensor."""
    node = add_node(function_def, 'Const', name, [], dtype=dtype)
    node.attr['value'].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return name + ':output:0'


def pass_through(function_def, called, tensors, readers, effects):
    """Lets tensors of a FunctionDef pass through another function before they are used.

    called: ConcreteFunction with as many results as arguments, of the same types. tensors: (tensor,
    dtype enum) of each argument. readers: names of the nodes that read the results instead; the
    FunctionDef's own results always do. effects: names of the nodes that wait for the call, so that
    nothing changes if it fails; those that the call itself waits for cannot.
    """
    nodes = {node.name: node for node in function_def.node_def}
    before = reachable((tensor.split(':')[0] for tensor, _ in tensors), lambda name: [
        source.lstrip('^').split(':')[0] for source in nodes[name].input] if name in nodes else ())
    call = add_node(function_def, 'StatefulPartitionedCall', 'passed',
                    [name for name, _ in tensors])
    for key in ('Tin', 'Tout'):
        call.attr[key].list.type.extend(dtype for _, dtype in tensors)
    call.attr['f'].func.name = called.function_def.signature.name
    passed = {name: 'passed:output:{}'.format(i) for i, (name, _) in enumerate(tensors)}
    # TensorFlow inlines the call: an edge from the call itself waits for less.
    arrived = [add_node(function_def, 'Identity', 'arrived/{}'.format(i),
                        ['passed:output:{}'.format(i)], T=dtype).name
               for i, (_, dtype) in enumerate(tensors)]
    add_node(function_def, 'NoOp', 'arrived', ['^' + name for name in arrived])
    for node in function_def.node_def:
        inputs = list(node.input)
        if node.name in readers:
            inputs = [passed.get(tensor, tensor) for tensor in inputs]
        if node.name in effects and node.name not in before:
            inputs.append('^arrived')
        set_inputs(node, inputs)
    redirect_results(function_def, passed)


def repeat_noise(function_def):
    """Makes stateful random ops draw the same numbers in every call, as those from a seed do."""
    for i, node in enumerate(list(function_def.node_def)):
        if node.op in STATELESS:
            dtype = node.attr['Tout' if node.op == 'RandomUniformInt' else 'dtype'].type
            seed = add_constant(function_def, 'seed/{}'.format(i), [i, 0], DT_INT32)
            node.op = STATELESS[node.op]
            node.input.insert(1, seed)
            for key in set(node.attr) - {'T'}:
                del node.attr[key]
            node.attr['dtype'].type, node.attr['Tseed'].type = dtype, DT_INT32


def work_of(graph):
    """Returns StepGraph.work of the ops of a tf.Graph."""
    work = {}
    for op in graph.get_operations():
        if op.type in FREE_OPS or op.type in CONTROL_FLOW or not op.outputs:
            continue
        flops = tf_internals.flops(graph, op.node_def)
        work[op.name] = ('flops', float(flops)) if flops else (
            'elements', float(op.outputs[0].shape.num_elements() or 1))
    return work
