"""Trains one network, task after task, in every way that drift.py compares."""

import itertools
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import scipy.linalg
import tensorflow as tf

from elastic.cache.prefix_cache import NoCache, PrefixCache
from elastic.compat import keras_stack
from elastic.networks.backbone import output_layer, statistics_from_batch
from elastic.planning.cache_offers import CacheOffers
from elastic.schemes.fixed import SCHEMES, fixed_mask
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.selection.items import rho_or_smallest
from elastic.settings import TRAINING
from elastic.steps.epoch import Diverged
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import WarmupCosine, optimizer_with
from elastic.steps.prefix_steps import PrefixSteps
from selection_solver_DP import choose_cached_tensors, choose_tensors

EPOCHS = 2        # of the new images of each task
FIRST_EPOCHS = 5  # of the first task, in full training, from which all rows start
PROBES = 2        # batches of each importance
WATCHED = (0.1, 0.3, 0.6)  # parts of a task after which old exams are looked at


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
FULL, ELASTIC, RANDOM, LAST = 'full', 'elastic 0.35', 'random 0.35', 'last 0.35'
ROWS = {row.label: row for row in [
    Row(label, keeps=False) for label in (NOTHING, STATISTICS, MEANS, SOLVED)] + [
    Row('head', 'traditional_tl_training'), Row('BN + bias', 'bn_plus_bias_training'),
    Row(FULL, 'full_training'), Row('elastic 0.5', TRAINING.importance, 0.5),
    Row(ELASTIC, TRAINING.importance, 0.35),
    Row(ELASTIC + ', cache', TRAINING.importance, 0.35, cached=True),
    Row(RANDOM, 'random', 0.35), Row(LAST, 'last', 0.35),
    Row('all at once', 'full_training', keeps=False, at_once='all'),
    Row('kept alone', 'full_training', at_once='kept')]}


class Kept:
    """Keeps up to `count` of the images seen so far, equally many of each class if it can.

    Each image draws a number once. Those with the smallest numbers of their class are kept, as in
    elastic/data/replay.py: a sample of all images of the class.
    """

    def __init__(self, count, seed):
        self._count, self._random = count, np.random.RandomState(seed)
        self.pixels, self._drawn = None, np.zeros(0)

    def add(self, new):
        pixels = self.pixels + new if self.pixels else new
        drawn = np.append(self._drawn, self._random.uniform(size=len(new)))
        order = np.argsort(drawn)
        rank = np.empty(len(drawn), int)  # within its class
        for label in np.unique(pixels.labels):
            members = order[pixels.labels[order] == label]
            rank[members] = np.arange(len(members))
        chosen = np.lexsort((drawn, rank))[:self._count]
        self.pixels, self._drawn = pixels.only(chosen), drawn[chosen]


class Mixture:
    """Mixes new and kept Pixels, half and half, in each batch. A prefix cache takes it as data.

    It has only as many kept images as one epoch needs. seed: list of int.
    """

    def __init__(self, new, kept, batch_size, seed):
        each = batch_size // 2 if kept else batch_size
        self._seed, self._steps = seed, len(new) // each
        new, old = new.only(np.arange(self._steps * each)), self._steps * (batch_size - each)
        self._numbers = np.arange(len(new)), len(new) + np.arange(old)
        self._pixels = new + kept.only(np.resize(np.random.RandomState(seed).permutation(
            len(kept)), old)) if kept else new
        self.num_images, shape = len(self._pixels), (batch_size,) + new.images.shape[1:]
        self.train = SimpleNamespace(element_spec=(tf.TensorSpec(shape, tf.float32),
                                                   tf.TensorSpec(shape[:1], tf.int32)))

    def view(self, epoch):
        return 0

    def order(self, epoch):
        """Returns the numbers of the images of a pass, (steps, B) int64."""
        random = np.random.RandomState(self._seed + [epoch])
        return np.concatenate([random.permutation(part).reshape(self._steps, -1)
                               for part in self._numbers], axis=1)

    def batches(self, numbers, view):
        for row in numbers:
            some = self._pixels.only(row)
            yield tf.constant(some.images, tf.float32), tf.constant(some.labels, tf.int32)


