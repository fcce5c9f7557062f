"""Keeps the sums that a solved head is computed from; a run that continues adds its images to them.

Ridge regression on frozen features needs only the sums of x xT and of x yT over the images. So a
head that is solved again and again, with new images and classes, is that of all images at once, and
no image need be kept (RanPAC, arXiv 2307.02251, and earlier analytic learning). Sums can be added
only if both are of the same features: of the same body, standardised by the constants of the first
run. The strength of the penalty is found from the sums as well (ridge.solve_sums).

checkpoint/statistics.npz holds them in float32, as they are added up: F (F + 3) / 2 numbers and a
few per class for F features, 34 MB for 4,096.
"""

import hashlib
import os
from typing import Mapping, NamedTuple, Sequence

import numpy as np

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.files import read_npz, write_npz
from elastic.networks.backbone import output_layer
from elastic.networks.stages import standardisation
from elastic.schemes.ridge import PIECE, Sums, solve_sums
from elastic.schemes.solved_head import Features, check_classes, take_head

FILE = os.path.join('checkpoint', 'statistics.npz')  # in the folder of a run
FORMAT = 'elastic-statistics-1'


class Statistics(NamedTuple):
    """Holds what was summed up over all images of a run and of those before it.

    sums: as Sums.packed returns them. class_names: in their order. images: their number.
    mean, deviation: (F,) float32, by which features were standardised. body: as body_of.
    """
    sums: Mapping[str, np.ndarray]
    class_names: Sequence[str]
    images: int
    mean: np.ndarray
    deviation: np.ndarray
    body: str


def body_of(model):
    """Returns a hash of all weights before the output layer, without the standardisation."""
    own = output_layer(model).weights + standardisation(model).weights
    apart, found = {id(keras_stack.raw(weight)) for weight in own}, hashlib.sha256()
    for weight in map(keras_stack.raw, model.weights):
        if id(weight) not in apart:
            found.update(weight.numpy().tobytes())
    return found.hexdigest()


def write(folder, statistics):
    """Writes the Statistics of the run in `folder`; returns the path."""
    others = {name: np.array(getattr(statistics, name)) for name in Statistics._fields[1:]}
    path = os.path.join(folder, FILE)
    write_npz(path, FORMAT, dict(statistics.sums, **others))
    return path


def read(folder):
    """Returns the Statistics of the run in `folder`; None if it is None or has none.

    Raises UserError for a file that is damaged.
    """
    path = folder and os.path.join(folder, FILE)
    if not path or not os.path.exists(path):
        return None
    arrays = read_npz(path, FORMAT)
    return Statistics(
        {name: arrays[name] for name in Sums.NAMES}, tuple(arrays['class_names'].tolist()),
        int(arrays['images']), arrays['mean'], arrays['deviation'], str(arrays['body']))


def fits(statistics, model):
    """Returns whether sums are of the features that this model has. statistics: or None."""
    return statistics is not None and statistics.body == body_of(model)


def _stand_in(dataset):
    """Returns whether kept images stand for earlier runs: no class is left without images."""
    return dataset.num_old and len(np.unique(dataset.labels)) == dataset.num_classes


def check(model, dataset, folder):
    """Raises UserError if a continued run cannot solve its head for the old classes as well.

    folder: of the run before. Prints a line if kept images stand in for its sums.
    """
    before = read(folder)
    if not fits(before, model):
        why = 'run {} {}'.format(folder, 'has kept no sums' if before is None else
                                 'has trained other layers since its sums were kept')
        if not _stand_in(dataset):
            raise UserError('--keep_statistics: {}, so a solved head would lose the classes that '
                            'have no images now: leave it out, or keep images with --replay'
                            .format(why))
        print('{}: its {:,} kept images stand for all it has seen'.format(why, dataset.num_old))


def solve(model, dataset, cluster, pause, trained, folder):
    """Solves the output layer for the images of this run and of those before it.

    folder: of the run before, or None. The other arguments and what is returned first are those of
    solved_head.solve_head; the third value is the Statistics of all images.
    """
    features = Features(model, dataset, pause)
    found, sums, held = _collect(features, model, dataset, read(folder))
    check_classes(sums.target)
    heads = solve_sums(sums, found.images, held, features.views, trained)
    return take_head(model, features, heads, cluster) + (found,)


def collect(model, dataset, folder):
    """Returns the Statistics of the model as it is; changes nothing. folder: as in solve.

    Returns None, and says why, if neither fitting sums nor images of all classes are left.
    """
    before = read(folder)
    if folder is not None and not fits(before, model) and not _stand_in(dataset):
        print('no sums are kept: this run has trained other layers than the head, and a class of '
              'earlier runs has no images left to sum up again (--replay)')
        return None
    layer = standardisation(model)
    constants = [weight.numpy() for weight in layer.weights]
    try:
        return _collect(Features(model, dataset, lambda: None), model, dataset, before)[0]
    finally:
        keras_stack.assign_arrays(layer.weights, constants)


def _collect(features, model, dataset, before):
    """Returns (Statistics, Sums of all images, held images as in solve_sums).

    Kept images are among the sums of earlier runs. Where these do not fit, a kept image stands for
    as many of its class as were summed there.
    """
    added, new = fits(before, model), dataset.num_images - dataset.num_old
    first, rest = features.numbers[:PIECE], features.numbers[PIECE:]
    z, labels = map(np.concatenate, zip(*features.pieces(first)))
    mean, deviation = (before.mean, before.deviation) if added else (z.mean(axis=0), z.std(axis=0))
    features.standardise(z, mean, deviation)
    sums, is_new = Sums(features), np.tile(first < new, features.views)
    sums.add([(z[is_new], labels[is_new])])
    sums.add(features.pieces(rest[rest < new]))
    images, times = new, np.ones(dataset.num_classes, np.float32)
    if added:
        sums.include(before.sums, [dataset.class_names.index(name) for name in before.class_names])
        images += before.images
    elif dataset.num_old:
        kept = features.views * np.bincount(dataset.labels[new:], minlength=dataset.num_classes)
        summed = dict(zip(before.class_names, before.sums['target'])) if before else {}
        for place, name in enumerate(dataset.class_names):
            times[place] = max(1, summed.get(name, 0) / max(1, kept[place]))
        features.weights = times
        sums.add([(z[~is_new], labels[~is_new])])
        sums.add(features.pieces(rest[rest >= new]))
        images += dataset.num_old  # no more are independent
    return Statistics(sums.packed(), dataset.class_names, images, features.mean, features.deviation,
                      body_of(model)), sums, (z, labels, np.where(is_new, 1, times[labels]))
