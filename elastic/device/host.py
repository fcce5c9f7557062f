"""Describes the machine: processor, usable cores, GPUs and memory."""

import os
import platform

from elastic import command_line

MEMORY_SHARE = 0.4  # largest share of available memory for decoded images or cached activations


def available_bytes():
    """Returns the bytes of memory that can be used without swapping."""
    try:
        with open('/proc/meminfo') as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if 'MemAvailable' in line)
    except (OSError, StopIteration):
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2


def host_description():
    """Returns the processor, usable cores and GPUs of this machine in one line."""
    import tensorflow as tf
    cores, quota = len(command_line.usable_cpus()), cpu_quota()
    gpus = [tf.config.experimental.get_device_details(gpu).get('device_name', 'GPU')
            for gpu in tf.config.list_physical_devices('GPU')]
    share = [] if quota is None or quota >= cores else ['{:g} of them at a time'.format(quota)]
    return ', '.join(['{}, {} cores'.format(_processor(), cores)] + share + gpus)


def _processor():
    for path, field in (('/proc/device-tree/model', ''), ('/proc/cpuinfo', 'model name')):
        if os.path.exists(path):
            with open(path, errors='replace') as lines:
                found = [line.split(':', 1)[-1] for line in lines if field in line]
            if found:
                return found[0].strip(' \x00\n\t')
    return platform.processor() or platform.machine()


def cpu_quota(root='/sys/fs/cgroup'):
    """Returns how many cores a container may use (cgroup version 2 or 1); None if unlimited."""
    found = []
    for files in (['cpu.max'], ['cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us']):
        try:
            text = ' '.join(open(os.path.join(root, name)).read() for name in files)
            quota, period = text.split()
            found += [float(quota) / float(period)] if quota not in ('max', '-1') else []
        except (OSError, ValueError):
            pass
    return min(found) if found else None
