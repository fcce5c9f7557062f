"""The memory of this machine."""

import os

MEMORY_SHARE = 0.4  # of the available memory, that decoded images or cached activations may take


def available_bytes():
    """Returns the bytes of memory that can be taken without swapping."""
    try:
        with open('/proc/meminfo') as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if 'MemAvailable' in line)
    except (OSError, StopIteration):
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2
