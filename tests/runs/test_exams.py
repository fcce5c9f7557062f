"""Tests that a continued run says what it has forgotten of the runs before it."""

import os
import shutil

import numpy as np
import pytest

import main
import plot
from elastic.errors import UserError
from elastic.files import read_json
from elastic.runs.exams import Score, paired_p_value, read_scores, report, scores_of
from elastic.runs.folder import read_rows
from made_runs import assert_figure
from photo_runs import chain, content, next_flags, photos
from small_runs import quick_flags, script

PREDICTED = dict.fromkeys(('image', 'label', 'predicted'), str)


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    return chain(tmp_path_factory.mktemp('exams'))


@pytest.fixture(scope='module')
def learned(logs):
    """Returns what a run prints that continues `wednesday` on other images, and learns."""
    data = photos(logs.parent / 'thursday', 'dog', 'elk', seed=9)
    code, out, err = script('main.py', *next_flags(
        logs, 'wednesday', 'thursday', data, '--learning_rate', '0.5', '--num_epochs', '4'))
    assert code == 0, out + err
    return out


def by_run(folder):
    """Returns run -> its Score of all images."""
    return {score.run: score for score in read_scores(str(folder)) if not score.class_name}


# ---------------------------------------------------------------- scores

@pytest.mark.parametrize('lost, won, p', [
    (0, 0, 1.0), (0, 5, 1.0), (5, 0, 1 / 32), (4, 1, 6 / 32), (1, 1, 0.75), (60, 60, 0.5364)])
def test_the_paired_test_is_exact(lost, won, p):
    before = np.array([True] * lost + [False] * won + [True, False] * 3)
    after = np.array([False] * lost + [True] * won + [True, False] * 3)
    assert paired_p_value(before, after) == pytest.approx(p, abs=1e-4)


def test_all_images_and_each_class_are_scored():
    before, after = np.array([True, True, False, True]), np.array([True, False, True, True])
    scores = scores_of('monday', ['dog', 'dog', 'cat', 'cat'], before, after)
    assert [score[1:5] for score in scores] == [
        ('', 4, 0.75, 0.75), ('cat', 2, 0.5, 1.0), ('dog', 2, 1.0, 0.5)]


def test_the_report_warns_of_what_is_more_than_noise_and_gives_the_mean():
    scores = [Score(*row) for row in (
        ('monday', '', 100, 0.9, 0.8, 0.001), ('monday', 'cat', 50, 0.9, 0.95, 1.0),
        ('monday', 'dog', 50, 0.9, 0.65, 0.001), ('tuesday', '', 20, 0.5, 0.45, 0.3),
        ('friday', '', 20, 0.5, 0.6, 0.9))]
    table, *warnings = report(scores)
    assert [' '.join(line.split()) for line in table.split('\n')[2:]] == [
        'monday 100 90.0 80.0 -10.0', 'dog 50 90.0 65.0 -25.0', 'tuesday 20 50.0 45.0 -5.0',
        'friday 20 50.0 60.0 +10.0', 'mean 140 63.3 61.7 -1.7']
    assert len(warnings) == 1 and 'run monday' in warnings[0] and 'from 90.0 to 80.0' in warnings[0]
    assert report([]) == []


# ---------------------------------------------------------------- runs

def test_a_run_without_one_before_it_holds_no_exam(logs):
    assert not set(os.listdir(str(logs / 'monday'))).intersection(['exams.csv', 'forgetting.csv'])
    with pytest.raises(UserError, match='continues no run'):
        read_scores(str(logs / 'monday'))


def test_a_run_that_learns_nothing_forgets_nothing(logs):
    """Both were trained at a rate of 0; new classes may take images from old ones."""
    tuesday, wednesday = by_run(logs / 'tuesday'), by_run(logs / 'wednesday')
    own = {day: read_json(str(logs / day / 'summary.json'))['final_accuracy']
           for day in ('monday', 'tuesday')}
    assert tuesday['monday'].before == own['monday'] and tuesday['monday'].images == 4
    assert wednesday['monday'].before == wednesday['monday'].after == tuesday['monday'].after
    assert wednesday['tuesday'].before == wednesday['tuesday'].after == own['tuesday']
    summary = read_json(str(logs / 'wednesday' / 'summary.json'))
    assert summary['exam_after'] == pytest.approx(
        (wednesday['monday'].after + wednesday['tuesday'].after) / 2)


def test_each_image_of_earlier_runs_is_recorded_with_the_classes_of_this_one(logs, learned):
    rows = read_rows(str(logs / 'thursday'), 'exams.csv', dict(PREDICTED, run=str))
    for day in ('monday', 'tuesday', 'wednesday'):
        own = read_rows(str(logs / day), 'predictions.csv', PREDICTED)
        mine = [row for row in rows if row['run'] == os.path.join('..', day)]
        assert sorted((row['image'], row['label']) for row in mine) == sorted(
            (row['image'], row['label']) for row in own)
        score = by_run(logs / 'thursday')[day]
        right = [row['label'] == row['predicted'] for row in mine]
        assert score.after == pytest.approx(np.mean(right)) and score.images == len(mine)
    assert {row['predicted'] for row in rows} <= {'cat', 'dog', 'ant', 'elk'}


