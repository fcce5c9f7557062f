"""Cuts the power after each operation of a run: from what may be left, the run resumes.

A power cut loses what was not flushed to the disk, which killing a process does not. Here each
state that a cut may leave is built from a record of the run (tests/support/disks.py), and the same
command decides where it begins. The thorough tests then run it, from some such places.
"""

import csv

import pytest

import main
from disk_runs import FINISHED, STARTS, Disk, folder_in_memory
from disks import states, write_tree
from elastic.errors import UserError

STRIDE = 3  # one in so many states is tried: at 5, one of the flushes could be left out unnoticed


@pytest.fixture(scope='module')
def cut():
    """Returns a Disk after a whole run, and the Recording of that run."""
    with folder_in_memory() as folder:
        disk = Disk(folder)
        yield disk, disk.recorded()


def begins(disk, state):
    write_tree(state.tree, disk.root)
    return disk.begins(state.reached)


def places(disk, recording):
    """Returns {place: a State from which the command begins there}, of one in STRIDE States."""
    return {begins(disk, state): state for state in states(recording)[::STRIDE]}


def assert_ends_whole(disk, state):
    """Checks that from this State the command ends as a run that nothing interrupts."""
    write_tree(state.tree, disk.root)
    assert main.main(disk.command) == 0
    disk.assert_complete()
    assert disk.names() == disk.whole[1]


def test_a_run_begins_at_its_last_checkpoint_or_later_after_a_power_cut(cut):
    steps = {(epoch, step) for epoch in (1, 2) for step in (1, 2, 3)}
    assert set(places(*cut)) >= steps | {STARTS, FINISHED}


@pytest.mark.thorough
def test_a_run_ends_whole_after_a_power_cut(cut):
    """The resumed run is cut, too: it shortens its records to those of the checkpoint."""
    disk, recording = cut
    for _, state in sorted(places(disk, recording).items())[2::3]:
        assert_ends_whole(disk, state)
    ahead = max((state for state in states(recording) if state.reached == (1, 3)),
                key=lambda state: len(state.tree.get('logs/run/epochs.csv', b'')))
    write_tree(ahead.tree, disk.root)
    again = places(disk, disk.recorded())
    assert len(again) >= 5
    assert_ends_whole(disk, again[2, 1])


@pytest.mark.thorough
def test_a_restarted_run_leaves_the_old_one_or_a_new_one_after_a_power_cut(cut):
    disk, recording = cut
    write_tree(states(recording)[-1].tree, disk.root)
    left = places(disk, disk.recorded('--restart'))
    for place in (STARTS, FINISHED):
        assert_ends_whole(disk, left[place])


def test_a_failed_run_leaves_nothing_in_the_way_after_a_power_cut(cut):
    with folder_in_memory() as folder:
        disk = Disk(folder)
        disk.command += ['--learning_rate', '1e30', '--checkpoint_minutes', '99']
        left = states(disk.recorded(ends=STARTS))
        assert len(left) > 40 and {begins(disk, state) for state in left} == {STARTS}


@pytest.mark.parametrize('unflushed', [
    'resume/last.part', 'resume', 'run', 'logs', 'epochs.csv', 'predictions.csv.part',
    'summary.json.part', 'epochs.txt.part', 'run/settings.json.part', 'checkpoint.part',
    'checkpoint.part/class_names.txt'])
def test_a_missing_flush_is_noticed(cut, unflushed):
    disk, recording = cut
    left = states(recording, lose=lambda path: path.endswith('/' + unflushed))[::STRIDE]
    for state in sorted(left, key=lambda state: state.reached or STARTS, reverse=True):
        try:
            begins(disk, state)
        except (AssertionError, OSError, UserError, ValueError, csv.Error):
            return
    pytest.fail('no state differs')
