"""Tests PruneTrain: which channels belong together, and what remains when some are removed."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.backbone import classifier, statistics_from_batch
from elastic.schemes.channels import Structure
from elastic.schemes.prunetrain import GroupLasso, PruneTrainScheme, prune
from elastic.settings import Settings
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.training_step import Objective
from models import build_model
from small_models import SMALL as SAVED_SHAPE
from small_models import saved, sequential, user_classifier

SIZE, BATCH, CLASSES = 32, 4, 5
SMALL = 1e-5


def residual_network():
    """Returns conv a -> a + (inner, BN, conv b) -> depthwise -> conv c -> head."""
    inputs = keras.Input((SIZE, SIZE, 3))
    a = keras.layers.Conv2D(8, 3, name='a')(keras.layers.ZeroPadding2D()(inputs))
    b = keras.layers.Conv2D(6, 1, use_bias=False, name='inner')(keras.layers.ReLU()(a))
    b = keras.layers.ReLU()(keras.layers.BatchNormalization(name='norm')(b))
    b = keras.layers.Conv2D(8, 3, padding='same', name='b')(b)
    x = keras.layers.DepthwiseConv2D(3, name='depthwise')(keras.layers.Add()([a, b]))
    x = keras.layers.Conv2D(7, 1, name='c')(keras.layers.ReLU()(x))
    return classifier(keras.Model(inputs, x), None, (SIZE, SIZE, 3), CLASSES, 'frozen')


def transformer():
    """Returns two blocks of vit-keras with a head, as models.build_model makes them."""
    vit = pytest.importorskip('vit_keras.vit')
    base = vit.build_model(SIZE, 16, num_layers=2, hidden_size=24, num_heads=2, name='vit',
                           mlp_dim=48, classes=CLASSES, include_top=False)
    return classifier(base, 'mobilenet_v2', (SIZE, SIZE, 3), CLASSES, 'frozen')


def flat_sequential():
    return keras.Sequential([
        keras.Input(SAVED_SHAPE), keras.layers.Conv2D(8, 3, name='a'), keras.layers.ReLU(),
        keras.layers.Conv2D(6, 3, name='b'), keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(4, name='hidden'), keras.layers.Dense(CLASSES)])


def batch(seed=0, size=SIZE, count=BATCH):
    rng = np.random.RandomState(seed)
    brightest = rng.uniform(0, 255, (count, 1, 1, 1))
    return (tf.constant(rng.uniform(0, brightest, (count, size, size, 3)), tf.float32),
            tf.constant(rng.randint(0, CLASSES, count), tf.int32))


def optimizer_for(variables, kind='sgd'):
    return make_optimizer(kind, 1e-3, 100, variables)


def randomised(model, seed=0):
    """Draws every bias and BN array, so that removing a wrong channel would show."""
    rng = np.random.RandomState(seed)
    for variable in model.weights:
        if len(variable.shape) == 1:
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    keras_stack.weights_were_set(model)
    return model


def vanish(model, share, seed=0):
    """Zeroes a random share of each set of removable channels; returns their number."""
    rng, count = np.random.RandomState(seed), 0
    for channels in Structure(model).channels:
        gone = rng.permutation(channels.size)[:int(share * channels.size)]
        count += len(gone)
        for variable, axis in channels.judged:
            array = np.moveaxis(keras_stack.raw(variable).numpy(), axis, 0)
            array[gone] = rng.uniform(-0.5, 0.5, array[gone].shape) * 1e-9
            variable.assign(np.moveaxis(array, 0, axis))
    return count


def of_names(model):
    """Returns {(name, axis) of the judged kernels: removable Channels}."""
    return {tuple(sorted((keras_stack.variable_name(variable), axis)
                         for variable, axis in channels.judged)): channels
            for channels in Structure(model).channels}


def test_channels_that_are_added_or_passed_on_belong_together():
    free = of_names(residual_network())
    assert {key: channels.size for key, channels in free.items()} == {
        (('a/kernel', 3), ('b/kernel', 3), ('c/kernel', 2), ('inner/kernel', 2)): 8,
        (('b/kernel', 2), ('inner/kernel', 3)): 6,
        (('c/kernel', 3), ('head/kernel', 0)): 7}  # none for the channels of the image
    carried = {channels.size: sorted({(keras_stack.variable_name(variable), axis)
                                      for variable, axis in channels.carried})
               for channels in free.values()}
    assert carried[6] == [('norm/' + name, 0) for name in (
        'beta', 'gamma', 'moving_mean', 'moving_variance')]
    assert carried[7] == [('c/bias', 0)]
    assert carried[8] == [('a/bias', 0), ('b/bias', 0), ('depthwise/bias', 0),
                          ('depthwise/kernel', 2)]
    assert Structure(flat_sequential()).size == 8 + 6 + 4


def test_the_removable_channels_of_mobilenetv2_match_a_count_by_hand():
    """The stem has 16, expansions six times their input; outputs that are added count once."""
    outputs = 8 + 8 + 16 + 24 + 32 + 56 + 112
    expansions = 6 * (8 + 8 + 8 + 16 + 16 + 16 + 24 * 4 + 32 * 3 + 56 * 3)
    assert 16 + outputs + expansions == 2864
    model = build_model('mobilenetv2', (SIZE, SIZE, 3), CLASSES, 'none', alpha=0.35)
    assert Structure(model).size == 2864 + 1280


@pytest.mark.parametrize('name', ['residual', 'sequential', 'nested'] + [
    pytest.param(name, marks=pytest.mark.thorough) for name in (
        'vit', 'EfficientNetB0', 'DenseNet121')])
def test_removing_vanished_channels_keeps_the_output(name, tmp_path):
    keras_stack.set_seed(0)
    if name in ('sequential', 'nested'):
        user = flat_sequential() if name == 'sequential' else user_classifier(CLASSES)
        model = build_model(saved(user, tmp_path), SAVED_SHAPE, CLASSES)
    elif name in ('residual', 'vit'):
        model = residual_network() if name == 'residual' else transformer()
    else:
        model = build_model(name, (SIZE, SIZE, 3), CLASSES, 'none', bn_statistics='frozen')
    gone = vanish(randomised(model), 0.5)
    images, _ = batch(size=model.input_shape[1], count=32)
    statistics_from_batch(model, images)  # otherwise the signal vanishes, and errors with it
    before = model(images, training=False).numpy()
    optimizer = optimizer_for(model.trainable_variables)
    smaller, _, removed = prune(model, optimizer, SMALL, optimizer_for)
    after = smaller(images, training=False).numpy()
    assert removed == gone > 0
    assert smaller.count_params() < model.count_params()
    largest = np.abs(before).max()
    assert np.ptp(before, axis=0).max() > 1e-3 * largest  # the output depends on the image
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * largest)


def test_a_model_without_channels_to_remove_is_refused():
    with pytest.raises(UserError, match='no channels to remove'):
        GroupLasso(sequential(keras.layers.Dense(CLASSES)), [], 0.2)


def test_the_last_channel_stays_and_no_change_keeps_the_model():
    model = residual_network()
    optimizer = optimizer_for(model.trainable_variables)
    same, unchanged, removed = prune(model, optimizer, SMALL, optimizer_for)
    assert same is model and unchanged is optimizer
    assert (removed, Structure(model).size) == (0, 21)
    vanish(model, 1.0)
    assert prune(model, optimizer, SMALL, optimizer_for)[-1] == 18


@pytest.mark.parametrize('kind', ['sgd', 'adam'])
def test_pruning_keeps_weights_slots_statistics_and_iterations(kind):
    model = randomised(residual_network())
    optimizer = optimizer_for(model.trainable_variables, kind)
    everything = np.ones(len(model.trainable_variables), dtype=bool)
    images, labels = batch()
    step = StepMaker(model, optimizer, 5e-4, images, labels).step(everything)
    for _ in range(3):
        step(images, labels)
    vanish(model, 0.5)
    smaller, new_optimizer, _ = prune(model, optimizer, SMALL,
                                      lambda variables: optimizer_for(variables, kind))
    assert int(new_optimizer.iterations) == 3
    kept = {c.size: c.kept(SMALL) for c in Structure(model).channels}
    added, inner, last = kept[8], kept[6], kept[7]
    stay = {'a/kernel': {3: added}, 'a/bias': {0: added},
            'inner/kernel': {2: added, 3: inner}, 'norm/gamma': {0: inner},
            'norm/beta': {0: inner}, 'b/kernel': {2: inner, 3: added}, 'b/bias': {0: added},
            'depthwise/kernel': {2: added}, 'depthwise/bias': {0: added},
            'c/kernel': {2: added, 3: last}, 'c/bias': {0: last},
            'head/kernel': {0: last}, 'head/bias': {}}
    variables = model.trainable_variables
    assert {keras_stack.variable_name(v) for v in variables} == set(stay)
    for old, new, old_slots, new_slots in zip(
            variables, smaller.trainable_variables, keras_stack.slots(optimizer, variables),
            keras_stack.slots(new_optimizer, smaller.trainable_variables)):
        assert len(old_slots) == len(new_slots) == (1 if kind == 'sgd' else 3)
        for before, after in zip([old] + old_slots, [new] + new_slots):
            expected = keras_stack.raw(before).numpy()
            for axis, indices in stay[keras_stack.variable_name(old)].items():
                expected = expected.take(indices, axis) if expected.ndim else expected
            np.testing.assert_array_equal(keras_stack.raw(after).numpy(), expected)
            assert np.abs(expected).max() > 0
    statistics = model.non_trainable_weights
    assert len(statistics) == 2
    for old, new in zip(statistics, smaller.non_trainable_weights):
        np.testing.assert_array_equal(keras_stack.raw(new).numpy(),
                                      keras_stack.raw(old).numpy()[inner])
    step = StepMaker(smaller, new_optimizer, 5e-4, images, labels).step(everything)
    assert np.isfinite(float(step(images, labels)[0]))


def test_the_penalty_counts_only_removable_groups():
    """The channels of the image and of concatenated tensors have no groups."""
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.Normalization()(keras.layers.Rescaling(1 / 255.0)(inputs))
    stem = keras.layers.Conv2D(4, 3, name='stem')(x)
    inner = keras.layers.Conv2D(5, 1, name='inner')(stem)
    x = keras.layers.Concatenate()([stem, keras.layers.Conv2D(6, 1, name='outer')(inner)])
    model = classifier(keras.Model(inputs, x), None, (SIZE, SIZE, 3), CLASSES, 'frozen')
    kernels = {keras_stack.variable_name(v): v.numpy() for v in model.trainable_variables}
    expected = (np.sqrt((kernels['inner/kernel'] ** 2).sum((0, 1, 2))).sum()
                + np.sqrt((kernels['outer/kernel'] ** 2).sum((0, 1, 3))).sum())
    assert float(GroupLasso.norms(model)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize('interval, epochs, said', [(5, 5, True), (4, 5, False), (0, 5, False)])
def test_a_run_too_short_to_prune_says_so(interval, epochs, said, capsys):
    images, labels = batch()
    maker = StepMaker(residual_network(), None, 0.0, images, labels)
    scheme = PruneTrainScheme(maker, None, Settings(num_epochs=epochs, prune_interval=interval))
    assert scheme.select(1, None).mask.all()
    assert ('no channels will be removed' in capsys.readouterr().out) == said
    assert scheme.summary == dict(channels=21, channels_removed=0)


@pytest.mark.thorough
def test_the_penalty_has_its_share_and_shrinks_the_groups():
    images, labels = batch()
    ends = []
    for ratio in (0.01, 0.9):
        keras_stack.set_seed(0)
        model = residual_network()
        model.get_layer('dropout').rate = 0.0
        lasso = GroupLasso(model, [(images, labels)], ratio)
        maker = StepMaker(model, optimizer_for(model.trainable_variables), 0.0, images, labels,
                          Objective(lasso))
        step = maker.step(np.ones(len(model.trainable_variables), dtype=bool))
        begin, loss = float(lasso.norms(model)), float(step(images, labels)[0])
        penalty = lasso.coefficient * begin
        # The step returns the loss without penalty, here that of inference: frozen, no dropout.
        assert penalty / (loss + penalty) == pytest.approx(ratio, rel=1e-3)
        for _ in range(10):
            step(images, labels)
        ends.append(float(lasso.norms(model)) / begin)
    assert ends[1] < ends[0] and ends[1] < 1
