"""Tests that a resumed run ends with the weights, selections and records of a whole one."""

import csv
import glob
import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import main
import train
from cached_runs import (
    BATCH,
    DEEP,
    HEAD_ALONE,
    MIDDLE,
    SIZE,
    Forced,
    NearlyAlone,
    behind,
    bits,
    digits,
    in_a_file,
    network,
)
from elastic.cache import stores
from elastic.cache.prefix_cache import PrefixCache
from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.runs import checkpoint
from elastic.runs.checkpoint import Interrupted, Keeper
from elastic.runs.folder import DEVICE_COLUMNS, EPOCH_COLUMNS
from elastic.runs.recorder import Recorder
from elastic.runs.session import RECORDS, Session, here, interrupted_run
from elastic.settings import Settings
from fixed_tables import COPY_MS, fixed_profile

STEPS, EPOCHS = 7, 4  # STEPS is per epoch
TIMES = ('step_ms', 'step_seconds', 'selection_seconds', 'importance_seconds',
         'validation_seconds', 'train_seconds') + DEVICE_COLUMNS


class StopsAfterSteps(Keeper):
    """Stops a run after a number of steps in its process."""

    def __init__(self, folder, steps):
        super().__init__(folder, about={}, stop=lambda: self.left <= 0)
        self.left = steps

    def due(self):
        self.left -= 1
        return super().due()


class StopsBetweenEpochs(StopsAfterSteps):
    """Stops a run while it writes the checkpoint after an epoch."""

    def __init__(self, folder, epochs):
        super().__init__(folder, 10 ** 9)
        self.epochs = epochs

    def due(self):
        return False

    def pays(self):
        return True

    def keep(self, tree):
        self.epochs -= 1
        self.left = self.epochs and self.left
        return super().keep(tree)


