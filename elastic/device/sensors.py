"""Reads sensors without waiting long for one that hangs: a wedged bus, a driver that never returns.

Whatever asks a sensor runs in a background thread. The end of the process does not wait for it.
All paths lie below a given root, so that tests can use a recorded tree in place of /.
"""

import contextlib
import glob
import os
import subprocess
import threading

READ_ERRORS = (OSError, ValueError)  # what the file of a sensor that does not answer raises
NO_ANSWER = 'no answer'  # the begin of what is said of a sensor that hangs
PATIENCE = 0.5  # s; a busy bus of a Jetson takes tens of ms
SLICES = 10     # of each wait; a process that was stopped meanwhile (Ctrl-Z) loses only one


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


def answer_of(command, seconds, **options):
    """Returns (status, stdout, stderr) of a command. options: of subprocess.Popen.

    Raises OSError if it does not start, and subprocess.TimeoutExpired if it takes longer. It is
    killed then but not waited for: while it waits for a driver, it cannot be killed.
    """
    # close_fds=False lets Python spawn instead of fork. A fork would copy the page tables of the
    # training process, and make each of its pages fault once.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               close_fds=False, **options)
    try:
        out, errors = process.communicate(timeout=seconds)
    except BaseException:
        process.kill()
        raise
    return process.returncode, out, errors


def in_time(call, seconds=None):
    """Returns call(); raises TimeoutError if that takes longer (default: PATIENCE)."""
    outcome, ended = {}, threading.Event()

    def run():
        try:
            outcome['value'] = call()
        except BaseException as error:
            outcome['error'] = error
        ended.set()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not _came(ended, seconds):
        raise TimeoutError(_silence(thread, seconds))
    if 'error' in outcome:
        raise outcome['error']
    return outcome['value']


@contextlib.contextmanager
def sampled(read, take, fail, period):
    """Takes what `read` returns: on entry, on exit, and every `period` seconds in between.

    read: () -> reading, which may hang. take: (reading, begins: bool) -> None. Both are called by
    one background thread. Entry and exit wait for it at most PATIENCE seconds; then fail(reason) is
    called, and nothing is taken any more.
    """
    begun, ending, ended = threading.Event(), threading.Event(), threading.Event()
    lock, failed = threading.Lock(), []

    def watch():
        begins, last = True, False
        while not last:
            last = ending.is_set()
            reading = read()
            with lock:
                if failed:
                    return
                take(reading, begins)
            begins = False
            begun.set()
            last or ending.wait(period)
        ended.set()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def expect(event):
        if failed or _came(event):
            return
        with lock:
            failed.append(_silence(thread))
        fail(failed[0])
    expect(begun)
    try:
        yield
    finally:
        ending.set()
        expect(ended)


def _came(event, seconds=None):
    """Returns whether an event comes within this time."""
    seconds = PATIENCE if seconds is None else seconds
    return any(event.wait(seconds / SLICES) for _ in range(SLICES))


def _silence(thread, seconds=None):
    """Returns what to say of a thread that hangs."""
    source = getattr(thread, 'reads', None)
    return '{}{} within {:g} s'.format(NO_ANSWER, ' from ' + source if source else '',
                                       PATIENCE if seconds is None else seconds)
