"""The training loop, one for all schemes, and the schemes: which tensors are trained when.

Time is kept in three buckets, which add up to all but writing the records. `step`: the loop over
the batches, input wait included. `selection`: the optimizer and the graph that steps are cut from,
importance, solving, and the first call of every new step function, which compiles it. `validation`:
the test set, and outside every reported training time.
"""

import contextlib
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
from selection_solver_DP import choose_tensors, layers_of, reachable
from training_step import evaluation_function, make_optimizer


class Settings(NamedTuple):
    """What the loop needs to know; see main.py for the flags of the same names."""
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
    """(N,) bool: full_training, traditional_tl_training (the head) or bn_plus_bias_training.

    BN+Bias trains every normalisation's gamma and beta, every bias, and the head.
    """
    variables = model.trainable_variables
    if name == 'full_training':
        return np.ones(len(variables), dtype=bool)
    head = {id(v) for v in output_layer(model).trainable_weights}
    small = ('gamma', 'beta', 'bias') if name == 'bn_plus_bias_training' else ()
    return np.array([id(v) in head or keras_stack.variable_name(v).split('/')[-1] in small
                     for v in variables])


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
    evaluator = Evaluator(maker, settings.seed)
    layers = layers_of(maker.model) if settings.granularity == 'layer' else None
    batches = iter(probe)
    loop = ClosedLoop(timings, maker) if settings.closed_loop else None
    current, dates, budget = None, due_epochs(settings), Budget(settings)
    choosing_seconds = 0.0

    def at_stake(epoch, last):
        """Seconds that steps drift by until the next selection, if they go on as in the epoch
        before.
        """
        drift_ms = steps_drift_ms(last.ms[last.kind], *current.predicted_of(last.kind))
        epochs = until(dates, epoch, settings.num_epochs) - epoch
        return 1e-3 * abs(drift_ms) * len(last.ms[last.kind]) * epochs

    def select(epoch, last):
        nonlocal current, choosing_seconds
        due = epoch in dates
        if cache is not None and current is not None:
            budget.spend(current, last)
        if loop is not None and last is not None and last.kind not in (READ, CONVERT):
            loop.waited(last.wait_ms)
        if loop is not None and cache is not None and last is not None and last.kind == READ:
            cache.waited(last.wait_ms)
        if not due and not (loop is not None and settings.interval
                            and at_stake(epoch, last) > choosing_seconds):
            return None
        batch, table, drift = next(batches), timings, 0.0
        rho = settings.rho if cache is None else budget.rho(epoch)
        importance, trials = current.importance if current else None, []
        del evaluator.pass_ms[:]
        if due:
            begin = time.perf_counter()
            others = (next(batches) for _ in range(settings.probe_batches - 1))
            importance = evaluate_importance(maker.model, maker.optimizer,
                                             itertools.chain([batch], others), metric, evaluator,
                                             trials)
            if not np.isfinite(importance).all():
                raise Diverged('gradients are no longer finite at the selection before epoch {}: '
                               'use a smaller --learning_rate'.format(epoch))
            select.importance_seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        if loop is not None:
            ran = () if last is None else (
                current.mask, last.ms[last.kind], last.wait_ms, current.price_of(last.kind))
            drift = loop.update(*batch, evaluator.pass_ms, *ran)
            table = loop.timings
        if cache is None:
            mask, fallback = choose_tensors(table, importance, reachable(table, rho, layers),
                                            layers)
        else:
            prices = CachePrices(cache, table, epoch, settings.num_epochs + 1)
            if not due and rho < prices.smallest_rho(layers):
                return None  # too few epochs are left to fill another cache for
            mask, fallback, table = prices.chosen(importance, rho, layers)
        choosing_seconds = time.perf_counter() - begin
        current = Choice(mask, importance, table, fallback, trials, drift, rho=rho)
        return current
    select.importance_seconds = 0.0
    return Scheme(name, select)


def due_epochs(settings):
    """Epochs, from 1, before which tensors are selected: every `interval`; 0: once."""
    return list(range(1, settings.num_epochs + 1, settings.interval or settings.num_epochs))


