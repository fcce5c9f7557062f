"""Stops a run on a signal, after a checkpoint; a second signal ends it at once."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

from elastic import command_line

ORPHANED = signal.SIGUSR1  # sent to a run if the script that started it is stopped or killed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, ORPHANED)


class Signals:
    """Catches SIGNALS within `with`; a second one has its usual effect.

    A signal sets `caught` to its number and raises KeyboardInterrupt. While `deferred`, it does not
    raise, and the training loop stops after its step. Ignored signals stay ignored, as SIGHUP is
    under nohup. Outside the main thread nothing is caught, because Python allows it only there.
    """

    def __init__(self):
        self.caught, self.deferred, self._before = None, False, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number, frame):
        signal.signal(number, signal.SIG_DFL)  # so that the next one ends even a long op
        if self.caught is not None:
            return
        self.caught = number
        if not self.deferred:
            raise KeyboardInterrupt

    def stop(self):
        """Returns whether a signal was caught."""
        return self.caught is not None

    @property
    def name(self):
        """Returns the name of the caught signal, for people."""
        return 'its script' if self.caught == ORPHANED else signal.Signals(self.caught).name


@contextlib.contextmanager
def stopping_if_unread():
    """Within this context, output that nobody reads any more counts as SIGHUP: stop after a step.

    Under nohup, the run goes on without output.
    """
    try:
        yield
    except BrokenPipeError:
        command_line.drop_output(1)
        os.kill(os.getpid(), signal.SIGHUP)


# ---------------------------------------------------------------- scripts that start runs

def status_of(command):
    """Runs a command; returns its exit status.

    If this process gets one of SIGNALS, it sends the child ORPHANED and waits until it has stopped.
    """
    with Signals() as signals:
        child = subprocess.Popen(command, preexec_fn=_stop_with_parent)
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(ORPHANED)  # another one: the terminal may have sent the first to both
            child.wait()
            return 128 + signals.caught


def was_stopped(status):
    """Returns whether a signal ended a child, after a checkpoint or at once."""
    return status - 128 in SIGNALS or -status in SIGNALS


def _stop_with_parent():
    """Makes Linux send ORPHANED to this process if the script that started it is killed."""
    if sys.platform.startswith('linux'):
        import ctypes
        ctypes.CDLL(None).prctl(1, ORPHANED)  # PR_SET_PDEATHSIG
