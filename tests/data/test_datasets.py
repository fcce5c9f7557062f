"""Tests data sets by name: photo data sets, digits, and a user's folder."""

import os
import re
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import datasets
import tfds_archives
from elastic.data import digits
from elastic.data.images import check_dataset_name
from elastic.data.split import Split
from elastic.errors import UserError
from image_folders import arrays, encoded, load_photos, same, write, write_photos
from small_runs import script

PHOTO_SETS = {  # (classes, training images, test images) of the tiny archives
    'caltech_birds2011': (200, 8, 4), 'oxford_iiit_pet': (37, 14, 6),
    'stanford_dogs': (120, 120, 5)}


@pytest.fixture(scope='module')
def tfds_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp('tfds')
    for name in PHOTO_SETS:
        tfds_archives.prepare(name, path)
    return str(path)


@pytest.fixture
def photos(tmp_path):
    write_photos(tmp_path)
    return tmp_path


# --- names

def test_names_are_checked_without_loading_tensorflow():
    code = ('import sys, datasets; from elastic.data import images\n'
            'for name in images.LOADERS: images.check_dataset_name(name)\n'
            'assert images.augmentation_of("digits") == "none"\n'
            'assert images.augmentation_of("stanford_dogs") == "flip+rotate"\n'
            'assert images.augmentation_of("tfds:cifar10") == "flip"\n'
            'heavy = {"tensorflow", "tensorflow_datasets", "sklearn", "tqdm"} & set(sys.modules)\n'
            'assert not heavy, heavy')
    assert script('-c', code) == (0, '', '')


@pytest.mark.parametrize('name, hint', [('stanford_dog', 'stanford_dogs'), ('xyz', 'folder:PATH')])
def test_an_unknown_name_is_refused_with_what_is_allowed(name, hint):
    with pytest.raises(UserError, match=hint):
        datasets.load_dataset(name, 32, 4)


def test_a_folder_must_exist_and_contain_sub_folders(tmp_path):
    (tmp_path / 'flowers').mkdir()
    with pytest.raises(UserError, match="did you mean 'flowers'"):
        check_dataset_name('folder:{}'.format(tmp_path / 'flower'))
    with pytest.raises(UserError, match='no sub-folders'):
        check_dataset_name('folder:{}'.format(tmp_path / 'flowers'))
    with pytest.raises(UserError, match='folder:PATH'):
        check_dataset_name('folder:')


# --- the three photo sets

@pytest.mark.parametrize('name', sorted(PHOTO_SETS))
@pytest.mark.thorough
def test_photo_sets_load_through_their_builders(name, tfds_dir):
    classes, train_size, test_size = PHOTO_SETS[name]
    data = datasets.load_dataset(name, 32, 4, data_dir=tfds_dir)
    assert data.augmentation == 'flip+rotate'
    assert (data.num_classes, len(data.class_names)) == (classes, classes)
    assert (data.train_size, data.test_size) == (train_size, test_size)
    train, test = arrays(data.train), arrays(data.test)
    assert len(train) == train_size // 4 == data.train.cardinality().numpy()
    assert sum(len(labels) for _, labels in test) == test_size
    for images, labels in train + test:
        assert images.shape == labels.shape + (32, 32, 3)
        assert images.dtype == np.float32 and labels.dtype == np.int32
        assert images.min() >= 0 and 100 < images.max() <= 255
        assert labels.min() >= 0 and labels.max() < classes
    assert train[0][0].shape[0] == 4


def test_photo_sets_equal_what_the_builder_reads(tfds_dir):
    import tensorflow_datasets as tfds
    data = datasets.load_dataset('stanford_dogs', 32, 4, data_dir=tfds_dir, cache='none')
    builder = tfds.builder('stanford_dogs', data_dir=tfds_dir)

    def resized(image):
        return np.round(tf.image.resize(image, (32, 32)).numpy())

    theirs = sorted((int(e['label']), resized(e['image']).tobytes())
                    for e in builder.as_dataset(split='test'))
    ours = sorted((int(label), image.tobytes()) for images, labels in arrays(data.test)
                  for image, label in zip(images, labels))
    assert ours == theirs