def outputs_of(model):
    """Returns a function (n, S, S, 3) uint8 -> (features that the head reads, logits)."""
    size = tuple(model.inputs[0].shape[1:])
    both = tf.keras.Model(model.inputs, [output_layer(model).input, model.outputs[0]])
    return tf.function(lambda images: both(tf.cast(images, tf.float32), training=False),
                       input_signature=[tf.TensorSpec((None,) + size, tf.uint8)])


class Learner:
    """Trains one network by all rows. Its step is traced once; each run starts over.

    model: keras.Model of images, to (B, C) logits. table: its TensorTimings.
    folder: of a prefix cache that does not fit into memory.
    """

    def __init__(self, model, table, batch_size, folder):
        self.model, self.table, self.batch_size, self._folder = model, table, batch_size, folder
        self._schedule = WarmupCosine(1.0, 10 ** 9, scaled=True)  # the scale is the rate
        optimizer = optimizer_with('sgd', self._schedule, model.trainable_variables)
        size = tuple(model.inputs[0].shape[1:])
        batch = tf.zeros((batch_size,) + size), tf.zeros((batch_size,), tf.int32)
        self.maker = StepMaker(model, optimizer, TRAINING.weight_decay, *batch)
        self._evaluator, self._prefixes = Evaluator(self.maker), PrefixSteps(self.maker)
        evaluate_importance(model, optimizer, [batch], evaluator=self._evaluator)  # compiles
        self._steps, self._cuts, self._measured = {}, {}, {}
        self.classes = int(model.outputs[0].shape[-1])
        self._first, self._head = self.weights, output_layer(model).weights[0]
        self.run = outputs_of(model)

    @property
    def weights(self):
        return [variable.numpy() for variable in self.maker.everything]

    def restart(self, seed, weights=None):
        """Starts over: from `weights`, or from the first ones and a head drawn from the seed."""
        self.maker.assign(weights or self._first)
        self._evaluator.scale = 1.0
        self._evaluator.memory.clear()
        self._evaluator.random.seed(seed)
        if weights is None:
            keras_stack.assign_arrays([self._head], [np.random.RandomState(seed).normal(
                0, self._head.shape[0] ** -0.5, self._head.shape).astype(np.float32)])

    def predict(self, images):
        return self.run(images)[1].numpy().argmax(axis=1)

    def adapt_statistics(self, pixels):
        """Sets the statistics of batch normalization to those of these images (AdaBN)."""
        statistics_from_batch(self.model, tf.constant(pixels.images, tf.float32))

    def train(self, row, new, kept, seed, share_of, rate, watch=lambda: None):
        """Trains on one task; returns (seconds, steps).

        kept: Pixels or None. share_of: (seconds, steps) -> share of the task, which ends at 1.
        rate: the first learning rate, of a cosine. watch: called at WATCHED shares, outside the
        time. Making a step, and compiling it in its first call, are left out of the time: they take
        the same in every row, and next to nothing in a longer task.
        """
        data = Mixture(new, kept, self.batch_size, seed)
        for slot in keras_stack.momenta(self.maker.optimizer, self.model.trainable_variables):
            slot.assign(tf.zeros_like(slot))
        self._schedule.scale.assign(rate)
        cache, begin = self._cache(row, data), time.perf_counter()
        mask, table = self._chosen(row, data, cache)
        seconds, steps, owed, due = time.perf_counter() - begin, 0, 0, list(WATCHED)
        step = self._step(mask)
        if row.cached:
            cache.begin(step, table)
        begin = time.perf_counter()
        for call in itertools.chain.from_iterable(
                cache.calls(step, epoch) for epoch in itertools.count(1)):
            share = share_of(seconds, steps)
            if share >= 1:
                break
            self._schedule.scale.assign(rate * (1 + np.cos(np.pi * share)) / 2)
            loss = float(call.run().loss)
            if not np.isfinite(loss):
                raise Diverged('{}: the loss is {} at rate {:g}'.format(row.label, loss, rate))
            owed, steps = owed + 1, steps + 1
            if call.step.compiled:  # the time of first calls is that of the next one
                seconds, owed = seconds + owed * (time.perf_counter() - begin), 0
            call.step.compiled = True
            while due and share_of(seconds, steps) >= due[0]:
                del due[0]
                watch()
            begin = time.perf_counter()
        cache.end()
        return seconds, steps

    def _cache(self, row, data):
        if not row.cached:
            return NoCache(data)
        cache = PrefixCache(data, self._folder, measured=self._measured)
        cache.prefixes, cache.chain_cuts = self._prefixes, self._cuts
        cache.copying(np.ones(1))  # measures once what copying takes
        return cache

    def _chosen(self, row, data, cache):
        """Returns the (N,) bool mask of a task, and the TensorTimings with the cost of its cache."""
        if row.trains in SCHEMES:
            return fixed_mask(row.trains, self.model), None
        table = self.table
        if row.trains == 'last':
            masks = [table.depth <= depth for depth in range(len(table.depth))]
            return [mask for mask in masks if mask is masks[0] or table.step_time(mask)
                    <= row.rho * table.t_step][-1], None
        importance = evaluate_importance(
            self.model, self.maker.optimizer, data.batches(data.order(0)[:PROBES], 0), row.trains,
            self._evaluator)
        if row.cached:
            mask, _, table = choose_cached_tensors(
                CacheOffers(cache, table, 1, EPOCHS + 1), importance, row.rho)
            return mask, table
        return choose_tensors(table, importance, rho_or_smallest(table, row.rho))[0], None

    def _step(self, mask):
        key = mask.tobytes()
        if key not in self._steps:
            if len(self._steps) > 8:  # most are of selections that have passed
                self._steps.clear()
            self._steps[key] = self.maker.step(mask)
        return self._steps[key]


