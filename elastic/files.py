"""Writes files completely or not at all, even if the code, the process or the power fails."""

import contextlib
import csv
import errno
import fcntl
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import zipfile

import numpy as np

from elastic.errors import UserError, first_line

PART = '.part'  # suffix of an unfinished file, which a killed process may leave
# Errors of file systems that cannot flush a folder.
NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.EBADF,
                 errno.EISDIR, errno.EROFS)


@contextlib.contextmanager
def whole(path, before=None, ending=''):
    """Replaces the file at `path` by one that is written within this context.

    Yields the path of a new file, which is flushed to disk and renamed on exit. After an error it
    is deleted, and the old file stays. before: path to which the old file is moved, or None.
    ending: of the new file's name.
    """
    part = path + PART + ending
    try:
        yield part
        _flush(part)
        if before is not None and os.path.exists(path):
            os.replace(path, before)
        os.replace(part, path)
    except BaseException as error:
        _name(error, path)
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
    flush_folder(os.path.dirname(path) or '.')


def _name(error, path):
    """Gives an OSError the name of its file, which a failed write or flush lacks."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = path


@contextlib.contextmanager
def whole_folder(path):
    """Replaces the folder at `path` by one that is filled within this context.

    Yields the path of a new, empty folder. On exit its files are flushed to disk and it is renamed.
    After an error it is deleted; the next call deletes what a killed process left.
    """
    place = os.path.abspath(path)
    new, old = place + PART, place + '.old' + PART
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    make_folder(new)
    try:
        yield new
        for folder, _, names in os.walk(new):
            for file in names:
                _flush(os.path.join(folder, file))
            flush_folder(folder)
        if os.path.isdir(place):
            os.rename(place, old)
        os.rename(new, place)
    except BaseException as error:
        _name(error, path)
        shutil.rmtree(new, ignore_errors=True)
        raise
    flush_folder(os.path.dirname(place))
    shutil.rmtree(old, ignore_errors=True)


def make_folder(path):
    """Makes a folder and those that it lies in; the names of new ones are on disk on return."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    make_folder(parent)
    try:
        os.mkdir(path)
    except FileExistsError:  # another process made it
        if not os.path.isdir(path):
            raise
    flush_folder(parent)


@contextlib.contextmanager
def alone_in(folder, waiting):
    """Excludes other processes of this machine, that ask for the same, within this context.

    waiting: a line to print while another one is there. Makes the folder. Yields whether this one
    waited. Where the file system has no locks, nobody is excluded.
    """
    make_folder(folder)
    lock, waited = os.open(folder, os.O_RDONLY), False
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                print(waiting)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield waited
    finally:
        os.close(lock)


def check_writable(path, flag, folder=False):
    """Raises UserError unless a file can be written at `path`; it writes nothing.

    Folders on the way may be missing, as make_folder makes them. folder: check for files in a
    folder at `path` instead. flag: what gave the path.
    """
    place, name = (path, '') if folder else os.path.split(path)
    place, names = os.path.abspath(place), [name and name + PART]
    try:
        if not folder and os.path.isdir(path):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        while not _exists(place):
            place, name = os.path.split(place)
            names.append(name)
        if max(len(os.fsencode(name)) for name in names) > os.statvfs(place).f_namemax:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UserError("cannot write to '{}': {}; give another {}".format(
            printable(path), error.strerror, flag))


def _exists(path):
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def flush_folder(path):
    """Waits until the names in a folder are on disk, if the file system supports that."""
    try:
        _flush(path)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise


def _flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(folder):
    """Removes what a killed process left unfinished in a folder to which no other writes."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.endswith(PART) and os.path.isdir(path):
            shutil.rmtree(path)
        elif name.endswith(PART):
            os.remove(path)


# ---------------------------------------------------------------- JSON

def read_json(path, where=''):
    """Returns the dict in a JSON file. Raises UserError without one; `where` begins its message."""
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError('{}cannot read {}: {}'.format(where, path, error))
    if not isinstance(content, dict):
        raise UserError('{}{} is not a JSON object'.format(where, path))
    return content


def write_json(path, content):
    """Writes a dict as JSON, one key per line."""
    lines = ['{}: {}'.format(json.dumps(key), json.dumps(value, sort_keys=True))
             for key, value in sorted(content.items())]
    with whole(path) as part, open(part, 'w') as out:
        out.write('{\n' + ',\n'.join(lines) + '\n}\n')


# ---------------------------------------------------------------- tables and arrays

def write_rows(path, rows, mode='w'):
    """Writes rows as CSV; with the mode 'a', adds them to those in the file."""
    with open(path, mode, encoding='utf-8', newline='') as out:
        csv.writer(out, lineterminator='\n').writerows(rows)


def write_table(path, header, rows):
    """Writes a whole CSV file; None becomes an empty cell."""
    with whole(path) as part:
        write_rows(part, itertools.chain([header], rows))


def write_npz(path, kind, arrays, before=None):
    """Writes arrays as a .npz file, without pickle, one at a time.

    kind: str that read_npz checks. arrays: name -> array or tf.Variable. before: as in `whole`.
    """
    with whole(path, before) as part, open(part, 'wb') as out:
        archive = zipfile.ZipFile(out, 'w')
        try:
            for name, array in dict(arrays, format=np.array(kind)).items():
                array = np.asarray(array if isinstance(array, np.ndarray) else array.numpy())
                with archive.open(name + '.npy', 'w', force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
            archive.close()
        except BaseException:
            archive.fp = None  # else its finalizer would write again and print a traceback
            raise


def read_npz(path, kind):
    """Returns name -> array, as write_npz wrote them; runs no code from the file.

    Raises UserError if the file is damaged (its CRC-32 does not fit) or of another kind. It takes
    no more memory than the file is large: one that is compressed, or whose parts overlap, is
    refused.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(
                    entry.file_size for entry in entries) > os.path.getsize(path):
                raise ValueError('it is compressed, or its parts overlap')
            # compares the CRC-32 of what is read to its end
            arrays = {os.path.splitext(entry.filename)[0]: np.lib.format.read_array(
                io.BytesIO(archive.read(entry)), allow_pickle=False) for entry in entries}
    except Exception as error:  # a damaged archive can raise anything
        raise UserError("'{}' cannot be read, it may be damaged or cut short ({})".format(
            path, first_line(error) or type(error).__name__))
    if str(arrays.pop('format', '')) != kind:
        raise UserError("'{}' does not have the format {} of this project".format(path, kind))
    return arrays


def printable(name):
    """Returns a name as one line: bytes that are not UTF-8 and control characters become codes."""
    text = name.encode('utf-8', 'surrogateescape').decode('utf-8', 'backslashreplace')
    return re.sub('[\x00-\x1f\x7f-\x9f\u2028\u2029]',
                  lambda found: found.group().encode('unicode_escape').decode(), text)


def names_in(content):
    """Returns the names in the bytes of a file that has one a line."""
    text = content.decode('utf-8-sig', 'backslashreplace').replace('\r\n', '\n')
    return text.rstrip('\n').split('\n')
