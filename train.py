"""The training loop, one for all schemes, and elastic training.

The clock of a run sorts all of its time, except the writing of records, into buckets:

    head        solving the output layer, in the first epoch (solved_head.py)
    step        the loop over the batches, including waits for them
    selection   making the optimizer and the graph, importance, solving, compiling new steps
    validation, checkpoint
    resume      what a resumed run has to make again

The reported training time is head + step + selection.
"""

import itertools
import time

import numpy as np

from elastic.cache.prefix_cache import NoCache
from elastic.errors import UserError
from elastic.files import check_writable
from elastic.planning.cache_offers import Budget, CacheOffers
from elastic.planning.deadline import AllEpochs, due_epochs, until
from elastic.planning.memory_plan import StepMemory, check_memory, set_limit
from elastic.runs.in_fit import TrainingInFit, fit_settings, timings_in_fit
from elastic.runs.run import Run
from elastic.schemes.fixed import HEAD, fixed_mask
from elastic.schemes.prunetrain import GroupLasso
from elastic.schemes.scheme import Choice, Scheme
from elastic.selection.closed_loop import ClosedLoop, Steps, steps_drift_ms
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.selection.items import layers_of, out_of_reach, rho_or_smallest
from elastic.settings import PRUNE, TRAINING
from elastic.steps.epoch import READ, Diverged
from elastic.steps.fit_step import probe_batches
from elastic.steps.masked_step import StepMaker
from elastic.steps.model_state import ModelState
from elastic.steps.optimizer import optimizer_for
from elastic.steps.training_step import Objective
from elastic.texts import size_text
from elastic.timing.table import TensorTimings
from elastic.workers.agreement import TABLE, slowest_table
from elastic.workers.cluster import ALONE
from elastic.workers.step_mean import StepMean, cluster_of
from profiler import profile_step
from selection_solver_DP import choose_cached_tensors, choose_tensors


def step_maker(model, dataset, settings, cluster=ALONE, resumed=None):
    """Returns the StepMaker of a run, with its optimizer; a ModelState if no epoch trains.

    cluster: workers.cluster.Cluster that trains the model. resumed: as in session.open_session;
    PruneTrain's penalty keeps its coefficient.
    """
    penalty = None
    if settings.train_type == PRUNE:
        penalty = GroupLasso(model, dataset.probe, settings.prune_penalty_ratio,
                             dataset.class_weight)
        if resumed is not None:
            penalty.coefficient = resumed['run']['scheme']['coefficient']
    optimizer = optimizer_for(dataset, settings, model.trainable_variables)
    mean = StepMean(cluster) if cluster.size > 1 else None
    if not settings.trained_epochs:  # tracing a step takes seconds
        return ModelState(model, optimizer, mean)
    return StepMaker(model, optimizer, settings.weight_decay, *dataset.train.element_spec,
                     Objective(penalty, dataset.class_weight), mean, settings.micro_batch)


def train(scheme, dataset, settings, session, cache=None, plan=None):
    """Trains and records every epoch; returns (measured part of the summary, trained model).

    With validation images, these judge each epoch, and the test images only the kept weights.
    scheme: scheme.Scheme, whose maker holds the model. cache: PrefixCache; default: NoCache.
    plan: deadline.Deadline that ends the run; default: deadline.AllEpochs. Raises Diverged if the
    loss is not finite. After trying to write a checkpoint, raises Interrupted if the session's
    keeper says stop, and WorkerLost if another worker does not answer.
    """
    clock = session.clock
    with session.preparing():
        run = Run(scheme, dataset, settings, session, cache or NoCache(dataset),
                  plan or AllEpochs())
        run.resume()
    with clock('validation'):
        run.plan.begin_training(run.evaluate, dataset.validation)
    run.pause(run.keeper.stop)
    while run.goes_on:
        if run.solves:
            with clock('head'):
                run.solve()
        else:
            if not run.progress:  # else the checkpoint is from within an epoch
                with clock('selection'):
                    run.choose()
                run.announce()
            with clock('step'):
                run.train_epoch()
        run.end_epoch()
        run.pause(run.keeper.pays)
    return run.summary(), scheme.maker.model


# ---------------------------------------------------------------- elastic training

