"""Solves the output layer in closed form: ridge regression on the features of all training images.

One forward pass gives the features (networks/stages.py). The scores of each class are regressed on
its one-hot labels. The strength of the penalty is the one with the least squared error on images
that were left out; one factor then makes the softmax of the scores fit these.

With few images, the n x n matrix of their products is factored, and each image is left out in turn
in closed form: its error is r_i / (1 - h_i), with the residual r and the diagonal h of the hat
matrix. Else the matrix of the features' products is summed up piece by piece, without a tenth of
the images, which are left out; several workers add theirs.
"""

import time

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.special
import tensorflow as tf
from scipy.linalg import blas, lapack
from tqdm import tqdm

from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.networks.backbone import Backbone, output_layer
from elastic.networks.stages import standardisation

VIEWS = 2  # augmented versions of each image
LEFT_OUT = 10  # one image of ten, where the matrix of features is the smaller one
PIECE = 512  # images that are added at once
STEP = 10 ** 0.5  # from one strength to the next
FIRST = 0.3  # strength, times the mean square of the features of an image, that is tried first
LEAST_DEVIATION = 0.1  # of the median one: a feature that hardly varies would steer its stage
# Mean square of the features of an image after scaling: with more, a usual first step of the output
# layer goes too far; with less, the layer learns more slowly than the others.
SQUARE = 32.0
TRIED = 4  # steps that must not raise the loss, at the rate that training begins with
RISE = 1.02  # of the loss, by rounding and because a step is of one batch
HALVINGS = 20


def views_of(dataset):
    """Returns the number of views of each image that the head is solved for."""
    return 1 if dataset.augmentation == 'none' else VIEWS


class Paused(Exception):
    """Signals that the run is to stop."""


def solve_head(model, dataset, cluster, pause=lambda: False):
    """Solves the output layer of a model from models.build_model, for standardised features.

    dataset: datasets.Dataset, whose weights of classes count. cluster: workers.cluster.Cluster.
    pause: () -> bool, called after each batch. Returns (loss and accuracy on the images left out,
    ms of each batch); None if pause returned True.
    Raises UserError if features are not finite, if none varies, or if all images are of one class.
    """
    features = _Features(model, dataset, pause)
    try:
        with cluster.watched():
            solve = _solve_many if cluster.size > 1 or features.many else _solve_few
            weights, bias, scores, labels, total = solve(features, cluster)
            if np.count_nonzero(cluster.total(features.seen)) < 2:
                raise UserError('all training images are of one class: there is nothing that '
                                '--head_start solved could tell apart')
            factor = np.exp(scipy.optimize.minimize_scalar(
                lambda power: _loss(np.exp(power) * scores, labels, features, total),
                bounds=(-2.0, 6.0), method='bounded').x)
            loss = _loss(factor * scores, labels, features, total)
            accuracy = total(scores.argmax(axis=1) == labels) / total(np.ones(len(labels)))
            values = cluster.of_chief(lambda: [factor / features.scale * weights, factor * bias])
    except Paused:
        return None
    features.keep()
    keras_stack.assign_arrays(output_layer(model).weights, values)
    return loss, accuracy, features.ms


def standardise(model, dataset, cluster):
    """Standardises the features of a model with a random head, by PIECE images, unless they are."""
    if not standardisation(model).weights[0].numpy().any():
        features = _Features(model, dataset, lambda: False)
        with cluster.watched():
            z, _ = next(features.pieces(features.numbers[:PIECE]))
            features.standardise(*cluster.of_chief(lambda: [z.mean(axis=0), z.std(axis=0)]))
        features.keep()


