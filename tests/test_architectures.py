"""Trains, profiles and selects tensors of networks of every kind; plain Keras is the reference."""

import numpy as np
import pytest
import tensorflow as tf
from _zoo import ZOO
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.selection.items import smallest_rho
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from profiler import profile_model
from selection_solver_DP import choose_tensors
from small_models import assert_same_values, values
from small_steps import random_masks, still
from timing_tables import chain_time

DEEP = 'MobileNetV2'
# A network for each mechanism: a layer used twice, float16, batch statistics, a weight outside any
# layer, penalties, probabilities, a loop, several inputs, padded graphs, nodes as the batch, a
# function in the graph, attention with an embedding, depth.
NAMES = [name for name in ('shared', 'mixed_float16', 'batch_norm', 'subclassed', 'regularised',
                           'sequential', 'lstm', 'graph_network', 'graph_attention',
                           'node_classification', 'grouped', 'transformer', DEEP)
         if name in ZOO]
SLOW = ('graph_attention', 'node_classification', 'grouped', 'transformer', DEEP)
BY_ADAM = ('shared', 'mixed_float16')
LOSS_SCALE = 2.0 ** 15  # Keras' initial value


class Case:
    """Holds a member of the zoo, its steps, and the initial values of all its variables."""

    def __init__(self, name, decay=0.0):
        self.name = name
        self.model, *self.batch = ZOO[name].build()
        still(self.model)
        self.num_tensors = len(self.model.trainable_variables)
        self.gradients = plain_gradients(self)
        # With batch statistics of four images, rounding errors grow with depth.
        self.train_by('sgd', 1e-5 if name == DEEP else 1e-2, decay)

    def train_by(self, optimizer, rate, decay=0.0):
        """Makes the steps for an optimizer."""
        self.rate = rate
        self.optimizer = make_optimizer(optimizer, rate, 10 ** 6, self.model.trainable_variables)
        self.maker = StepMaker(self.model, self.optimizer, decay, *self.batch)
        self.of_model = len(self.model.variables)
        self.written = list(self.model.variables) + keras_stack.optimizer_variables(self.optimizer)
        self.start = self.values()

    def values(self):
        return [keras_stack.raw(v).numpy() for v in self.written]

    def back_to_start(self):
        keras_stack.assign_arrays(self.written, self.start)

    def full_step(self):
        return self.maker.step(np.ones(self.num_tensors))

    def plain_step(self, *batch):
        """Trains all tensors as a Keras user would; returns (loss, penalty, gradients)."""
        results = self.gradients(*batch)
        self.optimizer.apply_gradients(zip(results[2], self.model.trainable_variables))
        return results


def plain_gradients(case):
    """Returns a tf.function (inputs, labels) -> (loss, penalty, gradients) in plain TensorFlow."""
    model, variables = case.model, case.model.trainable_variables
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=case.name != 'sequential')
    scale = LOSS_SCALE if case.name == 'mixed_float16' else 1.0

    @tf.function
    def gradients(inputs, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
            penalty = tf.add_n(model.losses) if model.losses else tf.constant(0.0)
            objective = scale * (loss + penalty)
        return loss, penalty, [tf.convert_to_tensor(g) / scale for g in tape.gradient(
            objective, [keras_stack.raw(v) for v in variables])]
    return gradients


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.thorough) if name in SLOW else name for name in NAMES])
def test_a_network_of_every_kind_trains(name):
    case = Case(name)
    check_masks(case)
    if name == DEEP:
        return
    check_full_step(case)
    check_importance(case)
    if name in BY_ADAM:
        case.back_to_start()
        case.train_by('adam', 1e-3)
        check_full_step(case, 1e-4 if name == 'mixed_float16' else 1e-6)  # float16 rounds gradients


def check_full_step(case, slack=0.0):
    """Compares weights, slots, statistics, loss and penalty after two steps with plain Keras."""
    outcomes = []
    for step in (case.plain_step, case.full_step()):
        case.back_to_start()
        results = [step(*case.batch) for _ in range(2)]
        outcomes.append((case.values(), [float(r[0]) for r in results], results))
    (expected, losses, plain), (found, own_losses, own) = outcomes
    np.testing.assert_allclose(own_losses, losses, rtol=1e-3)
    np.testing.assert_allclose([float(r.penalty) for r in own], [float(r[1]) for r in plain],
                               rtol=1e-3, atol=1e-7)
    for i, (theirs, ours) in enumerate(zip(expected, found)):
        assert_moved_alike(case, i, theirs, ours, slack)


def moved(case, i, new):
    """Returns how far variable i moved, in all and beyond what rounding explains.

    Gradients that should be zero (of a bias before BN) are up to 1e-4 from rounding.
    """
    old = case.start[i].astype(float)
    far = np.abs(new - old).max()
    ulp = 3e-7 * np.abs(old).max() + 3e-7 * (i < case.of_model)  # slots start at 0
    return far, far - ulp - 1e-3 * case.rate


def assert_moved_alike(case, i, expected, found, slack=0.0):
    """Asserts that variable i ends where expected, within 2 % of its move and `slack`.

    The deep network rounds more and may miss by a quarter of the move.
    """
    far, sure = moved(case, i, expected)
    error = np.abs(found.astype(float) - expected).max()
    share = 0.25 if case.name == DEEP else 0.02
    assert error <= share * far + (far - sure) + slack, (case.written[i].name, error, far)


