"""Lists the photos that a run is trained on, and says later what has changed."""

import os
import zlib

from elastic.data.class_names import nfc
from elastic.data.photo import fault_of
from elastic.errors import UserError
from elastic.files import read_json
from elastic.texts import shortened

PHOTOS = 'images.json'  # in the folder of a run
SAMPLE = 2 ** 13  # bytes; a checksum covers as many at the beginning and in the middle of a photo


def listed(photos, before=None):
    """Returns what a run remembers of its photos, for JSON: name -> [times, bytes, checksum].

    photos: name -> path, as in images.Images. before: an earlier list; of files with the same
    times and bytes, nothing is read.
    """
    from tqdm import tqdm
    found = {}
    for name, path in tqdm(sorted(photos.items()), 'photos', leave=False, disable=None):
        stat, old = os.stat(path), (before or {}).get(name, [])
        stamp = [[stat.st_mtime_ns, stat.st_ctime_ns], stat.st_size]
        found[name] = old if old[:2] == stamp else stamp + [_checksum(path, stat.st_size)]
    return found


def stamps_of(folder, names):
    """Returns {(bytes, checksum)} of those images that the run in `folder` lists."""
    path = os.path.join(folder, PHOTOS)
    stamps = read_json(path) if os.path.exists(path) else {}
    return {tuple(stamps[nfc(name)][1:]) for name in names if nfc(name) in stamps}


def still_there(folder, root, names, seen):
    """Returns name -> path of those images below `root` that are as the run in `folder` had them.

    names: as in split.Split. seen: of stamps_of, of images to leave out.
    """
    before = read_json(os.path.join(folder, PHOTOS))
    places = {name: os.path.join(root, name) for name in names
              if nfc(name) in before and os.path.isfile(os.path.join(root, name))}
    now = listed({nfc(name): path for name, path in places.items()}, before)
    same = {name for name in now
            if now[name][1:] == before[name][1:] and tuple(now[name][1:]) not in seen}
    return {name: path for name, path in places.items() if nfc(name) in same}


def changes(folder, photos, skip_bad_images=False):
    """Returns in words how photos differ from those of the run in `folder`; '' if they do not.

    Other times are no change, nor names in other case: photos may have been copied. Nor is, with
    skip_bad_images, a photo that can no longer be read.
    """
    path = os.path.join(folder, PHOTOS)
    if not os.path.exists(path):
        return ''
    before = read_json(path)
    now = listed(photos, before)
    lost = {tuple(before[name][1:]): name for name in before if name not in now}
    moved = {name: lost.pop(tuple(now[name][1:])) for name in now
             if name not in before and tuple(now[name][1:]) in lost}
    found = dict(
        added=[name for name in now if name not in before and name not in moved],
        removed=sorted(set(before).difference(now, moved.values())),
        moved=['{} to {}'.format(old, name) for name, old in moved.items()
               if old.casefold() != name.casefold()],
        replaced=[name for name in now if name in before and before[name][1:] != now[name][1:]
                  and not (skip_bad_images and fault_of(photos[name], 1))])
    return ', '.join('{:,} {} ({})'.format(len(names), what, shortened(names))
                     for what, names in found.items() if names)


def check_unchanged(folder, photos, skip_bad_images):
    """Raises UserError if the run in `folder` was trained on other photos."""
    changed = changes(folder, photos, skip_bad_images)
    if changed:
        raise UserError('the images have changed since the run {}: {}; restore them, start over '
                        'with --restart, or choose another --run_name'.format(folder, changed))


def _checksum(path, size):
    """Returns a checksum of the beginning and the middle of a file; None if it cannot be read."""
    try:
        with open(path, 'rb') as file:
            found = zlib.crc32(file.read(SAMPLE))
            file.seek(size // 2)
            return zlib.crc32(file.read(SAMPLE), found)
    except OSError:
        return None
