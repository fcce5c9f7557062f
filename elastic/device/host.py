"""Describes the machine: processor, usable cores, GPUs and memory."""

import os
import platform

from elastic import command_line

MEMORY_SHARE = 0.4  # of the available memory, that decoded images or cached activations may take


def available_bytes():
    """Returns the bytes of memory that can be taken without swapping."""
    try:
        with open('/proc/meminfo') as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if 'MemAvailable' in line)
    except (OSError, StopIteration):
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2


def host_description():
    """Returns processor, number of usable cores and GPUs of this machine, in one line."""
    import tensorflow as tf
    name = platform.processor() or platform.machine()
    for path, field in (('/proc/device-tree/model', None), ('/proc/cpuinfo', 'model name')):
        if os.path.exists(path):
            with open(path, errors='replace') as lines:
                found = [line.split(':', 1)[-1] for line in lines if field is None or field in line]
            if found:
                name = found[0]
                break
    cores = len(command_line.usable_cpus())
    gpus = [tf.config.experimental.get_device_details(gpu).get('device_name', 'GPU')
            for gpu in tf.config.list_physical_devices('GPU')]
    quota = cpu_quota()
    share = [] if quota is None or quota >= cores else ['{:g} of them at a time'.format(quota)]
    return ', '.join(['{}, {} cores'.format(name.strip(' \x00\n\t'), cores)] + share + gpus)


def cpu_quota(root='/sys/fs/cgroup'):
    """Returns how many cores' time a container may use (cgroup version 2 or 1); None: no limit."""
    found = []
    for files in (['cpu.max'], ['cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us']):
        try:
            text = ' '.join(open(os.path.join(root, name)).read() for name in files)
            quota, period = text.split()
            found += [float(quota) / float(period)] if quota not in ('max', '-1') else []
        except (OSError, ValueError):
            pass
    return min(found) if found else None
