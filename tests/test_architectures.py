"""Any classifier trains, is priced and is selected: the same checks for every member of the zoo."""

import gc
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.steps.masked_step import StepMaker
from elastic.steps.training_step import make_optimizer
from profiler import profile_model
from selection_solver_DP import choose_tensors, smallest_rho
from small_steps import random_masks, still
from zoo import APPLICATIONS, ZOO

# To price a network of convolutions is the same for all: one stands for them.
PROFILED = [name for name in ZOO if name not in APPLICATIONS] + ['MobileNet']
SLOW_TO_TRACE = ('NASNetMobile', 'InceptionResNetV2', 'DenseNet121', 'InceptionV3')
# Rounding grows from layer to layer behind batch statistics of four images, and at the second step
# is all there is: of those networks one step is compared, at so small a rate that none goes far.
RATE = {name: 1e-5 if name in APPLICATIONS else 1e-2 for name in ZOO}
# How many biases: in front of batch statistics, which take the mean away, and of attention's keys.
NO_GRADIENT = {'attention': 1, 'transformer': 1, 'home_made_vit': 2, 'batch_norm': 2}
LOSS_SCALE = 2.0 ** 15  # Keras' own at the start


class Case(NamedTuple):
    """A member of the zoo and its steps.

    written: every variable that anything could change, the first `of_model` ones the model's.
    """
    name: str
    model: Any
    batch: Any  # (inputs, labels)
    optimizer: Any
    maker: Any
    written: Any
    start: Any
    rate: float
    of_model: int

    def values(self):
        return [keras_stack.raw(v).numpy() for v in self.written]

    def back_to_start(self):
        for variable, value in zip(self.written, self.start):
            keras_stack.raw(variable).assign(value)

    @property
    def num_tensors(self):
        return len(self.model.trainable_variables)


def case_of(name, optimizer='sgd', rate=None, decay=0.0, quiet=True):
    model, inputs, labels = ZOO[name].build()
    if quiet:
        still(model)
    rate = rate or RATE[name]
    trained_by = make_optimizer(optimizer, rate, 10 ** 6, model.trainable_variables)
    maker = StepMaker(model, trained_by, decay, inputs, labels)
    of_model = list(model.variables)
    written = of_model + keras_stack.optimizer_variables(trained_by)
    case = Case(name, model, (inputs, labels), trained_by, maker, written, None, rate,
                len(of_model))
    return case._replace(start=case.values())


@pytest.fixture(scope='module', params=list(ZOO))
def case(request):
    # TensorFlow keeps graphs of the networks before: a collection need not look at them again.
    gc.collect()
    getattr(gc, 'freeze', gc.collect)()
    return case_of(request.param)


def plain_step(case, update=True):
    """The step as a Keras user would write it: (inputs, labels) -> (loss, penalty, gradients)."""
    model, variables = case.model, case.model.trainable_variables
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=case.name != 'sequential')
    scale = LOSS_SCALE if case.name == 'mixed_float16' else 1.0

    @tf.function
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
            penalty = tf.add_n(model.losses) if model.losses else tf.constant(0.0)
            objective = scale * (loss + penalty)
        gradients = [tf.convert_to_tensor(g) / scale for g in tape.gradient(
            objective, [keras_stack.raw(v) for v in variables])]
        if update:
            keras_stack.apply_gradients(case.optimizer, gradients, variables)
        return loss, penalty, gradients
    return step


def moved(case, i, new):
    """(how far, how far for sure) variable i went: the latter without what rounding may make of it.

    Gradients that are zero but for rounding (of a bias in front of BN) are up to 1e-4.
    """
    old = case.start[i].astype(float)
    far = np.abs(new - old).max()
    ulp = 3e-7 * np.abs(old).max() + 3e-7 * (i < case.of_model)  # slots start at 0
    return far, far - ulp - 1e-3 * case.rate


