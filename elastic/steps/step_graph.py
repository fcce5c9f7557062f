"""Finds out which tensors need which ops of a training step; nothing runs here.

B_k is the set of ancestors of gradient k that are not ancestors of the loss. The backward pass of a
set of tensors is the union of their B_k. A set of tensors is a bit mask (int) in this module and an
(N,) bool array elsewhere; tensor_sets converts.
"""

import collections
import functools
import operator
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from elastic.errors import UserError

# The executor runs no kernel for these ops: they have no event in a trace, and cost nothing.
FREE_OPS = frozenset(('Const', '_Arg', '_Retval', 'Identity', 'IdentityN', 'NoOp', 'Reshape',
                      'Shape', 'ShapeN', 'Placeholder', 'StopGradient', 'PreventGradient',
                      'Squeeze', 'ExpandDims', '_DeviceArg', '_DeviceRetval', 'VarHandleOp',
                      'Size', 'Rank'))
# Ops that call functions in a loop or on a condition. No part can be cut out of such an op.
CONTROL_FLOW = frozenset(('While', 'StatelessWhile', 'If', 'StatelessIf', 'Case', 'StatelessCase'))
WRITES = ('Assign', 'ResourceApply', 'ResourceScatter', 'ResourceSparseApply')  # prefixes
TYPICAL_RATES = {'* flops': 1e-7, '* elements': 1e-6}  # ms per unit of work, a small CPU's


class Node(NamedTuple):
    """Describes a node of the graph by its op type and its data inputs.

    data: names of the nodes it reads. tensors: the same with the output, `name:0`. index: of an
    argument or result. Control edges are left out: they would tie the loss to every update.
    """
    op: str
    data: List[str]
    tensors: List[str]
    index: Optional[int]


class StepGraph(NamedTuple):
    """Assigns each node of a training step to forward pass, backward pass or update.

    nodes: name -> Node. forward: names of the ancestors of the results before the gradients.
    backward: name -> bit mask, in which bit k is set if gradient k needs the node.
    update: name -> k if the node serves the update of tensor k alone; None if it serves several or
        none (learning rate, iteration count, BN statistics).
    work: name -> ('flops', floating-point operations) or, if TensorFlow registers none,
        ('elements', size of the output).
    """
    nodes: Dict[str, Node]
    forward: frozenset
    backward: Dict[str, int]
    update: Dict[str, Optional[int]]
    work: Dict[str, Tuple[str, float]]


def analyse(nodes, num_tensors, owners, work, num_results):
    """Returns the StepGraph of a graph that returns `num_results` results, then N gradients.

    nodes, work: as in StepGraph. owners: argument index -> k, for the handle of tensor k. Raises
    ValueError for another number of results.
    """
    results = {node.index: node.tensors[0] for node in nodes.values() if node.op == '_Retval'}
    if sorted(results) != list(range(num_results + num_tensors)):
        raise ValueError('the graph has {} results, not {} and {} gradients'.format(
            len(results), num_results, num_tensors))
    roots = [_through_identities(nodes, results[num_results + k]) for k in range(num_tensors)]
    order = topological(nodes)
    forward = frozenset(reachable((results[i].split(':')[0] for i in range(num_results)),
                                  lambda name: nodes[name].data))
    wanted = {}
    for k, root in enumerate(roots):
        wanted[root] = wanted.get(root, 0) | 1 << k
    backward = _needed_by(nodes, order, wanted, forward)
    outside = [name for name in order if name not in forward and name not in backward]
    update = {name: bits.bit_length() - 1 if _single(bits) else None
              for name, bits in _touches(nodes, outside, wanted, owners).items()}
    return StepGraph(nodes, forward, backward, update, work)


def _needed_by(nodes, order, wanted, stop):
    """Returns name -> bits of the `wanted`, tensor -> bits, that need the node; none in `stop`."""
    needed = collections.defaultdict(int)
    for tensor, bits in wanted.items():
        needed[tensor.split(':')[0]] |= bits
    for name in reversed(order):
        if name in needed and name not in stop:
            for source in nodes[name].data:
                needed[source] |= needed[name]
    return {name: bits for name, bits in needed.items() if name not in stop}


