"""The data sets: three photo sets, three digit domains, a user's own image folder.

    caltech_birds2011, oxford_iiit_pet, stanford_dogs   the paper's, through TensorFlow Datasets
    digits, digits_shifted, digits_inverted             source and target domains; need no network
    folder:PATH                                         one sub-folder of images per class

Each becomes two splits of numbered images and a function that fetches the image of a number. Order
and augmentation are pure functions of (seed, epoch, position): runs with the same seed see
bit-identical batches, whether the images come from memory or are decoded in each epoch.
"""

import itertools
import math
import os
import struct
import urllib.error
import urllib.request
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from command_line import UserError, nearest, one_of
from digits import DIGIT_NAMES, SPLIT_SEED, cut, rendering

TFDS_NAMES = ('caltech_birds2011', 'oxford_iiit_pet', 'stanford_dogs')
NAMES = TFDS_NAMES + DIGIT_NAMES
FOLDER = 'folder:'
OFFLINE_NAMES = DIGIT_NAMES + (FOLDER + 'PATH',)

ROTATION = 0.2  # of a full turn, to either side, as in the paper
MEMORY_SHARE = 0.4  # of the available memory, that decoded images may take
PROGRESS_FROM = 300  # images; fewer are decoded before a progress bar could be read
CONNECT_SECONDS = 5
FOLDER_TEST_SHARE = 0.2
TESTED_AT_ONCE = 4  # batches: without activations to keep they fit, and take a third less time
IMAGE_TYPES = ('.jpg', '.jpeg', '.png', '.bmp', '.gif')


class Dataset(NamedTuple):
    """Batches of images (B, S, S, 3) float32 in 0..255 and labels (B,) int32."""
    name: str
    train: Any  # tf.data: each pass is one epoch of full batches, newly shuffled and augmented
    test: Any  # tf.data: all test images in fixed order, as they are, TESTED_AT_ONCE batches in
    #            one; the last one may be partial
    probe: Any  # tf.data: endless training batches, augmented as in `train`, in an order of its own
    num_classes: int
    class_names: Tuple[str, ...]
    train_size: int  # images an epoch
    test_size: int  # images
    augmentation: str  # 'flip+rotate' or 'none'


class _Split(NamedTuple):
    size: int  # images
    input_size: int  # S
    fetch: Callable  # index () int64 -> image (S, S, 3) uint8, label () int32; runs in a graph
    files: Optional[Sequence[str]] = None  # of a user's folder: each file is then checked once
    kept: bool = False  # in memory: `fetch` takes many indices at once


def check_dataset_name(name):
    """`name` itself; UserError if there is no such data set. Loads nothing."""
    if not name.startswith(FOLDER):
        return one_of(name, NAMES + (FOLDER + 'PATH',), 'data set')
    path = os.path.expanduser(name[len(FOLDER):])
    if not os.path.isdir(path):
        parent, last = os.path.split(os.path.abspath(path))
        hint = nearest(last, _folders(parent)) if path and os.path.isdir(parent) else ''
        raise UserError("no folder '{}'{}; give {}PATH".format(path, hint, FOLDER))
    if not _folders(path):
        raise UserError("folder '{}' has no sub-folders; put the images of each class into a "
                        "sub-folder named after the class".format(path))
    return name


def augmentation(name):
    """'flip+rotate' or 'none': what `train` and `probe` of data set `name` do to each image.

    A flip makes another digit of a digit, and a turn overlaps with the shift between the domains.
    """
    return 'none' if check_dataset_name(name) in DIGIT_NAMES else 'flip+rotate'


