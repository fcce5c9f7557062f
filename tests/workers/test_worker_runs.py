"""Tests whole runs of main.py on two workers: real processes on this machine."""

import os
import shutil
import signal
import time

import numpy as np
import pytest

from elastic.runs.folder import read_run
from small_runs import SLOW, outcome, quick_flags
from worker_processes import ended, free_addresses, output_of, start, workers

KILLS = 10 if SLOW else 1
EPOCHS = 400 if SLOW else 120


def run_flags(tmp_path, *more):
    return quick_flags(tmp_path, '--run_name', 'run', '--save_model', *more)


def one_line(output):
    """Returns the last line; fails if there is a traceback."""
    assert 'Traceback' not in output, output
    return output.strip().split('\n')[-1]


def test_elastic_training_on_two_workers(tmp_path):
    found = ended(workers(free_addresses(2), *run_flags(
        tmp_path, '--rho', '1', '--interval', '1', '--closed_loop', '1')))
    assert [status for status, _ in found] == [0, 0], found
    assert len({one_line(output).split(', trained')[0] for _, output in found}) == 1
    selected = [[line.split(':')[0] for line in output.split('\n')
                 if line.startswith('selected')] for _, output in found]
    assert selected[0] == selected[1] and len(selected[0]) == 2
    run = read_run(str(tmp_path / 'run'))
    assert run.summary['workers'] == 2 and len(run.epochs['epoch']) == 2
    folders = {name for name in os.listdir(str(tmp_path)) if os.path.isdir(str(tmp_path / name))}
    assert {name for name in folders if not name.endswith('_profile')} == {'run', 'worker1'}


@pytest.mark.parametrize('flag, value, there', [('--seed', '7', 'seed 7'),
                                                ('--train_images', '40', 'train_images 40')])
def test_workers_with_other_flags_are_refused_by_name(flag, value, there, tmp_path):
    addresses = free_addresses(2)
    found = ended(workers(addresses, *run_flags(tmp_path),
                          each=lambda index: [flag, value] if index == 1 else []))
    assert [status for status, _ in found] == [2, 2], found
    for _, output in found:
        assert 'worker 1 ({}) has {}'.format(addresses[1], there) in one_line(output)
    assert not os.path.exists(str(tmp_path / 'run'))


def test_the_profiler_prints_what_the_exchange_takes(tmp_path):
    flags = quick_flags(tmp_path)
    chosen = [word for name in ('--model_name', '--bn_statistics', '--input_size', '--batch_size',
                                '--dataset_name', '--logs_dir', '--num_epochs')
              for word in (name, flags[flags.index(name) + 1])]
    addresses = free_addresses(2)
    found = ended([start('profiler.py', *chosen, '--workers', ','.join(addresses),
                         '--worker_index', index) for index in range(2)])
    for status, output in found:
        assert status == 0 and 'exchange with the other workers' in output, output
        assert 'ms for each MB of gradients' in output


def epoch_2_of(epochs):
    """Returns how the line of the second epoch begins."""
    return 'epoch {:>{}}/'.format(2, len(str(epochs)))


def killed(processes, index, text, seconds=0.0):
    """Kills worker `index` some seconds after it has printed `text`; returns what `ended` does."""
    while text not in output_of(processes[index]) and processes[index].poll() is None:
        time.sleep(0.05)
    time.sleep(seconds)
    processes[index].kill()
    return ended(processes)


@pytest.mark.parametrize('scheme', [
    ['--rho', '1', '--interval', '5'],
    ['--train_type', 'traditional_tl_training', '--prefix_cache', 'on']])
def test_a_run_whose_workers_are_killed_ends_as_an_unbroken_one(scheme, tmp_path):
    """Both begin from the first checkpoint, which holds what was measured before it."""
    flags, rng = ['--num_epochs', str(EPOCHS)] + scheme, np.random.RandomState(0)
    found = killed(workers(free_addresses(2), *run_flags(tmp_path, *flags)), 1, epoch_2_of(EPOCHS))
    assert 'no longer answers' in one_line(found[0][1]), found
    shutil.copytree(str(tmp_path / 'run'), str(tmp_path / 'unbroken'))
    for _ in range(KILLS):
        addresses, index = free_addresses(2), int(rng.randint(2))
        found = killed(workers(addresses, *run_flags(tmp_path, *flags)), index, 'keeps the records',
                       rng.uniform(0, 3))
        status, output = found[1 - index]
        assert status == 1 and 'worker {} ({}) no longer answers'.format(
            index, addresses[index]) in one_line(output), output
    for name in ('run', 'unbroken'):
        found = ended(workers(free_addresses(2), *run_flags(tmp_path, *flags, '--run_name', name)))
        assert [status for status, _ in found] == [0, 0], found[0][1] + found[1][1]
        if 'on' in scheme:
            assert read_run(str(tmp_path / name)).summary['cache_hits'] > 0
    assert outcome(tmp_path / 'run') == outcome(tmp_path / 'unbroken')


def workers_in_epoch_2(tmp_path):
    """Returns the processes of a run of full training that have trained for two epochs."""
    processes = workers(free_addresses(2), *run_flags(
        tmp_path, '--num_epochs', '400', '--train_type', 'full_training'))
    while epoch_2_of(400) not in output_of(processes[0]) and processes[0].poll() is None:
        time.sleep(0.05)
    return processes


def test_a_worker_that_is_stopped_by_a_signal_stops_all(tmp_path):
    processes = workers_in_epoch_2(tmp_path)
    processes[0].send_signal(signal.SIGTERM)
    (first, said), (second, also) = ended(processes)
    assert first == 128 + signal.SIGTERM and 'stopped by SIGTERM in epoch' in one_line(said)
    assert second == 1 and 'worker 0' in one_line(also)
    assert os.path.exists(str(tmp_path / 'run' / 'resume' / 'last'))


@pytest.mark.skipif(not SLOW, reason='waits for half a minute')
def test_a_worker_that_hangs_stops_all(tmp_path):
    processes = workers_in_epoch_2(tmp_path)
    processes[1].send_signal(signal.SIGSTOP)
    status, output = ended(processes[:1])[0]
    processes[1].kill()
    ended(processes)
    assert status == 1 and 'worker 1' in one_line(output)
