"""Tests that a run continues a finished one, on images of old and new classes."""

import argparse
import json
import os
import shutil

import numpy as np
import pytest

import main
from elastic.compat import keras_stack
from elastic.data.class_names import joined
from elastic.errors import UserError
from elastic.export.predictor import CHECKPOINT, WEIGHTS
from elastic.files import read_json, write_json
from elastic.flags import decisive_settings
from elastic.runs.chain import FIXED, WHAT, chain_of, earlier_run
from elastic.runs.names import default_run_name
from elastic.timing.stored import table_key, wider_table
from fixed_tables import store_table
from photo_runs import chain, content, first_flags, next_flags, photos
from small_runs import assert_resumes_as_whole, run_settings_of


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    return chain(tmp_path_factory.mktemp('chain'))


@pytest.fixture(scope='module')
def data(logs):
    """Returns the data set of a fourth day, of an old and a new class."""
    return photos(logs.parent / 'thursday', 'dog', 'elk', seed=9)


def weights_of(folder):
    with np.load(str(folder / CHECKPOINT / WEIGHTS)) as arrays:
        return [arrays[name] for name in sorted(arrays.files) if name != 'format']


# ---------------------------------------------------------------- what is kept

def test_classes_join_by_name_and_old_ones_come_first(logs):
    days = [read_json(str(logs / day / 'summary.json')) for day in (
        'monday', 'tuesday', 'wednesday')]
    assert [day['class_names'] for day in days] == [
        ['cat', 'dog'], ['cat', 'dog', 'ant'], ['cat', 'dog', 'ant']]
    assert [day.get('run_before') for day in days] == [
        None, os.path.join('..', 'monday'), os.path.join('..', 'tuesday')]
    runs, broken = chain_of(str(logs / 'wednesday'))
    assert [run.name for run in runs] == ['wednesday', 'tuesday', 'monday'] and broken is None


def test_a_circle_of_runs_ends(logs, tmp_path):
    """A run that lost its weights was trained again, from one that continues it."""
    shutil.copytree(str(logs), str(tmp_path / 'logs'))
    path = tmp_path / 'logs' / 'monday' / 'summary.json'
    write_json(str(path), dict(read_json(str(path)), run_before='../wednesday'))
    runs, broken = chain_of(str(path.parent))
    assert [run.name for run in runs] == ['monday', 'wednesday', 'tuesday'] and broken is None


def test_a_run_that_learns_nothing_keeps_the_network_bit_for_bit(logs):
    """The learning rate of the chain is 0."""
    monday, tuesday, wednesday = [weights_of(logs / day) for day in (
        'monday', 'tuesday', 'wednesday')]
    for old, new in zip(monday, tuesday):
        widened = old.shape != new.shape
        assert (new[..., :2] if widened else new).tobytes() == old.tobytes()
    assert [old.shape for old in monday[-2:]] == [(16, 2), (2,)]
    assert [new.shape for new in tuesday[-2:]] == [(16, 3), (3,)]
    assert all(old.tobytes() == new.tobytes() for old, new in zip(tuesday, wednesday))


@pytest.mark.thorough
def test_a_solved_head_is_not_solved_again(logs, data):
    solved = first_flags(logs, photos(logs.parent / 'monday', 'cat', 'dog'), '--head_start',
                         'solved', '--head', 'stages', '--run_name', 'solved')
    assert main.main(solved) == 0
    given = next_flags(logs, 'solved', 'after_solved', data, '--learning_rate', '0')
    assert main.main(given) == 0
    old, new = weights_of(logs / 'solved'), weights_of(logs / 'after_solved')
    assert all(np.array_equal(a, b[..., :2] if a.shape != b.shape else b) for a, b in zip(old, new))
    summary = read_json(str(logs / 'after_solved' / 'summary.json'))
    assert summary['head_start'] == 'solved' and summary['head_seconds'] == 0


