"""Finds a user's own images: one folder of images per class.

Nothing outside the folder is read: a link that leaves it is an error.
"""

import collections
import mimetypes
import os
from typing import Dict, NamedTuple, Sequence

import numpy as np

from elastic.data.photo import extensions, fault_of, first_fault, read_image, unreadable
from elastic.data.split import SPLIT_SEED, Split, train_and_test
from elastic.errors import UserError, nearest
from elastic.files import printable

FOLDER = 'folder:'  # prefix of the data set's name; the path follows
TEST_SHARE = 0.2
TRAIN_NAMES = ('train', 'training')
TEST_NAMES = ('test', 'testing', 'val', 'valid', 'validation', 'dev', 'eval')  # the best first
# Image files that Pillow cannot read by itself, and whose type Python does not know.
MORE_IMAGES = ('.heic', '.heif', '.avif', '.webp', '.dng', '.cr2', '.cr3', '.nef', '.arw', '.orf',
               '.rw2', '.raf', '.psd', '.jxl', '.jp2')
SHOWN = 3  # names in a message


class Folder(NamedTuple):
    """Holds the images of a folder.

    train, test: class -> sorted paths. notes: lines on what was left out.
    """
    train: Dict[str, Sequence[str]]
    test: Dict[str, Sequence[str]]
    notes: Sequence[str]


def folder_splits(path, input_size):
    """Returns the class names, training Split, test Split and notes of the folder at `path`."""
    found = scan_folder(path)
    names = tuple(sorted(found.train))
    splits = tuple(_split(part, names, input_size, path) for part in (found.train, found.test))
    return (tuple(map(printable, names)),) + splits + (found.notes,)


def scan_folder(path):
    """Returns the Folder at `path`, without decoding an image.

    Training and test images are in path/train and path/test (or path/val, path/valid), each with
    one folder per class. Otherwise the class folders are in `path` itself, and a fixed, stratified
    20 % of the images are for testing. Folders inside a class folder belong to the class.
    Raises UserError for another layout, a class without images, and a link that leaves `path`.
    """
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        parent, last = os.path.split(os.path.abspath(path))
        hint = nearest(last, _folders(parent)) if path and os.path.isdir(parent) else ''
        raise UserError("no folder '{}'{}; give {}PATH".format(path, hint, FOLDER))
    notes, unread = [], collections.Counter()
    parts = _parts(path, notes)
    train, test = [_images_by_class(part, path, unread) for part in parts] + [None] * (
        2 - len(parts))
    empty = ["'{}'".format(printable(name)) for name in sorted(train) if not train[name]]
    if empty:
        raise UserError('no images in class folder {} of {}; add some or remove the folder'.format(
            ', '.join(empty), parts[0]) + _unread_note(unread, '; left out there: {}'))
    if test is None:
        rng = np.random.RandomState(SPLIT_SEED)
        halves = {name: train_and_test(train[name], TEST_SHARE, rng) for name in sorted(train)}
        train, test = [{name: halves[name][i] for name in halves} for i in (0, 1)]
    unknown = sorted(name for name in test if test[name] and name not in train)
    if unknown:
        raise UserError("test class '{}' has no training images; add them in {}".format(
            unknown[0], os.path.join(parts[0], unknown[0])))
    tests = sum(map(len, test.values()))
    if len(train) < 2 or not tests:
        raise UserError(
            "folder '{}' has {} class(es) and {} test image(s); it needs at least two classes, and "
            'a class with at least two images{}'.format(
                parts[0], len(train), tests, _wrapped(parts[0])))
    untested = [printable(name) for name in sorted(train) if not test.get(name)]
    if untested:
        notes.append('no test images of {}'.format(shortened(untested)))
    if unread:
        notes.append(_unread_note(unread, 'left out, because Pillow does not read them: {}'))
    return Folder(train, test, notes)


def shortened(names):
    """Returns the first few names, and how many more there are."""
    return ', '.join(names[:SHOWN]) + (
        ' and {} more'.format(len(names) - SHOWN) if len(names) > SHOWN else '')


def _folders(path):
    return sorted(entry for entry in os.listdir(path) if not entry.startswith(('.', '__MACOSX'))
                  and os.path.isdir(os.path.join(path, entry)))


