"""Downloads weights of networks, in place of keras.utils.get_file: with time limit and retries."""

import os
import sys

from elastic.compat.start import keras_home
from elastic.errors import UserError, first_line
from elastic.files import check_writable

STALL_SECONDS = 60  # without a byte, before a download is given up
RETRIES = 2


def weights_file(name, origin, cache_subdir='models', file_hash=None, retries=RETRIES, **_):
    """Returns the path of the file `name`, downloaded from the address `origin` if needed.

    cache_subdir: folder in keras_home. file_hash: MD5 or SHA-256, in hexadecimal, or None.
    retries: after a download that fails.
    A file of another hash is replaced. Raises UserError if there is no whole one.
    """
    import pooch
    folder = os.path.join(keras_home(), cache_subdir)
    known = file_hash and '{}:{}'.format('sha256' if len(file_hash) == 64 else 'md5', file_hash)
    pooch.get_logger().setLevel('WARNING')
    store = pooch.create(folder, '', registry={name: known}, urls={name: origin},
                         retry_if_failed=retries)
    try:
        path = store.fetch(name, downloader=pooch.HTTPDownloader(
            progressbar=sys.stderr.isatty(), timeout=STALL_SECONDS))
    except (OSError, ValueError) as error:  # ValueError: of another hash
        check_writable(folder, 'folder as KERAS_HOME', folder=True)
        raise UserError(
            'the ImageNet weights could not be downloaded from {} ({}): put {} into {} by hand, or '
            'use --weights none or --weights FILE'.format(
                origin.split('/')[2], first_line(error), name, folder))
    if known is None and name.endswith('.h5'):
        _check_whole(path)
    return path


def _check_whole(path):
    import h5py
    try:
        h5py.File(path, 'r').close()  # compares the size with that in its header
    except OSError as error:
        raise UserError("the ImageNet weights '{}' are damaged or cut short ({}): remove the file "
                        'and run the command again'.format(path, first_line(error)))
