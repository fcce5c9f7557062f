"""Makes folders of tiny photos, and the flags of runs on them that continue each other."""

import os
import pathlib

import main
from image_folders import encoded, write
from small_runs import quick_flags

FULL = ['--train_type', 'full_training']


def photos(folder, *names, images=10, seed=0):
    """Writes photos of these classes; the same seed gives the same ones. Returns --dataset_name."""
    for c, name in enumerate(names):
        for i in range(images):
            write(folder / name / '{}.png'.format(i), encoded(100 * seed + 20 * c + i, 'png'))
    return 'folder:{}'.format(folder)


def first_flags(logs, data, *more):
    """Returns the flags of a small run on photos."""
    given = quick_flags(logs, *FULL)
    place = given.index('--train_images')
    return given[:place] + given[place + 2:] + ['--dataset_name', data] + list(more)


def next_flags(logs, run, name, data, *more):
    """Returns the flags of run `name`, which continues `run`."""
    return ['--continue_from', run, '--run_name', name, '--dataset_name', data, '--logs_dir',
            str(logs)] + list(more)


def chain(folder):
    """Trains monday (cat, dog), tuesday (ant, dog), wednesday (cat, ant); returns their logs_dir.

    Nothing is learned: the learning rate is 0.
    """
    logs = folder / 'logs'
    logs.mkdir()
    still = ['--learning_rate', '0', '--num_epochs', '1']
    assert main.main(first_flags(logs, photos(folder / 'monday', 'cat', 'dog'), '--run_name',
                                 'monday', *still)) == 0
    for number, (before, day, names) in enumerate((
            ('monday', 'tuesday', ('ant', 'dog')), ('tuesday', 'wednesday', ('cat', 'ant'))), 1):
        data = photos(folder / day, *names, seed=number)
        assert main.main(next_flags(logs, before, day, data)) == 0
    return logs


def content(folder):
    """Returns path -> bytes of all files below a folder."""
    return {str(path): path.read_bytes() for path in pathlib.Path(str(folder)).rglob('*')
            if os.path.isfile(str(path))}