def check_masks(case):
    """Checks that a mask moves its tensors as the full step does, and no others."""
    variables = case.model.trainable_variables
    slots = keras_stack.slots(case.optimizer, variables)
    place = {id(keras_stack.raw(v)): i for i, v in enumerate(case.written)}
    of_tensor = [[place[id(keras_stack.raw(v))] for v in [variable] + of_one]
                 for variable, of_one in zip(variables, slots)]
    assert all(len(of_one) == 2 for of_one in of_tensor)  # the weight and its momentum
    case.back_to_start()
    case.full_step()(*case.batch)
    full, left_out = case.values(), 0
    for mask in random_masks(3, case.num_tensors):
        case.back_to_start()
        case.maker.step(mask)(*case.batch)
        found = case.values()
        for chosen, own in zip(mask, of_tensor):
            for i in own:
                if not chosen:
                    assert found[i].tobytes() == case.start[i].tobytes()
                    left_out += 1
                else:
                    assert_moved_alike(case, i, full[i], found[i])
                    if moved(case, i, full[i])[1] > 0:
                        assert found[i].tobytes() != case.start[i].tobytes()
    assert left_out or case.num_tensors < 2


def check_importance(case):
    """Checks that importance predicts the drop of the loss, and changes nothing."""
    case.back_to_start()
    objective, gradients = plain_objective(case)
    # Small enough to be of first order, large enough to show in float32 (float16).
    drop = 0.02 if case.name == 'mixed_float16' else 1e-3
    full_drop = case.rate * sum(float(tf.reduce_sum(tf.square(g))) for g in gradients)
    evaluator, trials = Evaluator(case.maker), []
    evaluator.scale = drop / full_drop
    importance = evaluator.scale * evaluate_importance(
        case.model, case.optimizer, [case.batch], evaluator=evaluator, trials=trials)
    assert_same_values(case.start, case.values())
    assert trials[0].scale == drop / full_drop
    tolerance = 0.2 if case.name == 'mixed_float16' else 0.05
    assert importance.sum() == pytest.approx(drop, rel=10 * tolerance)
    for variable, gradient in zip(map(keras_stack.raw, case.model.trainable_variables), gradients):
        variable.assign_sub(tf.cast(trials[0].scale * case.rate * gradient, variable.dtype))
    real_drop = objective - plain_objective(case)[0]
    assert importance.sum() == pytest.approx(real_drop, rel=tolerance)


def plain_objective(case):
    """Returns the loss with penalties, and the gradients; keeps the moving statistics."""
    with keras_stack.restored_afterwards(case.model.non_trainable_variables):
        loss, penalty, gradients = case.gradients(*case.batch)
    return float(loss) + float(penalty), gradients


@pytest.mark.parametrize('name', ['shared'] + [
    pytest.param(name, marks=pytest.mark.thorough)
    for name in ('lstm', 'mixed_float16', 'graph_network', 'grouped', 'transformer')
    if name in ZOO])
def test_a_profile_covers_the_step_and_a_selection_by_it_keeps_the_budget(name):
    model, *batch = ZOO[name].build()
    n = len(model.trainable_variables)
    before = values(model.variables)
    table = profile_model(model, batch=tuple(batch), num_steps=3, seconds=0.05)
    assert_same_values(before, values(model.variables))
    assert table.profile.coverage >= 0.95, table.profile.left_out
    assert [tuple(shape) for shape in table.shapes] == [
        tuple(v.shape) for v in model.trainable_variables]
    assert table.group_ms.sum() == pytest.approx(table.t_bp, rel=1e-6)
    assert table.step_time(np.ones(n, dtype=bool)) == pytest.approx(table.t_step, rel=1e-6)
    # A tensor in no group would cost nothing to train, but each gradient takes time.
    assert table.group_tensors.any(axis=0).all()
    for mask in random_masks(5, n):
        assert table.backward_time(mask) <= min(chain_time(table, mask), table.t_bp) + 1e-9
    rho = (1 + smallest_rho(table)) / 2
    mask = choose_tensors(table, np.random.RandomState(0).rand(n), rho)[0]
    assert mask.any() and table.step_time(mask) <= rho * table.t_step * (1 + 1e-9)


def test_a_layer_that_is_not_trainable_never_moves():
    case = Case('frozen_layer', decay=0.1)
    frozen = case.model.non_trainable_variables
    before = [v.numpy() for v in frozen]
    case.full_step()(*case.batch)
    assert frozen and all(a.tobytes() == v.numpy().tobytes() for a, v in zip(before, frozen))


class OwnLoss(keras.Model):
    def compute_loss(self, *arguments, **named):
        return 0.0


@pytest.mark.skipif(not keras_stack.KERAS_3, reason='Keras before 2.9 has no compute_loss')
def test_a_model_with_its_own_loss_is_refused():
    inputs = keras.Input((4,))
    model = OwnLoss(inputs, keras.layers.Dense(3)(inputs))
    with pytest.raises(UserError, match='compute_loss') as error:
        StepMaker(model, None, 0.0, tf.ones((6, 4)), tf.zeros(6, tf.int32))
    assert '\n' not in str(error.value)
