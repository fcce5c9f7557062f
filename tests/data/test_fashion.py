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
def folder(tmp_path, monkeypatch):
    rng = np.random.RandomState(0)
    for part, size in SIZES.items():
        write(tmp_path, part, rng.randint(0, 256, (size, 28, 28)), np.arange(size) % 10)
    monkeypatch.setattr(fashion, 'FOLDER', str(tmp_path))
    return tmp_path


def write(folder, part, images, labels):
    for kind, array in (('images', images), ('labels', labels)):
        header = np.array([0x800 + array.ndim] + list(array.shape), '>u4').tobytes()  # of uint8
        name = '{}-{}-idx{}-ubyte.gz'.format(part, kind, array.ndim)
        with gzip.open(str(folder / name), 'wb') as file:
            file.write(header + array.astype(np.uint8).tobytes())


def test_its_images_are_those_that_tensorflow_datasets_would_give(folder):
    names, train, test = fashion.fashion_splits('fashion_mnist', 40, None)
    assert names == fashion.CLASSES and augmentation_of('fashion_mnist', None) == 'flip'
    assert (train.size, test.size) == (40, 20)
    originals = np.random.RandomState(0).randint(0, 256, (40, 28, 28)).astype(np.uint8)
    for number, its_label in ((0, 0), (7, 7), (39, 9)):
        image, label = train.fetch(tf.constant(number, tf.int64)), train.labels()[number]
        np.testing.assert_array_equal(
            image, fitted(tf.io.decode_png(tf.io.encode_png(originals[number][..., None])), 40))
        assert int(label) == its_label


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


@pytest.mark.parametrize('damage', [cut, os.remove])
def test_damaged_files_are_refused_by_name(folder, damage):
    damage(str(folder / 't10k-images-idx3-ubyte.gz'))
    with pytest.raises(UserError, match="^'.*/t10k-images-idx3-ubyte.gz' cannot be read .*: "
                                        'install the package dataset-fashion-mnist again') as error:
        fashion.fashion_splits('fashion_mnist', 8, None)
    assert '\n' not in str(error.value)


def test_without_the_package_it_comes_from_tensorflow_datasets(tmp_path, monkeypatch, offline):
    monkeypatch.setattr(fashion, 'FOLDER', str(tmp_path / 'missing'))
    with pytest.raises(UserError, match='tfds:fashion_mnist cannot be prepared'):
        fashion.fashion_splits('fashion_mnist', 8, str(tmp_path))