def assert_moved_alike(case, i, expected, found, slack=0.0):
    """Variable i ends where it should, to 2 % of how far it went (a quarter in deep networks, for
    what rounding does to some of their tensors), and `slack`.
    """
    far, sure = moved(case, i, expected)
    error = np.abs(found.astype(float) - expected).max()
    share = 0.25 if case.name in APPLICATIONS else 0.02
    assert error <= share * far + (far - sure) + slack, (case.written[i].name, error, far)


def without_gradient(case, gradients):
    """Places in `written` of the weights that have none but for rounding: see NO_GRADIENT."""
    largest = [float(tf.reduce_max(tf.abs(gradient))) for gradient in gradients]
    found = np.argsort(largest)[:NO_GRADIENT.get(case.name, 0)]
    assert all(largest[k] < 1e-5 * max(largest) for k in found)
    places = {id(keras_stack.raw(v)): i for i, v in enumerate(case.written)}
    return {places[id(keras_stack.raw(case.model.trainable_variables[k]))] for k in found}


def assert_steps_as_plain(case, slack=0.0, adam=False):
    """Two steps of all tensors, or one: weights, slots, statistics, loss and penalty."""
    steps, outcomes = 1 if case.name in APPLICATIONS else 2, []
    for step in (plain_step(case), case.maker.step(np.ones(case.num_tensors))):
        case.back_to_start()
        results = [step(*case.batch) for _ in range(steps)]
        outcomes.append((case.values(), [float(r[0]) for r in results], results))
    (expected, losses, plain), (found, own_losses, own) = outcomes
    np.testing.assert_allclose(own_losses, losses, rtol=1e-3)
    np.testing.assert_allclose([float(r.penalty) for r in own], [float(r[1]) for r in plain],
                               rtol=1e-3, atol=1e-7)
    if case.name in APPLICATIONS:  # small gradients beside large ones are the least exact
        slots = range(len(case.model.variables), len(expected))
        slack += 0.01 * max(moved(case, i, expected[i])[0] for i in slots if case.start[i].ndim)
    # Adam divides rounding errors by themselves: where they take a weight is no step's own.
    left_out = without_gradient(case, plain[0][2]) if adam else ()
    for i, (theirs, ours) in enumerate(zip(expected, found)):
        if i not in left_out:
            assert_moved_alike(case, i, theirs, ours, slack)


def test_the_full_step_equals_a_plain_training_step(case):
    if case.name in SLOW_TO_TRACE:
        pytest.skip('tracing it plainly takes a quarter of a minute; masks are tried below')
    assert_steps_as_plain(case)


@pytest.mark.parametrize('name', [name for name in ZOO if name not in APPLICATIONS])
def test_the_full_step_with_adam_equals_a_plain_step(name):
    slack = 1e-4 if name == 'mixed_float16' else 1e-6  # gradients that float16 rounds
    assert_steps_as_plain(case_of(name, 'adam', 1e-3), slack, adam=True)


def test_a_mask_moves_its_tensors_as_the_full_step_and_no_others(case):
    variables = case.model.trainable_variables
    slots = keras_stack.slots(case.optimizer, variables)
    place = {id(keras_stack.raw(v)): i for i, v in enumerate(case.written)}
    of_tensor = [[place[id(keras_stack.raw(v))] for v in [variable] + of_one]
                 for variable, of_one in zip(variables, slots)]
    assert all(len(of_one) == 2 for of_one in of_tensor)  # the weight and its momentum
    case.back_to_start()
    case.maker.step(np.ones(case.num_tensors))(*case.batch)
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


def test_a_layer_that_is_not_trainable_never_moves():
    case = case_of('frozen_layer', decay=0.1)
    frozen = case.model.non_trainable_variables
    before = [v.numpy() for v in frozen]
    case.maker.step(np.ones(case.num_tensors))(*case.batch)
    assert frozen and all(a.tobytes() == v.numpy().tobytes() for a, v in zip(before, frozen))


