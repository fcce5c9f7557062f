"""Tests images from elsewhere: links out of the folder, broken and changed files."""

import os
import pathlib

import numpy as np
import pytest

import datasets
import main
from elastic.data.images import load_images, without_bad_images
from elastic.errors import UserError
from elastic.runs.folder import read_run
from elastic.settings import DataSettings
from image_folders import arrays, encoded, load_photos, write, write_photos
from photo_runs import first_flags
from small_runs import at_line, stopped_at


def test_links_are_followed_within_the_folder_alone(tmp_path):
    photos = tmp_path / 'photos'
    write_photos(photos)
    os.symlink('0.JPG', str(photos / 'cat' / '99.jpg'))
    assert sum(len(labels) for _, labels in arrays(load_photos(photos).train)) == 32
    write(tmp_path / 'private' / 'secret.jpg', encoded(1, 'jpg'))
    for name, target in (('cat/98.jpg', 'private/secret.jpg'), ('other', 'private')):
        link = photos / name
        os.symlink(str(tmp_path / target), str(link))
        with pytest.raises(UserError, match="'{}' is a link to .*, outside of".format(link)):
            load_photos(photos)
        link.unlink()


def test_bad_images_are_left_out_on_request(tmp_path):
    write_photos(tmp_path)
    whole = load_photos(tmp_path)  # in batches of four
    bad = [tmp_path / 'cat' / 'text.png', tmp_path / 'dog' / 'torn.jpg']
    write(bad[0], b'<html>')
    write(bad[1], encoded(1, 'jpg')[:40])
    with pytest.raises(UserError, match='--skip_bad_images'):
        load_photos(tmp_path)
    data = load_photos(tmp_path, skip_bad_images=True)
    assert sorted(data.left_out) == sorted(map(str, bad))
    assert data.train_size + data.test_size == whole.train_size + whole.test_size + 2
    assert all(np.isfinite(images).all() for images, _ in arrays(data.train))


def test_kept_images_stay_the_last_ones_if_one_of_them_cannot_be_read(tmp_path):
    write_photos(tmp_path)
    split = load_images('folder:{}'.format(tmp_path), 8, DataSettings()).train
    split = split._replace(old=3)
    write(pathlib.Path(split.files[-1]), b'<html>')
    good, bad = without_bad_images(split)
    assert bad == split.files[-1:] and good.size == split.size
    assert good.old == 3 and good.files[-3:] == [split.files[-3]] + [split.files[-2]] * 2


def flags_of_run(tmp_path, epochs):
    """Returns the flags of a run `run` of a tiny network on the folder `photos`."""
    return first_flags(tmp_path, 'folder:{}'.format(tmp_path / 'photos'), '--num_epochs', epochs,
                       '--checkpoint_minutes', '1e-9', '--run_name', 'run')


def test_an_image_that_breaks_ends_the_run_and_is_left_out_later(tmp_path, monkeypatch, capsys):
    write_photos(tmp_path / 'photos')
    arguments = flags_of_run(tmp_path, epochs='3')
    victim = tmp_path / 'photos' / 'cat' / '3.png'
    monkeypatch.setattr(datasets, 'MEMORY_SHARE', 0)  # images are decoded in each epoch
    with at_line('epoch 1/', lambda: victim.write_bytes(b'nothing')):
        with pytest.raises(UserError, match='{}.*--skip_bad_images'.format(victim)) as error:
            main.main(arguments)
    assert '\n' not in str(error.value)
    assert main.main(arguments + ['--skip_bad_images']) == 0
    run = read_run(str(tmp_path / 'run'))
    assert list(run.epochs['epoch']) == [1, 2, 3] and run.summary['images_left_out'] == 1
    assert '1 images could not be read and were left out: {}'.format(victim) in (
        capsys.readouterr().out)


@pytest.mark.parametrize('finished', [True, False])
def test_a_run_neither_ends_nor_resumes_on_other_photos(tmp_path, finished, capsys):
    for part, count in (('train', 8), ('test', 2)):
        for c, name in enumerate('ab'):
            for i in range(count):
                write(tmp_path / 'photos' / part / name / 'cam' / '{}{}.png'.format(c, i),
                      encoded(100 * c + i, 'png'))
    arguments = flags_of_run(tmp_path, epochs='2')
    if finished:
        assert main.main(arguments) == 0
    else:
        stopped_at('epoch 1/', arguments)
    records = sorted(os.listdir(str(tmp_path / 'run')))
    old, new = [tmp_path / 'photos' / 'train' / name / 'cam' / '03.png' for name in 'ab']
    os.rename(str(old), str(new))
    with pytest.raises(UserError, match='images have changed since .*: 1 moved .train/a/cam/03.png '
                                        'to train/b/cam/03.png.; .*--restart') as error:
        main.main(arguments)
    assert '\n' not in str(error.value)
    assert sorted(os.listdir(str(tmp_path / 'run'))) == records
    os.rename(str(new), str(old))
    os.utime(str(old), (1, 1))
    capsys.readouterr()
    assert main.main(arguments) == 0
    assert ('already finished' if finished else 'resumes in epoch') in capsys.readouterr().out
    os.rename(str(old), str(new))
    assert main.main(arguments + ['--restart']) == 0
    assert 'final test accuracy' in capsys.readouterr().out
