"""Keeps two processes from training one run.

A lock excludes other processes of this machine. It may not reach other machines that share the
disk: for these, the file `trained_by` names the machine that trains the run.
"""

import contextlib
import fcntl
import os
import platform
import uuid

from elastic.runs.folder import TRAINED_BY, fault


def this_machine():
    """Returns the name and the network address of this machine: cards, and so names, are copied."""
    address = uuid.getnode()
    made_up = address >> 40 & 1  # there is no network, and the number differs in each process
    return platform.node() + ('' if made_up else ' {:012x}'.format(address))


class Claim:
    """Holds the folder of a run until `close` or the end of the process.

    Raises UserError if another process trains the run, or if `trained_by` names another machine.
    """

    def __init__(self, folder):
        self._folder, self._path = folder, os.path.join(folder, TRAINED_BY)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            self._take(self._locked())
        except BaseException:
            os.close(self._lock)
            raise

    def _locked(self):
        """Returns whether the lock excludes other processes of this machine."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise fault(self._folder, 'another process is training it; wait for it or stop it')
        except OSError:  # this file system has no locks
            return False
        return True

    def _take(self, locked):
        found, mine = None, this_machine()
        with contextlib.suppress(FileNotFoundError), open(self._path, errors='replace') as file:
            found = file.read(1000).strip('\0')  # a power cut may have emptied it or cut it short
        if found and not (locked and mine.startswith(found)):
            raise fault(self._folder, '{} is training it; if it no longer does, remove {}'.format(
                found.strip(), self._path))
        with open(self._path, 'x' if found is None else 'w') as file:  # x: of two machines, one
            file.write(mine)

    def close(self):
        """Lets other processes train the run."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.remove(self._path)
            os.close(self._lock)
            self._lock = None
