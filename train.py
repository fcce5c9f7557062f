"""The training loop, one for all schemes: what was chosen is trained, tested, recorded, and kept.

Time is kept in buckets, which add up to all but writing the records. `step`: the loop over
the batches, input wait included. `selection`: the optimizer and the graph that steps are cut from,
importance, solving, and the first call of every new step function, which compiles it. Outside every
reported training time are `validation`, the test set, `checkpoint`, and `resume`: what a run that
was interrupted makes once more to go on. `lost` is what it had trained behind its checkpoint.
"""

import contextlib
from typing import Callable, NamedTuple, Optional, Sequence

import numpy as np

import keras_stack
from backbone import output_layer
from checkpoint import Interrupted, Keeper
from epoch import (
    CONVERT,
    READ,
    Diverged,
    EpochProgress,
    EpochResult,
    plain_calls,
    run_epoch,
    validate,
)
from forward_graph import Cut
from importance import Trial
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
from stopwatch import Clock
from tensor_timings import CachePrice, TensorTimings
from thermal import Monitor
from training_step import evaluation_function, make_optimizer


class Settings(NamedTuple):
    """What the loop needs to know; see flags.py for the flags of the same names."""
    num_epochs: int = 12
    optimizer: str = 'sgd'
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    weight_decay: float = 5e-4
    clip_norm: Optional[float] = None
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
    state: () -> what of it changes while it trains, a tree for checkpoint.py. restore: (state, the
    Choice in training, assign) -> StepMaker to go on with; it calls assign(maker) once the model
    and its optimizer are such as they were, which gives them their values. None where nothing
    changes but what is trained.
    """
    name: str
    select: Callable
    state: Callable = lambda: None
    restore: Optional[Callable] = None


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


# ---------------------------------------------------------------- the loop

def optimizer_for(dataset, settings, variables):
    """The optimizer of a run, on its schedule over all steps."""
    return make_optimizer(settings.optimizer, settings.learning_rate,
                          settings.num_epochs * count_steps(dataset), variables,
                          settings.warmup_steps, settings.clip_norm)


def count_steps(dataset):
    return dataset.train_size // int(dataset.train.element_spec[0].shape[0])


RECORDS = (Choice, Trial, TensorTimings, CachePrice, Cut, EpochResult)  # that checkpoints hold


class _Run:
    """What changes while a run trains.

    epoch: 1-based, the one that is trained, or to be trained next. chosen: the Choice that was made
    before it, None where none was. progress: EpochProgress of it, None between epochs. result:
    EpochResult of the last one. rows: of record_epoch, step_ms: kind of Call -> ms, of all so far.
    before, importance_before: clock.seconds and importance_seconds as the epoch began.
    """

    def __init__(self, model, dataset, make_scheme, settings, penalty, clock, cache):
        self.model, self.clock, self.cache, self.penalty = model, clock, cache, penalty
        self.optimizer = optimizer_for(dataset, settings, model.trainable_variables)
        self.maker = StepMaker(model, self.optimizer, settings.weight_decay,
                               *dataset.train.element_spec, penalty=penalty)
        self.scheme = make_scheme(self.maker)
        if cache is not None:
            cache.attach(self.maker)
        self.evaluate = evaluation_function(model)
        self.epoch, self.choice, self.chosen, self.step = 1, None, None, None
        self.progress = self.result = None
        self.rows, self.step_ms = [], {}
        self.before, self.importance_before = dict.fromkeys(clock.seconds, 0.0), 0.0

    def select(self):
        """Asks the scheme what to train in the next epoch, and makes its step ready."""
        self.importance_before = importance_seconds(self.scheme)
        self.chosen = choice = self.scheme.select(self.epoch, self.result)
        if choice is None:
            return
        if choice.maker is not None:
            self._use(choice.maker)
        self.choice = choice._replace(maker=None)  # which keeps a model alive that may be replaced
        if self.step is None or (choice.mask != self.step.mask).any():
            self.step = None  # the old graph goes before the new one comes
            self.step = self.maker.step(choice.mask)
        if self.cache is not None:
            self.cache.begin(self.step, choice.timings)

    def _use(self, maker):
        self.maker, self.step = maker, None
        self.model, self.optimizer = maker.model, maker.optimizer
        self.evaluate = evaluation_function(self.model)

    @contextlib.contextmanager
    def naming_the_rate(self):
        """A Diverged that is raised within also says what the learning rate was."""
        try:
            yield
        except Diverged as error:
            raise Diverged('{} (it was {:.3g})'.format(
                error, float(keras_stack.learning_rate(self.optimizer))))

    def row(self, tested):
        """The record of the epoch that has ended; tested: (loss, accuracy)."""
        result, seconds = self.result, self.clock.seconds
        return dict(
            epoch=self.epoch, learning_rate=float(keras_stack.learning_rate(self.optimizer)),
            train_accuracy=result.accuracy, train_loss=result.loss, train_penalty=result.penalty,
            test_accuracy=tested[1], test_loss=tested[0],
            step_ms=float(np.median(result.step_ms)),
            importance_seconds=importance_seconds(self.scheme) - self.importance_before,
            train_seconds=self.clock.train_seconds, **(self.clock.monitor or Monitor()).epoch(),
            **{name + '_seconds': seconds[name] - self.before[name] for name in seconds})

    def next_epoch(self, row):
        """Once the epoch is recorded."""
        self.rows.append(row)
        for kind, ms in self.result.ms.items():
            self.step_ms.setdefault(kind, []).extend(ms)
        self.before, self.progress = dict(self.clock.seconds), None
        self.epoch += 1

    # ------------------------------------------------------------------------- checkpoints

    PLAIN_FIELDS = ('epoch', 'choice', 'result', 'rows', 'before', 'importance_before')

    def state(self):
        """The tree for a checkpoint, at the end of a step."""
        return dict(
            {name: getattr(self, name) for name in self.PLAIN_FIELDS},
            has_chosen=self.chosen is not None, progress=self.progress and vars(self.progress),
            step_ms={kind: np.array(ms) for kind, ms in self.step_ms.items()},
            variables=self.maker.everything,
            penalty=getattr(self.penalty, 'coefficient', None),
            scheme=self.scheme.state(), cache=self.cache and self.cache.state(),
            clock=self.clock.state())

    def restore(self, state):
        """Goes on from `state`."""
        for name in self.PLAIN_FIELDS:
            setattr(self, name, state[name])
        self.chosen = self.choice if state['has_chosen'] else None
        self.progress = state['progress'] and EpochProgress(state['progress'])
        self.step_ms = {kind: ms.tolist() for kind, ms in state['step_ms'].items()}

        def assign(maker):
            maker.assign(state['variables'])
        if self.scheme.restore is None:
            assign(self.maker)
        else:
            self._use(self.scheme.restore(state['scheme'], self.choice, assign))
        if self.choice is not None:
            self.step = self.maker.step(self.choice.mask)
            self.step.again = True
        if self.cache is not None:
            self.cache.restore(state['cache'], self.step)
        self.clock.restore(state['clock'])


def train(model, dataset, make_scheme, settings, recorder, penalty=None, meter=None, cache=None,
          keeper=None, resumed=None, monitor=None):
    """Trains the model and records every epoch; returns (measured part of the summary, the model).

    make_scheme: (masked_step.StepMaker) -> Scheme, called once the optimizer stands.
    cache: cached_epochs.PrefixCache of this data set, or None.
    dataset: datasets.Dataset. recorder: recorder.Recorder. penalty: see TrainingStep.
    meter: energy.Meter of what training uses, or None. monitor: thermal.Monitor, or None.
    keeper: checkpoint.Keeper; None keeps nothing. resumed: the tree of a checkpoint to go on from,
    see checkpoint.read.
    The model returned is another one where the scheme replaced it.
    Raises Diverged when the loss stops being finite, and Interrupted, with a checkpoint behind it,
    when the keeper says stop.
    """
    steps, clock, keeper = count_steps(dataset), Clock(meter, monitor), keeper or Keeper()
    if penalty is not None and resumed is not None:
        penalty.coefficient = resumed['run']['penalty']  # before it becomes a constant of the graph
    with clock('selection' if resumed is None else 'resume'):
        run = _Run(model, dataset, make_scheme, settings, penalty, clock, cache)
        if resumed is not None:
            run.restore(resumed.pop('run'))  # as large as the model: not to be held any longer
            clock.seconds['lost'] += resumed['lost_seconds']

    def keep():
        with clock('checkpoint'):
            kept = keeper.keep(lambda: dict(run=run.state(), records=recorder.state()))
        if keeper.stop() and run.epoch <= settings.num_epochs:
            raise Interrupted(run.epoch, run.progress.count if run.progress else 0, kept)
    if keeper.stop():
        keep()
    while run.epoch <= settings.num_epochs:
        if run.progress is None:
            with clock('selection'):
                run.select()
            if run.chosen is not None:
                announce(run.chosen, settings, clock.seconds['selection'] - run.before['selection'],
                         cache)
            run.progress = EpochProgress()
        with clock('step'):
            calls, run.result = calls_of(run, dataset), None
        while run.result is None:
            with clock('step'), run.naming_the_rate():
                run.result = run_epoch(calls, steps, epoch_label(run.epoch, settings.num_epochs),
                                       run.progress, keeper.due)
            if run.result is None:
                keep()
        with clock('validation'):
            tested = validate(run.evaluate, dataset.test, keeper.stop)
        if tested is None:
            keep()  # as all steps were done; raises
        clock.move(run.result.first_call_seconds, 'step', 'selection')
        clock.move(run.result.again_seconds, 'step', 'resume')
        row = run.row(tested)
        record_epoch(recorder, run.scheme, run.model, run.chosen, row, run.result, cache)
        run.next_epoch(row)
        print_epoch(row, settings.num_epochs)
        if keeper.pays():
            keep()
    if cache is not None:
        cache.end()
    return summary_of(run.rows, clock, run.scheme, run.step_ms, cache), run.model


def calls_of(run, dataset):
    """The epoch.Calls that are left of the epoch of a _Run."""
    done = run.progress.count
    if run.cache is not None:
        return run.cache.calls(run.step, run.epoch, done)
    return plain_calls(run.step, dataset.batches(dataset.order(run.epoch)[done:],
                                                 dataset.view(run.epoch)))
