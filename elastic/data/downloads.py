"""Keeps downloads of TensorFlow Datasets from hanging, and removes what a killed one left."""

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import time

STALL_SECONDS = 60  # without a byte, before a download is given up
ABANDONED_SECONDS = 3600  # without a change, before an unfinished folder counts as left behind
INFO = '.INFO'  # beside a download: its size and checksum
UNFINISHED = re.compile(r'\.tmp\.[0-9a-f]{32}$|^incomplete[._]|\.incomplete')
BLOCK = 2 ** 20  # bytes


class NoConnection(OSError):
    """Says that a server does not answer."""


@contextlib.contextmanager
def watched(refuse):
    """Within this context, each download with requests or urllib ends if the server stalls.

    refuse: address -> (why it is not asked, or None; what to call its file).
    """
    import requests
    get, usual = requests.Session.get, socket.getdefaulttimeout()

    def watched_get(session, url, **more):
        fault, file = refuse(url)
        if fault:
            raise NoConnection('{}, which has {}'.format(fault, file))
        response = get(session, url, timeout=STALL_SECONDS, **more)
        blocks = response.iter_content

        def watched_blocks(*args, **more):
            try:
                yield from blocks(*args, **more)
            except requests.RequestException as error:
                raise NoConnection('{} stopped sending {} ({})'.format(
                    url.split('/')[2], file, 'nothing for {:g} s'.format(STALL_SECONDS)
                    if 'timed out' in str(error) else 'the connection broke'))
        response.iter_content = watched_blocks
        return response

    try:
        requests.Session.get = watched_get
        socket.setdefaulttimeout(STALL_SECONDS)
        yield
    finally:
        requests.Session.get = get
        socket.setdefaulttimeout(usual)


def remove_broken(root, data_dir, name):
    """Removes broken downloads of data set `name`, and returns lines on them.

    A power cut may leave a file with another content than its checksum says, which TensorFlow
    Datasets would use again and again. Unfinished folders of any set are removed when they are old.
    root: folder of all data sets. data_dir: of the prepared one.
    """
    downloads, lines = os.path.join(root, 'downloads'), []
    for info in glob.glob(os.path.join(glob.escape(downloads), '**', '*' + INFO), recursive=True):
        path = info[:-len(INFO)]
        if os.path.relpath(path, downloads).split(os.sep)[0] in ('extracted', 'manual') or (
                _is_whole(path, info, name)):
            continue
        for broken in [info, path] + glob.glob(os.path.join(
                glob.escape(downloads), 'extracted', '*' + glob.escape(os.path.basename(path)))):
            _remove(broken)
        lines.append('{} was damaged or cut short, and is removed'.format(path))
    for folder in (downloads, os.path.join(downloads, name), os.path.join(downloads, 'extracted'),
                   os.path.dirname(data_dir)):
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, entry)
            if UNFINISHED.search(entry) and time.time() - _changed(path) > ABANDONED_SECONDS:
                _remove(path)
                lines.append('{} was left unfinished, and is removed'.format(path))
    return lines


def _is_whole(path, info, name):
    """Returns whether a download has the size and checksum in its info, if it is of this set."""
    try:
        with open(info, encoding='utf-8') as file:
            known = json.load(file)
        if name not in known['dataset_names']:
            return True
        url_info = known['url_info']
        if url_info is None:  # put there by hand
            return True
        if os.path.getsize(path) != url_info['size']:
            return False
        found = hashlib.sha256()
        with open(path, 'rb') as file:
            for block in iter(lambda: file.read(BLOCK), b''):
                found.update(block)
        return found.hexdigest() == url_info['checksum']
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _changed(path):
    """Returns when anything in a folder last changed, seconds since 1970."""
    return max(os.lstat(os.path.join(folder, name)).st_mtime
               for folder, _, names in os.walk(path) for name in names + ['.'])


def _remove(path):
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)