def normalised():
    """Returns a network with moving statistics, and dropout where its state can be saved."""
    keras_stack.set_seed(0)
    x = inputs = keras.Input((SIZE, SIZE, 3))
    for filters in (8, 16):
        x = keras.layers.Conv2D(filters, 3, 2, 'same', use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    if keras_stack.KERAS_3:
        x = keras.layers.Dropout(0.3)(x)
    return keras.Model(inputs, keras.layers.Dense(10, name='head')(x))


def nearly_alone():
    """Returns a network in which an image depends on its batch, as by rounding on some devices."""
    return behind(NearlyAlone())


@pytest.fixture(scope='module')
def timings():
    return fixed_profile(network(), (SIZE, SIZE, 3), 10, BATCH)


class Setting:
    """Holds one way to train; makes what a process makes before it trains."""

    def __init__(self, name, folder, timings, model=network, cached=False, data=None, **settings):
        self.folder, self.timings = str(folder), timings
        self.model, self.cached, self.data = model, cached, data or {}
        self.settings = Settings(**dict(dict(
            num_epochs=EPOCHS, interval=2, rho=0.6, learning_rate=0.05, closed_loop=False,
            prune_interval=1, prune_penalty_ratio=0.5, train_type=name), **settings))

    def process(self, steps=10 ** 9, kind=StopsAfterSteps):
        """Trains as one process does, from the last checkpoint; returns (result, model).

        Returns None if the run stops, after `steps` as `kind` counts them.
        """
        keras.backend.clear_session()  # layers get the names of a new process
        dataset, model = digits(**self.data), self.model()
        resumed = checkpoint.read(self.folder, RECORDS)
        cache = None
        if self.cached:
            cache = PrefixCache(dataset, self.folder, exact=True)
            cache._measured = dict(COPY_MS)
        recorder = Recorder(self.folder, resumed=resumed and resumed['records'])
        session = Session(recorder, None, kind(self.folder, steps), resumed)
        maker = train.step_maker(model, dataset, self.settings, main.penalty_of(
            model, dataset, self.settings, resumed))
        scheme = main.scheme_of(maker, dataset, self.settings, self.timings, cache)
        try:
            result, model = train.train(scheme, dataset, self.settings, session, cache)
        except Interrupted:
            return None
        finally:
            recorder.writer.close()
            if cache is not None:
                cache.end()
        return result, model

    def points(self):
        """Returns the sorted (tag, epoch) of all points in TensorBoard."""
        return sorted((value.tag, event.step)
                      for path in glob.glob(os.path.join(self.folder, 'events.out.*'))
                      for event in tf.compat.v1.train.summary_iterator(path)
                      for value in event.summary.value)

    def records(self):
        """Returns the rows of both tables, without times."""
        found = []
        for name in ('epochs.csv', 'selections.csv', 'predictions.csv'):
            with open(os.path.join(self.folder, name)) as source:
                found.append([{column: value for column, value in row.items()
                               if column not in TIMES} for row in csv.DictReader(source)])
        return found


WHOLE = {}  # settings of a run -> result of whole()


def whole(tmp_path, name, timings, **more):
    """Returns (result, records, points, bits of the model) of a run that is not stopped."""
    known = repr((name, sorted(more.items()), stores.room))  # a test may set the room
    if known not in WHOLE:
        run = Setting(name, tmp_path / 'whole', timings, **more)
        result, model = run.process()
        WHOLE[known] = result, run.records(), run.points(), bits(model)
    return WHOLE[known]


def assert_resumes(tmp_path, stops, name, timings, kind=StopsAfterSteps, **more):
    """Asserts that a run whose processes stop after `stops` steps ends like a whole one."""
    result, records, points, end = whole(tmp_path, name, timings, **more)
    parts = Setting(name, tmp_path / 'parts', timings, **more)
    for steps in stops:
        assert parts.process(steps, kind) is None
    again, other = parts.process()
    assert parts.records() == records and parts.points() == points
    assert len(set(parts.points())) == len(parts.points()) > EPOCHS
    assert bits(other) == end
    for key in ('final_accuracy', 'final_loss', 'epochs', 'cache_hits', 'cache_misses',
                'channels_removed', 'kept_epoch', 'validation_loss'):
        assert again.get(key) == result.get(key), key
    return again


MIDDLE_OF_2, END_OF_2, TWICE = [10], [14], [3, 15]


@pytest.mark.parametrize('name, stops', [
    ('full_training', [1, 2, 12, 12]),  # stops up to the last step but one
    ('traditional_tl_training', END_OF_2)])
def test_a_fixed_scheme_resumes_after_any_step(tmp_path, timings, name, stops):
    assert_resumes(tmp_path, stops, name, timings)


@pytest.mark.parametrize('metric', ['lisa', 'betti', 'autofreeze', 'egeria'])
def test_what_a_metric_remembers_is_resumed(tmp_path, timings, metric):
    assert_resumes(tmp_path, [9], 'elastic_training', timings, importance=metric, interval=1)


def test_a_run_that_begins_with_the_head_resumes(tmp_path, timings):
    again = assert_resumes(tmp_path, [3, 9], 'elastic_training', timings, cached=True, rho=0.5,
                           head_epochs=1)
    assert again['cache_hits'] > 0
    selections, = [rows for rows in Setting('', tmp_path / 'whole', timings).records()
                   if 'selected' in rows[0]]
    trained = {epoch: sum(row['selected'] == '1' for row in selections if row['epoch'] == epoch)
               for epoch in ('1', '2', '3')}
    assert trained['1'] == 2 and trained['2'] > 2 and trained['3'] > 2


@pytest.mark.parametrize('name, more', [
    ('full_training', {}), ('elastic_training', {}),
    ('prune_training', dict(prune_threshold=0.15, model=normalised)),
    ('elastic_training', dict(cached=True, rho=0.5)),
    ('elastic_training', dict(cached=True, rho=0.5, model=nearly_alone))],
    ids=['full', 'elastic', 'prune', 'cached', 'cached beside the same images'])
def test_a_run_resumes_between_two_epochs(tmp_path, timings, name, more):
    assert_resumes(tmp_path, [2], name, timings, StopsBetweenEpochs, **more)


@pytest.mark.parametrize('name, stops, more', [
    ('full_training', [3, 15], dict(keep='best', learning_rate=0.5, model=normalised)),
    ('elastic_training', [9], dict(keep='best', patience=1)), ('prune_training', [9], {})],
    ids=['full', 'elastic', 'prune'])
def test_a_run_resumes_with_the_best_epoch(tmp_path, timings, name, stops, more):
    again = assert_resumes(tmp_path, stops, name, timings, data=dict(validation_share=0.2),
                           **dict(dict(prune_threshold=1e-9), **more))
    assert again['best_accuracy'] is None and again['kept_epoch'] <= again['epochs'] <= EPOCHS


@pytest.mark.parametrize('name', ['elastic_training', 'prune_training'])
def test_a_run_with_class_weights_resumes(tmp_path, timings, name):
    path = tmp_path / 'weights.csv'
    path.write_text(''.join('{},{}\n'.format(digit, 0.2 + digit) for digit in range(10)))
    more = dict(model=normalised, prune_threshold=0.15) if name == 'prune_training' else {}
    end = assert_resumes(tmp_path, [9], name, timings, data=dict(class_weight=str(path)), **more)
    plain = whole(tmp_path / 'plain', name, timings, **more)[0]
    assert end['final_loss'] != plain['final_loss']


def test_a_run_that_stops_in_its_final_test_resumes_there(tmp_path, timings, monkeypatch):
    keepers, test = [], train._Run.test

    class Stops(StopsAfterSteps):
        def __init__(self, folder, steps):
            super().__init__(folder, 10 ** 9)
            keepers.append(self)

    def stopped(run, dataset, pause):
        keepers[-1].left = 0 if len(keepers) == 1 else 1
        return test(run, dataset, pause)
    monkeypatch.setattr(train._Run, 'test', stopped)
    more = dict(keep='best', patience=1, learning_rate=0.0, data=dict(validation_share=0.2))
    run = Setting('full_training', tmp_path, timings, **more)
    assert run.process(kind=Stops) is None
    result, model = run.process(kind=Stops)
    assert (result['epochs'], result['kept_epoch']) == (2, 1) and len(run.records()[0]) == 2


@pytest.mark.parametrize('epochs', [1, EPOCHS])
def test_a_run_that_stops_while_it_is_tested_resumes(tmp_path, timings, monkeypatch, epochs):
    monkeypatch.setattr(StopsAfterSteps, 'due', lambda keeper: setattr(
        keeper, 'left', keeper.left - 1))  # no checkpoint is due within an epoch
    assert_resumes(tmp_path, [STEPS * epochs], 'full_training', timings)


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_statistics_dropout_slots_and_augmentation_resume(tmp_path, timings, optimizer):
    assert_resumes(tmp_path, TWICE, 'full_training', timings, model=normalised,
                   optimizer=optimizer, data=dict(augmentation='flip+rotate'), warmup_steps=5)


@pytest.mark.parametrize('metric, interval, optimizer, stops', [
    ('gradient_update', 1, 'sgd', TWICE), ('gradient_update', 2, 'adam', MIDDLE_OF_2),
    ('gradient_update', 0, 'sgd', END_OF_2), ('random', 1, 'sgd', MIDDLE_OF_2)])
def test_elastic_training_resumes(tmp_path, timings, metric, interval, optimizer, stops):
    assert_resumes(tmp_path, stops, 'elastic_training', timings, importance=metric,
                   interval=interval, optimizer=optimizer, probe_batches=2)


def test_the_closed_loop_resumes_with_its_corrected_table(tmp_path, timings):
    """Real times decide here, so no two runs are the same, but the corrections must survive."""
    run = Setting('elastic_training', tmp_path, timings, interval=1, closed_loop=True)
    assert run.process(STEPS + 3) is None
    before = checkpoint.read(run.folder, RECORDS)['run']['scheme']
    assert run.process(1) is None
    after = checkpoint.read(run.folder, RECORDS)['run']['scheme']
    assert before['loop'][0].t_step != timings.t_step
    for one, other in zip(before['loop'], after['loop']):
        assert one.t_step == other.t_step
        np.testing.assert_array_equal(one.group_ms, other.group_ms)
    assert after['drawn'] == before['drawn'] and after['budget'] == before['budget']


@pytest.mark.parametrize('place, stops', [('memory', [3, 11, 5]), ('file', MIDDLE_OF_2)])
def test_a_resumed_run_fills_its_prefix_cache_again(tmp_path, timings, monkeypatch, place, stops):
    if place == 'file':
        in_a_file(monkeypatch)
    again = assert_resumes(tmp_path, stops, 'elastic_training', timings, cached=True, rho=0.5)
    assert again['cache_hits'] > 0


def test_head_only_training_resumes_with_the_cache_and_held_views(tmp_path, timings):
    again = assert_resumes(tmp_path, [10, 10], 'traditional_tl_training', timings, cached=True,
                           data=dict(views='held', interval=2, augmentation='flip+rotate'))
    assert again['cache_hits'] > 0


def test_pruning_resumes_with_the_smaller_network(tmp_path, timings):
    again = assert_resumes(tmp_path, [3, 11, 5], 'prune_training', timings, model=normalised,
                           prune_threshold=0.15)
    assert again['channels_removed'] > 0


@pytest.mark.skipif(not keras_stack.KERAS_3, reason='Keras 2 cannot save the state of dropout')
def test_a_network_is_pruned_as_often_after_it_resumed(tmp_path, timings):
    """Each pruning draws seeds of dropout. So a run that resumes after some must draw as many."""
    pruned = dict(model=normalised, prune_threshold=0.08)
    again = assert_resumes(tmp_path, [2 * STEPS + 3], 'prune_training', timings, **pruned)
    parts = Setting('prune_training', tmp_path / 'again', timings, **pruned)
    assert parts.process(2 * STEPS + 3) is None
    stopped = checkpoint.read(parts.folder, RECORDS)['run']['scheme']
    assert stopped['prunings'] == 2
    assert 0 < stopped['summary']['channels_removed'] < again['channels_removed']


def test_a_run_resumes_in_each_epoch_of_another_cache(tmp_path):
    """Each epoch trains fewer layers than the one before, and needs another cache."""
    masks = {1: DEEP, 2: MIDDLE, 3: HEAD_ALONE}
    settings = Settings(num_epochs=4, learning_rate=0.05)
    ends = []
    for place, stops in (('whole', []), ('parts', [9, 8, 1])):
        folder = str(tmp_path / place)
        for steps in stops + [10 ** 9]:
            keras.backend.clear_session()
            dataset, model = digits(), network()
            resumed = checkpoint.read(folder, RECORDS)
            cache = PrefixCache(dataset, folder, exact=True)
            cache._measured = dict(COPY_MS)
            recorder = Recorder(folder, resumed=resumed and resumed['records'])
            scheme = Forced(train.step_maker(model, dataset, settings), masks)
            session = Session(recorder, None, StopsAfterSteps(folder, steps), resumed)
            try:
                result, model = train.train(scheme, dataset, settings, session, cache)
            except Interrupted:
                cache.end()
        ends.append(bits(model) + [result['cache_hits'], result['cache_misses']])
    assert ends[0] == ends[1]


def test_training_time_counts_each_step_once(tmp_path, timings):
    parts = Setting('full_training', tmp_path, timings)
    for _ in range(2):
        assert parts.process(5) is None
    result, _ = parts.process()
    steps = np.sum([float(row['step_seconds']) for row in csv.DictReader(
        open(os.path.join(parts.folder, 'epochs.csv')))])
    assert result['step_seconds'] == pytest.approx(steps)
    assert result['resume_seconds'] > 0 and result['checkpoint_seconds'] > 0


def test_another_device_is_reported_and_other_settings_are_refused(tmp_path, capsys):
    args = main.check_arguments(main.parse_arguments([
        '--dataset_name', 'digits', '--logs_dir', str(tmp_path), '--run_name', 'run']))
    settings = main.decisive_settings(main.run_settings(args))
    folder = str(tmp_path / 'run')
    os.mkdir(folder)
    about = dict(here(), settings=settings)
    for changed, words in ((dict(host='pi4b'), 'interrupted on pi4b, resumes on'),
                           (dict(stack='TensorFlow 2.6'), 'interrupted on TensorFlow 2.6')):
        checkpoint.write(folder, dict(about=dict(about, **changed)))
        assert interrupted_run(folder, settings) is not None
        assert words in capsys.readouterr().out
    older = {flag: value for flag, value in settings.items() if flag != 'clip_norm'}
    checkpoint.write(folder, dict(about=dict(about, settings=older)))
    assert interrupted_run(folder, settings) is not None  # the run is older than the flag
    checkpoint.write(folder, dict(about=dict(about, settings=dict(settings, seed=9))))
    with pytest.raises(UserError, match='has other settings .seed 9 there, 0 now.*--restart'):
        interrupted_run(folder, settings)
    assert interrupted_run(folder, settings, restart=True) is None


def test_records_later_than_the_checkpoint_are_removed(tmp_path):
    row = dict.fromkeys(EPOCH_COLUMNS, 1.0)
    recorder = Recorder(str(tmp_path))
    recorder.epoch(dict(row, epoch=1))
    state = recorder.state()
    recorder.epoch(dict(row, epoch=2))
    recorder.selection(1, ['head/kernel'], [(3,)], [True])
    recorder.writer.close()
    (tmp_path / 'events.out.tfevents.later').write_bytes(b'of a later process')
    again = Recorder(str(tmp_path), resumed=state)
    again.epoch(dict(row, epoch=2))
    again.writer.close()
    with open(str(tmp_path / 'epochs.csv')) as source:
        assert [line['epoch'] for line in csv.DictReader(source)] == ['1', '2']
    assert not (tmp_path / 'selections.csv').exists()
    steps = [event.step for path in glob.glob(str(tmp_path / 'events.out.*'))
             for event in tf.compat.v1.train.summary_iterator(path)
             for value in event.summary.value if value.tag == 'train/accuracy']
    assert sorted(steps) == [1, 2]
    (tmp_path / 'epochs.csv').write_text('')
    with pytest.raises(UserError, match='epochs.csv is shorter than .*--restart'):
        Recorder(str(tmp_path), resumed=state)
