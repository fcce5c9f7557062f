"""Tests the closed-form output layer against scikit-learn, image by image."""

import types

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from tensorflow import keras

import models
from elastic.errors import UserError
from elastic.networks.stages import standardisation
from elastic.schemes import solved_head
from elastic.schemes.ridge import FIRST, STEP, _fitted
from elastic.schemes.solved_head import solve_head
from elastic.workers.cluster import ALONE
from small_models import saved

SHAPE, CLASSES, IMAGES, BATCH = (8, 8, 3), 3, 40, 8


class Images:
    """A data set of coloured noise whose class shows in its colour; each view adds other noise."""
    num_images, num_classes = IMAGES, CLASSES
    train = types.SimpleNamespace(element_spec=[np.zeros((BATCH,) + SHAPE)])

    def __init__(self, augmentation='none', weights=None, labels=None):
        self.augmentation, self.class_weight = augmentation, weights
        rng = np.random.RandomState(0)
        self.labels = rng.randint(0, CLASSES, IMAGES) if labels is None else labels
        self.images = rng.uniform(0, 200, (IMAGES,) + SHAPE).astype(np.float32)
        self.images += 12 * np.eye(3, dtype=np.float32)[self.labels][:, None, None]

    def view(self, numbers, view):
        noise = np.random.RandomState(view).normal(0, 9 * view, (IMAGES,) + SHAPE)
        return (self.images + noise.astype(np.float32))[numbers]

    def batches(self, numbers, view):
        for batch in numbers:
            yield keras.backend.constant(self.view(batch, view)), keras.backend.constant(
                self.labels[batch], dtype='int32')


def network(tmp_path, filters):
    inputs = keras.Input(SHAPE)
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Conv2D(filters, 3, activation='relu', kernel_initializer=(
        keras.initializers.RandomNormal(seed=1)))(x)
    path = saved(keras.Model(inputs, x), tmp_path)
    return models.build_model(path, SHAPE, CLASSES, head='stages', head_start='solved')


def features_of(model, images):
    """Returns what the output layer of a model reads, (n, F) float64."""
    return keras.Model(model.inputs, model.layers[-1].input)(
        images, training=False).numpy().astype(float)


def softmax_loss(logits, labels, weights):
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    return -np.mean(weights[labels] * np.log(chances[np.arange(len(labels)), labels]))


@pytest.mark.parametrize('augmentation, weights', [
    ('none', None), ('flip', np.array([1.0, 2.0, 0.5]))])
def test_few_images_are_left_out_in_turn(augmentation, weights, tmp_path):
    """The strength, the factor of the softmax, and the layer are those of refits without each."""
    data, model = Images(augmentation, weights), network(tmp_path, 200)
    result, _ = solve_head(model, data, ALONE)
    views = range(1 if augmentation == 'none' else 2)
    assert len(result.ms['solve']) == len(views) * IMAGES // BATCH
    x = np.concatenate([features_of(model, data.view(np.arange(IMAGES), v)) for v in views])
    y, weights = np.tile(data.labels, len(views)), np.ones(3) if weights is None else weights
    targets, of_image = np.eye(CLASSES)[y], np.tile(np.arange(IMAGES), len(views))
    square = np.trace(np.cov(x.T, aweights=weights[y], bias=True))

    def fit(strength, rows):
        return Ridge(strength * square).fit(x[rows], targets[rows], weights[y][rows])

    def left_out(strength):
        scores = np.empty(targets.shape)
        for image in range(IMAGES):
            scores[of_image == image] = fit(strength, of_image != image).predict(
                x[of_image == image])
        return scores
    strengths = [FIRST * STEP ** power for power in range(-10, 11)]
    errors = [_fitted(left_out(s), y, weights).loss for s in strengths]
    best = strengths[int(np.argmin(errors))]
    assert 0 < np.argmin(errors) < 20
    scores, expected = left_out(best), fit(best, slice(None))
    assert result.accuracy == np.mean(scores.argmax(axis=1) == y)
    kernel, bias = [v.numpy().astype(float) for v in model.layers[-1].weights]
    factor = np.linalg.norm(kernel) / np.linalg.norm(expected.coef_)
    np.testing.assert_allclose(kernel, factor * expected.coef_.T, atol=2e-3 * np.abs(kernel).max())
    logits = x @ kernel + bias - factor * expected.predict(x)
    assert np.ptp(logits) < 5e-3 * factor
    losses = [softmax_loss(f * factor * scores, y, weights) for f in (0.9, 1.0, 1.1)]
    assert losses[1] < min(losses[0], losses[2])
    assert result.loss == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize('weights, trained', [(None, False), (np.array([1.0, 2.0, 0.5]), True)])
def test_of_many_images_a_part_is_left_out(weights, trained, tmp_path):
    data, model = Images('none', weights), network(tmp_path, 5)
    result, start = solve_head(model, data, ALONE, trained=trained)
    x, y = features_of(model, data.images), data.labels
    weights = np.ones(3) if weights is None else weights
    order = np.random.RandomState(0).permutation(IMAGES)
    out, rest = order[::2], order[1::2]
    square = np.trace(np.cov(x[rest].T, aweights=weights[y[rest]], bias=True))
    targets = np.eye(CLASSES)[y]
    fits = [Ridge(FIRST * STEP ** power * square).fit(x[rest], targets[rest], weights[y[rest]])
            for power in range(-10, 11)]
    errors = [_fitted(fit.predict(x[out]), y[out], weights).loss for fit in fits]
    best = int(np.argmin(errors))
    assert result.accuracy == np.mean(fits[best].predict(x[out]).argmax(axis=1) == y[out])
    heads = [(best, [v.numpy() for v in model.layers[-1].weights], result.loss)]
    assert (start is not None) == trained
    if trained:  # of a head to train from, the penalty is one step stronger
        heads.append((best + 1, start, errors[best + 1]))
    for power, (kernel, _), loss in heads:
        expected = Ridge(fits[power].alpha).fit(x, targets, weights[y])
        factor = np.linalg.norm(kernel) / np.linalg.norm(expected.coef_)
        np.testing.assert_allclose(kernel, factor * expected.coef_.T,
                                   atol=2e-3 * np.abs(kernel).max())
        scores = factor * fits[power].predict(x[out])
        assert loss == pytest.approx(softmax_loss(scores, y[out], weights), rel=1e-3)


def test_features_are_standardised_and_rare_ones_are_not_blown_up(tmp_path):
    data, model = Images(), network(tmp_path, 50)
    solve_head(model, data, ALONE)
    x = features_of(model, data.images) * np.sqrt(100 / solved_head.SQUARE)
    assert np.abs(x.mean(axis=0)).max() < 1e-4
    deviations = x.std(axis=0)
    assert deviations.max() < 1.001 and np.mean(deviations > 0.999) > 0.5
    raw = np.sqrt(standardisation(model).moving_variance.numpy())
    assert raw.min() >= 0.0999 * np.median(raw)


def test_images_of_one_class_are_refused(tmp_path):
    with pytest.raises(UserError, match='all training images are of one class'):
        solve_head(network(tmp_path, 10), Images(labels=np.ones(IMAGES, int)), ALONE)
