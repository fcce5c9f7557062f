"""Reads the limits that Linux control groups set: those of a container or a systemd service.

Version 2 has one tree of groups, version 1 one per controller. A limit holds for a group and all
groups inside it, so those around the process's own count too.
"""

import os

from elastic.device.sensors import text_or_nothing

MOUNT = 'sys/fs/cgroup'


def cpu_quota(root='/'):
    """Returns how many cores the process may use at a time; None if unlimited.

    root: folder that contains proc/ and sys/.
    """
    found = []
    for folder in groups('cpu', root):
        for files in (['cpu.max'], ['cpu.cfs_quota_us', 'cpu.cfs_period_us']):
            numbers = ' '.join(text_or_nothing(folder, name) for name in files).split()
            if len(numbers) == 2 and numbers[0] not in ('max', '-1'):
                found.append(float(numbers[0]) / float(numbers[1]))
    return min(found, default=None)


def memory_left(root='/'):
    """Returns the bytes that the process may still take; None if unlimited.

    Cached files do not count as taken: the system frees them first. root: as in cpu_quota.
    """
    found = []
    for folder in groups('memory', root):
        for limits, used, cached in (
                (['memory.max', 'memory.high'], 'memory.current', 'inactive_file'),
                (['memory.limit_in_bytes'], 'memory.usage_in_bytes', 'total_inactive_file')):
            taken = text_or_nothing(folder, used)
            stat = dict(line.split()[:2] for line in text_or_nothing(
                folder, 'memory.stat').splitlines() if len(line.split()) == 2)
            for limit in (text_or_nothing(folder, name) for name in limits):
                if limit.isdigit() and taken.isdigit():  # not 'max'; version 1 has a huge number
                    found.append(max(0, int(limit) - int(taken) + int(stat.get(cached, 0))))
    return min(found, default=None)


def groups(controller, root):
    """Yields the folders of the process's group of a controller and of the groups around it.

    In a container, the path of a group may be that on the host, which is not visible. Then only
    the folders that exist are yielded, and the last one is the container's own group.
    """
    for line in text_or_nothing(root, 'proc/self/cgroup').splitlines():
        _, names, path = (line.split(':', 2) + ['', ''])[:3]
        if names and controller not in names.split(','):
            continue
        mounts = ['', 'unified'] if not names else [names, controller]
        for mount in sorted({os.path.join(root, MOUNT, name) for name in mounts}):
            folder = os.path.normpath(mount + ('' if '..' in path else path))
            while folder.startswith(os.path.normpath(mount)):
                if os.path.isdir(folder):
                    yield folder
                folder = os.path.dirname(folder)
