"""Finds out which tensors need which ops of a training step.

Timings are derived from the graph, not from layer names, so that any Keras model works. In the
graph of the step, B_k is every ancestor of gradient k that is not an ancestor of the loss. The
backward pass of a set of tensors is the union of their B_k. timing/trace.py makes the graph,
timing/attribution.py adds up the times of its ops; nothing runs here.

A set of tensors is a bit mask (int) in this module and an (N,) bool array elsewhere; tensor_sets
converts.
"""

from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from elastic.command_line import UserError

# Ops for which the executor runs no kernel: no event, no cost.
FREE_OPS = frozenset(('Const', '_Arg', '_Retval', 'Identity', 'IdentityN', 'NoOp', 'Reshape',
                      'Shape', 'ShapeN', 'Placeholder', 'StopGradient', 'PreventGradient',
                      'Squeeze', 'ExpandDims', '_DeviceArg', '_DeviceRetval', 'VarHandleOp',
                      'Size', 'Rank'))
# Ops that call functions in a loop or on a condition. TensorFlow runs such an op whole or not.
CONTROL_FLOW = frozenset(('While', 'StatelessWhile', 'If', 'StatelessIf', 'Case', 'StatelessCase'))
WRITES = ('Assign', 'ResourceApply', 'ResourceScatter', 'ResourceSparseApply')  # prefixes


class Node(NamedTuple):
    """Describes a node of the graph by its op type and what it reads.

    data: names of the nodes it reads. tensors: the same with the output, `name:0`. index: of an
    argument or result. There are no control edges: they would tie the loss to every update.
    """
    op: str
    data: List[str]
    tensors: List[str]
    index: Optional[int]


class StepGraph(NamedTuple):
    """Assigns each node of the graph of a training step to forward pass, backward pass or update.

    nodes: Node by name.
    forward: names of the ancestors of the results before the gradients.
    backward: by name, a bit mask with bit k set if gradient k needs the node.
    update: by name, k if the node serves the update of tensor k alone; None if it serves several or
        none (learning rate, iteration count, BN statistics).
    work: by name, ('flops', floating-point operations), or ('elements', those of the output) where
        TensorFlow registers no operations.
    """
    nodes: Dict[str, Node]
    forward: frozenset
    backward: Dict[str, int]
    update: Dict[str, Optional[int]]
    work: Dict[str, Tuple[str, float]]


def analyse(nodes, num_tensors, owners, work, num_results):
    """Returns the StepGraph of a graph that returns `num_results` results, then N gradients.

    nodes, work: as in StepGraph. owners: k by argument index, for the handle of tensor k. Raises
    ValueError for another number of results.
    """
    results = {node.index: node.tensors[0] for node in nodes.values() if node.op == '_Retval'}
    if sorted(results) != list(range(num_results + num_tensors)):
        raise ValueError('the graph has {} results, not {} and {} gradients'.format(
            len(results), num_results, num_tensors))
    roots = [_through_identities(nodes, results[num_results + k]) for k in range(num_tensors)]
    order = topological(nodes)
    forward = frozenset(_needed_by(nodes, order, {results[i]: 1 for i in range(num_results)}))
    wanted = {}
    for k, root in enumerate(roots):
        wanted[root] = wanted.get(root, 0) | 1 << k
    backward = _needed_by(nodes, order, wanted, forward)
    outside = [name for name in order if name not in forward and name not in backward]
    update = {name: bits.bit_length() - 1 if _single(bits) else None
              for name, bits in _touches(nodes, outside, wanted, owners).items()}
    return StepGraph(nodes, forward, backward, update, work)


def _needed_by(nodes, order, wanted, stop=frozenset()):
    """Returns, by node name, the bits of the wanted tensors that need it; without nodes in `stop`.

    order: from topological(). wanted: bits by tensor.
    """
    needed = {}
    for tensor, bits in wanted.items():
        name = tensor.split(':')[0]
        needed[name] = needed.get(name, 0) | bits
    for name in reversed(order):
        if name in needed and name not in stop:
            for source in nodes[name].data:
                needed[source] = needed.get(source, 0) | needed[name]
    return {name: bits for name, bits in needed.items() if name not in stop}


def merged(nodes, loops, apart=frozenset()):
    """Returns the nodes with all nodes inside a loop, `<loop>/...`, merged into the outermost loop.

    loops: op type by name. apart: names that only look as if they belonged to a loop.
    """
    def outermost(name):
        end = name.find('/')
        while end > 0 and name not in apart:
            if name[:end] in loops:
                return name[:end]
            end = name.find('/', end + 1)
        return name
    of = {name: outermost(name) for name in nodes} if loops else {}
    if all(name == whole for name, whole in of.items()):
        return nodes
    found = {}
    for name, node in nodes.items():
        whole = of[name]
        inside = loops.get(whole) if whole != name or name in loops else None
        new = found.setdefault(whole, Node(inside or node.op, [], [], node.index))
        for source, tensor in zip(node.data, node.tensors):
            if of[source] != whole or not inside:
                new.data.append(of[source])
                new.tensors.append(tensor if of[source] == source else of[source] + ':' + tensor)
    return found


