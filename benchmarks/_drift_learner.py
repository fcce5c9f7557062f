"""Trains one network, task after task, by the rows of drift.py (_drift_streams.py)."""

import itertools
import os
import time
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from _drift_streams import EPOCHS

from elastic.cache.prefix_cache import NoCache, PrefixCache
from elastic.compat import keras_stack
from elastic.networks.backbone import output_layer, statistics_from_batch
from elastic.planning.cache_offers import CacheOffers
from elastic.schemes import statistics
from elastic.schemes.fixed import SCHEMES, fixed_mask
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.selection.items import rho_or_smallest
from elastic.settings import TRAINING
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import WarmupCosine, optimizer_with
from elastic.steps.prefix_steps import PrefixSteps
from elastic.workers.cluster import ALONE
from selection_solver_DP import choose_cached_tensors, choose_tensors

WARM = 0.15  # share of a task in which the rate rises: full steps at once can kill the network
WATCHED = (0.1, 0.3, 0.6)  # shares of a task after which old exams are looked at


class Kept:
    """Keeps up to `count` of the images seen so far, of each class equally many if it can.

    Each image draws a number once. Those with the smallest numbers of their class are kept, as in
    elastic/data/replay.py: a sample of all images of the class.
    """

    def __init__(self, count, seed):
        self._count, self._random = count, np.random.RandomState(seed)
        self.pixels, self._drawn = None, np.zeros(0)

    def add(self, new):
        pixels = self.pixels + new if self.pixels else new
        drawn = np.append(self._drawn, self._random.uniform(size=len(new)))
        order, rank = np.argsort(drawn), np.empty(len(drawn), int)  # rank: within the class
        for label in np.unique(pixels.labels):
            members = order[pixels.labels[order] == label]
            rank[members] = np.arange(len(members))
        chosen = np.lexsort((drawn, rank))[:self._count]
        self.pixels, self._drawn = pixels.only(chosen), drawn[chosen]


class Mixture:
    """Stands for a datasets.Dataset: each batch is half new, half kept Pixels, if there are any.

    It has only as many kept images as one epoch needs. seed: list of int.
    """
    augmentation, class_weight, num_old = 'none', None, 0

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
        random = np.random.RandomState(self._seed + [epoch])
        return np.concatenate([random.permutation(part).reshape(self._steps, -1)
                               for part in self._numbers], axis=1)

    def batches(self, numbers, view):
        for row in numbers:
            some = self._pixels.only(row)
            yield tf.constant(some.images, tf.float32), tf.constant(some.labels, tf.int32)


class Predictor:
    """Predicts the labels of images, (n, S, S, 3) uint8. nbytes: kept beside the network."""
    nbytes = 0

    def __init__(self, model):
        self.model, self.classes = model, int(model.outputs[0].shape[-1])
        both = tf.keras.Model(model.inputs, [output_layer(model).input, model.outputs[0]])
        self.outputs = tf.function(
            lambda images: both(tf.cast(images, tf.float32), training=False), input_signature=[
                tf.TensorSpec((None,) + tuple(model.inputs[0].shape[1:]), tf.uint8)])

    def predict(self, images):
        return self.outputs(images)[1].numpy().argmax(axis=1)


