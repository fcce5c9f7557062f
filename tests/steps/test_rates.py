"""Tests the range test of --learning_rate auto: what it finds, leaves as it was, and records."""

import os

import numpy as np
import pytest
import tensorflow as tf

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.flags import check_arguments, parse_arguments
from elastic.runs.folder import read_rows
from elastic.settings import AUTO, Settings
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import optimizer_for
from elastic.steps.rates import HIGHEST, LOWEST, STEPS, found_in, range_test
from elastic.workers.cluster import ALONE
from small_runs import outcome, quick_flags, script
from small_steps import N, batch, conv_stack

RATES = np.geomspace(LOWEST, HIGHEST, STEPS)
BEFORE = np.random.RandomState(0).uniform(1, 4, STEPS)  # some batches are harder


class Epochs:
    """Stands for the length of a run."""
    steps = 10


def fall(turn):
    """Returns the RangeTest of a loss that falls from step 8 to `turn`, then rises."""
    left = 1 + np.random.RandomState(0).normal(0, 0.01, STEPS)
    left -= 0.03 * np.clip(np.arange(STEPS) - 8, 0, turn - 8)
    left[turn:] += 0.1 * np.arange(STEPS - turn) ** 2.0
    return found_in(RATES, BEFORE, BEFORE * left)


@pytest.mark.parametrize('turn', [20, 25, 35])
def test_the_rate_is_two_thirds_of_that_around_which_the_loss_fell(turn):
    test = fall(turn)
    assert RATES[(8 + turn) // 2] < test.centre < RATES[turn]
    assert test.rate == pytest.approx(test.centre / 1.5)
    assert fall(turn - 5).centre < test.centre


def test_noise_on_a_flat_curve_hardly_moves_the_rate():
    found = []
    for seed in range(20):
        left = 1 + np.random.RandomState(seed).normal(0, 0.05, STEPS)
        left -= 0.5 * np.clip((np.arange(STEPS) - 8) / 6, 0, 1)  # flat from step 14 on
        left[34:] += 1
        found.append(found_in(RATES, BEFORE, BEFORE * left).rate)
    assert max(found) < 1.5 * min(found)


def test_what_is_not_a_number_ends_the_test():
    losses = 2 - 0.05 * np.arange(20.0)
    ended = found_in(RATES, np.full(STEPS, 2.0), np.append(losses, [np.nan] * 3))
    assert len(ended.rates) == 20
    assert ended.rate == found_in(RATES[:20], np.full(20, 2.0), losses).rate


@pytest.mark.parametrize('left', [
    np.ones(STEPS), np.linspace(1, 4, STEPS), 3 + np.random.RandomState(1).normal(0, 1, STEPS),
    np.full(5, 0.5)])
def test_a_loss_that_does_not_fall_is_refused(left):
    with pytest.raises(UserError, match='--learning_rate auto cannot tell: .*; give a rate'):
        found_in(RATES, BEFORE, BEFORE[:len(left)] * left)


def test_a_test_finds_a_rate_and_leaves_nothing_changed():
    model, (inputs, labels) = conv_stack(), batch()
    optimizer = optimizer_for(Epochs, Settings(learning_rate=AUTO, warmup_steps=5),
                              model.trainable_variables)
    maker = StepMaker(model, optimizer, 0.0, inputs, labels)
    step, schedule = maker.step(np.arange(N) > 1), keras_stack.schedule(optimizer)
    before = [variable.numpy() for variable in maker.everything]
    test = range_test(step, schedule, lambda: [(inputs, labels)] * STEPS, maker, ALONE)
    for old, variable in zip(before, maker.everything):
        assert np.array_equal(old, variable.numpy())
    assert LOWEST < test.rate < HIGHEST and test.change.min() < -0.02
    schedule.at(tf.constant(0), test.rate)
    assert float(keras_stack.learning_rate(optimizer)) == pytest.approx(test.rate)


def test_a_run_records_its_test_and_repeats_it(tmp_path):
    flags = quick_flags(tmp_path, '--train_type', 'full_training', '--learning_rate', AUTO,
                        '--save_model')
    for name in ('a', 'b'):
        status, output, error = script('main.py', *flags, '--run_name', name)
        assert status == 0, error
        assert 'learning rate ' in output
    assert outcome(str(tmp_path / 'a')) == outcome(str(tmp_path / 'b'))
    rows = read_rows(str(tmp_path / 'a'), 'rates.csv', {'chosen': float, 'learning_rate': float})
    assert 0 < len(rows) <= STEPS and len({row['chosen'] for row in rows}) == 1
    first, second = read_rows(str(tmp_path / 'a'), 'epochs.csv', dict.fromkeys(
        ('learning_rate', 'train_loss'), float))
    assert 0 < first['learning_rate'] < rows[0]['chosen']
    assert second['train_loss'] < first['train_loss']  # it neither diverges nor stands still
    status, output, error = script('plot.py', 'rates', 'a', '--logs_dir', str(tmp_path),
                                   '--output', str(tmp_path / 'rates'))
    assert status == 0, error
    assert os.path.getsize(str(tmp_path / 'rates.png')) > 10000


def test_a_deadline_finds_its_rate_unless_one_is_given():
    assert parse_arguments(['--deadline', '5m']).learning_rate == AUTO
    assert parse_arguments(['--deadline', '5m', '--learning_rate', '0.1']).learning_rate == 0.1
    assert parse_arguments([]).learning_rate == Settings().learning_rate
    with pytest.raises(SystemExit):
        parse_arguments(['--learning_rate', 'automatic'])
    with pytest.raises(UserError, match='--learning_rate auto needs --validation_share'):
        check_arguments(parse_arguments(
            ['--learning_rate', AUTO, '--head_start', 'solved', '--dataset_name', 'digits']))
