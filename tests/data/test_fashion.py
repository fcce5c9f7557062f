"""Tests Fashion-MNIST from the files of Debian's package, of which small ones are made here."""

import gzip
import os

import numpy as np
import pytest
import tensorflow as tf

from elastic.data import fashion
from elastic.data.images import augmentation_of
from elastic.data.split import fitted
from elastic.errors import UserError

SIZES = {'train': 40, 't10k': 20}


@pytest.fixture
def folder(tmp_path):
    rng = np.random.RandomState(0)
    for part, size in SIZES.items():
        write(tmp_path, part, rng.randint(0, 256, (size, 28, 28)), np.arange(size) % 10)
    return tmp_path


def write(folder, part, images, labels):
    for kind, array in (('images', images), ('labels', labels)):
        header = np.array([fashion.UINT8 * 256 + array.ndim] + list(array.shape), '>u4').tobytes()
        name = '{}-{}-idx{}-ubyte.gz'.format(part, kind, array.ndim)
        with gzip.open(str(folder / name), 'wb') as file:
            file.write(header + array.astype(np.uint8).tobytes())


def splits(folder, size=8):
    return fashion.fashion_splits('fashion_mnist', size, None, str(folder))


def test_its_images_are_those_that_tensorflow_datasets_would_give(folder):
    names, train, test = splits(folder, 40)
    assert names == fashion.CLASSES and augmentation_of('fashion_mnist', None) == 'flip'
    assert (train.size, test.size) == (40, 20)
    originals = np.random.RandomState(0).randint(0, 256, (40, 28, 28)).astype(np.uint8)
    for number, its_label in ((0, 0), (7, 7), (39, 9)):
        image, label = train.fetch(tf.constant(number, tf.int64)), train.labels()[number]
        np.testing.assert_array_equal(
            image, fitted(tf.io.decode_png(tf.io.encode_png(originals[number][..., None])), 40))
        assert int(label) == its_label


def test_test_images_are_a_stratified_subset(folder):
    test = splits(folder)[2]
    assert sorted(test.subset(10, 'test images').labels()) == list(range(10))
    with pytest.raises(UserError, match='^9 test images cannot be chosen; allowed: 10 .one of each '
                                        'class. to 20 .all.$'):
        test.subset(9, 'test images')


def cut(path):
    with open(path, 'r+b') as file:
        file.truncate(os.path.getsize(path) // 2)


def with_other_header(path):
    with gzip.open(path) as file:
        content = file.read()
    with gzip.open(path, 'wb') as file:
        file.write(b'\1' + content[1:])


def lengthened(path):
    with gzip.open(path, 'ab') as file:
        file.write(b'more')


def with_a_flipped_bit(path):
    with open(path, 'r+b') as file:
        file.seek(os.path.getsize(path) - 6)  # in the checksum
        file.write(b'\xff')


@pytest.mark.parametrize('damage', [
    cut, lengthened, with_other_header, with_a_flipped_bit, os.remove])
def test_damaged_files_are_refused_by_name(folder, damage):
    damage(str(folder / 't10k-images-idx3-ubyte.gz'))
    with pytest.raises(UserError, match="^'.*/t10k-images-idx3-ubyte.gz' cannot be read .*: "
                                        'install the package dataset-fashion-mnist again') as error:
        splits(folder)
    assert '\n' not in str(error.value)


def test_labels_that_do_not_fit_are_refused(folder):
    write(folder, 'train', np.zeros((40, 28, 28)), np.full(40, 10))
    with pytest.raises(UserError, match='40 images, 40 labels up to 10'):
        splits(folder)


def test_without_the_package_it_comes_from_tensorflow_datasets(folder, offline):
    with pytest.raises(UserError, match='tfds:fashion_mnist cannot be prepared'):
        fashion.fashion_splits('fashion_mnist', 8, str(folder), str(folder / 'missing'))
