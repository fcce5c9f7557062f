"""Reads sensors without waiting for one that hangs: a wedged bus, a driver that never returns.

Whatever asks a sensor runs in a background thread. The end of the process does not wait for it.
All paths lie below a given root, so that tests can use a recorded tree in place of /.
"""

import contextlib
import glob
import os
import threading
import time
from concurrent.futures import Future

READ_ERRORS = (OSError, ValueError)  # what the file of a sensor that does not answer raises
NO_ANSWER = 'no answer'  # the first words about a sensor that hangs
PATIENCE = 0.5  # s to find a sensor; a busy bus of a Jetson takes tens of ms
LATE = 10.0     # s without a reading, after which a sensor counts as hanging: several periods


def paths(root, pattern):
    """Returns the files below `root` that match the pattern, sorted."""
    return sorted(glob.glob(os.path.join(root, pattern)))


def text(path):
    """Returns the content of a file without surrounding white space."""
    threading.current_thread().reads = path  # which _silence names if this hangs
    with open(path) as file:
        return file.read().strip()


def text_or_nothing(*parts):
    """Returns the text of the file with this path; '' if it cannot be read."""
    try:
        return text(os.path.join(*parts)).strip('\x00')
    except READ_ERRORS:
        return ''


def in_time(call, seconds=PATIENCE):
    """Returns call(); raises TimeoutError if that takes longer."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome.done():
        raise TimeoutError(_silence(thread, seconds))
    return outcome.result()


class Sampler:
    """Reads a sensor every `period` seconds, in a thread that may hang: nobody waits for it.

    read: (seconds) -> reading; the argument is the time of the reading, by time.perf_counter.
    None without a sensor: there are no readings then, and no fault.
    samples: list of (seconds, reading). It grows at its end; whoever uses it shortens its begin.
    late: seconds without a reading, after which the sensor counts as hanging.
    """

    def __init__(self, read, period):
        self.samples, self.period, self.late, self._read = [], period, LATE, read
        self._thread = self._error = None
        self._heard = time.perf_counter()  # when the sensor answered last

    @contextlib.contextmanager
    def running(self):
        """Samples within this context."""
        if self._read is None:
            yield
            return
        ended = threading.Event()

        def run():
            try:
                while not ended.is_set():
                    self.sample(time.perf_counter())
                    ended.wait(self.period)
            except Exception as error:  # whatever a driver raises
                self._error = error
        self._heard = time.perf_counter()
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            ended.set()

    def sample(self, now):
        """Adds a reading at `now`, in the calling thread."""
        self.samples.append((now, self._read(now)))
        self._heard = time.perf_counter()

    def fault(self):
        """Returns why there are no more readings; None if there are."""
        if self._error is not None:
            return str(self._error) or type(self._error).__name__
        is_late = self._read is not None and time.perf_counter() - self._heard > self.late
        return _silence(self._thread, self.late) if is_late else None


def _silence(thread, seconds):
    """Returns what to say of a thread that hangs."""
    source = getattr(thread, 'reads', None)
    return '{}{} within {:g} s'.format(NO_ANSWER, ' from ' + source if source else '', seconds)
