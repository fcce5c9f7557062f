"""Tests the way from photos to a model on a device: train, save, export, predict."""

import csv
import io
import sys

import numpy as np
import pytest
from PIL import Image

import main
import predict
from elastic.command_line import UserError
from elastic.export.litert import FILE
from elastic.runs.folder import read_run
from image_folders import write
from small_models import saved, small_base

COLOURS = {'lime': (120, 220, 40), 'plum': (110, 30, 120)}


def photo(colour, seed, size=(40, 30)):
    noise = np.random.RandomState(seed).normal(0, 20, size[::-1] + (3,))
    content = io.BytesIO()
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(content, 'PNG')
    return content.getvalue()


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Returns (folder of photos, folder of a run on them that exported its model, its output)."""
    root = tmp_path_factory.mktemp('predict')
    for name, colour in COLOURS.items():
        for i in range(15):
            write(root / 'photos' / name / '{}.png'.format(i), photo(colour, i))
    base, printed = saved(small_base(), root), io.StringIO()
    stdout, sys.stdout = sys.stdout, printed
    try:
        assert main.main([
            '--model_name', base, '--dataset_name', 'folder:{}'.format(root / 'photos'),
            '--input_size', '16', '--batch_size', '4', '--num_epochs', '6', '--learning_rate',
            '0.02', '--bn_statistics', 'train', '--train_type', 'full_training', '--export',
            'litert_int8', '--run_name', 'run', '--logs_dir', str(root)]) == 0
    finally:
        sys.stdout = stdout
    return root / 'photos', root / 'run', printed.getvalue()


def test_a_run_says_which_output_is_which_class(trained):
    _, run, printed = trained
    assert 'outputs: 0 lime, 1 plum\n' in printed
    assert read_run(str(run)).summary['class_names'] == ['lime', 'plum']
    assert (run / 'checkpoint' / 'class_names.txt').read_text() == 'lime\nplum\n'


def test_the_accuracy_of_an_exported_file_is_printed(trained):
    _, run, printed = trained
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
    with open(str(table)) as source:
        rows = list(csv.DictReader(source))
    assert [row['prediction'] for row in rows] == ['lime', 'plum']
    assert all(float(row['lime']) + float(row['plum']) == pytest.approx(1, abs=0.02)
               for row in rows)


def test_a_bad_photo_is_named_and_the_others_are_predicted(trained, tmp_path, capsys, monkeypatch):
    _, run, _ = trained
    write(tmp_path / 'bad.jpg', b'<html>')
    write(tmp_path / 'good.png', photo(COLOURS['plum'], 7))
    monkeypatch.setattr(sys, 'stdin', io.StringIO('{0}/bad.jpg\n\n{0}/good.png\n'.format(tmp_path)))
    assert predict.main([str(run), '-', '--top', '1']) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith('{}  plum '.format(tmp_path / 'good.png'))
    assert "cannot read image '{}': no image".format(tmp_path / 'bad.jpg') in printed.err


@pytest.mark.parametrize('arguments, said', [
    (['{run}', '{root}/nowhere.jpg'], 'no photo at'), (['{root}', '{root}'], 'no images in folder'),
    (['{root}/nothing', '{photo}'], 'no run or model at'),
    (['{root}/nothing.tflite', '{photo}'], 'no LiteRT file at'),
    (['{photo}', '{photo}'], 'is not a saved Keras model')])
def test_what_cannot_be_predicted_is_refused(trained, tmp_path, arguments, said):
    photos, run, _ = trained
    names = dict(run=run, root=tmp_path, photo=photos / 'lime' / '0.png')
    with pytest.raises(UserError, match=said):
        predict.main([each.format(**names) for each in arguments])
