"""Writes profiler traces in TensorFlow's own format, those of a GPU included."""

from elastic.compat import tf_internals

CPU, GPU = ('/host:CPU', 'a thread'), ('/device:GPU:0', 'Stream #13(Compute)')
# Lines that TensorFlow derives from the streams; some releases save them in the file.
DERIVED = ('Steps', 'XLA Modules', 'XLA Ops', 'Source code', 'Launch Stats', 'CUPTI overhead',
           'TensorFlow Name Scope', 'TensorFlow Ops', 'Framework Name Scope', 'Framework Ops')


def xplane(path, planes, onto=None):
    """Writes the trace and returns its path, a str.

    planes: {(plane, line): [(event name, ms, {stat: str, int or ("ref", str)}[, begin ms]), ...]};
    (plane, None) is a plane without lines. onto: path of a trace to which they are added.
    """
    space = tf_internals.xplane_pb2.XSpace()
    if onto is not None:
        with open(onto, 'rb') as trace:
            space.ParseFromString(trace.read())
    for (plane_name, line_name), events in planes.items():
        plane = ([p for p in space.planes if p.name == plane_name]
                 or [space.planes.add(name=plane_name)])[0]
        line = plane.lines.add(name=line_name, timestamp_ns=7) if line_name else None
        for name, ms, stats, *begin in events:
            event = line.events.add(metadata_id=number(plane.event_metadata, name),
                                    duration_ps=int(ms * 1e9), offset_ps=int(sum(begin) * 1e9))
            for key, value in stats.items():
                add_stat(plane, event, key, value)
    with open(str(path), 'wb') as out:
        out.write(space.SerializeToString())
    return str(path)


def add_stat(plane, event, name, value):
    """Adds a stat to an event. value: str, int or ("ref", str)."""
    stat = event.stats.add(metadata_id=number(plane.stat_metadata, name))
    if isinstance(value, tuple):
        stat.ref_value = number(plane.stat_metadata, value[1])
    elif isinstance(value, int):
        stat.uint64_value = value
    else:
        stat.str_value = value


def number(metadata, name):
    """Returns the key of a name in a plane's table of names; enters a new name."""
    known = {entry.name: i for i, entry in metadata.items()}
    i = known.get(name, max(known.values(), default=0) + 1)
    metadata[i].name = name
    return i


def kernel(op, ms, begin=0.0, name='volta_sgemm_128x64_nn'):
    """Returns a kernel's event as TensorFlow's CUPTI collector writes it. op: name:type or ''."""
    stats = {'correlation_id': 3, 'context_id': '$$1', 'theoretical_occupancy_pct': 50,
             'kernel_details': ('ref', 'regs:32 grid:2,1,1 block:64,1,1')}
    return name, ms, dict(stats, tf_op=('ref', op)) if op else stats, begin


def copy(name, ms, begin=0.0, op=None, stat='memcpy_details'):
    """Returns the event of memory that is copied or cleared. op: `name:type`, or None."""
    stats = {'correlation_id': 4, stat: ('ref', 'kind_src:pageable kind_dst:device size:4096')}
    return name, ms, stats if op is None else dict(stats, tf_op=('ref', op)), begin