class Means:
    """Classifies by the nearest class mean, on features that never change.

    run: (n, S, S, 3) uint8 -> (features, (n, F); logits).
    """

    def __init__(self, run, classes):
        self._run, self._sums, self._counts = run, 0.0, np.zeros(classes)

    @property
    def nbytes(self):
        return self._sums.nbytes

    def learn(self, new):
        chosen = np.eye(len(self._counts), dtype=np.float32)[new.labels]  # (n, C)
        self._sums = self._sums + chosen.T @ self._run(new.images)[0].numpy()
        self._counts += chosen.sum(axis=0)

    def predict(self, images):
        seen = np.flatnonzero(self._counts)
        means = self._sums[seen] / self._counts[seen, None]
        return seen[np.argmax(self._run(images)[0].numpy() @ means.T
                              - np.square(means).sum(axis=1) / 2, axis=1)]


class Solved:
    """Solves the head of all stages from sums over all images so far, in a forward pass of each.

    run: as Means takes it, of a model whose features are those of all stages.
    """

    def __init__(self, run, classes):
        self._run, self._classes, self._moments = run, classes, None

    def _standardised(self, images):
        features = self._run(images)[0].numpy()
        if self._moments is None:
            deviation = features.std(axis=0)
            self._moments = features.mean(axis=0), np.maximum(deviation, 0.1 * np.median(deviation))
        features = (features - self._moments[0]) / self._moments[1]
        return np.append(features, np.ones((len(images), 1), np.float32), axis=1)

    def learn(self, new):
        first = self._moments is None
        z, chosen = self._standardised(new.images), np.eye(
            self._classes, dtype=np.float32)[new.labels]
        found = [z.T @ z, z.T @ chosen]
        self._sums = found if first else [old + more for old, more in zip(self._sums, found)]
        products, right = self._sums
        self._head = scipy.linalg.solve(products + np.diag(np.full(
            len(products), np.float32(0.3 * np.trace(products) / len(products)))), right,
            assume_a='pos')

    @property
    def nbytes(self):
        return sum(each.nbytes for each in self._sums)

    def predict(self, images):
        return (self._standardised(images) @ self._head).argmax(axis=1)
