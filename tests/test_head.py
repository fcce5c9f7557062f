"""Tests whole runs with --head stages and --head_start solved."""

import json
import os

import numpy as np
import pytest
from tensorflow import keras

import datasets
import main
import train
from cached_runs import network
from elastic.compat import keras_stack
from elastic.compat.keras_stack import MODEL_FILE
from elastic.errors import UserError
from elastic.runs import checkpoint
from elastic.runs.folder import read_run
from elastic.runs.session import RECORDS
from elastic.schemes.ridge import needed_bytes
from elastic.schemes.solved_head import HALVINGS, features_in_memory, safe_scale, solve_head
from elastic.settings import Settings
from elastic.steps.training_step import evaluation_function
from elastic.workers.cluster import ALONE
from fixed_tables import store_table
from models import build_model
from refusals import assert_refused
from small_models import saved
from small_runs import final_of, outcome, quick_flags, run_settings_of, script, stopped_at
from worker_processes import ended, free_addresses, workers

STARTS = ' on digits, '  # the first words that a run prints once signals wait
HEAD_ONLY = ['--train_type', 'traditional_tl_training']
SOLVED = ['--head', 'stages', '--head_start', 'solved']


def head_flags(tmp_path, *more):
    """Returns flags that solve the head of a small network, and train no more."""
    flags = quick_flags(tmp_path, *HEAD_ONLY, *more)
    for name in ('--num_epochs', '--train_images'):
        at = flags.index(name)
        flags = flags[:at] + flags[at + 2:]
    return flags + ['--train_images', '480']


def accuracy(path, data):
    model = keras.models.load_model(path, compile=False)
    hits = [np.argmax(model(images, training=False), axis=1) == labels.numpy()
            for images, labels in data]
    return np.mean(np.concatenate(hits))


@pytest.mark.parametrize('head', ['last', 'stages'])
def test_a_head_is_solved_in_one_epoch_and_saved_as_plain_keras(head, tmp_path, capsys):
    assert main.main(head_flags(tmp_path, '--head', head, '--head_start', 'solved', '--save_model',
                                '--warmup_steps', '60', '--run_name', 'run')) == 0
    out = capsys.readouterr().out
    assert 'epoch 1/1' in out and 'no prefix cache' not in out
    run = read_run(str(tmp_path / 'run'))
    summary, = [run.summary]
    assert (summary['head'], summary['head_start']) == (None if head == 'last' else head, 'solved')
    assert summary['epochs'] == 1 and summary['step_seconds'] == 0 < summary['head_seconds']
    assert summary['train_seconds'] == pytest.approx(
        summary['head_seconds'] + summary['selection_seconds'])
    trained = {row.name for row in run.selections if row.selected}
    assert trained == {'head/kernel', 'head/bias'}
    data = datasets.load_dataset('digits', 32, 8, train_images=480, validation_steps=2)
    saved = accuracy(str(tmp_path / 'run' / 'checkpoint' / MODEL_FILE), data.test)
    assert saved == pytest.approx(summary['final_accuracy'])
    assert summary['final_loss'] < np.log(10)
    assert run.epochs['train_accuracy'][0] > {'last': 0.1, 'stages': 0.3}[head]


@pytest.mark.parametrize('scheme', [
    HEAD_ONLY, ['--train_type', 'bn_plus_bias_training'], ['--rho', '0.7', '--interval', '2'],
    ['--train_tensors', 'head|bias']])
def test_every_scheme_starts_from_the_solved_head(scheme, tmp_path):
    flags = quick_flags(tmp_path, *SOLVED, '--learning_rate', '0.003')
    flags[flags.index('--num_epochs') + 1] = '4'
    flags[flags.index('--prefix_cache') + 1] = 'auto'
    flags += scheme + ['--run_name', 'run']
    store_table(flags)
    assert main.main(flags) == 0
    run = read_run(str(tmp_path / 'run'))
    losses, steps = run.epochs['train_loss'], run.epochs['step_seconds']
    assert run.summary['epochs'] == 4 and steps[0] == 0 < min(steps[1:])
    assert losses[1] < 1.02 * losses[0]
    assert {row.epoch for row in run.selections} >= {1, 2}
    if scheme == HEAD_ONLY:  # for others, what copying takes here decides whether a cache pays
        assert run.summary['cache_hits'] > 0
    rates = run.epochs['learning_rate']
    assert rates[0] == pytest.approx(0.003) and rates[-1] < 1e-6  # the cosine begins in epoch 2