def until(dates, epoch, num_epochs):
    """The epoch before which the selection of `epoch` ends, or that behind the last."""
    return min([date for date in dates if date > epoch] + [num_epochs + 1])


# ---------------------------------------------------------------- the loop

class Clock:
    """Monotonic seconds in named buckets; `with clock('step')` adds to one.

    meter: energy.Meter, which runs in all of them but validation; None for none.
    """

    def __init__(self, meter=None):
        self.seconds = dict(step=0.0, selection=0.0, validation=0.0)
        self._meter = meter

    @contextlib.contextmanager
    def __call__(self, bucket):
        with contextlib.ExitStack() as stack:
            if self._meter is not None and bucket != 'validation':
                stack.enter_context(self._meter.running())
            begin = time.perf_counter()
            try:
                yield
            finally:
                self.seconds[bucket] += time.perf_counter() - begin

    def move(self, seconds, source, target):
        """Books seconds that were counted in `source` under `target` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def train_seconds(self):
        return self.seconds['step'] + self.seconds['selection']


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
    steps = count_steps(dataset)
    evaluate = evaluation_function(model)
    clock, step, rows, step_ms = Clock(meter), None, [], {}
    before = dict(clock.seconds)
    with clock('selection'):
        optimizer = optimizer_for(dataset, settings, model.trainable_variables)
        maker = StepMaker(model, optimizer, settings.weight_decay, *dataset.train.element_spec,
                          penalty=penalty)
        scheme = make_scheme(maker)
        if cache is not None:
            cache.attach(maker)
    result = None
    for epoch in range(1, settings.num_epochs + 1):
        importance_before = _importance_seconds(scheme)
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
            _announce(choice, settings, clock.seconds['selection'] - before['selection'], cache)
        with clock('step'):
            calls = cache.calls(step, epoch) if cache is not None else plain_calls(
                step, dataset.batches(dataset.order(epoch), dataset.view(epoch)))
            result = run_epoch(calls, steps, 'epoch {:>{}}/{}'.format(
                epoch, len(str(settings.num_epochs)), settings.num_epochs))
        clock.move(result.first_call_seconds, 'step', 'selection')
        with clock('validation'):
            test_loss, test_accuracy = validate(evaluate, dataset.test)
        if choice is not None:
            _record_choice(recorder, model, choice, epoch)
        for kind, ms in result.ms.items():
            step_ms.setdefault(kind, []).extend(ms)
        row = dict(
            epoch=epoch, learning_rate=float(keras_stack.learning_rate(optimizer)),
            train_accuracy=result.accuracy, train_loss=result.loss, train_penalty=result.penalty,
            test_accuracy=test_accuracy, test_loss=test_loss,
            step_ms=float(np.median(result.step_ms)),
            importance_seconds=_importance_seconds(scheme) - importance_before,
            train_seconds=clock.train_seconds,
            **{name + '_seconds': seconds - before[name]
               for name, seconds in clock.seconds.items()})
        before = dict(clock.seconds)
        recorder.epoch(row)
        if scheme.name.startswith('elastic'):
            recorder.elastic({'step_ms': row['step_ms'], 'wait_ms': result.wait_ms}, epoch)
        if cache is not None:
            recorder.elastic(_cache_scalars(cache), epoch)
        rows.append(row)
        _print_epoch(row, settings.num_epochs)
    if cache is not None:
        cache.end()
    return dict(
        epochs=settings.num_epochs, final_accuracy=rows[-1]['test_accuracy'],
        best_accuracy=max(row['test_accuracy'] for row in rows), final_loss=rows[-1]['test_loss'],
        train_seconds=clock.train_seconds, step_seconds=clock.seconds['step'],
        selection_seconds=clock.seconds['selection'],
        importance_seconds=_importance_seconds(scheme),
        validation_seconds=clock.seconds['validation'], **_step_summary(step_ms, cache),
        **getattr(scheme.select, 'summary', {})), model


def _step_summary(step_ms, cache):
    """step_ms: kind of step -> ms of each. One number is a median, of several kinds the mean."""
    everything = np.concatenate(list(step_ms.values()))
    found = dict(step_ms=float((np.mean if len(step_ms) > 1 else np.median)(everything)))
    for kind in (step_ms if cache is not None else ()):
        found[kind + '_step_ms'] = float(np.median(step_ms[kind]))
    return dict(found, **(cache.totals if cache is not None else {}))


def _cache_scalars(cache):
    totals = cache.totals
    tried = sum(totals['cache_' + name] for name in ('hits', 'converted', 'misses'))
    return dict(totals, cache_share_read=totals['cache_hits'] / max(1, tried))


def _importance_seconds(scheme):
    return getattr(scheme.select, 'importance_seconds', 0.0)


def _record_choice(recorder, model, choice, epoch):
    variables, timings = model.trainable_variables, choice.timings
    share = None
    if timings is not None:
        share = timings.t_dw + timings.t_dy + timings.t_up
        share = share / share.sum()
    recorder.selection(epoch, [keras_stack.variable_name(v) for v in variables],
                       [tuple(v.shape) for v in variables], choice.mask, choice.importance, share)
    if choice.importance is not None:
        recorder.elastic({
            'selected_tensors': int(choice.mask.sum()),
            'selected_importance': float(choice.importance[choice.mask].sum()),
            'predicted_step_ms': choice.predicted_ms, 'full_step_ms': timings.t_step,
            'forward_ms': timings.t_fp, 'backward_ms': timings.t_bp, 'loop_ms': timings.t_loop,
            'share_drift': choice.drift, 'fallback': int(choice.fallback)}, epoch)
    if choice.trials:
        recorder.elastic({'trial_' + field: float(np.mean([getattr(t, field)
                                                           for t in choice.trials]))
                          for field in choice.trials[0]._fields}, epoch)


def _announce(choice, settings, seconds, cache):
    if choice.importance is None:
        print('training {} of {} tensors'.format(choice.mask.sum(), len(choice.mask)))
    else:
        left = abs(choice.rho - settings.rho) >= 0.005
        print('selected {} of {} tensors: {:.0f} % of the importance, {:.1f} ms/step predicted = '
              '{:.2f} of full (rho {:g}{}), in {:.2f} s'.format(
                  choice.mask.sum(), len(choice.mask),
                  100 * choice.importance[choice.mask].sum()
                  / max(choice.importance[choice.importance > 0].sum(), 1e-12),
                  choice.predicted_ms, choice.predicted_ms / choice.timings.t_step, settings.rho,
                  '; {:.2f} are left'.format(choice.rho) if left else '', seconds))
    if cache is not None and cache.cut is not None:
        print('  ' + cache.describe(choice.timings))
    if any(trial.scale < 1 for trial in choice.trials):
        print('  a full trial update overshoots: importance taken at {:g} of it'.format(
            min(trial.scale for trial in choice.trials)))
    if choice.trials and not choice.trials[-1].holds:
        print('  warning: even {:g} of an update does not lower the loss as its gradient predicts '
              '({:+.2g} predicted, {:+.2g} real): the importance says little; use a smaller '
              '--learning_rate'.format(*choice.trials[-1]))
    if choice.fallback:
        print('  no tensor within reach had positive importance: training the least bad ones; a '
              'smaller --learning_rate or more --probe_batches may help')


def _print_epoch(row, num_epochs):
    width = len(str(num_epochs))
    penalty = '  penalty {:.3f}'.format(row['train_penalty']) if row['train_penalty'] else ''
    print('epoch {:>{w}}/{}   train {:5.1f} %  loss {:6.3f}{}   test {:5.1f} %  loss {:6.3f}   '
          '{:7.1f} ms/step   {:7.1f} s trained'.format(
              row['epoch'], num_epochs, 100 * row['train_accuracy'], row['train_loss'], penalty,
              100 * row['test_accuracy'], row['test_loss'], row['step_ms'], row['train_seconds'],
              w=width))
