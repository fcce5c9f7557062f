"""Reads a split of a data set that TensorFlow Datasets has prepared, by record number.

The builder's reader follows the order of the files: to shuffle well it would need a buffer of all
images.
"""

import functools
import os

import numpy as np

from elastic.data.split import Split, fitted
from elastic.errors import UserError


class Records:
    """Holds the records of TFRecord files, numbered from 0, and reads them from there."""

    def __init__(self, paths, counts, image, label, num_classes):
        """paths: of the files. counts: how many records each must have.

        image, label: names of the features. num_classes: above every label.
        Raises UserError if a file is missing or has another number of records.
        """
        self._paths, self._image, self._label = paths, image, label
        self._num_classes, offsets = num_classes, []
        for path, count in zip(paths, counts):
            if not os.path.isfile(path):
                raise _damaged(path, 'is missing')
            found = list(_offsets(path))
            if len(found) != count:
                raise _damaged(path, 'has {} records, not {}: it is damaged'.format(
                    len(found), count))
            offsets.append(np.array(found, np.int64))
        self._file = np.repeat(np.arange(len(offsets)), [len(some) for some in offsets])
        self._offset = np.concatenate(offsets or [np.zeros(0, np.int64)])  # (N,)

    def __len__(self):
        return len(self._file)

    def read(self, index):
        """Returns the bytes of a record, a serialized tf.train.Example.

        Raises UserError if its checksum does not fit.
        """
        import tensorflow as tf

        from elastic.compat.tf_internals import read_record
        path = self._paths[self._file[index]]
        try:
            return read_record(path, self._offset[index])
        except (tf.errors.DataLossError, IndexError):  # IndexError: the file is shorter now
            raise _damaged(path, 'is damaged: the checksum of a record (image {}) does not fit'
                           .format(index))

    def label(self, index):
        """Returns the label of a record; -1 means that it has none."""
        import tensorflow as tf
        features = tf.train.Example.FromString(self.read(index)).features.feature
        return features[self._label].int64_list.value[0]

    def labels(self):
        """Returns all labels, (N,) int32. Raises UserError if one belongs to no class."""
        from tqdm import tqdm
        labels = np.array([self.label(index) for index in tqdm(
            range(len(self)), 'labels', unit='image', leave=False, disable=None)], np.int64)
        wrong = np.flatnonzero((labels < 0) | (labels >= self._num_classes))
        if len(wrong):
            raise UserError(
                "example {} of the split with '{}' has the label {}; allowed: 0 to {}; prepare "
                'the data set without such examples ({:,} in all)'.format(
                    wrong[0], self._paths[self._file[wrong[0]]], labels[wrong[0]],
                    self._num_classes - 1, len(wrong)))
        return labels.astype(np.int32)

    def split(self, input_size):
        """Returns the Split of all records; of a GIF, the first frame."""
        import tensorflow as tf

        def fetch(index):
            serialized = tf.ensure_shape(tf.numpy_function(self.read, [index], tf.string), ())
            encoded = tf.io.parse_single_example(
                serialized, {self._image: tf.io.FixedLenFeature((), tf.string)})[self._image]
            return fitted(tf.io.decode_image(encoded, expand_animations=False), input_size)

        return Split(input_size, functools.lru_cache()(self.labels), len(self), fetch,
                     sources={os.path.basename(path): path for path in self._paths})


def _damaged(path, fault):
    return UserError("'{}' {}; restore it, or remove {} and start again to prepare the data set "
                     'again'.format(path, fault, os.path.dirname(path)))


def _offsets(path):
    """Yields the offset of each whole record of a TFRecord file.

    The format: uint64 length, uint32 checksum of the length, record, uint32 checksum of the record.
    """
    size = os.path.getsize(path)
    with open(path, 'rb') as file:
        for header in iter(lambda: file.read(12), b''):
            begin, end = file.tell() - 12, file.tell() + int.from_bytes(header[:8], 'little') + 4
            if len(header) < 12 or end > size:  # the file was cut short
                return
            yield begin
            file.seek(end)
