"""Tests that one process trains a run, also of two machines that share a disk."""

import errno
import fcntl
import os
import re
import subprocess
import sys

import pytest

from elastic.errors import UserError
from elastic.runs.claim import Claim, this_machine
from elastic.runs.folder import TRAINED_BY
from elastic.runs.recorder import open_run
from small_runs import ROOT


def test_the_file_names_the_machine_while_it_trains(tmp_path):
    held = Claim(str(tmp_path))
    for _ in range(2):
        assert (tmp_path / TRAINED_BY).read_text() == this_machine()
        with pytest.raises(UserError, match='another process is training it'):
            Claim(str(tmp_path))
    held.close()
    held.close()  # a second time changes nothing
    assert os.listdir(str(tmp_path)) == []


@pytest.mark.parametrize('restart', [False, True])
def test_a_run_that_another_machine_trains_is_refused(tmp_path, restart):
    (tmp_path / 'epochs.csv').write_text('of the other machine')
    (tmp_path / TRAINED_BY).write_text('two 0123')
    with pytest.raises(UserError, match="run '{}': two 0123 is training it; .* remove {}".format(
            re.escape(tmp_path.name), re.escape(str(tmp_path / TRAINED_BY)))):
        open_run(str(tmp_path), {}, restart=restart)
    assert sorted(os.listdir(str(tmp_path))) == ['epochs.csv', TRAINED_BY]
    (tmp_path / TRAINED_BY).unlink()
    Claim(str(tmp_path)).close()


def test_the_same_machine_resumes_at_once(tmp_path):
    killed = ("import os; from elastic.runs.claim import Claim; held = Claim({!r}); "
              "os.kill(os.getpid(), 9)")
    assert subprocess.call([sys.executable, '-c', killed.format(str(tmp_path))], cwd=ROOT) == -9
    for left in (None, b'', bytes(50), this_machine()[:3].encode()):  # by a kill; by a power cut
        if left is not None:
            (tmp_path / TRAINED_BY).write_bytes(left)
        held = Claim(str(tmp_path))
        assert (tmp_path / TRAINED_BY).read_text() == this_machine()
        held.close()
        assert os.listdir(str(tmp_path)) == []


def test_without_locks_the_file_alone_excludes(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, 'flock', flock)
    held = Claim(str(tmp_path))
    with pytest.raises(UserError, match='is training it; if it no longer does, remove'):
        Claim(str(tmp_path))
    held.close()
    Claim(str(tmp_path)).close()
