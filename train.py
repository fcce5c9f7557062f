"""The training loop, one for all schemes, and the schemes: which tensors are trained when.

Time is kept in three buckets, which add up to all but writing the records. `step`: the loop over
the batches, input wait included. `selection`: the optimizer and the graph that steps are cut from,
importance, solving, and the first call of every new step function, which compiles it. `validation`:
the test set, and outside every reported training time.
"""

import itertools
import time
from typing import Callable, NamedTuple, Optional, Sequence

import numpy as np

import keras_stack
from backbone import output_layer
from cache_prices import Budget, CachePrices
from closed_loop import ClosedLoop, steps_drift_ms
from epoch import CONVERT, READ, Diverged, plain_calls, run_epoch, validate
from importance import Evaluator, evaluate_importance
from masked_step import StepMaker
from progress import (
    announce,
    epoch_label,
    importance_seconds,
    print_epoch,
    record_epoch,
    summary_of,
)
from schemes import SCHEMES
from selection_solver_DP import choose_tensors, layers_of, reachable
from stopwatch import Clock
from training_step import evaluation_function, make_optimizer


class Settings(NamedTuple):
    """What the loop needs to know; see flags.py for the flags of the same names."""
    num_epochs: int = 12
    optimizer: str = 'sgd'
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    weight_decay: float = 5e-4
    interval: int = 4
    rho: float = 0.533
    probe_batches: int = 1
    closed_loop: bool = True
    granularity: str = 'tensor'
    seed: int = 0


class Choice(NamedTuple):
    """Tensors to train from now on.

    mask: (N,) bool, model.trainable_variables order. importance: (N,), timings: the TensorTimings
    it was chosen by; None for fixed schemes. fallback: see select_tensors. trials: importance.Trial
    of each probe batch. drift: of the time shares since the profile (closed_loop.py).
    maker: a new StepMaker, where the model and its optimizer are others from now on.
    rho: within which it was chosen; None for fixed schemes.
    """
    mask: np.ndarray
    importance: Optional[np.ndarray] = None
    timings: Optional[object] = None
    fallback: bool = False
    trials: Sequence = ()
    drift: float = 0.0
    maker: Optional[object] = None
    rho: Optional[float] = None

    @property
    def predicted_ms(self):
        """ms of the whole step, by the table: a mean where there is a prefix cache."""
        return self.timings.step_time(self.mask)

    def price_of(self, kind):
        """The CachePrice by which steps of that kind (epoch.Call) read rows; None: they read none.
        """
        price = self.timings and self.timings.cache
        return {READ: price, CONVERT: price and price.converting}.get(kind)

    def predicted_of(self, kind):
        """ms of a step of that kind (epoch.Call), and what ms it may be wrong by as much as the
        mean may be wrong by predicted_ms: of a cache, most steps are of one kind or the other.
        """
        table = self.timings
        if table.cache is None or not table.is_cached(self.mask):
            return self.predicted_ms, self.predicted_ms
        fill = table.fill_share(self.mask)
        ms = {READ: table.reading_time, CONVERT: table.converting_time}.get(
            kind, table.filling_time)(self.mask)
        return ms, self.predicted_ms / max(1 - fill if kind == READ else fill, 1e-9)


class Scheme(NamedTuple):
    """A way to train: what to select before an epoch.

    select: (epoch, 1-based; EpochResult of the last one or None) -> Choice, or None to go on as
    before; called before every epoch.
    """
    name: str
    select: Callable


# ---------------------------------------------------------------- schemes

def fixed_scheme(name, mask):
    """A scheme that trains the (N,) bool mask from start to end."""
    choice = Choice(np.asarray(mask, dtype=bool))
    return Scheme(name, lambda epoch, last: choice if epoch == 1 else None)


def fixed_mask(name, model):
    """(N,) bool: what the fixed scheme of that name (schemes.py) trains of the model."""
    variables, head = model.trainable_variables, {
        id(v) for v in output_layer(model).trainable_weights}
    return SCHEMES[name].trains([keras_stack.variable_name(v) for v in variables],
                                np.array([id(v) in head for v in variables]))


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
    return Scheme(name, ElasticSelection(maker, probe, timings, settings, metric, cache))


