"""Tests that a head solved from kept sums is the head of all images at once."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from tensorflow import keras

import datasets
import models
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.backbone import output_layer
from elastic.networks.stages import standardisation
from elastic.schemes import statistics
from elastic.schemes.ridge import FIRST, STEP, _fitted
from elastic.settings import DataSettings
from elastic.workers.cluster import ALONE
from small_models import saved

SIZE, BATCH = 16, 8


@pytest.fixture(scope='module')
def images():
    return datasets.find_images('digits', SIZE, BATCH, train_images=120)


def part_of(images, numbers, classes=10, old=0, augmentation='none'):
    """Returns the Dataset of some training images; `old` of them, the last, earlier runs kept."""
    train = images.train.only(np.array(numbers))._replace(old=old, old_share=0.5 * (old > 0))
    images = images._replace(train=train, class_names=images.class_names[:classes])
    return datasets.Dataset(images, BATCH, DataSettings(augmentation=augmentation))


def network(tmp_path, filters=12, classes=10):
    """Returns a model of always the same weights, 2 * `filters` features and some classes."""
    path = tmp_path / keras_stack.MODEL_FILE
    if not path.exists():
        keras_stack.set_seed(0)
        inputs = keras.Input((SIZE, SIZE, 3))
        x = keras.layers.Conv2D(filters, 3, 2, activation='relu')(inputs)
        saved(keras.Model(inputs, x), tmp_path)
    return models.build_model(str(path), (SIZE, SIZE, 3), classes, head='stages',
                              head_start='solved')


def solved(model, data, folder=None, trained=False):
    return statistics.solve(model, data, ALONE, lambda: None, trained,
                            None if folder is None else str(folder))


def written(found, folder):
    (folder / 'checkpoint').mkdir(parents=True)
    statistics.write(str(folder), found)
    return folder


def logits_of(model, data):
    """Returns the centred scores of all training images, (n, C), without their common factor."""
    numbers = np.resize(np.arange(data.num_images), (-(-data.num_images // BATCH), BATCH))
    scores = np.concatenate([model(images, training=False).numpy()
                             for images, _ in data.batches(numbers, 0)])[:data.num_images]
    scores -= scores.mean(axis=1, keepdims=True)
    return scores / np.abs(scores).max()


@pytest.mark.parametrize('filters', [12, pytest.param(90, marks=pytest.mark.thorough)])
def test_images_and_classes_that_come_later_give_the_head_of_all_at_once(
        filters, images, tmp_path):
    """In three runs, to rounding: the same sums and, at the same standardisation, the same head."""
    labels, whole = images.train.labels(), part_of(images, range(120))
    joint_model = network(tmp_path, filters)
    _, _, joint = solved(joint_model, whole)
    nothing = {name: 0 * array for name, array in joint.sums.items()}
    folder = written(joint._replace(images=0, class_names=('0',), sums=dict(
        nothing, products=nothing['products'][:, :1], target=nothing['target'][:1])),
        tmp_path / 'nothing')
    order = np.argsort(labels, kind='mergesort')
    for classes, numbers in ((4, order[:36]), (7, order[36:80]), (10, order[80:])):
        assert labels[numbers].max() < classes
        model = network(tmp_path, filters, classes)
        data = part_of(images, numbers, classes)
        result, _, found = solved(model, data, folder)
        folder = written(found, tmp_path / str(classes))
    assert found.images == joint.images == 120 and found.class_names == joint.class_names
    for name, array in joint.sums.items():
        np.testing.assert_allclose(found.sums[name], array, rtol=1e-4, atol=1e-2, err_msg=name)
    np.testing.assert_allclose(logits_of(model, whole), logits_of(joint_model, whole), atol=2e-3)
    assert 0 < result.accuracy <= 1 and np.isfinite(result.loss)


@pytest.mark.parametrize('filters, augmentation', [
    (12, 'none')] + [pytest.param(*each, marks=pytest.mark.thorough)
                     for each in ((150, 'none'), (12, 'flip'))])
def test_the_strength_is_that_of_cross_validation_and_each_image_is_left_out(
        filters, augmentation, images, tmp_path):
    """With flips, an image is left out with both of its versions."""
    model, data = network(tmp_path, filters), part_of(
        images, range(120), augmentation=augmentation)
    views = 1 if augmentation == 'none' else 2
    result, start, _ = solved(model, data, trained=True)
    reader = keras.Model(model.inputs, model.layers[-1].input)
    x = np.concatenate([reader(some, training=False).numpy() for view in range(views)
                        for some, _ in data.batches(np.arange(120).reshape(-1, BATCH), view)])
    x, y, of_image = x.astype(float), np.tile(data.labels, views), np.tile(np.arange(120), views)
    targets, square = np.eye(10)[y], np.trace(np.cov(x.T, bias=True))
    centred, best = x - x.mean(axis=0), None
    for power in range(-10, 11):
        strength = FIRST * STEP ** power * square
        fit = Ridge(strength).fit(x, targets)
        freedom = 1 + np.trace(np.linalg.solve(
            centred.T @ centred + strength * np.eye(x.shape[1]), centred.T @ centred))
        score = np.sum((targets - fit.predict(x)) ** 2) / (1 - freedom / 120) ** 2
        if freedom < 120:
            best = min(best or (np.inf,), (score, power, fit), key=lambda each: each[0])
    _, power, fit = best
    assert -10 < power < 10
    for kernel, other in ((output_layer(model).weights[0].numpy(), fit),
                          (start[0], Ridge(fit.alpha * STEP).fit(x, targets))):
        factor = np.linalg.norm(kernel) / np.linalg.norm(other.coef_)
        np.testing.assert_allclose(kernel, factor * other.coef_.T,
                                   atol=2e-3 * np.abs(kernel).max())
    scores = np.empty(targets.shape)
    for image in range(120):
        out = of_image == image
        scores[out] = Ridge(fit.alpha).fit(x[~out], targets[~out]).predict(x[out])
    expected = _fitted(scores, y, np.ones(10))
    assert result.accuracy == pytest.approx(expected.accuracy, abs=1 / 100)
    assert result.loss == pytest.approx(expected.loss, rel=2e-3)


def trained_further(model):
    """Changes the body of a model, as training it would."""
    kernel = model.trainable_variables[0]
    kernel.assign(0.9 * kernel.numpy())
    return model


def test_sums_of_another_body_are_refused_unless_kept_images_stand_for_them(
        images, tmp_path, capsys):
    """All images were kept, so the sums are again those of all images, each counted once."""
    data = part_of(images, range(60))
    _, _, found = solved(network(tmp_path), data)
    folder = written(found, tmp_path / 'one')
    statistics.check(network(tmp_path), part_of(images, range(60, 120)), str(folder))
    model = trained_further(network(tmp_path))
    with pytest.raises(UserError, match='has trained other layers .* --replay'):
        statistics.check(model, part_of(images, range(60, 120)), str(folder))
    with pytest.raises(UserError, match='has kept no sums'):
        statistics.check(model, part_of(images, range(60, 120)), str(tmp_path))
    assert capsys.readouterr().out == ''
    both = part_of(images, list(range(60, 120)) + list(range(60)), old=60)
    statistics.check(model, both, str(folder))
    assert 'its 60 kept images stand for all it has seen' in capsys.readouterr().out
    _, _, again = solved(model, both, folder)
    _, _, joint = solved(trained_further(network(tmp_path)), part_of(images, range(120)))
    assert again.body == joint.body != found.body
    np.testing.assert_allclose(again.sums['target'], joint.sums['target'])
    halved = part_of(images, list(range(60, 120)) + list(range(0, 60, 2)), old=30)
    _, _, again = solved(model, halved, folder)
    assert again.sums['weight'][0] == pytest.approx(120, rel=0.05)  # each class has kept images


def test_kept_images_do_not_stand_for_a_class_that_has_none(images, tmp_path, capsys):
    _, _, found = solved(network(tmp_path), part_of(images, range(60)))
    folder, model = written(found, tmp_path / 'one'), trained_further(network(tmp_path))
    numbers = [n for n in range(120) if images.train.labels()[n] != 7]
    data = part_of(images, numbers[::-1], old=40)
    with pytest.raises(UserError, match='would lose the classes that have no images now'):
        statistics.check(model, data, str(folder))
    assert statistics.collect(model, data, str(folder)) is None
    assert 'a class of earlier runs has no images left' in capsys.readouterr().out


def test_a_few_images_are_enough_for_sums(images, tmp_path):
    """Where no strength lets cross-validation judge at first, a stronger penalty is tried."""
    data = part_of(images, range(3), augmentation='flip')
    result, _, found = solved(network(tmp_path), data)
    assert np.isfinite(result.loss) and found.images == 3


def test_after_training_the_sums_are_those_of_the_trained_body(images, tmp_path, capsys):
    data, model = part_of(images, range(60)), network(tmp_path)
    solved(model, data)
    trained_further(model)
    before = [weight.numpy().copy() for weight in model.weights]
    found = statistics.collect(model, data, None)
    assert all(np.array_equal(*pair) for pair in zip(before, (w.numpy() for w in model.weights)))
    _, _, expected = solved(trained_further(network(tmp_path)), data)
    assert found.body == expected.body == statistics.body_of(model)
    for name in found.sums:
        np.testing.assert_array_equal(found.sums[name], expected.sums[name])
    first, later = written(found, tmp_path / 'first'), part_of(images, range(60, 120))
    again, (_, _, solving) = statistics.collect(model, later, str(first)), solved(
        model, later, first)
    for name in again.sums:  # so a run that is killed after it solved its head keeps the same sums
        np.testing.assert_array_equal(again.sums[name], solving.sums[name])
    folder = written(expected._replace(body='another'), tmp_path / 'one')
    assert statistics.collect(model, data, str(folder)) is None
    assert 'no sums are kept' in capsys.readouterr().out
    assert standardisation(model).weights[0].numpy().any()


def test_damaged_sums_are_refused(images, tmp_path):
    _, _, found = solved(network(tmp_path), part_of(images, range(60)))
    path = written(found, tmp_path / 'one') / statistics.FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match='statistics.npz. cannot be read'):
        statistics.check(network(tmp_path), part_of(images, range(60, 120)), str(tmp_path / 'one'))