def test_a_random_head_reads_standardised_stages(tmp_path):
    flags = quick_flags(tmp_path, *HEAD_ONLY, '--head', 'stages', '--save_model')
    assert main.main(flags + ['--run_name', 'run']) == 0
    run = read_run(str(tmp_path / 'run'))
    assert run.epochs['train_loss'][1] < run.epochs['train_loss'][0] < 5
    with np.load(str(tmp_path / 'run' / 'checkpoint' / 'weights.npz')) as weights:
        found = [array for array in weights.values() if array.shape == (88,)]
    assert len(found) == 2 and not any(np.ptp(array) == 0 for array in found)


def test_the_first_step_does_not_raise_the_loss(tmp_path):
    path = str(tmp_path / MODEL_FILE)
    network().save(path)
    data = datasets.load_dataset('digits', 32, 8, train_images=240, validation_steps=2)
    model = build_model(path, (32, 32, 3), 10, head='stages', head_start='solved')
    solve_head(model, data, ALONE)
    maker = train.step_maker(model, data, Settings(
        learning_rate=0.01, num_epochs=2, head_start='solved'))
    images, labels = next(iter(data.train))
    evaluate = evaluation_function(model)
    before = float(evaluate(images, labels)[0])
    step = maker.step(np.ones(len(model.trainable_variables), bool))
    scale = keras_stack.schedule(maker.optimizer).scale
    state = [variable.numpy() for variable in maker.everything]
    with keras_stack.restored_afterwards(maker.everything):
        step(images, labels)
        assert float(evaluate(images, labels)[0]) > 2 * before  # so this test shows something
    first = (images, labels)
    broken = (images * np.nan, labels)  # a loss that is no number is never taken for one that fell
    assert safe_scale(step, scale, [first, broken], evaluate, maker, ALONE) == 0.5 ** (HALVINGS - 1)
    assert safe_scale(step, scale, [first], evaluate, maker, ALONE) < 0.5
    assert all(variable is scale or np.array_equal(variable.numpy(), value)
               for variable, value in zip(maker.everything, state))
    step(images, labels)
    assert float(evaluate(images, labels)[0]) < 1.02 * before


def test_a_run_that_is_stopped_solves_again_or_keeps_the_scale_of_its_learning_rate(
        tmp_path, capsys):
    flags = quick_flags(tmp_path, *SOLVED, '--save_model', '--train_type', 'full_training')
    flags[flags.index('--num_epochs') + 1] = '4'
    assert main.main(flags + ['--run_name', 'unbroken']) == 0
    assert 'learning rate times' in capsys.readouterr().out  # so this test shows something
    for name, words in (('early', STARTS), ('late', 'epoch 2/')):
        stopped_at(words, flags + ['--run_name', name])
        assert main.main(flags + ['--run_name', name]) == 0
    assert 'resumes in epoch 3' in capsys.readouterr().out
    assert outcome(tmp_path / 'early') == outcome(tmp_path / 'unbroken')
    rates = [read_run(str(tmp_path / name)).epochs['learning_rate'] for name in (
        'late', 'unbroken')]
    assert rates[0] == rates[1]
    if keras_stack.KERAS_3:  # Keras 2 cannot save the state of dropout (docs/long_runs.md)
        assert outcome(tmp_path / 'late') == outcome(tmp_path / 'unbroken')


@pytest.mark.thorough
def test_workers_solve_one_head(tmp_path):
    flags = head_flags(tmp_path, *SOLVED, '--class_weight', 'balanced', '--save_model')
    found = ended(workers(free_addresses(2), *(flags + ['--run_name', 'run'])))
    assert [status for status, _ in found] == [0, 0], found
    assert len({final_of(output) for _, output in found}) == 1
    assert main.main(flags + ['--run_name', 'alone']) == 0
    run, alone = [read_run(str(tmp_path / name)) for name in ('run', 'alone')]
    for column in ('train_loss', 'test_loss'):  # other images were left out
        assert run.epochs[column][0] == pytest.approx(alone.epochs[column][0], rel=0.1)


