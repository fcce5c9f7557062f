"""Reads files of sysfs, and samples them in the background while training runs.

All paths lie below a given root, so that tests can use a recorded tree in place of /.
"""

import contextlib
import glob
import os
import threading

READ_ERRORS = (OSError, ValueError)  # what the file of a sensor that does not answer raises


def paths(root, pattern):
    """Returns the files below `root` that match the pattern, sorted."""
    return sorted(glob.glob(os.path.join(root, pattern)))


def text(path):
    """Returns the content of a file without surrounding white space."""
    with open(path) as file:
        return file.read().strip()


def text_or_nothing(*parts):
    """Returns the text of the file with this path; '' if it cannot be read."""
    try:
        return text(os.path.join(*parts)).strip('\x00')
    except READ_ERRORS:
        return ''


@contextlib.contextmanager
def sampled(sample, period):
    """Within this context, calls `sample` on entry, on exit, and every `period` seconds.

    The calls in between come from a background thread; no two calls overlap.
    sample: (begins: bool) -> None.
    """
    ended = threading.Event()

    def watch():
        while not ended.wait(period):
            sample(False)
    thread = threading.Thread(target=watch, daemon=True)
    sample(True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sample(False)
