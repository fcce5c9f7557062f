"""The training loop, one for all schemes, and the schemes: which tensors are trained when.

Time is kept in three buckets, which add up to all but writing the records. `step`: the loop over
the batches, input wait included. `selection`: the optimizer and the graph that steps are cut from,
importance, solving, and the first call of every new step function, which compiles it. `validation`:
the test set, and outside every reported training time.
"""

import contextlib
import itertools
import math
import time
from typing import Callable, NamedTuple, Optional, Sequence

import numpy as np
from tqdm import tqdm

import keras_stack
from backbone import output_layer
from closed_loop import ClosedLoop, steps_drifted
from importance import Evaluator, evaluate_importance
from masked_step import StepMaker
from selection_solver_DP import choose_tensors, layers_of, reachable
from training_step import evaluation_function, make_optimizer


class Diverged(RuntimeError):
    """The loss is no longer finite."""


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
    """
    mask: np.ndarray
    importance: Optional[np.ndarray] = None
    timings: Optional[object] = None
    fallback: bool = False
    trials: Sequence = ()
    drift: float = 0.0
    maker: Optional[object] = None

    @property
    def predicted_ms(self):
        """ms of the whole step, by the table."""
        return self.timings.step_time(self.mask)


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


def elastic_scheme(name, maker, probe, timings, settings, metric='gradient_update'):
    """Selects every `interval` epochs (0: once) what buys most importance at rho (paper, section
    4).

    maker: masked_step.StepMaker. probe: tf.data of (images, labels), endless: each evaluation takes
    its next batches. timings: TensorTimings of this model on this machine. With
    settings.closed_loop they are kept true while the device changes speed.
    Where steps drift from their prediction between two selections, the tensors are chosen again by
    the importance last evaluated; with interval 0 never.
    Raises InfeasibleBudget at the first selection where rho cannot be reached: check with
    smallest_rho before.
    """
    evaluator = Evaluator(maker, settings.seed)
    layers = layers_of(maker.model) if settings.granularity == 'layer' else None
    batches = iter(probe)
    loop = ClosedLoop(timings, maker) if settings.closed_loop else None
    current = None

    def select(epoch, last):
        nonlocal current
        due = (epoch - 1) % settings.interval == 0 if settings.interval else epoch == 1
        drifted = loop is not None and settings.interval and not due and steps_drifted(
            last.step_ms, current.predicted_ms)
        if not due and not drifted:
            return None
        batch, table, drift = next(batches), timings, 0.0
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
        if loop is not None:
            ran = (current.mask, last.step_ms, last.wait_ms) if last is not None else ()
            drift = loop.update(*batch, evaluator.pass_ms, *ran)
            table = loop.timings
        mask, fallback = choose_tensors(
            table, importance, reachable(table, settings.rho, layers), layers)
        current = Choice(mask, importance, table, fallback, trials, drift)
        return current
    select.importance_seconds = 0.0
    return Scheme(name, select)


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


def train(model, dataset, make_scheme, settings, recorder, penalty=None, meter=None):
    """Trains the model and records every epoch; returns (measured part of the summary, the model).

    make_scheme: (masked_step.StepMaker) -> Scheme, called once the optimizer stands.
    dataset: datasets.Dataset. recorder: runs.Recorder. penalty: see TrainingStep.
    meter: energy.Meter of what training uses, or None.
    The model returned is another one where the scheme replaced it.
    Raises Diverged when the loss stops being finite.
    """
    steps = count_steps(dataset)
    evaluate = evaluation_function(model)
    clock, step, rows, step_ms = Clock(meter), None, [], []
    before = dict(clock.seconds)
    with clock('selection'):
        optimizer = optimizer_for(dataset, settings, model.trainable_variables)
        maker = StepMaker(model, optimizer, settings.weight_decay, *dataset.train.element_spec,
                          penalty=penalty)
        scheme = make_scheme(maker)
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
        if choice is not None:
            _announce(choice, settings, clock.seconds['selection'] - before['selection'])
        with clock('step'):
            result = run_epoch(step, dataset.train, steps, 'epoch {:>{}}/{}'.format(
                epoch, len(str(settings.num_epochs)), settings.num_epochs))
        clock.move(result.first_call_seconds, 'step', 'selection')
        with clock('validation'):
            test_loss, test_accuracy = validate(evaluate, dataset.test)
        if choice is not None:
            _record_choice(recorder, model, choice, epoch)
        step_ms.extend(result.step_ms)
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
        rows.append(row)
        _print_epoch(row, settings.num_epochs)
    return dict(
        epochs=settings.num_epochs, final_accuracy=rows[-1]['test_accuracy'],
        best_accuracy=max(row['test_accuracy'] for row in rows), final_loss=rows[-1]['test_loss'],
        train_seconds=clock.train_seconds, step_seconds=clock.seconds['step'],
        selection_seconds=clock.seconds['selection'],
        importance_seconds=_importance_seconds(scheme),
        validation_seconds=clock.seconds['validation'], step_ms=float(np.median(step_ms)),
        **getattr(scheme.select, 'summary', {})), model


class EpochResult(NamedTuple):
    """loss, accuracy, penalty: means over the epoch (training_step.StepResult).

    step_ms: of every step but a first call.
    wait_ms: median part of a step outside the step function: input that is not ready, Python.
    first_call_seconds: how much longer the first call of a new step function took than a usual one.
    """
    loss: float
    accuracy: float
    penalty: float
    step_ms: list
    wait_ms: float
    first_call_seconds: float


def run_epoch(step, batches, num_steps, title):
    """One pass over `batches` (tf.data): updates, running loss and accuracy, time of every step."""
    total_loss, penalty, correct, seen, seconds, waits, first_call = 0.0, 0.0, 0, 0, [], [], None
    new, step.called = not step.called, True
    with tqdm(total=num_steps, desc=title, unit='step', leave=False, disable=None,
              mininterval=0.5) as bar:
        begin = time.perf_counter()
        for images, labels in batches:
            called = time.perf_counter()
            result = step(images, labels)
            loss = float(result.loss)  # waits for the device
            busy = time.perf_counter() - called
            penalty += float(result.penalty)
            if not math.isfinite(loss + penalty):
                raise Diverged('the loss is {} at step {} of {}: use a smaller --learning_rate'
                               .format(loss, len(seconds) + 1, title))
            total_loss += loss
            correct += int(result.correct)
            seen += int(labels.shape[0])
            now = time.perf_counter()
            seconds.append(now - begin)
            waits.append(now - begin - busy)
            begin = now
            bar.set_postfix(loss='{:.3f}'.format(total_loss / len(seconds)),
                            acc='{:.1f}%'.format(100 * correct / seen),
                            ms='{:.1f}'.format(1e3 * seconds[-1]), refresh=False)
            bar.update()
    if new:
        first_call = seconds.pop(0) if len(seconds) > 1 else 0.0
    usual = float(np.median(seconds))
    count = len(seconds) + (first_call is not None)
    return EpochResult(total_loss / count, correct / seen, penalty / count,
                       [1e3 * s for s in seconds], 1e3 * float(np.median(waits)),
                       max(0.0, first_call - usual) if first_call else 0.0)


def validate(evaluate, batches):
    """(mean loss, accuracy) over the whole test set, in inference mode."""
    loss, correct, seen = 0.0, 0, 0
    for images, labels in batches:
        batch_loss, hits = evaluate(images, labels)
        loss += float(batch_loss)
        correct += int(hits)
        seen += int(labels.shape[0])
    return loss / seen, correct / seen


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


def _announce(choice, settings, seconds):
    if choice.importance is None:
        print('training {} of {} tensors'.format(choice.mask.sum(), len(choice.mask)))
        return
    print('selected {} of {} tensors: {:.0f} % of the importance, {:.1f} ms/step predicted = '
          '{:.2f} of full (rho {:g}), in {:.2f} s'.format(
              choice.mask.sum(), len(choice.mask),
              100 * choice.importance[choice.mask].sum()
              / max(choice.importance[choice.importance > 0].sum(), 1e-12),
              choice.predicted_ms, choice.predicted_ms / choice.timings.t_step, settings.rho,
              seconds))
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
