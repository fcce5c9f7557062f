"""Describes the machine: processor, usable cores, GPUs and memory."""

import os
import platform
import re

from elastic import command_line
from elastic.device.sensors import text_or_nothing

MEMORY_SHARE = 0.4  # largest share of available memory for decoded images or cached activations


def available_bytes():
    """Returns the bytes of memory that can be used without swapping."""
    return _bytes_in('/proc/meminfo', 'MemAvailable') or (
        os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2)


def peak_bytes():
    """Returns this process's peak memory so far in bytes; None if the system does not report it."""
    return _bytes_in('/proc/self/status', 'VmHWM')


def _bytes_in(path, field):
    found = re.search(r'^{}:\s*(\d+) kB'.format(field), text_or_nothing(path), re.M)
    return 1024 * int(found.group(1)) if found else None


def host_description():
    """Returns the processor, usable cores and GPUs of this machine in one line."""
    import tensorflow as tf
    cores, quota = len(command_line.usable_cpus()), cpu_quota()
    gpus = [tf.config.experimental.get_device_details(gpu).get('device_name', 'GPU')
            for gpu in tf.config.list_physical_devices('GPU')]
    share = [] if quota is None or quota >= cores else ['{:g} of them at a time'.format(quota)]
    return ', '.join(['{}, {} cores'.format(_processor(), cores)] + share + gpus)


def _processor():
    board = text_or_nothing('/proc/device-tree/model')
    found = re.search(r'^model name\s*:(.*)', text_or_nothing('/proc/cpuinfo'), re.M)
    return (board or found and found.group(1).strip()
            or platform.processor() or platform.machine())


def cpu_quota(root='/sys/fs/cgroup'):
    """Returns how many cores a container may use (cgroup version 2 or 1); None if unlimited."""
    found = []
    for files in (['cpu.max'], ['cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us']):
        numbers = ' '.join(text_or_nothing(root, name) for name in files).split()
        if len(numbers) == 2 and numbers[0] not in ('max', '-1'):
            found.append(float(numbers[0]) / float(numbers[1]))
    return min(found, default=None)
