"""Tests that a run notices changed photos, and no copy of the same ones."""

import os
import shutil

import pytest

from elastic.data.images import load_images
from elastic.data.photo_list import PHOTOS, SAMPLE, changes, listed
from elastic.files import write_json
from elastic.settings import DataSettings
from image_folders import bitmap, encoded, write


def photos_of(path):
    return load_images('folder:{}'.format(path), 8, DataSettings()).photos


@pytest.fixture
def folder(tmp_path):
    """Returns a folder of two classes; the photos of each are in a folder inside."""
    for part in ('train', 'test'):
        for c, name in enumerate('ab'):
            for i in range(4):
                write(tmp_path / 'photos' / part / name / 'cam' / '{}{}.bmp'.format(part[1], i),
                      bitmap(bytes([c, i, ord(part[1])]) * 64 + bytes(64)))
    return tmp_path / 'photos'


@pytest.fixture
def run(folder, tmp_path):
    """Returns the folder of a run on these photos."""
    (tmp_path / 'run').mkdir()
    return remembered(folder, tmp_path / 'run')


def remembered(folder, run):
    write_json(str(run / PHOTOS), listed(photos_of(folder)))
    return run


def changed(run, folder):
    return changes(str(run), photos_of(folder))


def rename(folder, old, new):
    (folder / new).parent.mkdir(parents=True, exist_ok=True)
    os.rename(str(folder / old), str(folder / new))


def replaced(folder):
    """Replaces a photo by another one with the same size and time."""
    path = str(folder / 'test/b/cam/e1.bmp')
    before = os.stat(path)
    with open(path, 'wb') as file:
        file.write(bitmap(bytes([9]) * 256))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.path.getsize(path) == before.st_size


def swapped(folder):
    rename(folder, 'train/a/cam/r0.bmp', 'swap')
    rename(folder, 'train/b/cam/r0.bmp', 'train/a/cam/r0.bmp')
    rename(folder, 'swap', 'train/b/cam/r0.bmp')


@pytest.mark.parametrize('change, said', [
    (lambda at: write(at / 'train/a/cam/new.png', encoded(1, 'png')),
     '1 added (train/a/cam/new.png)'),
    (lambda at: os.remove(str(at / 'train/a/cam/r0.bmp')), '1 removed (train/a/cam/r0.bmp)'),
    (lambda at: rename(at, 'train/a/cam/r0.bmp', 'test/a/cam/r0.bmp'),
     '1 moved (train/a/cam/r0.bmp to test/a/cam/r0.bmp)'),
    (lambda at: [rename(at, part + '/a', part + '/c') for part in ('train', 'test')],
     '8 moved (test/a/cam/e0.bmp to test/c/cam/e0.bmp, test/a/cam/e1.bmp to test/c/cam/e1.bmp, '
     'test/a/cam/e2.bmp to test/c/cam/e2.bmp and 5 more)'),
    (replaced, '1 replaced (test/b/cam/e1.bmp)'),
    (swapped, '2 replaced (train/a/cam/r0.bmp, train/b/cam/r0.bmp)')],
    ids=['added', 'removed', 'moved', 'relabelled', 'replaced', 'swapped'])
def test_what_changed_is_said(folder, run, change, said):
    assert changed(run, folder) == ''
    change(folder)
    assert changed(run, folder) == said


def test_a_copy_with_other_times_has_the_same_photos(folder, run, tmp_path):
    shutil.copytree(str(folder), str(tmp_path / 'copy'))
    for parent, _, names in os.walk(str(tmp_path / 'copy')):
        for name in names:
            os.utime(os.path.join(parent, name), (1, 1))
    assert changed(run, tmp_path / 'copy') == ''


def test_names_in_another_case_or_form_are_the_same(folder, run):
    rename(folder, 'train/a/cam/r0.bmp', 'train/a/cam/caf\xe9.bmp')
    remembered(folder, run)
    before = load_images('folder:{}'.format(folder), 8, DataSettings()).fingerprint
    rename(folder, 'train/a/cam/caf\xe9.bmp', 'train/a/cam/cafe\u0301.bmp')
    rename(folder, 'train/a', 'train/A')
    assert changed(run, folder) == ''
    after = load_images('folder:{}'.format(folder), 8, DataSettings())
    assert after.class_names == ('A', 'b') and after.fingerprint == before


def test_only_photos_with_other_times_are_read_again(folder):
    photos = photos_of(folder)
    before = {name: stamp[:2] + ['not read'] for name, stamp in listed(photos).items()}
    assert listed(photos, before) == before
    os.utime(photos['train/a/cam/r0.bmp'], (1, 1))
    again = listed(photos, before)
    assert [name for name in again if again[name] != before[name]] == ['train/a/cam/r0.bmp']


def test_large_photos_are_compared_at_the_beginning_and_in_the_middle(folder, run):
    path = folder / 'train' / 'a' / 'cam' / 'r0.bmp'
    content = bytearray(path.read_bytes() + bytes(5 * SAMPLE))
    path.write_bytes(content)
    remembered(folder, run)
    content[len(content) // 2 + 1] = 1
    path.write_bytes(content)
    assert changed(run, folder) == '1 replaced (train/a/cam/r0.bmp)'


def test_a_photo_that_broke_is_no_other_one_where_bad_images_are_skipped(folder, run):
    write(folder / 'train' / 'a' / 'cam' / 'r0.bmp', b'broken')
    assert changed(run, folder) == '1 replaced (train/a/cam/r0.bmp)'
    assert changes(str(run), photos_of(folder), skip_bad_images=True) == ''
