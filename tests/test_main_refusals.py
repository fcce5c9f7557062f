"""Tests that bad input and broken models are refused in one line, and nothing is written."""

import os
import re

import pytest

import main
import profiler
from elastic import command_line
from elastic.compat import keras_stack
from elastic.errors import UserError, in_one_line
from elastic.runs.folder import is_finished
from refusals import assert_refused
from small_runs import flags, script

# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize('arguments, words', [
    (['--model_name', 'resnet5'], "unknown model 'resnet5' (did you mean"),
    (['--dataset_name', 'caltech_birds'], "did you mean 'caltech_birds2011'?"),
    (['--train_type', 'full_trainin'], "did you mean 'full_training'?"),
    (['--prune_penalty_ratio', '1'], '--prune_penalty_ratio'),
    (['--prune_threshold', '0'], '--prune_threshold'),
    (['--prune_interval', '-1'], '--prune_interval'), (['--granularity', 'block'], 'choose from'),
    (['--memory', '0'], "'0' is not a size above 0; allowed are such as 900MB, 1.5GB, or auto"),
    (['--memory=-1GB'], "'-1GB' is not a size"),
    (['--memory', '2GB', '--workers', 'localhost:1,localhost:2', '--worker_index', '0'],
     '--memory does not fit --workers'),
    (['--rho', '1.01'], '--rho'),
    (['--learning_rate', 'inf'], 'learning_rate'), (['--num_epochs', '0'], '--num_epochs'),
    (['--interval', '-1'], '--interval'), (['--probe_batches', '0'], '--probe_batches'),
    (['--weight_decay', 'nan'], '--weight_decay'), (['--clip_norm', '0'], '--clip_norm'),
    (['--save_model', 'maybe'], 'is not 1, 0, true or false'),
    (['--optimizer', 'sdg'], "choose from"),
    (['--weights', '/nowhere/w.npz'], "no weights file at '/nowhere/w.npz'"),
    (['--meter_csv', '/nowhere/meter.csv'], 'cannot read the meter log'),
    (['--views', 'hold'], 'choose from'), (['--validation_share', '1'], '--validation_share'),
    (['--class_weight', 'balance'], "--class_weight balance: no such file; give 'balanced' or"),
    (['--keep', 'best'], '--keep best needs --validation_share'),
    (['--patience', '3'], '--patience needs --validation_share'),
    (['--validation_share', '0.1', '--keep', 'best', '--train_type', 'prune_training'],
     '--keep best does not fit prune_training'),
    (['--train_images', '63'], '--train_images 63 is less than a batch; allowed: 64'),
    (['--run_name', '/tmp/outside'], 'leaves'), (['--run_name', 'a/../../b'], 'leaves'),
    (['--train_type', 'elastic_training_weight_magnitude', '--importance', 'gradient_update'],
     'leave --importance'),
    (['--dataset_name', 'folder:/nowhere/at/all'], '/nowhere/at/all'),
])
def test_a_bad_flag_is_refused_in_one_line_and_leaves_nothing(tmp_path, capsys, arguments,
                                                                 words):
    assert_refused(flags(tmp_path) + arguments, words, tmp_path, capsys)


ONE_BY_ONE = """
import sys
import main, plot, profiler
from elastic import command_line
for script, *arguments in {!r}:
    try:
        command_line.run(sys.modules[script].main, arguments)
    except SystemExit as stop:
        print('status', stop.code, *arguments)
"""


def test_help_and_mistakes_answer_without_tensorflow(tmp_path):
    """A TensorFlow that cannot be imported proves that none is needed."""
    (tmp_path / 'tensorflow.py').write_text('raise SystemExit("tensorflow was imported")')
    calls = [['main', '--help'], ['profiler', '--help'], ['plot', '--help'],
             ['main', '--model_name', 'mine.keras'], ['main', '--rho', '7'],
             ['main', '--model_name', 'DenseNet121', '--dataset_name', 'dogs'],
             ['profiler', '--model_name', 'DenseNet121', '--dataset_name', 'dogs']]
    code, out, err = script('-c', ONE_BY_ONE.format(calls), PYTHONPATH=str(tmp_path))
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith('status ')] == [
        ' '.join(['status', '0' if '--help' in call else '2'] + call[1:]) for call in calls]
    lines = [line for line in err.splitlines() if not line.startswith(('usage:', ' '))]
    assert len(lines) == 4 and all('error: ' in line for line in lines), err


