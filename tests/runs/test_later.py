"""Tests what a run keeps for the runs that continue it: images, and the sums of its solved head."""

import numpy as np
import pytest

import main
from elastic.compat import keras_stack
from elastic.data.replay import FOLDER
from elastic.errors import UserError
from elastic.files import read_json
from elastic.schemes import statistics
from image_folders import encoded, write
from photo_runs import content, first_flags, next_flags, photos
from refusals import assert_refused
from small_runs import assert_resumes_as_whole

SOLVED = ['--train_type', 'traditional_tl_training', '--num_epochs', '1', '--head', 'stages',
          '--head_start', 'solved', '--keep_statistics']
TRAINED = ['--train_type', 'full_training', '--num_epochs', '3', '--learning_rate', '0.02']


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """Returns logs_dir of monday (cat, dog), which keeps six images and sums, and tuesday."""
    folder = tmp_path_factory.mktemp('later')
    logs = folder / 'logs'
    logs.mkdir()
    monday = photos(folder / 'monday', 'cat', 'dog')
    assert main.main(first_flags(logs, monday, '--run_name', 'monday', '--replay', '6',
                                 '--replay_share', '0.3', *SOLVED)) == 0
    before = content(logs / 'monday')
    assert main.main(next_flags(logs, 'monday', 'tuesday', photos(
        folder / 'tuesday', 'ant', 'eel', seed=1))) == 0
    assert content(logs / 'monday') == before
    return logs


@pytest.fixture(scope='module')
def data(logs):
    return photos(logs.parent / 'wednesday', 'dog', 'elk', seed=2)


def kept(run):
    """Returns the names of the kept images of a run, in the order of their classes."""
    return {path.parent.name + '/' + path.name for path in (run / FOLDER).rglob('*.png')}


def test_flags_and_images_are_inherited(logs):
    """Of four classes with eight images each, six images are two, two, one and one."""
    old, new = kept(logs / 'monday'), kept(logs / 'tuesday')
    assert len(old) == len(new) == 6
    assert {name.split('/')[1][:2] for name in old} == {'1-'}
    assert all(name in old for name in new if name.startswith(('cat', 'dog')))
    assert all(name.split('/')[1][:2] == '2-' for name in new if name.startswith(('ant', 'eel')))
    assert {name.split('/')[0] for name in new} == {'cat', 'dog', 'ant', 'eel'}
    for name in kept(logs / 'monday'):
        folder, file = name.split('/')
        assert (logs / 'monday' / FOLDER / name).read_bytes() == (
            logs.parent / 'monday' / folder / file[2:]).read_bytes()
    settings = read_json(str(logs / 'tuesday' / 'settings.json'))
    assert settings['replay'] == 6 and settings['replay_share'] == 0.3
    assert settings['keep_statistics'] is True


def test_new_classes_alone_extend_a_solved_head(logs):
    """Each image counts once, though kept ones lie beside the new ones."""
    found = statistics.read(str(logs / 'tuesday'))
    assert found.class_names == ('cat', 'dog', 'ant', 'eel') and found.images == 32
    assert found.sums['target'].tolist() == [16] * 4  # with the flipped version of each
    before = statistics.read(str(logs / 'monday'))
    assert before.body == found.body
    np.testing.assert_array_equal(before.mean, found.mean)
    summary = read_json(str(logs / 'tuesday' / 'summary.json'))
    assert summary['head_seconds'] > 0 and summary['step_seconds'] == 0


def test_after_training_kept_images_stand_in_the_sums_for_all_that_were_seen(logs, data, capsys):
    assert main.main(next_flags(logs, 'tuesday', 'trained', data, *TRAINED)) == 0
    out = capsys.readouterr().out
    assert '6 images of earlier runs are mixed in: 30 % of each batch' in out
    assert 'sums over 22 images kept for later runs' in out
    sums = statistics.read(str(logs / 'trained')).sums
    assert sums['target'].tolist() == pytest.approx([16, 32, 16, 16, 16])
    assert main.main(next_flags(logs, 'trained', 'solved', data, *SOLVED)) == 0
    both = statistics.read(str(logs / 'solved'))
    assert both.images == 22 + 16 and both.sums['target'].tolist() == pytest.approx(
        [16, 48, 16, 16, 32])


@pytest.mark.thorough
def test_without_kept_images_a_run_says_that_it_keeps_no_sums(logs, data, capsys):
    more = TRAINED + ['--replay', '0']
    assert main.main(next_flags(logs, 'tuesday', 'forgetful', data, *more)) == 0
    out = capsys.readouterr().out
    assert 'no sums are kept: ' in out and 'earlier runs are mixed in' not in out
    assert not (logs / 'forgetful' / FOLDER).exists()
    assert not (logs / 'forgetful' / statistics.FILE).exists()
    with pytest.raises(UserError, match='--keep_statistics: run .*forgetful has kept no sums'):
        main.main(next_flags(logs, 'forgetful', 'next', data))
    assert not (logs / 'next').exists()


@pytest.mark.parametrize('file, words', [
    ('cat/notes.txt', 'remove what is no image'), ('cow/1.png', "kept images of 'cow'"),
    ('cat/1.png', 'cannot read image')])
def test_a_folder_of_kept_images_that_does_not_fit_is_refused(file, words, logs, data):
    path = logs / 'tuesday' / FOLDER / file
    write(path, encoded(0, 'png')[:70 if 'read' in words else None] if 'png' in file else b'text')
    try:
        before = content(logs)
        with pytest.raises(UserError) as error:
            main.main(next_flags(logs, 'tuesday', 'next', data))
        assert words in str(error.value) and '\n' not in str(error.value)
        assert content(logs) == before and not (logs / 'next').exists()
    finally:
        path.unlink()
        if 'cow' in file:
            path.parent.rmdir()


@pytest.mark.parametrize('given, words', [
    (['--replay', '-1'], "'-1' is not a number of images from 0 on, nor a size such as 200MB"),
    (['--replay', '2TB'], 'nor a size'), (['--replay_share', '1'], 'a number above 0, below 1'),
    (['--keep_statistics'], 'needs --head_start solved'),
    (['--keep_statistics', '--deadline', '5m'], 'does not fit --deadline'),
    (['--keep_statistics', '--head_start', 'solved', '--class_weight', 'balanced'],
     'leave --class_weight out'),
    (['--replay', '9', '--workers', 'localhost:1,localhost:2', '--worker_index', '0'],
     'do not fit --workers')])
def test_flags_that_cannot_be_meant_are_refused(given, words, tmp_path, capsys):
    assert_refused(['--dataset_name', 'digits', '--logs_dir', str(tmp_path)] + given, words,
                   tmp_path, capsys)


@pytest.mark.thorough
@pytest.mark.skipif(not keras_stack.KERAS_3, reason='no op determinism before TensorFlow 2.9')
@pytest.mark.parametrize('words', ['epoch 1/3', 'epoch 3/3'])
def test_a_killed_run_with_kept_images_and_sums_resumes_bit_for_bit(words, logs, data):
    """It solves its head from sums, then trains all layers; the last time, all is trained."""
    more = TRAINED + ['--deterministic']
    name = 'killed' + words[6]
    assert_resumes_as_whole(words, logs, *[
        next_flags(logs, 'tuesday', run, data, *more) for run in (name, 'whole')])
    assert kept(logs / name) == kept(logs / 'whole')
    ours, others = [statistics.read(str(logs / run)).sums for run in (name, 'whole')]
    assert all(np.array_equal(ours[key], others[key]) for key in others)
