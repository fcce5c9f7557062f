"""Describes the machine: processor, usable cores, GPUs and memory."""

import contextlib
import ctypes
import gc
import os
import platform
import re
import resource

from elastic.device.cgroups import cpu_quota, memory_left
from elastic.device.sensors import text_or_nothing

_limit = []  # bytes that this process may hold, if it is limited
LARGE = 1 << 20  # bytes of a tensor whose memory is returned at once, with a limit
MMAP_THRESHOLD = -3  # of mallopt, as in glibc's malloc.h
MEMORY_SHARE = 0.4  # largest share of available memory for decoded images or cached activations


def available_bytes(root='/'):
    """Returns the bytes of memory that this process can use without swapping or being killed.

    It takes into account the limits of control groups (a container, a systemd service) and of
    `ulimit -v` and `ulimit -d`; of a limit by limit_memory, half of the rest, as training steps
    need the other. root: folder that contains proc/ and sys/.
    """
    status, found = os.path.join(root, 'proc/self/status'), [memory_left(root)]
    found.append(_bytes_in(os.path.join(root, 'proc/meminfo'), 'MemAvailable') or (
        os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2))
    found += [max(0, limit - resident_bytes()) // 2 for limit in _limit]
    for limit, field in ((resource.RLIMIT_AS, 'VmSize'), (resource.RLIMIT_DATA, 'VmData')):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(max(0, most - (_bytes_in(status, field) or 0)))
    return min(each for each in found if each is not None)


def limit_memory(nbytes):
    """Limits what this process should hold; None: no longer. Who plans memory asks memory_limit."""
    _limit[:] = [] if nbytes is None else [int(nbytes)]


def memory_limit():
    """Returns the bytes that this process should hold at most; None if it is not limited."""
    return _limit[0] if _limit else None


def return_large_tensors():
    """Lets the C library return the memory of large tensors as soon as they are freed.

    glibc keeps more and more of it: steps of ResNet50 (96x96, batch 4, last 30 % of the tensors)
    took 374 MB after four calls, and 183 MB so. The system has to clear new memory each time.
    The allocator that comes with oneDNN keeps all it ever held, 1.9 GB after a profile of
    MobileNetV2 with batch statistics. Called before TensorFlow is imported, this turns it off.
    """
    os.environ.setdefault('TF_ONEDNN_USE_SYSTEM_ALLOCATOR', '1')
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)


def release_memory():
    """Returns freed memory to the system, where the C library is glibc.

    glibc keeps it in pools of TensorFlow's threads: 780 MB after a profile of ResNet50, 64x64, on
    the paper's stack.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes():
    """Returns the memory that this process holds now, in bytes; 0 if the system does not say."""
    return _bytes_in('/proc/self/status', 'VmRSS') or 0


def peak_bytes():
    """Returns this process's peak memory so far in bytes; None if the system does not report it."""
    return _bytes_in('/proc/self/status', 'VmHWM')


def reset_peak():
    """Lets peak_bytes begin at the memory that this process holds now, where the system allows."""
    with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as file:
        file.write('5')


def _bytes_in(path, field):
    found = re.search(r'^{}:\s*(\d+) kB'.format(field), text_or_nothing(path), re.M)
    return 1024 * int(found.group(1)) if found else None


def usable_cpus():
    """Returns the set of the numbers of the CPUs that this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def host_description():
    """Returns the processor, usable cores and GPUs of this machine in one line."""
    import tensorflow as tf
    cores, quota = len(usable_cpus()), cpu_quota()
    gpus = [tf.config.experimental.get_device_details(gpu).get('device_name', 'GPU')
            for gpu in tf.config.list_physical_devices('GPU')]
    share = [] if quota is None or quota >= cores else ['{:g} of them at a time'.format(quota)]
    return ', '.join(['{}, {} cores'.format(_processor(), cores)] + share + gpus)


def _processor():
    board = text_or_nothing('/proc/device-tree/model')
    found = re.search(r'^model name\s*:(.*)', text_or_nothing('/proc/cpuinfo'), re.M)
    return (board or found and found.group(1).strip()
            or platform.processor() or platform.machine())
