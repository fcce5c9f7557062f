"""Tests the way from photos to a model on a device: train, save, export, predict, evaluate."""

import contextlib
import io
import re
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

import datasets
import evaluate
import main
import predict
from elastic.compat.keras_stack import MODEL_FILE
from elastic.errors import UserError
from elastic.export.litert import FILE
from elastic.runs.classes import CLASSES, PREDICTIONS
from elastic.runs.folder import read_run
from image_folders import write
from made_runs import assert_figure, read_csv
from small_models import saved, small_base, small_classifier

COLOURS = {'lime': (120, 220, 40), 'plum': (110, 30, 120)}


def photo(colour, seed, size=(40, 30)):
    noise = np.random.RandomState(seed).normal(0, 20, size[::-1] + (3,))
    content = io.BytesIO()
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(content, 'PNG')
    return content.getvalue()


def train_on(root, epochs, export):
    """Makes the run root/run, on the photos in root/photos, and exports its model."""
    assert main.main([
        '--model_name', saved(small_base(), root), '--dataset_name', 'folder:{}'.format(
            root / 'photos'), '--input_size', '16', '--batch_size', '4', '--num_epochs', epochs,
        '--learning_rate', '0.02', '--bn_statistics', 'train', '--train_type', 'full_training',
        '--export', export, '--run_name', 'run', '--logs_dir', str(root)]) == 0


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Returns (folder of photos, folder of a run on them that exported its model, its output)."""
    root = tmp_path_factory.mktemp('predict')
    for name, colour in COLOURS.items():
        for i in range(15):
            write(root / 'photos' / name / '{}.png'.format(i), photo(colour, i))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_on(root, '6', 'litert_int8')
    return root / 'photos', root / 'run', printed.getvalue()


def test_a_run_says_which_output_is_which_class_and_how_good_its_exported_file_is(trained):
    _, run, printed = trained
    assert 'classes in the order of the outputs: lime, plum\n' in printed
    assert read_run(str(run)).summary['class_names'] == ['lime', 'plum']
    assert (run / 'checkpoint' / 'class_names.txt').read_text() == 'lime\nplum\n'
    accuracy = read_run(str(run)).summary['final_accuracy']
    assert accuracy > 0.8
    assert '{}: test accuracy {:.1f} %'.format(run / 'checkpoint' / FILE, 100 * accuracy) in printed


@pytest.mark.parametrize('file', ['', 'checkpoint/' + FILE])
def test_new_photos_are_recognised(trained, tmp_path, capsys, file):
    _, run, _ = trained
    for i, colour in enumerate(COLOURS.values()):
        write(tmp_path / 'new' / '{}.png'.format(i), photo(colour, 99 + i, (64, 64)))
    table = tmp_path / 'table.csv'
    assert predict.main([str(run / file), str(tmp_path / 'new'), '--csv', str(table)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith('{}  lime '.format(tmp_path / 'new' / '0.png')) and ' plum ' in first
    assert second.startswith('{}  plum '.format(tmp_path / 'new' / '1.png'))
    rows = read_csv(table)
    assert [row['prediction'] for row in rows] == ['lime', 'plum']
    assert all(float(row['lime']) + float(row['plum']) == pytest.approx(1, abs=0.02)
               for row in rows)


def test_a_bad_photo_is_named_and_the_others_are_predicted(trained, tmp_path, capsys, monkeypatch):
    _, run, _ = trained
    write(tmp_path / 'bad.jpg', b'<html>')
    write(tmp_path / 'good.png', photo(COLOURS['plum'], 7))
    listed = '{0}/bad.jpg\n\n{0}/good.png\n'.format(tmp_path).encode()
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(listed)))
    assert predict.main([str(run), '-', '--top', '1']) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith('{}  plum '.format(tmp_path / 'good.png'))
    assert "cannot read image '{}': no image".format(tmp_path / 'bad.jpg') in printed.err


@pytest.mark.parametrize('script, arguments, says', [
    (predict, ['{run}', '{root}/nowhere.jpg'], 'no photo at'),
    (predict, ['{root}', '{root}'], 'no images in folder'),
    (predict, ['{root}/nothing', '{photo}'], 'no run or model at'),
    (predict, ['{root}/nothing.tflite', '{photo}'], 'no LiteRT file at'),
    (predict, ['{photo}', '{photo}'], 'is not a saved Keras model'),
    (evaluate, ['{root}/nothing'], 'no run or model at'),
    (evaluate, ['{photo}'], 'is no finished run, .* give --dataset_name'),
    (evaluate, ['{run}', '--dataset_name', 'digit'], "did you mean 'digits'"),
    (evaluate, ['{run}', '--dataset_name', 'digits'],
     'only the model has lime, plum; only the data set has')])
def test_what_cannot_be_used_is_refused(trained, tmp_path, script, arguments, says):
    photos, run, _ = trained
    names = dict(run=run, root=tmp_path, photo=photos / 'lime' / '0.png')
    with pytest.raises(UserError, match=says):
        script.main([each.format(**names) for each in arguments])


# ---------------------------------------------------------------- predictions for the test images

def test_a_run_records_its_last_prediction_for_each_test_image(trained):
    photos, run, _ = trained
    rows = read_csv(run / PREDICTIONS)
    assert len(rows) == 6  # a fifth of each class
    for row in rows:
        assert (photos / row['image']).exists() and row['image'].split('/')[0] == row['label']
        assert row['predicted'] in COLOURS and 0.5 <= float(row['probability']) <= 1
    summary = read_run(str(run)).summary
    right = np.mean([row['label'] == row['predicted'] for row in rows])
    assert summary['final_accuracy'] == pytest.approx(right)
    assert [(row['class'], row['images']) for row in read_csv(run / CLASSES)] == [
        ('lime', '3'), ('plum', '3')]
    assert np.mean([float(row['accuracy']) for row in read_csv(run / CLASSES)]) == (
        pytest.approx(right))


def test_images_that_are_tested_are_named_by_path_or_number(tmp_path):
    for name in COLOURS:
        for i in range(20):
            write(tmp_path / 'test' / name / 'more' / '{}.png'.format(i), photo((9, 9, 9), i))
            write(tmp_path / 'train' / name / '{}.png'.format(i), photo((9, 9, 9), i))
    data = datasets.load_dataset('folder:{}/'.format(tmp_path), 16, 4, validation_steps=1)
    assert data.test_names == ['test/lime/more/0.png', 'test/lime/more/3.png',
                               'test/plum/more/14.png', 'test/plum/more/9.png']
    part = datasets.load_dataset('digits', 16, 4, validation_steps=1, train_images=250)
    assert part.test_names == ['0', '750', '1499', '2249']


# ---------------------------------------------------------------- evaluate.py

@pytest.mark.parametrize('file, flags, exact', [
    ('', ['--output', '{figure}'], True),
    ('checkpoint/' + MODEL_FILE, ['--dataset_name', '{data}'], True),
    ('checkpoint/' + FILE, ['--dataset_name', '{data}'], False)])
@pytest.mark.thorough
def test_a_saved_model_is_evaluated_as_in_its_run(trained, tmp_path, capsys, file, flags, exact):
    photos, run, _ = trained
    table, figure = tmp_path / 'table.csv', tmp_path / 'figure'
    flags = [flag.format(data='folder:{}'.format(photos), figure=figure) for flag in flags]
    assert evaluate.main([str(run / file), '--csv', str(table)] + flags) == 0
    printed, summary = capsys.readouterr().out.splitlines(), read_run(str(run)).summary
    loss = float(re.search('loss ([0-9.]+)$', printed[0]).group(1))
    assert loss == pytest.approx(summary['final_loss'], abs=1e-3 if exact else 0.1)
    assert 'accuracy {:.1f} % of 6 test images'.format(100 * summary['final_accuracy']) in printed
    assert any(line.split()[:2] == ['lime', '3'] for line in printed)
    if '--output' in flags:
        assert_figure(printed[-3:], figure)
    mine, own = read_csv(table), read_csv(run / PREDICTIONS)
    for row in mine + own:
        row['probability'] = round(float(row['probability']), 3) if exact else None
    assert mine == own


def renamed(run, folder, names):
    """Copies the saved model of a run; returns its path there, beside these class names."""
    shutil.copytree(str(run / 'checkpoint'), str(folder / 'model'))
    (folder / 'model' / 'class_names.txt').write_text(''.join(name + '\n' for name in names))
    return str(folder / 'model' / MODEL_FILE)


@pytest.mark.parametrize('names, swapped', [
    (['plum', 'lime'], True), (['LIME ', 'Plum'], False)])
def test_names_in_another_order_or_form_are_matched(trained, tmp_path, capsys, names, swapped):
    photos, run, _ = trained
    assert evaluate.main([renamed(run, tmp_path, names), '--dataset_name',
                          'folder:{}'.format(photos)]) == 0
    accuracy = 100 * abs(swapped - read_run(str(run)).summary['final_accuracy'])
    assert 'accuracy {:.1f} % of 6'.format(accuracy) in capsys.readouterr().out


@pytest.mark.parametrize('names, says', [
    (['lime', 'pear'], 'has 2; only the model has pear; only the data set has plum'),
    (['lime', 'lime'], 'only the data set has plum'),
    (['lime', 'plum', 'pear'], 'the model names 3 classes and has 2 outputs')])
def test_other_classes_are_refused(trained, tmp_path, names, says):
    photos, run, _ = trained
    with pytest.raises(UserError, match=says):
        evaluate.main([renamed(run, tmp_path, names), '--dataset_name', 'folder:{}'.format(photos)])


def test_a_model_without_names_needs_the_number_of_classes(trained, tmp_path, capsys):
    data = ['--dataset_name', 'folder:{}'.format(trained[0])]
    evaluate.main([saved(small_classifier(2), tmp_path)] + data)
    assert re.search('no class names: assuming the order of folder:.* .lime, plum.\n',
                     capsys.readouterr().out)
    with pytest.raises(UserError, match='has 3 outputs, folder:.*photos has 2 classes'):
        evaluate.main([saved(small_classifier(3), tmp_path)] + data)


def test_bad_test_images_are_named_or_left_out(trained, tmp_path, capsys):
    photos, run, _ = trained
    shutil.copytree(str(photos), str(tmp_path / 'photos'))
    tested = read_csv(run / PREDICTIONS)[1]['image']
    (tmp_path / 'photos' / tested).write_bytes(b'damaged since')
    flags = [str(run), '--dataset_name', 'folder:{}'.format(tmp_path / 'photos')]
    with pytest.raises(UserError, match="cannot read image '.*{}'".format(tested)):
        evaluate.main(flags)
    assert evaluate.main(flags + ['--skip_bad_images']) == 0
    assert '1 images could not be read' in capsys.readouterr().out


# ---------------------------------------------------------------- names and files of any kind

def test_photos_of_a_folder_are_predicted_and_other_files_counted(trained, tmp_path, capsys):
    _, run, _ = trained
    for name in ('photo', 'more/photo.png'):
        write(tmp_path / name, photo(COLOURS['plum'], 7))
    for name in ('a.heic', 'b.HEIC', 'list.csv', '.hidden.png', '.thumbs/a.png'):
        write(tmp_path / name, b'no photo')
    assert predict.main([str(run), str(tmp_path), '--top', '1']) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == printed.out.count('  plum ') == 2
    assert printed.err.startswith('{}: left out: 2 .heic (not an image that Pillow reads), '
                                  '1 .csv'.format(tmp_path))


def test_names_that_do_not_fit_the_outputs_are_refused(trained, tmp_path):
    photos, run, _ = trained
    model = renamed(run, tmp_path, ['lime', 'plum', 'pear'])
    with pytest.raises(UserError, match='names 3 classes and has 2 outputs'):
        predict.main([model, str(photos / 'lime' / '0.png')])


def test_evaluate_warns_of_photos_that_have_changed_since_the_run(trained, capsys):
    photos, run, _ = trained
    assert evaluate.main([str(run)]) == 0
    assert 'changed' not in capsys.readouterr().out
    write(photos / 'lime' / 'new.png', photo(COLOURS['lime'], 5))
    try:
        assert evaluate.main([str(run)]) == 0
    finally:
        (photos / 'lime' / 'new.png').unlink()
    assert 'warning: the images have changed since the run (1 added (lime/new.png)), which' in (
        capsys.readouterr().out)


@pytest.mark.parametrize('separator', [
    '\u2028', pytest.param('\x85', marks=pytest.mark.thorough),
    pytest.param('\n', marks=pytest.mark.thorough)])
def test_a_line_separator_in_a_class_name_shifts_no_prediction(tmp_path, capsys, separator):
    names = ('acer{}palmatum'.format(separator), 'betula', 'carpinus')
    for name, colour in zip(names, ((200, 20, 20), (20, 200, 20), (20, 20, 200))):
        for i in range(10):
            write(tmp_path / 'photos' / name / '{}.png'.format(i), photo(colour, i))
    train_on(tmp_path, '4', 'litert')
    capsys.readouterr()
    for model in ('run', 'run/checkpoint/' + FILE):
        predict.main([str(tmp_path / model), str(tmp_path / 'photos' / 'carpinus'), '--top', '1'])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 10 and all('  carpinus ' in line for line in lines), lines
    labels = (tmp_path / 'run' / 'checkpoint' / 'class_names.txt').read_text(encoding='utf-8')
    assert labels.splitlines() == ['acer palmatum', 'betula', 'carpinus']
