"""Tests that a resumed run ends with the weights, selections and records of a whole one."""

import glob
import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import datasets
import main
import train
from cached_runs import BATCH, SIZE, AfterSteps, NearlyAlone, behind, bits, digits, network
from elastic.cache.prefix_cache import NoCache, PrefixCache
from elastic.compat import keras_stack
from elastic.data.replay import FOLDER as REPLAY
from elastic.data.replay import keep_images
from elastic.errors import UserError
from elastic.files import write_json
from elastic.runs import checkpoint
from elastic.runs.checkpoint import Interrupted
from elastic.runs.folder import DEVICE_COLUMNS, EPOCH_COLUMNS, is_finished
from elastic.runs.recorder import Recorder, open_run
from elastic.runs.session import RECORDS, Session, here, interrupted_run
from elastic.settings import Settings
from fixed_tables import COPY_MS, fixed_profile
from made_runs import read_csv
from small_runs import run_settings_of

STEPS, EPOCHS = 7, 4  # STEPS is per epoch
TIMES = ('step_ms', 'step_seconds', 'selection_seconds', 'importance_seconds',
         'validation_seconds', 'train_seconds') + DEVICE_COLUMNS


class InValidation(AfterSteps):
    """Stops a run after a number of steps, the last of an epoch, while that epoch is judged."""

    def due(self):
        return super().due() and False


class BetweenEpochs(AfterSteps):
    """Stops a run after a number of epochs in its process."""

    def due(self):
        return False

    def pays(self):
        self.left -= 1
        return super().pays()


class InFinalTest(BetweenEpochs):
    """Stops a run after a number of epochs, the last ones, while the kept weights are tested."""

    def pays(self):
        return super().pays() and False


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
    """Holds one way to train; makes what a process makes before it trains.

    cache: None, or 'memory' or 'file': where the prefix cache is.
    """

    def __init__(self, name, folder, timings, model=network, cache=None, data=None, **settings):
        self.folder, self.timings = str(folder), timings
        self.model, self.cache, self.data = model, cache, data or {}
        self.settings = Settings(**dict(dict(
            num_epochs=EPOCHS, interval=2, rho=0.6, learning_rate=0.05, closed_loop=False,
            prune_interval=1, prune_penalty_ratio=0.5, train_type=name), **settings))

    def process(self, kind=AfterSteps, left=10 ** 9):
        """Trains as one process does, from the last checkpoint; returns (result, model).

        Returns None if the run stops, where kind(folder, left) says.
        """
        keras.backend.clear_session()  # layers get the names of a new process
        dataset, model = digits(**self.data), self.model()
        resumed = checkpoint.read(self.folder, RECORDS)
        cache = NoCache(dataset)
        if self.cache:
            cache = PrefixCache(dataset, self.folder, exact=True,
                                memory_bytes=0 if self.cache == 'file' else None,
                                measured=dict(COPY_MS))
        recorder = Recorder(self.folder, resumed=resumed and resumed['records'])
        session = Session(recorder, None, kind(self.folder, left), resumed)
        maker = train.step_maker(model, dataset, self.settings, resumed=resumed)
        scheme = main.scheme_of(maker, dataset, self.settings, self.timings, cache)
        try:
            return train.train(scheme, dataset, self.settings, session, cache)
        except Interrupted:
            return None
        finally:
            recorder.writer.close()
            cache.end()

    def kept(self):
        """Returns the state of the scheme in the last checkpoint."""
        return checkpoint.read(self.folder, RECORDS)['run']['scheme']

    def points(self):
        """Returns the sorted (tag, epoch) of all points in TensorBoard."""
        return sorted((value.tag, event.step)
                      for path in glob.glob(os.path.join(self.folder, 'events.out.*'))
                      for event in tf.compat.v1.train.summary_iterator(path)
                      for value in event.summary.value)

    def table(self, name):
        return read_csv(os.path.join(self.folder, name))

    def records(self):
        """Returns the rows of all tables, without times."""
        return [[{column: value for column, value in row.items() if column not in TIMES}
                 for row in self.table(name)]
                for name in ('epochs.csv', 'selections.csv', 'predictions.csv')]


