"""Replaces the calls of functions in a FunctionDef by what they compute."""

import copy

from elastic.steps.step_graph import reachable

CALLS = ('PartitionedCall', 'StatefulPartitionedCall')


def inlined(function_def, library):
    """Returns the FunctionDef with each call replaced by the nodes of the called function.

    Loops, branches and what XLA compiles (Keras' grouped convolutions on a CPU) stay single nodes.
    library: name -> FunctionDef.
    """
    plain = without_nodes(function_def)
    stands_for, ends = _expanded(function_def, library, plain)
    arguments = {argument.name for argument in function_def.signature.input_arg}

    def waited_for(name):
        """Returns the nodes that a control edge from `name` waits for, without arguments."""
        name = resolved(name, stands_for).split(':')[0]
        if name in ends:
            return {node for end in ends[name] for node in waited_for(end)}
        return {name} - arguments

    for node in plain.node_def:
        control = {name for tensor in node.input if tensor[0] == '^'
                   for name in waited_for(tensor[1:])}
        set_inputs(node, [resolved(tensor, stands_for) for tensor in node.input if tensor[0] != '^']
                   + ['^' + name for name in sorted(control)])
    redirect_results(plain, stands_for)
    return plain


def resolved(tensor, stands_for):
    """Returns the tensor that this one stands for in the end. stands_for: tensor -> tensor."""
    while tensor in stands_for:
        tensor = stands_for[tensor]
    return tensor


def without_nodes(function_def):
    plain = copy.deepcopy(function_def)
    plain.ClearField('node_def')
    plain.ClearField('control_ret')
    plain.signature.ClearField('control_output')
    return plain


def _expanded(function_def, library, plain):
    """Adds all nodes and effects of the function and of those that it calls to `plain`."""
    stands_for = {}  # argument of a call -> tensor outside; output of a call -> tensor inside
    ends = {}  # call -> nodes or tensors inside that a control edge from the call waits for

    def add(function, prefix='', control=()):
        for node in function.node_def:
            name = prefix + node.name
            inputs = ['^' + prefix + tensor[1:] if tensor[0] == '^' else prefix + tensor
                      for tensor in node.input]
            if not inputs or any(tensor in stands_for for tensor in inputs):
                inputs += control  # all other nodes descend from one of these
            if node.op in CALLS and not compiled(node, library):
                body, inside = library[node.attr['f'].func.name], name + '/'
                results = [inside + body.ret[output.name] for output in body.signature.output_arg]
                stands_for.update(zip((inside + a.name for a in body.signature.input_arg), inputs))
                stands_for.update(('{}:output:{}'.format(name, i), tensor)
                                  for i, tensor in enumerate(results))
                ends[name] = [inside + end for end in body.control_ret.values()] or results
                add(body, inside, [tensor for tensor in inputs if tensor[0] == '^'])
                continue
            added = plain.node_def.add()
            added.CopyFrom(node)
            added.name = name
            set_inputs(added, inputs)
            if prefix:
                added.attr.pop('_class', None)  # it holds names of nodes
        for name in function.control_ret.values():
            if prefix + name not in ends:  # the effects of a call are those inside it
                plain.control_ret[prefix + name] = prefix + name
    add(function_def)
    return stands_for, ends


def compiled(node, library):
    """Returns whether XLA compiles the nested function that the node calls."""
    return node.attr['_XlaMustCompile'].b or (
        library[node.attr['f'].func.name].attr['_XlaMustCompile'].b)


def functions_of(node):
    """Returns the names of the functions that a NodeDef calls."""
    return [function.name for attr in node.attr.values()
            for function in [attr.func] + list(attr.list.func) if function.name]


def output_names(op):
    """Returns the names, `node:output:index`, of the tensors that a tf.Operation puts out."""
    names = []
    for output in op.op_def.output_arg:
        count = 1
        if output.number_attr:
            count = op.get_attr(output.number_attr)
        elif output.type_list_attr:
            count = len(op.get_attr(output.type_list_attr))
        names += ['{}:{}:{}'.format(op.name, output.name, i) for i in range(count)]
    return names


def called_ops(nodes, library):
    """Returns node name -> set of op types in the functions it calls, for nodes that call any.

    nodes: NodeDefs. library: name -> FunctionDef.
    """
    def body(name):
        return library[name].node_def if name in library else ()

    called = {}
    for node in nodes:
        names = reachable(functions_of(node), lambda name: [
            function for inner in body(name) for function in functions_of(inner)])
        if names:
            called[node.name] = {inner.op for name in names for inner in body(name)}
    return called


def set_inputs(node, inputs):
    if list(node.input) != inputs:
        node.input[:] = inputs


def redirect(function_def, stands_for):
    """Makes nodes and results of a FunctionDef read what tensors stand for, as in `resolved`."""
    for node in function_def.node_def:
        set_inputs(node, [resolved(tensor, stands_for) for tensor in node.input])
    redirect_results(function_def, stands_for)


def redirect_results(function_def, stands_for):
    for output, tensor in list(function_def.ret.items()):
        function_def.ret[output] = resolved(tensor, stands_for)
