import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.selection.importance import Evaluator, Trial, evaluate_importance
from elastic.selection.metrics import METRICS
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.training_step import TrainingStep
from small_models import assert_same_values, values
from small_steps import batches, small_model, state_of


def trained(bn_statistics='train', optimizer='sgd'):
    """Returns (model, optimizer) after real steps: slots and iteration count are not zero."""
    model = small_model(bn_statistics)
    optimizer = make_optimizer(optimizer, 0.05, 100, model.trainable_variables)
    step = TrainingStep(model, optimizer, np.ones(len(model.trainable_variables)), 5e-4)
    for images, labels in batches(3, seed=1):
        step(images, labels)
    return model, optimizer


def evaluator_of(model, optimizer, weight_decay=0.0):
    return Evaluator(StepMaker(model, optimizer, weight_decay, *batches(1)[0]))


@pytest.mark.parametrize('name', ['sgd', 'adam'])
def test_evaluation_by_any_metric_leaves_no_trace(name):
    model, optimizer = trained(optimizer=name)
    before = values(state_of(model, optimizer))
    evaluator = evaluator_of(model, optimizer)
    for metric in METRICS:
        importance = evaluate_importance(model, optimizer, batches(2), metric, evaluator)
        assert importance.shape == (len(model.trainable_variables),), metric
        assert np.abs(importance).sum() > 0, metric
        assert_same_values(before, values(state_of(model, optimizer)))


def test_evaluation_restores_even_after_a_failure():
    model, optimizer = trained()
    before = values(state_of(model, optimizer))
    with pytest.raises((TypeError, ValueError, AttributeError)):
        evaluate_importance(model, optimizer, batches(1) + [(tf.zeros((4, 8, 8, 3)), None)])
    assert_same_values(before, values(state_of(model, optimizer)))


