"""Attributes the op times of a trace to the tensors that need the ops (paper, section 4.1).

Ops that the same tensors need in their backward pass form a group, whose times add up.
"""

from typing import Dict, List, NamedTuple, Optional

import numpy as np

from elastic.steps.step_graph import CONTROL_FLOW, estimated_ms, rate_key, tensor_sets


class OpTimes(NamedTuple):
    """Holds the traced ms per step of backward and update ops, by the tensors that need them.

    group_tensors: (G, N) bool, the tensors that need each group of ops. group_ms: (G,) per group.
    update: (N,) ms of the update ops of one tensor.
    estimated_ms: (G,) the part of group_ms that had no event and was estimated.
    coverage: share of the traced time outside the forward pass that was attributed, 0..1.
    left_out: (event, ms) that belongs to no node, the longest first.
    forward: name -> ms of each op of the forward pass.
    rates: 'op type unit' -> measured ms per unit of work; op type '*' stands for all.
    kernels: ms per step during which a GPU ran kernels; None on a CPU.
    """
    group_tensors: np.ndarray
    group_ms: np.ndarray
    update: np.ndarray
    estimated_ms: np.ndarray
    coverage: float
    left_out: List
    forward: Dict[str, float] = {}
    rates: Dict[str, float] = {}
    kernels: Optional[float] = None


def attribute(graph, times, num_tensors, kernels=None):
    """Returns the OpTimes of a StepGraph.

    A compute op without an event is estimated from its work and the measured rate of its op type,
    except on a GPU, whose trace has every kernel.
    times: name -> ms, as read_trace returns it. kernels: as in OpTimes.
    """
    times, left_out = _by_node(graph.nodes, times)
    rates = _rates(graph, times)

    def spent(name):
        if name in times or kernels is not None:
            return times.get(name, 0.0)
        return estimated_ms(graph.nodes[name].op, graph.work.get(name), rates)
    groups, estimated = {}, {}  # bit mask of the tensors -> ms
    for name, bits in graph.backward.items():
        ms = spent(name)
        groups[bits] = groups.get(bits, 0.0) + ms
        estimated[bits] = estimated.get(bits, 0.0) + (0.0 if name in times else ms)
    update = np.zeros(num_tensors)
    for name, k in graph.update.items():
        if k is not None:
            update[k] += spent(name)
    missed = sum(ms for _, ms in left_out)
    total = missed + sum(ms for name, ms in times.items() if name not in graph.forward)
    return OpTimes(tensor_sets(groups, num_tensors), np.array(list(groups.values())), update,
                   np.array(list(estimated.values())), 1 - missed / total if total else 0.0,
                   left_out, {name: spent(name) for name in sorted(graph.forward)}, rates, kernels)


def _by_node(nodes, times):
    """Returns (node -> ms, [(event, ms) that belong to no node, the longest first])."""
    found, left_out = {}, []
    for event, ms in times.items():
        name = event  # one inside a loop or a branching, `<its name>/...`, belongs to that node
        while name and (name not in nodes
                        or name != event and nodes[name].op not in CONTROL_FLOW):
            name = name.rpartition('/')[0]
        if name:
            found[name] = found.get(name, 0.0) + ms
        else:
            left_out.append((event, ms))
    return found, sorted(left_out, key=lambda item: -item[1])


def _rates(graph, times):
    spent, work = {}, {}
    for name, ms in times.items():
        if name in graph.work:
            unit, amount = graph.work[name]
            for key in (rate_key(graph.nodes[name].op, unit), rate_key('*', unit)):
                spent[key] = spent.get(key, 0.0) + ms
                work[key] = work.get(key, 0.0) + amount
    return {key: spent[key] / work[key] for key in spent}
