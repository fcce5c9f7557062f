"""Fails operations of a short run on its disk, one run each: nothing is lost."""

import contextlib
import errno
import os

import pytest

import main
from disk_runs import FINISHED, Disk, folder_in_memory, noticing_checkpoints
from disks import Watch
from elastic import command_line
from elastic.compat.keras_stack import MODEL_FILE

QUIET = ('open', 'fsync', 'unlink', 'remove', 'rmdir')  # may concern flushing names or tidying up


class Failing:
    """Fails one operation; lists all."""

    def __init__(self, fails=None, number=errno.EIO):
        self.seen, self._fails, self._number = [], fails, number

    @contextlib.contextmanager
    def __call__(self, operation, path):
        self.seen.append((operation, path))
        if len(self.seen) - 1 == self._fails:
            named = () if operation in ('write', 'fsync') else (path,)
            raise OSError(self._number, os.strerror(self._number), *named)
        yield


def ended(disk, failing):
    """Runs the command; returns its status and the place of its last checkpoint."""
    reached = [None]
    with Watch(disk.root, noticing_checkpoints(failing, reached.append)):
        with pytest.raises(SystemExit) as stop:
            command_line.run(main.main, disk.command)
    return stop.value.code, reached[-1]


@pytest.fixture(scope='module')
def listed():
    """Returns a Disk after a whole run, and all operations of a run."""
    with folder_in_memory() as folder:
        disk, every = Disk(folder), Failing()
        assert ended(disk, every)[0] == 0
        disk.keep_whole()
        yield disk, every.seen


def more(*case):
    return pytest.param(*case, marks=pytest.mark.thorough)


@pytest.mark.parametrize('operation, place, number', [
    ('write', 'resume/last.part', errno.ENOSPC), ('write', 'epochs.csv', errno.EIO),
    more('open', 'settings.json.part', errno.ENOSPC), more('mkdir', 'run/resume', errno.EIO),
    more('fsync', 'run/resume', errno.EIO), more('replace', 'summary.json.part', errno.EIO),
    more('rename', 'checkpoint.part', errno.ENOSPC), more('unlink', 'resume.part/last', errno.EIO)])
def test_a_run_survives_the_failure_of_an_operation(listed, capsys, operation, place, number):
    """The first such operation of the run fails."""
    disk, seen = listed
    fails = next(index for index, (kind, path) in enumerate(seen)
                 if kind == operation and path.endswith('/' + place))
    disk.reset()
    capsys.readouterr()
    code, reached = ended(disk, Failing(fails, number))
    out, err = capsys.readouterr()
    continues = 'no checkpoint could be written' in out or operation in QUIET
    assert code == 0 and not err and continues or (
        code == 2 and err.startswith('error: ') and err.count('\n') == 1
        and os.strerror(number) in err), (code, err)
    disk.begins(FINISHED if code == 0 else reached)  # nothing is lost
    assert main.main(disk.command) == 0
    disk.assert_complete()
    assert disk.names() == disk.whole[1]


@pytest.mark.thorough
@pytest.mark.parametrize('operation, name', [
    ('replace', os.path.splitext(MODEL_FILE)[1]), ('open', 'trained_by')])
def test_a_model_that_cannot_be_saved_leaves_a_finished_run(listed, capsys, operation, name):
    """The last such operation of the run fails; the same command adds the model."""
    disk, seen = listed
    fails = max(index for index, (kind, path) in enumerate(seen)
                if kind == operation and path.endswith(name))
    disk.reset()
    capsys.readouterr()
    assert ended(disk, Failing(fails, errno.ENOSPC))[0] == 2
    err = capsys.readouterr().err
    assert err.startswith('error: ') and err.count('\n') == 1 and 'No space left' in err
    assert disk.begins() == FINISHED and main.main(disk.command) == 0
    assert 'epoch' not in capsys.readouterr().out
    disk.assert_complete()
