"""Reads the time of each op from a profiler trace.

Kernels of GPUs are in the planes `/device:GPU:n` and their lines `Stream #n(...)`, as TensorFlow
2.6 to 2.21 write them with CUPTI; other lines (`Steps`, `XLA Ops`, `Framework Ops`) hold their
sums. Tested with traces made from that schema; not yet on a GPU.
"""

import re

import numpy as np
import tensorflow as tf
from google.protobuf import message

from elastic.compat import tf_internals
from elastic.errors import UserError

# `<node name>:<op type>`; a runtime event such as `Executor::Process` has no such form.
OP_EVENT = re.compile(r'^([^:]+):(\w+)$')
HOST = '/host:CPU'  # the plane of all its threads; what CUPTI saw of them has another plane
# The event of a called function, such as one of jit_compile, today; its stat `name` is the node's.
ASYNCHRONOUS = 'ExecutorState::ProcessAsync::Start'
GPU = '/device:GPU:'
# The stat `tf_op`: `<node name>:<op type>`, maybe followed by scopes. For ops that XLA compiled, it
# names the whole cluster.
TF_OP = re.compile(r'^([^:]+):\w+(:.*)?$')
MEMORY_STAT = re.compile(r'mem\w*_details$', re.IGNORECASE)  # memcpy_, Memset_, memalloc_, ...
MEMORY = ('Memcpy', 'Memset', 'UM_')  # UM: pages of unified memory
ON_DEVICE = ('MemcpyD2D', 'Memset')
LONGEST = 10 ** 15  # ps; no op takes a quarter of an hour


def read_trace(path, num_steps, gpu=None):
    """Returns (name -> ms of every op, ms in which a GPU ran kernels) of an xplane file, per step.

    On the host, an op's time is the median of its events times events per step, so that one
    pre-empted step does not count. On a GPU, it is the sum of the op's kernels, without their
    launch. In a GPU's trace, an op with an event on the host ran there: at record_trace's level,
    ops on a GPU have no such event. The second result is None on a CPU.
    gpu: whether ops ran on a GPU (default: whether TensorFlow sees one). Raises UserError if the
    trace then has no kernels, and if it is damaged.
    """
    space = tf_internals.xplane_pb2.XSpace()
    try:
        with open(path, 'rb') as trace:
            space.ParseFromString(trace.read())
    except (OSError, message.DecodeError, UnicodeDecodeError) as error:
        raise UserError("the trace '{}' cannot be read: {}".format(path, error))
    kernels = list(_kernels(space))
    if not kernels:
        _refuse_missing_kernels(space, gpu)
    host, device = {}, {}
    for times, name, ps in [(device, op, ps) for op, _, ps in kernels] + [
            (host, op, ps) for op, ps in _host_events(space)]:
        if not 0 <= ps <= LONGEST:
            raise UserError("'{}' is damaged: {} took {} ps".format(path, name, ps))
        times.setdefault(name, []).append(ps / 1e9)
    result = {name: float(np.median(ms)) * len(ms) / num_steps for name, ms in host.items()}
    # One op may launch several kernels.
    result.update({name: float(np.sum(ms)) / num_steps for name, ms in device.items()})
    return result, _busy_ps(kernels) / 1e9 / num_steps if kernels else None


def _refuse_missing_kernels(space, gpu):
    planes = [plane.name for plane in space.planes if plane.name.startswith(GPU)]
    if planes or tf.config.list_physical_devices('GPU') if gpu is None else gpu:
        raise UserError(
            'the trace has no kernels ({}): the driver lets only root look at them; load its '
            'module with NVreg_RestrictProfilingToAdminUsers=0, run as root, or run on the CPU '
            "with CUDA_VISIBLE_DEVICES=''".format(
                '{} is empty'.format(planes[0]) if planes else 'no plane of a GPU'))


def _host_events(space):
    """Yields (node, ps) of every op event on the host, without the runtime's own events."""
    for plane in space.planes:
        if plane.name == HOST:
            for name, stats, _, ps in _events(plane):
                op = OP_EVENT.match(name)
                node = stats.get('name') if name == ASYNCHRONOUS else op and op.group(1)
                if node:
                    yield node, ps


def _kernels(space):
    """Yields (op, begin ps, ps) of every kernel of every stream and GPU.

    A kernel without an op keeps its own name. Copying or clearing memory on the device counts as
    work of its op. Copies to and from the host do not count: they run next to the kernels and serve
    no tensor.
    """
    for plane in space.planes:
        if plane.name.startswith(GPU):
            for name, stats, begin, ps in _events(plane, 'Stream #'):
                match = TF_OP.match(stats.get('tf_op', ''))
                op = match.group(1) if match else ''
                if name.startswith(MEMORY) or any(MEMORY_STAT.match(stat) for stat in stats):
                    op = op if name.startswith(ON_DEVICE) else ''
                else:
                    op = op or name
                if op:
                    yield op, begin, ps


def _events(plane, line_prefix=''):
    """Yields (name, stats: name -> text, begin ps, ps) of the events of some lines."""
    names = {i: metadata.name for i, metadata in plane.event_metadata.items()}
    stat_names = {i: metadata.name for i, metadata in plane.stat_metadata.items()}
    for line in plane.lines:
        if line.name.startswith(line_prefix):
            for event in line.events:
                stats = {stat_names[stat.metadata_id]: stat.str_value or stat_names.get(
                    stat.ref_value, '') for stat in event.stats if stat.metadata_id in stat_names}
                yield (names.get(event.metadata_id, ''), stats,
                       1000 * line.timestamp_ns + event.offset_ps, event.duration_ps)


def _busy_ps(kernels):
    """Returns the ps during which any kernel ran: less than the sum if streams overlap."""
    total, reached = 0, float('-inf')
    for begin, end in sorted((begin, begin + ps) for _, begin, ps in kernels):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
