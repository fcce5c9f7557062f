"""Cuts the power after each operation of a run: from all that may be left, the run resumes.

A power cut loses what was not flushed to the disk, which killing a process does not. Here each
state that a cut may leave is built from a record of the run (tests/support/disks.py), and the same
command decides where it begins. Whole runs from all different decisions: SLOW_TESTS=1; else from
one for each checkpoint.
"""

import pytest

import main
import profiler
from disk_runs import FINISHED, STARTS, Disk, folder_in_memory
from disks import write_tree
from elastic.command_line import UserError
from fixed_tables import fixed_profile
from small_runs import SLOW


@pytest.fixture(scope='module', autouse=True)
def fixed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, 'profile_model', fixed_profile)
        yield


def begins(disk, state):
    write_tree(state.tree, disk.root)
    return disk.begins(state.reached)


def assert_survived(disk, left, runs_from=()):
    """Checks that from each of these States the command ends as a run that nothing interrupts.

    runs_from: places from which whole runs suffice, unless SLOW.
    """
    kinds = {}
    for state in left:
        place = begins(disk, state)
        kinds[place, SLOW and frozenset(disk.left().items())] = state
    for (place, _), state in kinds.items():
        if not SLOW and runs_from and place not in runs_from:
            continue
        write_tree(state.tree, disk.root)
        assert main.main(disk.command) == 0
        disk.assert_complete()
        assert disk.names() == disk.whole[1]
    return len(kinds)


@pytest.fixture
def folder():
    with folder_in_memory() as path:
        yield path


def test_a_run_resumes_or_starts_after_a_power_cut(folder):
    """The resumed run is cut, too: it shortens its records to those of the checkpoint."""
    disk = Disk(folder)
    left = disk.recorded()
    assert len(left) > 300 and assert_survived(disk, left) > 7
    ahead = max((state for state in left if state.reached == (1, 3)),
                key=lambda state: len(state.tree.get('logs/run/epochs.csv', b'')))
    write_tree(ahead.tree, disk.root)
    again = disk.recorded()
    assert len(again) > 200 and assert_survived(disk, again, [(2, 1)]) > 4


def test_a_restarted_run_leaves_the_old_one_or_a_new_one_after_a_power_cut(folder):
    disk = Disk(folder)
    disk.recorded()
    assert_survived(disk, disk.recorded('--restart'), [STARTS, FINISHED])


def test_a_failed_run_leaves_nothing_in_the_way_after_a_power_cut(folder):
    disk = Disk(folder)
    disk.command += ['--learning_rate', '1e30', '--checkpoint_minutes', '99']
    left = disk.recorded(ends=STARTS)
    assert len(left) > 40 and {begins(disk, state) for state in left} == {STARTS}


UNFLUSHED = ['resume/last.part', 'resume', 'run', 'epochs.csv'] + SLOW * [
    'logs', 'run/settings.json.part', 'predictions.csv.part', 'summary.json.part',
    'epochs.txt.part', 'checkpoint', 'checkpoint/class_names.txt']


@pytest.mark.parametrize('unflushed', UNFLUSHED)
def test_a_missing_flush_is_noticed(folder, unflushed):
    disk = Disk(folder)
    left = disk.recorded(lose=lambda path: path.endswith('/' + unflushed))
    for state in sorted(left, key=lambda state: state.reached or STARTS, reverse=True):
        try:
            begins(disk, state)
        except (AssertionError, UserError, ValueError):
            return
    pytest.fail('no state differs')