def test_new_names_that_look_like_old_ones_are_the_same_class():
    old = ('caf\u00e9', 'dog')
    names, numbers, lines = joined(old, ('Dog', 'ant', 'cafe\u0301', 'Bee'))
    assert names == old + ('Bee', 'ant') and numbers.tolist() == [1, 3, 0, 2]
    assert numbers.dtype == np.int32 and len(lines) == 2 and "'Dog'" in lines[0]
    assert joined(('cat', 'CAT'), ('CAT', 'cat'))[1].tolist() == [1, 0]
    with pytest.raises(UserError, match="are meant by 'Cat', 'cat': rename them"):
        joined(('cat', 'dog'), ('Cat', 'cat', 'dog'))
    with pytest.raises(UserError, match="are meant by 'Cat': rename them"):
        joined(('cat', 'CAT'), ('Cat', 'dog'))


# ---------------------------------------------------------------- flags

def test_flags_that_are_not_given_are_those_of_the_run_before(logs, data):
    monday = read_json(str(logs / 'monday' / 'settings.json'))
    new = decisive_settings(run_settings_of(
        next_flags(logs, 'monday', 'next', data, '--batch_size', '4')))
    assert {name for name in new if new[name] != monday[name]} == {
        'continue_from', 'dataset_name', 'weights', 'batch_size'}
    elastic = run_settings_of(next_flags(
        logs, 'monday', 'next', data, '--train_type', 'elastic_training_weight_magnitude'))
    assert elastic.training.importance == 'weight_magnitude'


def test_what_a_deadline_chose_is_inherited_but_not_the_deadline(logs):
    run = earlier_run(str(logs / 'monday'))
    run = run._replace(summary=dict(run.summary, rho=0.4), settings=dict(
        run.settings, deadline=60.0, rho=None, num_epochs=None, train_type='elastic_training'))
    given = argparse.Namespace(**dict.fromkeys(FIXED + WHAT))
    inherited = run.inherited(given)
    assert inherited['rho'] == 0.4 and inherited['train_type'] == 'elastic_training'
    assert not {'deadline', 'num_epochs'}.intersection(inherited)
    assert 'train_type' not in run.inherited(argparse.Namespace(**dict(
        vars(given), train_type='full_training')))


def test_the_name_of_a_run_says_what_it_continues(logs, data):
    given = next_flags(logs, 'monday', 'next', data)
    del given[2:4]
    assert run_settings_of(given).records.run_name.endswith('_full_training_after_monday')
    given = vars(main.parse_arguments(given))
    name = default_run_name(argparse.Namespace(**dict(given, continue_from='logs/' + 90 * 'm')))
    assert name.endswith('_after_' + 40 * 'm')  # names of a long chain do not grow


def test_a_file_of_flags_repeats_a_continued_run(logs, capsys):
    before = content(logs)
    assert main.main(['@{}'.format(logs / 'tuesday' / 'flags.txt')]) == 0
    assert 'already finished' in capsys.readouterr().out and content(logs) == before


@pytest.mark.parametrize('given, words', [
    (['--alpha', '0.5'], "keeps the network of run 'monday': leave --alpha 0.5 out"),
    (['--weights', 'none'], '--weights none'),
    (['--deadline', '1m'], '--deadline solves the head'),
    (['--continue_from', 'mondy'], "did you mean 'monday'?"),
    (['--continue_from', 'unfinished'], 'unfinished: it has no'),
    (['--continue_from', 'pruned'], 'prune_training has removed channels'),
    (['--continue_from', 'weightless'], 'kept no weights'),
    (['--run_name', 'monday', '--restart'], 'choose another --run_name'),
    (['--continue_from', 'wednesday', '--run_name', 'monday/next'], 'choose another --run_name'),
    (['--num_classes', '2'], 'which has 3 classes')])