def test_an_input_size_that_the_model_cannot_take_is_refused(tmp_path):
    with pytest.raises(UserError, match='16x16'):
        main.main(flags(tmp_path, '--input_size', '16'))
    assert os.listdir(str(tmp_path)) == []


# ---------------------------------------------------------------- models that fail

def failing_model(kind):
    """Returns a classifier of 32x32 images in 10 classes that loads but cannot be trained."""
    from tensorflow import keras
    inputs = keras.Input((None, None, 3) if kind == 'too small' else (32, 32, 3))
    x = keras.layers.Conv2D(2, 3, name='first')(inputs)
    if kind == 'too small':
        for i in range(4):
            x = keras.layers.MaxPooling2D(3)(keras.layers.Conv2D(2, 3, name='c{}'.format(i))(x))
    elif kind == 'index':  # fails only when it runs: the lookup is out of range
        x = keras.layers.Embedding(5, 4, name='lookup')(keras.layers.Flatten()(inputs))
        return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))
    elif kind == 'memory':
        x = keras.layers.UpSampling2D(4096, name='huge')(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10, name='head')(x))


TOO_SMALL = r"error: layer 'c\d' \(Conv2D\): .*[Nn]egative"
INDEX = r'error: .*lookup.*(\[0, 5\)|row by row)'


@pytest.mark.parametrize('script_main, kind, words', [
    (main.main, 'too small', TOO_SMALL), (profiler.main, 'too small', TOO_SMALL),
    (main.main, 'index', INDEX), (profiler.main, 'index', INDEX),
    pytest.param(profiler.main, 'memory', 'error: .*huge.*use a smaller --batch_size or '
                 '--input_size', marks=pytest.mark.thorough)])  # TensorFlow tries for 10 s
def test_a_failing_model_is_named_in_one_line_and_leaves_nothing(tmp_path, capsys, script_main,
                                                                   kind, words):
    path, folder = str(tmp_path / keras_stack.MODEL_FILE), tmp_path / 'logs'
    failing_model(kind).save(path)
    arguments = ['--model_name', path, '--input_size', '32', '--batch_size', '8', '--dataset_name',
                 'digits', '--logs_dir', str(folder), '--num_classes', '10']
    if script_main is main.main:
        arguments += ['--train_type', 'full_training', '--train_images', '24']
    with pytest.raises(SystemExit) as stop:
        command_line.run(script_main, arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and re.match(words, error) and error.count('\n') == 1
    assert not folder.exists() or os.listdir(str(folder)) == []


def test_too_little_memory_has_a_remedy():
    from tensorflow.errors import ResourceExhaustedError
    for error in (MemoryError('lacking'), ResourceExhaustedError(None, None, 'lacking')):
        assert re.match('lacking.*use a smaller --batch_size', in_one_line(error))


def test_a_run_with_other_settings_says_how_to_train_on_from_its_weights(tmp_path):
    (tmp_path / 'settings.json').write_text('{"num_epochs": 2}')
    for line in ('choose another --run_name, or start over with --restart',
                 '--run_name (with --weights {}/checkpoint/weights.npz to train on from there), or '
                 .format(tmp_path)):
        with pytest.raises(UserError) as refused:
            is_finished(str(tmp_path), {'num_epochs': 4})
        assert line in str(refused.value) and '\n' not in str(refused.value)
        (tmp_path / 'checkpoint').mkdir(exist_ok=True)
        (tmp_path / 'checkpoint' / 'weights.npz').write_bytes(b'')
