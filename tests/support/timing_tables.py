"""Builds timing tables of a few tensors, from made-up groups and from a traced network."""

import numpy as np

from elastic.steps.step_graph import tensor_sets
from elastic.timing.attribution import OpTimes, attribute
from elastic.timing.table import chain_timings
from elastic.timing.totals import Totals, build_table
from traced_networks import branching, traced

KEY = dict(host='x', tensorflow='2.21.0', model='small', batch_size=4, input_size=16)


def groups_of(ms_of_bits, num_tensors):
    """Returns (group_tensors, group_ms) of {bit mask of the tensors that need some ops: ms}."""
    return tensor_sets(ms_of_bits, num_tensors), np.array(list(ms_of_bits.values()))


def by_bits(group_tensors, group_ms):
    """Returns {bit mask of the tensors that need some ops: ms}, the inverse of groups_of."""
    return {sum(1 << int(k) for k in np.flatnonzero(row)): ms
            for row, ms in zip(group_tensors, group_ms)}


def op_times(ms_of_bits, num_tensors, update=None):
    if update is None:
        update = np.full(num_tensors, 0.25)
    return OpTimes(*groups_of(ms_of_bits, num_tensors), update, np.zeros(len(ms_of_bits)), 1.0, [])


def table_of(times):
    n = len(times.update)
    return build_table(['layer/{}'.format(k) for k in range(n)], [(k + 1, 2) for k in range(n)],
                       times, totals_as_traced(times, 2.0, sum(times.group_ms), 1.2, 0.3),
                       {'model': 'test'})


def totals_as_traced(times, t_fp, t_bp, t_update, t_always=0.0, **more):
    """Returns the Totals of steps whose ops took as long as in the trace, up to one scale."""
    depth = chain_timings(times.group_tensors, times.group_ms)[2]
    tensors = [int(np.argmax(depth)), int(np.argmin(depth))]
    t_up = times.update * t_update / sum(times.update)
    scale = t_bp / sum(times.group_ms)
    alone = [scale * sum(times.group_ms[times.group_tensors[:, k]]) + t_up[k] for k in tensors]
    return Totals(t_fp, t_update, tensors, t_always + np.array([t_bp + t_update] + alone), **more)


def stored(folder, slower=1.0, **changes):
    """Stores a timing table of three tensors as profiler.py does; returns its path."""
    table = table_of(op_times({0b001: 3.25, 0b010: 1.5, 0b100: 0.25, 0b011: 0.5, 0b111: 2.0}, 3))
    table = table._replace(t_fp=slower * table.t_fp, t_dw=slower * table.t_dw,
                           t_dy=slower * table.t_dy, **dict({'key': KEY}, **changes))
    folder.mkdir(exist_ok=True)
    table.save(str(folder / 'timings.json'))
    return str(folder / 'timings.json')


def table_of_branching():
    return table_of(attribute(traced(branching).graph, traced(branching).times, 8))


def chain_time(table, mask):
    """Returns TensorTimings.backward_time by t_dw and t_dy: exact for all tensors, else more."""
    mask = np.asarray(mask, dtype=bool)
    reached = table.depth <= table.depth[mask].max(initial=-1)
    return float(table.t_dw[mask].sum() + table.t_dy[reached].sum())


def random_masks(n, count, seed=0):
    masks = np.random.RandomState(seed).rand(count, n) < np.linspace(0.05, 0.9, count)[:, None]
    masks[np.arange(count), np.random.RandomState(seed + 1).randint(n, size=count)] = True
    return masks
