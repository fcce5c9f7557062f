"""Real processes that are killed, told to stop, or run out of disk: nothing is lost.

SLOW_TESTS=1 kills ten runs of each scheme; without, CI's part, two of one.
"""

import contextlib
import csv
import glob
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import profiler
from cached_runs import SIZE, files_of_at_most, network
from elastic.compat import keras_stack
from elastic.runs import checkpoint
from elastic.runs.folder import DEVICE_COLUMNS
from elastic.runs.recorder import Recorder, open_run
from elastic.timing.table import TensorTimings
from small_runs import ROOT

SLOW = bool(os.environ.get('SLOW_TESTS'))
TIMES = ('seconds', 'step_ms') + DEVICE_COLUMNS


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """A folder for runs, with a network in it whose ops are deterministic on both stacks."""
    folder = tmp_path_factory.mktemp('logs')
    network().save(str(folder / keras_stack.MODEL_FILE))
    code, _, err = finished([sys.executable, 'profiler.py', '--num_classes', '10'] + model_flags(
        folder))
    assert code == 0, err
    path, = glob.glob(str(folder / '*_profile' / profiler.TABLE_FILE))
    # What a busy machine measures may put rho out of reach: these totals do not.
    TensorTimings.load(path).rescaled(2.0, 4.0).save(path)
    return folder


def model_flags(logs):
    return ['--model_name', str(logs / keras_stack.MODEL_FILE), '--bn_statistics', 'frozen',
            '--input_size', str(SIZE), '--batch_size', '8', '--dataset_name', 'digits',
            '--logs_dir', str(logs)]


