"""Runs a short command that keeps its logs on a disk that is watched."""

import contextlib
import os
import shutil
import tempfile

import main
from disks import Recording, Watch, write_tree
from elastic.compat.keras_stack import MODEL_FILE
from elastic.files import PART
from elastic.flags import decisive_settings
from elastic.runs import checkpoint
from elastic.runs.folder import TRAINED_BY, is_finished, read_run
from elastic.runs.recorder import Recorder, open_run
from elastic.runs.session import RECORDS, interrupted_run
from fixed_tables import store_table
from small_runs import outcome, quick_flags, run_settings_of

STARTS, FINISHED = (0, 0), (99, 0)  # else (epoch, step) of the checkpoint that a run resumes from


@contextlib.contextmanager
def folder_in_memory():
    """Yields a new folder, in memory if there is a place: tests write it hundreds of times."""
    memory = '/dev/shm'
    path = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None)
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Disk:
    """Holds a folder that is a disk, and the command of a short run that writes to it.

    There is a timing table.
    whole: the outcome of a run that nothing interrupts, and the names of its files.
    """

    def __init__(self, folder):
        self.root, self.whole = os.path.join(folder, 'disk'), None
        self.logs = os.path.join(self.root, 'logs')
        self.run = os.path.join(self.logs, 'run')
        self.command = quick_flags(folder) + [
            '--logs_dir', self.logs, '--run_name', 'run', '--train_images', '24',
            '--validation_steps', '1', '--train_type', 'elastic_training', '--rho', '0.7',
            '--interval', '1', '--checkpoint_minutes', '1e-9', '--save_model', '--save_txt']
        self.reset()

    def reset(self):
        """Removes all but the timing table."""
        write_tree({}, self.root)
        store_table(self.command)

    def recorded(self, *more, ends=FINISHED):
        """Runs the command; returns the Recording of its changes."""
        recording = Recording(self.root)
        with Watch(self.root, noticing_checkpoints(recording, recording.mark)):
            assert main.main(self.command + list(more)) == (0 if ends == FINISHED else 1)
            recording.mark(ends)
        if self.whole is None and ends == FINISHED:
            self.keep_whole()
        return recording

    def keep_whole(self):
        """Keeps what the run has left as `whole`."""
        self.whole = outcome(self.run), self.names()

    def begins(self, reached=None):
        """Does what a process does before it trains; returns where it begins.

        Fails if that is before `reached`, or if a finished run is not complete.
        """
        settings = run_settings_of(self.command)
        records, decisive = settings.records, decisive_settings(settings)
        if is_finished(records.folder, decisive):
            self.assert_complete(later=MODEL_FILE)
            return FINISHED
        resumed = interrupted_run(records.folder)
        claim = open_run(records.folder, decisive, resumed)
        Recorder(records.folder, claim, resumed and resumed['records']).writer.close()
        found = STARTS if resumed is None else place_of(resumed)
        assert found >= (reached or STARTS)
        return found

    def left(self):
        """Returns path -> bytes of all that a process finds, but events and what it ignores."""
        ignored = (checkpoint.BEFORE, checkpoint.LAST + PART, TRAINED_BY)
        found = {}
        for folder, _, names in os.walk(self.logs):
            for name in names:
                if not name.startswith(('events.out', MODEL_FILE + PART)) and name not in ignored:
                    with open(os.path.join(folder, name), 'rb') as file:
                        found[os.path.relpath(os.path.join(folder, name), self.root)] = file.read()
        return found

    def names(self):
        """Returns the names of all files of the run, but its events."""
        return sorted(path for path in self.left() if path.startswith('logs/run'))

    def assert_complete(self, later=()):
        """Fails if a finished run lacks a file, but for `later`, which its command adds."""
        read_run(self.run)
        assert outcome(self.run) == self.whole[0]
        assert set(self.names()) >= {name for name in self.whole[1] if not name.endswith(later)}
        left = self.left()
        assert all(left[path].strip(b'\0') for path in self.names())


def noticing_checkpoints(around, call):
    """Returns what Watch takes: `around`, and call(place) of each checkpoint once it is safe."""
    @contextlib.contextmanager
    def noticing(operation, path):
        with around(operation, path):
            yield
        if operation == 'fsync' and os.path.basename(path) == checkpoint.FOLDER:
            call(place_of(checkpoint.read(os.path.dirname(path), RECORDS)))
    return noticing


def place_of(tree):
    progress = tree['run']['progress']
    return tree['run']['epoch'], progress['count'] if progress else 0