def safe_scale(step, scale, batches, evaluate, maker, cluster):
    """Halves the rates of a schedule until the first steps do not raise the loss of their batches.

    A solved head may weigh features that hardly vary so much that a usual step throws the layers
    before it far off. Where one halving was needed, one more is made, as dropout draws other noise
    in each step. Nothing else is left changed. Returns the scale that is in use then.
    step: MaskedStep of `maker`. scale: the tf.Variable of training_step.WarmupCosine. batches: [(
    inputs, labels)]. evaluate: from training_step.evaluation_function.
    """
    def loss(count):
        return sum(float(evaluate(*batch)[0]) for batch in batches[:count])

    def rise(count):
        return cluster.mean(np.array(loss(count))) / cluster.mean(np.array(before[count]))
    before = {count: loss(count) for count in (1, len(batches))}
    for halvings in range(HALVINGS):
        scale.assign(0.5 ** halvings)
        with keras_stack.restored_afterwards(maker.everything):
            step(*batches[0])
            worst = rise(1)
            for batch in batches[1:]:
                step(*batch)
            worst = max(worst, rise(len(batches)))
        if worst < RISE:  # not if it is not a number
            scale.assign(0.5 ** (halvings + (halvings > 0)))
            break
    return float(scale)


def _loss(logits, labels, features, total):
    """Returns the weighted mean cross-entropy of logits, (n, C), over all workers."""
    found = logits[np.arange(len(labels)), labels] - scipy.special.logsumexp(logits, axis=1)
    return -total(features.weights[labels] * found) / total(np.ones(len(labels)))


