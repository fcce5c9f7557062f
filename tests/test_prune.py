"""PruneTrain: which channels belong together, removing those that vanished, and what is kept."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import keras_stack
from backbone import classifier
from masked_step import StepMaker
from models import build_model
from prune import GroupLasso, network_of, prune, structure
from training_step import make_optimizer

SIZE, BATCH, CLASSES = 32, 4, 5
SMALL = 1e-5


def residual_network():
    """conv a -> (conv b, BN) + a -> depthwise -> conv c, and a head on it."""
    inputs = keras.Input((SIZE, SIZE, 3))
    a = keras.layers.Conv2D(8, 3, name='a')(keras.layers.ZeroPadding2D()(inputs))
    b = keras.layers.Conv2D(6, 1, use_bias=False, name='inner')(keras.layers.ReLU()(a))
    b = keras.layers.ReLU()(keras.layers.BatchNormalization(name='norm')(b))
    b = keras.layers.Conv2D(8, 3, padding='same', name='b')(b)
    x = keras.layers.DepthwiseConv2D(3, name='depthwise')(keras.layers.Add()([a, b]))
    x = keras.layers.Conv2D(7, 1, name='c')(keras.layers.ReLU()(x))
    return classifier(keras.Model(inputs, x), None, (SIZE, SIZE, 3), CLASSES, 'frozen')


def batch(seed=0, size=SIZE):
    rng = np.random.RandomState(seed)
    return (tf.constant(rng.uniform(0, 255, (BATCH, size, size, 3)), tf.float32),
            tf.constant(rng.randint(0, CLASSES, BATCH), tf.int32))


def optimizer_for(variables, kind='sgd'):
    return make_optimizer(kind, 1e-3, 100, variables)


def randomised(model, seed=0):
    """Every bias and BN array random, as in a trained network: a removed channel would show."""
    rng = np.random.RandomState(seed)
    for variable in model.weights:
        if len(variable.shape) == 1:
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return model


def vanish(model, share, seed=0):
    """Sets a random share of every free set of channels to zero; returns how many channels."""
    rng, count = np.random.RandomState(seed), 0
    for channels in structure(network_of(model)).channels:
        if not channels.free:
            continue
        gone = rng.permutation(channels.size)[:int(share * channels.size)]
        count += len(gone)
        for variable, axis in channels.judged:
            array = np.moveaxis(keras_stack.raw(variable).numpy(), axis, 0)
            array[gone] = rng.uniform(-0.5, 0.5, array[gone].shape) * 1e-9
            variable.assign(np.moveaxis(array, 0, axis))
    return count


def names(channels):
    return sorted((keras_stack.variable_name(variable), axis)
                  for variable, axis in channels.judged)


def test_channels_that_are_added_or_pass_through_a_layer_belong_together():
    found = structure(network_of(residual_network()))
    free = {tuple(names(channels)): channels for channels in found.channels
            if channels.free}
    assert set(free) == {
        (('a/kernel', 3), ('b/kernel', 3), ('c/kernel', 2), ('inner/kernel', 2)),
        (('b/kernel', 2), ('inner/kernel', 3))}
    assert sorted(channels.size for channels in free.values()) == [6, 8]
    carried = {channels.size: sorted({(keras_stack.variable_name(variable), axis)
                                      for variable, axis in channels.carried})
               for channels in free.values()}
    assert carried[6] == [('norm/' + name, 0) for name in (
        'beta', 'gamma', 'moving_mean', 'moving_variance')]
    assert carried[8] == [('a/bias', 0), ('b/bias', 0), ('depthwise/bias', 0),
                          ('depthwise/kernel', 2)]
    judged = [name for channels in found.channels for name in names(channels)]
    assert ('c/kernel', 3) in judged and ('a/kernel', 2) not in judged  # the image's own channels


@pytest.mark.parametrize('name, size', [
    ('residual', SIZE), ('resnet50', 32), ('vgg16', 32), ('mobilenetv2', 32), ('vit', 32),
    ('EfficientNetB0', 32), ('DenseNet121', 32)])
def test_removing_vanished_channels_leaves_the_output_unchanged(name, size):
    if name == 'vit':
        pytest.importorskip('vit_keras')
    model = randomised(residual_network() if name == 'residual' else build_model(
        name, (size, size, 3), CLASSES, 'none', bn_statistics='frozen'))
    gone = vanish(model, 0.5)
    images, _ = batch(size=size)
    before = model(images, training=False).numpy()
    pruned = prune(model, optimizer_for(model.trainable_variables), SMALL, optimizer_for)
    after = pruned.model(images, training=False).numpy()
    assert pruned.removed == gone > 0
    assert pruned.model.count_params() < model.count_params()
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5 * np.abs(before).max())


def test_nothing_vanished_changes_nothing_and_a_last_channel_stays():
    model = residual_network()
    optimizer = optimizer_for(model.trainable_variables)
    pruned = prune(model, optimizer, SMALL, optimizer_for)
    assert pruned.model is model and pruned.optimizer is optimizer
    assert (pruned.removed, pruned.channels) == (0, 14)
    vanish(model, 1.0)
    assert prune(model, optimizer, SMALL, optimizer_for).removed == 12


@pytest.mark.parametrize('kind', ['sgd', 'adam'])
def test_weights_slots_statistics_and_iterations_are_carried_over(kind):
    model = randomised(residual_network())
    optimizer = optimizer_for(model.trainable_variables, kind)
    everything = np.ones(len(model.trainable_variables), dtype=bool)
    images, labels = batch()
    step = StepMaker(model, optimizer, 5e-4, images, labels).step(everything)
    for _ in range(3):
        step(images, labels)
    vanish(model, 0.5)
    pruned = prune(model, optimizer, SMALL, lambda variables: optimizer_for(variables, kind))
    assert int(pruned.optimizer.iterations) == 3
    kept = {len(c.judged): c.kept(SMALL) for c in structure(network_of(model)).channels
            if c.free}
    sets = {'a': (None, kept[4]), 'inner': (kept[4], kept[2]), 'b': (kept[2], kept[4]),
            'c': (kept[4], None)}
    olds = keras_stack.slots(optimizer, model.trainable_variables)
    news = keras_stack.slots(pruned.optimizer, pruned.model.trainable_variables)
    checked = 0
    for old, new, old_slots, new_slots in zip(
            model.trainable_variables, pruned.model.trainable_variables, olds, news):
        layer, part = keras_stack.variable_name(old).split('/')
        if part != 'kernel' or layer not in sets:
            continue
        assert len(old_slots) == len(new_slots) == (1 if kind == 'sgd' else 2)
        for before, after in zip([old] + old_slots, [new] + new_slots):
            expected = keras_stack.raw(before).numpy()
            for axis, stay in zip((2, 3), sets[layer]):
                expected = expected if stay is None else expected.take(stay, axis)
            np.testing.assert_array_equal(keras_stack.raw(after).numpy(), expected)
            assert np.abs(expected).max() > 0
            checked += 1
    assert checked == 4 * (2 if kind == 'sgd' else 3)
    statistics = [w for w in model.non_trainable_weights]
    for old, new in zip(statistics, pruned.model.non_trainable_weights):
        np.testing.assert_array_equal(keras_stack.raw(new).numpy(),
                                      keras_stack.raw(old).numpy()[kept[2]])
    smaller = StepMaker(pruned.model, pruned.optimizer, 5e-4, images, labels).step(everything)
    assert np.isfinite(float(smaller(images, labels)[0]))


@pytest.mark.timing
def test_a_pruned_network_takes_less_time():
    size = 64
    model = build_model('vgg16', (size, size, 3), CLASSES, 'none', bn_statistics='frozen')
    images, labels = batch(size=size)
    vanish(model, 0.75)
    pruned = prune(model, optimizer_for(model.trainable_variables), SMALL, optimizer_for)
    steps = [StepMaker(each, None, 0.0, images, labels).step(
        np.ones(len(each.trainable_variables), dtype=bool), update=False)
        for each in (model, pruned.model)]
    for step in steps:
        step.milliseconds(images, labels)
    ms = np.median([[step.milliseconds(images, labels) for step in steps] for _ in range(5)],
                   axis=0)
    assert ms[1] < 0.6 * ms[0]  # of the operations, 1 in 16 is left


def test_the_penalty_is_the_share_that_was_asked_for_and_draws_groups_to_zero():
    images, labels = batch()
    ends = []
    for ratio in (0.01, 0.9):
        keras_stack.set_seed(0)
        model = residual_network()
        model.get_layer('dropout').rate = 0.0
        lasso = GroupLasso(model, [(images, labels)], ratio)
        maker = StepMaker(model, optimizer_for(model.trainable_variables), 0.0, images, labels,
                          penalty=lasso)
        step = maker.step(np.ones(len(model.trainable_variables), dtype=bool))
        begin, loss = float(lasso.norms(model)), float(step(images, labels)[0])
        penalty = lasso.coefficient * begin
        # Returned is the loss alone; in a frozen network without dropout it is that of inference.
        assert penalty / (loss + penalty) == pytest.approx(ratio, rel=1e-3)
        for _ in range(10):
            step(images, labels)
        ends.append(float(lasso.norms(model)) / begin)
    assert ends[1] < ends[0] and ends[1] < 1
