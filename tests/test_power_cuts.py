"""Cuts the power after each operation of a run: from all that may be left, the run resumes.

A power cut loses what was not flushed to the disk, which killing a process does not. Here each
state that a cut may leave is built from a record of the run (tests/support/disks.py), and the same
command decides where it begins. Whole runs from all different decisions: SLOW_TESTS=1; else from
one for each checkpoint.
"""

import os
import shutil
import tempfile

import pytest

import main
import profiler
from disks import Recording, Watch, states, write_tree
from elastic.command_line import UserError
from elastic.files import PART
from elastic.flags import check_arguments, decisive_settings, parse_arguments
from elastic.runs import checkpoint
from elastic.runs.folder import is_finished, read_run
from elastic.runs.recorder import Recorder, open_run
from elastic.runs.session import interrupted_run
from elastic.settings import run_settings
from fixed_tables import fixed_profile
from small_runs import SLOW, outcome, quick_flags

STARTS, FINISHED = (0, 0), (99, 0)  # else (epoch, step) of the checkpoint that a run resumes from


@pytest.fixture(scope='module', autouse=True)
def fixed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, 'profile_model', fixed_profile)
        yield


class Disk:
    """Holds a folder that is a disk, and the command of a short run that writes to it.

    whole: the outcome of a run that nothing interrupts, and the names of its files.
    """

    def __init__(self, folder):
        self.root, self.whole = os.path.join(folder, 'disk'), None
        self.logs = os.path.join(self.root, 'logs')
        self.run = os.path.join(self.logs, 'run')
        os.mkdir(self.root)
        self.command = quick_flags(folder) + [
            '--logs_dir', self.logs, '--run_name', 'run', '--train_images', '24',
            '--validation_steps', '1', '--train_type', 'elastic_training', '--rho', '0.7',
            '--interval', '1', '--checkpoint_minutes', '1e-9', '--save_model', '--save_txt']

    def recorded(self, *more, lose=lambda path: False, ends=FINISHED):
        """Runs the command; returns all States that a power cut may leave meanwhile."""
        recording, write = Recording(self.root, lose), checkpoint.write

        def written(folder, tree):
            write(folder, tree)
            recording.mark(place_of(tree))
        with pytest.MonkeyPatch.context() as patch, Watch(self.root, recording):
            patch.setattr(checkpoint, 'write', written)
            assert main.main(self.command + list(more)) == (0 if ends == FINISHED else 1)
            recording.mark(ends)
        if self.whole is None and ends == FINISHED:
            self.whole = outcome(self.run), self.names()
        return states(recording)

    def begins(self, state):
        """Does on this state what a process does before it trains; returns where it begins.

        Fails if what was marked as safe is lost, or if a finished run is not complete.
        """
        write_tree(state.tree, self.root)
        settings = run_settings(check_arguments(parse_arguments(self.command)))
        records, decisive = settings.records, decisive_settings(settings)
        if is_finished(records.folder, decisive):
            self.assert_complete()
            return FINISHED
        resumed = interrupted_run(records.folder, decisive)
        lock = open_run(records.folder, decisive, resumed)
        Recorder(records.folder, lock, resumed and resumed['records']).writer.close()
        found = STARTS if resumed is None else place_of(resumed)
        assert found >= (state.reached or STARTS)
        return found

    def left(self):
        """Returns path -> bytes of all that a process finds, but events and what it ignores."""
        ignored, found = (checkpoint.BEFORE, checkpoint.ALIVE, checkpoint.LAST + PART), {}
        for folder, _, names in os.walk(self.logs):
            for name in names:
                if not name.startswith('events.out') and name not in ignored:
                    with open(os.path.join(folder, name), 'rb') as file:
                        found[os.path.relpath(os.path.join(folder, name), self.root)] = file.read()
        return found

    def names(self):
        """Returns the names of all files of the run, but its events."""
        return sorted(path for path in self.left() if path.startswith('logs/run'))

    def assert_complete(self):
        read_run(self.run)
        assert outcome(self.run) == self.whole[0]
        assert set(self.names()) >= set(self.whole[1])
        left = self.left()
        assert all(left[path].strip(b'\0') for path in self.names())


def place_of(tree):
    progress = tree['run']['progress']
    return tree['run']['epoch'], progress['count'] if progress else 0


def assert_survived(disk, left):
    """Checks that from each of these States the command ends as a run that nothing interrupts."""
    kinds = {}
    for state in left:
        begins = disk.begins(state)
        kinds[begins, SLOW and frozenset(disk.left().items())] = state
    for state in kinds.values():
        write_tree(state.tree, disk.root)
        assert main.main(disk.command) == 0
        disk.assert_complete()
        assert disk.names() == disk.whole[1]
    return len(kinds)


@pytest.fixture
def folder():
    """Yields a folder in memory, where there is one: hundreds of states are written."""
    memory = '/dev/shm'
    path = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None)
    yield path
    shutil.rmtree(path)


def test_a_run_resumes_or_starts_after_a_power_cut(folder):
    """The resumed run is cut, too: it shortens its records to those of the checkpoint."""
    disk = Disk(folder)
    left = disk.recorded()
    assert len(left) > 300 and assert_survived(disk, left) > 7
    ahead = max((state for state in left if state.reached == (1, 3)),
                key=lambda state: len(state.tree.get('logs/run/epochs.csv', b'')))
    write_tree(ahead.tree, disk.root)
    again = disk.recorded()
    assert len(again) > 200 and assert_survived(disk, again) > 4


def test_a_restarted_run_leaves_the_old_one_or_a_new_one_after_a_power_cut(folder):
    disk = Disk(folder)
    disk.recorded()
    assert_survived(disk, disk.recorded('--restart'))


def test_a_failed_run_leaves_nothing_in_the_way_after_a_power_cut(folder):
    disk = Disk(folder)
    disk.command += ['--learning_rate', '1e30', '--checkpoint_minutes', '99']
    left = disk.recorded(ends=STARTS)
    assert len(left) > 40 and {disk.begins(state) for state in left} == {STARTS}


UNFLUSHED = ['resume/last.part', 'resume', 'run', 'epochs.csv'] + SLOW * [
    'logs', 'run/settings.json.part', 'predictions.csv.part', 'summary.json.part',
    'epochs.txt.part', 'checkpoint', 'checkpoint/class_names.txt']


@pytest.mark.parametrize('unflushed', UNFLUSHED)
def test_a_missing_flush_is_noticed(folder, unflushed):
    disk = Disk(folder)
    left = disk.recorded(lose=lambda path: path.endswith('/' + unflushed))
    for state in sorted(left, key=lambda state: state.reached or STARTS, reverse=True):
        try:
            disk.begins(state)
        except (AssertionError, UserError, ValueError):
            return
    pytest.fail('no state differs')
