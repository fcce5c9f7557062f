"""Opens regular files alone: a pipe or a device may block for ever, or never end."""

import errno
import io
import os
import stat

MOST_BYTES = 10 ** 9  # of any file that is read


def open_regular(path, most_bytes=MOST_BYTES):
    """Returns the regular file at `path`, open for reading bytes.

    Raises OSError for anything else, such as a pipe, a device, a socket or a folder, which it does
    not open, and for a file larger than most_bytes (None: any size).
    """
    _check(os.stat(path), path, most_bytes)  # opening a device may already change its state
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 'rb')
    try:
        _check(os.fstat(file.fileno()), path, most_bytes)  # it may have been replaced meanwhile
    except BaseException:
        file.close()
        raise
    return file


def open_text(path, most_bytes=MOST_BYTES, encoding='utf-8', **options):
    """Returns the regular file at `path`, open for reading text. options: of io.TextIOWrapper."""
    return io.TextIOWrapper(open_regular(path, most_bytes), encoding=encoding, **options)


def _check(status, path, most_bytes):
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, 'a pipe or device, not a file', path)
    if most_bytes is not None and status.st_size > most_bytes:
        raise OSError(errno.EFBIG, 'larger than {:,} bytes'.format(most_bytes), path)
