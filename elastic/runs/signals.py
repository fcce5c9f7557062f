"""Signals that end a run: it keeps a checkpoint and goes; the same one again ends it at once."""

import signal
import subprocess
import sys
import threading

SIGNALS = ('SIGINT', 'SIGTERM', 'SIGHUP')  # a closed terminal and a shutdown send two of them
ORPHANED = signal.SIGUSR1  # what a run gets where the script that started it was killed


class Signals:
    """Within `with`, SIGNALS are caught; the same one again does what it always does.

    Where `deferred`, which the training loop is, that only sets `caught`, the signal's number, and
    the loop stops behind its step; else KeyboardInterrupt is raised. One that is ignored stays so,
    as SIGHUP under nohup. Outside the main thread nothing is caught: Python's rule.
    """

    def __init__(self):
        self.caught, self.deferred, self._before = None, False, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in [getattr(signal, name) for name in SIGNALS] + [ORPHANED]:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number, frame):
        signal.signal(number, signal.SIG_DFL)  # at once then, even in the middle of an op
        if self.caught is not None:
            return
        self.caught = number
        if not self.deferred:
            raise KeyboardInterrupt

    def stop(self):
        """Whether one was caught."""
        return self.caught is not None

    @property
    def name(self):
        """Of the one that was caught, for people."""
        return 'its script' if self.caught == ORPHANED else signal.Signals(self.caught).name


# ---------------------------------------------------------------- of a script that runs others

def status_of(command, folder):
    """Exit status of a child, run in `folder`. One of SIGNALS that this process gets is passed on,
    and the child waited for, which stops behind a checkpoint.
    """
    with Signals() as signals:
        child = subprocess.Popen(command, cwd=folder, preexec_fn=_tell_orphan)
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(ORPHANED)  # no second one, where it got the same from the terminal
            child.wait()
            return 128 + signals.caught


def was_stopped(status):
    """Whether one of SIGNALS ended a child: behind a checkpoint, or at once."""
    numbers = [getattr(signal, name) for name in SIGNALS] + [ORPHANED]
    return status - 128 in numbers or -status in numbers


def _tell_orphan():
    """In the child: a killed script leaves no training behind that the next one would meet."""
    if sys.platform.startswith('linux'):
        import ctypes
        ctypes.CDLL(None).prctl(1, ORPHANED)  # PR_SET_PDEATHSIG
