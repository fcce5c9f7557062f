"""Loads the paper's photo sets from TensorFlow Datasets; reads images by record number."""

import os
import urllib.error
import urllib.request

import numpy as np

from elastic.command_line import UserError, first_line
from elastic.data.digits import DIGIT_NAMES
from elastic.data.image_folder import FOLDER
from elastic.data.split import Split, resized
from elastic.settings import PAPER_SETS

TFDS_NAMES = tuple(PAPER_SETS)
CONNECT_SECONDS = 5


def tfds_splits(name, input_size, data_dir):
    """Returns class names, training Split, test Split; downloads and prepares the set if needed."""
    builder = _prepared_builder(name, data_dir)
    label = builder.info.features['label']
    names = tuple(label.int2str(i) for i in range(label.num_classes))
    return (names,) + tuple(_split(builder, part, input_size) for part in ('train', 'test'))


def unprepared(name, data_dir=None):
    """Returns why data set `name` must be prepared before it loads; None if it need not be."""
    root = _root(data_dir)
    # The folder is looked up first: TensorFlow Datasets takes seconds to import.
    if name not in TFDS_NAMES or os.path.isdir(os.path.join(root, name)) and os.path.isdir(
            _builder(name, root).data_dir):
        return None
    return '{} is not prepared in {}'.format(name, root)


def _root(data_dir):
    return os.path.abspath(os.path.expanduser(
        data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'))


def _builder(name, root):
    import tensorflow_datasets
    return tensorflow_datasets.builder(name, data_dir=root)


def _prepared_builder(name, data_dir):
    """Returns the builder of a data set; prepares the set first if necessary.

    TensorFlow Datasets retries for minutes before it reports that there is no network. So the
    network is tried first, unless all archives are in the folder for manual downloads.
    """
    import tensorflow_datasets
    root = _root(data_dir)
    builder = _builder(name, root)
    if os.path.isdir(builder.data_dir):
        return builder
    # An archive may have several addresses. The current one is the first by name, so it comes last.
    url_of = {info.filename: url for url, info in sorted(builder.url_infos.items(), reverse=True)}
    manual_dir = os.path.join(root, 'downloads', 'manual')
    missing = [file for file in sorted(url_of)
               if not os.path.exists(os.path.join(manual_dir, file))]
    cause = _unreachable(url_of[missing[0]]) if missing else None
    if cause is None:
        config = tensorflow_datasets.download.DownloadConfig(
            manual_dir=manual_dir, try_download_gcs=bool(missing))
        try:
            builder.download_and_prepare(download_config=config)
            return builder
        except Exception as error:  # whatever went wrong, the remedy is the same
            cause = '{}: {}'.format(type(error).__name__, first_line(error))
    wanted = ''.join('\n  {}  {}'.format(file, url_of[file]) for file in missing or sorted(url_of))
    raise UserError(
        'data set {} cannot be prepared: {}\nTo prepare it without a network, put these archives, '
        'unchanged, into {}{}\nData sets that need no network: {}, {}PATH'.format(
            name, cause, manual_dir, wanted, ', '.join(DIGIT_NAMES), FOLDER))


def _unreachable(url):
    """Returns why the server of `url` does not answer; None if it does, even with an error."""
    try:
        urllib.request.urlopen(url, timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError:
        return None  # the builder may know another address
    except OSError as error:
        return 'no connection to {} ({})'.format(
            url.split('/')[2], first_line(getattr(error, 'reason', error)))
    return None


def _split(builder, part, input_size):
    """Returns the Split 'train' or 'test' of a prepared data set.

    Records are read by number, because the builder's reader follows the order of the file: to
    shuffle well it would need a buffer of all images.
    """
    import tensorflow as tf
    paths = [os.path.join(builder.data_dir, os.path.basename(file))
             for file in sorted(builder.info.splits[part].filenames)]
    if not all('.tfrecord' in os.path.basename(path) for path in paths):
        raise UserError('{} is not in TFRecord format; remove that folder and start again'.format(
            builder.data_dir))
    records = [record for path in paths for record in _records(path)]
    features = {'image': tf.io.FixedLenFeature((), tf.string),
                'label': tf.io.FixedLenFeature((), tf.int64)}

    def read(index):
        path, offset, length = records[index]
        with open(path, 'rb') as file:
            file.seek(offset)
            return file.read(length)

    def labels():
        examples = (tf.train.Example.FromString(read(index)) for index in range(len(records)))
        return np.array([example.features.feature['label'].int64_list.value[0]
                         for example in examples], np.int32)

    def fetch(index):
        serialized = tf.ensure_shape(tf.numpy_function(read, [index], tf.string), ())
        example = tf.io.parse_single_example(serialized, features)
        return resized(example['image'], input_size), tf.cast(example['label'], tf.int32)

    return Split(input_size, labels, len(records), fetch)


def _records(path):
    """Yields (path, offset, length) of each record of a TFRecord file.

    The format: uint64 length, uint32 checksum of the length, record, uint32 checksum of the record.
    """
    with open(path, 'rb') as file:
        for header in iter(lambda: file.read(12), b''):
            length = int.from_bytes(header[:8], 'little')
            yield path, file.tell(), length
            file.seek(length + 4, os.SEEK_CUR)
