"""Downloads weights of networks, whole or not at all, in place of keras.utils.get_file.

That has no time limit, writes to the final name, and for many networks has no checksum: a file that
was cut by a power failure would fail in every later run.
"""

import fcntl
import hashlib
import http.client
import os
import urllib.request
import zipfile

from elastic.command_line import UserError, first_line
from elastic.compat import keras_stack
from elastic.files import PART, flush_folder, make_folder

STALL_SECONDS = 60  # without a byte, before a download is given up
BLOCK = 2 ** 18  # bytes


def weights_file(name, origin, cache_subdir='models', file_hash=None, **_):
    """Returns the path of the file `name`, downloaded from the address `origin` if needed.

    cache_subdir: folder in that of Keras. file_hash: MD5 or SHA-256, in hexadecimal, or None.
    A file that is damaged or was cut short is replaced. Raises UserError if it cannot be.
    """
    folder = os.path.join(os.path.expanduser(keras_stack.cache_folder()), cache_subdir)
    path = os.path.join(folder, name)
    if os.path.exists(path):
        if _is_whole(path, file_hash):
            return path
        print('{} is damaged or was cut short: it is downloaded again'.format(path))
    try:
        make_folder(folder)
        _download(origin, path, file_hash)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            'the ImageNet weights could not be downloaded from {} ({}): put {} into {} by hand, or '
            'use --weights none or --weights FILE'.format(
                origin.split('/')[2], first_line(error), name, folder))
    return path


def _download(origin, path, file_hash):
    """Writes the file at `path`, unless another process did so meanwhile."""
    with open(path + PART, 'ab') as out:
        fcntl.lockf(out, fcntl.LOCK_EX)  # not flock, which HDF5 itself uses
        if os.path.exists(path) and _is_whole(path, file_hash):
            return
        out.truncate(0)  # what a killed process left
        try:
            _receive(origin, out, os.path.basename(path))
            out.flush()
            if not _is_whole(path + PART, file_hash, os.path.splitext(path)[1]):
                raise OSError('what it sent is damaged')
            os.fsync(out.fileno())
            os.replace(path + PART, path)
        except BaseException:
            os.remove(path + PART)
            raise
    flush_folder(os.path.dirname(path))


def _receive(origin, out, title):
    from tqdm import tqdm
    with urllib.request.urlopen(origin, timeout=STALL_SECONDS) as response:
        received, size = 0, response.headers.get('Content-Length')
        with tqdm(None, title, size and int(size), False, unit='B', unit_scale=True,
                  disable=None) as bar:
            for block in iter(lambda: response.read(BLOCK), b''):
                out.write(block)
                bar.update(len(block))
                received += len(block)
        if size is not None and received != int(size):
            raise OSError('it sent {:,} of {:,} bytes'.format(received, int(size)))


def _is_whole(path, file_hash, kind=None):
    """Returns whether a file has this hash; without one, whether it is complete for its kind.

    kind: extension; default: that of the path.
    """
    if file_hash:
        found = hashlib.sha256() if len(file_hash) == 64 else hashlib.md5()
        with open(path, 'rb') as file:
            for block in iter(lambda: file.read(BLOCK), b''):
                found.update(block)
        return found.hexdigest() == file_hash
    if (kind or os.path.splitext(path)[1]) == '.npz':
        return zipfile.is_zipfile(path)
    import h5py
    try:
        h5py.File(path, 'r').close()  # compares the size with that in its header
        return True
    except OSError:
        return False
