"""Loads classification sets of TensorFlow Datasets: the paper's, and any other by tfds:NAME."""

import http.client
import os
import re
import textwrap
import urllib.error
import urllib.request

import numpy as np

from elastic.compat.start import quiet_tensorflow
from elastic.data.digits import DIGIT_NAMES
from elastic.data.image_folder import FOLDER, TEST_NAMES, TEST_SHARE, TRAIN_NAMES
from elastic.data.records import Records
from elastic.errors import UserError, first_line, nearest, one_of
from elastic.files import check_writable
from elastic.settings import PAPER_SETS
from elastic.texts import shortened

TFDS = 'tfds:'  # prefix of the data set's name
# Any other colon is refused: TensorFlow Datasets would load what others wrote, as of huggingface:.
FULL_NAME = re.compile(r'([A-Za-z0-9_]+)(/[A-Za-z0-9_.-]+)?(:[0-9]+\.[0-9]+\.[0-9]+)?')
GOOGLE = 'https://storage.googleapis.com'  # has some sets already prepared
CONNECT_SECONDS = 10
FILES_SHOWN = 20  # in an error


class Unprepared(UserError):
    """Says that a data set, of `num_classes`, can neither be downloaded nor made from archives."""

    def __init__(self, text, num_classes):
        super().__init__(text)
        self.num_classes = num_classes


def is_tfds(name):
    """Returns whether a data set comes from TensorFlow Datasets."""
    return name in PAPER_SETS or name.startswith(TFDS)


def check_tfds_name(name):
    """Returns (NAME[/CONFIG][:VERSION], NAME) of a data set; raises UserError for another form."""
    full = name[len(TFDS):] if name.startswith(TFDS) else name
    parts = FULL_NAME.fullmatch(full)
    if parts is None:
        raise UserError("'{}' is no name of a data set of TensorFlow Datasets; give {}NAME[/CONFIG]"
                        '[:VERSION], such as {}eurosat/rgb:2.0.0'.format(name, TFDS, TFDS))
    return full, parts.group(1)


def tfds_splits(name, input_size, data_dir):
    """Returns class names, training Split, test Split, and lines on what is not used.

    Downloads and prepares the data set if needed. Without test images that have labels, a fixed,
    stratified 20 % of the training images are for testing.
    """
    root = _root(data_dir)
    builder, image, label = _found(name, root)
    if not os.path.isdir(builder.data_dir):
        _prepare(builder, name, root, builder.info.features[label].num_classes)
    form = builder.info.file_format
    if form is None or form.value != 'tfrecord':
        raise UserError("'{}' is in the format {}; prepare it in another folder with file_format="
                        "'tfrecord', and give that as --data_dir".format(
                            builder.data_dir, form and form.value))
    classes, parts = builder.info.features[label], list(builder.info.splits)
    names = tuple(classes.int2str(i) for i in range(classes.num_classes))
    trains, tests = [[part for part in known if part in parts]
                     for known in (TRAIN_NAMES, TEST_NAMES)]
    if not trains:
        raise UserError('{} has no training images, only the splits {}; choose another data set'
                        .format(name, ', '.join(parts)))

    def records_of(part):
        info = builder.info.splits[part]
        paths = [os.path.join(builder.data_dir, os.path.basename(file))
                 for file in sorted(info.filenames)]
        return Records(paths, info.shard_lengths, image, label, len(names))

    train, notes = records_of(trains[0]).split(input_size), []
    unused = {part: '' for part in parts if part != trains[0]}
    for part in tests:
        records = records_of(part)
        if any(records.label(index) >= 0 for index in range(len(records))):
            test = records.split(input_size)
            del unused[part]
            break
        unused[part] = ' (no labels)'
    else:
        notes.append('{} has no split for testing: a fixed fifth of its {:,} images are the test '
                     'images'.format(name, train.size))
        train, test = train.parted(TEST_SHARE)
        if not test.size:
            raise UserError('{} has {:,} image(s), and no class has two of them; choose another '
                            'data set'.format(name, train.size))
    if unused:
        notes.append('not used: {} of {}'.format(shortened([
            "'{}'{}".format(*item) for item in unused.items()]), name))
    return (names, train, test, *notes)


