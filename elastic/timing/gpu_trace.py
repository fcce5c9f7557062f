"""Reads from a profiler trace which GPU kernels ran, when, and for which op.

It reads the planes `/device:GPU:n` of an XSpace as TensorFlow 2.6 to 2.21 write them with CUPTI.
Kernels are in lines `Stream #n(...)`; other lines (`Steps`, `XLA Ops`, `Framework Ops`) hold their
sums. Tested with traces made from that schema; not yet on a GPU.
"""

import re
from typing import NamedTuple

GPU = '/device:GPU:'
# The stat `tf_op`: `<node name>:<op type>`, maybe followed by scopes. For ops that XLA compiled, it
# names the whole cluster.
TF_OP = re.compile(r'^([^:]+):\w+(:.*)?$')
MEMORY_STAT = re.compile(r'mem\w*_details$', re.IGNORECASE)  # memcpy_, Memset_, memalloc_, ...
MEMORY = ('Memcpy', 'Memset', 'UM_')  # UM: pages of unified memory
ON_DEVICE = ('MemcpyD2D', 'Memset')


class Work(NamedTuple):
    """Describes one kernel. op: name of its node, or its own name. begin, duration: ps."""
    op: str
    begin: int
    duration: int


def gpu_work(space):
    """Returns a list of Work: every kernel of every stream and GPU in an XSpace.

    A kernel without an op keeps its own name, and is later reported as not attributed. Copying or
    clearing memory on the device counts as work of its op. Copies to and from the host do not
    count: they run next to the kernels and serve no tensor.
    """
    return [work for plane in space.planes if plane.name.startswith(GPU)
            for line in plane.lines if line.name.startswith('Stream #')
            for work in _work_of(plane, line)]


def busy_ps(work):
    """Returns the ps during which any work ran: less than the sum if streams overlap."""
    total, reached = 0, float('-inf')
    for begin, end in sorted((item.begin, item.begin + item.duration) for item in work):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _work_of(plane, line):
    names = {i: metadata.name for i, metadata in plane.event_metadata.items()}
    stat_names = {i: metadata.name for i, metadata in plane.stat_metadata.items()}
    for event in line.events:
        op = _served(names.get(event.metadata_id, ''), stats_of(event, stat_names))
        if op:
            yield Work(op, 1000 * line.timestamp_ns + event.offset_ps, event.duration_ps)


def _served(name, stats):
    """Returns Work.op of an event; None if it is no work of the step."""
    match = TF_OP.match(stats.get('tf_op', ''))
    op = match and match.group(1)
    if name.startswith(MEMORY) or any(MEMORY_STAT.match(stat) for stat in stats):
        return op if name.startswith(ON_DEVICE) else None
    return op or name


def stats_of(event, names):
    """Returns name -> text of an event's stats, '' for numbers; names: id -> name of a stat."""
    return {names.get(stat.metadata_id): stat.str_value or names.get(stat.ref_value, '')
            for stat in event.stats if stat.metadata_id in names}
