"""Tests that weights are downloaded whole or not at all, from a server on this machine."""

import hashlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tensorflow import keras

import models
from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.networks import downloads
from elastic.networks.downloads import weights_file
from small_runs import ROOT
from small_server import reach_this_machine, serving

NAME = 'mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_96_no_top.h5'


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Returns the folder of downloads, which is empty."""
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('KERAS_HOME', raising=False)
    reach_this_machine(monkeypatch)
    (tmp_path / '.keras').mkdir()
    return tmp_path / '.keras' / 'models'


@pytest.fixture(scope='module')
def content(tmp_path_factory):
    """Returns the bytes of weights of MobileNetV2, random ones."""
    path = str(tmp_path_factory.mktemp('weights') / 'a.h5')
    model = keras.applications.MobileNetV2((96, 96, 3), 0.35, include_top=False, weights=None)
    model.save(path)
    with open(path, 'rb') as file:
        return file.read()


def module_of_mobilenet():
    return sys.modules[keras.applications.MobileNetV2.__module__]


@pytest.mark.thorough
def test_a_network_gets_its_weights_after_a_stall_a_cut_and_a_torn_file(home, content,
                                                                         monkeypatch, capsys):
    with serving({'/' + NAME: content}) as (server, address):
        monkeypatch.setattr(module_of_mobilenet(), 'BASE_WEIGHT_PATH', address + '/')

        def build():
            return models.build_model('mobilenetv2', (96, 96, 3), 3, 'imagenet', alpha=0.35)
        server.stall = True
        with monkeypatch.context() as patience:
            patience.setattr(downloads, 'STALL_SECONDS', 2)
            with pytest.raises(UserError, match='127.0.0.1.*timed out.*put {} into {} by hand'
                               .format(NAME, home)) as error:
                build()
        assert '\n' not in str(error.value) and os.listdir(str(home)) == []
        server.stall, server.cut = False, True
        with pytest.raises(UserError, match='it sent .* of .* bytes'):
            build()
        assert os.listdir(str(home)) == []
        server.cut = False
        (home / NAME).write_bytes(content[:len(content) // 2])  # as Keras would leave it
        model = build()
        assert '{} is damaged or was cut short'.format(home / NAME) in capsys.readouterr().out
        assert (home / NAME).read_bytes() == content and os.listdir(str(home)) == [NAME]
        asked = len(server.asked)
        again = build()
        assert len(server.asked) == asked == 3
    for mine, other in zip(model.weights[:-2], again.weights[:-2]):
        np.testing.assert_array_equal(keras_stack.raw(mine).numpy(),
                                      keras_stack.raw(other).numpy())


@pytest.mark.thorough
def test_a_killed_download_is_replaced(home, content):
    code = ('import sys\nfrom elastic.networks.downloads import weights_file\n'
            'weights_file("a.h5", sys.argv[1])')
    with serving({'/a.h5': content}) as (server, address):
        server.stall = True
        child = subprocess.Popen([sys.executable, '-c', code, address + '/a.h5'], cwd=ROOT,
                                 stderr=subprocess.DEVNULL)
        assert server.sent_half.wait(120)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert os.listdir(str(home)) in ([], ['a.h5.part'])
        server.stall = False
        path = weights_file('a.h5', address + '/a.h5')
    assert os.listdir(str(home)) == ['a.h5'] and os.path.getsize(path) == len(content)


@pytest.mark.parametrize('hashed', [hashlib.md5, hashlib.sha256])
def test_a_file_with_another_checksum_is_replaced_or_named(hashed, home):
    good, bad = b'weights' * 9999, b'wrong' * 9999
    digest = hashed(good).hexdigest()
    home.mkdir()
    (home / 'a.h5').write_bytes(bad)
    with serving({'/a.h5': bad}) as (server, address):
        with pytest.raises(UserError, match='what it sent is damaged'):
            weights_file('a.h5', address + '/a.h5', 'models', file_hash=digest)
        assert (home / 'a.h5').read_bytes() == bad  # nothing was lost
        server.files['/a.h5'] = good
        weights_file('a.h5', address + '/a.h5', 'models', file_hash=digest)
        assert (home / 'a.h5').read_bytes() == good
        with pytest.raises(UserError, match='404'):
            weights_file('b.h5', address + '/b.h5')


@pytest.mark.thorough
def test_vit_gets_its_weights_the_same_way(home, monkeypatch):
    vit = pytest.importorskip('vit_keras.vit')
    with serving({}) as (server, address):
        monkeypatch.setattr(vit, 'BASE_URL', address)
        with pytest.raises(UserError, match='put ViT-B_16.*npz into {}'.format(
                home.parent / 'weights')):
            models.build_model('vit', (32, 32, 3), 3, 'imagenet')
        assert len(server.asked) == 1
