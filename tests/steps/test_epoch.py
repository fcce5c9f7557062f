"""Tests that an epoch adds up its steps: means over steps and images, times by kind of step."""

import numpy as np
import pytest
import tensorflow as tf

from elastic.steps.epoch import EpochProgress, plain_calls, run_epoch
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.training_step import Objective
from small_steps import N, batch, conv_stack

STEPS = 4


def length_of_head(model):
    """Is a penalty that grows and shrinks with the head's kernel."""
    return tf.norm(model.layers[-1].kernel)


def made_step():
    """Returns the full step of a small network with a penalty; the same weights at each call."""
    model = conv_stack()
    optimizer = make_optimizer('sgd', 0.1, 50, model.trainable_variables)
    maker = StepMaker(model, optimizer, 0.0, *batch(), Objective(length_of_head))
    return maker.step(np.ones(N, bool))


@pytest.fixture(scope='module')
def by_hand():
    """Returns the StepResults of STEPS steps, one after another."""
    step = made_step()
    return [step(*batch(seed=seed)) for seed in range(STEPS)]


@pytest.mark.parametrize('stop', [None, 1, 3])
def test_an_epoch_gives_the_means_of_its_steps(by_hand, stop):
    step, progress = made_step(), EpochProgress()
    batches = (batch(seed=seed) for seed in range(STEPS))
    calls = plain_calls(step, batches)
    if stop is not None:
        def pause():
            if progress.count == stop:
                raise InterruptedError
        with pytest.raises(InterruptedError):
            run_epoch(calls, STEPS, 'epoch', progress, pause)
        assert progress.count == stop
        progress = EpochProgress(dict(vars(progress)))
    result = run_epoch(calls, STEPS, 'epoch', progress)
    for name in ('loss', 'penalty'):
        values = [float(getattr(each, name)) for each in by_hand]
        assert len(set(values)) == STEPS and getattr(result, name) == pytest.approx(np.mean(values))
    correct = sum(int(each.correct) for each in by_hand)
    assert result.accuracy == pytest.approx(correct / (STEPS * 4))


def test_times_leave_out_the_first_call_but_count_it():
    step = made_step()
    result = run_epoch(plain_calls(step, (batch() for _ in range(STEPS))), STEPS, 'epoch')
    assert len(result.step_ms) == STEPS - 1 and result.counts == {'plain': STEPS}
    again = run_epoch(plain_calls(step, (batch() for _ in range(STEPS))), STEPS, 'epoch')
    assert len(again.step_ms) == STEPS and again.counts == {'plain': STEPS}
    assert again.first_call_seconds == 0
