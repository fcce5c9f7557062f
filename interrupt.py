"""Signals that end a run: the first lets it keep a checkpoint, a second ends it at once."""

import signal
import threading

SIGNALS = ('SIGINT', 'SIGTERM', 'SIGHUP')


class Signals:
    """Within `with`, the first of SIGNALS is caught, and later ones do what they always do.

    Where `deferred`, which the training loop is, that only sets `caught`, the signal's number, and
    the loop stops behind its step; else KeyboardInterrupt is raised. One that is ignored stays so,
    as SIGHUP under nohup. Outside the main thread nothing is caught: Python's rule.
    """

    def __init__(self):
        self.caught, self.deferred, self._before = None, False, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in SIGNALS):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number, frame):
        self.caught = number
        for each in self._before:  # at once, even in the middle of an op
            signal.signal(each, signal.SIG_DFL)
        if not self.deferred:
            raise KeyboardInterrupt

    def stop(self):
        """Whether one was caught."""
        return self.caught is not None

    @property
    def name(self):
        """Of the one that was caught."""
        return signal.Signals(self.caught).name