def load_dataset(name, input_size, batch_size, data_dir=None, seed=0, cache='auto', first_epoch=0,
                 steps_per_epoch=None, validation_steps=None):
    """Dataset `name`, whole images resized to input_size x input_size.

    Every iter(train) begins the next epoch, from `first_epoch` on, and should be run through.
    Every iter(probe) goes on with a newly shuffled order.

    data_dir: folder of the TensorFlow Datasets (default: TFDS_DATA_DIR or ~/tensorflow_datasets).
    seed: fixes the order of `train` and `probe` and the augmentation, not the split.
    cache: 'memory' decodes all images now and keeps them as uint8, 'none' decodes them each
        epoch, 'auto' keeps them if they take less than MEMORY_SHARE of the available memory.
    steps_per_epoch: an epoch is that many batches at most, each epoch of other images.
    validation_steps: that many batches of test images at most, evenly spaced among all.

    Raises UserError for an unknown name, images that cannot be read or downloaded, and a batch
    larger than the training split.
    """
    kind = augmentation(name)
    one_of(cache, ('auto', 'memory', 'none'), 'cache')
    load = (_folder_splits if name.startswith(FOLDER) else
            _digit_splits if name in DIGIT_NAMES else _tfds_splits)
    class_names, train, test = load(name, input_size, data_dir)
    if batch_size > train.size:
        raise UserError('a batch of {} does not fit into the {} training images of {}'.format(
            batch_size, train.size, name))
    image_bytes = (train.size + test.size) * input_size * input_size * 3
    keep = cache == 'memory' or (
        cache == 'auto' and image_bytes < MEMORY_SHARE * available_bytes())
    train, test = _decoded_once(train, keep, 'train'), _decoded_once(test, keep, 'test')
    steps = min(train.size // batch_size, steps_per_epoch or train.size)
    epochs, probe = [_shuffled(train, batch_size, seed, endless, kind != 'none', first_epoch, count)
                     for endless, count in ((False, steps), (True, train.size // batch_size))]
    tested = min(test.size, (validation_steps or test.size) * batch_size)
    tests = _in_order(test, TESTED_AT_ONCE * batch_size, tested)
    return Dataset(name, epochs, tests, probe, len(class_names), class_names,
                   steps * batch_size if steps_per_epoch else train.size, tested, kind)


def _fetch_batch(split, indices):
    """Images (B, S, S, 3) float32 and labels (B,) int32 of `indices`, (B,) int64."""
    import tensorflow as tf
    images, labels = split.fetch(indices) if split.kept else tf.map_fn(
        split.fetch, indices, fn_output_signature=(tf.uint8, tf.int32))
    shape = (indices.shape[0], split.input_size, split.input_size, 3)
    return (tf.ensure_shape(tf.cast(images, tf.float32), shape),
            tf.ensure_shape(labels, shape[:1]))


def _shuffled(split, batch_size, seed, endless, augmented, first_epoch, steps):
    """tf.data of full training batches: an epoch of so many steps, or the endless one of the probe.

    Each epoch's order is drawn with NumPy's RandomState, not with tf.data's shuffle: it is the
    same in every version of TensorFlow, needs no buffer of images, and can resume at any epoch.
    """
    import tensorflow as tf
    stream_seed = [seed % 2 ** 32, int(endless)]
    key = int(np.random.RandomState(stream_seed).randint(2 ** 31))
    epochs = itertools.count(first_epoch)  # shared by all passes: each sees new augmentation

    def draw_order(_):
        epoch = next(epochs)
        order = np.random.RandomState(stream_seed + [epoch]).permutation(split.size)
        return (order[:steps * batch_size].reshape(steps, batch_size),
                np.arange(epoch * steps, (epoch + 1) * steps))

    def epoch_batches(unused):
        indices, numbers = tf.numpy_function(draw_order, [unused], (tf.int64, tf.int64))
        return tf.data.Dataset.from_tensor_slices(
            (tf.ensure_shape(indices, (steps, batch_size)), tf.ensure_shape(numbers, (steps,))))

    def batch(indices, number):
        images, labels = _fetch_batch(split, indices)
        return (augment(images, key, number) if augmented else images), labels

    data = tf.data.Dataset.range(1).repeat(None if endless else 1).flat_map(epoch_batches)
    if endless:  # reads nothing ahead: that work would slow down the training steps beside it
        return data.map(batch)
    data = data.map(batch, num_parallel_calls=2, deterministic=True).prefetch(4)
    return _untuned(data.apply(tf.data.experimental.assert_cardinality(steps)))


def _untuned(data):
    """Without tf.data's autotuning, whose thread can hold up the end of a pass for ten seconds."""
    import tensorflow as tf
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)


def _in_order(split, batch_size, count):
    """tf.data of `count` images of the split, evenly spaced, in order and unchanged."""
    import tensorflow as tf
    indices = np.linspace(0, split.size - 1, count).round().astype(np.int64)
    return _untuned(tf.data.Dataset.from_tensor_slices(indices).batch(batch_size).map(
        lambda indices: _fetch_batch(split, indices), num_parallel_calls=2).prefetch(4))


def augmentation_draws(key, number, count):
    """Whether to flip, (count,) bool, and angles, (count,) float32 in radians, for one batch.

    Stateless: Keras' RandomFlip and RandomRotation draw from global state, so that a batch would
    depend on everything drawn before it, the probe's batches and the model's dropout included.
    key: int, of the stream; number: () int64, of the batch, counted on over all epochs.
    """
    import tensorflow as tf
    draws = tf.random.stateless_uniform((2, count), seed=(key, number))
    return draws[0] < 0.5, (2 * draws[1] - 1) * ROTATION * 2 * math.pi


def augment(images, key, number):
    """RandomFlip('horizontal') and RandomRotation(0.2): bilinear, reflected at the border.

    images: (B, S, S, 3) float32. Returns the same shape and range.
    """
    import tensorflow as tf
    size = tf.shape(images)[1]
    flip, angle = augmentation_draws(key, number, tf.shape(images)[0])  # (B,) each
    images = tf.where(flip[:, None, None, None], images[:, :, ::-1], images)
    cos, sin, zero = tf.cos(angle), tf.sin(angle), tf.zeros_like(angle)
    middle = tf.cast(size - 1, tf.float32) / 2
    # Output (x, y) is read at input (cos x - sin y + dx, sin x + cos y + dy); the middle stays.
    transforms = tf.stack([cos, -sin, middle * (1 - cos + sin),
                           sin, cos, middle * (1 - sin - cos), zero, zero], axis=1)  # (B, 8)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images, transforms=transforms, output_shape=[size, size], fill_value=0.0,
        interpolation='BILINEAR', fill_mode='REFLECT')


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
    shape = (split.size if keep else 1, split.input_size, split.input_size, 3)
    images = np.empty(shape, np.uint8)
    labels, done = np.empty(split.size, np.int32), 0
    decoded = _untuned(tf.data.Dataset.range(split.size).map(split.fetch, 2).prefetch(64))
    silent = True if split.size < PROGRESS_FROM else None  # None: no bar where no one watches it
    try:
        for image, label in tqdm(decoded, title, split.size, False, unit='image', disable=silent):
            images[done if keep else 0], labels[done] = image, label
            done += 1
    except tf.errors.OpError as error:  # raised in order: it belongs to image number `done`
        culprit = split.files[done] if split.files else 'number {} of {}'.format(done, title)
        raise UserError("cannot read image '{}'; repair or remove it ({})".format(
            culprit, _first_line(error.message)))
    if not keep:
        return split
    # From a NumPy array: tf.data copies a captured tensor of this size whenever it is iterated.
    return split._replace(kept=True, fetch=lambda indices: tf.numpy_function(
        lambda i: (images[i], labels[i]), [indices], (tf.uint8, tf.int32)))


def _first_line(error):
    return (str(error).strip().splitlines() or [''])[0][:200]


def _resized(encoded, input_size):
    """(S, S, 3) uint8 of an encoded image: grey repeated, transparency dropped, first GIF frame.

    Rounded to whole levels, which takes a quarter of the memory of float32.
    """
    import tensorflow as tf
    image = tf.io.decode_image(encoded, expand_animations=False)  # 1 to 4 channels
    image = tf.cond(tf.shape(image)[-1] < 3, lambda: tf.tile(image[..., :1], [1, 1, 3]),
                    lambda: image[..., :3])
    image = tf.image.resize(tf.ensure_shape(image, (None, None, 3)), (input_size, input_size))
    return tf.cast(tf.round(image), tf.uint8)


def _prepared_builder(name, data_dir):
    """The builder of a data set that lies prepared in `data_dir`, prepared now if need be.

    TensorFlow Datasets retries for minutes before it finds out that there is no network. So the
    network is asked first, and not at all if all archives lie in the folder for manual downloads.
    """
    import tensorflow_datasets as tfds
    root = os.path.abspath(os.path.expanduser(
        data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'))
    builder = tfds.builder(name, data_dir=root)
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
            cause = '{}: {}'.format(type(error).__name__, _first_line(error))
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
            url.split('/')[2], _first_line(getattr(error, 'reason', error)))
    return None


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

    def fetch(index):
        serialized = tf.ensure_shape(tf.numpy_function(read, [index], tf.string), ())
        example = tf.io.parse_single_example(serialized, features)
        return _resized(example['image'], input_size), tf.cast(example['label'], tf.int32)

    return _Split(len(records), input_size, fetch)


def _records(path):
    """(path, offset, length) of each record of a TFRecord file.

    Its format: uint64 length, uint32 checksum of that, the record, uint32 checksum of the record.
    """
    with open(path, 'rb') as file:
        for header in iter(lambda: file.read(12), b''):
            length = struct.unpack('<Q', header[:8])[0]
            yield path, file.tell(), length
            file.seek(length + 4, os.SEEK_CUR)


def _digit_splits(name, input_size, data_dir):
    parts = [rendering(name, part, input_size) for part in ('train', 'test')]
    return (tuple('0123456789'),) + tuple(_Split(size, input_size, fetch) for size, fetch in parts)


def _folder_splits(name, input_size, data_dir):
    """PATH/train and PATH/test (or val, validation) if both hold class folders; else the class
    folders of PATH itself, with a fixed, stratified 20 % of their images as the test split.
    """
    path = os.path.expanduser(name[len(FOLDER):])
    folders = {folder.lower(): os.path.join(path, folder) for folder in _folders(path)}
    tests = [folders[key] for key in ('test', 'val', 'validation') if key in folders]
    if 'train' in folders and tests and _folders(folders['train']) and _folders(tests[0]):
        classes, test_classes = _images_by_class(folders['train']), _images_by_class(tests[0])
        unknown = sorted(set(test_classes) - set(classes))
        if unknown:
            raise UserError("test class '{}' has no training images: no such folder in {}".format(
                unknown[0], folders['train']))
    else:
        rng, files_of = np.random.RandomState(SPLIT_SEED), _images_by_class(path)
        parts = {name: cut(files_of[name], FOLDER_TEST_SHARE, rng) for name in sorted(files_of)}
        classes, test_classes = [{name: parts[name][i] for name in parts} for i in (0, 1)]
    tests = sum(len(files) for files in test_classes.values())
    if len(classes) < 2 or not tests:
        raise UserError("folder '{}' has {} class(es) and {} test image(s); it takes two classes, "
                        "and two images of a class to test on one".format(
                            path, len(classes), tests))
    names = tuple(sorted(classes))
    return (names,) + tuple(
        _folder_split(part, names, input_size) for part in (classes, test_classes))


def _folders(path):
    return sorted(entry for entry in os.listdir(path)
                  if not entry.startswith('.') and os.path.isdir(os.path.join(path, entry)))


def _images_by_class(path):
    """{class name: sorted paths of its images}; UserError naming the classes without images."""
    classes = {name: [os.path.join(path, name, file)
                      for file in sorted(os.listdir(os.path.join(path, name)))
                      if file.lower().endswith(IMAGE_TYPES) and not file.startswith('.')]
               for name in _folders(path)}
    empty = ["'{}'".format(name) for name in sorted(classes) if not classes[name]]
    if empty:
        raise UserError('no images ({}) in class folder {} of {}'.format(
            ', '.join(IMAGE_TYPES), ', '.join(empty), path))
    return classes


def _folder_split(classes, names, input_size):
    import tensorflow as tf
    pairs = [(file, label) for label, name in enumerate(names) for file in classes.get(name, [])]
    files, labels = [file for file, _ in pairs], np.array([label for _, label in pairs], np.int32)

    def fetch(index):
        return (_resized(tf.io.read_file(tf.gather(files, index)), input_size),
                tf.gather(labels, index))

    return _Split(len(files), input_size, fetch, files)
