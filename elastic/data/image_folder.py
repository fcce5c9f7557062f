"""Finds a user's own images: one folder of images per class.

Nothing outside the folder is read: a link that leaves it is an error.
"""

import collections
import functools
import os
import unicodedata
from typing import Dict, NamedTuple, Sequence

import numpy as np

from elastic.data.class_names import matches, shown
from elastic.data.photo import fault_of, read_image, why_left_out
from elastic.data.split import SPLIT_SEED, Split, train_and_test
from elastic.errors import UserError, nearest
from elastic.files import printable
from elastic.texts import shortened

FOLDER = 'folder:'  # prefix of the data set's name; the path follows
TEST_SHARE = 0.2
TRAIN_NAMES = ('train', 'training')
TEST_NAMES = ('test', 'testing', 'val', 'valid', 'validation', 'dev', 'eval')  # the best first
nfc = functools.partial(unicodedata.normalize, 'NFC')  # so that names sort alike on any disk


class Folder(NamedTuple):
    """Holds the images of a folder.

    train, test: class, as people see its name -> sorted paths. notes: lines on what was left out.
    """
    train: Dict[str, Sequence[str]]
    test: Dict[str, Sequence[str]]
    notes: Sequence[str]


def folder_splits(path, input_size):
    """Returns the class names, training Split, test Split and notes of the folder at `path`."""
    found = scan_folder(path)
    names = tuple(sorted(found.train))
    splits = tuple(split_of(part, names, input_size, path) for part in (found.train, found.test))
    return (names,) + splits + (found.notes,)


def scan_folder(path):
    """Returns the Folder at `path`, without decoding an image.

    Training and test images are in path/train and path/test (or path/val, path/valid), each with
    one folder per class. Otherwise the class folders are in `path` itself, and a fixed, stratified
    20 % of the images are for testing. Folders inside a class folder belong to the class.
    Raises UserError for another layout, a class without images, classes that look the same, and a
    link that leaves `path`.
    """
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        parent, last = os.path.split(os.path.abspath(path))
        hint = nearest(last, _folders(parent)) if path and os.path.isdir(parent) else ''
        raise UserError("no folder '{}'{}; give {}PATH".format(path, hint, FOLDER))
    notes, left_out = [], collections.Counter()
    parts = _parts(path, notes)
    for place in sorted({path}.union(parts)):
        left_out.update((printable(os.path.splitext(name)[1].lower() or name), 'in no class folder')
                        for name in os.listdir(place) if not name.startswith('.')
                        and not os.path.isdir(os.path.join(place, name)))
    train, test = [images_by_class(part, path, left_out) for part in parts] + [None] * (
        2 - len(parts))
    empty = ["'{}'".format(printable(name)) for name in sorted(train) if not train[name]]
    if empty:
        raise UserError('no images in class folder {} of {}; add some or remove the folder'.format(
            ', '.join(empty), parts[0]) + ('; ' + left_out_note(left_out) if left_out else ''))
    twins = {}
    for name in sorted(train):
        if twins.setdefault(shown(name), name) != name:
            raise UserError('class folders {} and {} of {} look the same; rename one, or put its '
                            'images into the other'.format(
                                ascii(twins[shown(name)]), ascii(name), parts[0]))
    train = {name: train[folder] for name, folder in twins.items()}
    if test is None:
        rng = np.random.RandomState(SPLIT_SEED)
        halves = {name: train_and_test(train[name], TEST_SHARE, rng) for name in sorted(train)}
        train, test = [{name: halves[name][i] for name in halves} for i in (0, 1)]
    test = _as_in_training(test, train, parts[0])
    tests = sum(map(len, test.values()))
    if len(train) < 2 or not tests:
        raise UserError(
            "folder '{}' has {} class(es) and {} test image(s); it needs at least two classes, and "
            'a class with at least two images{}'.format(
                parts[0], len(train), tests, _wrapped(parts[0])))
    untested = [name for name in sorted(train) if not test.get(name)]
    if untested:
        notes.append('no test images of {}'.format(shortened(untested)))
    if left_out:
        notes.append(left_out_note(left_out))
    return Folder(train, test, notes)


