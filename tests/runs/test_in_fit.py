"""Tests elastic training inside model.fit, on whatever Keras is installed."""

import csv
import itertools
import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import plot
import train
from cached_runs import watched
from datasets import load_dataset
from elastic.compat import keras_stack
from elastic.device import host
from elastic.errors import UserError
from elastic.runs.in_fit import TrainingInFit
from elastic.runs.recorder import Recorder
from elastic.runs.session import Session
from elastic.schemes.fixed import FixedScheme
from elastic.settings import Settings
from elastic.steps.optimizer import optimizer_for
from fixed_tables import fixed_profile
from small_models import SMALL, small_classifier, values
from small_steps import conv_stack, still
from train import ElasticTraining

LOSS, BATCH = keras.losses.SparseCategoricalCrossentropy(from_logits=True), 8
RNG = np.random.RandomState(0)
IMAGES = RNG.uniform(-1, 1, (40, 12, 12, 3)).astype(np.float32)
LABELS = RNG.randint(0, 3, 40)


def compiled(optimizer='sgd', model=None, loss=LOSS, **more):
    model = conv_stack() if model is None else model
    model.compile(optimizer, loss, **dict(dict(metrics=['accuracy']), **more))
    return model


@pytest.fixture(scope='module')
def timings():
    return fixed_profile(conv_stack(), batch=(IMAGES[:BATCH], LABELS[:BATCH]))


@pytest.fixture
def elastic(timings):
    def made(rho=0.7, probe=(IMAGES, LABELS), timings=timings, **settings):
        return ElasticTraining(rho, probe=probe, timings=timings,
                               **dict(dict(closed_loop=False), **settings))
    return made


def fit(model, *callbacks, **more):
    return model.fit(**dict(dict(x=IMAGES, y=LABELS, batch_size=BATCH, shuffle=False, verbose=0,
                                 callbacks=list(callbacks)), **more))


class FullInFit(TrainingInFit):
    def scheme_of(self, maker, inputs, labels):
        return FixedScheme('full_training', maker)


def regular():
    inputs = keras.Input((12, 12, 3))
    x = keras.layers.Conv2D(4, 3, use_bias=False,
                            kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(x)))


@pytest.mark.parametrize('optimizer, more', [
    (lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5),
                                  momentum=0.9, nesterov=True), {}),
    (lambda: 'adam', dict(class_weight={0: 1.0, 1: 2.0, 2: 0.5})),
    (lambda: 'rmsprop', dict(sample_weight=RNG.uniform(0, 2, 40)))])
def test_a_full_step_in_fit_is_that_of_keras(optimizer, more):
    """Compares weights, statistics, loss, and metrics with and without weights, in each batch."""
    outcomes, batches = [], []
    for callbacks in ([], [FullInFit()]):
        batches.append([])
        callbacks.append(keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: batches[-1].append(dict(logs))))
        keras_stack.set_seed(0)
        model = compiled(optimizer(), regular(), metrics=[
            'accuracy', keras.metrics.SparseTopKCategoricalAccuracy(2, name='top2')],
            weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True)])
        history = fit(model, *callbacks, epochs=2, validation_data=(IMAGES, LABELS[:, None]),
                      **more).history
        outcomes.append((history, values(model.variables)))
    (usual, weights), (ours, same) = outcomes
    assert set(usual) == set(ours) and 'val_top2' in ours
    for name in usual:
        np.testing.assert_allclose(ours[name], usual[name], rtol=1e-4, err_msg=name)
    for usual, ours in itertools.zip_longest(*batches):
        assert ours == pytest.approx(usual, rel=1e-4)
    for one, other in zip(weights, same):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)


def test_fit_trains_as_the_script_does(tmp_path):
    """The same tensors, and on the same batches the same weights, in three epochs."""
    settings = Settings(num_epochs=3, interval=1, rho=0.6, learning_rate=0.05, weight_decay=0.0,
                        closed_loop=False)
    table, outcomes = fixed_profile(small_classifier(10), SMALL, 10, 16), []
    for in_fit in (False, True):
        dataset = load_dataset('digits_shifted', SMALL[0], 16, steps_per_epoch=3,
                               validation_steps=1)
        keras_stack.set_seed(0)
        model, chosen = small_classifier(10), {}
        still(model)
        if in_fit:
            callback = ElasticTraining(0.6, 1, dataset.probe, table, closed_loop=False)
            batches = [dataset.batches(dataset.order(epoch), dataset.view(epoch))
                       for epoch in (1, 2, 3)]
            fit(compiled(optimizer_for(dataset, settings, model.trainable_variables), model),
                callback, x=batches[0].concatenate(batches[1]).concatenate(batches[2]), y=None,
                batch_size=None, epochs=3, steps_per_epoch=3)
            chosen = callback.selections
        else:
            scheme = watched(train.ElasticScheme(train.step_maker(
                model, dataset, settings), dataset.probe, table, settings), chosen)
            train.train(scheme, dataset, settings, Session(Recorder(str(tmp_path))))
        outcomes.append((chosen, values(model.variables)))
    (masks, weights), (same_masks, same) = outcomes
    assert sorted(masks) == sorted(same_masks) == [1, 2, 3]
    assert all((masks[epoch].mask == same_masks[epoch].mask).all() for epoch in masks)
    assert not all(choice.mask.all() for choice in masks.values())
    for one, other in zip(weights, same):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- Keras' own callbacks

