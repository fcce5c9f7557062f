"""The checkpoint of a run: all that it takes to go on as if nothing had happened.

    resume/last     in the run's folder, the newest one; `before` is the one before it

A file is one line, which names what it is and carries the SHA-256 of the rest, and then an npz of
arrays and of `tree`, the JSON that says what they are. It is written beside the newest, flushed to
the disk and renamed: at any instant there is a whole one, whatever fails. Nothing in it can run
code. Takes and gives trees of plain values and arrays; what they mean, train.py knows.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import zipfile

import numpy as np

from command_line import UserError
from files import whole

FOLDER, LAST, BEFORE = 'resume', 'last', 'before'
MAGIC = b'ElasticTrainer checkpoint 1 '
HEADER = len(MAGIC) + 64 + 1  # the digest in hexadecimal, a line feed
TREE = 'tree'
COST = 0.01  # of a run's time, that checkpoints at the end of short epochs may take
ALIVE_SECONDS = 10  # how often a run shows, by its checkpoint's time, that it still trains
PIECE = 2 ** 20


class Interrupted(Exception):
    """A run was told to stop, and has: (epoch, 1-based; steps of it that are done; whether there is
    a checkpoint of that).
    """


class Damaged(Exception):
    """What a file holds is not a checkpoint, or no longer: one line."""


# ---------------------------------------------------------------- trees

def _packed(value, arrays):
    """JSON of a tree, whose arrays are added to the dict `arrays`."""
    if isinstance(value, np.generic):
        value = value.item()
    if hasattr(value, 'read_value') or (
            isinstance(value, np.ndarray) and not value.dtype.hasobject):
        name = 'array_{}'.format(len(arrays))
        arrays[name] = value
        return {'array': name}
    if isinstance(value, dict):
        return {'dict': {key: _packed(of_key, arrays) for key, of_key in value.items()}}
    if hasattr(value, '_asdict'):
        return {'record': type(value).__name__, 'fields': _packed(value._asdict(), arrays)}
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            items = sorted(value) if kind is frozenset else value
            return {name: [_packed(item, arrays) for item in items]}
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError('{!r} does not go into a checkpoint'.format(value))
    return value


COLLECTIONS = {'list': list, 'tuple': tuple, 'frozenset': frozenset}


def _unpacked(value, arrays, records):
    """The tree of _packed; records: name -> the NamedTuple of that name."""
    if not isinstance(value, dict):
        return value
    if 'array' in value:
        return arrays[value['array']]
    if 'dict' in value:
        return {key: _unpacked(of_key, arrays, records) for key, of_key in value['dict'].items()}
    if 'record' in value:
        return records[value['record']](**_unpacked(value['fields'], arrays, records))
    name, items = next(iter(value.items()))
    return COLLECTIONS[name](_unpacked(item, arrays, records) for item in items)


# ---------------------------------------------------------------- files

def write(folder, tree):
    """Writes the checkpoint of the run in `folder`; the newest one so far becomes the one before.

    tree: dicts (keys are str), lists, tuples, frozensets, NamedTuples, arrays, tf.Variables (read
    one after the other, to become arrays), numbers, str, None. OSError where it cannot be written:
    then all is as it was.
    """
    place, arrays = os.path.join(folder, FOLDER), {}
    content = json.dumps(_packed(tree, arrays)).encode()
    os.makedirs(place, exist_ok=True)
    last, before = os.path.join(place, LAST), os.path.join(place, BEFORE)
    with whole(last, before) as part, open(part, 'w+b') as out:
        out.write(bytes(HEADER))
        write_npz(out, dict(arrays, **{TREE: np.frombuffer(content, np.uint8)}))
        digest = _digest(out)
        out.seek(0)
        out.write(MAGIC + digest.encode() + b'\n')


def write_npz(out, arrays):
    """As np.savez to a file: one array at a time, no pickle, and not another word behind an error.

    arrays: name -> array or tf.Variable.
    """
    archive = zipfile.ZipFile(out, 'w')
    try:
        for name, array in arrays.items():
            array = np.asarray(array if isinstance(array, np.ndarray) else array.numpy())
            with archive.open(name + '.npy', 'w', force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
        archive.close()
    except BaseException:
        archive.fp = None  # else it would try once more as it goes, and print a traceback
        raise


def _digest(file):
    """SHA-256, in hexadecimal, of all behind the header."""
    file.seek(HEADER)
    digest = hashlib.sha256()
    for piece in iter(lambda: file.read(PIECE), b''):
        digest.update(piece)
    return digest.hexdigest()


def read(folder, records=()):
    """The tree of the newest whole checkpoint of the run in `folder`, None where it has none.

    With it go `headers`, `lost_seconds`, for which the run went on behind it, and `damaged`, a line
    on why it is not the newest, else None.
    records: the NamedTuple classes that a tree may hold. UserError where no file is whole.
    """
    reasons, found = [], headers(folder)
    for name in (LAST, BEFORE):
        path = os.path.join(folder, FOLDER, name)
        if not os.path.exists(path):
            continue
        try:
            tree = _read_file(path, records)
            return dict(tree, headers=found, damaged='; '.join(reasons) or None,
                        lost_seconds=max(0.0, os.path.getmtime(path) - tree['written']))
        except Damaged as error:
            reasons.append(str(error))
    if reasons:
        raise UserError('no checkpoint of {} can be read ({}); begin anew with --restart'.format(
            folder, '; '.join(reasons)))
    return None


def headers(folder):
    """First lines of the checkpoints there are: others whenever one was written."""
    found = []
    for name in (LAST, BEFORE):
        with contextlib.suppress(OSError):
            with open(os.path.join(folder, FOLDER, name), 'rb') as file:
                found.append(file.read(HEADER))
    return found


def _read_file(path, records):
    try:
        with open(path, 'rb') as file:
            header = file.read(HEADER)
            if not header.startswith(MAGIC):
                raise Damaged('{} is no checkpoint of this version'.format(path))
            if header != MAGIC + _digest(file).encode() + b'\n':
                raise Damaged('{} is damaged'.format(path))
            file.seek(HEADER)
            with np.load(file, allow_pickle=False) as stored:
                tree = json.loads(stored[TREE].tobytes().decode())
                return _unpacked(tree, stored, {kind.__name__: kind for kind in records})
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise Damaged('{} cannot be read: {}'.format(path, error))


def remove_damaged(folder):
    """Removes the newest checkpoint, so that the one before it is not replaced by it."""
    with contextlib.suppress(OSError):
        os.remove(os.path.join(folder, FOLDER, LAST))


def remove(folder):
    """Removes the checkpoints of the run in `folder`."""
    shutil.rmtree(os.path.join(folder, FOLDER), ignore_errors=True)



class Keeper:
    """Says when a checkpoint is due, and writes it.

    folder: of the run. minutes: at most between two, beside those at the end of epochs. about:
    dict, what is true of this process and goes into each. stop: () -> bool, whether the run shall
    end. written: of the checkpoint that the run goes on from. Without a folder it keeps nothing.
    """

    def __init__(self, folder=None, minutes=float('inf'), about=None, stop=lambda: False,
                 written=None):
        self._folder, self._seconds, self._about = folder, 60 * minutes, about or {}
        self.stop = stop
        self._last = self._alive = time.perf_counter()
        self._written, self._failed, self._took = written, False, 0.0

    def due(self):
        """Whether the step that has just ended is one to write a checkpoint behind."""
        now = time.perf_counter()
        if self._written is not None and now - self._alive > ALIVE_SECONDS:
            self._alive = now
            with contextlib.suppress(OSError):  # not the time of day, which may be set
                os.utime(os.path.join(self._folder, FOLDER, LAST),
                         (time.time(), self._written + now - self._last))
        return self.stop() or now - self._last > self._seconds

    def pays(self):
        """Whether the epoch that has just ended is one to write a checkpoint behind: where epochs
        are so short that it would take more than COST of the time, not each is.
        """
        passed = time.perf_counter() - self._last
        return self.stop() or self._folder is not None and passed * COST >= self._took

    def keep(self, tree):
        """Writes a checkpoint of tree(); whether it could. Where not, it says so, once, and the run
        goes on.
        """
        if self._folder is None:
            return False
        written, begin = time.time(), time.perf_counter()
        try:
            write(self._folder, dict(tree(), about=self._about, written=written))
            os.utime(os.path.join(self._folder, FOLDER, LAST), (written, written))
            self._written, self._last, self._failed = written, begin, False
            self._took = time.perf_counter() - begin
        except OSError as error:
            if not self._failed:
                print('no checkpoint could be written ({}); training goes on'.format(
                    error.strerror or error))
            self._last, self._failed = time.perf_counter(), True
        return not self._failed
