"""Loads the images of a data set, given its name.

    caltech_birds2011, oxford_iiit_pet, stanford_dogs   the paper's, from TensorFlow Datasets
    digits, digits_shifted, digits_inverted             source and target domains; need no network
    fashion_mnist                                       from a package of Debian, else from there
    tfds:NAME[/CONFIG][:VERSION]                        any classification set from there
    folder:PATH                                         one sub-folder of images per class
"""

import hashlib
import os
from typing import NamedTuple, Optional, Sequence, Tuple

from elastic.data import tfds
from elastic.data.class_names import joined, nfc
from elastic.data.class_weights import class_weights
from elastic.data.digits import DIGIT_NAMES, digit_splits
from elastic.data.fashion import FASHION, FASHION_SIZES, fashion_splits, source_of
from elastic.data.image_folder import FOLDER, folder_splits, without_bad_images
from elastic.data.photo import check_readable
from elastic.data.replay import kept_images
from elastic.data.split import Split
from elastic.data.tfds import TFDS, check_tfds_name, tfds_splits
from elastic.errors import UserError, one_of
from elastic.files import printable
from elastic.settings import AUGMENTATIONS, PAPER_SETS

# Name -> function (name, input size, data_dir) -> (class names, training Split, test Split) and any
# lines on what is not used.
LOADERS = dict(dict.fromkeys(DIGIT_NAMES, digit_splits), **dict.fromkeys(PAPER_SETS, tfds_splits))
LOADERS[FASHION] = fashion_splits
KNOWN_SIZES = dict(PAPER_SETS, **{FASHION: FASHION_SIZES})


def check_dataset_name(name):
    """Returns `name`; raises UserError if there is no such data set. Loads nothing.

    Of a name that begins with tfds:, only the form is checked.
    """
    if name.startswith(FOLDER):
        folder_splits(name[len(FOLDER):], input_size=1)  # decodes no image
    elif name.startswith(TFDS):
        check_tfds_name(name)
    else:
        one_of(name, tuple(LOADERS) + (TFDS + 'NAME', FOLDER + 'PATH'), 'data set')
    return name


def augmentation_of(name, given=None):
    """Returns `given`, or the usual augmentation of data set `name` if None is given.

    Both are in AUGMENTATIONS. The paper's sets are flipped and rotated, as in the paper; photos of
    others are flipped. Digits are not augmented: a flipped digit may look like another one, and
    rotation is part of the shift between the domains.
    """
    usual = 'none' if name in DIGIT_NAMES else 'flip+rotate' if name in PAPER_SETS else 'flip'
    return usual if given is None else one_of(given, AUGMENTATIONS, 'augmentation')


class Images(NamedTuple):
    """Holds the images of a data set.

    class_names: in the order of the labels.
    fingerprint: a hash that changes with the classes, the labels and the names of the images.
    notes: lines on what is not used.
    seen: all training images, with those for validation and for other workers.
    validation: training images set aside by --validation_share; None without it.
    class_weights: [[class, images, weight]] of the others for training; () without --class_weight.
    left_out: paths of the images that could not be read.
    """
    class_names: Tuple[str, ...]
    train: Split
    test: Split
    fingerprint: str
    notes: Tuple[str, ...]
    seen: Split
    validation: Optional[Split]
    class_weights: Sequence[list]
    left_out: Sequence[str] = ()

    @property
    def photos(self):
        """Returns name -> path of all images of a folder, or files of a set; see Split.sources."""
        return {**self.train.sources, **self.test.sources}

    @property
    def splits(self):
        """Returns name -> Split."""
        found = dict(train=self.train, validation=self.validation, test=self.test)
        return {name: split for name, split in found.items() if split is not None}

    def checked(self, skip_bad_images):
        """Returns these Images, without unreadable ones if skip_bad_images.

        Otherwise raises UserError for an image whose header shows that it cannot be read.
        """
        if not skip_bad_images:
            for split in self.splits.values():
                check_readable(split.files)
            return self
        found = {name: without_bad_images(split) for name, split in self.splits.items()}
        return self._replace(left_out=sum((bad for _, bad in found.values()), []),
                             **{name: split for name, (split, _) in found.items()})


def load_images(name, input_size, settings):
    """Returns the Images of data set `name`. settings: DataSettings.

    Decodes none, but looks at all labels. TensorFlow is needed for those of TensorFlow Datasets
    alone.
    """
    class_names, train, test, notes = _splits(name, input_size, settings.data_dir)
    if settings.old_classes:
        class_names, numbers, lines = joined(settings.old_classes, class_names)
        train, test = train.relabelled(numbers), test.relabelled(numbers)
        notes += tuple(lines)
    if settings.train_images is not None:
        train = train.subset(settings.train_images, 'training images of ' + name)
    if settings.test_images is not None:
        test = test.subset(settings.test_images, 'test images of ' + name)
    kept = kept_images(settings.replay_from, class_names, input_size)
    if kept is not None:
        train = train.joined(kept, settings.replay_share)
        notes += ('{:,} images of earlier runs are mixed in: {:.0f} % of each batch'.format(
            kept.size, 100 * settings.replay_share),)
    fingerprint, seen, validation, weights = _fingerprint(class_names, train, test), train, None, ()
    if settings.validation_share is not None:
        train, validation = train.parted(settings.validation_share)
        if not validation.size:
            raise UserError('--validation_share {:g} sets no image aside: no class has two '
                            'training images'.format(settings.validation_share))
        notes += ('{:,} of {:,} training images are set aside for validation'.format(
            validation.size, seen.size),)
    if settings.class_weight is not None:
        weights = class_weights(settings.class_weight, class_names, train.counts(len(class_names)))
    return Images(class_names, train.part(*settings.share), test, fingerprint, notes, seen,
                  validation, weights)


def unprepared(name, data_dir=None):
    """Returns why data set `name` must be prepared before it loads; None if it need not be.

    Raises UserError for a data set that cannot be used.
    """
    return tfds.unprepared(source_of(name), data_dir)


def prepared_sizes(name, input_size, data_dir=None):
    """Returns (classes, training images, test images) of a data set, and None; prepares it.

    Where it cannot be prepared, returns what is known without it, with None for an unknown number
    of images, and why it cannot. Raises UserError for a data set that cannot be used.
    """
    try:
        class_names, train, test, _ = _splits(name, input_size, data_dir)
    except tfds.Unprepared as error:
        known = KNOWN_SIZES.get(name.replace(TFDS, ''))
        return known or (error.num_classes, None, None), str(error)
    return (len(class_names), train.size, test.size), None


def _splits(name, input_size, data_dir):
    """Returns class names, training Split, test Split and notes."""
    if name.startswith(FOLDER):
        return folder_splits(name[len(FOLDER):], input_size)
    load = LOADERS.get(check_dataset_name(name), tfds_splits)
    class_names, train, test, *notes = load(name, input_size, data_dir)
    return tuple(map(printable, class_names)), train, test, tuple(notes)


def _fingerprint(class_names, *splits):
    text = repr((class_names, [(split.labels().tolist(), split.names) for split in splits]))
    return hashlib.sha256(os.fsencode(nfc(text.casefold()))).hexdigest()
