"""Tests what a finished run keeps, and the model that it adds later."""

import os
import time

import numpy as np
import pytest
from tensorflow import keras

import main
from cached_runs import SIZE, digits, network
from elastic.compat.keras_stack import MODEL_FILE
from elastic.errors import UserError
from elastic.export import saving
from elastic.export.litert import FILE, LiteRTModel
from elastic.export.plain import plain_model
from elastic.export.predictor import probabilities_of
from elastic.export.saving import check_export, keep_weights, report_export, save_network
from elastic.files import read_json
from elastic.networks.saved_model import load_saved
from elastic.runs.folder import changed_settings, read_run
from models import build_model
from small_models import photos
from small_runs import quick_flags

KEPT = ['class_names.txt', 'weights.npz']
FULL = ['--train_type', 'full_training']


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """Returns (folder of a run that saved no model, its flags)."""
    logs = tmp_path_factory.mktemp('kept')
    flags = quick_flags(logs, *FULL, '--run_name', 'run')
    assert main.main(flags) == 0
    return logs / 'run', flags


def test_a_finished_run_keeps_its_weights(finished):
    assert sorted(os.listdir(str(finished[0] / 'checkpoint'))) == KEPT


def test_a_finished_run_adds_its_model_without_training(finished, capsys):
    folder, flags = finished
    before, checkpoint = (folder / 'summary.json').read_bytes(), folder / 'checkpoint'
    for more, names in ((['--save_model'], [MODEL_FILE]),
                        (['--export', 'litert_int8'], [MODEL_FILE, FILE]),
                        (['--export', 'litert'], [MODEL_FILE, FILE])):
        capsys.readouterr()
        assert main.main(flags + more) == 0
        out = capsys.readouterr().out
        assert 'already finished' in out and 'saved {}'.format(checkpoint) in out
        assert 'ms/step' not in out and ('test accuracy' in out) == (FILE in names)
        assert sorted(os.listdir(str(checkpoint))) == sorted(KEPT + names)
        for again in (more, []):
            assert main.main(flags + again) == 0
            assert capsys.readouterr().out.startswith('already finished')
    assert (folder / 'summary.json').read_bytes() == before
    shape = (SIZE, SIZE, 3)
    trained = build_model(flags[flags.index('--model_name') + 1], shape, 10,
                          str(checkpoint / 'weights.npz'))
    expected = probabilities_of(trained)(photos(shape))
    saved = probabilities_of(load_saved(str(checkpoint / MODEL_FILE)))(photos(shape))
    np.testing.assert_allclose(saved, expected, atol=1e-5)
    file = LiteRTModel(str(checkpoint / FILE))
    np.testing.assert_allclose(file.probabilities(photos(shape)), expected, atol=1e-4)
    assert file.class_names == [str(digit) for digit in range(10)]


def test_a_run_without_weights_says_that_it_must_be_trained_again(finished):
    folder, flags = finished
    (folder / 'checkpoint').rename(folder / 'aside')
    try:
        assert main.main(flags) == 0
        with pytest.raises(UserError, match='it has no .*weights.npz: .* --restart'):
            main.main(flags + ['--save_model'])
    finally:
        (folder / 'aside').rename(folder / 'checkpoint')


def test_settings_of_older_runs_list_flags_that_decide_nothing(finished):
    now = read_json(str(finished[0] / 'settings.json'))
    assert not {'save_model', 'export'} & set(now)
    assert changed_settings(dict(now, save_model=True, export='litert'), now) == ''
    assert changed_settings(dict(now, seed=3), now) == 'seed 3 there, 0 now'


@pytest.mark.parametrize('more', [
    ['--train_type', 'prunetrain', '--prune_interval', '1', '--prune_threshold', '0.2'],
    FULL + ['--head', 'stages', '--head_features', '40', '--head_start', 'solved']],
    ids=['pruned', 'stages'])
