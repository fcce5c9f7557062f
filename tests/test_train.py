"""Tests the training loop, and elastic training in it."""

import time

import numpy as np
import pytest

import train
from datasets import load_dataset
from elastic.compat import keras_stack
from elastic.networks.backbone import Backbone
from elastic.runs.clock import Clock
from elastic.runs.folder import EPOCH_COLUMNS, read_run
from elastic.runs.recorder import Recorder
from elastic.runs.session import Session
from elastic.schemes.fixed import FixedScheme, fixed_mask
from elastic.selection.importance import Evaluator
from elastic.settings import VARIED, Settings
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import optimizer_for
from fixed_tables import fixed_profile
from models import build_model
from small_models import SMALL, small_classifier, values

SIZE, BATCH, STEPS = SMALL[0], 16, 6
LARGER = (32, 32, 3)  # for a test of times: here the loop is short compared with a step


@pytest.fixture(scope='module')
def dataset():
    """Returns real digits, a few steps per epoch."""
    return load_dataset('digits_shifted', SIZE, BATCH, steps_per_epoch=STEPS, validation_steps=2)


def new_model(bn_statistics='train'):
    return small_classifier(10, bn_statistics)


@pytest.fixture(scope='module')
def timings():
    return fixed_profile(new_model(), SMALL, 10, BATCH)


def run(folder, dataset, name, settings, timings=None, model=None, spy=None):
    """Runs the real loop."""
    recorder, model = Recorder(str(folder)), model or new_model()
    session = Session(recorder)
    with session.preparing():  # as main.run does
        maker = train.step_maker(model, dataset, settings)
        scheme = FixedScheme(name, maker) if timings is None else train.ElasticScheme(
            maker, dataset.probe, timings, settings)
    if spy:
        scheme.select = spy(scheme.select)
    result, _ = train.train(scheme, dataset, settings, session)
    recorder.finish(dict(result, scheme=name, rho=settings.rho, model_name='m', dataset_name='d',
                         seed=0, stack='s', host='h', **dict.fromkeys(VARIED)))


# ---------------------------------------------------------------- schemes

def test_fixed_schemes_mask_the_head_and_the_normalization():
    model = new_model()
    names = [keras_stack.variable_name(v) for v in model.trainable_variables]
    assert fixed_mask('full_training', model).all()
    head = fixed_mask('traditional_tl_training', model)
    assert [names[i] for i in np.flatnonzero(head)] == ['head/kernel', 'head/bias']
    small = fixed_mask('bn_plus_bias_training', model)
    assert {n.split('/')[-1] for n, m in zip(names, small) if m and 'head' not in n} == {
        'gamma', 'beta', 'bias'}
    assert all(m or n.endswith('kernel') for n, m in zip(names, small))


def test_head_only_training_changes_the_head_alone(tmp_path, dataset):
    model = new_model('frozen')
    before = values(model.trainable_variables)
    run(tmp_path / 'r', dataset, 'traditional_tl_training', Settings(num_epochs=1),
        model=model)
    same = list(map(np.array_equal, before, values(model.trainable_variables)))
    assert same[:-2] == [True] * (len(same) - 2) and not any(same[-2:])


@pytest.mark.parametrize('mode', ['frozen', 'train'])
def test_frozen_statistics_keep_their_bits_over_an_epoch(tmp_path, dataset, mode):
    model = new_model(mode)
    before = values(model.non_trainable_weights)
    run(tmp_path, dataset, 'full_training', Settings(num_epochs=1), model=model)
    same = list(map(np.array_equal, before, values(model.non_trainable_weights)))
    assert all(same) if mode == 'frozen' else not any(same)
    assert isinstance(model.get_layer('backbone'), Backbone)


# ---------------------------------------------------------------- the loop

@pytest.fixture(scope='module')
def elastic(tmp_path_factory, dataset, timings):
    """Returns the records of a run."""
    folder = tmp_path_factory.mktemp('logs') / 'elastic'
    settings = Settings(num_epochs=3, interval=1, rho=0.6, learning_rate=0.02, probe_batches=2,
                        closed_loop=False)
    run(folder, dataset, 'elastic_training', settings, timings)
    return read_run(str(folder))


def test_records_agree_with_the_summary(elastic):
    summary, epochs = elastic.summary, elastic.epochs
    assert summary['finished'] and summary['epochs'] == 3
    total = {name: sum(epochs[name + '_seconds'])
             for name in ('step', 'selection', 'importance', 'validation')}
    for name, seconds in total.items():
        assert seconds == pytest.approx(summary[name + '_seconds'])
    assert summary['train_seconds'] == pytest.approx(
        summary['step_seconds'] + summary['selection_seconds'])
    assert epochs['train_seconds'][-1] == pytest.approx(summary['train_seconds'])
    assert 0 < total['importance'] < total['selection'] and total['validation'] > 0
    assert summary['final_accuracy'] == epochs['test_accuracy'][-1]
    assert summary['best_accuracy'] == max(epochs['test_accuracy'])
    assert set(EPOCH_COLUMNS) == set(epochs)


