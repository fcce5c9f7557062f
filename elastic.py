"""Elastic training: the tensors are chosen anew every few epochs, by what they buy and cost now.

A train.Scheme: importance (importance.py) against the timing table as it is now (closed_loop.py),
the prefix cache's price (cache_prices.py), and the selector (selection_solver_DP.py).
"""

import itertools
import time

import numpy as np

from cache_prices import Budget, CachePrices
from closed_loop import ClosedLoop, steps_drift_ms
from epoch import CONVERT, READ, Diverged
from importance import Evaluator, evaluate_importance
from selection_solver_DP import choose_tensors, layers_of, reachable
from train import Choice, Scheme


def elastic_scheme(name, maker, probe, timings, settings, metric='gradient_update', cache=None):
    """Selects every `interval` epochs (0: once) what buys most importance at rho (paper, section
    4).

    maker: masked_step.StepMaker. probe: tf.data of (images, labels), endless: each evaluation takes
    its next batches. timings: TensorTimings of this model on this machine. With
    settings.closed_loop they are kept true while the device changes speed.
    cache: cached_epochs.PrefixCache, whose prices then count, or None. With one, rho holds for the
    run, see cache_prices.Budget.
    Where steps take more or less than predicted between two selections, so much that by the next it
    adds up to more than choosing takes, the tensors are chosen again by the importance that was
    evaluated last; with interval 0 never.
    Raises InfeasibleBudget at the first selection where rho cannot be reached: check with
    smallest_rho before.
    """
    selection = ElasticSelection(maker, probe, timings, settings, metric, cache)
    return Scheme(name, selection, selection.state, selection.restore)


class ElasticSelection:
    """The `select` of an elastic_scheme, with its arguments.

    importance_seconds: spent on importance so far, in seconds.
    """

    def __init__(self, maker, probe, timings, settings, metric, cache):
        self.importance_seconds = 0.0
        self._maker, self._timings, self._settings, self._cache = maker, timings, settings, cache
        self._batches, self._drawn, self._metric = iter(probe), 0, metric
        self._evaluator = Evaluator(maker, settings.seed)
        self._layers = layers_of(maker.model) if settings.granularity == 'layer' else None
        self._loop = ClosedLoop(timings, maker) if settings.closed_loop else None
        self._dates, self._budget = due_epochs(settings), Budget(settings)
        self._current, self._choosing_seconds = None, 0.0

    def __call__(self, epoch, last):
        if last is not None:
            self._learn_from(last)
        due = epoch in self._dates
        if not due and not self._drifted(epoch, last):
            return None
        batch, trials = self._next_batch(), []
        del self._evaluator.pass_ms[:]
        importance = self._importance(batch, epoch, trials) if due else self._current.importance
        begin = time.perf_counter()
        table, drift = self._table_now(batch, last)
        rho = self._settings.rho if self._cache is None else self._budget.rho(epoch)
        chosen = self._chosen(importance, table, rho, epoch, due)
        if chosen is None:
            return None
        self._choosing_seconds = time.perf_counter() - begin
        mask, fallback, table = chosen
        self._current = Choice(mask, importance, table, fallback, trials, drift, rho=rho)
        return self._current

    def state(self):
        """What `restore` takes; the Choice itself is the loop's to keep."""
        return dict(
            importance_seconds=self.importance_seconds, choosing_seconds=self._choosing_seconds,
            drawn=self._drawn, random=self._evaluator.random.get_state(),
            scale=self._evaluator.scale, budget=self._budget.left, timings=self._timings,
            loop=self._loop and (self._loop.timings, self._loop.reference))

    def restore(self, state, choice, assign):
        """Goes on from `state`, see train.Scheme; by its own timing table on another device."""
        assign(self._maker)
        self.importance_seconds = state['importance_seconds']
        self._choosing_seconds = state['choosing_seconds']
        self._current = choice
        while self._drawn < state['drawn']:
            self._next_batch()
        self._evaluator.random.set_state(state['random'])
        self._evaluator.scale, self._budget.left = state['scale'], state['budget']
        if state['timings'].key == self._timings.key:
            self._timings = state['timings']
            if self._loop is not None:
                self._loop.timings, self._loop.reference = state['loop']
        return self._maker

    def _next_batch(self):
        self._drawn += 1
        return next(self._batches)

    def _learn_from(self, last):
        """What the steps of the last epoch tell: rho that is spent, waiting for the input."""
        if self._cache is not None:
            self._budget.spend(self._current, last)
        if self._loop is None:
            return
        if last.kind not in (READ, CONVERT):
            self._loop.waited(last.wait_ms)
        elif self._cache is not None and last.kind == READ:
            self._cache.waited(last.wait_ms)

    def _drifted(self, epoch, last):
        """Whether, by the next selection, steps will have drifted by more than choosing takes, if
        they go on as in the epoch before.
        """
        if self._loop is None or not self._settings.interval:
            return False
        ms = last.ms[last.kind]
        drift_ms = steps_drift_ms(ms, *self._current.predicted_of(last.kind))
        epochs = until(self._dates, epoch, self._settings.num_epochs) - epoch
        return 1e-3 * abs(drift_ms) * len(ms) * epochs > self._choosing_seconds

    def _importance(self, batch, epoch, trials):
        """(N,) importance on this batch and the next ones; adds its Trials to the list."""
        begin, maker = time.perf_counter(), self._maker
        others = (self._next_batch() for _ in range(self._settings.probe_batches - 1))
        importance = evaluate_importance(maker.model, maker.optimizer,
                                         itertools.chain([batch], others), self._metric,
                                         self._evaluator, trials)
        if not np.isfinite(importance).all():
            raise Diverged('gradients are no longer finite at the selection before epoch {}: '
                           'use a smaller --learning_rate'.format(epoch))
        self.importance_seconds += time.perf_counter() - begin
        return importance

    def _table_now(self, batch, last):
        """(TensorTimings as the device is now, drift of its shares since the profile)."""
        if self._loop is None:
            return self._timings, 0.0
        current = self._current
        ran = () if last is None else (
            current.mask, last.ms[last.kind], last.wait_ms, current.price_of(last.kind))
        drift = self._loop.update(*batch, self._evaluator.pass_ms, *ran)
        return self._loop.timings, drift

    def _chosen(self, importance, table, rho, epoch, due):
        """(mask, fallback, table with the cache's price), or None to go on as before."""
        if self._cache is None:
            rho = reachable(table, rho, self._layers)
            return choose_tensors(table, importance, rho, self._layers) + (table,)
        prices = CachePrices(self._cache, table, epoch, self._settings.num_epochs + 1)
        if not due and rho < prices.smallest_rho(self._layers):
            return None  # too few epochs are left to fill another cache for
        return prices.chosen(importance, rho, self._layers)


def due_epochs(settings):
    """Epochs, from 1, before which tensors are selected: every `interval`; 0: once."""
    return list(range(1, settings.num_epochs + 1, settings.interval or settings.num_epochs))


def until(dates, epoch, num_epochs):
    """The epoch before which the selection of `epoch` ends, or that behind the last."""
    return min([date for date in dates if date > epoch] + [num_epochs + 1])
