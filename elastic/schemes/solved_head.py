"""Solves the output layer in closed form: ridge regression on the features of all training images.

One forward pass gives the features (networks/stages.py). The scores of each class are regressed on
its one-hot labels. One factor makes the softmax of the scores fit images that were left out, and
the strength of the penalty is the one whose softmax fits these best (ridge.py).
"""

import time

import numpy as np
from tqdm import tqdm

from elastic.compat import keras_stack
from elastic.device.host import MEMORY_SHARE, available_bytes
from elastic.errors import UserError
from elastic.networks.backbone import backbone_of, output_layer
from elastic.networks.stages import standardisation
from elastic.schemes.ridge import PIECE, is_many, needed_bytes, solve_few, solve_many
from elastic.steps.epoch import SOLVE, EpochResult

VIEWS = 2  # augmented versions of each image
LEAST_DEVIATION = 0.1  # of the median one: a feature that hardly varies would steer its stage
# Mean square of the features of an image after scaling: with more, a usual first step of the output
# layer goes too far; with less, the layer learns more slowly than the others.
SQUARE = 32.0
CHECKED = 32  # images whose features are looked at before anything begins
TRIED = 4  # steps that must not raise the loss, at the rate that training begins with
RISE = 1.02  # of the loss, by rounding and because a step is of one batch
HALVINGS = 20


def views_of(dataset):
    """Returns the number of views of each image that the head is solved for."""
    return 1 if dataset.augmentation == 'none' else VIEWS


def solve_head(model, dataset, cluster, pause=lambda: None, trained=False):
    """Solves the output layer of a model from models.build_model, for standardised features.

    dataset: datasets.Dataset, whose weights of classes count. cluster: workers.cluster.Cluster.
    pause: called after each batch; it may raise. trained: whether training follows.
    Returns (EpochResult, with loss and accuracy on the images left out; the values of the output
    layer that training starts from, [kernel, bias], None without it).
    Raises UserError if features are not finite, if none varies, or if all images are of one class.
    """
    features = Features(model, dataset, pause)
    many = cluster.size > 1 or is_many(dataset.num_images * features.views, features.count)
    solve = solve_many if many else solve_few
    with cluster.watched():
        check_classes(cluster.total(np.bincount(dataset.labels, minlength=features.classes)))
        heads = solve(features, cluster, trained)
        return take_head(model, features, heads, cluster)


def take_head(model, features, heads, cluster):
    """Gives the model the first of these heads; returns the same as solve_head.

    heads: one or two, as ridge.solve_many returns them.
    """
    values = cluster.of_chief(lambda: [
        [fitted.factor / features.scale * weights, fitted.factor * bias]
        for weights, bias, fitted in heads])
    features.keep()
    keras_stack.assign_arrays(output_layer(model).weights, values[0])
    best = heads[0][-1]
    return EpochResult(best.loss, best.accuracy, 0.0, {SOLVE: features.ms}, {SOLVE: [0.0]},
                       0.0), values[1] if len(values) > 1 else None


def features_in_memory(most, images, room=None):
    """Returns `most`, halved until the solver fits into the memory that is free; says so in a line.

    images: number of those that the head is solved for. room: bytes; default: a share of the free.
    """
    room, fitting = room or MEMORY_SHARE * available_bytes(), most
    while fitting > 1 and needed_bytes(VIEWS * images, fitting) > room:
        fitting //= 2
    if fitting < most:
        print('memory is short: the head reads at most {:,} features instead of {:,}, and may lose '
              'accuracy (docs/head.md); close other programs and start over, to have all'.format(
                  fitting, most))
    return fitting


