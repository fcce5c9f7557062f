"""Keeps two processes from training one run, also on two machines that share a disk.

A lock excludes other processes of this machine; over a network it may not reach the others. So a
run also writes its machine into `trained_by`, and changes that file every BEAT_SECONDS. Who finds
the file of another machine watches whether it changes. No clocks are compared.
"""

import contextlib
import fcntl
import os
import platform
import sys
import threading
import time
import uuid

from elastic.runs.folder import TRAINED_BY, fault

BEAT_SECONDS = 10
WATCH_SECONDS = 60  # some network disks show a change half a minute late
NO_ADDRESS = ' none'
SETTLE_SECONDS = 2  # two machines that take over at once have both written after that


def this_machine():
    """Returns the name and the network address of this machine: cards, and so names, are copied."""
    address = uuid.getnode()
    made_up = address >> 40 & 1  # there is no network, and the number differs in each process
    return platform.node() + (NO_ADDRESS if made_up else ' {:012x}'.format(address))


class Claim:
    """Holds the folder of a run until `close` or the end of the process.

    Raises UserError if another process trains the run, here or on another machine. If the file
    shows later that another machine has taken the run over, this process ends at once, as all that
    it could write would damage the other's records.
    """

    def __init__(self, folder):
        self._folder, self._path = folder, os.path.join(folder, TRAINED_BY)
        self._mine = '{}\n{}\n'.format(this_machine(), os.urandom(8).hex()).encode()
        self._ended, self._lock = threading.Event(), os.open(folder, os.O_RDONLY)
        try:
            self._take(self._locked())
        except BaseException:
            os.close(self._lock)
            raise
        threading.Thread(target=self._beat, daemon=True).start()

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
        found = self._found()
        if not found or locked and found.startswith(this_machine().encode() + b'\n'):
            self._write('wb' if os.path.exists(self._path) else 'xb')
            return
        print("run '{}' was last trained on {}: checking for {} s whether it still is".format(
            os.path.basename(os.path.abspath(self._folder)), _machine(found), WATCH_SECONDS),
            flush=True)
        until = time.perf_counter() + WATCH_SECONDS
        while found and time.perf_counter() < until:
            time.sleep(min(1, WATCH_SECONDS))
            before, found = found, self._found()
            if found and found != before:
                raise self._trained_elsewhere(found)
        self._write('wb')
        time.sleep(SETTLE_SECONDS)
        found = self._found()
        if found and not found.startswith(self._mine):
            raise self._trained_elsewhere(found)

    def _trained_elsewhere(self, found):
        return fault(self._folder, '{} is training it; wait for it or stop it'.format(
            _machine(found)))

    def _found(self):
        """Returns the content of the file; b'' if there is none, or a power cut has emptied it."""
        with contextlib.suppress(FileNotFoundError), open(self._path, 'rb') as file:
            return file.read(1000).strip(b'\0')
        return b''

    def _write(self, mode):
        try:
            with open(self._path, mode) as file:
                file.write(self._content(0))
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise fault(self._folder, 'another machine has just begun to train it')

    def _content(self, count):
        return self._mine + '{:010d}\n'.format(count).encode()

    def _beat(self):
        count = 0
        while not self._ended.wait(BEAT_SECONDS):
            count += 1
            # Opened each time, for network disks; written in place, so that it is never empty.
            with contextlib.suppress(OSError), open(self._path, 'r+b', buffering=0) as file:
                found = file.read(1000)
                if found and not found.startswith(self._mine):
                    self._end_process(found)
                file.seek(0)
                file.write(self._content(count))

    def _end_process(self, found):
        with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
            print('error: {}'.format(self._trained_elsewhere(found)), file=sys.stderr, flush=True)
        os._exit(2)

    def close(self):
        """Lets other processes train the run."""
        if not self._ended.is_set():
            self._ended.set()
            with contextlib.suppress(OSError):
                if self._found().startswith(self._mine):
                    os.remove(self._path)
            os.close(self._lock)


def _machine(found):
    name = found.split(b'\n')[0].decode('utf-8', 'replace')
    return name[:-len(NO_ADDRESS)] if name.endswith(NO_ADDRESS) else name
