"""Ridge regression with the strength that suits images which were left out.

With few images, the n x n matrix of their products is factored, and each image is left out in turn
in closed form: its error is r_i / (1 - h_i), with the residual r and the diagonal h of the hat
matrix. Else the matrix of the features' products is summed up piece by piece, without a tenth of
the images, which are left out; several workers add theirs.
"""

from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.special
from scipy.linalg import blas, lapack

LEFT_OUT = 10  # one image of ten, where the matrix of features is the smaller one
PIECE = 512  # images that are added at once
STEP = 10 ** 0.5  # from one strength to the next
TRACED = 256  # random vectors; of 100 images, the degrees of freedom are off by about 1 %
FIRST = 0.3  # strength, times the mean square of the features of an image, that is tried first
# Multiple of the best strength for a head to train from: the best head is right on nearly all
# training images, which leaves next to no loss, and so no gradient.
BEFORE_TRAINING = 10 ** 0.5


def is_many(rows, count):
    """Returns whether the matrix of products of features takes less memory than that of images."""
    return rows * (rows + count) > count ** 2


def needed_bytes(rows, count):
    """Returns the bytes that solving takes. rows: images. count: features."""
    return 4 * (count * (count + rows // LEFT_OUT) if is_many(rows, count) else
                rows * (rows + count))


def one_hot(labels, classes):
    """Returns (n, C) float32. labels: (n,) int. classes: C."""
    return np.eye(classes, dtype=np.float32)[labels]


class _Fitted(NamedTuple):
    """Holds how scores fit the images that were left out, once multiplied by `factor`."""
    loss: float
    accuracy: float
    factor: float


def _fitted(scores, labels, weights, total=np.sum):
    """Returns the _Fitted of scores, (n, C), of images with these labels, (n,).

    weights: (C,), of the classes. total: sums up values of these images, over all workers.
    """
    count, each = total(np.ones(len(labels))), weights[labels]
    own = scores[np.arange(len(labels)), labels]

    def loss(power):
        factor = np.exp(power)
        return -total(each * (factor * own - scipy.special.logsumexp(factor * scores, axis=1))
                      ) / count
    found = scipy.optimize.minimize_scalar(loss, bounds=(-2.0, 6.0), method='bounded')
    right = total(scores.argmax(axis=1) == labels)
    return _Fitted(float(found.fun), float(right / count), float(np.exp(found.x)))


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


def _at_best_strength(error_of, trained):
    """Returns what error_of returns at the best strength, in a list.

    trained: whether training follows; the list then also has its result at BEFORE_TRAINING times
    that strength.
    error_of: (strength) -> (_Fitted or [inf], ...), of one minimum. strength: relative to FIRST.
    """
    tried = {}

    def at(power):
        if power not in tried:
            tried[power] = error_of(FIRST * STEP ** power)
        return tried[power][0][0]
    best = 0
    for direction in (-1, 1):
        while abs(best) < 10 and at(best + direction) < at(best):
            del tried[best]
            best += direction
        if best:
            break
    found = [tried[best]]
    if trained:
        found.append(error_of(BEFORE_TRAINING * FIRST * STEP ** best))
    return found


def solve_few(features, _, trained):
    """Leaves out each image, with all its views, in turn; see solve_many."""
    z, labels = map(np.concatenate, zip(*features.pieces(features.numbers)))
    features.standardise(z, z.mean(axis=0), z.std(axis=0))
    weights = features.weights[labels]
    root, total_weight = np.sqrt(weights)[:, None], weights.sum()
    middle, targets = weights @ z / total_weight, one_hot(labels, features.classes)
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
            return [np.inf], None
        inverse = ridge.inverse()
        blocks = np.empty((images, views, views), np.float32)
        for i in range(views):
            for j in range(views):
                blocks[:, i, j] = inverse[max(i, j) * images + firsts, min(i, j) * images + firsts]
                blocks[:, i, j] -= (root[i * images:][:images, 0] * root[j * images:][:images, 0]
                                    / (strength * total_weight))
        errors = np.linalg.solve(blocks, alpha.reshape(views, images, -1).swapaxes(0, 1))
        errors = errors.swapaxes(0, 1).reshape(alpha.shape)
        return _fitted(targets - errors / root, labels, features.weights), alpha
    found = [(z.T @ alpha, fitted) for fitted, alpha in _at_best_strength(error_of, trained)]
    return [(kernel, mean_target - middle @ kernel, fitted) for kernel, fitted in found]


class Sums:
    """Sums up the products of standardised features over images, over all workers.

    features: solved_head.Features. cluster: workers.cluster.Cluster; None: this process alone.
    matrix: (F, F), of features and features; only the part below the diagonal is used.
    products: (F, C), of features and one-hot labels. first: (F,), the features themselves.
    target: (C,), the one-hot labels, that is how many images there are of each class. weight: (1,),
    of the images. All are float32, and each image counts by its weight.
    """
    NAMES = ('matrix', 'products', 'first', 'target', 'weight')

    def __init__(self, features, cluster=None):
        self._features, self._cluster = features, cluster
        count, classes = features.count, features.classes
        self.matrix = np.zeros((count, count), np.float32)
        self.products = np.zeros((count, classes), np.float32)
        self.first = np.zeros(count, np.float32)
        self.target = np.zeros(classes, np.float32)
        self.weight = np.zeros(1, np.float32)

    def add(self, pieces):
        """Adds (features, (n, F); labels, (n,)) of each piece, then those of other workers."""
        if self._cluster and not self._cluster.is_chief:
            for name in self.NAMES:
                getattr(self, name)[:] = 0  # what was added before
        for z, labels in pieces:
            weights = self._features.weights[labels]
            targets = one_hot(labels, self._features.classes)
            scaled = z * np.sqrt(weights)[:, None]
            blas.ssyrk(1.0, scaled.T, beta=1.0, c=self.matrix.T, overwrite_c=1)
            self.products += z.T @ (targets * weights[:, None])
            self.first += weights @ z
            self.target += weights @ targets
            self.weight += weights.sum()
        if self._cluster:
            for name in self.NAMES:
                setattr(self, name, self._cluster.total(getattr(self, name)))

    def packed(self):
        """Returns the sums, name -> float32 array; of the matrix, each row up to its diagonal."""
        rows = [row[:i + 1] for i, row in enumerate(self.matrix)]
        return dict({name: getattr(self, name) for name in self.NAMES}, matrix=np.concatenate(rows))

    def include(self, packed, places):
        """Adds sums of other images, with the same standardisation.

        packed: as `packed` returns it. places: (c,) int, of its classes among those of this object.
        """
        ends = np.cumsum(np.arange(len(self.matrix) + 1))
        for i, row in enumerate(self.matrix):
            row[:i + 1] += packed['matrix'][ends[i]:ends[i + 1]]
        self.products[:, places] += packed['products']
        self.target[places] += packed['target']
        self.first += packed['first']
        self.weight += packed['weight']

    def equations(self):
        """Returns (_Ridge, right, (F, C)) of features and one-hot labels minus their means.

        The matrix of these sums is then the _Ridge's, until `restore` takes it back.
        """
        blas.ssyr(-1 / self.weight[0], self.first, a=self.matrix.T, overwrite_a=1)
        return _Ridge(self.matrix.T), (
            self.products - np.outer(self.first, self.target) / self.weight)

    def restore(self, ridge):
        np.fill_diagonal(self.matrix, ridge.diagonal)
        blas.ssyr(1 / self.weight[0], self.first, a=self.matrix.T, overwrite_a=1)

    def bias(self, kernel):
        """Returns (C,), to add to features @ kernel."""
        return (self.target - self.first @ kernel) / self.weight


def solve_many(features, cluster, trained):
    """Leaves a part of the images out, to find the strength, and then adds it.

    trained: whether training follows.
    Returns [(kernel, (F, C), for standardised features; bias, (C,); _Fitted)]: the best head and,
    if training follows, the one to train from.
    """
    def total(values):
        return float(cluster.total(np.array([np.sum(values, dtype=np.float64)]))[0])
    every = max(2, min(LEFT_OUT, len(features.numbers) // PIECE))
    z, labels = map(np.concatenate, zip(*features.pieces(features.numbers[::every])))
    number = total(np.ones(len(z)))
    mean = cluster.total(z.sum(axis=0, dtype=np.float64)) / number
    variance = sum(np.square(part - mean).sum(axis=0) for part in np.array_split(
        z, -(-len(z) // PIECE)))
    features.standardise(z, mean, np.sqrt(cluster.total(variance) / number))
    sums = Sums(features, cluster)
    sums.add(features.pieces(np.delete(features.numbers, slice(None, None, every))))
    ridge, right = sums.equations()
    square = float(ridge.diagonal.sum()) / float(sums.weight[0])

    def error_of(strength):
        kernel = ridge.solve(strength * square, right)
        if kernel is None:
            return [np.inf], strength
        return _fitted(z @ kernel + sums.bias(kernel), labels, features.weights, total), strength
    found = _at_best_strength(error_of, trained)
    sums.restore(ridge)
    sums.add([(z, labels)])
    ridge, right = sums.equations()
    kernels = [ridge.solve(strength * square, right) for _, strength in found]
    return [(kernel, sums.bias(kernel), fitted) for kernel, (fitted, _) in zip(kernels, found)]


def solve_sums(sums, images, held, views, trained):
    """Solves from sums alone, so that it does not matter which run has added which images.

    The strength minimises generalised cross-validation (Golub, Heath and Wahba, 1979), which needs
    the trace of an inverse: TRACED random vectors estimate it (Hutchinson, 1989). Of some images
    that are among those summed, the scores without each of them follow in closed form; their
    softmax gives the factor.
    sums: Sums. images: their number, without views. held: (features, (views * n, F), standardised;
    labels; how much each counts in the sums) of n images, view by view. trained: as in solve_many.
    Returns the same as solve_many. It takes the means out of the sums.
    """
    ridge, right = sums.equations()
    weight = float(sums.weight[0])
    square = float(ridge.diagonal.sum()) / weight
    whole = weight - float(np.sum(np.square(sums.target, dtype=np.float64))) / weight
    z, targets = held[0] - sums.first / sums.weight, one_hot(held[1], right.shape[1])
    random = np.random.RandomState(0).choice(np.float32([-1, 1]), (len(right), TRACED))
    if len(right) <= TRACED:  # unit vectors give the trace itself
        random = np.eye(len(right), dtype=np.float32) * TRACED ** 0.5

    def error_of(strength):
        strength *= square
        found = ridge.solve(strength, np.hstack([right, random]))
        if found is None:
            return [1e30 / strength], None, strength  # a stronger penalty is tried
        kernel, traced = np.split(found.astype(np.float64), [right.shape[1]], axis=1)
        freedom = 1 + len(right) - strength * np.sum(random * traced) / TRACED
        residual = whole - np.sum(kernel * right) - strength * np.sum(np.square(kernel))
        if freedom >= images or residual <= 0:
            return [1e30 / strength], None, strength
        return [residual / (1 - freedom / images) ** 2], kernel.astype(np.float32), strength

    def left_out(kernel, strength):
        inverse = ridge.solve(strength, z.T).reshape(len(right), views, -1)
        products = np.einsum('vif,fwi->ivw', z.reshape(views, -1, len(right)), inverse)
        counted = held[2].reshape(views, -1)[0][:, None, None]
        blocks = np.eye(views) - counted * (1 / weight + products)
        errors = (targets - z @ kernel - sums.target / weight).reshape(views, -1, targets.shape[1])
        errors = np.linalg.solve(blocks, errors.swapaxes(0, 1)).swapaxes(0, 1)
        return _fitted(targets - errors.reshape(targets.shape), held[1], np.ones(len(targets[0])))
    return [(kernel, sums.bias(kernel), left_out(kernel, strength))
            for _, kernel, strength in _at_best_strength(error_of, trained) if kernel is not None]
