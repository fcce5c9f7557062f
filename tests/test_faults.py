"""Kills and stops real processes and fills their disk: they lose nothing.

SLOW_TESTS=1 kills ten runs of each scheme; CI kills two of one scheme.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import main
import profiler
from cached_runs import SIZE, files_of_at_most, network
from elastic import command_line
from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.runs import checkpoint
from elastic.runs.folder import EPOCH_COLUMNS
from elastic.runs.recorder import Recorder, open_run, records_of
from fixed_tables import fixed_profile
from small_runs import ROOT, SLOW, outcome


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """Returns a folder with a network that is deterministic on all stacks, and its timing table."""
    folder = tmp_path_factory.mktemp('logs')
    network().save(str(folder / keras_stack.MODEL_FILE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, 'profile_model', fixed_profile)
        assert profiler.main(['--num_classes', '10'] + model_flags(folder)) == 0
    return folder


def model_flags(logs):
    return ['--model_name', str(logs / keras_stack.MODEL_FILE), '--bn_statistics', 'frozen',
            '--input_size', str(SIZE), '--batch_size', '8', '--dataset_name', 'digits',
            '--logs_dir', str(logs)]


def command(logs, name, *more):
    """Returns the command of a run of some seconds with a checkpoint after every step."""
    return [sys.executable, 'main.py'] + model_flags(logs) + [
        '--train_images', '320', '--num_epochs', '5', '--learning_rate', '0.05',
        '--validation_steps', '8', '--prefix_cache', 'off', '--interval', '2', '--rho', '0.7',
        '--closed_loop', '0', '--save_model', '--checkpoint_minutes', '1e-9', '--run_name', name
    ] + list(more)


SCHEMES = {
    'full': ['--train_type', 'full_training'],
    'elastic': ['--train_type', 'elastic_training', '--importance', 'gradient_update'],
    'prune': ['--train_type', 'prune_training', '--prune_interval', '1',
              '--prune_threshold', '0.1'],
    'adam': ['--train_type', 'full_training', '--optimizer', 'adam', '--learning_rate', '0.001',
             '--augmentation', 'flip+rotate']}


def heeds_signals():
    """Makes the child heed signals, even if these tests run in the background, without Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(arguments):
    usual = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            universal_newlines=True, env=usual, preexec_fn=heeds_signals)


def finished(arguments):
    """Runs a command; returns (exit status, output, errors)."""
    child = started(arguments)
    out, err = child.communicate()
    return child.returncode, out, err


def wait_until_it_trains(child, folder, after=0):
    """Waits for a checkpoint after time `after` (time.time()); False if the child has ended."""
    path = str(folder / checkpoint.FOLDER / checkpoint.LAST)
    while child.poll() is None:
        with contextlib.suppress(OSError):  # there is none yet, or it is being renamed
            if os.path.getmtime(path) > after:
                return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize('scheme, kills', [
    (scheme, 10 if SLOW else 2) for scheme in SCHEMES if SLOW or scheme == 'elastic'])
def test_a_killed_run_ends_with_the_bits_of_a_whole_one(logs, scheme, kills, capsys):
    assert main.main(command(logs, scheme + '_whole', *SCHEMES[scheme])[2:]) == 0
    assert 'profiling' not in capsys.readouterr().out
    rng, done, runs = np.random.RandomState(len(scheme)), 0, 0
    while done < kills:  # a run may finish before it was killed often enough
        name, runs = '{}_killed{}'.format(scheme, runs), runs + 1
        arguments, before = command(logs, name, *SCHEMES[scheme]), done
        while done < kills:
            began, child = time.time(), started(arguments)
            if not wait_until_it_trains(child, logs / name, began):
                child.communicate()
                break
            time.sleep(rng.uniform(0, 0.6))
            child.kill()
            child.communicate()
            done += child.returncode == -signal.SIGKILL
        code, out, err = finished(arguments)
        assert code == 0, err
        assert done == before or 'resumes in epoch' in out or 'already finished' in out
        assert outcome(logs / name) == outcome(logs / (scheme + '_whole'))
        assert not (logs / name / checkpoint.FOLDER).exists()


@pytest.fixture(scope='module')
def stopped(logs):
    """Returns (command, exit status, errors) of a run that SIGINT has stopped."""
    arguments = command(logs, 'stopped', '--train_type', 'full_training', '--num_epochs', '40')
    child = started(arguments)
    assert wait_until_it_trains(child, logs / 'stopped')
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    return arguments, child.returncode, err


def test_a_signal_stops_a_run_after_a_checkpoint(stopped):
    _, code, err = stopped
    assert code == 128 + signal.SIGINT
    assert err.strip().startswith('stopped by SIGINT in epoch ')
    assert 'run the same command to resume' in err and 'Traceback' not in err


def test_a_stopped_run_resumes_in_one_process_at_a_time(logs, stopped):
    began, child = time.time(), started(stopped[0])
    assert wait_until_it_trains(child, logs / 'stopped', began)
    with pytest.raises(UserError, match='another process'):
        main.main(stopped[0][2:])
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate()
    assert child.returncode == 128 + signal.SIGTERM  # undisturbed by the other process
    assert 'resumes in epoch ' in out and 'stopped by SIGTERM in epoch ' in err


