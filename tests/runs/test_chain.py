"""Tests that a run continues a finished one, on images of old and new classes."""

import json
import os
import shutil

import numpy as np
import pytest

import main
from elastic.data.class_names import joined
from elastic.errors import UserError
from elastic.files import read_json
from image_folders import encoded, write
from models import build_model
from refusals import assert_refused
from small_runs import outcome, quick_flags, stopped_at

FULL = ['--train_type', 'full_training']


def write_classes(folder, *names, images=10, seed=0):
    """Writes a folder of photos; the same seed gives the same photos."""
    for c, name in enumerate(names):
        for i in range(images):
            write(folder / name / '{}.png'.format(i), encoded(100 * seed + 20 * c + i, 'png'))
    return 'folder:{}'.format(folder)


def flags_of(logs, data, *more):
    """Returns the flags of a small run on a folder of photos."""
    given = quick_flags(logs, '--run_name', 'monday', *FULL)
    place = given.index('--train_images')
    return given[:place] + given[place + 2:] + ['--dataset_name', data] + list(more)


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """Returns a folder of runs with the finished run `monday`, of the classes cat and dog."""
    folder = tmp_path_factory.mktemp('chain')
    (folder / 'logs').mkdir()
    data = write_classes(folder / 'photos' / 'monday', 'cat', 'dog')
    assert main.main(flags_of(folder / 'logs', data, '--save_model')) == 0
    return folder / 'logs'


def tuesday(logs, *more, classes=('ant', 'dog'), day='tuesday'):
    """Returns the flags of a run that continues `monday`."""
    data = write_classes(logs.parent / 'photos' / day, *classes, seed=1)
    return ['--continue_from', 'monday', '--dataset_name', data, '--logs_dir', str(logs)] + list(
        more)


def content(folder):
    return {str(path): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_a_run_continues_with_old_and_new_classes_and_leaves_the_old_run_alone(logs, capsys):
    before = content(logs / 'monday')
    assert main.main(tuesday(logs, '--run_name', 'tuesday')) == 0
    out, summary = capsys.readouterr().out, read_json(str(logs / 'tuesday' / 'summary.json'))
    assert 'was replaced' not in out and 'classes in the order of the outputs: cat, dog, ant' in out
    assert summary['class_names'] == ['cat', 'dog', 'ant']
    assert summary['run_before'] == os.path.join('..', 'monday')
    old = read_json(str(logs / 'monday' / 'settings.json'))
    new = read_json(str(logs / 'tuesday' / 'settings.json'))
    assert {name for name in new if new[name] != old[name]} == {
        'continue_from', 'dataset_name', 'weights'}
    assert content(logs / 'monday') == before
    assert main.main(tuesday(logs, '--run_name', 'tuesday')) == 0
    assert 'already finished' in capsys.readouterr().out
