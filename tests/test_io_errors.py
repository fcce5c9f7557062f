"""Fails each operation of a short run on its disk, one run each: nothing is lost.

SLOW_TESTS=1 fails each operation; CI a few of them.
"""

import collections
import contextlib
import errno
import itertools
import os

import pytest

import main
import profiler
from disk_runs import FINISHED, Disk, folder_in_memory, place_of
from disks import Watch, write_tree
from elastic import command_line
from elastic.runs import checkpoint
from fixed_tables import fixed_profile
from small_runs import SLOW

SHARE = 1 if SLOW else 40  # one in so many operations fails
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
    reached, write = [None], checkpoint.write

    def written(folder, tree):
        write(folder, tree)
        reached.append(place_of(tree))
    with pytest.MonkeyPatch.context() as patch, Watch(disk.root, failing):
        patch.setattr(checkpoint, 'write', written)
        with pytest.raises(SystemExit) as stop:
            command_line.run(main.main, disk.command)
    return stop.value.code, reached[-1]


def failures(seen):
    """Returns the numbers of the operations to fail; of many writes in a row the first and last."""
    rows = [[number for number, _ in row] for _, row in itertools.groupby(
        enumerate(seen), lambda item: item[1])]
    return [number for row in rows for number in sorted({row[0], row[-1]})]


@pytest.mark.parametrize('number', [errno.EIO, errno.ENOSPC])
def test_a_run_survives_the_failure_of_an_operation(monkeypatch, capsys, number):
    monkeypatch.setattr(profiler, 'profile_model', fixed_profile)
    with folder_in_memory() as folder:
        disk, listed, outcomes = Disk(folder), Failing(), collections.Counter()
        disk.recorded()
        write_tree({}, disk.root)
        assert ended(disk, listed)[0] == 0
        for fails in failures(listed.seen)[number % SHARE::SHARE]:
            write_tree({}, disk.root)
            capsys.readouterr()
            code, reached = ended(disk, Failing(fails, number))
            out, err = capsys.readouterr()
            continues = 'no checkpoint could be written' in out or listed.seen[fails][0] in QUIET
            assert code == 0 and not err and continues or (
                code == 2 and err.startswith('error: ') and err.count('\n') == 1
                and os.strerror(number) in err), (listed.seen[fails], code, err)
            disk.begins(FINISHED if code == 0 else reached)  # nothing is lost
            assert main.main(disk.command) == 0
            disk.assert_complete()
            assert disk.names() == disk.whole[1]
            outcomes[listed.seen[fails][0], code] += 1
        assert sum(outcomes.values()) > (100 if SLOW else 4)