class Learner(Predictor):
    """Trains one network by all rows. Its step is traced once; each run starts over.

    model: keras.Model from models.build_model. table: its TensorTimings. folder: of a prefix cache
    that does not fit into memory.
    """

    def __init__(self, model, table, batch_size, folder):
        super().__init__(model)
        self.table, self.batch_size, self._folder = table, batch_size, folder
        self._schedule = WarmupCosine(1.0, 10 ** 9, scaled=True)  # the scale is the rate
        optimizer = optimizer_with('sgd', self._schedule, model.trainable_variables)
        batch = tf.zeros((batch_size,) + tuple(model.inputs[0].shape[1:])), tf.zeros(
            (batch_size,), tf.int32)
        self.maker = StepMaker(model, optimizer, TRAINING.weight_decay, *batch)
        self._evaluator, self._prefixes = Evaluator(self.maker), PrefixSteps(self.maker)
        evaluate_importance(model, optimizer, [batch], evaluator=self._evaluator)  # compiles
        self._steps, self._cuts, self._measured = {}, {}, {}
        self._first, self._head = self.weights, output_layer(model).weights[0]

    @property
    def weights(self):
        return [variable.numpy() for variable in self.maker.everything]

    def restart(self, seed, weights=None):
        """Starts over: from `weights`, or from the first ones and a head drawn from the seed."""
        self.maker.assign(weights or self._first)
        self._evaluator.scale = 1.0
        self._evaluator.random.seed(seed)
        if weights is None:
            keras_stack.assign_arrays([self._head], [np.random.RandomState(seed).normal(
                0, self._head.shape[0] ** -0.5, self._head.shape).astype(np.float32)])

    def adapt_statistics(self, new):
        """Sets the statistics of batch normalization to those of these images (AdaBN)."""
        statistics_from_batch(self.model, tf.constant(new.images, tf.float32))

    def train(self, row, new, kept, seed, share_of, rate, watch=lambda: None):
        """Trains on one task; returns (seconds, steps).

        kept: Pixels or None. share_of: (seconds, steps) -> share of the task, which ends at 1.
        rate: the highest learning rate. watch: called at WATCHED shares, outside the
        time. A first call compiles its step; it counts as long as the next one.
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
            self._schedule.scale.assign(rate * (1 + np.cos(np.pi * share)) / 2
                                        * min(1.0, (share + 0.01) / WARM))
            if not np.isfinite(float(call.run().loss)):
                break  # the exams will show it
            owed, steps = owed + 1, steps + 1
            if call.step.compiled:
                seconds, owed = seconds + owed * (time.perf_counter() - begin), 0
            call.step.compiled = True
            if due and share_of(seconds, steps) >= due[0]:
                due = [share for share in due if share > share_of(seconds, steps)]
                watch()
            begin = time.perf_counter()
        cache.end()
        return seconds, steps

    def _cache(self, row, data):
        if not row.cached:
            return NoCache(data)
        cache = PrefixCache(data, self._folder, measured=self._measured)
        cache.prefixes, cache.chain_cuts = self._prefixes, self._cuts
        cache.copying(np.ones(1))  # measures copying, the first time
        return cache

    def _chosen(self, row, data, cache):
        """Returns the (N,) bool mask of a task; with a cache, also the TensorTimings of its cut."""
        if row.trains in SCHEMES:
            return fixed_mask(row.trains, self.model), None
        table = self.table
        if row.trains == 'last':
            masks = [table.depth <= depth for depth in range(len(table.depth))]
            return [mask for mask in masks if mask is masks[0] or table.step_time(mask)
                    <= row.rho * table.t_step][-1], None
        importance = np.nan_to_num(evaluate_importance(
            self.model, self.maker.optimizer, data.batches(data.order(0)[:1], 0), row.trains,
            self._evaluator))
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


class Means(Predictor):
    """Predicts the class with the nearest mean, of features that never change."""

    def __init__(self, model):
        super().__init__(model)
        self._sums, self._counts = 0.0, np.zeros(self.classes)

    def learn(self, new):
        chosen = np.eye(self.classes, dtype=np.float32)[new.labels]  # (n, C)
        self._sums = self._sums + chosen.T @ self.outputs(new.images)[0].numpy()
        self._counts, self.nbytes = self._counts + chosen.sum(axis=0), self._sums.nbytes

    def predict(self, images):
        seen = np.flatnonzero(self._counts)
        means = self._sums[seen] / self._counts[seen, None]
        return seen[np.argmax(self.outputs(images)[0].numpy() @ means.T
                              - np.square(means).sum(axis=1) / 2, axis=1)]


class Solved(Predictor):
    """Solves its head in each task from the sums over all images so far, as --keep_statistics.

    model: from models.build_model with head_start 'solved'. folder: of the sums.
    """

    def __init__(self, model, batch_size, folder):
        super().__init__(model)
        self._batch_size, self._folder = batch_size, folder
        os.makedirs(os.path.dirname(os.path.join(folder, statistics.FILE)), exist_ok=True)

    def learn(self, new):
        data = Mixture(new, None, self._batch_size, [0])
        data.num_classes, data.class_names = self.classes, tuple(map(str, range(self.classes)))
        *_, sums = statistics.solve(self.model, data, ALONE, lambda: None, False,
                                    self._folder if self.nbytes else None)
        self.nbytes = os.path.getsize(statistics.write(self._folder, sums))
