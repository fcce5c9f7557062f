"""Tests that workers train as one process does on the joint batch."""

import os

import numpy as np
import pytest

from small_models import assert_same_values
from small_steps import N
from worker_processes import ended, free_addresses, start
from worker_steps import CASES, WORKERS, trained

SCRIPT = os.path.join('tests', 'support', 'worker_steps.py')
# Of a tensor's largest weight. float16 rounds the gradients of 8 and of 4 + 4 images differently.
RELATIVE = {'float16 sgd': 2e-3}


@pytest.fixture(scope='module')
def of_workers(tmp_path_factory):
    """Returns the arrays of each case on each worker."""
    folder, addresses = tmp_path_factory.mktemp('workers'), ','.join(free_addresses(WORKERS))
    paths = [str(folder / '{}.npz'.format(index)) for index in range(WORKERS)]
    for status, output in ended([start(SCRIPT, addresses, index, path)
                                 for index, path in enumerate(paths)]):
        assert status == 0, output
    return [dict(np.load(path)) for path in paths]


def arrays_of(name, found):
    count = sum(key.startswith(name + ' ') for key in found)
    return [found['{} {}'.format(name, i)] for i in range(count)]


@pytest.mark.parametrize('name', sorted(CASES))
def test_workers_train_as_one_process_does_on_the_joint_batch(name, of_workers):
    expected = trained(name, range(WORKERS))
    found = arrays_of(name, of_workers[0])
    assert len(found) == len(expected)
    weights = N if CASES[name][2] else len(found)  # without float16, the optimizer's slots, too
    for array, wanted in zip(found[:weights], expected):
        within = RELATIVE.get(name, 1e-5) * max(1e-30, np.abs(wanted).max())
        np.testing.assert_allclose(array, wanted, rtol=0, atol=within)


@pytest.mark.parametrize('name', sorted(CASES))
def test_all_workers_end_with_the_same_bits(name, of_workers):
    assert_same_values(*[arrays_of(name, found) for found in of_workers])


def test_moving_statistics_become_the_mean_of_all_workers(of_workers):
    before, after = [[found[name] for found in of_workers] for name in ('before', 'after')]
    assert before[0].shape == (2, 432) and not np.allclose(before[0], before[1])
    assert after[0].tobytes() == after[1].tobytes()
    np.testing.assert_allclose(after[0], np.mean(before, axis=0), rtol=1e-5, atol=1e-8)


def test_an_overflow_on_one_worker_skips_the_step_on_all(of_workers):
    """An overflow halves the loss scale, which begins at 2 ** 15."""
    assert [arrays_of('float16 sgd', found)[-2] for found in of_workers] == [2.0 ** 14] * 2