def assert_resumes(tmp_path, stops, name, timings, **more):
    """Asserts that a run ends like a whole one if its processes stop at `stops`.

    stops: (kind, left) of Setting.process. Returns (the run's Setting, its result).
    """
    whole = Setting(name, tmp_path / 'whole', timings, **more)
    result, model = whole.process()
    end = bits(model)
    parts = Setting(name, tmp_path / 'parts', timings, **more)
    for kind, left in stops:
        assert parts.process(kind, left) is None
    again, model = parts.process()
    assert parts.records() == whole.records() and parts.points() == whole.points()
    assert len(set(parts.points())) == len(parts.points()) > EPOCHS
    assert bits(model) == end
    for key in ('final_accuracy', 'final_loss', 'epochs', 'cache_hits', 'cache_misses',
                'channels_removed', 'kept_epoch', 'validation_loss'):
        assert again.get(key) == result.get(key), key
    assert again['resume_seconds'] > 0 and again['checkpoint_seconds'] > 0
    assert again['step_seconds'] == pytest.approx(sum(  # each step counts once
        float(row['step_seconds']) for row in parts.table('epochs.csv')))
    return parts, again


def test_slots_statistics_dropout_and_augmentation_resume_wherever_a_run_stops(tmp_path, timings):
    assert_resumes(tmp_path, [(AfterSteps, 3), (InValidation, 2 * STEPS - 3), (BetweenEpochs, 2)],
                   'full_training', timings, model=normalised, optimizer='adam', warmup_steps=5,
                   learning_rate=0.01, data=dict(augmentation='flip+rotate'))


def test_elastic_training_resumes_and_fills_its_cache_again(tmp_path, timings):
    """The cache is in a file; each image in it depends on the batch that it was computed in."""
    _, again = assert_resumes(
        tmp_path, [(AfterSteps, STEPS + 3)], 'elastic_training', timings, rho=0.5,
        probe_batches=2, model=nearly_alone, cache='file')
    assert again['cache_hits'] > 0


@pytest.mark.thorough
def test_a_run_that_begins_with_the_head_resumes_on_held_images(tmp_path, timings):
    parts, again = assert_resumes(
        tmp_path, [(AfterSteps, 3), (AfterSteps, 9)], 'elastic_training', timings, cache='memory',
        rho=0.5, head_epochs=1, data=dict(views='held', interval=2, augmentation='flip+rotate'))
    assert again['cache_hits'] > 0
    trained = {epoch: sum(row['selected'] == '1' for row in parts.table('selections.csv')
                          if row['epoch'] == epoch) for epoch in ('1', '2', '3')}
    assert trained['1'] == 2 and trained['2'] > 2 and trained['3'] > 2


@pytest.mark.parametrize('name, more', [
    ('full_training', dict(model=normalised, optimizer='adam', learning_rate=0.01)),
    pytest.param('elastic_training', dict(cache='memory', rho=0.5), marks=pytest.mark.thorough)])
def test_a_run_with_kept_images_resumes_after_every_step(name, more, tmp_path, timings):
    """Of its eight steps, one is made by each process; the few kept images come back in each."""
    keep_images(str(tmp_path), datasets.find_images('digits_shifted', SIZE, BATCH, train_images=20),
                10)
    assert_resumes(tmp_path, [(AfterSteps, 1)] * (2 * EPOCHS - 1), name, timings, data=dict(
        replay_from=str(tmp_path / REPLAY), steps_per_epoch=2, views='held', interval=2,
        augmentation='flip+rotate'), **more)


@pytest.mark.thorough
def test_a_pruned_network_resumes_with_class_weights(tmp_path, timings):
    """Each pruning draws seeds of dropout. So a run that resumes after two must draw as many."""
    path = tmp_path / 'weights.csv'
    path.write_text(''.join('{},{}\n'.format(digit, 0.5 + digit / 9) for digit in range(10)))
    parts, again = assert_resumes(
        tmp_path, [(AfterSteps, 2 * STEPS + 3)], 'prune_training', timings, model=normalised,
        prune_threshold=0.09 if keras_stack.KERAS_3 else 0.25,  # prunes before epochs 2 to 4
        data=dict(class_weight=str(path)))
    assert again['channels_removed'] > 0
    assert {row['epoch'] for row in parts.table('selections.csv')} == set('1234')