def check_effects(graph, effects):
    """Raises UserError if one of `effects` reads backward ops that some reduced steps omit.

    An effect that serves tensor k alone stays in the steps that select k; any other stays in all
    steps, so it may only read what every tensor needs.
    effects: names of the nodes that change a variable.
    """
    order = topological(graph.nodes)
    skipped = constants(graph.nodes, order).union(graph.forward)
    common = {}  # bits of the tensors whose steps have all ancestors of the node
    for name in order:
        if name not in skipped:
            common[name] = graph.backward.get(name, -1)
            for source in graph.nodes[name].data:
                common[name] &= common.get(source, -1)
    everyone = 0
    for bits in graph.backward.values():
        everyone |= bits
    for name in effects:
        k = graph.update.get(name)
        users = everyone if k is None else 1 << k
        if common.get(name, -1) & users != users:
            raise UserError(
                '{} ({}) changes a variable by a part of the backward pass that some selections of '
                'tensors do not run: such a model cannot be trained in part'.format(
                    name, graph.nodes[name].op))


def constants(nodes, order):
    """Returns the names of nodes computed from constants alone; order: from topological()."""
    found = set()
    for name in order:
        if nodes[name].op == 'Const' or nodes[name].data and found.issuperset(nodes[name].data):
            found.add(name)
    return found


def _through_identities(nodes, tensor):
    """Returns the source of a result: tf.function puts Identity nodes before its results."""
    while nodes[tensor.split(':')[0]].op == 'Identity':
        tensor = nodes[tensor.split(':')[0]].tensors[0]
    return tensor


def _touches(nodes, outside, wanted, owners):
    """Returns, for nodes outside both passes, the bits of the tensors that they serve.

    A node serves a tensor that it reads, writes or descends from. The first round finds variables
    written for one tensor alone, such as its momentum. In the second round that tensor owns them,
    so that ops which only read them count for it.
    wanted: bits by gradient.
    """
    owned = {name: 1 << owners[node.index] for name, node in nodes.items()
             if node.op == '_Arg' and owners.get(node.index) is not None}
    touches = _propagate(nodes, outside, wanted, owned)
    written = {}  # by argument, the bits of its writers
    for name in outside:
        if nodes[name].op.startswith(WRITES) and nodes[name].data[0] not in owned:
            written.setdefault(nodes[name].data[0], set()).add(touches[name])
    owned.update((argument, bits) for argument, (bits, *others) in written.items()
                 if not others and _single(bits))
    return _propagate(nodes, outside, wanted, owned)


def _single(bits):
    return bits and not bits & (bits - 1)


def _propagate(nodes, outside, wanted, owned):
    touches = {}
    for name in outside:
        found = owned.get(name, 0)
        for source, tensor in zip(nodes[name].data, nodes[name].tensors):
            if source in owned:
                found |= owned[source]
            elif source in touches:
                found |= touches[source]
            elif nodes[source].op == 'ReadVariableOp':  # shared with the forward pass
                found |= owned.get(nodes[source].data[0], 0)
            else:
                found |= wanted.get(tensor, 0)
        touches[name] = found
    return touches


def reachable(starts, following):
    """Returns the set of items reached from `starts`; following: item -> the items after it."""
    found, stack = set(), list(starts)
    while stack:
        item = stack.pop()
        if item not in found:
            found.add(item)
            stack.extend(following(item))
    return found


def topological(nodes):
    """Returns the names in an order in which each node follows those that it reads."""
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


def tensor_sets(masks, num_tensors):
    """Returns the (G, N) bool array of G bit masks, bit k of which stands for tensor k."""
    sets = [[mask >> k & 1 for k in range(num_tensors)] for mask in masks]
    return np.array(sets, dtype=bool).reshape(len(sets), num_tensors)


def rate_key(op, unit):
    """Returns the key of a rate: of an op type, '*' for all, per unit of work."""
    return '{} {}'.format(op, unit)


def estimated_ms(op, work, rates):
    """Returns the ms of an op by its type and its work.

    work: (unit, amount), or None. rates: rate_key -> ms per unit, as in attribution.OpTimes.
    """
    if op in FREE_OPS or work is None:
        return 0.0
    unit, amount = work
    return amount * rates.get(rate_key(op, unit), rates.get(rate_key('*', unit), 0.0))
