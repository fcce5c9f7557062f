"""Tests the images that a run keeps for later runs, and the batches that mix them in."""

import os

import numpy as np
import pytest

import datasets
from elastic.data.replay import FOLDER, keep_images, kept_images
from elastic.errors import UserError
from image_folders import arrays, encoded, load_photos, write

CLASSES = ('cat', 'dog')


def photos_of(path, classes=CLASSES, count=10, seed=0):
    """Writes `count` photos of each class; returns the Images of the folder."""
    for c, name in enumerate(classes):
        for i in range(count):
            write(path / name / 'IMG_{:02d}.png'.format(i),
                  encoded(1000 * seed + 100 * c + i, 'png'))
    return images_of(path)


def images_of(path, size=24, **more):
    return datasets.find_images('folder:{}'.format(path), size, 4, **more)


def files_in(path):
    """Returns path within the kept images -> bytes."""
    return {str(file.relative_to(path / FOLDER)): file.read_bytes()
            for file in sorted((path / FOLDER).rglob('*')) if file.is_file()}


def test_photos_are_kept_as_they_are_the_same_number_of_each_class(tmp_path):
    images = photos_of(tmp_path / 'monday')
    assert keep_images(str(tmp_path), images, 7) == 7
    found = files_in(tmp_path)
    per_class = sorted(sum(path.startswith(name) for path in found) for name in CLASSES)
    assert per_class == [3, 4]
    for path, content in found.items():
        name, file = path.split('/')
        assert content == (tmp_path / 'monday' / name / file[len('1-'):]).read_bytes()
    keep_images(str(tmp_path), images, 3)
    assert set(files_in(tmp_path)) < set(found)  # the same order, and no older files stay


def test_the_sample_of_a_chain_is_one_of_all_its_images(tmp_path):
    """A run that keeps 8 images ends with those that it would keep if none had been dropped."""
    for day in range(3):
        photos_of(tmp_path / str(day), seed=day)
        for amount in (8, 10 ** 6):
            run = tmp_path / 'run{}_{}'.format(day, amount)
            before = tmp_path / 'run{}_{}'.format(day - 1, amount) / FOLDER
            images = images_of(tmp_path / str(day), replay_from=str(before))
            keep_images(str(run), images, amount)
    assert len(files_in(run)) == 3 * 16
    limited = files_in(tmp_path / 'run2_8')
    keep_images(str(run), images, 8)
    assert files_in(run) == limited and len(limited) == 8
    assert {os.path.basename(path)[0] for path in limited} == {'1', '2', '3'}


def test_images_of_other_sets_are_kept_bit_for_bit(tmp_path):
    data = datasets.find_images('digits', 24, 4, train_images=40)
    keep_images(str(tmp_path), data, 20)
    kept = kept_images(str(tmp_path / FOLDER), data.class_names, 24)
    assert np.bincount(kept.labels()).tolist() == [2] * 10
    originals = {name: index for index, name in enumerate(data.train.named())}
    for index, name in enumerate(kept.named()):
        number = originals[os.path.basename(name)[len('1-'):-len('.png')]]
        assert np.array_equal(data.train.fetch(np.int64(number)), kept.fetch(np.int64(index)))
        assert data.train.labels()[number] == kept.labels()[index]


def test_a_size_bounds_the_bytes_that_are_kept(tmp_path):
    images = photos_of(tmp_path / 'monday')
    keep_images(str(tmp_path), images, 10 ** 6)
    every = files_in(tmp_path)
    keep_images(str(tmp_path), images, '2KB')
    kept = [len(content) for content in files_in(tmp_path).values()]
    assert 0 < len(kept) < len(every)
    assert 2000 - max(map(len, every.values())) < sum(kept) <= 2000


