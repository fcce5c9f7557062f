"""Keeps training images in the folder of a run, for runs that continue it: RUN/replay/CLASS/NAME.

They are ordinary image files, which the owner may look at and delete. Photos are copied as they
are; images of other data sets become PNG files of the run's --input_size, the same bit for bit.

Reservoir sampling, by hashes: each image has a number, a hash of its class and name, and of each
class those with the smallest numbers are kept. So after any number of runs they are a uniform
sample of all that was seen, which depends on neither seed nor scheme, without a record of what was
dropped. Names begin with the place of their run in the chain, as cameras begin their numbers again.
"""

import collections
import hashlib
import io
import os
import re

from elastic.data.class_names import matches, nfc
from elastic.data.image_folder import entries_of, images_by_class, split_of
from elastic.data.photo import left_out_note
from elastic.errors import UserError, nearest
from elastic.files import make_folder, printable, whole_folder
from elastic.texts import bytes_of

FOLDER = 'replay'  # in the folder of a run
MOST = 50  # last characters of a name that are kept: file systems allow 255 bytes in all


def folder_of(class_name):
    """Returns the name of a class's folder: the class, with / and . in front as %2F and %2E."""
    return re.sub(r'[%/\0\\]|^\.', lambda found: '%{:02X}'.format(ord(found.group())), class_name)


def kept_images(folder, class_names, input_size):
    """Returns the Split of the images in a folder of kept images; None if there is none.

    class_names: in the order of the labels. Raises UserError for a file that is no image and for a
    class that is not among these names.
    """
    if folder is None or not os.path.isdir(folder):
        return None
    left_out = collections.Counter(
        (printable(name), 'in no class folder') for name in entries_of(folder)[1])
    found = images_by_class(folder, folder, left_out)
    folders = {folder_of(name): name for name in class_names}
    meant = matches(found, folders)
    unknown = sorted(set(found).difference(meant))
    if unknown:
        raise UserError("kept images of '{}' in {}: no class of the earlier runs or of the new data"
                        '{}; rename or remove the folder'.format(
                            printable(unknown[0]), folder, nearest(unknown[0], folders)))
    if left_out:
        raise UserError('kept images in {}: {}; remove what is no image'.format(
            folder, left_out_note(left_out)))
    classes = {}
    for name, paths in found.items():
        classes.setdefault(folders[meant[name]], []).extend(paths)
    split = split_of(classes, class_names, input_size, folder)
    return split if split.size else None


def keep_images(run_folder, images, amount, left_out=()):
    """Writes the kept images of a run; returns how many there are.

    images: data.images.Images of the run. amount: number of images, or a size as texts.bytes_of
    reads it. left_out: paths of images that cannot be read; those that can no longer be read are
    passed over, too. Raises OSError if one cannot be written; what the folder held stays then.
    """
    split, counts, number = images.seen, isinstance(amount, int), 0
    room = amount if counts else bytes_of(amount)
    with whole_folder(os.path.join(run_folder, FOLDER)) as new:
        for index, path in _ranked(split, images.class_names, set(left_out)):
            try:
                content = _content(split, index)
            except OSError:
                continue
            room -= 1 if counts else len(content)
            if room < 0:
                break
            make_folder(os.path.dirname(os.path.join(new, path)))
            with open(os.path.join(new, path), 'wb') as file:
                file.write(content)
            number += 1
    return number


def _ranked(split, class_names, left_out):
    """Returns [(number of an image, its path among the kept ones)], those to keep first.

    First comes the image with the smallest hash of each class, then the second one, and so on.
    """
    names, labels = split.named(), split.labels()
    old = [os.path.basename(name) for name in names[split.new:]]
    run, paths = 1 + max([int(name.split('-')[0]) for name in old if re.match('[0-9]+-', name)],
                         default=0), {}
    for index in range(split.size):
        file, folder = split.files and split.files[index], folder_of(class_names[labels[index]])
        if index >= split.new:
            path = '{}/{}'.format(folder, old[index - split.new])
        else:
            name, twin = os.path.basename(names[index])[-MOST:] + '.png' * (not file), 1
            path = '{}/{}-{}'.format(folder, run, name)
            while path.lower() in paths:  # in another folder of the class folder
                twin += 1
                path = '{}/{}-{}-{}'.format(folder, run, twin, name)
        if file not in left_out:
            paths.setdefault(path.lower(), (index, path))
    seen, ranks = collections.Counter(), {}
    for key in sorted(paths, key=lambda key: hashlib.sha256(os.fsencode(nfc(key))).digest()):
        label = labels[paths[key][0]]
        ranks[key] = seen[label]
        seen[label] += 1
    return [paths[key] for key in sorted(ranks, key=ranks.get)]  # stable: then by hash


def _content(split, index):
    """Returns the bytes of the file of an image; of an image without one, those of a PNG."""
    if split.files and split.files[index]:
        with open(split.files[index], 'rb') as file:
            return file.read()
    import tensorflow as tf
    from PIL import Image
    out = io.BytesIO()
    Image.fromarray(split.fetch(tf.constant(index, tf.int64)).numpy()).save(out, 'PNG')
    return out.getvalue()
