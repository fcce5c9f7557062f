"""Keeps a run alive when nobody reads its output any more: `| head -1`, a closed terminal."""

import errno
import os
import sys

READER_LEFT = (errno.EPIPE, errno.EIO, errno.EBADF)  # of a pipe, a terminal, a closed file


class Output:
    """Passes text on to a stream. When that fails, it drops this text and all that follows.

    stream: sys.stdout or sys.stderr. All attributes but `write` and `flush` are the stream's.
    """

    def __init__(self, stream):
        self._stream, self._lost = stream, False

    def write(self, text):
        self._try(self._stream.write, text)
        return len(text)

    def flush(self):
        self._try(self._stream.flush)

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def _try(self, function, *arguments):
        if self._lost:
            return
        try:
            function(*arguments)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._lost = True
            number = getattr(error, 'errno', None) or errno.EBADF
            if not self._stream.closed:  # takes what is still buffered, and what C++ writes
                _open_as(self._stream.fileno())
            if number not in READER_LEFT and self is not sys.stderr:
                print('warning: no more output, as it cannot be written: {}'.format(
                    os.strerror(number)), file=sys.stderr)


def keep_going():
    """Makes sys.stdout and sys.stderr never fail. A stream that is closed is written nowhere.

    Otherwise the next file that is opened would take its number, and receive all output.
    """
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        try:
            os.fstat(number)
        except OSError:
            _open_as(number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, 'w' if number else 'r'))
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)


def _open_as(number):
    """Opens /dev/null as this file descriptor."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
