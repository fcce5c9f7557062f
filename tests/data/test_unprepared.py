"""Tests that profiler.py needs no data set to be prepared, and no network."""

import pytest

import profiler
from cached_runs import SIZE
from elastic.data import fashion
from elastic.data.images import LOADERS
from small_runs import quick_flags

CANNOT = 'data set {} cannot be prepared: no connection to '
KNOWN = {'caltech_birds2011': (200, '5,994', '5,794'), 'oxford_iiit_pet': (37, '3,680', '3,669'),
         'stanford_dogs': (120, '12,000', '8,580'), 'fashion_mnist': (10, '60,000', '10,000')}


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp('logs')


@pytest.fixture
def nothing_prepared(offline, monkeypatch, tmp_path):
    """Hides Debian's package of Fashion-MNIST, too; returns an empty folder of data sets."""
    monkeypatch.setattr(fashion, 'FOLDER', str(tmp_path / 'missing'))
    return tmp_path


@pytest.mark.parametrize('name', sorted(LOADERS) + ['tfds:cifar10', 'tfds:eurosat/rgb'])
def test_every_data_set_is_profiled_before_it_is_prepared(name, nothing_prepared, logs, capsys):
    network = quick_flags(logs)[:2]
    assert profiler.main(network + [
        '--input_size', str(SIZE), '--batch_size', '4', '--num_classes', '10',
        '--augmentation', 'none', '--logs_dir', str(logs), '--data_dir', str(nothing_prepared),
        '--dataset_name', name]) == 0
    out = capsys.readouterr().out
    assert 'elastic_training rho 0.5' in out
    if name.startswith('digits'):
        assert 'cannot be prepared' not in out and '12 epochs of 10,776 images' in out
        return
    assert CANNOT.format('tfds:' + name if name == fashion.FASHION else name) in out
    if name in KNOWN:
        assert ('costs are for {} classes, {} training and {} test images (as published)\n'
                .format(*KNOWN[name])) in out
    else:
        assert ('costs are for 10 classes, 1,000 training and 0 test images (the classes as '
                'published, the images a guess)\n') in out


def test_steps_are_timed_on_noise_where_a_data_set_cannot_be_prepared(nothing_prepared, capsys):
    batch = profiler.batch_for(
        profiler.StepSettings('mobilenetv2', 1.0, 16, 4, 37, 'none', 'frozen', 'sgd', 5e-4, None),
        'oxford_iiit_pet', str(nothing_prepared))
    assert batch is None and capsys.readouterr().out == (
        'steps are timed on noise: oxford_iiit_pet is not prepared in {}\n'.format(
            nothing_prepared))