def test_batches_do_not_depend_on_the_cache(photos, tfds_dir):
    for name in ('folder:{}'.format(photos), 'caltech_birds2011'):
        kept, decoded = [datasets.load_dataset(name, 24, 4, data_dir=tfds_dir, cache=cache)
                         for cache in ('memory', 'none')]
        assert same(arrays(kept.train), arrays(decoded.train))
        assert same(arrays(kept.test), arrays(decoded.test))
        assert same(arrays(kept.probe.take(3)), arrays(decoded.probe.take(3)))


def test_all_images_of_a_folder_are_read_even_if_few_are_tested(tmp_path):
    every, some = [datasets.load_dataset('digits', 8, 4, train_images=40, validation_steps=steps)
                   for steps in (None, 2)]
    assert every.test_size > 1000 and some.test_size == 8
    assert some.fingerprint == every.fingerprint  # a checkpoint serves only the same images
    write_photos(tmp_path)
    folder = 'folder:{}'.format(tmp_path)
    tested = datasets.load_dataset(folder, 8, 4, validation_steps=1).test_names
    unused = next(name for name in datasets.load_dataset(folder, 8, 4).test_names
                  if name not in tested)
    write(tmp_path / unused, encoded(0, 'jpg')[:-200])  # its header is whole
    for cache in ('memory', 'none'):
        with pytest.raises(UserError, match=unused):
            datasets.load_dataset(folder, 8, 4, cache, validation_steps=1)


def test_progress_is_shown_where_images_take_long(monkeypatch, capsys):
    def fetch(index):
        return tf.numpy_function(lambda _: time.sleep(0.05) or np.zeros((8, 8, 3), np.uint8),
                                 [index], tf.uint8)
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    Split(8, lambda: np.zeros(64, np.int32), 64, fetch).decoded(True, 'train')
    assert re.search('train: .*/64', capsys.readouterr().err)


def test_a_share_of_each_class_is_set_aside_for_validation(tmp_path):
    sizes = dict(many=40, some=8, two=2, one=1)
    for c, (name, count) in enumerate(sorted(sizes.items())):
        for i in range(count):
            write(tmp_path / 'train' / name / '{}.png'.format(i), encoded(100 * c + i, 'png'))
        write(tmp_path / 'test' / name / '0.png', encoded(100 * c + 99, 'png'))
    name = 'folder:{}'.format(tmp_path)

    def images(batches):
        return {image.tobytes(): label for some, labels in arrays(batches)
                for image, label in zip(some, labels)}
    whole, split, other = [datasets.load_dataset(name, 8, 1, augmentation='none', **more)
                           for more in ({}, dict(validation_share=0.25),
                                        dict(validation_share=0.25, seed=7))]
    trained, validated, every = images(split.train), images(split.validation), images(whole.train)
    assert np.bincount(list(validated.values())).tolist() == [10, 0, 2, 1]  # by name
    assert not set(trained) & set(validated)
    trained.update(validated)
    assert trained == every and images(split.test) == images(whole.test)
    assert images(other.validation) == validated  # whatever the seed
    assert whole.validation is None and split.fingerprint == whole.fingerprint
    assert split.num_images == 38 and split.notes == (
        '13 of 51 training images are set aside for validation',)
    few = datasets.load_dataset('digits', 8, 8, train_images=40, validation_share=0.25)
    assert few.num_images == 30 and sum(len(labels) for _, labels in few.validation) == 10
    with pytest.raises(UserError, match='--validation_share 0.5 sets no image aside'):
        datasets.find_images('digits', 8, 8, train_images=10, validation_share=0.5)
    with pytest.raises(UserError, match='does not fit into the 10 training images'):
        datasets.find_images('digits', 8, 11, train_images=11, validation_share=0.9)


def test_unreadable_validation_images_are_named_or_left_out(photos):
    write(photos / 'cat' / '0.JPG', b'no image')
    options = dict(validation_share=0.9)  # nearly all of the training images
    with pytest.raises(UserError, match='0.JPG'):
        load_photos(photos, **options)
    data = load_photos(photos, skip_bad_images=True, **options)
    assert [os.path.basename(path) for path in data.left_out] == ['0.JPG']


def test_no_batch_is_at_hand_from_an_unprepared_data_set(tmp_path, offline):
    tfds_archives.prepare('oxford_iiit_pet', tmp_path)
    for _ in range(2):
        assert datasets.batch_at_hand('oxford_iiit_pet', 24, 4, 37, str(tmp_path)) == (
            None, 'oxford_iiit_pet is not prepared in {}'.format(tmp_path))
        # An older version, which may be incomplete, does not help.
        (tmp_path / 'oxford_iiit_pet' / '0.0.1').mkdir(parents=True, exist_ok=True)
    assert os.listdir(str(tmp_path / 'oxford_iiit_pet')) == ['0.0.1']