class ElasticScheme(Scheme):
    """Selects the most important tensors within rho, every `interval` epochs (0: once).

    Paper, section 4. The selector (selection_solver_DP.py) weighs the importance of each tensor
    (importance.py) against its cost at the present speed of the device (closed_loop.py). If steps
    drift so far from their predicted time that this costs more than selecting, tensors are selected
    early, by the last importance.
    maker: masked_step.StepMaker. probe: endless tf.data of (images, labels); each evaluation takes
    the next batches. timings: TensorTimings of this model on this machine.
    settings: settings.Settings; with closed_loop, timings follow the speed of the device.
    The first selection raises InfeasibleBudget if rho is out of reach: check smallest_rho before.
    """

    def __init__(self, maker, probe, timings, settings):
        super().__init__('elastic_training', maker)
        self._settings = settings
        self._batches, self._drawn = iter(probe), 0
        self._cluster = cluster_of(maker)
        self._evaluator = Evaluator(maker, settings.seed)
        self._layers = layers_of(maker.model) if settings.granularity == 'layer' else None
        self._loop = ClosedLoop(timings, maker)  # without --closed_loop, it only holds the table
        self._memory = None
        if settings.memory is not None:
            self._memory = StepMemory(maker, maker.parts > 1)
            at_once = self._memory.at_once()
            self._evaluator.micro_batch = None if at_once == maker.micro_batch else at_once
        self._current, self._choosing_seconds = None, 0.0

    def select(self, epoch, last):
        if epoch <= self._settings.head_epochs:
            return self._head() if epoch == 1 else None
        last = None if self._current is None else last  # not of the epoch that solved the head
        if last is not None:
            self._learn_from(last)
        due = self._current is None or epoch in due_epochs(self._settings)
        if not due and not self._cluster.of_chief(lambda: self._drifted(epoch, last)):
            return None
        batch, trials = self._next_batch(), []
        del self._evaluator.pass_ms[:]
        importance = self._importance(batch, epoch, trials) if due else self._current.importance
        begin = time.perf_counter()
        drift = 0.0
        if self._settings.closed_loop:
            both_ms = None if self._evaluator.in_parts else self._evaluator.pass_ms
            drift = self._loop.update(*batch, both_ms, self._steps(last))
        table = slowest_table(self._cluster, self._loop.timings)
        chosen = self._cluster.of_chief(
            lambda: self._chosen(importance, table, epoch, due), TABLE)
        if chosen is None:
            return None
        self._choosing_seconds = time.perf_counter() - begin
        rho, (mask, fallback, table) = chosen
        self._current = Choice(mask, importance, table, fallback, trials, drift, rho=rho)
        return self._current

    def replan(self, settings):
        self._settings = settings

    def _head(self):
        """Returns the Choice of the head alone."""
        mask = fixed_mask(HEAD, self.maker.model)
        self._current = Choice(mask, timings=self._head_table(mask))
        return self._current

    def state(self):
        return dict(
            importance_seconds=self.importance_seconds, choosing_seconds=self._choosing_seconds,
            drawn=self._drawn, random=self._evaluator.random.get_state(),
            scale=self._evaluator.scale, memory=self._evaluator.memory, loop=self._loop.state())

    def restore(self, state, choice):
        """Resumes from `state`; on another device, keeps the timing table measured there."""
        self.importance_seconds = state['importance_seconds']
        self._choosing_seconds = state['choosing_seconds']
        self._current = choice
        while self._drawn < state['drawn']:
            self._next_batch()
        self._evaluator.random.set_state(state['random'])
        self._evaluator.memory.update(state['memory'])
        self._evaluator.scale = state['scale']
        self._loop.restore(state['loop'])

    def _next_batch(self):
        self._drawn += 1
        return next(self._batches)

    def _steps(self, last):
        """Returns the Steps of the last EpochResult; None before the first."""
        return None if last is None else Steps(
            self._current.mask, last.ms[last.kind], self._current.cost_of(last.kind))

    def _drifted(self, epoch, last):
        """Returns whether drift until the next selection would cost more time than selecting."""
        if not self._settings.closed_loop or not self._settings.interval:
            return False
        ms = last.ms[last.kind]
        drift_ms = steps_drift_ms(ms, *self._current.predicted_of(last.kind))
        epochs = until(due_epochs(self._settings), epoch, self._settings.num_epochs) - epoch
        return 1e-3 * abs(drift_ms) * len(ms) * epochs > self._choosing_seconds

    def _importance(self, batch, epoch, trials):
        """Returns the (N,) importance on this batch and the next; appends to `trials`."""
        begin = time.perf_counter()
        others = (self._next_batch() for _ in range(self._settings.probe_batches - 1))
        importance = evaluate_importance(
            self.maker.model, self.maker.optimizer, itertools.chain([batch], others),
            self._settings.importance, self._evaluator, trials)
        importance = self._cluster.mean(importance)
        if not np.isfinite(importance).all():
            raise Diverged('gradients are no longer finite at the selection before epoch {}: '
                           'use a smaller --learning_rate'.format(epoch))
        self.importance_seconds += time.perf_counter() - begin
        return importance

    def _within_memory(self, choose):
        """Returns choose(None), or choose(Room) if the step of that does not fit into --memory.

        Prints what memory costs. choose: (Room or None) -> (mask, fallback, TensorTimings).
        """
        chosen = choose(None)
        room = self._memory and self._memory.room
        if room is None or room.fits(chosen[0]):
            return chosen
        alone, chosen = chosen, choose(room)
        rho, rho_alone = [table.step_time(mask) / table.t_step for mask, _, table in (
            chosen, alone)]
        print('--memory: steps may hold {} and train at rho {:.3f}; time alone would allow rho '
              '{:.3f}, whose steps hold {}'.format(
                  size_text(room.nbytes), rho, rho_alone, size_text(room.memory.peak(alone[0]))))
        return chosen

    # What a prefix cache changes:

    def _head_table(self, mask):
        """Returns the TensorTimings by which the head trains. mask: (N,) bool, of the head."""
        return self._loop.timings

    def _learn_from(self, last):
        """Takes what the steps of the last EpochResult cost, and how long they waited."""
        if self._settings.closed_loop:
            self._loop.waited(last.wait_ms)

    def _chosen(self, importance, table, epoch, due):
        """Returns (rho, (mask, fallback, TensorTimings)); None: keep the last selection.

        rho: the budget of each step from `epoch` on.
        """
        rho = rho_or_smallest(table, self._settings.rho, self._layers)
        return self._settings.rho, self._within_memory(lambda room: choose_tensors(
            table, importance, rho, self._layers, room) + (table,))


