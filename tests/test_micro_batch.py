"""Tests --micro_batch of main.py: runs equal those of whole batches, and what does not fit it."""

import csv
import json

import numpy as np
import pytest

import main
from elastic.flags import check_arguments, parse_arguments
from refusals import assert_refused
from small_runs import flags, quick_flags
from timing_tables import op_times, table_of


@pytest.mark.parametrize('arguments, words', [
    (['3'], '--micro_batch 3 does not divide --batch_size 64; allowed: 1, 2, 4, 8, 16, 32, 64'),
    (['0'], '--micro_batch'), (['16', '--bn_statistics', 'train'], 'add --bn_statistics frozen'),
    (['16', '--prefix_cache', 'on'], 'leave --prefix_cache on out'),
    (['16', '--workers', 'localhost:2001,localhost:2002', '--worker_index', '0'],
     '--workers average whole batches')])
def test_a_micro_batch_that_does_not_fit_is_refused(tmp_path, capsys, arguments, words):
    given = flags(tmp_path, '--bn_statistics', 'frozen', '--micro_batch')
    assert_refused(given + arguments, words, tmp_path, capsys)


def test_a_micro_batch_of_the_whole_batch_changes_nothing(tmp_path):
    given = flags(tmp_path, '--bn_statistics', 'train')
    plain, whole = (check_arguments(parse_arguments(given + more))
                    for more in ([], ['--micro_batch', '64']))
    assert vars(plain) == vars(whole)


def run(logs, name, *more):
    """Returns the losses of a run's epochs, its weights, and its summary."""
    assert main.main(quick_flags(logs, '--run_name', name, *more)) == 0
    with open(str(logs / name / 'epochs.csv')) as source:
        losses = [(float(row['train_loss']), float(row['test_loss']))
                  for row in csv.DictReader(source)]
    with np.load(str(logs / name / 'checkpoint' / 'weights.npz')) as weights:
        arrays = [weights[name] for name in weights.files if weights[name].dtype.kind == 'f']
    return losses, arrays, json.loads((logs / name / 'summary.json').read_text())


@pytest.mark.parametrize('scheme', [
    ['--train_type', 'full_training'], ['--train_tensors', 'head|bias'],
    ['--train_type', 'prunetrain', '--prune_interval', '1', '--prune_threshold', '0.2'],
    ['--interval', '0', '--rho', '1']], ids=['full', 'chosen', 'pruned', 'elastic'])
def test_runs_in_micro_batches_train_as_with_whole_batches(tmp_path, scheme):
    whole, parts = (run(tmp_path, name, *scheme, *more) for name, more in (
        ('whole', []), ('parts', ['--micro_batch', '2'])))
    assert parts[2]['micro_batch'] == 2 and whole[2]['micro_batch'] is None
    if scheme[0] != '--interval':  # the table of a tiny network is too noisy to select alike
        np.testing.assert_allclose(parts[0], whole[0], rtol=1e-4)
        for found, expected in zip(parts[1], whole[1]):
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_table_of_repeated_passes_has_one_update():
    table = table_of(op_times({0b11: 2.0, 0b01: 1.0, 0b10: 3.0}, 2))
    steps = [each.t_step for each in (table, table.repeated(4))]
    assert steps[1] == pytest.approx(4 * steps[0] - 3 * table.t_update)