def merged(nodes, loops, apart=frozenset()):
    """Returns the nodes; those inside a loop, `<loop>/...`, are merged into the outermost loop.

    loops: name -> op type. apart: names that only look as if they belonged to a loop.
    """
    def outermost(name):
        end = name.find('/')
        while end > 0 and name not in apart:
            if name[:end] in loops:
                return name[:end]
            end = name.find('/', end + 1)
        return name
    of, found = {name: outermost(name) for name in nodes}, {}
    for name, node in nodes.items():
        whole = of[name]
        new = found.setdefault(whole, Node(loops.get(whole, node.op), [], [], node.index))
        for source, tensor in zip(node.data, node.tensors):
            if of[source] != whole:
                new.data.append(of[source])
                new.tensors.append(tensor if of[source] == source else of[source] + ':' + tensor)
    return found


def check_effects(graph, effects):
    """Raises UserError if one of `effects` reads backward ops that some reduced steps omit.

    effects: names of the nodes that change a variable. One that serves tensor k alone is part of
    the steps that select k; any other is part of all steps.
    """
    fixed = constants(graph.nodes)
    everyone = functools.reduce(operator.or_, graph.backward.values(), 0)
    for name in effects:
        k = graph.update[name]
        users = everyone if k is None else 1 << k
        read = reachable([name], lambda each: (
            graph.nodes[each].data if each in graph.update else ()))
        if any(graph.backward.get(each, users) & users != users for each in read - fixed):
            raise UserError(
                '{} ({}) changes a variable by a part of the backward pass that some selections of '
                'tensors do not run: such a model cannot be trained in part'.format(
                    name, graph.nodes[name].op))


def constants(nodes):
    """Returns the names of nodes computed from constants alone."""
    found = set()
    for name in topological(nodes):
        if nodes[name].op == 'Const' or nodes[name].data and found.issuperset(nodes[name].data):
            found.add(name)
    return found


def _through_identities(nodes, tensor):
    while nodes[tensor.split(':')[0]].op == 'Identity':
        tensor = nodes[tensor.split(':')[0]].tensors[0]
    return tensor


def _touches(nodes, outside, wanted, owners):
    """Returns name -> bits of the tensors it serves, for the nodes `outside` both passes.

    A node serves a tensor that it reads, writes or descends from. The first round, by weights,
    finds whose a slot is: all that writes it serves one tensor. The second, by weights and slots,
    also finds whose a node is that reads a slot alone, as the decay of momentum does.
    """
    owned = {name: 1 << owners[node.index] for name, node in nodes.items()
             if node.op == '_Arg' and owners.get(node.index) is not None}
    by_weight, writers = _propagate(nodes, outside, wanted, owned), {}
    for name in outside:
        if nodes[name].op.startswith(WRITES) and nodes[name].data[0] not in owned:
            writers.setdefault(nodes[name].data[0], set()).add(by_weight[name])
    slots = {argument: bits for argument, (bits, *others) in writers.items()
             if not others and _single(bits)}
    return _propagate(nodes, outside, wanted, dict(owned, **slots))


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
    """Returns G bit masks as a (G, N) bool array; bit k stands for tensor k."""
    sets = [[mask >> k & 1 for k in range(num_tensors)] for mask in masks]
    return np.array(sets, dtype=bool).reshape(len(sets), num_tensors)


def rate_key(op, unit):
    """Returns the key of the rate of an op type ('*': all types) per unit of work."""
    return '{} {}'.format(op, unit)


def estimated_ms(op, work, rates):
    """Returns the estimated ms of an op of type `op`.

    work: (unit, amount), or None. rates: rate_key -> ms per unit, as in attribution.OpTimes.
    """
    if op in FREE_OPS or work is None:
        return 0.0
    unit, amount = work
    return amount * rates.get(rate_key(op, unit), rates.get(rate_key('*', unit), 0.0))
