"""Runs that are cut off and go on: the same weights, selections and records as if they were not."""

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
    bits,
    digits,
    in_a_file,
    network,
)
from elastic.cache import stores
from elastic.cache.prefix_cache import PrefixCache
from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.runs import checkpoint, resume
from elastic.runs.checkpoint import Interrupted, Keeper
from elastic.runs.folder import DEVICE_COLUMNS, EPOCH_COLUMNS
from elastic.runs.recorder import Recorder
from elastic.runs.session import Session
from elastic.settings import Settings
from profiler import profile_model

STEPS, EPOCHS = 7, 4  # seven steps an epoch
TIMES = ('step_ms', 'step_seconds', 'selection_seconds', 'importance_seconds',
         'validation_seconds', 'train_seconds') + DEVICE_COLUMNS


class StopsBehind(Keeper):
    """Says stop behind so many steps, counted from where the process began."""

    def __init__(self, folder, steps):
        super().__init__(folder, about={}, stop=lambda: self.left <= 0)
        self.left = steps

    def due(self):
        self.left -= 1
        return super().due()


class StopsBetween(StopsBehind):
    """Says stop while the checkpoint behind an epoch is written: there is no step in progress."""

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
    """With all that has a state: moving statistics, dropout where its state can be kept."""
    keras_stack.set_seed(0)
    x = inputs = keras.Input((SIZE, SIZE, 3))
    for filters in (8, 16):
        x = keras.layers.Conv2D(filters, 3, 2, 'same', use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    if keras_stack.KERAS_3:
        x = keras.layers.Dropout(0.3)(x)
    return keras.Model(inputs, keras.layers.Dense(10, name='head')(x))


@pytest.fixture(scope='module')
def timings():
    return profile_model(network(), (SIZE, SIZE, 3), 10, BATCH, num_steps=2, seconds=0)


@pytest.fixture(scope='module')
def rates():
    """What copying rows takes, measured once: two runs choose alike only by the same prices. A
    file's are the memory's: beside other programs' writing a cache in one might not pay.
    """
    of_memory = [stores.measured_rates(size, BATCH, None) for size in (1 << 12, 1 << 18)]
    return {place: of_memory for place in ('memory', 'disk')}


class Setting:
    """One way to train: everything that a process makes anew before it trains."""

    def __init__(self, name, folder, timings, rates=None, model=network, cached=False, data=None,
                 **settings):
        self.folder, self.timings, self.rates = str(folder), timings, rates
        self.model, self.cached, self.data = model, cached, data or {}
        self.settings = Settings(**dict(dict(
            num_epochs=EPOCHS, interval=2, rho=0.6, learning_rate=0.05, closed_loop=False,
            prune_interval=1, prune_penalty_ratio=0.5, train_type=name), **settings))

    def process(self, behind=10 ** 9, kind=StopsBehind):
        """As one process does: from the checkpoint that is there to the end, or to a stop behind so
        many steps, as `kind` counts them. (result, trained model), or None.
        """
        keras.backend.clear_session()  # names of layers begin anew
        dataset, model = digits(**self.data), self.model()
        resumed = checkpoint.read(self.folder, resume.RECORDS)
        cache = None
        if self.cached:
            cache = PrefixCache(dataset, self.folder, exact=True)
            cache._measured = dict(self.rates)
        recorder = Recorder(self.folder, resumed=resumed and resumed['records'])
        session = Session(recorder, None, kind(self.folder, behind), resumed)
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
        """(tag, epoch) of all that TensorBoard shows, sorted: a double would stand twice."""
        return sorted((value.tag, event.step)
                      for path in glob.glob(os.path.join(self.folder, 'events.out.*'))
                      for event in tf.compat.v1.train.summary_iterator(path)
                      for value in event.summary.value)

    def records(self):
        """Rows of both tables, without times."""
        found = []
        for name in ('epochs.csv', 'selections.csv'):
            with open(os.path.join(self.folder, name)) as source:
                found.append([{column: value for column, value in row.items()
                               if column not in TIMES} for row in csv.DictReader(source)])
        return found


UNCUT = {}  # by all that decides it, how a run ends that is not cut: the same for any cuts


def uncut(tmp_path, name, *arguments, **more):
    """(result, records, points, bits of the model)."""
    known = repr((name, sorted(more.items()), stores.room))  # a test may set the room
    if known not in UNCUT:
        whole = Setting(name, tmp_path / 'whole', *arguments, **more)
        result, model = whole.process()
        UNCUT[known] = result, whole.records(), whole.points(), bits(model)
    return UNCUT[known]


def assert_cut_is_whole(tmp_path, cuts, *arguments, kind=StopsBehind, **more):
    """A run that is cut behind so many steps each time ends as one that is not."""
    result, records, points, end = uncut(tmp_path, *arguments, **more)
    parts = Setting(arguments[0], tmp_path / 'parts', *arguments[1:], **more)
    for steps in cuts:
        assert parts.process(steps, kind) is None
    again, other = parts.process()
    assert parts.records() == records and parts.points() == points
    assert len(set(parts.points())) == len(parts.points()) > EPOCHS
    assert bits(other) == end
    for key in ('final_accuracy', 'final_loss', 'epochs', 'cache_hits', 'cache_misses',
                'channels_removed'):
        assert again.get(key) == result.get(key), key
    return again


MIDDLE_OF_2, END_OF_2, TWICE = [10], [14], [3, 15]


@pytest.mark.parametrize('name, cuts', [
    ('full_training', [1]), ('full_training', TWICE), ('traditional_tl_training', END_OF_2),
    ('full_training', [STEPS * EPOCHS - 1])])
def test_fixed_schemes(tmp_path, timings, name, cuts):
    assert_cut_is_whole(tmp_path, cuts, name, timings)


@pytest.mark.parametrize('name, more', [
    ('full_training', {}), ('elastic_training', {}), ('prune_training', dict(prune_threshold=0.15)),
    ('elastic_training', dict(cached=True, rho=0.5))])
def test_cut_between_two_epochs(tmp_path, timings, rates, name, more):
    assert_cut_is_whole(tmp_path, [1, 2], name, timings, rates, kind=StopsBetween,
                        model=normalised if name == 'prune_training' else network, **more)


@pytest.mark.parametrize('epochs', [1, EPOCHS])
def test_a_run_that_is_told_to_stop_while_it_is_tested(tmp_path, timings, monkeypatch, epochs):
    monkeypatch.setattr(StopsBehind, 'due', lambda keeper: setattr(
        keeper, 'left', keeper.left - 1))  # none is due in mid-epoch
    assert_cut_is_whole(tmp_path, [STEPS * epochs], 'full_training', timings)


@pytest.mark.parametrize('name, optimizer', [
    ('full_training', 'sgd'), ('bn_plus_bias_training', 'sgd'), ('full_training', 'adam')])
def test_statistics_dropout_slots_and_views(tmp_path, timings, name, optimizer):
    assert_cut_is_whole(tmp_path, TWICE, name, timings, model=normalised, optimizer=optimizer,
                        data=dict(augmentation='flip+rotate'), warmup_steps=5)


@pytest.mark.parametrize('metric, interval, optimizer, cuts', [
    ('gradient_update', 1, 'sgd', TWICE), ('gradient_update', 2, 'adam', MIDDLE_OF_2),
    ('gradient_update', 2, 'sgd', END_OF_2), ('gradient_update', 0, 'sgd', END_OF_2),
    ('random', 1, 'sgd', MIDDLE_OF_2)])
def test_elastic_training(tmp_path, timings, metric, interval, optimizer, cuts):
    assert_cut_is_whole(tmp_path, cuts, 'elastic_training', timings, importance=metric,
                        interval=interval, optimizer=optimizer, probe_batches=2)


def test_the_closed_loop_goes_on_with_the_table_as_it_was(tmp_path, timings):
    """Times decide there: two runs cannot be the same, but what was learned is not lost."""
    run = Setting('elastic_training', tmp_path, timings, interval=1, closed_loop=True)
    assert run.process(STEPS + 3) is None
    before = checkpoint.read(run.folder, resume.RECORDS)['run']['scheme']
    assert run.process(1) is None
    after = checkpoint.read(run.folder, resume.RECORDS)['run']['scheme']
    assert before['loop'][0].t_step != timings.t_step
    for one, other in zip(before['loop'], after['loop']):
        assert one.t_step == other.t_step
        np.testing.assert_array_equal(one.group_ms, other.group_ms)
    assert after['drawn'] == before['drawn'] and after['budget'] == before['budget']


@pytest.mark.parametrize('place, cuts', [
    ('memory', [3]), ('memory', END_OF_2), ('memory', [16, 3]), ('file', MIDDLE_OF_2)])
def test_the_prefix_cache_is_filled_again(tmp_path, timings, rates, monkeypatch, place, cuts):
    if place == 'file':
        in_a_file(monkeypatch)
    again = assert_cut_is_whole(tmp_path, cuts, 'elastic_training', timings, rates, cached=True,
                                rho=0.5)
    assert again['cache_hits'] > 0


def test_the_head_alone_with_the_cache_and_held_views(tmp_path, timings, rates):
    again = assert_cut_is_whole(tmp_path, [10, 10], 'traditional_tl_training', timings, rates,
                                cached=True,
                                data=dict(views='held', interval=2, augmentation='flip+rotate'))
    assert again['cache_hits'] > 0


@pytest.mark.parametrize('cuts', [[3], END_OF_2, [16, 3]])
def test_pruning_goes_on_with_the_smaller_network(tmp_path, timings, cuts):
    again = assert_cut_is_whole(tmp_path, cuts, 'prune_training', timings, model=normalised,
                                prune_threshold=0.15)
    assert again['channels_removed'] > 0


def test_a_cut_between_selections_of_forced_depth(tmp_path, rates):
    """Less deep each time, which needs another cache, and cut in each of these epochs."""
    masks = {1: DEEP, 2: MIDDLE, 3: HEAD_ALONE}
    settings = Settings(num_epochs=4, learning_rate=0.05)
    ends = []
    for place, cuts in (('whole', []), ('parts', [9, 8, 1])):
        folder = str(tmp_path / place)
        for steps in cuts + [10 ** 9]:
            keras.backend.clear_session()
            dataset, model = digits(), network()
            resumed = checkpoint.read(folder, resume.RECORDS)
            cache = PrefixCache(dataset, folder, exact=True)
            cache._measured = dict(rates)
            recorder = Recorder(folder, resumed=resumed and resumed['records'])
            scheme = Forced(train.step_maker(model, dataset, settings), masks)
            session = Session(recorder, None, StopsBehind(folder, steps), resumed)
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
    assert result['lost_seconds'] < 1  # each stop was behind a checkpoint


def test_another_device_or_software_is_told_and_other_settings_are_refused(tmp_path, capsys):
    args = main.check_arguments(main.parse_arguments([
        '--dataset_name', 'digits', '--logs_dir', str(tmp_path), '--run_name', 'run']))
    settings = main.decisive_settings(main.run_settings(args))
    folder = str(tmp_path / 'run')
    os.mkdir(folder)
    about = resume.about_this(settings)
    for changed, words in ((dict(host='pi4b'), 'interrupted on pi4b, resumes on'),
                           (dict(stack='TensorFlow 2.6'), 'interrupted on TensorFlow 2.6')):
        checkpoint.write(folder, dict(written=0.0, about=dict(about, **changed)))
        assert resume.interrupted_run(folder, settings) is not None
        assert words in capsys.readouterr().out
    older = {flag: value for flag, value in settings.items() if flag != 'clip_norm'}
    checkpoint.write(folder, dict(written=0.0, about=dict(about, settings=older)))
    assert resume.interrupted_run(folder, settings) is not None  # of before there was the flag
    checkpoint.write(folder, dict(written=0.0, about=dict(about, settings=dict(settings, seed=9))))
    with pytest.raises(UserError, match='has other settings .seed 9 there, 0 now.*--restart'):
        resume.interrupted_run(folder, settings)
    assert resume.interrupted_run(folder, settings, restart=True) is None


def test_what_was_recorded_behind_a_checkpoint_is_taken_back(tmp_path):
    row = dict.fromkeys(EPOCH_COLUMNS, 1.0)
    recorder = Recorder(str(tmp_path))
    recorder.epoch(dict(row, epoch=1))
    state = recorder.state()
    recorder.epoch(dict(row, epoch=2))
    recorder.selection(3, ['head/kernel'], [(3,)], [True])
    recorder.writer.close()
    (tmp_path / 'events.out.tfevents.later').write_bytes(b'of a process that came later')
    again = Recorder(str(tmp_path), resumed=state)
    again.epoch(dict(row, epoch=2))
    again.writer.close()
    with open(str(tmp_path / 'epochs.csv')) as source:
        assert [line['epoch'] for line in csv.DictReader(source)] == ['1', '2']
    assert not (tmp_path / 'selections.csv').exists()
    steps = [event.step for path in sorted(glob.glob(str(tmp_path / 'events.out.*')))
             for event in tf.compat.v1.train.summary_iterator(path)
             for value in event.summary.value if value.tag == 'train/accuracy']
    assert steps == [1, 2]
    (tmp_path / 'epochs.csv').write_text('')
    with pytest.raises(UserError, match='epochs.csv is shorter than .*--restart'):
        Recorder(str(tmp_path), resumed=state)