def test_other_settings_need_restart(stopped, capsys):
    arguments = stopped[0][2:] + ['--seed', '5', '--num_epochs', '1', '--train_images', '80']
    with pytest.raises(UserError, match='other settings.*--restart'):
        main.main(arguments)
    assert main.main(arguments + ['--restart']) == 0
    assert 'resumes' not in capsys.readouterr().out


def test_a_signal_before_training_leaves_nothing(logs):
    child = started(command(logs, 'early'))
    time.sleep(1.0)
    child.send_signal(signal.SIGTERM)
    child.communicate()
    assert not (logs / 'early').exists()
    assert child.returncode in (143, -signal.SIGTERM)  # the latter before Python has a handler


def test_a_hang_up_does_not_end_a_run_under_nohup(logs):
    arguments = command(logs, 'nohup', '--train_type', 'full_training', '--train_images', '80')
    child = started(['nohup'] + arguments)
    assert wait_until_it_trains(child, logs / 'nohup')
    child.send_signal(signal.SIGHUP)
    child.communicate()
    assert child.returncode == 0


@pytest.fixture
def card(tmp_path):
    """Yields a folder with the network on a file system of 8 MB."""
    folder = tmp_path / 'card'
    folder.mkdir()
    if subprocess.call(['mount', '-t', 'tmpfs', '-o', 'size=8m', 'tmpfs', str(folder)],
                       stderr=subprocess.DEVNULL):
        pytest.skip('may not mount a file system here')
    try:
        network().save(str(folder / keras_stack.MODEL_FILE))
        yield folder
    finally:
        subprocess.call(['umount', '-l', str(folder)])


def assert_resumes(arguments, child, folder):
    """Checks what the child said of its failed disk, and that it resumes once the disk works."""
    out, err = child.communicate()
    assert 'Traceback' not in err
    if child.returncode:
        assert child.returncode == 2 and err.startswith('error: '), err
        assert 'the same command to resume from the last checkpoint' in err
    else:
        assert 'no checkpoint could be written' in out
    yield
    if child.returncode:
        code, out, err = finished(arguments)
        assert code == 0 and 'resumes in epoch' in out, err
    assert (folder / 'summary.json').exists()
    yield


def test_a_run_survives_a_full_disk(card):
    """Another program fills the disk while the run trains, then frees it."""
    arguments = command(card, 'full', '--train_type', 'full_training', '--num_epochs', '4')
    child = started(arguments)
    assert wait_until_it_trains(child, card / 'full')
    with open(str(card / 'other'), 'wb', buffering=0) as other:
        with contextlib.suppress(OSError):
            while True:
                other.write(bytes(4096))
    resumes = assert_resumes(arguments, child, card / 'full')
    next(resumes)
    os.remove(str(card / 'other'))
    next(resumes)


def test_a_run_survives_a_disk_that_becomes_read_only(card):
    arguments = command(card, 'full', '--train_type', 'full_training', '--num_epochs', '4')
    child = started(arguments)
    assert wait_until_it_trains(child, card / 'full')
    subprocess.check_call(['mount', '--bind', str(card), str(card)])
    while subprocess.call(['mount', '-o', 'remount,bind,ro', str(card)],
                          stderr=subprocess.DEVNULL):
        pass  # a file is being written
    resumes = assert_resumes(arguments, child, card / 'full')
    next(resumes)
    subprocess.check_call(['umount', '-l', str(card)])
    next(resumes)


def test_a_profile_that_cannot_be_written_leaves_nothing(logs, tmp_path, capsys):
    arguments = command(tmp_path, 'one', '--model_name', str(logs / keras_stack.MODEL_FILE),
                        '--rho', '1', '--num_epochs', '1', '--train_images', '80')[2:]
    with files_of_at_most(2 ** 14), pytest.raises(SystemExit) as stop:
        command_line.run(main.main, arguments)
    assert stop.value.code == 2 and capsys.readouterr().err.startswith('error: ')
    assert not (tmp_path / 'one').exists()
    assert main.main(arguments) == 0


def test_a_summary_that_cannot_be_written_keeps_the_checkpoint(tmp_path):
    folder = str(tmp_path / 'run')
    recorder = Recorder(folder, open_run(folder, {}))
    checkpoint.write(folder, {})
    with files_of_at_most(500), pytest.raises(OSError):
        recorder.finish(dict(note='x' * 1000))
    assert checkpoint.read(folder) is not None
    assert not os.path.exists(os.path.join(folder, 'summary.json'))


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
        recorder.finish({})
    with open(os.path.join(folder, 'epochs.csv')) as source:
        assert [line.split(',')[0] for line in source][1:] == [str(i) for i in range(1, 10)]
    steps = set()
    for name in records_of(folder):
        if name.startswith('events'):
            with contextlib.suppress(tf.errors.DataLossError):  # ends within a record
                for event in tf.compat.v1.train.summary_iterator(os.path.join(folder, name)):
                    steps.add(event.step)
    assert {1, 9} <= steps and 8 not in steps
    assert capsys.readouterr().out == ''
