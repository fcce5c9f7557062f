"""Tests --train_tensors: a run trains the tensors that the user chose, and predicts their time."""

import os
import re

import numpy as np
import pytest
from tensorflow import keras

import main
from cached_runs import network
from elastic.files import read_json
from elastic.runs.folder import read_run
from fixed_tables import store_table
from refusals import assert_refused
from small_runs import quick_flags


@pytest.fixture
def run_flags(tmp_path):
    """Returns the flags of a run on a small network."""
    keras.backend.clear_session()  # so that layers are counted from the first
    (tmp_path / 'logs').mkdir()
    return quick_flags(
        tmp_path, '--prefix_cache', 'auto', '--num_epochs', '4', '--learning_rate', '0.05',
        '--save_model', '--logs_dir', str(tmp_path / 'logs'), '--run_name', 'chosen')


@pytest.mark.parametrize('expression, trained', [
    ('^conv2d_3/|head/bias', [6, 7, 9]),
    pytest.param('conv2d/kernel|bias', [0, 1, 3, 5, 7, 9], marks=pytest.mark.thorough)])
def test_the_chosen_tensors_train_and_no_others(run_flags, tmp_path, capsys, expression, trained):
    flags = run_flags + ['--train_tensors', expression]
    store_table(flags)
    assert main.main(flags) == 0
    line, = re.findall('training {} of 10 tensors: (.*) ms/step predicted = (.*) of full'.format(
        len(trained)), capsys.readouterr().out)
    assert 0 < float(line[1]) < 1
    folder = tmp_path / 'logs' / 'chosen'
    before = network().get_weights()
    with np.load(str(folder / 'checkpoint' / 'weights.npz')) as stored:
        after = [stored[name] for name in sorted(stored.files) if name.startswith('trainable')]
    moved = [i for i, (old, new) in enumerate(zip(before, after)) if not np.array_equal(old, new)]
    assert moved == trained
    summary = read_run(str(folder)).summary
    assert (summary['scheme'], summary['train_tensors']) == ('chosen_tensors', expression)
    assert 'read_step_ms' in summary or 0 in trained  # it reads the prefix cache
    assert read_json(str(folder / 'settings.json'))['rho'] is None


@pytest.mark.parametrize('expression, words', [
    ('conv_9', "'conv_9' matches none of the 10 tensors; some of them are conv2d/kernel, "),
    ('.', "'.' matches all 10 tensors; use --train_type full_training")])
def test_an_expression_for_no_tensor_or_all_is_refused(run_flags, tmp_path, expression, words):
    with pytest.raises(main.UserError, match=words):
        main.main(run_flags + ['--train_tensors', expression])
    assert os.listdir(str(tmp_path / 'logs')) == []


@pytest.mark.parametrize('arguments, words', [
    (['--train_tensors', '('], "--train_tensors '(' is not a regular expression: "),
    (['--train_type', 'chosen_tensors'], '--train_type chosen_tensors needs --train_tensors'),
    (['--train_tensors', 'head', '--train_type', 'full_training'],
     '--train_tensors and --train_type full_training both say what is trained')])
def test_contradictory_flags_are_refused(run_flags, tmp_path, capsys, arguments, words):
    assert_refused(run_flags + arguments, words, tmp_path / 'logs', capsys)