@pytest.mark.parametrize('name', PROFILED)
def test_a_profile_covers_the_step_and_a_selection_keeps_its_budget(name):
    model, inputs, labels = ZOO[name].build()
    before = [keras_stack.raw(v).numpy() for v in model.variables]
    table = profile_model(model, batch=(inputs, labels), num_steps=3, seconds=0.2)
    for old, variable in zip(before, model.variables):
        assert old.tobytes() == keras_stack.raw(variable).numpy().tobytes()
    n = len(model.trainable_variables)
    everything = np.ones(n, dtype=bool)
    assert table.profile.coverage >= 0.95, table.profile.left_out
    assert [tuple(shape) for shape in table.shapes] == [
        tuple(v.shape) for v in model.trainable_variables]
    assert table.group_ms.sum() == pytest.approx(table.t_bp, rel=1e-6)
    assert table.step_time(everything) == pytest.approx(table.t_step, rel=1e-6)
    # What nobody needs would be free to train: each tensor's gradient costs something.
    assert table.group_tensors.any(axis=0).all()
    for mask in random_masks(5, n):
        assert table.backward_time(mask) <= min(table.chain_time(mask), table.t_bp) + 1e-9
    rho = (1 + smallest_rho(table)) / 2
    mask = choose_tensors(table, np.random.RandomState(0).rand(n), rho)[0]
    assert mask.any() and table.step_time(mask) <= rho * table.t_step * (1 + 1e-9)


def real_drop(case, step):
    """By how much the plain objective falls with one update of all tensors."""
    objectives = []
    for _ in range(2):
        with keras_stack.restored_afterwards(case.model.non_trainable_variables):
            loss, penalty, _ = step(*case.batch)
        objectives.append(float(loss) + float(penalty))
        case.maker.step(np.ones(case.num_tensors))(*case.batch)
    return objectives[0] - objectives[1]


@pytest.mark.parametrize('name', PROFILED)
def test_an_importance_predicts_the_drop_and_changes_nothing(name):
    model, inputs, labels = ZOO[name].build()
    still(model)
    gradients = plain_step(Case(name, model, *[None] * 7), update=False)(inputs, labels)[2]
    # So small an update that first order holds, so large that float32 (float16) still shows it.
    drop = {'mixed_float16': 0.02, 'MobileNet': 3e-3}.get(name, 1e-3)
    rate = drop / sum(float(tf.reduce_sum(tf.square(g))) for g in gradients)
    case = case_of(name, rate=rate)
    step = plain_step(case, update=False)
    evaluator, trials = Evaluator(case.maker), []
    importance = evaluate_importance(case.model, case.optimizer, [case.batch],
                                     evaluator=evaluator, trials=trials)
    for old, new in zip(case.start, case.values()):
        assert old.tobytes() == new.tobytes()
    assert trials[0].scale == 1.0
    tolerance = 0.2 if name == 'mixed_float16' else 0.05
    assert importance.sum() == pytest.approx(drop, rel=10 * tolerance)
    assert importance.sum() == pytest.approx(real_drop(case, step), rel=tolerance)


def test_an_importance_changes_nothing_with_noise_and_momentum():
    case = case_of('random_layers', quiet=False)
    for _ in range(2):
        case.maker.step(np.ones(case.num_tensors))(*case.batch)
    before = case.values()
    values = [evaluate_importance(case.model, case.optimizer, [case.batch],
                                  evaluator=Evaluator(case.maker)) for _ in range(2)]
    assert all(old.tobytes() == new.tobytes() for old, new in zip(before, case.values()))
    np.testing.assert_array_equal(*values)  # no noise in it


class OwnLoss(keras.Model):
    def compute_loss(self, *arguments, **named):
        return 0.0


@pytest.mark.skipif(not keras_stack.KERAS_3, reason='no compute_loss before Keras 2.9')
def test_a_model_with_its_own_loss_is_refused():
    inputs = keras.Input((4,))
    model = OwnLoss(inputs, keras.layers.Dense(3)(inputs))
    with pytest.raises(UserError, match='compute_loss') as error:
        StepMaker(model, None, 0.0, tf.ones((6, 4)), tf.zeros(6, tf.int32))
    assert '\n' not in str(error.value)
