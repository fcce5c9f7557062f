"""Finds a user's own images: one folder of images per class.

Nothing outside the folder is read: a link that leaves it is an error.
"""

import collections
import os

import numpy as np

from elastic.data.class_names import matches, nfc, shown
from elastic.data.photo import fault_of, images_among, left_out_note, read_image
from elastic.data.split import Split
from elastic.errors import UserError, nearest
from elastic.files import printable
from elastic.texts import shortened

FOLDER = 'folder:'  # prefix of the data set's name; the path follows
TEST_SHARE = 0.2
TRAIN_NAMES = ('train', 'training')
TEST_NAMES = ('test', 'testing', 'val', 'valid', 'validation', 'dev', 'eval')  # the best first


def folder_splits(path, input_size):
    """Returns class names, training Split, test Split, and lines on what is left out.

    Training and test images are in path/train and path/test (or path/val, path/valid), each with
    one folder per class. Otherwise the class folders are in `path` itself, and a fixed, stratified
    20 % of the images are for testing. Folders inside a class folder belong to the class.
    Decodes no image. Raises UserError for another layout, a class without images, classes that look
    the same, and a link that leaves `path`.
    """
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        parent, last = os.path.split(os.path.abspath(path))
        hint = nearest(last, _folders(parent)) if path and os.path.isdir(parent) else ''
        raise UserError("no folder '{}'{}; give {}PATH".format(path, hint, FOLDER))
    parts, notes = _parts(path)
    left_out = collections.Counter(
        (printable(os.path.splitext(name)[1].lower() or name), 'in no class folder')
        for place in sorted({path, *parts}) for name in entries_of(place)[1])
    train, *tests = [images_by_class(part, path, left_out) for part in parts]
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
    classes = {name: train[folder] for name, folder in twins.items()}
    names = tuple(sorted(classes))
    train = split_of(classes, names, input_size, path)
    if tests:
        test = split_of(_as_in_training(tests[0], classes, parts[0]), names, input_size, path)
    else:
        train, test = train.parted(TEST_SHARE)
    if len(names) < 2 or not test.size:
        raise UserError(
            "folder '{}' has {} class(es) and {} test image(s); it needs at least two classes, and "
            'a class with at least two images{}'.format(
                parts[0], len(names), test.size, _wrapped(parts[0])))
    untested = sorted(set(range(len(names))).difference(test.labels()))
    if untested:
        notes.append('no test images of {}'.format(shortened([names[i] for i in untested])))
    if left_out:
        notes.append(left_out_note(left_out))
    return names, train, test, tuple(notes)


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


def entries_of(path):
    """Returns the names of the folders and of the files in a folder, each sorted, none hidden."""
    folders, files = [], []
    for name in sorted(os.listdir(path), key=nfc):
        is_folder = os.path.isdir(os.path.join(path, name))
        if not name.startswith(('.', '__MACOSX') if is_folder else '.'):
            (folders if is_folder else files).append(name)
    return folders, files


def _folders(path):
    return entries_of(path)[0]


def _parts(path):
    """Returns [folder of the class folders] or [the training images', the test images'], and notes.

    The notes say what is not used. Raises UserError for a layout that is not understood.
    """
    folders = _folders(path)
    if not folders:
        raise UserError("folder '{}' has no sub-folders; put the images of each class into a "
                        "sub-folder named after the class".format(path))
    splits = {name: len(_folders(os.path.join(path, name))) for name in folders
              if shown(name).lower() in TRAIN_NAMES + TEST_NAMES}
    if not splits:
        return [path], []
    usable = {shown(name).lower(): name for name in splits if splits[name]}
    train, test = [next((usable[key] for key in keys if key in usable), None)
                   for keys in (TRAIN_NAMES, TEST_NAMES)]
    if train and test:
        _check_links(path, path, [train, test])
        unused = ["'{}'".format(name) for name in folders if name not in (train, test)]
        notes = ['not used: {} of {}'.format(shortened(unused), path)] if unused else []
        return [os.path.join(path, train), os.path.join(path, test)], notes
    found = ', '.join('{} ({} class folders)'.format(*item) for item in splits.items())
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
    names = _folders(path)
    _check_links(root, path, names)
    return {name: images_among(_files_below(os.path.join(path, name), root, set()), left_out)
            for name in names}


def _files_below(path, root, seen):
    """Returns the paths of the files in a folder and in those inside it, of each folder once.

    seen: real paths of the folders that were read, to add to: links may lead to one again.
    """
    if os.path.realpath(path) in seen:
        return []
    seen.add(os.path.realpath(path))
    folders, files = entries_of(path)
    _check_links(root, path, folders + files)
    found = [os.path.join(path, name) for name in files]
    for name in folders:
        found += _files_below(os.path.join(path, name), root, seen)
    return found


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
        image = tf.numpy_function(lambda i: read_image(files[i], input_size), [index], tf.uint8)
        return tf.ensure_shape(image, (input_size, input_size, 3))

    inside = [printable(os.path.relpath(file, root)) for file in files]
    return Split(input_size, lambda: labels, len(files), fetch, files, names=inside,
                 sources=dict(zip(map(nfc, inside), files)))


def without_bad_images(split):
    """Returns the Split with each unreadable image replaced by the next, and the replaced paths.

    The number of images does not change, so that an interrupted run resumes in the same order.
    """
    from tqdm import tqdm
    if not split.files:
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
    return split.only(stand_ins), [split.files[i] for i in np.flatnonzero(bad)]
