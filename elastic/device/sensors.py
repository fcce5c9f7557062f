"""What reads a device beside training: files below /sys, again and again in a thread of its own.

energy.py and thermal.py say which files, and what they mean. They look below the root of a file
system that is given, so that a recorded tree is read as a device is.
"""

import contextlib
import glob
import os
import threading

READ_ERRORS = (OSError, ValueError, RuntimeError)  # of a sensor that does not answer


def paths(root, pattern):
    """Those of the files below the root that match, sorted."""
    return sorted(glob.glob(os.path.join(root, pattern)))


def text(path):
    """What a file says, without white space around it."""
    with open(path) as file:
        return file.read().strip()


class Sampler:
    """Calls `sample` while `running()`: as that begins, as it ends, and every `period` seconds in
    between, in a thread which that is the whole life of.

    sample: (begins: bool) -> None; never called twice at a time.
    """

    def __init__(self, sample, period):
        self._sample, self._period = sample, period

    @contextlib.contextmanager
    def running(self):
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        self._sample(True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._sample(False)

    def _watch(self, ended):
        while not ended.wait(self._period):
            self._sample(False)
