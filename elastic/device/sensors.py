"""Reads files of sysfs, and samples them in the background while training runs.

All paths lie below a given root, so that tests can use a recorded tree in place of /.
"""

import contextlib
import glob
import os
import threading

READ_ERRORS = (OSError, ValueError, RuntimeError)  # what a sensor that does not answer raises


def paths(root, pattern):
    """Returns the files below `root` that match the pattern, sorted."""
    return sorted(glob.glob(os.path.join(root, pattern)))


def text(path):
    """Returns the content of a file without surrounding white space."""
    with open(path) as file:
        return file.read().strip()


class Sampler:
    """Within `running()`, calls `sample` on entry, on exit, and every `period` seconds.

    The calls in between come from a background thread; no two calls overlap.
    sample: (begins: bool) -> None.
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