@pytest.mark.thorough
def test_a_run_resumes_with_its_best_epoch_and_in_its_final_test(tmp_path, timings):
    _, again = assert_resumes(
        tmp_path, [(AfterSteps, 15), (InFinalTest, 2)], 'full_training', timings, keep='best',
        learning_rate=0.5, model=normalised, data=dict(validation_share=0.2))
    assert again['best_accuracy'] is None and again['kept_epoch'] < again['epochs']


@pytest.mark.parametrize('metric', ['autofreeze', 'random'])  # one remembers, one draws
def test_a_metric_and_the_closed_loop_resume(tmp_path, timings, metric):
    """Real times decide here, so no two runs are the same, but what they know must survive."""
    run = Setting('elastic_training', tmp_path, timings, interval=1, closed_loop=True,
                  importance=metric)
    assert run.process(AfterSteps, STEPS + 3) is None
    before = run.kept()
    assert run.process(AfterSteps, 1) is None
    after = run.kept()
    assert before['loop'][0].t_step != timings.t_step
    for one, other in zip(before['loop'], after['loop']):
        assert one.t_step == other.t_step
        np.testing.assert_array_equal(one.group_ms, other.group_ms)
    for name in ('drawn', 'memory', 'random'):
        np.testing.assert_equal(after[name], before[name])


def test_another_device_is_reported_and_other_settings_are_refused(tmp_path, capsys):
    settings = main.decisive_settings(run_settings_of(['--dataset_name', 'digits']))
    folder = str(tmp_path)
    for changed, words in ((dict(host='pi4b'), 'interrupted on pi4b, resumes on'),
                           (dict(stack='TensorFlow 2.6'), 'interrupted on TensorFlow 2.6')):
        checkpoint.write(folder, dict(about=dict(here(), **changed)))
        assert interrupted_run(folder) is not None
        assert words in capsys.readouterr().out
    assert interrupted_run(folder, restart=True) is None
    older = {flag: value for flag, value in settings.items() if flag != 'clip_norm'}
    write_json(os.path.join(folder, 'settings.json'), older)
    assert not is_finished(folder, settings)  # the run is older than the flag
    write_json(os.path.join(folder, 'settings.json'), dict(settings, seed=9))
    with pytest.raises(UserError, match='with other settings .seed 9 there, 0 now.*--restart'):
        open_run(folder, settings, interrupted_run(folder))
    (tmp_path / 'summary.json').write_text('{"finished": tr')
    with pytest.raises(UserError, match='summary.json: .*; repair it, or start .* with --restart'):
        is_finished(folder, dict(settings, seed=9))
    assert not is_finished(folder, settings, restart=True)


def test_a_damaged_checkpoint_does_not_replace_the_whole_one_before(tmp_path):
    folder, place = str(tmp_path), tmp_path / checkpoint.FOLDER
    write_json(os.path.join(folder, 'settings.json'), {})
    for number in (1, 2):
        checkpoint.write(folder, dict(number=number))
    (place / 'last').write_bytes(b'damaged')
    resumed = checkpoint.read(folder)
    open_run(folder, {}, resumed).close()
    checkpoint.write(folder, dict(number=3))
    assert checkpoint.read(folder)['number'] == 3
    (place / 'last').unlink()
    assert checkpoint.read(folder)['number'] == 1
    with pytest.raises(UserError, match='another process has trained it in the meantime'):
        open_run(folder, {}, resumed)  # it would cut the records short of the new checkpoints


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
    assert [line['epoch'] for line in read_csv(tmp_path / 'epochs.csv')] == ['1', '2']
    assert not (tmp_path / 'selections.csv').exists()
    steps = [event.step for path in glob.glob(str(tmp_path / 'events.out.*'))
             for event in tf.compat.v1.train.summary_iterator(path)
             for value in event.summary.value if value.tag == 'train/accuracy']
    assert sorted(steps) == [1, 2]
    (tmp_path / 'epochs.csv').write_text('')
    with pytest.raises(UserError, match='epochs.csv is shorter than .*--restart'):
        Recorder(str(tmp_path), resumed=state)
