"""Loads data sets in batches: from TensorFlow Datasets, digits, or a user's own folder.

The order of the images depends on the seed and the epoch, their augmentation on the seed, the image
and the view. So runs with the same seed see bit-identical batches, whether images are kept in
memory or decoded in each epoch.
"""

import numpy as np

from elastic.data.batches import Stream, in_order
from elastic.data.images import augmentation_of, load_images, unprepared
from elastic.data.photo import first_fault
from elastic.device.host import MEMORY_SHARE, available_bytes, memory_limit
from elastic.errors import UserError, first_line, one_of
from elastic.settings import VIEWS, DataSettings

TESTED_AT_ONCE = 4  # training batches in a test batch; takes a third less time than one
MOST_TESTED = 64  # images in such a batch; with more, testing set a run's peak memory


class Dataset:
    """Provides batches of images, (B, S, S, 3) float32 in 0..255, with labels, (B,) int32.

    train: tf.data; each pass is the next epoch, in full batches and a new order. Run through all.
    test: tf.data; each pass has all test images, unchanged and in a fixed order, in batches of
        tested_at_once(B); the last one may be smaller.
    validation: as `test`, with all images set aside by --validation_share; None without it.
    probe: tf.data; endless training batches, augmented as in `train`, each pass in another order.
    augmentation: 'flip', 'flip+rotate' or 'none'. views: 'fresh' or 'held'.
    num_images: number of training images, numbered from 0. num_old: how many of them, the last
        ones, earlier runs have kept. train_size: how many an epoch shows.
    steps: batches per epoch. test_size: number of test images. tested_at_once: in a test batch.
    test_names: what records call the test images, in the order of `test`. train_names: the
        same of all training images.
    labels: (num_images,) int32, of the training images.
    class_weight: (C,) float64, the weights of the classes in the loss; None if it has none.
    class_names, class_weights, fingerprint, notes, left_out, photos: as in
        elastic.data.images.Images.
    """

    def __init__(self, images, batch_size, settings):
        """images: Images. settings: DataSettings, with an augmentation."""
        train, kind, seed = images.train, settings.augmentation, settings.seed % 2 ** 32
        self.steps = steps_of(images, batch_size, settings)
        self.class_names, self.num_classes = images.class_names, len(images.class_names)
        self.fingerprint, self.notes, self.photos = images.fingerprint, images.notes, images.photos
        self.left_out, self.class_weights = images.left_out, images.class_weights
        weights = [weight for _, _, weight in images.class_weights]
        self.class_weight = np.array(weights) if weights else None
        self.augmentation, self.num_images, self.num_old = kind, train.size, train.old
        self.train_size = (self.steps * batch_size if settings.steps_per_epoch
                           else train.epoch_size)
        self.test_size = _tested(images, batch_size, settings)
        images = images._replace(test=images.test.spaced(self.test_size))
        self.test_names, self.train_names = images.test.named(), images.seen.named()
        self._files = [path for split in images.splits.values() for path in split.files]
        self._train, self.labels = train, train.labels()
        one_of(settings.views, VIEWS, 'kind of views')
        self.views = 'held' if settings.views == 'held' else 'fresh'
        self._interval = settings.interval
        self._epochs = Stream(0, train, batch_size, self.steps, seed, kind, ahead=True)
        # Reads nothing in advance, because that would slow down the training steps meanwhile.
        probe = Stream(1, train, batch_size, train.epoch_size // batch_size, seed, kind,
                       ahead=False)
        self.train = self._epochs.passes(lambda index: self.view(index + 1), 1)
        self.tested_at_once = tested_at_once(batch_size)
        self.test = in_order(images.test, self.tested_at_once)
        self.validation = images.validation and in_order(images.validation, self.tested_at_once)
        self.probe = probe.passes(lambda index: index, None)

    def order(self, epoch):
        """Returns the image numbers of an epoch, from 1, as in `train`: (steps, B) int64."""
        return self._epochs.order(epoch - 1)

    def view(self, epoch):
        """Returns the number, from 0, of the view that an epoch, from 1, shows."""
        if self.augmentation == 'none':
            return 0  # all views are alike
        epochs = self._interval if self.views == 'held' else 1
        return (epoch - 1) // epochs if epochs else 0

    def hold_views(self):
        """Shows each view for `interval` epochs (0: all) from now on; call it before the first."""
        self.views = 'held'

    def batches(self, numbers, view):
        """Returns tf.data of the batches of these image numbers, (steps, B) int64, in a view."""
        return self._epochs.batches(numbers, view)

    def calibration(self, count):
        """Returns tf.data of at most `count` training images, unchanged, in batches of one."""
        return in_order(self._train.spaced(min(count, self.num_images)), 1)

    def first_fault(self):
        """Returns (path, reason) of the first image that cannot be read; None if all can be."""
        return first_fault(self._files, self._train.input_size)


