"""Tests that one process trains a run, also of two machines that share a disk without locks."""

import os
import re
import subprocess
import sys
import time

import pytest

from elastic.command_line import UserError
from elastic.runs import claim
from elastic.runs.claim import Claim, this_machine
from elastic.runs.folder import TRAINED_BY
from elastic.runs.recorder import open_run
from small_runs import ROOT

# A process of another machine: locks of its system do not reach this one, or do not exist.
OTHER = '''
import errno, fcntl, os, platform, sys
from elastic.command_line import UserError
from elastic.runs import claim
folder, name, locks, watch = sys.argv[1:]
def flock(*_):
    if locks == 'none':
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
platform.node, fcntl.flock = lambda: name, flock
claim.BEAT_SECONDS, claim.WATCH_SECONDS, claim.SETTLE_SECONDS = 0.05, float(watch), 0.2
try:
    held = claim.Claim(folder)
except UserError as error:
    sys.exit(str(error))
print('holds', flush=True)
sys.stdin.read()
held.close()
'''
LONG = 500  # s to watch; a change ends it


@pytest.fixture
def machine(tmp_path):
    """Returns a function that starts a process of a machine; those that still run are killed."""
    started = []

    def start(name, locks='local', watch=LONG):
        started.append(subprocess.Popen(
            [sys.executable, '-c', OTHER, str(tmp_path), name, locks, str(watch)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            universal_newlines=True))
        return started[-1]
    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def holds(process):
    return process.stdout.readline() == 'holds\n'


def wait_for(condition):
    for _ in range(50 * LONG):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError('both train')


def mark(tmp_path):
    return (tmp_path / TRAINED_BY).read_bytes()


def test_a_mark_names_the_machine_while_it_trains(tmp_path, machine):
    held = Claim(str(tmp_path))
    assert mark(tmp_path).decode().startswith(this_machine() + '\n')
    held.close()
    assert os.listdir(str(tmp_path)) == []
    other = machine('two')
    assert holds(other) and mark(tmp_path).startswith(b'two ')
    other.communicate('')
    assert other.returncode == 0 and os.listdir(str(tmp_path)) == []


def test_a_run_that_another_machine_trains_is_refused(tmp_path, machine, monkeypatch, capsys):
    monkeypatch.setattr(claim, 'WATCH_SECONDS', LONG)
    other = machine('two')
    assert holds(other)
    (tmp_path / 'epochs.csv').write_text('of the other machine')
    for restart in (False, True):
        with pytest.raises(UserError, match="run '{}': two.* is training it; wait".format(
                re.escape(tmp_path.name))):
            open_run(str(tmp_path), {}, restart=restart)
    assert 'was last trained on two' in capsys.readouterr().out
    assert other.poll() is None and mark(tmp_path).startswith(b'two ')
    assert sorted(os.listdir(str(tmp_path))) == ['epochs.csv', TRAINED_BY]


def test_a_run_whose_machine_is_gone_is_taken_over(tmp_path, machine, monkeypatch, capsys):
    monkeypatch.setattr(claim, 'WATCH_SECONDS', 0.2)
    monkeypatch.setattr(claim, 'SETTLE_SECONDS', 0.1)
    other = machine('two')
    assert holds(other)
    other.kill()
    other.wait()
    open_run(str(tmp_path), {}).close()
    said = capsys.readouterr().out
    assert said.count('\n') == 1 and 'was last trained on two' in said
    assert os.listdir(str(tmp_path)) == ['settings.json']


def test_the_same_machine_resumes_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(claim, 'WATCH_SECONDS', LONG)
    name = str(tmp_path / TRAINED_BY)
    killed = ("import os; from elastic.runs.claim import Claim; held = Claim({!r}); "
              "os.kill(os.getpid(), 9)")
    assert subprocess.call([sys.executable, '-c', killed.format(str(tmp_path))], cwd=ROOT) == -9
    assert os.path.exists(name)
    Claim(str(tmp_path)).close()
    for emptied in (b'', bytes(50)):  # as a power cut may leave it
        with open(name, 'wb') as file:
            file.write(emptied)
        Claim(str(tmp_path)).close()
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize('before', [False, True])
def test_of_two_machines_that_start_at_once_one_trains(tmp_path, machine, before):
    """before: whether a third machine was killed there, so that both watch and then take over."""
    if before:
        (tmp_path / TRAINED_BY).write_text('three 00\n0\n')
    both = [machine(name, watch=0.5) for name in ('one', 'two')]
    wait_for(lambda: any(process.poll() is not None for process in both))
    loser, = [process for process in both if process.poll() is not None]
    winner, = [process for process in both if process is not loser]
    assert loser.wait() in (1, 2)  # refused, or it ends as soon as it reads the other's mark
    assert re.search('training it|begun to train it', loser.communicate()[1])
    assert mark(tmp_path).startswith({both[0]: b'one ', both[1]: b'two '}[winner])
    winner.communicate('')
    assert winner.returncode == 0 and os.listdir(str(tmp_path)) == []


def test_a_process_ends_when_another_machine_has_taken_its_run_over(tmp_path, machine):
    """As after its network failed for minutes; it writes nothing more."""
    other = machine('two')
    assert holds(other)
    (tmp_path / TRAINED_BY).write_text('three 00\n0\n')
    assert other.wait() == 2
    output, errors = other.communicate()
    assert 'three 00 is training it' in errors and errors.count('\n') == 1
    assert mark(tmp_path) == b'three 00\n0\n'


def test_without_locks_the_mark_alone_excludes_and_a_killed_run_resumes(tmp_path, machine):
    first = machine('one', 'none')
    assert holds(first)
    second = machine('one', 'none')
    assert second.wait() == 1 and 'one' in second.communicate()[1]
    first.kill()
    first.wait()
    third = machine('one', 'none', watch=0.2)
    assert 'was last trained on one' in third.stdout.readline() and holds(third)
