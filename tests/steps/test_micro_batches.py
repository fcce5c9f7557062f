"""Tests that a batch computed in micro-batches trains, and is judged, as the whole batch is."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.errors import UserError
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.training_step import PLAIN, LossScale, Objective
from selection_solver_DP import select_tensors
from small_models import values
from small_steps import (
    HEAD_BIAS,
    KERNEL_2,
    N,
    batch,
    batches,
    conv_stack,
    mask_of,
    small_model,
)

SIZE = 12
WEIGHTS = np.array([0.5, 1.0, 3.0])


def made(model, micro_batch, optimizer='sgd', objective=PLAIN, clip_norm=None):
    trained_by = make_optimizer(optimizer, 0.05, 50, model.trainable_variables,
                                clip_norm=clip_norm)
    return StepMaker(model, trained_by, 1e-3, *batch(SIZE), objective, micro_batch=micro_batch)


@pytest.mark.parametrize('options', [
    {}, dict(optimizer='adam'), dict(clip_norm=1e-3), dict(objective=Objective(
        lambda model: tf.reduce_sum(tf.abs(model.layers[-1].kernel)), WEIGHTS))],
    ids=['sgd', 'adam', 'clipped', 'class weights and penalty'])
@pytest.mark.parametrize('mask', [mask_of(*range(N)), mask_of(KERNEL_2, HEAD_BIAS)],
                         ids=['all', 'two tensors'])
def test_steps_in_micro_batches_equal_steps_of_the_whole_batch(options, mask):
    outcomes = []
    for micro_batch in (None, 4):
        maker = made(conv_stack(), micro_batch, **options)
        start = values(maker.everything)
        step = maker.step(mask)
        results = [[float(result) for result in step(*batch(SIZE, seed))] for seed in range(3)]
        outcomes.append((results, values(maker.everything)))
        assert step.examples == SIZE
        assert maker.parts == SIZE // (micro_batch or SIZE)
    (whole, expected), (results, arrays) = outcomes
    np.testing.assert_allclose(results, whole, rtol=1e-5)
    for old, new, found in zip(start, expected, arrays):
        moved = np.abs(new.astype(float) - old).max()
        assert np.abs(found.astype(float) - new).max() <= 1e-3 * moved
        assert moved or found.tobytes() == old.tobytes()


def test_a_step_holds_the_gradients_of_its_own_tensors_alone():
    step = made(conv_stack(), 4).step(mask_of(KERNEL_2, HEAD_BIAS))
    assert list(step.nodes.values()).count('AssignAddVariableOp') == 2


def test_an_overflow_in_one_micro_batch_undoes_the_step():
    keras.mixed_precision.set_global_policy('mixed_float16')
    try:
        maker = made(conv_stack(), 4)
    finally:
        keras.mixed_precision.set_global_policy('float32')
    step, before = maker.step(mask_of(*range(N))), values(maker.variables)
    images, labels = batch(SIZE)
    step(tf.where(tf.range(SIZE)[:, None, None, None] == 5, 1e5, images), labels)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, values(maker.variables)))
    assert float(maker.loss_scale.scale) == LossScale.FIRST / 2
    step(images, labels)
    assert not any((a == b).all() for a, b in zip(before, values(maker.variables)))


def test_what_depends_on_the_whole_batch_is_refused():
    with pytest.raises(UserError, match='statistics'):
        StepMaker(small_model('train'), None, 0.0, *batches(1)[0], micro_batch=2)
    with pytest.raises(UserError, match='a multiple of 5'):
        made(conv_stack(), 5)


# ---------------------------------------------------------------- importance

def test_importance_by_batch_statistics_stays_whole_and_says_so(capsys):
    model, given = small_model('train'), batches(1)
    optimizer = make_optimizer('sgd', 0.05, 50, model.trainable_variables)
    maker = StepMaker(model, optimizer, 0.0, *given[0])
    found = [evaluate_importance(model, optimizer, given, evaluator=Evaluator(maker, 0, size))
             for size in (None, 2)]
    np.testing.assert_array_equal(*found)
    assert 'importance in whole batches: batch statistics' in capsys.readouterr().out


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_importance_in_micro_batches_selects_the_same_tensors(optimizer):
    model = conv_stack()
    maker = made(model, None, optimizer)
    whole, parts = Evaluator(maker), Evaluator(maker, micro_batch=3)
    for seed in range(20):
        rng = np.random.RandomState(seed)
        for variable in model.variables:
            variable.assign(rng.normal(0, 0.3, tuple(variable.shape)))
        before, found = values(maker.everything), []
        for evaluator in (whole, parts):
            evaluator.scale = 1.0
            found.append(evaluate_importance(model, maker.optimizer, [batch(SIZE, seed)],
                                             evaluator=evaluator))
            assert all(a.tobytes() == b.tobytes()
                       for a, b in zip(before, values(maker.everything)))
        assert np.abs(found[0] - found[1]).max() < 1e-5 * np.abs(found[0]).max()
        times = rng.uniform(0.1, 1, (2, N))
        for budget in (0.3, 0.6):
            masks = [select_tensors(*times, each, budget * times.sum()).mask for each in found]
            np.testing.assert_array_equal(*masks)
    assert whole.scale == parts.scale
