"""Tests Fashion-MNIST from the files of Debian's package, of which small ones are made here."""

import gzip
import os

import numpy as np
import pytest
import tensorflow as tf

import datasets
from elastic.data import fashion
from elastic.data.images import unprepared
from elastic.data.split import resized
from elastic.errors import UserError

SIZES = {'train': 40, 't10k': 20}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion, 'FOLDER', str(tmp_path))
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


def test_its_images_are_those_that_tensorflow_datasets_would_give(folder):
    assert unprepared('fashion_mnist') is None
    assert datasets.load_dataset('fashion_mnist', 40, 4).augmentation == 'flip'
    data = datasets.load_dataset('fashion_mnist', 40, 4, augmentation='none')
    assert data.class_names == fashion.CLASSES
    assert (data.num_images, data.test_size) == (40, 20)
    originals = np.random.RandomState(0).randint(0, 256, (40, 28, 28)).astype(np.uint8)
    numbers = np.array([[0, 7, 39, 12]])
    images, labels = next(iter(data.batches(numbers, 0)))
    expected = [resized(tf.io.encode_png(originals[i][..., None]), 40) for i in numbers[0]]
    np.testing.assert_array_equal(images, expected)
    assert labels.numpy().tolist() == [0, 7, 9, 2]


def test_test_images_are_a_stratified_subset(folder):
    few = datasets.load_dataset('fashion_mnist', 8, 4, test_images=10)
    assert sorted(np.concatenate([labels for _, labels in few.test])) == list(range(10))
    assert few.fingerprint != datasets.load_dataset('fashion_mnist', 8, 4).fingerprint
    with pytest.raises(UserError, match='^9 test images of fashion_mnist cannot be chosen; '
                                        'allowed: 10 .one of each class. to 20 .all.$'):
        datasets.load_dataset('fashion_mnist', 8, 4, test_images=9)


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
    with pytest.raises(UserError, match="^'t10k-images-idx3-ubyte.gz' in .* cannot be read .*: "
                                        'install the package dataset-fashion-mnist again') as error:
        datasets.find_images('fashion_mnist', 8, 4)
    assert '\n' not in str(error.value)


def test_labels_that_do_not_fit_are_refused(folder):
    write(folder, 'train', np.zeros((40, 28, 28)), np.full(40, 10))
    with pytest.raises(UserError, match='40 images, 40 labels up to 10'):
        datasets.find_images('fashion_mnist', 8, 4)


def test_without_the_package_it_comes_from_tensorflow_datasets(folder, monkeypatch):
    monkeypatch.setattr(fashion, 'FOLDER', str(folder / 'missing'))
    assert fashion.source_of('fashion_mnist') == 'tfds:fashion_mnist'
    assert 'tfds:fashion_mnist is not prepared in' in unprepared('fashion_mnist', str(folder))