def find_images(name, input_size, batch_size, **settings):
    """Returns the Images of data set `name`, of which none is decoded yet.

    settings: fields of DataSettings. Raises UserError for an unknown name, for a folder that cannot
    be used, for a data set that cannot be downloaded, for a batch larger than the training split,
    and for a number of training images that is out of range.
    """
    settings = DataSettings(**settings)
    images, workers = load_images(name, input_size, settings), settings.share[1]
    if batch_size > images.train.epoch_size:
        of_each, fewer = (' that each of the {} workers has'.format(workers), ' or fewer workers'
                          ) if workers > 1 else ('', '')
        raise UserError('a batch of {} does not fit into the {} training images of {}{}; use a '
                        'smaller --batch_size{}'.format(
                            batch_size, images.train.epoch_size, name, of_each, fewer))
    return images


def load_dataset(name, input_size, batch_size, cache='auto', images=None, **settings):
    """Returns the Dataset `name`, with whole images resized to input_size x input_size.

    cache: 'memory' decodes all images now and keeps them as uint8; 'none' decodes them in each
        epoch; 'auto' keeps them if they take less than MEMORY_SHARE of the available memory;
        'unread' is 'none' without checking that all images of a folder can be read.
    images: what find_images returns for the same arguments, if it was called already.
    settings: fields of DataSettings.
    Raises UserError as find_images does, and for images that cannot be read.
    """
    if images is None:
        images = find_images(name, input_size, batch_size, **settings)
    settings = DataSettings(**settings)
    settings = settings._replace(augmentation=augmentation_of(name, settings.augmentation))
    one_of(cache, ('auto', 'memory', 'none', 'unread'), 'cache')
    images = images.checked(settings.skip_bad_images)
    if not images.test.files:  # all images of a folder are checked, even if not tested
        images = images._replace(test=images.test.spaced(_tested(images, batch_size, settings)))
    image_bytes = 3 * input_size ** 2 * sum(split.size for split in images.splits.values())
    keep = cache == 'memory' or (
        cache == 'auto' and image_bytes < MEMORY_SHARE * available_bytes())
    if cache != 'unread':
        images = images._replace(**{name: split.decoded(keep, name)
                                    for name, split in images.splits.items()})
    return Dataset(images, batch_size, settings)


def steps_of(images, batch_size, settings):
    """Returns the number of full batches in an epoch. settings: DataSettings."""
    steps = images.train.epoch_size // batch_size
    return min(steps, settings.steps_per_epoch or steps)


def _tested(images, batch_size, settings):
    """Returns the number of test images that are used."""
    return min(images.test.size, (settings.validation_steps or images.test.size) * batch_size)


def tested_at_once(batch_size):
    """Returns the size of a test batch, given that of a training batch; with --memory the same."""
    if memory_limit() is not None:
        return batch_size
    return max(batch_size, min(TESTED_AT_ONCE * batch_size, MOST_TESTED))


def batch_at_hand(name, input_size, batch_size, num_classes, data_dir=None, augmentation=None):
    """Returns ((images, labels), None) with the first batch of `probe`, or (None, why not).

    Uses no network and prepares nothing. num_classes: how many the data set must have. The other
    arguments are those of load_dataset.
    """
    import tensorflow as tf
    try:
        reason = unprepared(name, data_dir)
        if reason:
            return None, reason
        dataset = load_dataset(name, input_size, batch_size, 'unread', data_dir=data_dir,
                               augmentation=augmentation)
        if dataset.num_classes != num_classes:
            return None, '{} has {} classes, not {}'.format(name, dataset.num_classes, num_classes)
        return next(iter(dataset.probe)), None
    except (UserError, tf.errors.OpError) as error:
        return None, first_line(error)
