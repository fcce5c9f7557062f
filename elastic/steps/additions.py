"""Adds nodes to a cut graph, a FunctionDef: sums of parts of a batch, products, restored slots."""

from tensorflow.core.framework.types_pb2 import DT_INT32, DT_RESOURCE

from elastic.steps.function_graph import add_constant, add_node
from elastic.steps.inlining import redirect


def add_effect(function_def, op, name, inputs, dtype):
    """Adds a node to a FunctionDef that runs though no result needs it."""
    add_node(function_def, op, name, inputs, dtype=dtype)
    function_def.signature.control_output.append(name)
    function_def.control_ret[name] = name


def add_up(function_def, tensors, sums, share):
    """Adds tensors of a FunctionDef, (tensor, dtype enum) each, times `share`, to variables.

    sums: the arguments that are the variables' handles.
    """
    shares = {dtype: add_constant(function_def, 'share/{}'.format(dtype), share, dtype)
              for dtype in {dtype for _, dtype in tensors}}
    for i, ((tensor, dtype), handle) in enumerate(zip(tensors, sums)):
        part = add_node(function_def, 'Mul', 'part/{}'.format(i), [tensor, shares[dtype]], T=dtype)
        add_effect(function_def, 'AssignAddVariableOp', 'sum/{}'.format(i),
                   [handle, part.name + ':z:0'], dtype)


def read_sums(function_def, num_arguments):
    """Replaces the first arguments of a FunctionDef by variables, which it reads and empties."""
    sums = list(function_def.signature.input_arg)[:num_arguments]
    read = {each.name: 'read/{}:value:0'.format(each.name) for each in sums}
    redirect(function_def, read)
    for each in sums:
        add_node(function_def, 'ReadVariableOp', 'read/' + each.name, [each.name], dtype=each.type)
        zeros = add_node(function_def, 'ZerosLike', 'zeros/' + each.name, [read[each.name]],
                         T=each.type)
        add_effect(function_def, 'AssignVariableOp', 'emptied/' + each.name,
                   [each.name, zeros.name + ':y:0'], each.type)
        each.type = DT_RESOURCE


def add_products(function_def, tensors, before, after, ranks):
    """Adds a result to a FunctionDef: (N,), the sum of tensor x (after - before) for each tensor.

    tensors: (tensor, dtype enum) of N. before, after: names of N arguments. ranks: of the tensors.
    """
    found = []
    for i, ((tensor, dtype), old, new) in enumerate(zip(tensors, before, after)):
        # Waits, else the changes of all tensors are computed first and held.
        change = add_node(function_def, 'Sub', 'change/{}'.format(i),
                          [new, old, '^' + tensor.split(':')[0]], T=dtype)
        product = add_node(function_def, 'Mul', 'product/{}'.format(i),
                           [tensor, change.name + ':z:0'], T=dtype)
        axes = add_constant(function_def, 'axes/{}'.format(i), list(range(ranks[i])), DT_INT32)
        found.append(add_node(function_def, 'Sum', 'drop/{}'.format(i),
                              [product.name + ':z:0', axes], T=dtype, Tidx=DT_INT32).name)
    stacked = add_node(function_def, 'Pack', 'drops', [name + ':output:0' for name in found],
                       T=dtype)
    stacked.attr['N'].i = len(found)
    function_def.signature.output_arg.add(name='drops', type=dtype)
    function_def.ret['drops'] = 'drops:output:0'


def set_aside(function_def, variables, emptied):
    """Restores variables at the end of a FunctionDef. variables: (argument, dtype enum) of each.

    emptied: whether the nodes find zeros in them.
    """
    for i, (handle, dtype) in enumerate(variables):
        inside = [node for node in function_def.node_def if handle in node.input]
        ready = add_node(function_def, 'ReadVariableOp', 'saved/{}'.format(i), [handle],
                         dtype=dtype).name
        saved = ready + ':value:0'
        if emptied:
            zeros = add_node(function_def, 'ZerosLike', 'zeros/{}'.format(i), [saved], T=dtype)
            ready = add_node(function_def, 'AssignVariableOp', 'emptied/{}'.format(i),
                             [handle, zeros.name + ':y:0'], dtype=dtype).name
        for node in inside:
            node.input.append('^' + ready)
        add_effect(function_def, 'AssignVariableOp', 'restored/{}'.format(i),
                   [handle, saved] + ['^' + node.name for node in inside], dtype)


def in_order(function_def, groups):
    """Makes the nodes that read the arguments of a group wait for those of the group before it.

    So the values computed for one group exist at once, and not those for all. groups: lists of
    names of arguments; no node reads those of two.
    """
    users, before = {}, []
    for node in function_def.node_def:
        for name in node.input:
            users.setdefault(name, []).append(node)
    for group in groups:
        inside = {node.name: node for name in group for node in users.get(name, ())}
        for node in inside.values():
            node.input.extend(before)
        before = ['^' + name for name in sorted(inside)] or before
