"""Stops and kills real processes and fills their disk: they lose nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

import main
from cached_runs import files_of_at_most
from elastic import command_line
from elastic.errors import UserError
from elastic.runs import checkpoint
from elastic.runs.folder import EPOCH_COLUMNS, TRAINED_BY
from elastic.runs.recorder import Recorder, open_run, records_of
from elastic.runs.signals import Signals
from fixed_tables import store_table
from made_runs import read_csv
from small_runs import ROOT, outcome, quick_flags

SCHEMES = {
    'elastic': ['--interval', '2', '--rho', '0.7'],
    'adam': ['--train_type', 'full_training', '--optimizer', 'adam', '--learning_rate', '0.001',
             '--augmentation', 'flip+rotate']}


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """Returns a folder with a network that is deterministic on all stacks, and its timing table."""
    folder = tmp_path_factory.mktemp('logs')
    store_table(flags(folder, 'elastic'))
    return folder


def flags(logs, name, *more):
    """Returns the flags of a run of some seconds with a checkpoint after every step."""
    return quick_flags(logs, '--train_images', '80', '--num_epochs', '4', '--save_model',
                       '--checkpoint_minutes', '1e-9', '--run_name', name, *more)


def heeds_signals():
    """Makes the child heed signals, even if these tests run in the background, without Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(arguments, **environment):
    """Starts main.py in a process."""
    usual = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
    return subprocess.Popen([sys.executable, 'main.py'] + arguments, cwd=ROOT,
                            env=dict(usual, **environment), stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True,
                            preexec_fn=heeds_signals)


def started_in_epoch_2(arguments, folder):
    """Starts main.py in a process; returns it once its run has recorded an epoch.

    It stands still then, until it gets SIGCONT.
    """
    child = started(arguments)
    while not (folder / 'epochs.csv').exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.send_signal(signal.SIGSTOP)
    return child


@pytest.mark.thorough
@pytest.mark.parametrize('scheme, number', [('elastic', signal.SIGINT), ('adam', signal.SIGKILL)])
def test_a_run_that_a_signal_ends_resumes_to_the_bits_of_a_whole_one(logs, scheme, number, capsys):
    assert main.main(flags(logs, scheme + '_whole', *SCHEMES[scheme])) == 0
    arguments = flags(logs, scheme, *SCHEMES[scheme])
    child = started_in_epoch_2(arguments, logs / scheme)
    with pytest.raises(UserError, match='another process'):
        main.main(arguments)
    child.send_signal(number)
    child.send_signal(signal.SIGCONT)
    out, err = child.communicate()
    assert 'profiling' not in out
    assert (logs / scheme / TRAINED_BY).exists() == (number == signal.SIGKILL)
    if number == signal.SIGKILL:
        assert child.returncode == -number
    else:
        assert child.returncode == 128 + number, err
        assert err.strip().startswith('stopped by {} in epoch '.format(number.name))
        assert 'run the same command to resume' in err and 'Traceback' not in err
    capsys.readouterr()
    assert main.main(arguments) == 0
    assert 'resumes in epoch ' in capsys.readouterr().out
    assert outcome(logs / scheme) == outcome(logs / (scheme + '_whole'))
    assert not (logs / scheme / checkpoint.FOLDER).exists()


@pytest.mark.thorough
def test_a_run_whose_output_nobody_reads_stops_and_resumes(logs, capsys):
    arguments = flags(logs, 'unread', '--train_type', 'full_training', '--num_epochs', '40')
    child = started(arguments, PYTHONUNBUFFERED='1')
    child.stdout.readline()
    child.stdout.close()
    err = child.stderr.read()
    assert child.wait() == 128 + signal.SIGHUP
    assert err.strip().startswith('stopped by SIGHUP in epoch ') and err.strip().count('\n') == 0
    assert main.main(arguments) == 0 and 'resumes in epoch' in capsys.readouterr().out


def test_a_signal_waits_for_the_step_once_training_has_begun():
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # ended by the signal
    with Signals() as signals:
        signals.deferred = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop() and signals.name == 'SIGTERM'


def test_a_hang_up_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.stop()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def card(tmp_path):
    """Yields a folder on a file system of 8 MB."""
    if subprocess.call(['mount', '-t', 'tmpfs', '-o', 'size=8m', 'tmpfs', str(tmp_path)],
                       stderr=subprocess.DEVNULL):
        pytest.skip('may not mount a file system here')
    yield tmp_path
    subprocess.call(['umount', '-l', str(tmp_path)])


@pytest.mark.thorough
def test_a_run_survives_a_full_disk(card, capsys):
    """Another program fills the disk while the run trains, then frees it."""
    arguments = flags(card, 'full', '--train_type', 'full_training')
    child = started_in_epoch_2(arguments, card / 'full')
    with open(str(card / 'other'), 'wb', buffering=0) as other:
        with contextlib.suppress(OSError):
            while True:
                other.write(bytes(4096))
    child.send_signal(signal.SIGCONT)
    _, err = child.communicate()
    assert child.returncode == 2 and err.startswith('error: ') and 'Traceback' not in err
    assert 'the same command to resume from the last checkpoint' in err
    os.remove(str(card / 'other'))
    assert main.main(arguments) == 0 and 'resumes in epoch' in capsys.readouterr().out
    assert (card / 'full' / 'summary.json').exists()


@pytest.mark.thorough
def test_a_profile_that_cannot_be_written_leaves_nothing(tmp_path, capsys):
    arguments = quick_flags(tmp_path, '--rho', '1', '--num_epochs', '1', '--run_name', 'one')
    with files_of_at_most(500), pytest.raises(SystemExit) as stop:
        command_line.run(main.main, arguments)
    assert stop.value.code == 2 and capsys.readouterr().err.startswith('error: ')
    assert not (tmp_path / 'one').exists()
    assert main.main(arguments) == 0


def test_a_disk_that_takes_no_more_events_does_not_end_the_run(tmp_path, capsys):
    """The file of events reaches a limit, the tables do not."""
    folder, row = str(tmp_path / 'run'), dict.fromkeys(EPOCH_COLUMNS, 0.5)
    with Recorder(folder, open_run(folder, {})) as recorder:
        with files_of_at_most(2000):
            for epoch in range(1, 9):
                recorder.epoch(dict(row, epoch=epoch))
                recorder.selection(epoch, ['head/kernel'], [(3,)], [True])
        out = capsys.readouterr().out
        assert out.count('no more events for TensorBoard') == 1
        state = recorder.state()
        recorder.epoch(dict(row, epoch=9))
    with Recorder(folder, open_run(folder, {}, dict(stamps=[], damaged=None)), state) as recorder:
        recorder.epoch(dict(row, epoch=9))
        recorder.finish({'epochs': 9})
    assert [row['epoch'] for row in read_csv(os.path.join(folder, 'epochs.csv'))] == list(
        '123456789')
    steps = set()
    for name in records_of(folder):
        if name.startswith('events'):
            with contextlib.suppress(tf.errors.DataLossError):  # ends within a record
                for event in tf.compat.v1.train.summary_iterator(os.path.join(folder, name)):
                    steps.add(event.step)
    assert {1, 9} <= steps and 8 not in steps
    assert capsys.readouterr().out == ''