def _parts(path, notes):
    """Returns [folder of the class folders] or [the training images', the test images'].

    Appends to `notes` what is not used. Raises UserError for a layout that is not understood.
    """
    folders = _folders(path)
    if not folders:
        raise UserError("folder '{}' has no sub-folders; put the images of each class into a "
                        "sub-folder named after the class".format(path))
    splits = [name for name in folders if name.lower() in TRAIN_NAMES + TEST_NAMES]
    if not splits:
        return [path]
    usable = {name.lower(): name for name in splits if _folders(os.path.join(path, name))}
    train, test = [next((usable[key] for key in keys if key in usable), None)
                   for keys in (TRAIN_NAMES, TEST_NAMES)]
    if train and test:
        unused = ["'{}'".format(name) for name in folders if name not in (train, test)]
        if unused:
            notes.append('not used: {} of {}'.format(shortened(unused), path))
        return [os.path.join(path, train), os.path.join(path, test)]
    found = ', '.join('{} ({} class folders)'.format(
        name, len(_folders(os.path.join(path, name)))) for name in splits)
    raise UserError(
        "cannot use folder '{}', which has {}; understood are class folders, or train/ and test/ "
        '(or val/) with class folders in both; {}'.format(
            path, found + (' and other folders' if len(splits) < len(folders) else ''),
            'give {}{}, of which a fifth will be test images'.format(
                FOLDER, os.path.join(path, train)) if train else
            'put the images of each class into a folder named after it, and rename a class that '
            'has the name of a split'))


def _wrapped(path):
    """Returns the hint that the class folders are one folder further down; '' if they are not."""
    folders = _folders(path)
    if len(folders) == 1 and _folders(os.path.join(path, folders[0])):
        return '; or give {}{}'.format(FOLDER, os.path.join(path, folders[0]))
    return ''


def _images_by_class(path, root, unread):
    """Returns class name -> sorted paths of its images, also in folders inside the class folder.

    unread: Counter of the extensions of image files that cannot be read, to add to.
    """
    classes = {}
    _check_links(root, os.path.dirname(path), [os.path.basename(path)] if path != root else [])
    _check_links(root, path, _folders(path))
    for name in _folders(path):
        files, seen = [], {os.path.realpath(os.path.join(path, name))}
        for parent, folders, entries in os.walk(os.path.join(path, name), followlinks=True):
            entries = [entry for entry in sorted(entries) if not entry.startswith('.')]
            _check_links(root, parent, _folders(parent) + entries)
            folders[:] = [folder for folder in _folders(parent) if os.path.realpath(
                os.path.join(parent, folder)) not in seen]
            seen.update(os.path.realpath(os.path.join(parent, folder)) for folder in folders)
            files += [os.path.join(parent, entry) for entry in entries]
        classes[name] = [file for file in files if _is_image(file, unread)]
    return classes


def _check_links(root, path, entries):
    """Raises UserError if an entry of the folder `path` is a link that leaves `root`."""
    inside = os.path.join(os.path.realpath(root), '')
    for entry in entries:
        place = os.path.join(path, entry)
        if os.path.islink(place) and not os.path.realpath(place).startswith(inside):
            raise UserError("'{}' is a link to {}, outside of {}; copy what it links to, or give "
                            'the folder that contains both'.format(
                                place, os.path.realpath(place), root))


def _is_image(path, unread):
    """Returns whether the file is used: by its extension, or else by its header."""
    extension = os.path.splitext(path)[1].lower()
    if not os.path.isfile(path):  # a pipe or a device, which might never end
        unread['pipe or device'] += 1
        return False
    if extension in extensions() or fault_of(path) is None:
        return True
    if extension in MORE_IMAGES or (mimetypes.guess_type(path)[0] or '').startswith('image/'):
        unread[extension] += 1
    return False


def _unread_note(unread, text):
    return unread and text.format(', '.join(
        '{} {}'.format(count, kind) for kind, count in unread.most_common())) or ''


def _split(classes, names, input_size, root):
    pairs = [(file, label) for label, name in enumerate(names) for file in classes.get(name, [])]
    files, labels = [file for file, _ in pairs], np.array([label for _, label in pairs], np.int32)

    def fetch(index):
        import tensorflow as tf
        image, label = tf.numpy_function(
            lambda i: (read_image(files[i], input_size), labels[i]), [index], (tf.uint8, tf.int32))
        return tf.ensure_shape(image, (input_size, input_size, 3)), tf.ensure_shape(label, ())

    root = os.path.expanduser(root)
    return Split(input_size, lambda: labels, len(files), fetch, files,
                 names=[printable(os.path.relpath(file, root)) for file in files])


def check_headers(split):
    """Raises UserError for the first file of the Split that cannot be read, by its header."""
    fault = first_fault(split.files or ())
    if fault is not None:
        raise unreadable(*fault)


def without_bad_images(split):
    """Returns the Split with each unreadable image replaced by the next, and the replaced paths.

    The number of images does not change, so that an interrupted run resumes in the same order.
    """
    from tqdm import tqdm
    if split.files is None:
        return split, []
    bad = np.array([fault_of(path, split.input_size) is not None for path in tqdm(
        split.files, 'images', unit='image', leave=False, disable=None)])
    if bad.all():
        raise UserError('none of the {} images in {} can be read'.format(
            split.size, os.path.dirname(split.files[0])))
    good = np.flatnonzero(~bad)
    stand_ins = good[np.searchsorted(good, np.arange(split.size)) % len(good)]
    return (split.only(stand_ins) if bad.any() else split), [
        split.files[i] for i in np.flatnonzero(bad)]