def test_the_table_follows_training_and_tensorboard_has_it(logs, learned):
    assert 'earlier run, classes that fell' in learned and '\nmean ' in learned
    import tensorflow as tf
    folder = str(logs / 'thursday')
    events = [os.path.join(folder, name) for name in os.listdir(folder) if 'events' in name]
    shown = {(value.tag, event.step) for path in events
             for event in tf.compat.v1.train.summary_iterator(path)
             for value in event.summary.value}
    assert {('forgetting/' + day, step) for day in ('monday', 'tuesday', 'wednesday')
            for step in (0, 4)} <= shown


def test_the_figure_shows_each_run_and_its_classes(logs, learned, tmp_path, capsys):
    plot.main(['forgetting', 'thursday', '--logs_dir', str(logs), '--output', str(tmp_path / 'f')])
    assert_figure(capsys.readouterr().out.split(), tmp_path / 'f')
    lines = (tmp_path / 'f.csv').read_text().split('\n')
    assert lines == (logs / 'thursday' / 'forgetting.csv').read_text().split('\n')


def test_changed_gone_and_trained_photos_are_not_tested(logs, tmp_path, capsys):
    """Of the four test photos of each day: monday's one is gone, one changed, one trained on."""
    copied = tmp_path / 'logs'
    shutil.copytree(str(logs.parent), str(tmp_path / 'all'))
    os.rename(str(tmp_path / 'all' / 'logs'), str(copied))
    for day in ('monday', 'tuesday', 'wednesday'):  # the days lie elsewhere now
        path = copied / day / 'settings.json'
        path.write_text(path.read_text().replace('folder:{}'.format(logs.parent),
                                                 'folder:{}'.format(tmp_path / 'all')))
    names = [row['image'] for row in read_rows(str(logs / 'monday'), 'predictions.csv', PREDICTED)]
    place = [tmp_path / 'all' / 'monday' / name for name in names]
    data = photos(tmp_path / 'new' / 'train', 'cat', 'dog', seed=5)
    photos(tmp_path / 'new' / 'test', 'cat', 'dog', seed=6, images=2)
    shutil.copy(str(place[0]), str(tmp_path / 'new' / 'train' / 'cat' / 'copy.png'))
    place[1].write_bytes(place[1].read_bytes()[:-1] + b'x')
    place[2].unlink()
    shutil.rmtree(str(tmp_path / 'all' / 'tuesday'))
    before = content(copied)
    assert main.main(next_flags(copied, 'wednesday', 'next', data.replace('/train', ''))) == 0
    out = capsys.readouterr().out
    assert '3 of 4 test images of run monday are gone, changed, or trained on' in out
    assert "images of run tuesday are not tested: run 'tuesday': none of its test images" in out
    assert set(by_run(copied / 'next')) == {'monday', 'wednesday'}
    assert {path: data for path, data in content(copied).items()
            if not path.startswith(str(copied / 'next'))} == before


@pytest.mark.thorough
def test_a_run_that_was_deleted_ends_the_exams_in_one_line(logs, learned, tmp_path, capsys):
    shutil.copytree(str(logs), str(tmp_path / 'logs'))
    shutil.rmtree(str(tmp_path / 'logs' / 'tuesday'))
    data = photos(tmp_path / 'friday', 'cat', 'dog', seed=7)
    assert main.main(next_flags(tmp_path / 'logs', 'wednesday', 'friday', data)) == 0
    out = capsys.readouterr().out
    assert "earlier runs are not tested: run 'tuesday': no folder" in out
    assert set(by_run(tmp_path / 'logs' / 'friday')) == {'wednesday'}


@pytest.mark.thorough
def test_data_sets_that_are_no_folders_are_tested_too(tmp_path, capsys):
    flags = quick_flags(tmp_path, '--train_type', 'full_training', '--run_name', 'first',
                        '--test_images', '50')
    assert main.main(flags) == 0
    assert main.main(next_flags(tmp_path, 'first', 'second', 'digits_shifted')) == 0
    assert main.main(next_flags(tmp_path, 'second', 'third', 'digits_inverted')) == 0
    assert set(by_run(tmp_path / 'third')) == {'first', 'second'}
    first = read_json(str(tmp_path / 'first' / 'summary.json'))
    assert by_run(tmp_path / 'second')['first'].before == first['final_accuracy']
    path = tmp_path / 'first' / 'predictions.csv'
    path.write_text('\n'.join(path.read_text().split('\n')[:-3] + ['']))  # as if data had changed
    assert main.main(next_flags(tmp_path, 'first', 'again', 'digits_shifted')) == 0
    assert 'the test images of digits have changed' in capsys.readouterr().out


@pytest.mark.thorough
def test_evaluate_knows_the_classes_of_the_runs_before(logs, learned, capsys):
    path = '@{}'.format(logs / 'thursday' / 'flags.txt')
    assert main.main([path, '--save_model']) == 0
    assert 'already finished' in capsys.readouterr().out
    code, out, err = script('scripts/evaluate.py', 'thursday', '--logs_dir', str(logs))
    final = read_json(str(logs / 'thursday' / 'summary.json'))['final_accuracy']
    assert code == 0 and 'accuracy {:.1f} %'.format(100 * final) in out, out + err
