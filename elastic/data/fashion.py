"""Reads Fashion-MNIST: grey 28x28 photographs of clothes, 60,000 to train on and 10,000 to test.

Debian's package dataset-fashion-mnist has its files; without it, TensorFlow Datasets downloads it.
"""

import gzip
import os
import zlib

import numpy as np

from elastic.data.split import Split, fitted
from elastic.data.tfds import TFDS, tfds_splits
from elastic.errors import UserError, first_line

FASHION = 'fashion_mnist'
FASHION_SIZES = 10, 60000, 10000  # classes, training images, test images
FOLDER = '/usr/share/datasets/fashion-mnist'
PACKAGE = 'dataset-fashion-mnist'
CLASSES = ('T-shirt/top', 'Trouser', 'Pullover', 'Dress', 'Coat', 'Sandal', 'Shirt', 'Sneaker',
           'Bag', 'Ankle boot')
UINT8 = 8  # in the format IDX: the type of the values


def source_of(name, folder=FOLDER):
    """Returns the name under which TensorFlow Datasets has a data set, if it must come from there.

    Returns other names as they are. folder: of the package's files.
    """
    return TFDS + name if name == FASHION and not os.path.isdir(folder) else name


def fashion_splits(name, input_size, data_dir, folder=FOLDER):
    """Returns the class names, the training Split and the test Split, and lines on what is unused.

    folder: of the package's files.
    Raises UserError if the files are damaged, and as tfds_splits does.
    """
    source = source_of(name, folder)
    if source != name:
        return tfds_splits(source, input_size, data_dir)
    return (CLASSES,) + tuple(_split(os.path.join(folder, part), input_size)
                              for part in ('train', 't10k'))


def _split(part, input_size):
    images = _read('{}-images-idx3-ubyte.gz'.format(part), 3)
    labels = _read('{}-labels-idx1-ubyte.gz'.format(part), 1).astype(np.int32)
    if len(images) != len(labels) or labels.max() >= len(CLASSES):
        raise _damaged(part, '{:,} images, {:,} labels up to {}'.format(
            len(images), len(labels), labels.max()))

    def fetch(index):
        import tensorflow as tf
        # As a Python function: tf.data would copy a captured tensor of all images.
        image = tf.numpy_function(lambda i: images[i], [index], tf.uint8)
        image = tf.ensure_shape(image, images.shape[1:])[..., None]
        return fitted(image, input_size)

    return Split(input_size, lambda: labels, len(labels), fetch)


def _read(path, rank):
    """Returns the uint8 array in a compressed IDX file: its header is 0, 0, type, rank, shape."""
    try:
        with gzip.open(path) as file:
            if tuple(file.read(4)) != (0, 0, UINT8, rank):
                raise ValueError('its header is not that of {} axes of bytes'.format(rank))
            shape = tuple(np.frombuffer(file.read(4 * rank), '>u4').astype(int))
            values = np.frombuffer(file.read(int(np.prod(shape))), np.uint8).reshape(shape)
            if file.read(1):  # at the end, gzip compares the checksum
                raise ValueError('it is longer than its header says')
            return values
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _damaged(path, first_line(error))


def _damaged(path, reason):
    return UserError("'{}' cannot be read ({}): install the package {} again, or use {}{}"
                     .format(path, reason, PACKAGE, TFDS, FASHION))
