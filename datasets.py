"""The data sets: three photo sets, three digit domains, a user's own image folder.

    caltech_birds2011, oxford_iiit_pet, stanford_dogs   the paper's, through TensorFlow Datasets
    digits, digits_shifted, digits_inverted             source and target domains; need no network
    folder:PATH                                         one sub-folder of images per class

Each becomes two splits of numbered images and a function that fetches the image of a number. Order
is a pure function of (seed, epoch), augmentation of (seed, image, view): runs with the same seed
see bit-identical batches, whether the images come from memory or are decoded in each epoch.
"""

import hashlib
import os
import urllib.error
import urllib.request
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import numpy as np

from augmentation import KINDS, view_of_epoch
from batches import LOADERS, Split, Stream, in_order, loads, passes, pipeline, resized, untuned
from command_line import UserError, first_line, one_of
from digits import DIGIT_NAMES, SPLIT_SEED
from folders import FOLDER, check_folder, check_sizes, folder_splits, readable

TFDS_NAMES = ('caltech_birds2011', 'oxford_iiit_pet', 'stanford_dogs')
OFFLINE_NAMES = DIGIT_NAMES + (FOLDER + 'PATH',)

MEMORY_SHARE = 0.4  # of the available memory, that decoded images may take
DECODED_AT_ONCE = 32  # images; one by one, tf.data takes longer than a small image
PROGRESS_FROM = 300  # images; fewer are decoded before a progress bar could be read
CONNECT_SECONDS = 5
TESTED_AT_ONCE = 4  # batches, which take a third less time ...
MOST_TESTED = 64  # ... up to so many images: larger ones were the peak of a run's memory


class Dataset(NamedTuple):
    """Batches of images (B, S, S, 3) float32 in 0..255 and labels (B,) int32."""
    name: str
    train: Any  # tf.data: each pass is the next epoch, full batches, newly shuffled
    test: Any  # tf.data: all test images in fixed order, as they are, in batches of
    #            tested_at_once(B); the last one may be partial
    probe: Any  # tf.data: endless training batches, augmented as in `train`, in an order of its own
    num_classes: int
    class_names: Tuple[str, ...]
    train_size: int  # images an epoch
    test_size: int  # images
    augmentation: str  # 'flip+rotate' or 'none'
    num_images: int  # training images in all, numbered from 0
    order: Callable  # epoch, from 1 -> (steps, B) int64: the numbers that `train` goes through
    view: Callable  # epoch, from 1 -> int, of the view (augmentation.py) that its images are in
    fingerprint: str  # of which images these are, as far as that can be told without reading them
    files: List  # paths of a folder's images; none of other data sets
    left_out: List  # paths of images that could not be read so far, see skip_bad_images
    batches: Callable  # numbers (steps, B) int64, steps >= 0, view -> tf.data of these batches

    @property
    def steps(self):
        """Batches of an epoch."""
        return self.train_size // int(self.train.element_spec[0].shape[0])


def check_dataset_name(name):
    """`name` itself; UserError if there is no such data set. Loads nothing."""
    if not name.startswith(FOLDER):
        return one_of(name, tuple(LOADERS) + (FOLDER + 'PATH',), 'data set')
    check_folder(name[len(FOLDER):])
    return name


def augmentation_of(name, given=None):
    """'flip+rotate' or 'none': what `train` and `probe` of data set `name` do to each image.

    given: one of the two, decides. Otherwise the name does: a flip makes another digit of a digit,
    and a turn overlaps with the shift between the domains.
    """
    by_name = 'none' if check_dataset_name(name) in DIGIT_NAMES else 'flip+rotate'
    return by_name if given is None else one_of(given, KINDS, 'augmentation')