def test_other_callbacks_work_beside_it(elastic, tmp_path):
    rates, model = [], compiled(keras.optimizers.SGD(0.1))
    seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: rates.append(
        float(keras_stack.learning_rate(model.optimizer))))
    history = fit(
        model, keras.callbacks.TensorBoard(str(tmp_path / 'events'), update_freq='batch'),
        keras.callbacks.ModelCheckpoint(str(tmp_path / 'best.weights.h5'), save_best_only=True,
                                        save_weights_only=True),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)), seen,
        keras.callbacks.EarlyStopping(min_delta=10.0, patience=1), elastic(),
        epochs=5, validation_split=0.2).history
    assert len(history['val_loss']) == 2  # as no epoch gains 10
    assert rates == pytest.approx([0.1, 0.05])
    assert (tmp_path / 'best.weights.h5').exists() and os.listdir(str(tmp_path / 'events'))


def test_a_backup_resumes_where_fit_was_interrupted(elastic, tmp_path):
    """The resumed `fit` selects at once, in the epoch after the last one that was complete."""
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt
    backup = getattr(keras.callbacks, 'BackupAndRestore', None) or (
        keras.callbacks.experimental.BackupAndRestore)
    model, callback = compiled(), elastic(interval=4)
    with pytest.raises(KeyboardInterrupt):
        fit(model, callback, backup(str(tmp_path)), Stop(), epochs=4)
    assert sorted(callback.selections) == [1]
    history = fit(compiled(), callback, backup(str(tmp_path)), epochs=4)
    assert history.epoch == [2, 3] and sorted(callback.selections) == [3]


# ---------------------------------------------------------------- one fit after another

def test_fit_can_be_interrupted_and_called_again(elastic):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt
    model, callback = compiled(), elastic(0.5)
    usual = fit(model, epochs=1) and model.train_function
    with pytest.raises(KeyboardInterrupt):
        fit(model, callback, Stop())
    assert model.train_function is usual
    for _ in range(2):
        before = values(model.trainable_variables)
        fit(model, callback)
        changed = [not np.array_equal(*pair) for pair in zip(
            before, values(model.trainable_variables))]
        assert changed == list(callback.selections[1].mask) and not all(changed)
    before = values(model.trainable_variables)
    fit(model)  # an ordinary one, which trains all
    assert not any(np.array_equal(*pair) for pair in zip(before, values(model.trainable_variables)))


def test_a_smaller_last_batch_is_left_out(elastic):
    weights = []
    for count in (32, 37):  # the same four batches
        model = compiled()
        fit(model, elastic(), x=IMAGES[:count], y=LABELS[:count], epochs=2)
        weights.append(values(model.variables))
    assert all(np.array_equal(*pair) for pair in zip(*weights))


@pytest.mark.thorough
def test_steps_are_timed_once_for_the_same_network(elastic, tmp_path, capsys):
    """The table is stored; another `fit`, also in another process, takes it."""
    path, model = str(tmp_path / 'table.json'), compiled()
    before = values(model.variables)
    fit(model, FullInFit(), epochs=0)
    fit(model, elastic(0.8, timings=path), steps_per_epoch=1)
    assert 'steps were timed in' in capsys.readouterr().out
    changed = [not np.array_equal(*pair) for pair in zip(before, values(model.variables))]
    assert 0 < sum(changed) < len(changed)  # by one step, and not by the steps that were timed
    fit(compiled(), elastic(0.8, timings=path))
    printed = capsys.readouterr().out
    assert 'timing table' in printed and 'steps were timed in' not in printed


def test_selections_are_written_and_drawn(elastic, tmp_path):
    path, callback = str(tmp_path / 'selections.csv'), elastic(interval=2)
    with pytest.raises(UserError, match='call model.fit first'):
        callback.write_selections(path)
    fit(compiled(), callback, epochs=4)
    callback.write_selections(path)
    with open(path) as file:
        assert {row['epoch'] for row in csv.DictReader(file)} == {'1', '3', '4'}
    assert plot.main(['selection', path, '--output', str(tmp_path / 'drawn')]) is None
    with open(str(tmp_path / 'drawn.csv')) as file:
        drawn = [int(row['selected']) for row in csv.DictReader(file) if row['epoch'] == '2']
    assert drawn == list(callback.selections[1].mask)
    with pytest.raises(UserError, match='would overwrite'):
        plot.main(['selection', path, '--output', path[:-len('.csv')]])


