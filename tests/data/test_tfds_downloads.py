"""Tests that data sets are downloaded whole or not at all, from a server on this machine."""

import glob
import io
import os
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest

from elastic.command_line import UserError
from elastic.data import downloads, tfds
from elastic.data.images import load_images
from elastic.settings import DataSettings
from small_runs import ROOT
from small_server import reach_this_machine, serving
from tfds_archives import own_builder

ARCHIVE = 'labels.zip'


def archive():
    """Returns a zip of a file with one label a line, and of noise; its bytes are always the same.

    ZipInfo without a date is of 1980. The time of writing would change the checksum.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, 'w') as out:
        out.writestr(zipfile.ZipInfo('labels.txt'), '0\n1\n' * 5)
        out.writestr(zipfile.ZipInfo('noise'), np.random.RandomState(0).bytes(50000))
    return content.getvalue()


def register(url):
    """Makes the data set `remote`, of grey images whose labels lie at this address."""
    import tensorflow_datasets
    from tensorflow_datasets.core.download import checksums
    kinds = tensorflow_datasets.features

    def split_generators(self, dl_manager):
        path = os.path.join(str(dl_manager.download_and_extract(url)), 'labels.txt')
        with open(path) as lines:
            labels = [int(line) for line in lines]
        return {'train': [(i, dict(picture=np.full((6, 5, 1), i, np.uint8), kind=label))
                          for i, label in enumerate(labels)]}
    tensorflow_datasets.core.registered._DATASET_REGISTRY.pop('remote', None)
    made = own_builder('Remote', lambda: dict(
        picture=kinds.Image(shape=(None, None, 1)), kind=kinds.ClassLabel(num_classes=2)), {})
    made._split_generators = split_generators
    with open('archive.zip', 'wb') as file:
        file.write(archive())
    info = checksums.compute_url_info('archive.zip')
    made.url_infos = {url: type(info)(size=info.size, checksum=info.checksum, filename=ARCHIVE)}


def load(root):
    """Loads the data set, and returns the number of its training images."""
    return load_images('tfds:remote', 16, DataSettings(data_dir=str(root))).train.size


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Yields (Server, folder of data sets)."""
    reach_this_machine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tfds, 'GOOGLE', 'http://127.0.0.1:9')
    with serving({'/' + ARCHIVE: archive()}) as (server, address):
        server.url = '{}/{}'.format(address, ARCHIVE)
        register(server.url)
        yield server, tmp_path / 'sets'


def unfinished(root):
    return [path.rstrip('/') for path in glob.glob(str(root / '**'), recursive=True)
            if downloads.UNFINISHED.search(os.path.basename(path.rstrip('/')))]


def test_a_download_that_stalls_ends_and_is_named(served, monkeypatch):
    server, root = served
    server.stall = True
    with monkeypatch.context() as patience:
        patience.setattr(downloads, 'STALL_SECONDS', 2)
        with pytest.raises(UserError) as error:
            load(root)
    first = str(error.value).split('\n')[0]
    assert first.endswith('stopped sending {} (nothing for 2 s)'.format(ARCHIVE))
    assert os.path.join('downloads', 'manual') in str(error.value)
    server.stall = False
    assert load(root) == 8


def test_a_download_that_is_cut_is_named_and_not_used(served):
    server, root = served
    server.cut = True
    with pytest.raises(UserError, match=ARCHIVE):
        load(root)
    server.cut = False
    assert load(root) == 8


@pytest.mark.parametrize('damage', ['cut', 'empty', 'another', 'no info', 'extracted'])
def test_what_a_power_cut_left_in_the_cache_is_downloaded_again(damage, served, capsys):
    """The names are there, as after a rename, but not all of the content."""
    server, root = served
    assert load(root) == 8
    for path in (root / 'remote').rglob('*'):
        if path.is_file():
            path.unlink()
    for path in sorted((root / 'remote').rglob('*'), reverse=True):
        path.rmdir()
    info, = [path for path in (root / 'downloads').rglob('*.INFO')]
    cached = info.parent / info.name[:-len('.INFO')]
    content = cached.read_bytes()
    extracted, = (root / 'downloads' / 'extracted').iterdir()
    (extracted / 'labels.txt').write_text('')
    if damage == 'no info':
        info.write_text('')
    else:
        cached.write_bytes({'cut': content[:-9], 'empty': b'', 'another': content[::-1],
                            'extracted': content[:-9]}[damage])
    asked = len(server.asked)
    assert load(root) == 8
    assert '{} was damaged or cut short, and is removed'.format(cached) in capsys.readouterr().out
    assert len(server.asked) > asked and (cached.read_bytes() == content)


def test_what_a_killed_process_left_is_removed_once_it_is_old(served):
    server, root = served
    server.stall = True
    code = ('import os, sys\nsys.path[:0] = [{!r}, {!r}]\n'
            'from elastic.data import tfds\ntfds.GOOGLE = "http://127.0.0.1:9"\n'
            'import test_tfds_downloads as test\ntest.register(sys.argv[1])\n'
            'test.load(sys.argv[2])').format(os.path.dirname(__file__), ROOT)
    environment = dict(os.environ, PYTHONPATH=os.path.join(ROOT, 'tests', 'support'))
    child = subprocess.Popen([sys.executable, '-c', code, server.url, str(root)],
                             env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and len(unfinished(root)) < 2:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    left = unfinished(root)
    assert len(left) == 2  # the download's and the data set's
    server.stall = False
    assert load(root) == 8 and unfinished(root) == left  # they might still be in use
    for path in left:
        for inside in [path] + glob.glob(path + '/*'):
            os.utime(inside, (0, 0))
    lines = downloads.remove_broken(str(root), str(root / 'remote' / '1.0.0'), 'remote')
    assert sorted(lines) == sorted(
        '{} was left unfinished, and is removed'.format(path) for path in left)
    assert unfinished(root) == [] and load(root) == 8