class DataSettings(NamedTuple):
    """How a data set is read; see flags.py for the flags of the same names.

    data_dir: folder of the TensorFlow Datasets (default: TFDS_DATA_DIR or ~/tensorflow_datasets).
    seed: fixes the order of `train` and `probe` and the augmentation, not the split.
    steps_per_epoch: an epoch is that many batches at most, each epoch of other images.
    validation_steps: that many batches of test images at most, evenly spaced among all.
    views, interval: see view_of_epoch. augmentation: see augmentation_of.
    train_images: train on that many images only, of each class equally many, as far as it has them.
    skip_bad_images: of a folder, leave out those that cannot be read, now or later.
    """
    data_dir: Optional[str] = None
    seed: int = 0
    steps_per_epoch: Optional[int] = None
    validation_steps: Optional[int] = None
    views: str = 'fresh'
    interval: int = 4
    augmentation: Optional[str] = None
    train_images: Optional[int] = None
    skip_bad_images: bool = False


def load_dataset(name, input_size, batch_size, cache='auto', **settings):
    """Dataset `name`, whole images resized to input_size x input_size.

    Every iter(train) begins the next epoch and should be run through.
    Every iter(probe) goes on with a newly shuffled order.

    cache: 'memory' decodes all images now and keeps them as uint8, 'none' decodes them each
        epoch, 'auto' keeps them if they take less than MEMORY_SHARE of the available memory;
        'unread' is 'none' without the check that all images of a folder can be read.
    settings: fields of DataSettings.

    Raises UserError for an unknown name, images that cannot be read or downloaded, a batch larger
    than the training split, and a number of images that is not there or misses a class.
    """
    settings = DataSettings(**settings)
    kind = augmentation_of(name, settings.augmentation)
    view = view_of_epoch(settings.views, settings.interval, kind)
    one_of(cache, ('auto', 'memory', 'none', 'unread'), 'cache')
    load = folder_splits if name.startswith(FOLDER) else LOADERS[name]
    class_names, train, test = load(name, input_size, settings.data_dir)
    if settings.train_images is not None:
        train = _subset(train, settings.train_images, name)
    if batch_size > train.size:
        raise UserError('a batch of {} does not fit into the {} training images of {}'.format(
            batch_size, train.size, name))
    left_out = []
    if settings.skip_bad_images:
        train, test = [readable(split, left_out) for split in (train, test)]
    else:
        check_sizes(train)
        check_sizes(test)
    images = fingerprint(class_names, train, test)
    tested = min(test.size, (settings.validation_steps or test.size) * batch_size)
    if test.files is None:  # of a folder all images are checked, tested or not
        test = test.spaced(tested)
    image_bytes = (train.size + test.size) * input_size * input_size * 3
    keep = cache == 'memory' or (
        cache == 'auto' and image_bytes < MEMORY_SHARE * available_bytes())
    if cache != 'unread':
        train, test = _decoded_once(train, keep, 'train'), _decoded_once(test, keep, 'test')
    steps = min(train.size // batch_size, settings.steps_per_epoch or train.size)
    seed = settings.seed % 2 ** 32
    epochs, probe = [Stream(number, train, batch_size, count, seed, kind != 'none')
                     for number, count in enumerate((steps, train.size // batch_size))]
    batches = pipeline(epochs, ahead=True)
    return Dataset(
        name=name, num_classes=len(class_names), class_names=class_names, augmentation=kind,
        train=passes(epochs, batches, lambda index: view(index + 1), 1),
        test=in_order(test.spaced(tested), tested_at_once(batch_size)),
        # Reads nothing ahead: that work would slow down the training steps beside it.
        probe=passes(probe, pipeline(probe, ahead=False), lambda index: index, None),
        train_size=steps * batch_size if settings.steps_per_epoch else train.size, test_size=tested,
        num_images=train.size, left_out=left_out, view=view,
        files=list(train.files or ()) + list(test.files or ()),
        fingerprint=images,
        order=lambda epoch: epochs.order(epoch - 1),
        batches=lambda numbers, view: untuned(batches(*epochs.drawn(numbers, view))))


def tested_at_once(batch_size):
    """Images in a batch of tests where training takes batches of batch_size."""
    return max(batch_size, min(TESTED_AT_ONCE * batch_size, MOST_TESTED))


def fingerprint(class_names, *splits):
    """str: another one where images were added or removed, or classes renamed."""
    names = [[os.path.join(*path.split(os.sep)[-2:]) for path in split.files or ()]
             for split in splits]
    text = repr((class_names, [split.size for split in splits], names))
    return hashlib.sha256(text.encode()).hexdigest()


def batch_at_hand(name, input_size, batch_size, num_classes, data_dir=None, augmentation=None):
    """((images, labels), None): what `probe` begins with; (None, reason) where there is none.

    Asks no network and prepares nothing: a photo set that is not prepared is not at hand.
    num_classes: that labels are for. The others as in load_dataset.
    """
    import tensorflow as tf
    if not _is_prepared(name, data_dir):
        return None, '{} is not prepared in {}'.format(name, _tfds_root(data_dir))
    try:
        dataset = load_dataset(name, input_size, batch_size, 'unread', data_dir=data_dir,
                               augmentation=augmentation)
        if dataset.num_classes != num_classes:
            return None, '{} has {} classes, not {}'.format(name, dataset.num_classes, num_classes)
        return next(iter(dataset.probe)), None
    except (UserError, tf.errors.OpError) as error:
        return None, first_line(error)


def sizes_at_hand(name, input_size, data_dir=None):
    """(classes, training images, test images); None where the data set would first have to be
    prepared. UserError for a folder that is no data set.
    """
    if not _is_prepared(name, data_dir):
        return None
    load = folder_splits if name.startswith(FOLDER) else LOADERS[name]
    class_names, train, test = load(name, input_size, data_dir)
    return len(class_names), train.size, test.size


def _is_prepared(name, data_dir):
    """False for a photo set that load_dataset would download or unpack."""
    root = _tfds_root(data_dir)
    # First by the folder: TensorFlow Datasets takes seconds to import.
    return name not in TFDS_NAMES or os.path.isdir(os.path.join(root, name)) and os.path.isdir(
        _builder(name, root).data_dir)


def _subset(split, count, name):
    """The split with `count` of its images, of each class equally many, as far as it has them.

    The same ones for every seed and scheme, and among those of any larger subset.
    """
    labels, shuffled = split.labels(), np.random.RandomState(SPLIT_SEED).permutation(split.size)
    classes = np.unique(labels)
    if not len(classes) <= count <= split.size:
        raise UserError('{} training images of {} are not to be had; allowed: {} (one of each '
                        'class) to {} (all)'.format(count, name, len(classes), split.size))
    rank = np.empty(split.size, np.int64)  # of an image in its class: all first ones come first
    for label in classes:
        members = shuffled[labels[shuffled] == label]
        rank[members] = np.arange(len(members))
    chosen = np.sort(shuffled[np.argsort(rank[shuffled], kind='mergesort')][:count])
    return split.only(chosen)


def available_bytes():
    """Memory that can be taken without swapping, bytes."""
    try:
        with open('/proc/meminfo') as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if 'MemAvailable' in line)
    except (OSError, StopIteration):
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2


def _decoded_once(split, keep, title):
    """The split, served from memory if `keep`. A folder's images are checked even if not kept.

    Decoded now and not in the first epoch, which would then take longer than any other.
    """
    if not keep and split.files is None:
        return split
    import tensorflow as tf
    from tqdm import tqdm
    shape = (split.size if keep else 0, split.input_size, split.input_size, 3)
    images = np.empty(shape, np.uint8)
    labels, done = np.empty(split.size, np.int32), 0
    decoded = untuned(tf.data.Dataset.range(split.size).map(split.fetch, 2).batch(
        DECODED_AT_ONCE).prefetch(2))
    silent = True if split.size < PROGRESS_FROM else None  # None: no bar where no one watches it
    try:
        with tqdm(None, title, split.size, False, unit='image', disable=silent) as bar:
            for some, of_some in decoded:
                end = done + len(of_some)
                labels[done:end] = of_some
                if keep:
                    images[done:end] = some
                bar.update(end - done)
                done = end
    except tf.errors.OpError as error:  # raised in order: it is of the batch from `done`
        done, error = _first_that_fails(split, done, error)
        culprit = split.files[done] if split.files else 'number {} of {}'.format(done, title)
        raise UserError("cannot read image '{}'; repair or remove it{} ({})".format(
            culprit, ', or --skip_bad_images' if split.files else '', first_line(error.message)))
    if not keep:
        return split
    # From a NumPy array: tf.data copies a captured tensor of this size whenever it is iterated.
    return split._replace(kept=True, fetch=lambda indices: tf.numpy_function(
        lambda i: (images[i], labels[i]), [indices], (tf.uint8, tf.int32)))


def _first_that_fails(split, begin, error):
    """(number, error) of the first image from `begin` that cannot be decoded by itself."""
    import tensorflow as tf
    for number in range(begin, min(begin + DECODED_AT_ONCE, split.size)):
        try:
            split.fetch(tf.constant(number, tf.int64))
        except tf.errors.OpError as own:
            return number, own
    return begin, error


def _tfds_root(data_dir):
    return os.path.abspath(os.path.expanduser(
        data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'))


def _builder(name, root):
    import tensorflow_datasets as tfds
    return tfds.builder(name, data_dir=root)


def _prepared_builder(name, data_dir):
    """The builder of a data set that lies prepared in `data_dir`, prepared now if need be.

    TensorFlow Datasets retries for minutes before it finds out that there is no network. So the
    network is asked first, and not at all if all archives lie in the folder for manual downloads.
    """
    import tensorflow_datasets as tfds
    root = _tfds_root(data_dir)
    builder = _builder(name, root)
    if os.path.isdir(builder.data_dir):
        return builder
    # One archive may have several addresses; today's is the first by name, so it is set last.
    url_of = {info.filename: url for url, info in sorted(builder.url_infos.items(), reverse=True)}
    manual_dir = os.path.join(root, 'downloads', 'manual')
    missing = [file for file in sorted(url_of)
               if not os.path.exists(os.path.join(manual_dir, file))]
    cause = _unreachable(url_of[missing[0]]) if missing else None
    if cause is None:
        config = tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=bool(missing))
        try:
            builder.download_and_prepare(download_config=config)
            return builder
        except Exception as error:  # whatever went wrong, the way out is the same
            cause = '{}: {}'.format(type(error).__name__, first_line(error))
    wanted = ''.join('\n  {}  {}'.format(file, url_of[file]) for file in missing or sorted(url_of))
    raise UserError(
        'data set {} cannot be prepared: {}\nTo prepare it without a network, put these archives, '
        'unchanged, into {}{}\nData sets that need no network: {}'.format(
            name, cause, manual_dir, wanted, ', '.join(OFFLINE_NAMES)))


def _unreachable(url):
    """Why `url` gets no answer, or None if its server answers, be it with an error."""
    try:
        urllib.request.urlopen(url, timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError:
        return None  # the builder may know another place
    except OSError as error:
        return 'no connection to {} ({})'.format(
            url.split('/')[2], first_line(getattr(error, 'reason', error)))
    return None


@loads(*TFDS_NAMES)
def _tfds_splits(name, input_size, data_dir):
    builder = _prepared_builder(name, data_dir)
    label = builder.info.features['label']
    names = tuple(label.int2str(i) for i in range(label.num_classes))
    return (names,) + tuple(_tfds_split(builder, part, input_size) for part in ('train', 'test'))


def _tfds_split(builder, split_name, input_size):
    """A prepared split, read by record number.

    The builder's own reader knows file order only; to shuffle it well takes a buffer of all
    images, or, where they do not fit into memory, another order than where they do.
    """
    import tensorflow as tf
    paths = [os.path.join(builder.data_dir, os.path.basename(file))
             for file in sorted(builder.info.splits[split_name].filenames)]
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
    """(path, offset, length) of each record of a TFRecord file.

    Its format: uint64 length, uint32 checksum of that, the record, uint32 checksum of the record.
    """
    with open(path, 'rb') as file:
        for header in iter(lambda: file.read(12), b''):
            length = int.from_bytes(header[:8], 'little')
            yield path, file.tell(), length
            file.seek(length + 4, os.SEEK_CUR)