def command(logs, name, *more):
    """Of some seconds of training, a checkpoint behind every step."""
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
    """In the child: also where these tests run in the background, which ignores Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(arguments):
    usual = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            universal_newlines=True, env=usual, preexec_fn=heeds_signals)


def finished(arguments):
    """(exit status, output, errors)."""
    child = started(arguments)
    out, err = child.communicate()
    return child.returncode, out, err


def wait_until_it_trains(child, folder, behind=0):
    """Waits for a checkpoint that is newer than `behind`, of time.time; False where it ended."""
    path = str(folder / checkpoint.FOLDER / checkpoint.LAST)
    while child.poll() is None:
        with contextlib.suppress(OSError):  # none yet, or between two renames
            if os.path.getmtime(path) > behind:
                return True
        time.sleep(0.01)
    return False


def outcome(folder):
    """What a run ends with: weights, records without times."""
    records = []
    for name in ('epochs.csv', 'selections.csv'):
        with open(str(folder / name)) as source:
            records += [{column: value for column, value in row.items()
                         if not column.endswith(TIMES)} for row in csv.DictReader(source)]
    with np.load(str(folder / 'checkpoint' / 'weights.npz')) as weights:
        return records, {name: weights[name].tobytes() for name in weights.files}


@pytest.mark.parametrize('scheme, kills', [
    (scheme, 10 if SLOW else 2) for scheme in SCHEMES if SLOW or scheme == 'elastic'])
def test_a_killed_run_ends_as_one_that_was_not(logs, scheme, kills):
    code, out, err = finished(command(logs, scheme + '_whole', *SCHEMES[scheme]))
    assert code == 0 and 'no timing table' not in out and 'profiled' not in out, err
    rng, done, runs = np.random.RandomState(len(scheme)), 0, 0
    while done < kills:  # a run may be done before it was killed often enough
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


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_behind_a_checkpoint(logs, number):
    name = signal.Signals(number).name
    arguments = command(logs, name, '--train_type', 'full_training', '--num_epochs', '40')
    child = started(arguments)
    assert wait_until_it_trains(child, logs / name)
    child.send_signal(number)
    begin = time.perf_counter()
    _, err = child.communicate()
    assert child.returncode == 128 + number and time.perf_counter() - begin < 15
    assert err.strip().startswith('stopped by {} in epoch '.format(name))
    assert 'run the same command to resume' in err and 'Traceback' not in err
    code, out, err = finished(arguments)
    assert code == 0 and 'resumes in epoch ' in out, err


def test_a_signal_before_training_ends_it_at_once_and_leaves_nothing(logs):
    child = started(command(logs, 'early'))
    time.sleep(1.0)
    child.send_signal(signal.SIGTERM)
    child.communicate()
    assert not (logs / 'early').exists()
    if child.returncode != -signal.SIGTERM:  # before Python had come to the handler
        assert child.returncode == 143


def test_a_hang_up_does_not_end_a_run_under_nohup(logs):
    arguments = command(logs, 'nohup', '--train_type', 'full_training')
    child = started(['nohup'] + arguments)
    assert wait_until_it_trains(child, logs / 'nohup')
    child.send_signal(signal.SIGHUP)
    child.communicate()
    assert child.returncode == 0


def test_a_second_process_is_refused(logs):
    arguments = command(logs, 'one_only', '--train_type', 'full_training', '--num_epochs', '40')
    child = started(arguments)
    assert wait_until_it_trains(child, logs / 'one_only')
    code, _, err = finished(arguments)
    child.send_signal(signal.SIGTERM)
    child.communicate()
    assert code == 2 and err.startswith('error: ') and 'another process' in err
    assert child.returncode == 143  # it was not disturbed


def test_other_settings_are_refused_and_restart_begins_anew(logs):
    arguments = command(logs, 'anew', '--train_type', 'full_training')
    child = started(arguments)
    assert wait_until_it_trains(child, logs / 'anew')
    child.send_signal(signal.SIGTERM)
    child.communicate()
    code, _, err = finished(arguments + ['--seed', '5'])
    assert code == 2 and 'other settings' in err and '--restart' in err
    code, out, err = finished(arguments + ['--seed', '5', '--restart'])
    assert code == 0 and 'resumes' not in out, err


@pytest.fixture
def card(tmp_path):
    """A folder on a file system of its own of 8 MB, with the network in it."""
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


def assert_goes_on(arguments, child, folder):
    """What the child said about a disk that failed, and that the run goes on from there."""
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


def test_a_card_that_fills_up_costs_no_run(card):
    """Another program takes all that is left while it trains, and then frees it."""
    arguments = command(card, 'full', '--train_type', 'full_training', '--num_epochs', '8')
    child = started(arguments)
    assert wait_until_it_trains(child, card / 'full')
    with open(str(card / 'other'), 'wb', buffering=0) as other:
        with contextlib.suppress(OSError):
            while True:
                other.write(bytes(4096))
    goes_on = assert_goes_on(arguments, child, card / 'full')
    next(goes_on)
    os.remove(str(card / 'other'))
    next(goes_on)


def test_a_card_that_becomes_read_only_costs_no_run(card):
    arguments = command(card, 'full', '--train_type', 'full_training', '--num_epochs', '8')
    child = started(arguments)
    assert wait_until_it_trains(child, card / 'full')
    subprocess.check_call(['mount', '--bind', str(card), str(card)])
    while subprocess.call(['mount', '-o', 'remount,bind,ro', str(card)],
                          stderr=subprocess.DEVNULL):
        pass  # while a file is being written
    goes_on = assert_goes_on(arguments, child, card / 'full')
    next(goes_on)
    subprocess.check_call(['umount', '-l', str(card)])
    next(goes_on)


def test_a_profile_that_may_not_be_written_is_an_error_and_leaves_nothing(logs, tmp_path):
    arguments = command(tmp_path, 'one', '--model_name', str(logs / keras_stack.MODEL_FILE))
    limited = ['bash', '-c', 'ulimit -f 16; exec "$@"', 'bash'] + arguments
    code, out, err = finished(limited)
    assert code == 2 and 'Traceback' not in err and 'error: ' in err, err
    assert not (tmp_path / 'one').exists()
    code, out, err = finished(arguments)
    assert code == 0, err


def test_a_summary_that_cannot_be_written_keeps_the_checkpoint(tmp_path):
    folder = str(tmp_path / 'run')
    recorder = Recorder(folder, open_run(folder, {}))
    checkpoint.write(folder, dict(written=0.0))
    with files_of_at_most(500), pytest.raises(OSError):
        recorder.finish(dict(note='x' * 1000))
    assert checkpoint.read(folder) is not None
    assert not os.path.exists(os.path.join(folder, 'summary.json'))
