"""Tests whole runs of main.py on two workers: real processes on this machine."""

import os
import shutil
import time

import pytest

from elastic.runs.folder import read_run
from elastic.workers.addresses import tables_folder
from fixed_tables import store_table
from small_runs import final_of, outcome, quick_flags
from worker_processes import ended, free_addresses, output_of, workers

pytestmark = pytest.mark.thorough
EPOCHS = 30  # so many that the run is not over before it is killed


def run_flags(folder, *more):
    return quick_flags(folder, '--save_model', '--num_epochs', str(EPOCHS), '--rho', '1',
                       '--interval', '10', *more)


def one_line(output):
    """Returns the last line; fails if there is a traceback."""
    assert 'Traceback' not in output, output
    return output.strip().split('\n')[-1]


@pytest.fixture(scope='module')
def elastic(tmp_path_factory):
    """Returns the folder of an elastic run on two workers, and their (exit status, output)."""
    folder = tmp_path_factory.mktemp('elastic')
    table = os.path.dirname(store_table(run_flags(folder)))  # each worker finds its own
    shutil.copytree(table, os.path.join(tables_folder(str(folder), 1), os.path.basename(table)))
    return folder, ended(workers(free_addresses(2), *run_flags(folder, '--run_name', 'run')))


def test_elastic_training_on_two_workers(elastic):
    folder, found = elastic
    assert [status for status, _ in found] == [0, 0], found
    assert len({final_of(output) for _, output in found}) == 1
    selected = [[line.split(':')[0] for line in output.split('\n')
                 if line.startswith('selected')] for _, output in found]
    assert selected[0] == selected[1] and len(selected[0]) == 3
    assert all('timing table: ' in output and 'ms for each MB of gradients' in output
               for _, output in found)
    run = read_run(str(folder / 'run'))
    assert run.summary['workers'] == 2 and len(run.epochs['epoch']) == EPOCHS
    folders = {name for name in os.listdir(str(folder)) if os.path.isdir(str(folder / name))}
    assert {name for name in folders if not name.endswith('_profile')} == {'run', 'worker1'}


def test_workers_with_other_flags_are_refused_by_name(elastic):
    folder, addresses = elastic[0], free_addresses(2)
    found = ended(workers(addresses, *run_flags(folder, '--run_name', 'refused'),
                          each=lambda index: ['--seed', '7'] if index == 1 else []))
    assert [status for status, _ in found] == [2, 2], found
    for _, output in found:
        assert 'worker 1 ({}) has seed 7'.format(addresses[1]) in one_line(output)
    assert not os.path.exists(str(folder / 'refused'))


def test_a_run_with_a_killed_worker_ends_as_an_unbroken_one(elastic):
    folder, addresses = elastic[0], free_addresses(2)
    flags = run_flags(folder, '--run_name', 'killed')
    processes = workers(addresses, *flags)
    while 'epoch  2/' not in output_of(processes[1]) and processes[1].poll() is None:
        time.sleep(0.01)
    processes[1].kill()
    status, output = ended(processes)[0]
    assert status == 1 and 'worker 1 ({}) no longer answers'.format(
        addresses[1]) in one_line(output), output
    found = ended(workers(free_addresses(2), *flags))
    assert [status for status, _ in found] == [0, 0], found
    assert 'resumes in epoch' in found[0][1]
    assert outcome(folder / 'killed') == outcome(folder / 'run')