# ------------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize('arguments, words', [
    (['--head', 'all'], 'choose from'), (['--head_features', '0'], '--head_features'),
    (['--head_features', '100'], 'is for --head stages'),
    (SOLVED + ['--train_type', 'prune_training'], 'prune_training removes channels'),
    (SOLVED + ['--head_epochs', '2'], 'give one of them'),
    (SOLVED + ['--num_epochs', '1'], 'leaves no epoch to train')])
def test_flags_of_the_head_that_do_not_fit_are_refused(arguments, words, tmp_path, capsys):
    assert_refused(arguments, words, tmp_path, capsys)


def test_fewer_images_than_classes_are_refused(tmp_path):
    flags = head_flags(tmp_path, *SOLVED, '--run_name', 'run')
    flags[flags.index('--train_images') + 1] = '9'
    with pytest.raises(UserError, match='allowed: 10 .one of each class'):
        main.main(flags)
    assert not os.path.exists(str(tmp_path / 'run'))


@pytest.mark.parametrize('bias, words', [(-1e6, 'are the same'), (np.inf, 'are not finite')])
def test_features_that_tell_nothing_are_refused_before_the_run_begins(bias, words, tmp_path):
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(4, 3, strides=4, activation='relu', bias_initializer=(
        keras.initializers.Constant(bias)))(inputs)
    path = saved(keras.Model(inputs, x), tmp_path)
    with pytest.raises(UserError, match=words):
        main.main(head_flags(tmp_path, *SOLVED, '--model_name', path, '--run_name', 'run'))
    assert not os.path.exists(str(tmp_path / 'run'))


def test_where_memory_is_short_the_head_reads_fewer_features(tmp_path, capsys):
    assert features_in_memory(8192, 10 ** 6, 10 ** 12) == 8192
    assert not capsys.readouterr().out
    room = needed_bytes(20000, 4096)
    assert features_in_memory(8192, 10000, room) == 4096
    assert features_in_memory(8192, 10000, room - 1) == 2048
    assert '2,048 features instead of 8,192' in capsys.readouterr().out
    flags = head_flags(tmp_path, *SOLVED, '--head_features', '64', '--validation_share', '0.2',
                       '--run_name', 'run')
    stopped_at(STARTS, flags)
    about = checkpoint.read(str(tmp_path / 'run'), RECORDS)['about']
    assert about['head_features'] == 64  # it resumes with as many, whatever memory there is
    settings = run_settings_of(flags)
    about['head_features'] = 32
    assert main.features_to_read(settings, None, ALONE, dict(about=about)) == 32
    assert main.main(flags) == 0
    assert 'resumes in epoch 1' in capsys.readouterr().out


def test_a_limit_below_one_stage_is_refused(tmp_path):
    with pytest.raises(UserError, match='fewer than the 16 of the last stage'):
        main.main(quick_flags(tmp_path, *HEAD_ONLY, *SOLVED, '--head_features', '15'))


def test_random_features_are_warned_of(tmp_path):
    with pytest.warns(UserWarning, match='random'):
        build_model('mobilenetv2', (32, 32, 3), 10, 'none', 0.35, head_start='solved')


def test_profiling_takes_the_flags_of_the_head(tmp_path):
    path = str(tmp_path / MODEL_FILE)
    network().save(path)
    status, _, errors = script('profiler.py', '--model_name', path, '--input_size', '32',
                               '--dataset_name', 'digits', '--head', 'stages', '--logs_dir',
                               str(tmp_path / 'logs'))
    assert status == 0, errors
    table, = (tmp_path / 'logs').glob('*/timings.json')
    shapes = json.loads(table.read_text())['shapes']
    assert [88, 10] in shapes  # means and maxima of 16 + 4 + 16, and 16 means
