"""Batches of a data set: the three photo sets of the paper, digits, or a user's own folder.

Order is a pure function of (seed, epoch), augmentation of (seed, image, view). So runs with the
same seed see bit-identical batches, whether images are in memory or decoded in each epoch.
"""

from elastic.command_line import UserError, first_line, one_of
from elastic.data.augmentation import epochs_of_a_view, view_of_epoch
from elastic.data.batches import Stream, in_order, passes, pipeline
from elastic.data.image_folder import first_fault
from elastic.data.images import augmentation_of, load_images, unprepared
from elastic.data.split import untuned
from elastic.device.host import MEMORY_SHARE, available_bytes
from elastic.settings import DataSettings

TESTED_AT_ONCE = 4  # batches, which take a third less time ...
MOST_TESTED = 64  # ... up to so many images: larger ones were the peak of a run's memory


class Dataset:
    """Batches of images, (B, S, S, 3) float32 in 0..255, with labels, (B,) int32.

    train: tf.data; each pass is the next epoch, in full batches and a new order.
    test: tf.data; each pass has all test images, unchanged and in a fixed order, in batches of
        tested_at_once(B); the last one may be smaller.
    probe: tf.data; endless training batches, augmented as in `train`, in an order of its own.
    augmentation: 'flip+rotate' or 'none'.
    num_images: training images, which are numbered from 0. train_size: those of an epoch.
    steps: batches of an epoch. test_size: test images.
    class_names, fingerprint, left_out: see images.Images.
    """

    def __init__(self, images, batch_size, settings):
        """images: images.Images. settings: DataSettings, with a kind of augmentation."""
        train, kind, seed = images.train, settings.augmentation, settings.seed % 2 ** 32
        self.steps = train.size // batch_size
        self.class_names, self.num_classes = images.class_names, len(images.class_names)
        self.fingerprint, self.left_out = images.fingerprint, images.left_out
        self.augmentation, self.num_images, self.train_size = kind, train.size, train.size
        if settings.steps_per_epoch:
            self.steps = min(self.steps, settings.steps_per_epoch)
            self.train_size = self.steps * batch_size
        self.test_size = _tested(images, batch_size, settings)
        test = images.test.spaced(self.test_size)
        self._files = list(train.files or ()) + list(test.files or ())
        self._input_size = train.input_size
        self._view_epochs = epochs = epochs_of_a_view(settings.views, settings.interval, kind)
        self._epochs, probe = [
            Stream(number, train, batch_size, count, seed, kind != 'none')
            for number, count in enumerate((self.steps, train.size // batch_size))]
        self._pipeline = pipeline(self._epochs, ahead=True)
        self.train = passes(self._epochs, self._pipeline,
                            lambda index: view_of_epoch(index + 1, epochs), 1)
        self.test = in_order(test, tested_at_once(batch_size))
        # Reads nothing ahead: that work would slow down the training steps beside it.
        self.probe = passes(probe, pipeline(probe, ahead=False), lambda index: index, None)

    def order(self, epoch):
        """Returns the image numbers of an epoch, from 1, as in `train`: (steps, B) int64."""
        return self._epochs.order(epoch - 1)

    def view(self, epoch):
        """Returns the number, from 0, of the view that an epoch, from 1, shows."""
        return view_of_epoch(epoch, self._view_epochs)

    def batches(self, numbers, view):
        """Returns tf.data of the batches of these image numbers, (steps, B) int64, in a view."""
        return untuned(self._pipeline(*self._epochs.drawn(numbers, view)))

    def first_fault(self):
        """Returns (path, why it cannot be read) of the first such image; None if all can."""
        return first_fault(self._files, self._input_size)


def load_dataset(name, input_size, batch_size, cache='auto', **settings):
    """Returns the Dataset `name`, with whole images resized to input_size x input_size.

    Each iter(train) begins the next epoch and should be run through.
    Each iter(probe) continues with a new order.
    cache: 'memory' decodes all images now and keeps them as uint8; 'none' decodes them in each
        epoch; 'auto' keeps them if they take less than MEMORY_SHARE of the available memory;
        'unread' is 'none' without checking that all images of a folder can be read.
    settings: fields of DataSettings.
    Raises UserError for an unknown name, images that cannot be read or downloaded, a batch larger
    than the training split, and a number of images that is not there or misses a class.
    """
    settings = DataSettings(**settings)
    settings = settings._replace(augmentation=augmentation_of(name, settings.augmentation))
    one_of(cache, ('auto', 'memory', 'none', 'unread'), 'cache')
    images = load_images(name, input_size, settings)
    if batch_size > images.train.size:
        raise UserError('a batch of {} does not fit into the {} training images of {}'.format(
            batch_size, images.train.size, name))
    images = images.checked(settings.skip_bad_images)
    if images.test.files is None:  # of a folder all images are checked, tested or not
        images = images._replace(test=images.test.spaced(_tested(images, batch_size, settings)))
    image_bytes = (images.train.size + images.test.size) * input_size * input_size * 3
    keep = cache == 'memory' or (
        cache == 'auto' and image_bytes < MEMORY_SHARE * available_bytes())
    if cache != 'unread':
        images = images._replace(train=images.train.decoded(keep, 'train'),
                                 test=images.test.decoded(keep, 'test'))
    return Dataset(images, batch_size, settings)


def _tested(images, batch_size, settings):
    """Returns how many of the test images are tested on."""
    return min(images.test.size, (settings.validation_steps or images.test.size) * batch_size)


def tested_at_once(batch_size):
    """Returns the images in a batch of tests where training has batches of batch_size."""
    return max(batch_size, min(TESTED_AT_ONCE * batch_size, MOST_TESTED))


def batch_at_hand(name, input_size, batch_size, num_classes, data_dir=None, augmentation=None):
    """Returns ((images, labels), None): the first batch of `probe`; or (None, why there is none).

    Asks no network and prepares nothing.
    num_classes: for which there should be labels. The other arguments as in load_dataset.
    """
    import tensorflow as tf
    reason = unprepared(name, data_dir)
    if reason:
        return None, reason
    try:
        dataset = load_dataset(name, input_size, batch_size, 'unread', data_dir=data_dir,
                               augmentation=augmentation)
        if dataset.num_classes != num_classes:
            return None, '{} has {} classes, not {}'.format(name, dataset.num_classes, num_classes)
        return next(iter(dataset.probe)), None
    except (UserError, tf.errors.OpError) as error:
        return None, first_line(error)
