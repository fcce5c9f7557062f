"""Tests that weights are downloaded whole or not at all, from a server on this machine."""

import hashlib
import http.server
import os
import sys
import threading
import types

import numpy as np
import pytest
from tensorflow import keras

import models
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.backbone import backbone_of
from elastic.networks.downloads import weights_file

NAME = 'mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_96_no_top.h5'


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Returns the folder of downloads, which is empty; no proxy is used."""
    monkeypatch.setenv('HOME', str(tmp_path))
    for name in ('KERAS_HOME', 'http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY'):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / '.keras' / 'models').mkdir(parents=True)
    return tmp_path / '.keras' / 'models'


@pytest.fixture
def served():
    """Serves `files`, path -> bytes, at `address`; lists in `asked` the paths asked for."""
    found = types.SimpleNamespace(files={}, asked=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found.asked.append(self.path)
            content = found.files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header('Content-Length', str(len(content or b'')))
            self.end_headers()
            self.wfile.write(content or b'')

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
    found.address = 'http://127.0.0.1:{}'.format(server.server_port)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.mark.thorough
def test_a_network_gets_its_weights(home, served, monkeypatch):
    model = keras.applications.MobileNetV2((96, 96, 3), 0.35, include_top=False, weights=None)
    model.save(str(home / NAME))
    content = served.files['/' + NAME] = (home / NAME).read_bytes()
    monkeypatch.setattr(sys.modules[keras.applications.MobileNetV2.__module__],
                        'BASE_WEIGHT_PATH', served.address + '/')

    def build():
        return models.build_model('mobilenetv2', (96, 96, 3), 3, 'imagenet', alpha=0.35)
    (home / NAME).write_bytes(content[:len(content) // 2])  # as a power cut may leave it
    with pytest.raises(UserError, match='damaged or cut short .*: remove the file and'):
        build()
    (home / NAME).unlink()
    built = [build(), build()]
    assert served.asked == ['/' + NAME] and os.listdir(str(home)) == [NAME]
    bases = [backbone_of(each).base for each in built]
    for variables in zip(model.weights, *[base.weights for base in bases]):
        arrays = [keras_stack.raw(variable).numpy() for variable in variables]
        np.testing.assert_array_equal(arrays[0], arrays[1])
        np.testing.assert_array_equal(arrays[0], arrays[2])


@pytest.mark.parametrize('hashed', [hashlib.md5, hashlib.sha256])
def test_a_file_with_another_checksum_is_replaced_or_named(hashed, home, served):
    good, bad = b'weights' * 9999, b'wrong' * 9999
    place = 'a.h5', served.address + '/a.h5', 'models', hashed(good).hexdigest()
    (home / 'a.h5').write_bytes(bad)
    served.files['/a.h5'] = bad
    with pytest.raises(UserError, match='127.0.0.1.*put a.h5 into {} by hand'.format(home)):
        weights_file(*place, retries=1)
    assert (home / 'a.h5').read_bytes() == bad  # nothing was lost
    assert len(served.asked) == 2  # it was tried again
    served.files['/a.h5'] = good
    weights_file(*place)
    assert (home / 'a.h5').read_bytes() == good and os.listdir(str(home)) == ['a.h5']


def test_without_an_answer_the_error_is_one_line(home, served):
    with pytest.raises(UserError, match='404.*put b.h5 into') as error:
        weights_file('b.h5', served.address + '/b.h5', retries=0)
    assert '\n' not in str(error.value)


@pytest.mark.thorough
def test_vit_gets_its_weights_the_same_way(home, served, monkeypatch):
    vit = pytest.importorskip('vit_keras.vit')
    monkeypatch.setattr(vit, 'BASE_URL', served.address)
    with pytest.raises(UserError, match='put ViT-B_16.*npz into {}'.format(
            home.parent / 'weights')):
        models.build_model('vit', (32, 32, 3), 3, 'imagenet')
    assert served.asked