@pytest.mark.parametrize('share, kept, off', [(0.25, 8, 1), (0.5, 2, 0)])
def test_each_batch_mixes_new_and_kept_images(share, kept, off, tmp_path):
    keep_images(str(tmp_path), photos_of(tmp_path / 'monday'), kept)
    photos_of(tmp_path / 'tuesday', seed=1)
    data = load_photos(tmp_path / 'tuesday', replay_from=str(tmp_path / FOLDER),
                       replay_share=share, augmentation='none')
    new = data.num_images - kept
    assert new == 16 and data.train_size == round(new / (1 - share))
    shown = []
    for epoch in range(1, 9):
        order = data.order(epoch)
        assert np.abs(np.sum(order >= new, axis=1) - 4 * share).max() <= off
        seen = np.bincount(order[order < new], minlength=new)
        assert seen.max() == 1 and seen.sum() >= new - 3  # what a last, partial batch would have
        shown.append(order)
    assert not np.array_equal(shown[0], shown[1])
    assert set(np.concatenate(shown).flatten()) == set(range(new + kept))
    by_number = [images[0] for images, _ in arrays(data.batches(
        np.arange(data.num_images)[:, None].repeat(4, 1), 0))]
    for batch, (images, _) in zip(shown[0], arrays(data.train)):
        assert np.array_equal(images, np.array([by_number[number] for number in batch]))


def test_class_weights_and_validation_see_the_mixture(tmp_path):
    keep_images(str(tmp_path), photos_of(tmp_path / 'monday'), 4)
    photos_of(tmp_path / 'tuesday', ('dog', 'cat'), seed=1)
    images = images_of(tmp_path / 'tuesday', replay_from=str(tmp_path / FOLDER),
                       class_weight='balanced')
    # 8 new images of each class, and each kept one four times
    assert [row[1] for row in images.class_weights] == [16, 16]
    images = images_of(tmp_path / 'tuesday', replay_from=str(tmp_path / FOLDER),
                       validation_share=0.5)
    assert (images.train.size, images.train.old) == (10, 2)
    assert sum('1-IMG' in name for name in images.validation.named()) == 2
    assert keep_images(str(tmp_path / 'next'), images, 100) == 20  # with those for validation


def test_a_deleted_image_is_no_longer_used(tmp_path):
    keep_images(str(tmp_path), photos_of(tmp_path / 'monday'), 6)
    *others, file = (tmp_path / FOLDER).rglob('*.png')
    file.unlink()
    kept = kept_images(str(tmp_path / FOLDER), CLASSES, 24)
    assert kept.size == 5 and str(file) not in kept.files
    for file in others:
        file.unlink()
    assert kept_images(str(tmp_path / FOLDER), CLASSES, 24) is None


@pytest.mark.parametrize('file, words', [
    ('notes.png', r'left out: 1 notes.png \(in no class folder\); remove'),
    ('cats/1-a.png', "kept images of 'cats' in .*: no class .*did you mean 'cat'")])
def test_an_image_of_no_known_class_is_refused(file, words, tmp_path):
    keep_images(str(tmp_path), photos_of(tmp_path / 'monday'), 6)
    write(tmp_path / FOLDER / file, encoded(0, 'png'))
    with pytest.raises(UserError, match=words):
        images_of(tmp_path / 'monday', replay_from=str(tmp_path / FOLDER))


def test_a_damaged_kept_image_is_left_out(tmp_path):
    keep_images(str(tmp_path), photos_of(tmp_path / 'monday'), 6)
    file = next((tmp_path / FOLDER / 'cat').iterdir())
    file.write_bytes(file.read_bytes()[:60])
    data = load_photos(tmp_path / 'monday', replay_from=str(tmp_path / FOLDER),
                       skip_bad_images=True)
    assert data.left_out == [str(file)]
    keep_images(str(tmp_path / 'run'), images_of(
        tmp_path / 'monday', replay_from=str(tmp_path / FOLDER)), 100, data.left_out)
    assert len(files_in(tmp_path / 'run')) == 16 + 5


@pytest.mark.parametrize('name', ['T-shirt/top', '.hidden', 'a%2Fb'])
def test_any_name_of_a_class_is_a_folder(name, tmp_path):
    images = photos_of(tmp_path / 'monday')._replace(class_names=(name, 'dog'))
    keep_images(str(tmp_path), images, 4)
    kept = kept_images(str(tmp_path / FOLDER), ('dog', name), 24)
    assert sorted(kept.labels()) == [0, 0, 1, 1]
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
