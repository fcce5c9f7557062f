"""Tests that weights are downloaded whole or not at all, from a server on this machine."""

import hashlib
import os
import sys

import numpy as np
import pytest
from tensorflow import keras

import models
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.backbone import backbone_of
from elastic.networks.downloads import weights_file
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


@pytest.mark.thorough
def test_a_network_gets_its_weights(home, monkeypatch):
    model = keras.applications.MobileNetV2((96, 96, 3), 0.35, include_top=False, weights=None)
    home.mkdir()
    model.save(str(home / NAME))
    content = (home / NAME).read_bytes()
    with serving({'/' + NAME: content}) as (server, address):
        monkeypatch.setattr(sys.modules[keras.applications.MobileNetV2.__module__],
                            'BASE_WEIGHT_PATH', address + '/')

        def build():
            return models.build_model('mobilenetv2', (96, 96, 3), 3, 'imagenet', alpha=0.35)
        (home / NAME).write_bytes(content[:len(content) // 2])  # as a power cut may leave it
        with pytest.raises(UserError, match='damaged or cut short .*: remove the file and'):
            build()
        (home / NAME).unlink()
        built = [build(), build()]
        assert server.asked == ['/' + NAME] and os.listdir(str(home)) == [NAME]
    bases = [backbone_of(each).base for each in built]
    for variables in zip(model.weights, *[base.weights for base in bases]):
        arrays = [keras_stack.raw(variable).numpy() for variable in variables]
        np.testing.assert_array_equal(arrays[0], arrays[1])
        np.testing.assert_array_equal(arrays[0], arrays[2])


@pytest.mark.parametrize('hashed', [hashlib.md5, hashlib.sha256])
def test_a_file_with_another_checksum_is_replaced_or_named(hashed, home):
    good, bad = b'weights' * 9999, b'wrong' * 9999
    digest = hashed(good).hexdigest()
    home.mkdir()
    (home / 'a.h5').write_bytes(bad)
    with serving({'/a.h5': bad}) as (server, address):
        with pytest.raises(UserError, match='127.0.0.1.*put a.h5 into {} by hand'.format(home)):
            weights_file('a.h5', address + '/a.h5', 'models', digest, retries=1)
        assert (home / 'a.h5').read_bytes() == bad  # nothing was lost
        assert len(server.asked) == 2  # it was tried again
        server.files['/a.h5'] = good
        weights_file('a.h5', address + '/a.h5', 'models', digest)
        assert (home / 'a.h5').read_bytes() == good and os.listdir(str(home)) == ['a.h5']


def test_without_an_answer_the_error_is_one_line(home):
    with serving({}) as (_, address):
        with pytest.raises(UserError, match='404.*put b.h5 into') as error:
            weights_file('b.h5', address + '/b.h5', retries=0)
    assert '\n' not in str(error.value)
    with pytest.raises(UserError, match='put b.h5 into') as error:
        weights_file('b.h5', address + '/b.h5', retries=0)  # nobody listens there any more
    assert '\n' not in str(error.value)


@pytest.mark.thorough
def test_vit_gets_its_weights_the_same_way(home, monkeypatch):
    vit = pytest.importorskip('vit_keras.vit')
    with serving({}) as (server, address):
        monkeypatch.setattr(vit, 'BASE_URL', address)
        with pytest.raises(UserError, match='put ViT-B_16.*npz into {}'.format(
                home.parent / 'weights')):
            models.build_model('vit', (32, 32, 3), 3, 'imagenet')
        assert server.asked