# ---------------------------------------------------------------- what is refused

@pytest.mark.parametrize('settings, words', [
    (dict(rho=0), 'rho: 0 is not a number above 0, at most 1'),
    (dict(memory='0MB'), "memory: '0MB' is not a size"),
    (dict(interval=2.5), 'interval'), (dict(importance='gut'), "unknown importance 'gut'"),
    (dict(granularity='block'), "unknown granularity 'block'"),
    (dict(ro=0.5), "did you mean 'rho'"),
    (dict(probe=None), 'give probe=.inputs, labels.'),
    (dict(timings='/proc/none/table.json'), 'cannot write')])
def test_wrong_settings_are_refused_at_once(settings, words):
    with pytest.raises(UserError, match=words) as refusal:
        ElasticTraining(**dict(dict(probe=(IMAGES, LABELS)), **settings))
    assert '\n' not in str(refusal.value)


def own_step():
    class OwnStep(keras.Model):
        def train_step(self, data):
            return super().train_step(data)
    model = conv_stack()
    return OwnStep(model.input, model.output)


def two_outputs():
    model = conv_stack()
    return keras.Model(model.input, [model.output, model.output])


def distributed():
    with tf.distribute.OneDeviceStrategy('CPU:0').scope():
        return compiled()


def frozen():
    model = conv_stack()
    model.trainable = False
    return model


def one_tensor():
    return keras.Sequential([keras.Input((12, 12, 3)), keras.layers.Flatten(),
                             keras.layers.Dense(3, use_bias=False)])


REFUSED = {
    'train_step': (lambda: compiled(model=own_step()), {}, {}, 'overrides train_step'),
    'outputs': (lambda: compiled(model=two_outputs()), {}, {}, '2 outputs'),
    'loss': (lambda: compiled(loss='mse'), {}, {}, "with the loss '(mse|mean_squared_error)'"),
    'several steps': (lambda: compiled(steps_per_execution=2), {}, {}, 'steps_per_execution=2'),
    'eager': (lambda: compiled(run_eagerly=True), {}, {}, 'run_eagerly'),
    'norm': (lambda: compiled(keras.optimizers.SGD(0.1, global_clipnorm=1.0)), {}, {},
             'global_clipnorm'),
    'strategy': (distributed, {}, {}, 'OneDeviceStrategy'),
    'rho': (compiled, dict(rho=0.01), {}, r'smallest rho that trains a tensor is 0\.\d+'),
    'labels': (compiled, dict(probe=IMAGES), {}, 'the probe has no labels'),
    'empty': (compiled, dict(probe=tf.data.Dataset.from_tensor_slices(
        (IMAGES[:0], LABELS[:0])).batch(8)), {}, 'the probe is empty'),
    'shape': (compiled, dict(probe=(IMAGES[:, :9], LABELS)), {}, r'shapes.*9, 12, 3.*12, 12, 3'),
    'frozen': (lambda: compiled(model=frozen()), {}, {}, 'none of the 6 tensors'),
    'one tensor': (lambda: compiled(model=one_tensor()), {}, {}, '1 of the 1 tensors'),
    'other timings': (lambda: compiled(model=regular()), {}, {}, 'timings are of another model'),
    'batches': (compiled, {}, dict(x=tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(
        16).repeat(), y=None, batch_size=None, steps_per_epoch=5), 'batches of 8 and of 16'),
    'floats': (compiled, {}, dict(y=LABELS + 0.5), 'labels are float')}


@pytest.mark.parametrize('name', sorted(REFUSED))
def test_fit_is_refused_in_one_line_before_its_first_step(name, elastic):
    made, settings, more, words = REFUSED[name]
    model = made()
    before = values(model.variables)
    with pytest.raises(UserError, match=words) as refusal:
        fit(model, elastic(**settings), **more)
    assert '\n' not in str(refusal.value)
    unchanged = [np.array_equal(*pair) for pair in zip(before, values(model.variables))]
    assert name == 'batches' or all(unchanged)  # whose first two batches have equal sizes


def test_memory_that_not_even_the_output_layer_fits_into_is_refused(elastic, capsys):
    try:
        with pytest.raises(UserError, match='training the head alone needs .* not even a batch'):
            fit(compiled(), elastic(memory=str(host.resident_bytes() + 5 * 10 ** 7), timings=None))
    finally:
        host.limit_memory(None)
    assert 'steps were timed' not in capsys.readouterr().out


@pytest.mark.skipif(not keras_stack.KERAS_3, reason='Keras 2 has no jit_compile in `compile`')
def test_xla_is_refused(elastic):
    with pytest.raises(UserError, match='jit_compile=True'):
        fit(compiled(jit_compile=True), elastic())
