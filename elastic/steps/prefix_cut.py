"""Finds the prefix of the forward pass that stays the same during training, and where to cut it.

The prefix consists of the forward ops that depend on no trained tensor: for an unchanged image they
return the same. Those outputs that the rest of the step reads are stored and reused. If an op's
input is cheaper to store than its output, the input is stored and the op recomputed.
"""

import collections
import functools
import operator
from typing import Dict, FrozenSet, List, NamedTuple

import numpy as np

from elastic.steps.step_graph import WRITES, reachable, tensor_sets, topological

# Parts of the names of op types that draw random numbers or call code outside the graph.
UNREPEATABLE = ('Random', 'Multinomial', 'Rng', 'StatefulUniform', 'StatefulStandard',
                'StatefulTruncated', 'NonDeterministic', 'PyFunc')
# The activations of an image count as independent of the other images of its batch if
# PrefixSteps.rows_apart finds no larger difference, relative to the largest value.
ROUNDING = 1e-4
READ_MS = 5e-7  # assumed ms to copy a byte twice, until it has been measured
ALL = 2 ** 20  # costs are scaled to this sum, because the minimum cut needs integers
NEVER = 4 * ALL
SOURCE, SINK = ('', 'source'), ('', 'sink')  # no node has an empty name


class Cut(NamedTuple):
    """Says where the prefix is cut off.

    tensors: sorted names of the stored tensors. recomputed: names of the prefix nodes that the rest
    of the step computes again. skipped: names of the other prefix nodes. skipped_ms: their
    estimated time. nbytes: stored bytes per image.
    """
    tensors: List[str]
    recomputed: FrozenSet[str]
    skipped: FrozenSet[str]
    skipped_ms: float
    nbytes: int


class Repeatable(NamedTuple):
    """Holds the forward nodes that repeat their output.

    needs: node name -> bit mask of the tensors that it depends on. num_tensors: N.
    """
    needs: Dict[str, int]
    num_tensors: int

    def prefix_of(self, mask):
        """Returns the names of the nodes that depend on no tensor of the (N,) bool mask."""
        trained = sum(1 << int(k) for k in np.flatnonzero(mask))
        return frozenset(name for name, bits in self.needs.items() if not bits & trained)

    def tensors_of(self, names):
        """Returns the (N,) bool tensors that any of these nodes depends on."""
        bits = functools.reduce(operator.or_, (self.needs[name] for name in names), 0)
        return tensor_sets([bits], self.num_tensors)[0]


def repeatable(graph, owners, num_tensors, images, labels, called):
    """Returns the Repeatable nodes: forward nodes with equal output for equal image and weights.

    They descend from images, and not from labels, random nodes, or an untrained variable that the
    step changes (moving statistics, random states).
    graph: StepGraph. owners: argument index -> k, for the handle of tensor k. images, labels:
    argument indices. called: from function_graph.called_ops.
    """
    changing = {node.data[0] for node in graph.nodes.values() if node.op.startswith(WRITES)}
    needs, found, spoilt = {}, {}, set()
    for name in topological(graph.nodes):
        node = graph.nodes[name]
        argument = node.op == '_Arg'
        k = owners.get(node.index) if argument else None
        needs[name] = 0 if k is None else 1 << k
        for source in node.data:
            needs[name] |= needs[source]
        if (argument and (node.index in labels or k is None and name in changing)
                or not_repeatable(called.get(name, [node.op])) or not spoilt.isdisjoint(node.data)):
            spoilt.add(name)
        elif argument and node.index in images or any(source in found for source in node.data):
            found[name] = needs[name]
    return Repeatable({name: bits for name, bits in found.items() if name in graph.forward
                       or graph.nodes[name].op == '_Arg'}, num_tensors)


def not_repeatable(ops):
    """Returns whether an op of these types may return something else the next time."""
    return any(op.startswith(WRITES) or any(part in op for part in UNREPEATABLE) for op in ops)


def read_outside(graph, prefix, roots):
    """Returns the prefix tensors, sorted, that nodes outside the prefix read to compute `roots`."""
    outside = reachable(roots, lambda name: [
        source for source in graph.nodes[name].data if source not in prefix])
    return sorted({tensor for name in outside for source, tensor in zip(
        graph.nodes[name].data, graph.nodes[name].tensors) if source in prefix})


def cheapest_cut(graph, prefix, wanted, nbytes, ms, read_ms):
    """Returns the Cut that provides the tensors `wanted` in the least time; None if none does.

    prefix, wanted: from Repeatable.prefix_of and read_outside. nbytes: tensor whose first axis is
    the batch -> bytes per image. ms: node -> ms to recompute it. read_ms: (bytes per image) -> ms
    to read a batch.

    It is a minimum cut. Each prefix node has two places, 'read' and 'computed'. The edge between
    them costs the time to read the node's outputs. The edge from the second to the sink costs the
    time to compute it. Edges of infinite cost lead from there to the nodes that it reads.
    """
    def owner(tensor):
        return tensor.split(':')[0]
    outputs = collections.defaultdict(set)  # of each node, those that any node reads
    for tensor in set(wanted).union(*(graph.nodes[name].tensors for name in prefix)):
        outputs[owner(tensor)].add(tensor)
    names = sorted(reachable(map(owner, wanted), lambda name: [
        source for source in graph.nodes[name].data if source in prefix]))
    edges = {(SOURCE, (owner(tensor), 'read')): np.inf for tensor in wanted}
    for name in names:
        read, computed, node = (name, 'read'), (name, 'computed'), graph.nodes[name]
        edges[read, computed] = sum(
            read_ms(nbytes[tensor]) if tensor in nbytes else np.inf
            for tensor in sorted(outputs[name]))
        edges[computed, SINK] = np.inf if node.op == '_Arg' else ms.get(name, 0.0)
        edges.update({(computed, (source, 'read')): np.inf for source in node.data
                      if source in prefix})
    reached = _source_side(edges)
    if reached is None:
        return None
    recomputed = frozenset(name for name in names if (name, 'computed') in reached)
    stored = {name for name in names if (name, 'read') in reached} - recomputed
    read = set(wanted).union(*(graph.nodes[name].tensors for name in recomputed))
    tensors = sorted(tensor for tensor in read if owner(tensor) in stored)
    skipped = prefix - recomputed
    return Cut(tensors, recomputed, skipped, sum(ms.get(name, 0.0) for name in sorted(skipped)),
               sum(nbytes[tensor] for tensor in tensors))


def _source_side(edges: Dict):
    """Returns the places on SOURCE's side of the minimum cut to SINK; None if it is infinite.

    edges: (place, place) -> cost.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow
    places = [SOURCE, SINK] + sorted({place for edge in edges for place in edge} - {SOURCE, SINK})
    number = {place: i for i, place in enumerate(places)}
    starts, ends = np.array([[number[start], number[end]] for start, end in edges]).T
    costs = np.array(list(edges.values()))
    total = max(costs[np.isfinite(costs)].sum(), 1e-9)
    whole = np.where(np.isfinite(costs), np.ceil(costs / total * ALL), NEVER).astype(np.int32)
    capacity = csr_matrix((whole, (starts, ends)), (len(places), len(places)))
    result = maximum_flow(capacity, number[SOURCE], number[SINK])
    if result.flow_value >= NEVER:
        return None
    flow = result.flow if hasattr(result, 'flow') else result.residual
    left = capacity - flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    return {places[i] for i in breadth_first_order(left, number[SOURCE],
                                                   return_predecessors=False)}