def test_gradient_update_is_the_first_order_drop_of_the_trial():
    """Computes it without the evaluator: one tape at w, plain SGD, one tape at w + dw."""
    model = small_model('frozen')
    variables = model.trainable_variables
    optimizer = make_optimizer('sgd', 0.05, 100, variables)
    images, labels = batches(1)[0]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def gradients():
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=False))
        return [g.numpy() for g in tape.gradient(value, [keras_stack.raw(v) for v in variables])]

    evaluator = Evaluator(StepMaker(model, optimizer, 0.5, images, labels))  # decay has no effect
    importance = evaluate_importance(model, optimizer, [(images, labels)], evaluator=evaluator)
    first = gradients()
    start = [keras_stack.raw(v).numpy() for v in variables]
    for variable, value, gradient in zip(variables, start, first):
        variable.assign(value - 0.05 * gradient)  # in the first step, momentum is zero
    expected = [0.05 * (g1 * g2).sum() for g1, g2 in zip(first, gradients())]
    np.testing.assert_allclose(importance, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize('name', ['sgd', 'adam'])
def test_the_trial_is_the_optimizers_own_update_without_weight_decay(name):
    """The training step itself decays the weights; the trial must not."""
    model, optimizer = trained('frozen', name)
    evaluator = evaluator_of(model, optimizer, 0.5)
    before = values(state_of(model, optimizer))
    _, gradients = evaluator.gradients(*batches(1)[0])
    with evaluator.updated(list(gradients)) as old:
        updates = [v.read_value() - start for v, start in zip(evaluator.variables, old)]
    assert_same_values(before, values(state_of(model, optimizer)))
    weights = [keras_stack.raw(v).numpy() for v in model.trainable_variables]
    for momentum in keras_stack.momenta(optimizer, model.trainable_variables):
        momentum.assign(tf.zeros_like(momentum))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    for old, variable, update in zip(weights, model.trainable_variables, updates):
        np.testing.assert_allclose(update.numpy(), keras_stack.raw(variable).numpy() - old,
                                   rtol=1e-3, atol=1e-8)


def test_momentum_does_not_enter_the_trial():
    """Otherwise tensors trained recently would be on another scale than those left out."""
    model, optimizer = trained('frozen')
    importance = evaluate_importance(model, optimizer, batches(1))
    for slot in keras_stack.momenta(optimizer, model.trainable_variables):
        assert np.abs(slot.numpy()).sum() > 0
        slot.assign(3 * slot)
    np.testing.assert_array_equal(importance, evaluate_importance(model, optimizer, batches(1)))


def test_a_trial_holds_one_copy_of_the_weights_alone():
    """A small device has room for weights, optimizer state and this one copy, but no more."""
    model, optimizer = trained()
    evaluator = evaluator_of(model, optimizer)
    slots = [slot.numpy() for slot in keras_stack.momenta(optimizer, model.trainable_variables)]
    gradients = evaluator.gradients(*batches(1)[0])[1]
    alive = [weakref.ref(gradient) for gradient in gradients]
    with evaluator.updated(gradients):
        assert not any(gradient() is not None for gradient in alive)
        for slot, old in zip(keras_stack.momenta(optimizer, model.trainable_variables), slots):
            np.testing.assert_array_equal(slot.numpy(), old)


def test_importance_is_averaged_over_the_probe_batches_from_one_start():
    model, optimizer = trained()
    both = batches(2)
    single = [evaluate_importance(model, optimizer, [batch]) for batch in both]
    np.testing.assert_allclose(evaluate_importance(model, optimizer, both),
                               np.mean(single, axis=0), rtol=1e-6)
    assert not np.allclose(single[0], single[1])


@pytest.mark.parametrize('predicted, real, holds', [
    (0.10, 0.06, True), (0.10, 0.04, False), (0.10, -0.1, False), (-0.10, -0.1, False),
    (-0.10, 0.10, False), (1e-8, -1e-8, True)])
def test_a_trial_holds_where_the_loss_drops_as_predicted(predicted, real, holds):
    """If prediction and loss both rise they agree, yet the importances describe a useless step."""
    assert Trial(1.0, predicted, real).holds is holds


def test_all_probe_batches_are_judged_at_the_scale_that_suits_the_last():
    model = small_model('frozen')
    optimizer = make_optimizer('sgd', 2.0, 100, model.trainable_variables)
    (easy, labels), (hard, _) = batches(2)
    probes, trials = [(0.01 * easy, labels), (30 * hard, labels)], []
    evaluator = Evaluator(StepMaker(model, optimizer, 0.0, *probes[0]))
    assert evaluator.trial(*probes[0])[1].scale > evaluator.trial(*probes[1])[1].scale
    evaluator.scale = 1.0
    importance = evaluate_importance(model, optimizer, probes, evaluator=evaluator, trials=trials)
    scale, = {trial.scale for trial in trials}
    np.testing.assert_allclose(importance, np.mean(
        [evaluator.trial(*batch, scale)[0] for batch in probes], axis=0), rtol=1e-5)


def test_metrics_of_weights_and_gradients():
    model, optimizer = trained()
    evaluator, batch = evaluator_of(model, optimizer), batches(1)[0]
    pairs = [(weight, gradient.numpy()) for weight, gradient in zip(
        values(model.trainable_variables), evaluator.gradients(*batch)[1])]
    for metric, by_hand in (('weight_magnitude', lambda w, g: np.abs(w)),
                            ('grad_magnitude', lambda w, g: np.abs(g)),
                            ('fisher', lambda w, g: np.float64(g * w) ** 2)):
        found = evaluate_importance(model, optimizer, [batch], metric, evaluator)
        assert found == pytest.approx([by_hand(*pair).sum() for pair in pairs], rel=1e-4)
        assert found[0] > 0
    assert evaluate_importance(model, optimizer, [], 'weight_magnitude').shape == found.shape


def test_unknown_metric_and_no_batch_are_refused():
    model, optimizer = trained()
    with pytest.raises(ValueError, match='unknown importance'):
        evaluate_importance(model, optimizer, batches(1), 'guess')
    with pytest.raises(ValueError, match='at least one'):
        evaluate_importance(model, optimizer, [])


def test_random_is_drawn_anew_and_repeats_with_the_seed():
    model, optimizer = trained()
    maker = StepMaker(model, optimizer, 0.0, *batches(1)[0])
    drawn = [[evaluate_importance(model, optimizer, batches(1), 'random', evaluator)
              for _ in range(2)] for evaluator in (Evaluator(maker, 1), Evaluator(maker, 1))]
    assert (drawn[0][0] != drawn[0][1]).all()
    np.testing.assert_array_equal(drawn[0], drawn[1])
