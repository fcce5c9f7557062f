"""Reads and writes the checkpoints of a run, from which it resumes as if it had never stopped.

The run's folder holds two: resume/last, the newest, and resume/before. Each is a .npz file of
arrays and of `tree`, the JSON that says where they belong. At any instant at least one is whole,
whatever fails. Reading runs no code from the file.
"""

import contextlib
import hashlib
import os
import shutil
import time

from elastic.errors import UserError
from elastic.files import PART, flush_folder, make_folder, read_npz, write_npz
from elastic.trees import from_arrays, to_arrays

FOLDER, LAST, BEFORE = 'resume', 'last', 'before'
FORMAT = 'elastic-checkpoint-8'
COST = 0.01  # the largest share of a run's time that checkpoints after short epochs may take
END_BYTES = 1000  # of a checkpoint: the end of its directory, with the CRC-32 of its tree


class Interrupted(Exception):
    """Says that a run has stopped after a signal.

    args: epoch, from 1; number of its steps that are done; whether the checkpoint was written.
    """


def where_it_stopped(error, folder, restart):
    """Returns a message: where a run was stopped, and how to resume it."""
    if not isinstance(error, Interrupted):
        return ' before training began; run the same command to {}'.format(
            'resume' if stamps(folder) else 'start again')
    epoch, step, kept = error.args
    return ' in epoch {} after step {}; run the same command{} to resume{}'.format(
        epoch, step, ' without --restart' if restart else '',
        '' if kept else ' from the last checkpoint, if there is one')


# ---------------------------------------------------------------- files

def write(folder, tree):
    """Writes a checkpoint of the run in `folder`, and keeps the last one as `before`.

    tree: as trees.py describes it.
    Raises OSError if it cannot be written, and TypeError if the tree holds anything else; nothing
    has changed then.
    """
    place, arrays = os.path.join(folder, FOLDER), to_arrays(tree)
    make_folder(place)
    write_npz(os.path.join(place, LAST), FORMAT, arrays, os.path.join(place, BEFORE))


def read(folder, records=()):
    """Returns the tree of the newest whole checkpoint of the run in `folder`; None without one.

    records: the NamedTuple classes that the tree may hold.
    The tree also holds `stamps`, and `damaged`: None or one line on why a newer checkpoint cannot
    be read.
    Raises UserError if there are checkpoints but none is whole.
    """
    reasons, found = [], stamps(folder)
    for path in _paths(folder):
        try:
            tree = from_arrays(read_npz(path, FORMAT), records)
            return dict(tree, stamps=found, damaged='; '.join(reasons) or None)
        except UserError as error:
            reasons.append(str(error))
        except (ValueError, KeyError, TypeError) as error:
            reasons.append('{} was written by another version: {}'.format(path, error))
    if reasons:
        raise UserError('no checkpoint of {} can be used ({}); start over with --restart'.format(
            folder, '; '.join(reasons)))
    return None


def stamps(folder):
    """Returns a list that changes with each checkpoint written; empty without checkpoints."""
    found = []
    for path in _paths(folder):
        with contextlib.suppress(OSError):  # another process may be renaming it
            with open(path, 'rb') as file:  # times have steps of 2 s on some cards
                file.seek(max(0, os.path.getsize(path) - END_BYTES))
                found.append((path, hashlib.sha256(file.read()).hexdigest()))
    return found


def _paths(folder):
    """Returns the paths of the existing checkpoints, newest first."""
    paths = [os.path.join(folder, FOLDER, name) for name in (LAST, BEFORE)]
    return [path for path in paths if os.path.exists(path)]


def remove_damaged(folder):
    """Removes the newest checkpoint, which must not replace the whole one before it."""
    with contextlib.suppress(OSError):
        os.remove(os.path.join(folder, FOLDER, LAST))


def remove(folder):
    """Removes the checkpoints of the run in `folder`, all at once, even if the power fails."""
    place = os.path.join(folder, FOLDER)
    shutil.rmtree(place + PART, ignore_errors=True)  # of a process that was killed here
    if os.path.isdir(place):
        os.rename(place, place + PART)
        flush_folder(folder)
        shutil.rmtree(place + PART, ignore_errors=True)


class Keeper:
    """Decides when a checkpoint is due, and writes it.

    folder: the run's; with None nothing is written. minutes: the most between two checkpoints.
    about: dict that describes this process and goes into each checkpoint.
    stop: () -> bool, whether the run should stop. now: () -> seconds.
    """

    def __init__(self, folder=None, minutes=float('inf'), about=None, stop=lambda: False,
                 now=time.perf_counter):
        self._folder, self._seconds, self._about = folder, 60 * minutes, about or {}
        self.stop, self._now = stop, now
        self._last = now()
        self._failed, self._took = False, 0.0

    def due(self):
        """Returns whether to write a checkpoint after the step that has just ended."""
        return self.stop() or self._now() - self._last > self._seconds

    def pays(self):
        """Returns whether to write a checkpoint after the epoch that has just ended."""
        passed = self._now() - self._last
        return self.stop() or self._folder is not None and passed * COST >= self._took

    def keep(self, tree):
        """Writes a checkpoint of tree(); returns whether that worked. Prints its first failure."""
        if self._folder is None:
            return False
        begin = self._now()
        try:
            write(self._folder, dict(tree(), about=self._about))
            self._last, self._failed = begin, False
            self._took = self._now() - begin
        except OSError as error:
            if not self._failed:
                print('no checkpoint could be written ({}); training continues'.format(
                    error.strerror or error))
            self._last, self._failed = self._now(), True
        return not self._failed