class CachedElasticScheme(ElasticScheme):
    """Selects tensors, and the place where a prefix cache cuts the network (cache_offers.py).

    cache: prefix_cache.PrefixCache. Rho holds for the whole run: steps that fill the cache take
    longer than those that read it.
    """

    def __init__(self, maker, probe, timings, settings, cache):
        super().__init__(maker, probe, timings, settings)
        self._cache, self._budget = cache, Budget(settings)

    def state(self):
        return dict(super().state(), budget=self._budget.left)

    def restore(self, state, choice):
        super().restore(state, choice)
        self._budget.left = state['budget']

    def _head_table(self, mask):
        offers = CacheOffers(self._cache, super()._head_table(mask), 1,
                             self._settings.head_epochs + 1)
        return offers.at_own_cut(mask)

    def _learn_from(self, last):
        self._budget.spend(self._current, last)
        if self._settings.closed_loop:
            (self._cache if last.kind == READ else self._loop).waited(last.wait_ms)

    def _chosen(self, importance, table, epoch, due):
        planned = self._settings.deadline is not None
        rho = self._settings.rho if planned else self._budget.rho(epoch)
        offers = CacheOffers(self._cache, table, epoch, self._settings.num_epochs + 1)
        if not due and rho < offers.smallest_rho(self._layers):
            return None  # too few epochs remain to recover the cost of filling another cache
        return rho, self._within_memory(lambda room: choose_cached_tensors(
            offers, importance, rho, self._layers, room))


class ElasticTraining(TrainingInFit):
    """Trains elastically inside model.fit, in steps that take a share rho of full training's.

        model.compile('sgd', 'sparse_categorical_crossentropy', metrics=['accuracy'])
        model.fit(images, labels, epochs=12,
                  callbacks=[ElasticTraining(rho=0.5, probe=(images, labels))])

    rho, interval, settings (importance, granularity, ...): the flags of main.py of these names.
    probe: examples by which tensors are chosen: (inputs, labels) or tf.data of batches, with
    sample weights if need be. timings: a TensorTimings, or the path of one that is stored there if
    there is none for this step and machine; None: steps are timed in each new `fit`.
    Raises UserError for wrong settings; in `fit`, before the first step, for a model, a probe or a
    rho that cannot be used (TrainingInFit, steps/fit_step.py).
    """

    def __init__(self, rho=0.5, interval=TRAINING.interval, probe=None, timings=None, **settings):
        super().__init__()
        self._settings = fit_settings(dict(settings, rho=rho, interval=interval))
        self._probe, self._timings = probe, timings
        if not (timings is None or isinstance(timings, TensorTimings)):
            check_writable(timings, 'timings')
        if probe is None:
            raise UserError('tensors are chosen by examples: give probe=(inputs, labels), or a '
                            'tf.data.Dataset of batches')

    def scheme_of(self, maker, inputs, labels):
        settings = self._settings._replace(num_epochs=self.params['epochs'])
        if settings.memory is not None:
            set_limit(settings.memory)
            check_memory(settings, maker)
        probe = probe_batches(self._probe, inputs, labels, settings.seed)
        first = next(probe)
        table = timings_in_fit(self._timings, maker, *first, profile_step)
        layers = layers_of(maker.model) if settings.granularity == 'layer' else None
        reason = out_of_reach(table, settings.rho, layers)
        if reason:
            raise UserError(reason)
        return ElasticScheme(maker, itertools.chain([first], probe), table, settings)
