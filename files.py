"""Writes files and folders whole or not at all, whatever fails: an error, a kill, the power."""

import contextlib
import os
import shutil
import tempfile

PART = '.part'  # end of the name of what is being written; a killed process may leave it


@contextlib.contextmanager
def whole(path, before=None):
    """Replaces the file at `path` by one that is written within this context.

    path: str. before: path to which the file that is replaced moves; None deletes it.
    Yields the path of a new file beside it. When the context ends, the new file is flushed to the
    disk and renamed. After an error it is deleted, and the file at `path` is as it was.
    """
    part = path + PART
    try:
        yield part
        _flush(part)
        if before is not None and os.path.exists(path):
            os.replace(path, before)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
    flush_folder(os.path.dirname(path) or '.')


@contextlib.contextmanager
def whole_folder(path):
    """Replaces the folder at `path` by one that is filled within this context.

    Yields the path of a new, empty folder. When the context ends, its files are flushed to the disk
    and it is renamed. After an error it is deleted. Two processes may replace the same folder at
    once: each fills its own, and the later one stays.
    """
    parent, name = os.path.split(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(PART, name + '.', parent) as temporary:
        new = os.path.join(temporary, name)
        os.mkdir(new)
        yield new
        for folder, _, names in os.walk(new):
            for file in names:
                _flush(os.path.join(folder, file))
            flush_folder(folder)
        if os.path.isdir(path):
            os.rename(path, os.path.join(temporary, 'old'))
        os.rename(new, path)
        flush_folder(parent)


def flush_folder(path):
    """Waits until the names in a folder are on the disk, where the file system supports that."""
    with contextlib.suppress(OSError):
        _flush(path)


def _flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(folder):
    """Removes the unfinished files and folders that a killed process left in a folder.

    No other process may be writing to the folder.
    """
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.endswith(PART) and os.path.isdir(path):
            shutil.rmtree(path)
        elif name.endswith(PART):
            os.remove(path)
