"""Reads a split of a data set that TensorFlow Datasets has prepared, by record number.

The builder's reader follows the order of the files: to shuffle well it would need a buffer of all
images.
"""

import os

import numpy as np

from elastic.command_line import UserError
from elastic.data.split import Split, resized


class Records:
    """Holds the records of TFRecord files, numbered from 0, and reads them from there."""

    def __init__(self, paths, counts, image, label, num_classes):
        """paths: of the files. counts: how many records each must have.

        image, label: names of the features. num_classes: above every label.
        Raises UserError if a file has another number of records.
        """
        self._paths, self._image, self._label = paths, image, label
        self._num_classes, self._labels = num_classes, None
        places = []
        for path, count in zip(paths, counts):
            found = list(_places(path))
            if len(found) != count:
                raise UserError("'{}' has {} records, not {}: it is damaged; restore it, or remove "
                                '{} and start again to prepare the data set again'.format(
                                    path, len(found), count, os.path.dirname(path)))
            places.append(np.array(found, np.int64).reshape(-1, 2))
        self._file = np.repeat(np.arange(len(places)), [len(some) for some in places])
        self._place = np.concatenate(places or [np.zeros((0, 2), np.int64)])  # (N, 2)

    def __len__(self):
        return len(self._file)

    def read(self, index):
        """Returns the bytes of a record, a serialized tf.train.Example."""
        offset, length = self._place[index]
        with open(self._paths[self._file[index]], 'rb') as file:
            file.seek(offset)
            return file.read(length)

    def label(self, index):
        """Returns the label of a record; -1 means that it has none."""
        import tensorflow as tf
        features = tf.train.Example.FromString(self.read(index)).features.feature
        return features[self._label].int64_list.value[0]

    def labels(self):
        """Returns all labels, (N,) int32. Raises UserError if one belongs to no class."""
        if self._labels is None:
            labels = np.array([self.label(index) for index in range(len(self))], np.int32)
            wrong = np.unique(labels[(labels < 0) | (labels >= self._num_classes)])
            if len(wrong):
                raise UserError('some images in {} have the label {}; allowed: 0 to {}'.format(
                    os.path.dirname(self._paths[0]), wrong[0], self._num_classes - 1))
            self._labels = labels
        return self._labels

    def split(self, input_size):
        """Returns the Split of all records."""
        import tensorflow as tf
        features = {self._image: tf.io.FixedLenFeature((), tf.string),
                    self._label: tf.io.FixedLenFeature((), tf.int64)}

        def fetch(index):
            serialized = tf.ensure_shape(tf.numpy_function(self.read, [index], tf.string), ())
            example = tf.io.parse_single_example(serialized, features)
            return (resized(example[self._image], input_size),
                    tf.cast(example[self._label], tf.int32))

        return Split(input_size, self.labels, len(self), fetch)


def _places(path):
    """Yields (offset, length) of each whole record of a TFRecord file, none if it is missing.

    The format: uint64 length, uint32 checksum of the length, record, uint32 checksum of the record.
    """
    if not os.path.isfile(path):
        return
    size = os.path.getsize(path)
    with open(path, 'rb') as file:
        for header in iter(lambda: file.read(12), b''):
            offset, length = file.tell(), int.from_bytes(header[:8], 'little')
            if len(header) < 12 or offset + length + 4 > size:  # the file was cut short
                return
            yield offset, length
            file.seek(length + 4, os.SEEK_CUR)