class _Features:
    """Runs the network on the training images: one forward pass, for each view.

    many: whether the matrix of products of features takes less memory than that of images.
    weights: (C,) float32, of the classes. scale: factor of standardised features; after
    `standardise`, what the output layer reads is this times (features - mean) / deviation.
    mean, deviation: (F,), that are subtracted, and divided by. ms: of each batch.
    """

    def __init__(self, model, dataset, pause):
        self._layer, self._dataset, self._pause = standardisation(model), dataset, pause
        keras_stack.assign_arrays(self._layer.weights, [
            value(weight.shape, np.float32) for value, weight in zip(
                (np.zeros, np.ones), self._layer.weights)])
        backbone = next(layer for layer in model.layers if isinstance(layer, Backbone))
        self._run = tf.function(lambda images: backbone(images, training=False))
        self.views = views_of(dataset)
        self.count, self.classes = int(self._layer.weights[0].shape[0]), dataset.num_classes
        self.weights = np.ones(self.classes, np.float32) if dataset.class_weight is None else (
            dataset.class_weight.astype(np.float32))
        rows = dataset.num_images * self.views
        self.many = rows * (rows + self.count) > self.count ** 2
        self.numbers = np.random.RandomState(0).permutation(dataset.num_images)
        self.scale, self.ms = np.float32((SQUARE / self.count) ** 0.5), []
        self.seen = np.zeros(self.classes)  # images of each class
        self.mean, self.deviation = np.float32(0), np.float32(1)
        self._bar = tqdm(total=self.views * -(-len(self.numbers) // self._batch_size),
                         desc='features', unit='batch', leave=False, disable=None, mininterval=0.5)

    @property
    def _batch_size(self):
        return int(self._dataset.train.element_spec[0].shape[0])

    def pieces(self, numbers, rows=PIECE):
        """Yields (features, (n, F) float32, standardised; labels, (n,)) of images, view by view.

        numbers: of the images. rows: at most so many at once, unless a batch has more.
        """
        size, found = self._batch_size, []
        whole = np.resize(numbers, (-(-len(numbers) // size), size))  # the last batch is filled up
        for view in range(self.views):
            begin, left = time.perf_counter(), len(numbers)
            for images, labels in self._dataset.batches(whole, view):
                found.append((self._run(images).numpy()[:left], labels.numpy()[:left]))
                left -= len(found[-1][1])
                now = time.perf_counter()
                self.ms.append(1e3 * (now - begin))
                begin = now
                self._bar.update()
                if self._pause():
                    raise Paused
                if len(found) * size + size > rows or not left:
                    yield self._joined(found)
                    found = []
                    begin = time.perf_counter()
        if self._bar.n >= self._bar.total:
            self._bar.close()

    def _joined(self, found):
        features, labels = map(np.concatenate, zip(*found))
        if not np.isfinite(features).all():
            raise UserError('{} of {} features are not finite numbers: --head_start solved needs a '
                            'network that computes such'.format(
                                (~np.isfinite(features)).any(axis=0).sum(), self.count))
        self.seen += np.bincount(labels, minlength=self.classes)
        features -= self.mean
        features /= self.deviation
        return features, labels

    def standardise(self, mean, deviation):
        """Standardises from now on. mean, deviation: (F,), of features as `pieces` yields them."""
        varying = deviation[deviation > 0]
        if not len(varying):
            raise UserError('all {} features are the same for every training image: --head_start '
                            'solved cannot tell the classes apart'.format(self.count))
        self.mean = mean.astype(np.float32)
        self.deviation = np.maximum(deviation, LEAST_DEVIATION * np.median(varying)).astype(
            np.float32)

    def keep(self):
        """Lets the network itself standardise its features."""
        keras_stack.assign_arrays(self._layer.weights, [
            self.mean, np.square(self.deviation / self.scale)])

    def one_hot(self, labels):
        """Returns (n, C) float32."""
        return np.eye(self.classes, dtype=np.float32)[labels]


# ---------------------------------------------------------------- ridge regression

class _Ridge:
    """Solves (A + strength) X = B for one symmetric matrix A and many strengths, in its memory.

    matrix: (n, n) float32 in Fortran order, of which the part above the diagonal is A's. The other
    part, with the diagonal, takes the factors.
    """

    def __init__(self, matrix):
        self.matrix, self.diagonal = matrix, matrix.diagonal().copy()

    def solve(self, strength, right):
        """Returns X, (n, C); None if rounding leaves no positive definite matrix."""
        a = self.matrix
        for begin in range(0, len(a), PIECE):
            end = begin + PIECE
            a[begin:end, :begin] = a[:begin, begin:end].T
            above = np.triu(a[begin:end, begin:end], 1)
            a[begin:end, begin:end] = above + above.T
        np.fill_diagonal(a, self.diagonal + np.float32(strength))
        _, wrong = lapack.spotrf(a, lower=1, clean=0, overwrite_a=1)
        return None if wrong else lapack.spotrs(a, right, lower=1)[0]

    def inverse(self):
        """Inverts the last A + strength; returns its part below the diagonal in `matrix`."""
        lapack.spotri(self.matrix, lower=1, overwrite_c=1)
        return self.matrix


def _best_strength(error_of):
    """Returns the result of error_of, (error, ...), for the strength of the least error.

    error_of: (strength) -> (error, ...), of one minimum. strength: relative to FIRST.
    """
    tried = {}

    def at(power):
        if power not in tried:
            tried[power] = error_of(FIRST * STEP ** power)
        return tried[power][0]
    best = 0
    for direction in (-1, 1):
        while abs(best) < 10 and at(best + direction) < at(best):
            del tried[best]
            best += direction
        if best:
            break
    return tried[best]


def _solve_few(features, _):
    """Leaves out each image, with all its views, in turn; see _solve_many."""
    pieces = list(features.pieces(features.numbers, rows=0))
    z, labels = map(np.concatenate, zip(*pieces))
    del pieces
    mean, deviation = z.mean(axis=0), z.std(axis=0)
    features.standardise(mean, deviation)
    z -= mean
    z /= features.deviation
    weights = features.weights[labels]
    root, total_weight = np.sqrt(weights)[:, None], weights.sum()
    middle, targets = weights @ z / total_weight, features.one_hot(labels)
    z -= middle
    z *= root
    mean_target = weights @ targets / total_weight
    scaled = (targets - mean_target) * root
    ridge = _Ridge(blas.ssyrk(1.0, z.T, trans=1))
    square = float(np.trace(ridge.matrix)) / total_weight
    images, views = len(features.numbers), features.views
    firsts = np.arange(images)

    def error_of(strength):
        strength *= square
        alpha = ridge.solve(strength, scaled)
        if alpha is None:
            return np.inf, None, None
        inverse = ridge.inverse()
        blocks = np.empty((images, views, views), np.float32)
        for i in range(views):
            for j in range(views):
                blocks[:, i, j] = inverse[max(i, j) * images + firsts, min(i, j) * images + firsts]
                blocks[:, i, j] -= (root[i * images:][:images, 0] * root[j * images:][:images, 0]
                                    / (strength * total_weight))
        errors = np.linalg.solve(blocks, alpha.reshape(views, images, -1).swapaxes(0, 1))
        errors = errors.swapaxes(0, 1).reshape(alpha.shape)
        return float(np.square(errors).sum()), alpha, targets - errors / root
    _, alpha, scores = _best_strength(error_of)
    kernel = z.T @ alpha
    return kernel, mean_target - middle @ kernel, scores, labels, np.sum


class _Sums:
    """Sums up the products of standardised features over images, over all workers."""

    def __init__(self, features, cluster):
        self._features, self._cluster = features, cluster
        count, classes = features.count, features.classes
        self._arrays = [np.zeros(shape, np.float32) for shape in (
            (count, count), (count, classes), count, classes, 1)]

    def add(self, pieces):
        """Adds (features, (n, F); labels, (n,)) of each piece, then those of other workers."""
        matrix, products, first, target, weight = self._arrays
        if not self._cluster.is_chief:
            for array in self._arrays:
                array[:] = 0  # what was added before
        for z, labels in pieces:
            weights = self._features.weights[labels]
            targets, scaled = self._features.one_hot(labels), z * np.sqrt(weights)[:, None]
            blas.ssyrk(1.0, scaled.T, beta=1.0, c=matrix.T, overwrite_c=1)
            products += z.T @ (targets * weights[:, None])
            first += weights @ z
            target += weights @ targets
            weight += weights.sum()
        self._arrays = [self._cluster.total(array) for array in self._arrays]

    def ridge(self):
        """Returns the _Ridge of the features minus their means; `restore` takes it back."""
        matrix, _, first, _, weight = self._arrays
        blas.ssyr(-1 / weight[0], first, a=matrix.T, overwrite_a=1)
        return _Ridge(matrix.T)

    def restore(self, ridge):
        matrix, _, first, _, weight = self._arrays
        np.fill_diagonal(matrix, ridge.diagonal)
        blas.ssyr(1 / weight[0], first, a=matrix.T, overwrite_a=1)

    @property
    def right(self):
        """Returns (F, C), the products of features and one-hot labels, both minus their means."""
        _, products, first, target, weight = self._arrays
        return products - np.outer(first, target) / weight

    @property
    def weight(self):
        """Returns the sum of the weights of the images."""
        return float(self._arrays[-1][0])

    def bias(self, kernel):
        """Returns (C,), to add to features @ kernel."""
        _, _, first, target, weight = self._arrays
        return (target - first @ kernel) / weight


def _solve_many(features, cluster):
    """Leaves a part of the images out, to find the strength, and then adds it.

    Returns (kernel, (F, C), for standardised features; bias, (C,); scores of the images left out,
    (n, C); their labels; a function that sums up values of these images over all workers).
    """
    def total(values):
        return float(cluster.total(np.array([np.sum(values, dtype=np.float64)]))[0])
    every = max(2, min(LEFT_OUT, len(features.numbers) // PIECE))
    z, labels = map(np.concatenate, zip(*features.pieces(features.numbers[::every])))
    number = total(np.ones(len(z)))
    mean = cluster.total(z.sum(axis=0, dtype=np.float64)) / number
    variance = sum(np.square(part - mean).sum(axis=0) for part in np.array_split(
        z, -(-len(z) // PIECE)))
    features.standardise(mean, np.sqrt(cluster.total(variance) / number))
    z -= features.mean
    z /= features.deviation
    sums = _Sums(features, cluster)
    sums.add(features.pieces(np.delete(features.numbers, slice(None, None, every))))
    ridge, right = sums.ridge(), sums.right
    square = float(ridge.diagonal.sum()) / sums.weight
    root, targets = np.sqrt(features.weights[labels])[:, None], features.one_hot(labels)

    def error_of(strength):
        kernel = ridge.solve(strength * square, right)
        if kernel is None:
            return np.inf, strength, None
        scores = z @ kernel + sums.bias(kernel)
        return total(np.square((scores - targets) * root)), strength, scores
    _, strength, scores = _best_strength(error_of)
    sums.restore(ridge)
    sums.add([(z, labels)])
    kernel = sums.ridge().solve(strength * square, sums.right)
    return kernel, sums.bias(kernel), scores, labels, total