class ElasticSelection:
    """The `select` of an elastic_scheme, with its arguments.

    importance_seconds: spent on importance so far.
    """

    def __init__(self, maker, probe, timings, settings, metric, cache):
        self.importance_seconds = 0.0
        self._maker, self._timings, self._settings, self._cache = maker, timings, settings, cache
        self._batches, self._metric = iter(probe), metric
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
        batch, trials = next(self._batches), []
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
        others = (next(self._batches) for _ in range(self._settings.probe_batches - 1))
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


# ---------------------------------------------------------------- the loop

def optimizer_for(dataset, settings, variables):
    """The optimizer of a run, on its schedule over all steps."""
    return make_optimizer(settings.optimizer, settings.learning_rate,
                          settings.num_epochs * count_steps(dataset), variables,
                          settings.warmup_steps)


def count_steps(dataset):
    return dataset.train_size // int(dataset.train.element_spec[0].shape[0])


def train(model, dataset, make_scheme, settings, recorder, penalty=None, meter=None, cache=None):
    """Trains the model and records every epoch; returns (measured part of the summary, the model).

    make_scheme: (masked_step.StepMaker) -> Scheme, called once the optimizer stands.
    cache: cached_epochs.PrefixCache of this data set, or None.
    dataset: datasets.Dataset. recorder: runs.Recorder. penalty: see TrainingStep.
    meter: energy.Meter of what training uses, or None.
    The model returned is another one where the scheme replaced it.
    Raises Diverged when the loss stops being finite.
    """
    steps, evaluate = count_steps(dataset), evaluation_function(model)
    clock, step, rows, step_ms = Clock(meter), None, [], {}
    before, result = dict(clock.seconds), None
    with clock('selection'):
        optimizer = optimizer_for(dataset, settings, model.trainable_variables)
        maker = StepMaker(model, optimizer, settings.weight_decay, *dataset.train.element_spec,
                          penalty=penalty)
        scheme = make_scheme(maker)
        if cache is not None:
            cache.attach(maker)
    for epoch in range(1, settings.num_epochs + 1):
        importance_before = importance_seconds(scheme)
        with clock('selection'):
            choice = scheme.select(epoch, result)
            if choice is not None and choice.maker is not None:
                maker, step = choice.maker, None
                model, optimizer = maker.model, maker.optimizer
                evaluate = evaluation_function(model)
            if choice is not None and (step is None or (choice.mask != step.mask).any()):
                step = None  # the old graph goes before the new one comes
                step = maker.step(choice.mask)
            if choice is not None and cache is not None:
                cache.begin(step, choice.timings)
        if choice is not None:
            announce(choice, settings, clock.seconds['selection'] - before['selection'], cache)
        with clock('step'):
            calls = cache.calls(step, epoch) if cache is not None else plain_calls(
                step, dataset.batches(dataset.order(epoch), dataset.view(epoch)))
            result = run_epoch(calls, steps, epoch_label(epoch, settings.num_epochs))
        clock.move(result.first_call_seconds, 'step', 'selection')
        with clock('validation'):
            test_loss, test_accuracy = validate(evaluate, dataset.test)
        for kind, ms in result.ms.items():
            step_ms.setdefault(kind, []).extend(ms)
        row = dict(
            epoch=epoch, learning_rate=float(keras_stack.learning_rate(optimizer)),
            train_accuracy=result.accuracy, train_loss=result.loss, train_penalty=result.penalty,
            test_accuracy=test_accuracy, test_loss=test_loss,
            step_ms=float(np.median(result.step_ms)),
            importance_seconds=importance_seconds(scheme) - importance_before,
            train_seconds=clock.train_seconds,
            **{name + '_seconds': seconds - before[name]
               for name, seconds in clock.seconds.items()})
        before = dict(clock.seconds)
        record_epoch(recorder, scheme, model, choice, row, result, cache)
        rows.append(row)
        print_epoch(row, settings.num_epochs)
    if cache is not None:
        cache.end()
    return summary_of(rows, clock, scheme, step_ms, cache), model