def check_features(model, dataset):
    """Raises UserError if the first images show that the features cannot tell images apart."""
    numbers = dataset.order(1)
    batches = dataset.batches(numbers[:-(-CHECKED // numbers.shape[1])], dataset.view(1))
    infer = backbone_of(model).infer
    features = np.concatenate([infer(images).numpy() for images, _ in batches])
    _check_finite(features)
    _check_varying(features.std(axis=0))


def standardise(model, dataset, cluster):
    """Standardises the features of a model with a random head, by PIECE images, unless they are."""
    if not standardisation(model).weights[0].numpy().any():
        features = Features(model, dataset, lambda: None)
        with cluster.watched():
            z, _ = next(features.pieces(features.numbers[:PIECE]))
            features.standardise(z, *cluster.of_chief(lambda: [z.mean(axis=0), z.std(axis=0)]))
        features.keep()


def safe_scale(step, scale, batches, evaluate, maker, cluster):
    """Halves the rates of a schedule until the first steps do not raise the loss of their batches.

    A solved head may weigh features that hardly vary so much that a usual step throws the layers
    before it far off. Where one halving was needed, one more is made, as dropout draws other noise
    in each step. Nothing else is left changed. Returns the scale that is in use then.
    step: MaskedStep of `maker`. scale: the tf.Variable of optimizer.WarmupCosine. batches: [(
    inputs, labels)]. evaluate: from training_step.evaluation_function.
    """
    def loss(count):
        return cluster.mean(np.array(sum(float(evaluate(*batch)[0]) for batch in batches[:count])))
    first_before, all_before = loss(1), loss(len(batches))
    for halvings in range(HALVINGS):
        scale.assign(0.5 ** halvings)
        with keras_stack.restored_afterwards(maker.everything):
            step(*batches[0])
            rise = loss(1) / first_before
            for batch in batches[1:]:
                step(*batch)
            rise = np.maximum(rise, loss(len(batches)) / all_before)
        if rise < RISE:  # not if one is not a number
            scale.assign(0.5 ** (halvings + (halvings > 0)))
            break
    return float(scale)


def check_classes(counts):
    """Raises UserError unless there are images of two classes. counts: (C,), images of each."""
    if np.count_nonzero(counts) < 2:
        raise UserError('all training images are of one class: there is nothing that '
                        '--head_start solved could tell apart')


def _check_finite(features):
    if not np.isfinite(features).all():
        raise UserError('{} of {} features are not finite numbers: --head_start solved needs a '
                        'network that computes only finite ones'.format(
                            (~np.isfinite(features)).any(axis=0).sum(), features.shape[1]))


def _check_varying(deviation):
    if not deviation.any():
        raise UserError('all {} features are the same for every training image: --head_start '
                        'solved cannot tell the classes apart'.format(len(deviation)))


class Features:
    """Runs the network on the training images: one forward pass, for each view.

    pause: called after each batch; it may raise.
    weights: (C,) float32, of the classes. scale: factor of standardised features; after
    `standardise`, what the output layer reads is this times (features - mean) / deviation.
    mean, deviation: (F,), that are subtracted, and divided by. ms: of each batch.
    """

    def __init__(self, model, dataset, pause):
        self._layer, self._dataset, self._pause = standardisation(model), dataset, pause
        self.count, self.classes = int(self._layer.weights[0].shape[0]), dataset.num_classes
        keras_stack.assign_arrays(self._layer.weights, [
            np.zeros(self.count, np.float32), np.ones(self.count, np.float32)])
        self._infer = backbone_of(model).infer
        self._batch_size = int(dataset.train.element_spec[0].shape[0])
        self.views = views_of(dataset)
        self.weights = np.ones(self.classes, np.float32) if dataset.class_weight is None else (
            dataset.class_weight.astype(np.float32))
        self.numbers = np.random.RandomState(0).permutation(dataset.num_images)
        self.scale, self.ms = np.float32((SQUARE / self.count) ** 0.5), []
        self.mean, self.deviation = np.float32(0), np.float32(1)
        self._bar = tqdm(total=self.views * -(-len(self.numbers) // self._batch_size),
                         desc='features', unit='batch', leave=False, disable=None, mininterval=0.5)

    def pieces(self, numbers):
        """Yields (features, (n, F) float32, standardised; labels, (n,)) of images, view by view.

        numbers: of the images. n: at most PIECE, unless a batch has more.
        """
        size, found = self._batch_size, []
        if not len(numbers):
            return
        whole = np.resize(numbers, (-(-len(numbers) // size), size))  # the last batch is filled up
        for view in range(self.views):
            begin, left = time.perf_counter(), len(numbers)
            for images, labels in self._dataset.batches(whole, view):
                found.append((self._infer(images).numpy()[:left], labels.numpy()[:left]))
                left -= len(found[-1][1])
                self.ms.append(1e3 * (time.perf_counter() - begin))
                self._bar.update()
                self._pause()
                if len(found) * size + size > PIECE or not left:
                    yield self._joined(found)
                    found = []
                begin = time.perf_counter()
        if self._bar.n >= self._bar.total:
            self._bar.close()

    def _joined(self, found):
        features, labels = map(np.concatenate, zip(*found))
        _check_finite(features)
        features -= self.mean
        features /= self.deviation
        return features, labels

    def standardise(self, z, mean, deviation):
        """Standardises z, (n, F), in place, and what `pieces` yields from now on.

        mean, deviation: (F,), of features that were not standardised, as those in z.
        """
        _check_varying(deviation)
        least = LEAST_DEVIATION * np.median(deviation[deviation > 0])
        self.mean = mean.astype(np.float32)
        self.deviation = np.maximum(deviation, least).astype(np.float32)
        z -= self.mean
        z /= self.deviation

    def keep(self):
        """Lets the network itself standardise its features."""
        keras_stack.assign_arrays(self._layer.weights, [
            self.mean, np.square(self.deviation / self.scale)])
