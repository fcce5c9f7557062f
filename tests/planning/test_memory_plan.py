"""Tests --memory: limits of the process, refusals, and what obeys it."""

import argparse
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import datasets
import train
from elastic.device import host
from elastic.errors import UserError
from elastic.planning.memory_plan import BESIDE, StepMemory, check_memory, set_limit
from elastic.settings import Settings
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.step_graph import tensor_sets
from elastic.texts import size, size_text
from elastic.timing.table import Profile, TensorTimings, chain_timings
from small_runs import script

BATCH = 32


@pytest.fixture(autouse=True)
def unlimited():
    yield
    host.limit_memory(None)


@pytest.fixture(scope='module')
def maker():
    """Returns the StepMaker of a network whose full step holds about 80 MB of activations."""
    inputs = x = keras.Input((32, 32, 3))
    for i in range(8):
        x = keras.layers.Conv2D(64 - 4 * i, 1 if i else 3, padding='same', activation='relu',
                                name='conv{}'.format(i))(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name='head')(x))
    batch = tf.zeros((BATCH, 32, 32, 3)), tf.zeros((BATCH,), tf.int32)
    return StepMaker(model, make_optimizer('sgd', 0.01, 50, model.trainable_variables), 0.0,
                     *batch)


def room_for(nbytes):
    """Limits this process so that a step may take about so many bytes."""
    host.release_memory()
    host.limit_memory(host.resident_bytes() + BESIDE + nbytes)


def test_sizes():
    assert [size(text) for text in ('900MB', '1.5GB', '1.5 G', '2000kB', '5e2'[:1])] == [
        9e8, 1.5e9, 1.5e9, 2e6, 5]
    assert size('auto') == 'auto' and size(str(size('900MB'))) == 9e8
    assert size(size_text(1.19e9)) == 1.19e9
    for text in ('1,5GB', ',100MB', '1,1000', '0'):
        with pytest.raises(argparse.ArgumentTypeError, match='is not a size above 0'):
            size(text)


def test_a_limit_is_checked_once_tensorflow_is_there(capsys):
    with pytest.raises(UserError, match='--memory 300 MB is less than the .* TensorFlow alone'):
        set_limit(3e8)
    assert host.memory_limit() is None
    held, free = host.resident_bytes(), host.available_bytes()
    set_limit('auto')
    assert held + 0.5 * free < host.memory_limit() < held + free
    assert capsys.readouterr().out == ''
    assert host.available_bytes() < free
    set_limit(held + 0.8 * free)  # a second `fit` in one process
    assert capsys.readouterr().out == ''
    set_limit(held + 10 * free)
    assert 'warning: --memory' in capsys.readouterr().out


def test_tests_take_no_more_images_than_a_step():
    assert datasets.tested_at_once(8) == 32
    host.limit_memory(10 ** 9)
    assert datasets.tested_at_once(8) == 8


def test_too_little_is_refused_with_what_would_work(maker):
    memory = StepMemory(maker)
    full = np.ones(len(maker.variables), bool)
    room_for(0.4 * memory.memory.peak(full))
    with pytest.raises(UserError, match='needs .* MB with --batch_size 32; use that or more, or '
                                        '--batch_size ([89]|1[0-5])$'):
        check_memory(Settings(train_type='full_training'), maker)
    with pytest.raises(UserError, match='or --micro_batch (8|4)$'):  # what divides a batch
        check_memory(Settings(train_type='full_training', micro_batch=BATCH), maker)
    check_memory(Settings(train_type='traditional_tl_training'), maker)
    host.limit_memory(host.resident_bytes())
    with pytest.raises(UserError, match='training the head alone .* not even a batch of one'):
        check_memory(Settings(), maker)


