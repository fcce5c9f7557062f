"""Tests that a run does not slow down as it gets longer: what it keeps and writes is linear."""

import contextlib
import os

import pytest

import main
from disk_runs import place_of
from disks import Watch
from elastic.files import PART
from elastic.runs import checkpoint
from elastic.runs.session import RECORDS
from fixed_tables import store_table
from small_runs import quick_flags

EPOCHS, STEPS = 30, 2
# Bytes of a checkpoint for each epoch: start and end of three stretches of training, and number,
# sum and median of its steps. A record of an epoch has 200.
GROWTH = 3 * 16 + 3 * 8
DIGITS = 200  # bytes by which numbers may get longer


@pytest.mark.thorough
def test_a_checkpoint_holds_no_records_and_files_grow_with_the_epochs(tmp_path):
    sizes, folder = [], tmp_path / 'run'

    @contextlib.contextmanager
    def watch(operation, path):
        """Measures the files at the checkpoint after the first step of each epoch."""
        yield
        if operation == 'replace' and path.endswith('last' + PART) and place_of(
                checkpoint.read(str(folder), RECORDS)) == (len(sizes) + 1, 1):
            sizes.append({path.name.split('.')[0]: path.stat().st_size
                          for path in folder.iterdir() if path.is_file()})
            sizes[-1]['checkpoint'] = os.path.getsize(str(folder / 'resume' / 'last'))
    flags = quick_flags(
        tmp_path, '--train_images', str(8 * STEPS), '--validation_steps', '1', '--num_epochs',
        str(EPOCHS + 1), '--train_type', 'elastic_training', '--rho', '0.7', '--interval', '1',
        '--checkpoint_minutes', '1e-9', '--run_name', 'run')
    store_table(flags)
    with Watch(str(folder), watch):
        assert main.main(flags) == 0
    assert len(sizes) == EPOCHS + 1
    third, half, end = sizes[EPOCHS // 3], sizes[2 * EPOCHS // 3], sizes[EPOCHS]
    for before, after in ((third, half), (half, end)):
        grown = {name: after[name] - before[name] for name in before}
        assert grown['checkpoint'] <= EPOCHS // 3 * GROWTH + DIGITS
        for name in ('epochs', 'selections', 'events'):
            assert 0 < grown[name] < 1.1 * third[name]