def test_what_cannot_be_continued_is_refused_in_one_line(given, words, logs, data, capsys):
    for name, gone in (('unfinished', 'summary.json'), ('weightless', 'checkpoint/weights.npz'),
                       ('pruned', None)):
        if not (logs / name).exists():
            shutil.copytree(str(logs / 'monday'), str(logs / name))
            if gone:
                os.remove(str(logs / name / gone))
    path = logs / 'pruned' / 'summary.json'
    path.write_text(json.dumps(dict(read_json(str(path)), scheme='prune_training')))
    before = content(logs)
    with pytest.raises(UserError) as error:
        main.main(next_flags(logs, 'monday', 'next', data, *given))
    assert words in str(error.value) and '\n' not in str(error.value)
    assert content(logs) == before and not (logs / 'next').exists()


@pytest.mark.parametrize('names, words', [
    (('cat',), 'it needs at least two classes'),
    (('ant', 'elk'), "no image of folder:"),
    (('Cat', 'cat', 'elk'), "meant by 'Cat', 'cat'")])
def test_new_images_that_do_not_fit_are_refused_in_one_line(names, words, logs, tmp_path):
    before = content(logs)
    with pytest.raises(UserError) as error:
        main.main(next_flags(logs, 'monday', 'next', photos(tmp_path, *names)))
    assert words in str(error.value) and '\n' not in str(error.value)
    assert content(logs) == before


def test_a_run_of_another_stack_is_refused_and_another_version_is_reported(logs, capsys):
    run = earlier_run(str(logs / 'monday'))
    run.check_stack(run.summary['stack'])
    assert not capsys.readouterr().out
    run.check_stack(run.summary['stack'].replace('Python', 'python'))
    assert 'results differ by rounding' in capsys.readouterr().out
    with pytest.raises(UserError, match='--weights .*weights.npz') as error:
        run.check_stack('TensorFlow 1.15.0, Keras 1.2.3, Python 3.6')
    assert '\n' not in str(error.value)


# ---------------------------------------------------------------- resuming, tables

@pytest.mark.thorough
@pytest.mark.skipif(not keras_stack.KERAS_3, reason='--deterministic needs TensorFlow 2.9')
@pytest.mark.parametrize('words', ['epoch 1/2', 'epoch 2/2'])
def test_a_killed_run_resumes_bit_for_bit(words, logs, data):
    more = ['--learning_rate', '0.02', '--num_epochs', '2', '--deterministic']
    name = 'killed' + words[6]
    assert_resumes_as_whole(words, logs, *[
        next_flags(logs, 'tuesday', run, data, *more) for run in (name, 'whole')])
    for record in ('exams.csv', 'forgetting.csv'):
        assert (logs / name / record).read_bytes() == (logs / 'whole' / record).read_bytes()


@pytest.mark.thorough
def test_the_timing_table_of_fewer_classes_serves_where_it_fits(logs, data, capsys):
    elastic = ['--train_type', 'elastic_training', '--rho', '0.9', '--learning_rate', '0.02']
    old = first_flags(logs, photos(logs.parent / 'monday', 'cat', 'dog'), '--run_name', 'old',
                      *elastic)
    path = store_table(old, 200.0, 400.0)
    assert main.main(next_flags(logs, 'monday', 'fits', data, *elastic)) == 0
    out = capsys.readouterr().out
    assert 'of 2 classes: with 3 a step takes' in out and 'profiled' not in out
    assert read_json(str(logs / 'fits' / 'summary.json'))['selection_seconds'] > 0
    assert main.main(next_flags(logs, 'fits', 'third', data, *elastic)) == 0
    assert 'profiled' not in capsys.readouterr().out  # nor is it in a run of more classes
    settings = run_settings_of(next_flags(logs, 'monday', 'more', data, *elastic))
    images = main.images_of(settings)
    step, _ = main.timed_step(settings, main.load_data(settings, images))
    model = main.model_of(settings, 3, 8192)
    key = table_key(step._replace(num_classes=2), model)
    table = wider_table(path, key, model)
    assert table.shapes[-1] == (3,) and table.key == key
    table.t_dw[-2] = table.t_step / 100
    table.save(path)
    assert wider_table(path, key, model) is None  # the head takes too large a part of a step
