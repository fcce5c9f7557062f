"""What of the forward pass stays the same while only some tensors are trained, and where to cut.

A forward op that depends on none of the tensors in training gives the same for an unchanged image
each time: such ops are the prefix. Computed once, it can be read back from the boundary, the
outputs of the prefix that the rest of the step reads. The boundary lies where that is cheapest: an
op near it may be recomputed from what it reads, where that is less to store. Nothing runs here;
nodes are those of step_graph.StepGraph.
"""

from typing import Dict, FrozenSet, List, NamedTuple

import numpy as np

from elastic.steps.step_graph import WRITES, reachable, tensor_sets, topological

# Parts of op types whose results are drawn or made outside the graph: no image's own.
UNREPEATABLE = ('Random', 'Multinomial', 'Rng', 'StatefulUniform', 'StatefulStandard',
                'StatefulTruncated', 'NonDeterministic', 'PyFunc')
ROUNDING = 1e-4  # of the largest value, that an image's row may differ by beside other images
READ_MS = 5e-7  # a byte, two copies of it; where a cut is placed, nothing has been measured yet
ALL = 2 ** 20    # the price of everything, in the whole numbers that a minimum cut is computed in
NEVER = 4 * ALL


class Cut(NamedTuple):
    """Where the prefix is cut off.

    tensors: what is stored, sorted. recomputed, skipped: names of the nodes of the prefix that the
    rest of the step computes again, and that it need not run. skipped_ms: what these take, as
    estimated. nbytes: stored, of one image.
    """
    tensors: List[str]
    recomputed: FrozenSet[str]
    skipped: FrozenSet[str]
    skipped_ms: float
    nbytes: int


class Repeatable(NamedTuple):
    """The forward nodes that give the same for the same image and weights, see repeatable.

    group_of: name -> g. group_tensors: (G, N) bool, the tensors that nodes of group g depend on.
    """
    group_of: Dict[str, int]
    group_tensors: np.ndarray

    def prefix_of(self, mask):
        """Returns the names of the nodes that depend on no tensor of the (N,) bool mask."""
        kept = (~(self.group_tensors & mask).any(axis=1)).tolist()
        return frozenset(name for name, group in self.group_of.items() if kept[group])

    def tensors_of(self, names):
        """Returns the (N,) bool of the tensors that any of these nodes depends on."""
        return self.group_tensors[sorted({self.group_of[name] for name in names})].any(axis=0)


def repeatable(graph, owners, num_tensors, images, labels, called):
    """Returns the Repeatable nodes of the forward pass.

    Left out is what no image reaches (weights, constants), what is random, reads a variable that
    the step changes beside the trainable tensors (moving statistics, states of random numbers), or
    knows the labels, and all that depends on these.
    graph: StepGraph of `num_tensors` tensors. owners: argument index -> k for the handle of tensor
    k. images, labels: argument indices. called: name -> op types in the functions that it calls.
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
    found = {name: bits for name, bits in found.items() if name in graph.forward
             or graph.nodes[name].op == '_Arg'}
    groups = {bits: group for group, bits in enumerate(sorted(set(found.values())))}
    return Repeatable({name: groups[bits] for name, bits in found.items()},
                      tensor_sets(groups, num_tensors))


def not_repeatable(ops):
    """Whether any of the op types may give something else the next time."""
    return any(op.startswith(WRITES) or any(part in op for part in UNREPEATABLE) for op in ops)


def read_outside(graph, prefix, roots):
    """Tensors of the prefix that the rest reads on its way to the nodes `roots`, sorted."""
    outside = reachable(roots, lambda name: [
        source for source in graph.nodes[name].data if source not in prefix])
    return sorted({tensor for name in outside for source, tensor in zip(
        graph.nodes[name].data, graph.nodes[name].tensors) if source in prefix})


def cheapest_cut(graph, prefix, wanted, nbytes, ms, read_ms):
    """The Cut that gives the tensors `wanted` in the least time; None where there is no such cut.

    prefix, wanted: of Repeatable.prefix_of and read_outside. nbytes: tensor -> bytes of one image,
    of those that have a row for each. ms: node -> ms to recompute it. read_ms: bytes of one image
    -> ms to read them for a batch.
    A minimum cut: each node of the prefix has two places, `read` and `recomputed`. Between them
    lies the price of storing its outputs, behind the second that of computing it, which in turn
    wants what the node reads.
    """
    readers = {}  # node of the prefix -> its outputs that anything reads
    for name in prefix:
        for source, tensor in zip(graph.nodes[name].data, graph.nodes[name].tensors):
            if source in prefix:
                readers.setdefault(source, set()).add(tensor)
    for tensor in wanted:
        readers.setdefault(tensor.split(':')[0], set()).add(tensor)
    names = sorted(reachable((tensor.split(':')[0] for tensor in wanted), lambda name: [
        source for source in graph.nodes[name].data if source in prefix]))
    place = {name: 2 + 2 * i for i, name in enumerate(names)}
    edges = {(0, place[tensor.split(':')[0]]): np.inf for tensor in wanted}
    for name in names:
        outputs, node = readers[name], graph.nodes[name]
        edges[place[name], place[name] + 1] = sum(
            read_ms(nbytes[tensor]) if tensor in nbytes else np.inf for tensor in outputs)
        edges[place[name] + 1, 1] = np.inf if node.op == '_Arg' else ms.get(name, 0.0)
        for source in node.data:
            if source in place:
                edges[place[name] + 1, place[source]] = np.inf
    reached = _source_side(edges, 2 + 2 * len(names))
    if reached is None:
        return None
    stored = {name for name in names if place[name] in reached and place[name] + 1 not in reached}
    recomputed = frozenset(name for name in names if place[name] + 1 in reached)
    tensors = _read_of(graph, stored, recomputed, wanted)
    skipped = prefix - recomputed
    return Cut(tensors, recomputed, skipped, sum(ms.get(name, 0.0) for name in skipped),
               sum(nbytes[tensor] for tensor in tensors))


def _read_of(graph, stored, recomputed, wanted):
    """Tensors of the stored nodes that are wanted, or read by recomputed nodes, in order."""
    read = set(wanted).union(*(graph.nodes[name].tensors for name in recomputed))
    return sorted(tensor for tensor in read if tensor.split(':')[0] in stored)


def _source_side(edges: Dict, size):
    """Places on the source's side of the minimum cut from 0 to 1; None where that is infinite."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow
    starts, ends = np.array(list(edges)).T
    costs = np.array(list(edges.values()))
    total = max(costs[np.isfinite(costs)].sum(), 1e-9)
    whole = np.where(np.isfinite(costs), np.ceil(costs / total * ALL), NEVER).astype(np.int32)
    capacity = csr_matrix((whole, (starts, ends)), (size, size))
    result = maximum_flow(capacity, 0, 1)
    if result.flow_value >= NEVER:
        return None
    flow = result.flow if hasattr(result, 'flow') else result.residual
    left = capacity - flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    return set(breadth_first_order(left, 0, return_predecessors=False).tolist())