def test_no_batch_is_at_hand_from_unsuitable_images(photos):
    name = 'folder:{}'.format(photos)
    assert datasets.batch_at_hand(name, 24, 4, 3) == (None, name + ' has 2 classes, not 3')
    assert 'a batch of 400 does not fit' in datasets.batch_at_hand(name, 24, 400, 2)[1]
    for image in photos.glob('*/*[0-9].*'):
        image.write_bytes(b'not an image')
    batch, reason = datasets.batch_at_hand(name, 24, 4, 2)
    assert batch is None and reason and '\n' not in reason


def test_a_broken_archive_gives_the_cause_and_the_remedy(tmp_path, offline):
    tfds_archives.prepare('oxford_iiit_pet', tmp_path)
    write(tmp_path / 'downloads' / 'manual' / 'annotations.tar.gz', b'half a download')
    with pytest.raises(UserError, match='cannot be prepared: [A-Z][A-Za-z]+: .*\n.*archives'):
        datasets.load_dataset('oxford_iiit_pet', 32, 4, data_dir=str(tmp_path))


# --- digits

@pytest.mark.parametrize('name', digits.DIGIT_NAMES)
def test_digits_need_only_scikit_learn(name):
    data = datasets.load_dataset(name, 24, 32, 'unread')
    assert (data.num_classes, data.class_names) == (10, tuple('0123456789'))
    assert data.train_size > 5000 and data.test_size >= 2000
    assert data.augmentation == 'none'
    images, labels = arrays(data.test.take(1))[0]
    assert images.shape == (64, 24, 24, 3)
    assert images.dtype == np.float32
    assert images.min() >= 0 and images.max() <= 255


def test_training_and_test_digits_show_different_originals():
    train, test = digits.digit_originals('train'), digits.digit_originals('test')
    assert sorted(np.append(train, test)) == list(range(1797)) and 430 < len(test) < 460


def test_digit_domains_show_the_same_originals_in_different_styles():
    from sklearn.datasets import load_digits
    originals = load_digits().images[digits.digit_originals('test')[:64]] / 16
    small = {name: arrays(datasets.load_dataset(name, 8, 64, 'unread').test.take(1))[0][0].mean(3)
             for name in digits.DIGIT_NAMES}

    def alike(images, shapes):
        return np.mean([np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(images, shapes)])

    turned = np.rot90(originals, axes=(1, 2))
    assert alike(small['digits'], originals) > 0.5
    assert alike(small['digits_shifted'], turned) > 0.5
    assert alike(small['digits_shifted'], originals) < 0.3
    assert small['digits'].mean() + 10 < small['digits_shifted'].mean()  # by their background


# --- a user's folder

def test_a_folder_of_classes_is_split_regardless_of_the_seed(photos):
    data = load_photos(photos)
    assert data.class_names == ('cat', 'dog') and data.augmentation == 'flip'
    assert (data.train_size, data.test_size) == (32, 8)
    assert same(arrays(data.test), arrays(load_photos(photos, seed=9).test))
    for images, _ in arrays(data.train) + arrays(data.test):
        assert images.shape[1:] == (24, 24, 3) and images.min() >= 0 and images.max() <= 255


def test_training_images_are_named_with_those_of_other_workers_and_for_validation(photos):
    """They are no test images of an earlier run, whoever trains on them."""
    alone = load_photos(photos).train_names
    parts = [load_photos(photos, share=(index, 2), validation_share=0.2) for index in range(2)]
    assert [sorted(part.train_names) for part in parts] == [sorted(alone)] * 2
    assert parts[0].num_images < len(alone)


def test_a_folder_too_small_to_train_and_test_on_is_refused(tmp_path):
    write(tmp_path / 'a' / '0.png', encoded(0, 'png'))
    write(tmp_path / 'a' / '1.png', encoded(1, 'png'))
    with pytest.raises(UserError, match='1 class'):
        load_photos(tmp_path)
    write(tmp_path / 'b' / '0.png', encoded(0, 'png'))
    os.remove(str(tmp_path / 'a' / '1.png'))
    with pytest.raises(UserError, match='0 test image'):
        load_photos(tmp_path)