def test_the_profile_and_importance_take_what_fits(maker):
    memory = StepMemory(maker)
    room_for(memory.memory.importance_peak(BATCH // 2) + 3e6)
    assert memory.at_once() in (BATCH // 4, BATCH // 2)
    assert memory.at_once(10 * memory.memory.importance_peak(BATCH)) == 1
    room_for(10 * memory.memory.importance_peak(BATCH))
    assert memory.at_once() == BATCH


def test_what_a_process_gains_after_its_first_selection_was_set_aside_before(maker):
    memory = StepMemory(maker)
    room_for(3e8)
    first = memory.room.nbytes
    for gained, lost in ((50, 0), (280, 200)):  # MB: of what is set aside, 80 are free to gain
        held = np.ones(gained * 10 ** 6, np.uint8)
        assert memory.room.nbytes == pytest.approx(first - 1e6 * lost, abs=2e7)
        del held


@pytest.mark.thorough
def test_the_memory_of_freed_tensors_returns_to_the_system():
    code = ('from elastic.device import host\n'
            'host.return_large_tensors()\n'
            'from elastic.compat import start\n'
            'start.quiet_tensorflow()\n'
            'import tensorflow as tf\n'
            'tf.random.normal((4,))\n'
            'before = host.resident_bytes()\n'
            'tensors = [tf.random.normal((10 ** 7,)) for _ in range(5)]\n'
            'held = host.resident_bytes() - before\n'
            'del tensors\n'
            'print(held, host.resident_bytes() - before)')
    held, left = map(int, subprocess.run(
        [sys.executable, '-c', code], check=True, stdout=subprocess.PIPE).stdout.split())
    assert held > 2e8 and left < 5e7


def table_of(maker):
    """Returns a TensorTimings in which each group of ops takes 1 ms."""
    n = len(maker.variables)
    sets = tensor_sets(sorted(set(maker.graph.backward.values())), n)
    ms = np.ones(len(sets))
    t_dw, t_dy, depth = chain_timings(sets, ms)
    return TensorTimings([str(k) for k in range(n)], [()] * n, t_dw, t_dy, np.zeros(n), 5.0,
                         float(len(sets)), 0.0, depth, sets, ms, {}, Profile(np.zeros(n, bool)))


def selected(maker, memory, nbytes):
    """Returns the mask of the first selection, with room for so many bytes."""
    batch = (tf.random.stateless_uniform((BATCH, 32, 32, 3), (0, 0)),
             tf.range(BATCH) % 3)
    settings = Settings(rho=1.0, num_epochs=2, closed_loop=False, memory=memory)
    if memory:
        room_for(nbytes)
    scheme = train.ElasticScheme(maker, [batch], table_of(maker), settings)
    if memory:
        room_for(nbytes)
    return scheme.select(1, None).mask


def test_a_selection_stays_within_memory_and_says_what_that_costs(maker, capsys):
    memory = StepMemory(maker).memory
    alone = selected(maker, None, 0)
    full = memory.peak(alone)
    assert capsys.readouterr().out == ''
    assert selected(maker, 9e9, 10 * full).tolist() == alone.tolist()
    assert '--memory' not in capsys.readouterr().out
    within = selected(maker, 9e9, -BESIDE)  # no room, so a step may take what the head needs
    assert 0 < within.sum() < alone.sum() and memory.peak(within) <= StepMemory(maker).least
    line = [each for each in capsys.readouterr().out.splitlines() if each.startswith('--memory')]
    assert len(line) == 1 and 'time alone would allow rho' in line[0]


@pytest.mark.thorough
def test_a_refused_run_trains_with_the_memory_that_its_line_names(tmp_path):
    flags = ['main.py', '--model_name', 'mobilenetv2', '--alpha', '0.35', '--input_size', '96',
             '--batch_size', '64', '--dataset_name', 'digits', '--weights', 'none',
             '--bn_statistics', 'frozen', '--num_epochs', '1', '--steps_per_epoch', '2',
             '--validation_steps', '1', '--rho', '1', '--logs_dir', str(tmp_path), '--memory']
    given, needed = 3e8, []
    for known in (r'less than the (.*?B) that Python', r'the head alone needs (.*?B) with'):
        code, _, errors = script(*flags, '{:.0f}B'.format(given))
        assert code == 2, errors
        needed.append(size(re.search(known, errors).group(1)))
        given = needed[-1] + 3e7
    assert needed[1] > needed[0] and not list(tmp_path.glob('*/summary.json'))
    code, output, errors = script(*flags, '{:.0f}B'.format(given))
    assert code == 0 and '\nfinal test accuracy' in output, errors
