"""Lists the rows of drift.py, and makes its streams: tasks whose images arrive one by one."""

import os
from typing import NamedTuple

import _path
import numpy as np
from _solar_cells import kinds_of_cells, write_cells

from elastic.errors import UserError
from elastic.settings import LOGS_DIR, TRAINING, DataSettings

EPOCHS = 8  # of the new images of each task; after 2, training on all at once is no upper bound
NIGHT = 10  # tasks in which it gets dark
EXAM_SEED = 1797  # exams are the same for every seed
CELLS = os.path.join(_path.ROOT, LOGS_DIR, 'solar_cells')


class Row(NamedTuple):
    """Describes a way to train.

    trains: a fixed scheme; 'last', the tensors nearest to the output; or a metric of metrics.py.
    rho: budget of a step. cached: whether there is a prefix cache. keeps: whether it takes kept
    images. at_once: what it trains on in one training at the end, 'all' or 'kept'; None: by tasks.
    """
    label: str
    trains: str = None
    rho: float = None
    cached: bool = False
    keeps: bool = True
    at_once: str = None


NOTHING, STATISTICS, MEANS, SOLVED = 'nothing', 'AdaBN', 'class means', 'solved head'
HEAD, FULL, HALF, ELASTIC, RANDOM, LAST = (
    'head', 'full', 'elastic 0.5', 'elastic 0.35', 'random 0.35', 'last 0.35')
ROWS = {row.label: row for row in [
    Row(label, keeps=False) for label in (NOTHING, STATISTICS, MEANS, SOLVED)] + [
    Row(HEAD, 'traditional_tl_training'), Row('BN + bias', 'bn_plus_bias_training'),
    Row(FULL, 'full_training'), Row(HALF, TRAINING.importance, 0.5),
    Row(ELASTIC, TRAINING.importance, 0.35),
    Row(ELASTIC + ', cache', TRAINING.importance, 0.35, cached=True),
    Row(RANDOM, 'random', 0.35), Row(LAST, 'last', 0.35),
    Row('all at once', 'full_training', keeps=False, at_once='all'),
    Row('kept alone', 'full_training', at_once='kept')]}


class Pixels:
    """Holds images, (n, S, S, 3) uint8, and labels, (n,) int32."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __add__(self, other):
        return Pixels(np.append(self.images, other.images, axis=0),
                      np.append(self.labels, other.labels))

    def only(self, numbers):
        return Pixels(self.images[numbers], self.labels[numbers])


class Task(NamedTuple):
    """Holds what arrives at once: the Pixels to train on, and those that test it, its exam."""
    new: Pixels
    exam: Pixels

    def changed(self, change, *more):
        return Task(*(Pixels(change(each.images, *more), each.labels) for each in self))


class Source(NamedTuple):
    """Says what streams are made of.

    dataset: name of a data set. input_size: S, pixels. count: new images of a task. exam: images of
    an exam. tuning: whether exams are of training images that no task has.
    """
    dataset: str
    input_size: int
    count: int
    exam: int
    tuning: bool = False

    def tasks(self, random, number=1, wanted=lambda split: split.labels() >= 0):
        """Returns Tasks of different images, and one exam. wanted: Split -> (n,) bool, of these."""
        from elastic.data.images import load_images
        images = load_images(self.dataset, self.input_size, DataSettings())
        found, needed = random.permutation(np.flatnonzero(wanted(images.train))), (
            number * self.count)
        left = found[needed:] if self.tuning else np.flatnonzero(wanted(images.test))
        if len(found) < needed or not len(left):
            raise UserError('{} has {} images for {} tasks: use a smaller --images'.format(
                self.dataset, len(found), number))
        exam = (images.train if self.tuning else images.test).only(left)
        exam = exam.subset(min(self.exam, exam.size), 'images of an exam')
        exam = _decoded(exam, np.random.RandomState(EXAM_SEED).permutation(exam.size))
        return [Task(_decoded(images.train, part), exam)
                for part in np.split(found[:needed], number)]


def _decoded(split, numbers):
    split = split.only(numbers).decoded(True, 'images')
    return Pixels(np.array(split.fetch(np.arange(split.size))), split.labels())


# ---------------------------------------------------------------- what changes: uint8 images

def upright(images, _):
    return images


def turned(images, _):
    from scipy import ndimage
    return ndimage.rotate(images, 30, axes=(1, 2), reshape=False, order=1)


def dark(images, _):
    return (0.25 * images).astype(np.uint8)


def blurred(images, _):
    from scipy import ndimage
    wide = images.shape[1] / 20  # pixels
    return ndimage.gaussian_filter(images, (0, wide, wide, 0))


def noisy(images, random, level=60.0):
    noise = random.normal(0, level, images.shape[:3] + (1,))
    return np.clip(images + noise, 0, 255).astype(np.uint8)


def night(images, random, number):
    return noisy((1 - 0.08 * number) * images, random, 6.0 * number)


# ---------------------------------------------------------------- (Source, random) -> [Task]

def domains(source, random):
    """Upright, turned, dark, blurred, noisy, upright again."""
    changes = (upright, turned, dark, blurred, noisy, upright)
    return [task.changed(change, random)
            for change, task in zip(changes, source.tasks(random, len(changes)))]


def classes(source, random):
    """Two more classes in each task."""
    return [source.tasks(random, 1, lambda split, pair=pair: np.isin(split.labels(), pair))[0]
            for pair in random.permutation(10).reshape(5, 2)]


def gradual(source, random):
    """It gets darker and noisier over ten tasks; each is also tested by the next one's exam."""
    return [task.changed(night, random, number)
            for number, task in enumerate(source.tasks(random, NIGHT))]


def solar(source, random):
    """Solar cells of monocrystalline, then of polycrystalline modules: functional or not."""
    write_cells(CELLS)
    source, kinds = source._replace(dataset='folder:' + CELLS), kinds_of_cells()
    return [source.tasks(random, 1, lambda split, kind=kind: np.array(
        [kinds[os.path.basename(file)] == kind for file in split.files]))[0]
        for kind in ('mono', 'poly')]


STREAMS = {stream.__name__: stream for stream in (domains, classes, gradual, solar)}
CLASSES = {'solar': 2}  # width of the head; others: 10
AHEAD = ('gradual',)  # streams in which each task is also tested by the next one's exam