def _as_in_training(test, train, place):
    """Returns the paths of the test images by the name that their class has in training.

    Raises UserError for a test class without training images.
    """
    meant, found = matches(test, train), {}
    for name in sorted(test):
        if name in meant:
            found.setdefault(meant[name], []).extend(test[name])
        elif test[name]:
            raise UserError('test class {!r} has no training images{}; add them in {}'.format(
                name, nearest(name, train), os.path.join(place, shown(name))))
    return found


def images_among(files, left_out):
    """Returns the paths that are images; counts the others in the Counter left_out."""
    reasons = [why_left_out(file) for file in files]
    left_out.update(filter(None, reasons))
    return [file for file, reason in zip(files, reasons) if reason is None]


def left_out_note(left_out):
    """Returns the line that says what was left out, and why. left_out: as in images_among."""
    return 'left out: ' + ', '.join('{:,} {} ({})'.format(count, *reason)
                                    for reason, count in left_out.most_common())


def _folders(path):
    return sorted((entry for entry in os.listdir(path) if not entry.startswith(('.', '__MACOSX'))
                   and os.path.isdir(os.path.join(path, entry))), key=nfc)


def _parts(path, notes):
    """Returns [folder of the class folders] or [the training images', the test images'].

    Appends to `notes` what is not used. Raises UserError for a layout that is not understood.
    """
    folders = _folders(path)
    if not folders:
        raise UserError("folder '{}' has no sub-folders; put the images of each class into a "
                        "sub-folder named after the class".format(path))
    splits = [name for name in folders if shown(name).lower() in TRAIN_NAMES + TEST_NAMES]
    if not splits:
        return [path]
    usable = {shown(name).lower(): name for name in splits if _folders(os.path.join(path, name))}
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


def images_by_class(path, root, left_out):
    """Returns class folder -> sorted paths of its images, also in folders inside the class folder.

    left_out: Counter as in images_among, to add to.
    """
    classes = {}
    _check_links(root, os.path.dirname(path), [os.path.basename(path)] if path != root else [])
    _check_links(root, path, _folders(path))
    for name in _folders(path):
        files, seen = [], {os.path.realpath(os.path.join(path, name))}
        for parent, folders, entries in os.walk(os.path.join(path, name), followlinks=True):
            entries = [entry for entry in sorted(entries, key=nfc) if not entry.startswith('.')]
            _check_links(root, parent, _folders(parent) + entries)
            folders[:] = [folder for folder in _folders(parent) if os.path.realpath(
                os.path.join(parent, folder)) not in seen]
            seen.update(os.path.realpath(os.path.join(parent, folder)) for folder in folders)
            files += [os.path.join(parent, entry) for entry in entries]
        classes[name] = images_among(files, left_out)
    return classes


def _check_links(root, path, entries):
    """Raises UserError if an entry of the folder `path` is a link that leaves `root`."""
    inside = os.path.join(os.path.realpath(root), '')
    for entry in entries:
        place = os.path.join(path, entry)
        if os.path.islink(place) and not os.path.realpath(place).startswith(inside):
            raise UserError("'{}' is a link to {}, outside of {}; copy what it links to, or give "
                            'the folder that contains both'.format(*map(printable, (
                                place, os.path.realpath(place), root))))


def split_of(classes, names, input_size, root):
    """Returns the Split of the images of these classes, name -> paths below the folder `root`.

    names: of all classes, in the order of the labels.
    """
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


def without_bad_images(split):
    """Returns the Split with each unreadable image replaced by the next, and the replaced paths.

    The number of images does not change, so that an interrupted run resumes in the same order.
    """
    from tqdm import tqdm
    if split.files is None:
        return split, []
    bad = np.array([bool(path and fault_of(path, split.input_size)) for path in tqdm(
        split.files, 'images', unit='image', leave=False, disable=None)])
    if bad.all():
        raise UserError('none of the {} images in {} can be read'.format(
            split.size, os.path.dirname(split.files[0])))
    good = np.flatnonzero(~bad)
    # After the last good image, kept images stay kept; else the first one stands in.
    nexts = np.searchsorted(good, np.arange(split.size))
    stand_ins = good[np.minimum(nexts, len(good) - 1) if split.old else nexts % len(good)]
    return (split.only(stand_ins) if bad.any() else split), [
        split.files[i] for i in np.flatnonzero(bad)]
