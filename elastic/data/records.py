"""Reads a split of a data set that TensorFlow Datasets has prepared, by record number.

The builder's reader follows the order of the files: to shuffle well it would need a buffer of all
images.
"""

import contextlib
import glob
import os

import numpy as np

from elastic.command_line import UserError
from elastic.data.split import PROGRESS_FROM, Split, resized
from elastic.files import read_json, write_json

CHECKED = 'elastic_checked.json'  # beside the files: name -> size and time when it was checked
REMEDY = 'restore it, or remove {} and start again to prepare the data set again'


class Records:
    """Holds the records of TFRecord files, numbered from 0, and reads them from there."""

    def __init__(self, paths, counts, image, label, num_classes):
        """paths: of the files. counts: how many records each must have.

        image, label: names of the features. num_classes: above every label.
        Raises UserError if a file is missing or has another number of records, and for a file of
        the same split that is not among them.
        """
        self._paths, self._image, self._label = paths, image, label
        self._num_classes, self._labels = num_classes, None
        places = []
        for path, count in zip(paths, counts):
            if not os.path.isfile(path):
                raise _damaged(path, 'is missing')
            found = list(_places(path))
            if len(found) != count:
                raise _damaged(path, 'has {} records, not {}: it is damaged'.format(
                    len(found), count))
            places.append(np.array(found, np.int64).reshape(-1, 2))
        self._file = np.repeat(np.arange(len(places)), [len(some) for some in places])
        self._place = np.concatenate(places or [np.zeros((0, 2), np.int64)])  # (N, 2)

        if paths:
            folder, name = os.path.split(paths[0])
            alike = name.split('.tfrecord')[0] + '.tfrecord-?????-of-?????'
            for path in sorted(set(glob.glob(os.path.join(glob.escape(folder), alike)))
                               - set(paths)):
                raise UserError("'{}' does not belong to the data set, whose split has {} other "
                                'file(s): remove it'.format(path, len(paths)))

    def check(self):
        """Raises UserError for a damaged record, and for an image too large for TensorFlow.

        Compares the checksums of all bytes, once for each size and time of a file. If the folder
        is read-only, it does so at each start.
        """
        if not self._paths:
            return
        from tqdm import tqdm
        stamp, states = os.path.join(os.path.dirname(self._paths[0]), CHECKED), {}
        with contextlib.suppress(UserError):
            states = read_json(stamp)
        new = {os.path.basename(path): [os.stat(path).st_size, os.stat(path).st_mtime_ns]
               for path in self._paths}
        changed = [path for path in self._paths
                   if states.get(os.path.basename(path)) != new[os.path.basename(path)]]
        silent = True if len(self) < PROGRESS_FROM else None
        with tqdm(None, 'checking', len(self), False, unit='image', disable=silent) as bar:
            for path in changed:
                for fault in self._faults(path):
                    bar.update()
                    if fault:
                        raise _damaged(path, fault)
        if changed:
            with contextlib.suppress(OSError):
                write_json(stamp, dict(states, **new))

    def _faults(self, path):
        """Yields for each record of a file why it cannot be used; None if it can."""
        import tensorflow as tf
        from google.protobuf.message import DecodeError
        number = 0
        try:
            for number, record in enumerate(tf.data.TFRecordDataset(path)):
                image = tf.train.Example.FromString(record.numpy()).features.feature[self._image]
                fault = None if image.bytes_list.value else 'it is empty'
                yield fault and "has a record, number {}, whose image cannot be used: {}".format(
                    number, fault)
        except tf.errors.DataLossError:
            yield 'is damaged after record {}: its checksum does not fit'.format(number)
        except DecodeError:
            yield 'has a record, number {}, that is no example'.format(number)

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


def _damaged(path, fault):
    return UserError("'{}' {}; {}".format(path, fault, REMEDY.format(os.path.dirname(path))))


def _places(path):
    """Yields (offset, length) of each whole record of a TFRecord file.

    The format: uint64 length, uint32 checksum of the length, record, uint32 checksum of the record.
    """
    size = os.path.getsize(path)
    with open(path, 'rb') as file:
        for header in iter(lambda: file.read(12), b''):
            offset, length = file.tell(), int.from_bytes(header[:8], 'little')
            if len(header) < 12 or offset + length + 4 > size:  # the file was cut short
                return
            yield offset, length
            file.seek(length + 4, os.SEEK_CUR)
