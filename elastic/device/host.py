"""Describes the machine: processor, usable cores, GPUs and memory."""

import contextlib
import os
import platform
import re
import resource

from elastic.device.cgroups import cpu_quota, memory_left
from elastic.device.sensors import text_or_nothing

MEMORY_SHARE = 0.4  # largest share of available memory for decoded images or cached activations


def available_bytes(root='/'):
    """Returns the bytes of memory that this process can use without swapping or being killed.

    It takes into account the limits of control groups (a container, a systemd service) and of
    `ulimit -v` and `ulimit -d`. root: folder that contains proc/ and sys/.
    """
    status, found = os.path.join(root, 'proc/self/status'), [memory_left(root)]
    found.append(_bytes_in(os.path.join(root, 'proc/meminfo'), 'MemAvailable') or (
        os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2))
    for limit, field in ((resource.RLIMIT_AS, 'VmSize'), (resource.RLIMIT_DATA, 'VmData')):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(max(0, most - (_bytes_in(status, field) or 0)))
    return min(each for each in found if each is not None)


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