def test_the_learning_rate_follows_a_cosine_to_zero(elastic):
    rates = elastic.epochs['learning_rate']
    expected = [0.02 * 0.5 * (1 + np.cos(np.pi * epoch / 3)) for epoch in (1, 2, 3)]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


def test_each_selection_uses_new_probe_batches_within_the_budget(elastic, timings):
    by_epoch = {}
    for row in elastic.selections:
        by_epoch.setdefault(row.epoch, []).append(row)
    assert sorted(by_epoch) == [1, 2, 3]
    masks = [np.array([row.selected for row in rows]) for _, rows in sorted(by_epoch.items())]
    for mask in masks:
        assert mask.any() and timings.step_time(mask) <= 0.6 * timings.t_step * (1 + 1e-9)
    importances = [[row.importance for row in rows] for _, rows in sorted(by_epoch.items())]
    assert importances[0] != importances[1] != importances[2]
    shares = [row.time_share for row in by_epoch[1]]
    assert sum(shares) == pytest.approx(1) and min(shares) >= 0


def test_a_bucket_pauses_while_another_one_within_it_counts():
    clock, begin = Clock(), time.perf_counter()
    with pytest.raises(InterruptedError), clock('step'):
        with clock('checkpoint'):
            time.sleep(0.05)
        assert clock.seconds['step'] > 0 and clock.seconds['checkpoint'] >= 0.05
        with clock('checkpoint'):
            raise InterruptedError
    counted, passed = sum(clock.seconds.values()), time.perf_counter() - begin
    assert counted <= passed
    with clock('validation'):
        pass
    assert clock.seconds['step'] + clock.seconds['checkpoint'] == counted


@pytest.mark.parametrize('count, interval, again', [
    (1, 9, False), (10 ** 6, 9, True), (10 ** 6, 0, False)], ids=['few', 'many', 'never'])
def test_tensors_are_selected_again_if_drift_costs_more_than_selecting(
        tmp_path, dataset, timings, count, interval, again):
    """In epoch 3, `count` steps took twice the predicted time, and selection took a second."""
    choices = []

    def watching(select):
        def watched(epoch, last):
            slower = 2 if epoch == 3 else 1
            select.__self__._choosing_seconds, loop = 1.0, select.__self__._loop
            loop.measure = lambda *_: (loop.reference.t_fp, loop.reference.t_bp)  # no drift
            loop.waited = lambda ms: None
            if last is not None:
                ms = [slower * choices[-1].predicted_ms] * count
                last = last._replace(ms=dict.fromkeys(last.ms, ms))
            choice = select(epoch, last)
            choices.append(choice or choices[-1])
            return choice
        return watched

    run(tmp_path / 'r', dataset, 'elastic_training',
        Settings(num_epochs=3, interval=interval, rho=0.6), timings, spy=watching)
    assert choices[1] is choices[0] and (choices[2] is not choices[0]) == again
    np.testing.assert_array_equal(choices[2].importance, choices[0].importance)
    assert not (again and choices[2].trials)
    for choice in choices:
        table = choice.timings
        assert table.step_time(choice.mask) <= 0.6 * table.t_step * (1 + 1e-9)
    assert not again or choices[2].timings.t_step == pytest.approx(2 * choices[0].timings.t_step)


@pytest.mark.timing
def test_buckets_add_up_to_the_wall_time_of_the_loop(tmp_path):
    """The first call takes longer than all ten steps, so an error in its bucket would show."""
    steps, settings = 10, Settings(num_epochs=1)
    model = build_model('mobilenetv2', LARGER, 10, 'none', alpha=0.35)
    dataset = load_dataset('digits_shifted', LARGER[0], BATCH, steps_per_epoch=steps,
                           validation_steps=2)
    recorder = Recorder(str(tmp_path))
    begin = time.perf_counter()
    clock = Clock()
    with clock('selection'):
        scheme = FixedScheme('full_training', train.step_maker(model, dataset, settings))
    result, _ = train.train(scheme, dataset, settings, Session(recorder, clock))
    wall = time.perf_counter() - begin
    assert result['train_seconds'] + result['validation_seconds'] == pytest.approx(wall, rel=0.06)
    assert result['step_seconds'] == pytest.approx(steps * result['step_ms'] / 1e3, rel=0.25)


def test_training_and_importance_both_clip_their_updates(dataset):
    settings, model = Settings(num_epochs=1, learning_rate=1.0, clip_norm=1e-3), new_model()
    optimizer = optimizer_for(dataset, settings, model.trainable_variables)
    batch = next(iter(dataset.train))
    maker = StepMaker(model, optimizer, 0.0, *batch)
    evaluator = Evaluator(maker)
    with evaluator.updated(list(evaluator.gradients(*batch)[1])) as before:
        tried = [np.linalg.norm(new - old) for old, new in zip(before, values(evaluator.variables))]
    start = values(model.trainable_variables)
    maker.step(np.ones(len(start), bool))(*batch)
    moved = [np.linalg.norm(new - old)
             for old, new in zip(start, values(model.trainable_variables))]
    for norms in (tried, moved):
        assert 0.9e-3 < max(norms) < 1.1e-3