@pytest.mark.thorough
def test_a_network_of_another_form_is_saved_as_it_was_trained(tmp_path, capsys, more):
    flags = quick_flags(tmp_path, *more, '--run_name', 'run')
    assert main.main(flags) == 0 and main.main(flags + ['--export', 'litert']) == 0
    summary = read_run(str(tmp_path / 'run')).summary
    out = capsys.readouterr().out
    if 'prunetrain' in more:
        assert 'channels have vanished: the network is rebuilt' in out
        assert summary['channels_removed'] > 0 and sum(summary['channel_widths']) == (
            summary['channels'] - summary['channels_removed'])
    else:
        assert summary['head_features'] == 40
    assert '{}: test accuracy {:.1f} %'.format(FILE, 100 * summary['final_accuracy']) in out


# ---------------------------------------------------------------- what LiteRT cannot express

def beginning_with(layer, path):
    """Saves a network of three classes that begins with this layer; returns the path."""
    inputs = keras.Input((16, 16, 3))
    x = keras.layers.Flatten()(layer(inputs))
    keras.Model(inputs, keras.layers.Dense(3, dtype='float32')(x)).save(path)
    return path


def layers():
    """Returns name -> (layer, kind of export, what is said)."""
    resizing = getattr(keras.layers, 'Resizing', None) or (  # Keras 2.6
        keras.layers.experimental.preprocessing.Resizing)
    return {
        'area': (resizing(8, 8, interpolation='area'), 'litert', 'ResizeArea'),
        'float16': (keras.layers.Conv2D(2, 3, dtype='mixed_float16'), 'litert_int8', 'float16'),
        'loop': (keras.Sequential([keras.layers.Reshape((16, 48)), keras.layers.SimpleRNN(2)]),
                 'litert_int8', 'loops')}


@pytest.mark.parametrize('name', ['area', 'float16', 'loop'])
def test_what_litert_cannot_express_is_refused_before_training(tmp_path, capfd, name):
    layer, kind, said = layers()[name]
    path = beginning_with(layer, str(tmp_path / MODEL_FILE))
    with pytest.raises(UserError, match=said) as refused:
        check_export(build_model(path, (16, 16, 3), 3), kind)
    assert '\n' not in str(refused.value) and '--export' in str(refused.value)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ''


@pytest.mark.thorough
def test_a_run_that_cannot_be_exported_does_not_begin(tmp_path, capsys):
    path = beginning_with(layers()['area'][0], str(tmp_path / ('area_' + MODEL_FILE)))
    flags = quick_flags(tmp_path, *FULL, '--model_name', path, '--input_size', '16', '--run_name',
                        'run')
    with pytest.raises(UserError, match='ResizeArea'):
        main.main(flags + ['--export', 'litert'])
    assert not (tmp_path / 'run').exists()
    assert main.main(flags) == 0
    with pytest.raises(UserError, match='is finished and keeps its weights.*ResizeArea') as error:
        main.main(flags + ['--export', 'litert'])
    assert 'tries again' not in str(error.value)  # it would be refused again
    assert main.main(flags + ['--save_model']) == 0


# ---------------------------------------------------------------- clock, int8

def test_a_model_is_saved_at_any_time_of_the_clock(tmp_path, monkeypatch):
    """A board without battery starts in 1970."""
    folder, model = str(tmp_path / 'checkpoint'), network()
    monkeypatch.setattr(time, 'localtime', lambda *_: time.gmtime(0))
    keep_weights(folder, model, list('0123456789'))
    save_network(folder, model, list('0123456789'), 'litert')
    assert sorted(os.listdir(folder)) == sorted(KEPT + [MODEL_FILE, FILE])
    loaded = load_saved(os.path.join(folder, MODEL_FILE))
    np.testing.assert_allclose(loaded(photos()), model(photos()), atol=1e-4)


@pytest.mark.thorough
def test_int8_that_loses_more_than_two_points_is_named(tmp_path, recwarn):
    dataset, path = digits(), str(tmp_path / FILE)
    calibration = [image[None] for image in photos()]
    saving.write_litert(path, probabilities_of(plain_model(network())), SIZE, (), calibration)
    report_export(path, 'litert_int8', dataset, 0.0)
    report_export(path, 'litert', dataset, 1.0)
    assert not [each for each in recwarn if 'int8' in str(each.message)]
    with pytest.warns(UserWarning, match=r'int8 has a test accuracy of \S+ %, float 100.0 %: use'):
        report_export(path, 'litert_int8', dataset, 1.0)
