"""Tests that profiler.py needs no data set to be prepared, and no network."""

import pytest

import profiler
from cached_runs import SIZE
from elastic.data import fashion
from small_runs import quick_flags

CANNOT = 'data set {} cannot be prepared: no connection to '
KNOWN = {'stanford_dogs': (120, '12,000', '8,580'), 'fashion_mnist': (10, '60,000', '10,000')}


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp('logs')


@pytest.mark.parametrize('name', ['digits', 'fashion_mnist', 'stanford_dogs', 'tfds:eurosat/rgb'])
def test_a_data_set_is_profiled_before_it_is_prepared(name, offline, tmp_path, logs, capsys):
    network = quick_flags(logs)[:2]
    assert profiler.main(network + [
        '--input_size', str(SIZE), '--batch_size', '4', '--num_classes', '10',
        '--augmentation', 'none', '--logs_dir', str(logs), '--data_dir', str(tmp_path),
        '--dataset_name', name]) == 0
    out = capsys.readouterr().out
    assert 'elastic_training rho 0.5' in out
    source = fashion.source_of(name)
    if name.startswith('digits') or name == source == fashion.FASHION:  # in Debian's package
        assert 'cannot be prepared' not in out
        assert '12 epochs of {} images'.format(KNOWN.get(name, ['', '10,776'])[1]) in out
        return
    assert CANNOT.format(source) in out
    if name in KNOWN:
        assert ('costs are for {} classes, {} training and {} test images (as published)\n'
                .format(*KNOWN[name])) in out
    else:
        assert ('costs are for 10 classes, 1,000 training and 0 test images (the classes as '
                'published, the images a guess)\n') in out
