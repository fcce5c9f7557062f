"""Reads a user's own images: one sub-folder of images per class.

Nothing outside the folder is read: a link that leaves it is an error. An image too large to decode
is recognised by its header.
"""

import os
import warnings

import numpy as np

from elastic.command_line import UserError, first_line, nearest
from elastic.data.split import SPLIT_SEED, Split, resized, train_and_test

FOLDER = 'folder:'  # prefix of the data set's name; the path follows
TEST_SHARE = 0.2
IMAGE_TYPES = ('.jpg', '.jpeg', '.png', '.bmp', '.gif')
MOST_PIXELS = 10 ** 8  # of an image, which takes 300 MB when decoded


def check_folder(path):
    """Raises UserError unless there is a folder of folders at `path`. Loads nothing."""
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        parent, last = os.path.split(os.path.abspath(path))
        hint = nearest(last, _folders(parent)) if path and os.path.isdir(parent) else ''
        raise UserError("no folder '{}'{}; give {}PATH".format(path, hint, FOLDER))
    if not _folders(path):
        raise UserError("folder '{}' has no sub-folders; put the images of each class into a "
                        "sub-folder named after the class".format(path))


def folder_splits(path, input_size):
    """Returns the class names, the training Split and the test Split of the folder at `path`.

    Uses path/train and path/test (or val, validation) if both contain class folders. Otherwise the
    class folders are in `path` itself, and a fixed, stratified 20 % of the images are for testing.
    """
    path = os.path.expanduser(path)
    folders = {folder.lower(): os.path.join(path, folder) for folder in _folders(path)}
    tests = [folders[key] for key in ('test', 'val', 'validation') if key in folders]
    if 'train' in folders and tests and _folders(folders['train']) and _folders(tests[0]):
        classes, test_classes = [_images_by_class(part, path) for part in (folders['train'],
                                                                           tests[0])]
        unknown = sorted(set(test_classes) - set(classes))
        if unknown:
            raise UserError("test class '{}' has no training images; add them in {}".format(
                unknown[0], os.path.join(folders['train'], unknown[0])))
    else:
        rng, files_of = np.random.RandomState(SPLIT_SEED), _images_by_class(path, path)
        parts = {name: train_and_test(files_of[name], TEST_SHARE, rng)
                 for name in sorted(files_of)}
        classes, test_classes = [{name: parts[name][i] for name in parts} for i in (0, 1)]
    tests = sum(len(files) for files in test_classes.values())
    if len(classes) < 2 or not tests:
        raise UserError("folder '{}' has {} class(es) and {} test image(s); it needs at least two "
                        "classes, and a class with at least two images".format(
                            path, len(classes), tests))
    names = tuple(sorted(classes))
    return (names,) + tuple(
        _folder_split(part, names, input_size) for part in (classes, test_classes))


def _folders(path):
    return sorted(entry for entry in os.listdir(path)
                  if not entry.startswith('.') and os.path.isdir(os.path.join(path, entry)))


def _check_links(root, path, entries):
    """Raises UserError if an entry of the folder `path` is a link that leaves `root`."""
    inside = os.path.join(os.path.realpath(root), '')
    for entry in entries:
        place = os.path.join(path, entry)
        if os.path.islink(place) and not os.path.realpath(place).startswith(inside):
            raise UserError("'{}' is a link to {}, outside of {}; copy what it links to, or give "
                            'the folder that contains both'.format(
                                place, os.path.realpath(place), root))


def _images_by_class(path, root):
    """Returns class name -> sorted paths of its images.

    Raises UserError for classes without images, and for a link that leaves the folder `root`.
    """
    classes = {}
    if path != root:
        _check_links(root, os.path.dirname(path), [os.path.basename(path)])
    _check_links(root, path, _folders(path))
    for name in _folders(path):
        files = [file for file in sorted(os.listdir(os.path.join(path, name)))
                 if file.lower().endswith(IMAGE_TYPES) and not file.startswith('.')]
        _check_links(root, os.path.join(path, name), files)
        classes[name] = [os.path.join(path, name, file) for file in files]
    empty = ["'{}'".format(name) for name in sorted(classes) if not classes[name]]
    if empty:
        raise UserError('no images ({}) in class folder {} of {}; add some or remove the folder'
                        .format(', '.join(IMAGE_TYPES), ', '.join(empty), path))
    return classes


def _folder_split(classes, names, input_size):
    import tensorflow as tf
    pairs = [(file, label) for label, name in enumerate(names) for file in classes.get(name, [])]
    files, labels = [file for file, _ in pairs], np.array([label for _, label in pairs], np.int32)

    def fetch(index):
        return (resized(tf.io.read_file(tf.gather(files, index)), input_size),
                tf.gather(labels, index))

    return Split(input_size, lambda: labels, len(files), fetch, files)


def first_fault(files, input_size):
    """Returns (path, reason) of the first image that cannot be read; None if all can be read."""
    faults = ((path, _fault_of(path, input_size)) for path in files)
    return next((fault for fault in faults if fault[1] is not None), None)


def _fault_of(path, input_size):
    """Returns one line on why the image cannot be read; None if it can."""
    reason = _too_large(path)
    if reason:
        return reason
    import tensorflow as tf
    try:
        with tf.device('/CPU:0'):
            resized(tf.io.read_file(path), input_size)
    except (tf.errors.OpError, ValueError) as error:
        return first_line(getattr(error, 'message', error))


def _too_large(path):
    """Returns why the image is too large, judged by its header; None if it is not."""
    from PIL import Image
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', Image.DecompressionBombWarning)
            with Image.open(path) as image:
                width, height = image.size
    except Image.DecompressionBombError as error:
        return str(error)
    except Exception:  # not an image, or damaged: decoding it gives the reason
        return None
    return None if width * height <= MOST_PIXELS else '{:,} x {:,} pixels, {:,} at most'.format(
        width, height, MOST_PIXELS)


def check_sizes(split):
    """Raises UserError for the first file of the Split whose image is too large to be decoded."""
    for path in split.files or ():
        reason = _too_large(path)
        if reason:
            raise UserError("cannot read image '{}': {}; make it smaller, or use --skip_bad_images"
                            .format(path, reason))


def without_bad_images(split):
    """Returns the Split with each unreadable image replaced by the next, and the replaced paths.

    The number of images does not change, so that an interrupted run resumes in the same order.
    """
    from tqdm import tqdm
    if split.files is None:
        return split, []
    bad = np.array([_fault_of(path, split.input_size) is not None for path in tqdm(
        split.files, 'images', unit='image', leave=False, disable=None)])
    if bad.all():
        raise UserError('none of the {} images in {} can be read'.format(
            split.size, os.path.dirname(split.files[0])))
    good = np.flatnonzero(~bad)
    stand_ins = good[np.searchsorted(good, np.arange(split.size)) % len(good)]
    return (split.only(stand_ins) if bad.any() else split), [
        split.files[i] for i in np.flatnonzero(bad)]
