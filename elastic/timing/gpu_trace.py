"""What GPUs did in a profiler trace: for which op of the step, and during how much of it.

Takes the planes `/device:GPU:n` of an XSpace as TensorFlow 2.6 to 2.21 write them with CUPTI. What
ran is in lines `Stream #n(...)`; all other lines (`Steps`, `XLA Ops`, `TensorFlow Ops`, of late
`Framework Ops`) tell the same once more, summed up. Gives each kernel once, with its op. Checked
against that format, by traces made from its schema; on no GPU yet.
"""

import re
from typing import NamedTuple

GPU = '/device:GPU:'
# The stat `tf_op`: `<node name>:<op type>`, maybe with scopes behind it. What XLA compiled has the
# name of the whole cluster there.
TF_OP = re.compile(r'^([^:]+):\w+(:.*)?$')
MEMORY_STAT = re.compile(r'mem\w*_details$', re.IGNORECASE)  # memcpy_, Memset_, memalloc_, ...
MEMORY = ('Memcpy', 'Memset', 'UM_')  # UM: pages of unified memory
ON_DEVICE = ('MemcpyD2D', 'Memset')


class Work(NamedTuple):
    """op: name of the node it was done for, or the kernel's own; begin, duration: ps."""
    op: str
    begin: int
    duration: int


def gpu_work(space):
    """List of Work of an XSpace: every kernel of every stream and GPU.

    A step runs on the first GPU alone, unless the network itself places layers on others: then
    these are part of it. A kernel whose op is not told has its own name: it is to be seen among
    what was left out. Memory that an op copies or clears on the device is work of that op, too.
    Other copies are none: to and from the host they run beside the kernels and serve no tensor.
    """
    return [work for plane in space.planes if plane.name.startswith(GPU)
            for line in plane.lines if line.name.startswith('Stream #')
            for work in _work_of(plane, line)]


def busy_ps(work):
    """ps during which any of the work ran: less than its sum where streams overlap."""
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
    """See Work.op, of an event of that name; None for what is no work of the step."""
    match = TF_OP.match(stats.get('tf_op', ''))
    op = match and match.group(1)
    if name.startswith(MEMORY) or any(MEMORY_STAT.match(stat) for stat in stats):
        return op if name.startswith(ON_DEVICE) else None
    return op or name


def stats_of(event, names):
    """name -> text of the stats of an event, '' for numbers; names: of the stats, by their id.

    A text may itself be the name of a stat, to be stored once.
    """
    return {names.get(stat.metadata_id): stat.str_value or names.get(stat.ref_value, '')
            for stat in event.stats if stat.metadata_id in names}
