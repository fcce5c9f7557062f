"""Writes small folders of images of every type, and compares their batches."""

import numpy as np

import datasets
import tfds_archives


def arrays(batches):
    """Returns the arrays of one pass, [(images, labels), ...]."""
    return [(images.numpy(), labels.numpy()) for images, labels in batches]


def same(one, other):
    return len(one) == len(other) and all(
        np.array_equal(a, b) for pair in zip(one, other) for a, b in zip(*pair))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def encoded(seed, kind, channels=3):
    import tensorflow as tf
    if kind == 'bmp':
        return bitmap(np.random.RandomState(seed).bytes(8 * 8 * 4))
    encode = tf.io.encode_jpeg if kind in ('jpg', 'jpeg') else tf.io.encode_png
    return tfds_archives.image(seed, encode, channels=channels)


def bitmap(pixels, bits=32):
    """Returns an 8 x 8 BMP; with 32 bits, TensorFlow sees four channels."""
    def number(value, size=4):
        return value.to_bytes(size, 'little')
    return (b'BM' + number(54 + len(pixels)) + number(0) + number(54) + number(40) + number(8)
            + number(8) + number(1, 2) + number(bits, 2) + bytes(24) + pixels)


def write_photos(path):
    """Writes two classes of 20 images each, of every type, and some other files."""
    kinds = [('jpg', 3), ('jpeg', 1), ('png', 4), ('png', 1), ('bmp', 3)]
    for c, name in enumerate(('cat', 'dog')):
        for i in range(20):
            kind, channels = kinds[i % len(kinds)]
            write(path / name / '{}.{}'.format(i, kind.upper() if i == 0 else kind),
                  encoded(20 * c + i, kind, channels))
        write(path / name / 'notes.txt', b'not an image')
        write(path / name / '._0.jpg', b'not an image either')
    (path / '.cache').mkdir()


def load_photos(path, **options):
    return datasets.load_dataset('folder:{}'.format(path), 24, 4, **options)