def unprepared(name, data_dir=None):
    """Returns why data set `name` must be prepared before it loads; None if it need not be.

    Raises UserError as tfds_splits does for a data set that cannot be used.
    """
    root = _root(data_dir)
    if is_tfds(name) and not os.path.isdir(_found(name, root)[0].data_dir):
        return '{} is not prepared in {}'.format(name, root)
    return None


def is_prepared(name, data_dir=None):
    """Returns whether a data set is one of TensorFlow Datasets that is prepared already."""
    if not is_tfds(name):
        return False
    quiet_tensorflow()  # before tensorflow_datasets imports it
    return unprepared(name, data_dir) is None


def _root(data_dir):
    return os.path.abspath(os.path.expanduser(
        data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'))


# ---------------------------------------------------------------- what can be used

def _found(name, root):
    """Returns the builder of a data set and the names of its image and its label.

    The builder belongs to the installed package, or reads a folder in `root` that somebody
    prepared. Downloads nothing. Raises UserError if there is no such data set, or if it is not one
    of images with one label each.
    """
    import tensorflow_datasets
    full, plain = check_tfds_name(name)
    known = tensorflow_datasets.list_builders(with_community_datasets=False)
    folders = os.listdir(root) if os.path.isdir(root) else []
    if plain not in known + folders:
        raise UserError("TensorFlow Datasets {} has no data set '{}'{}, and there is no folder of "
                        'that name in {}'.format(tensorflow_datasets.__version__, plain,
                                                 nearest(plain, known + folders), root))
    storage = tensorflow_datasets.core.utils.gcs_utils
    disabled = storage._is_gcs_disabled
    try:
        storage._is_gcs_disabled = True  # 4.4 waits for minutes where there is no network
        builder = tensorflow_datasets.builder(full, data_dir=root)
        info = builder.info
    except Exception as error:  # an unknown configuration, a package that is missing, ...
        configurations = plain in known and list(
            tensorflow_datasets.builder_cls(plain).builder_configs)
        if '/' in full and configurations:
            one_of(full.split('/')[1].split(':')[0], configurations, 'configuration of ' + plain)
        reason = re.sub('^Failed to construct dataset .*?: (?=[A-Z])', '', str(error))
        if plain in folders and reason.startswith('Failed to parse'):
            reason = ('another version of TensorFlow Datasets wrote its folder in {}; prepare it '
                      'in another folder with version {}, and give that as --data_dir'.format(
                          root, tensorflow_datasets.__version__))
        raise UserError('cannot use {}: {}'.format(name, first_line(' '.join(reason.split()))))
    finally:
        storage._is_gcs_disabled = disabled
    return (builder,) + image_and_label(info, name)


def image_and_label(info, name):
    """Returns the names of the image and of the label among the features of a data set.

    Of several, it returns the pair that the data set declares for supervised training.
    info: tfds.core.DatasetInfo. Raises UserError as _found does.
    """
    from tensorflow_datasets import features as kinds
    features = dict(info.features.items()) if isinstance(info.features, kinds.FeaturesDict) else {}
    images = [key for key, kind in features.items()
              if isinstance(kind, kinds.Image) and not isinstance(kind, kinds.LabeledImage)]
    labels = [key for key, kind in features.items() if isinstance(kind, kinds.ClassLabel)]
    sequences = [key for key, kind in features.items() if isinstance(kind, kinds.Sequence)
                 and isinstance(kind.feature, kinds.ClassLabel)]
    image, label = (tuple(info.supervised_keys or ()) + (None, None))[:2]
    if image in images and label in labels:
        images, labels = [image], [label]
    if len(images) != 1:
        reason = _how_many('image', images)
    elif not labels and sequences:
        reason = 'its images have any number of labels ({})'.format(', '.join(sequences))
    elif len(labels) != 1:
        reason = _how_many('class label', labels)
    else:
        reason = _unsuitable(features[images[0]], features[labels[0]])
    if reason:
        raise UserError('cannot train on {}: {}; needed are one Image and one ClassLabel, its '
                        'features are {}'.format(name, reason, ', '.join(
                            '{} ({})'.format(key, type(kind).__name__)
                            for key, kind in features.items()) or type(info.features).__name__))
    return images[0], labels[0]


def _how_many(what, found):
    return 'it has several {}s ({})'.format(what, ', '.join(found)) if found else (
        'it has no {}'.format(what))


def _unsuitable(image, label):
    """Returns why images or labels of these features cannot be used; None if they can."""
    channels = image.shape[-1]
    dtype = np.dtype(image.np_dtype if hasattr(image, 'np_dtype') else image.dtype.as_numpy_dtype)
    if channels not in (None, 1, 3, 4) or dtype != np.uint8:
        return 'its images have {} channels of {}, not 1, 3 or 4 of uint8'.format(channels, dtype)
    if (label.num_classes or 0) < 2:
        return 'its label has {} classes, not two or more'.format(label.num_classes or 0)
    return None


# ---------------------------------------------------------------- preparing

def _prepare(builder, name, root, num_classes):
    """Downloads and prepares a data set, from the archives in the folder for manual downloads.

    TensorFlow Datasets retries for minutes before it reports that there is no network. So the
    servers are tried first, unless some archives are there already.
    """
    import tensorflow_datasets
    check_writable(root, '--data_dir', folder=True)
    manual_dir = os.path.join(root, 'downloads', 'manual')
    # An archive may have several addresses. The current one is the first by name, so it comes last.
    url_of = {info.filename: url for url, info in sorted(
        (builder.url_infos or {}).items(), reverse=True) if info.filename}
    missing = [file for file in sorted(url_of)
               if not os.path.exists(os.path.join(manual_dir, file))]

    prepared = bool(missing) and not _unreachable(GOOGLE)
    cause = None
    if not prepared and len(missing) == len(url_of):
        cause = _no_connection(url_of)
    if cause is None:
        try:
            builder.download_and_prepare(
                download_config=tensorflow_datasets.download.DownloadConfig(
                    manual_dir=manual_dir, try_download_gcs=prepared))
            return
        except Exception as error:  # whatever went wrong, the remedy is the same
            cause = '{}: {}; if a download was cut short, remove {}'.format(
                type(error).__name__, first_line(error).rstrip(':'), os.path.dirname(manual_dir))
    files = ['{}  {}'.format(file, url_of[file]) for file in missing or sorted(url_of)]
    raise Unprepared('data set {} cannot be prepared: {}{}\nData sets that need no network: {}, '
                     '{}PATH'.format(name, cause, _by_hand(builder, manual_dir, files),
                                     ', '.join(DIGIT_NAMES), FOLDER), num_classes)


def _by_hand(builder, folder, files):
    """Returns the lines that say which files to put into the folder for manual downloads."""
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        remedy = 'It must be downloaded by hand, into {}'
        files = textwrap.dedent(builder.MANUAL_DOWNLOAD_INSTRUCTIONS).strip().splitlines()
    else:
        remedy = 'To prepare it without a network, put these archives, unchanged, into {}'
        if builder.builder_config:
            remedy += ' (those of its configuration {})'.format(builder.builder_config.name)
    if len(files) > FILES_SHOWN:
        files[FILES_SHOWN:] = ['and {} more'.format(len(files) - FILES_SHOWN)]
    return files and '\n  '.join(['\n' + remedy.format(folder)] + files) or ''


def _no_connection(url_of):
    """Returns one line if no server answers, else None. url_of: archive -> its address."""
    files = {url.split('/')[2]: file for file, url in sorted(url_of.items(), reverse=True)}
    first = None
    for file in sorted(files.values()):
        fault = _unreachable(url_of[file])
        if fault is None:
            return None  # the others may have what only another configuration needs
        first = first or '{}, which has {}'.format(fault, file)
    return first


def _unreachable(url):
    """Returns why the server of `url` does not answer; None if it does, even with an error."""
    try:
        urllib.request.urlopen(url, timeout=CONNECT_SECONDS).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        return None  # the builder may know another address
    except OSError as error:
        return 'no connection to {} ({})'.format(
            url.split('/')[2], first_line(getattr(error, 'reason', error)))
    return None
