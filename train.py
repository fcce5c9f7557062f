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

from elastic.compat import keras_stack
from elastic.runs.best_epoch import BestEpoch
from elastic.runs.checkpoint import Interrupted
from elastic.runs.progress import (
    announce,
    epoch_label,
    print_epoch,
    record_epoch,
    summary_of,
)
from elastic.runs.tally import Tally
from elastic.schemes.fixed import HEAD, fixed_mask
from elastic.schemes.scheme import Choice, Scheme
from elastic.schemes.solved_head import TRIED, safe_scale, solve_head
from elastic.selection.cache_costs import Budget, CacheCosts
from elastic.selection.closed_loop import ClosedLoop, steps_drift_ms
from elastic.selection.dates import due_epochs, until
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.selection.items import layers_of, reachable
from elastic.steps.epoch import (
    READ,
    Diverged,
    EpochProgress,
    plain_calls,
    run_epoch,
    validate,
)
from elastic.steps.masked_step import ModelState, StepMaker
from elastic.steps.training_step import evaluation_function, optimizer_for
from elastic.workers.addresses import WorkerLost
from elastic.workers.agreement import TABLE, average_statistics, slowest_table
from elastic.workers.cluster import ALONE
from elastic.workers.step_mean import StepMean, cluster_of
from selection_solver_DP import choose_cached_tensors, choose_tensors


def step_maker(model, dataset, settings, penalty=None, cluster=ALONE):
    """Returns the StepMaker of a run, with its optimizer; a ModelState if no epoch trains.

    penalty: as in TrainingStep. cluster: workers.cluster.Cluster that trains the model.
    """
    optimizer = optimizer_for(dataset, settings, model.trainable_variables)
    mean = StepMean(cluster) if cluster.size > 1 else None
    if not settings.trained_epochs:  # tracing a step takes seconds
        return ModelState(model, optimizer, mean)
    return StepMaker(model, optimizer, settings.weight_decay, *dataset.train.element_spec,
                     penalty=penalty, class_weight=dataset.class_weight, mean=mean)


# ---------------------------------------------------------------- the loop

class _Run:
    """Holds what changes while a run trains.

    epoch: the current or next one, from 1. progress: its EpochProgress; None between epochs.
    choice: the Choice in use. chosen: the same if it was made before this epoch, else None.
    tally: Tally of the epochs so far.
    best: BestEpoch; None without validation images.
    before, importance_before: clock.seconds and scheme.importance_seconds when the epoch began.
    """

    def __init__(self, scheme, clock, cache, best):
        self.scheme, self.clock, self.cache, self.best = scheme, clock, cache, best
        self._use(scheme.maker)
        if cache is not None:
            cache.attach(scheme.maker)
        self.epoch, self.choice, self.chosen = 1, None, None
        self.progress = self.result = None
        self.tally = Tally()
        self.before, self.importance_before = dict.fromkeys(clock.seconds, 0.0), 0.0

    def _use(self, maker):
        self.maker, self.step, self.evaluate = maker, None, evaluation_function(maker.model)

    def select(self):
        """Asks the scheme what to train in the next epoch, and makes its step."""
        self.importance_before = self.scheme.importance_seconds
        self.chosen = self.scheme.select(self.epoch, self.result)
        if self.chosen is None:
            return
        self.choice = choice = self.chosen
        if self.scheme.maker is not self.maker:
            self._use(self.scheme.maker)
        if self.step is None or (choice.mask != self.step.mask).any():
            self.step = None  # frees the old graph before the new one is made
            self.step = self.maker.step(choice.mask)
        if self.cache is not None:
            self.cache.begin(self.step, choice.timings)

    def solve(self, dataset, pause):
        """Solves the output layer in this epoch; `result` is None if `pause` returned True."""
        self.result = solve_head(self.maker.model, dataset, cluster_of(self.maker), pause)
        if self.result is not None:
            self.choice = self.chosen = Choice(fixed_mask(HEAD, self.maker.model))
            self.maker.optimizer.iterations.assign(dataset.steps)  # as after any other epoch

    def keep_steady(self, dataset):
        """Finds the scale of the learning rate for the first epoch after the head was solved."""
        scale = safe_scale(
            self.step, keras_stack.schedule(self.maker.optimizer).scale,
            list(dataset.batches(dataset.order(self.epoch)[:TRIED], dataset.view(self.epoch))),
            self.evaluate, self.maker, cluster_of(self.maker))
        if scale < 1:
            print('learning rate times {:.2g}: the first steps from the solved head would raise '
                  'the loss'.format(scale))

    def calls(self, dataset):
        """Returns the remaining Calls of the epoch."""
        done = self.progress.count
        if self.cache is not None:
            return self.cache.calls(self.step, self.epoch, done)
        return plain_calls(self.step, dataset.batches(dataset.order(self.epoch)[done:],
                                                      dataset.view(self.epoch)))

    def trains(self, num_epochs):
        """Returns whether an epoch is left to train."""
        over = self.best is not None and self.best.is_over(self.tally.epochs)
        return self.epoch <= num_epochs and not over

    def judge(self, dataset, pause):
        """Returns the Evaluation after the epoch, on the test images if there are no others."""
        images = dataset.test if self.best is None else dataset.validation
        judged = validate(self.evaluate, images, pause)
        if judged is not None:  # rounding may differ between boards, but not a decision
            loss, accuracy = cluster_of(self.maker).of_chief(lambda: judged[:2])
            judged = judged._replace(loss=loss, accuracy=accuracy)
        if judged is not None and self.best is not None:
            self.best.judge(self.epoch, judged.loss, judged.accuracy, self.maker.model)
        return judged

    def test(self, dataset, pause):
        """Returns the Evaluation of the kept weights on the test images."""
        self.best.put_back(self.maker.model)
        return validate(self.evaluate, dataset.test, pause)

    @property
    def learning_rate(self):
        return float(keras_stack.learning_rate(self.maker.optimizer))

    def row(self, judged):
        """Returns the record of the epoch that has ended. judged: from `judge`."""
        result, seconds = self.result, self.clock.seconds
        images = 'test' if self.best is None else 'validation'
        return dict(
            {images + '_accuracy': judged.accuracy, images + '_loss': judged.loss},
            epoch=self.epoch, learning_rate=self.learning_rate, train_accuracy=result.accuracy,
            train_loss=result.loss, train_penalty=result.penalty,
            step_ms=float(np.median(result.step_ms)),
            importance_seconds=self.scheme.importance_seconds - self.importance_before,
            train_seconds=self.clock.train_seconds, **self.clock.monitor.epoch(),
            **{name + '_seconds': seconds[name] - self.before[name] for name in seconds})

    def next_epoch(self, row):
        """Moves on to the next epoch. row: the record of the one that has ended."""
        self.tally.add(row, self.result.ms)
        self.before, self.progress = dict(self.clock.seconds), None
        self.epoch += 1

    # ------------------------------------------------------------------------- checkpoints

    PLAIN_FIELDS = ('epoch', 'choice', 'result', 'before', 'importance_before')

    def state(self):
        """Returns the tree of a checkpoint, between two steps."""
        return dict(
            {name: getattr(self, name) for name in self.PLAIN_FIELDS},
            has_chosen=self.chosen is not None, progress=self.progress and vars(self.progress),
            tally=self.tally.state(), variables=self.maker.everything, scheme=self.scheme.state(),
            best=self.best and self.best.state(),
            cache=self.cache and self.cache.state(), clock=self.clock.state())

    def restore(self, state):
        """Resumes from the tree of a checkpoint."""
        for name in self.PLAIN_FIELDS:
            setattr(self, name, state[name])
        self.chosen = self.choice if state['has_chosen'] else None
        self.progress = state['progress'] and EpochProgress(state['progress'])
        self.tally.restore(state['tally'])
        if self.best is not None:
            self.best.restore(state['best'])
        self.scheme.restore(state['scheme'], self.choice)
        self._use(self.scheme.maker)
        self.maker.assign(state['variables'])
        if self.choice is not None:
            self.step = self.maker.step(self.choice.mask)
            self.step.again = True
        if self.cache is not None:
            self.cache.restore(state['cache'], self.step)
        self.clock.restore(state['clock'])


def train(scheme, dataset, settings, session, cache=None, deadline=None):
    """Trains and records every epoch; returns (measured part of the summary, trained model).

    With validation images, these judge each epoch, and the test images only the kept weights.
    scheme: scheme.Scheme, whose maker holds the model. cache: prefix_cache.PrefixCache or None.
    deadline: deadline.Deadline that ends the run, or None. Raises Diverged if the loss is not
    finite. After trying to write a checkpoint, raises Interrupted if the session's keeper says
    stop, and WorkerLost if another worker does not answer.
    """
    clock, keeper, tested = session.clock, session.keeper, None
    cluster = cluster_of(scheme.maker)
    best = None if dataset.validation is None else BestEpoch(settings.keep, settings.patience)
    with session.preparing():
        run = _Run(scheme, clock, cache, best)
        if session.resumed is not None:
            run.restore(session.resumed.pop('run'))  # pop: it is as large as the model
    if deadline is not None:
        with clock('validation'):
            deadline.time_evaluation(run.evaluate, dataset.validation)

    def keep():
        with clock('checkpoint'):
            kept = keeper.keep(lambda: dict(run=run.state(), records=session.recorder.state(),
                                            deadline=deadline and deadline.state()))
        if keeper.stop() and run.trains(settings.num_epochs):
            raise Interrupted(run.epoch, run.progress.count if run.progress else 0, kept)
        if keeper.stop() and best is not None:  # the final test is left
            raise Interrupted(run.tally.epochs, dataset.steps, kept)

    def train_epoch():
        if run.progress is None:
            with clock('selection'), cluster.watched():
                run.select()
                if settings.solves and run.epoch == 2:
                    run.keep_steady(dataset)
            if run.chosen is not None:
                announce(run.chosen, settings, clock.seconds['selection'] - run.before['selection'],
                         cache)
            run.progress = EpochProgress()
        with clock('step'):
            calls, run.result, lost = run.calls(dataset), None, None
            if deadline is not None:
                calls = deadline.within(calls)
        while run.result is None:
            with clock('step'):
                try:
                    with cluster.watched():
                        run.result = run_epoch(calls, dataset.steps,
                                               epoch_label(run.epoch, settings.num_epochs),
                                               run.progress, keeper.due)
                except Diverged as error:
                    raise Diverged('{} (it was {:.3g})'.format(error, run.learning_rate))
                except WorkerLost as error:
                    lost = error
            if run.result is None:
                keep()
            if lost is not None:
                raise WorkerLost(*lost.args, 'in epoch {} after step {}'.format(
                    run.epoch, run.progress.count))
        clock.move(run.result.first_call_seconds, 'step', 'selection')
        clock.move(run.result.again_seconds, 'step', 'resume')

    if keeper.stop():
        keep()
    while run.trains(settings.num_epochs):
        if settings.solves and run.epoch == 1:
            with clock('head'):
                run.solve(dataset, keeper.stop)
            if run.result is None:
                keep()  # raises
        else:
            train_epoch()
        with clock('validation'):
            average_statistics(run.maker)
            judged = run.judge(dataset, keeper.stop)
        if judged is None:
            keep()  # raises: only a stop ends validation early
        row = run.row(judged)
        record_epoch(session.recorder, scheme, run.chosen, row, run.result, cache)
        if best is None and run.epoch == settings.num_epochs:
            session.recorder.predictions(dataset, judged)
        run.next_epoch(row)
        print_epoch(row, settings.num_epochs)
        if deadline is not None:
            settings = deadline.after(row, judged, run, settings)
            scheme.replan(settings)
            keras_stack.schedule(run.maker.optimizer).end_at(deadline.total_steps)
        if keeper.pays():
            keep()
    if run.epoch <= settings.num_epochs:
        print('training ends: no epoch was better than epoch {} for {} epochs'.format(
            best.epoch, settings.patience))
    if best is not None:
        with clock('validation'):
            tested = run.test(dataset, keeper.stop)
        if tested is None:
            keep()  # raises
        session.recorder.predictions(dataset, tested)
    if cache is not None:
        cache.end()
    outcome = run.tally.outcome() if best is None else best.outcome(run.tally, tested)
    return summary_of(run.tally, clock, scheme, cache, outcome), scheme.maker.model


# ---------------------------------------------------------------- elastic training

class ElasticScheme(Scheme):
    """Selects the most important tensors within rho, every `interval` epochs (0: once).

    Paper, section 4. The selector (selection_solver_DP.py) weighs the importance of each tensor
    (importance.py) against its cost at the present speed of the device (closed_loop.py) and with
    the prefix cache (cache_costs.py). If steps drift so far from their predicted time that this
    costs more than selecting, tensors are selected early, by the last importance.
    maker: masked_step.StepMaker. probe: endless tf.data of (images, labels); each evaluation takes
    the next batches. timings: TensorTimings of this model on this machine.
    settings: settings.Settings; with closed_loop, timings follow the speed of the device.
    cache: prefix_cache.PrefixCache or None. With one, rho holds for the whole run.
    The first selection raises InfeasibleBudget if rho is out of reach: check smallest_rho before.
    """

    def __init__(self, maker, probe, timings, settings, cache=None):
        super().__init__('elastic_training', maker)
        self._timings, self._settings, self._cache = timings, settings, cache
        self._batches, self._drawn = iter(probe), 0
        self._cluster = cluster_of(maker)
        self._evaluator = Evaluator(maker, settings.seed)
        self._layers = layers_of(maker.model) if settings.granularity == 'layer' else None
        self._loop = ClosedLoop(timings, maker) if settings.closed_loop else None
        self._budget = Budget(settings)
        self._current, self._choosing_seconds = None, 0.0

    def select(self, epoch, last):
        if epoch <= self._settings.head_epochs:
            return self._head() if epoch == 1 else None
        last = None if self._current is None else last  # not of the epoch that solved the head
        if last is not None:
            self._learn_from(last)
        due = self.is_due(epoch)
        if not due and not self._cluster.of_chief(lambda: self._drifted(epoch, last)):
            return None
        batch, trials = self._next_batch(), []
        del self._evaluator.pass_ms[:]
        importance = self._importance(batch, epoch, trials) if due else self._current.importance
        begin = time.perf_counter()
        table, drift = self._table_now(batch, last)
        table = slowest_table(self._cluster, table)
        planned = self._cache is None or self._settings.deadline is not None
        rho = self._settings.rho if planned else self._budget.rho(epoch)
        rho, chosen = self._cluster.of_chief(
            lambda: (rho, self._chosen(importance, table, rho, epoch, due)), TABLE)
        if chosen is None:
            return None
        self._choosing_seconds = time.perf_counter() - begin
        mask, fallback, table = chosen
        self._cluster.check_same_array(mask, 'tensors to train')
        self._current = Choice(mask, importance, table, fallback, trials, drift, rho=rho)
        return self._current

    def is_due(self, epoch):
        """Returns whether tensors are selected before this epoch, whatever drifts."""
        return epoch in due_epochs(self._settings)

    def replan(self, settings):
        """Uses these settings.Settings, of other epochs or another rho, from now on."""
        self._settings = settings

    def _head(self):
        """Returns the Choice of the head alone."""
        mask, table = fixed_mask(HEAD, self.maker.model), self._timings
        if self._cache is not None:
            table = CacheCosts(self._cache, table, 1, self._settings.head_epochs + 1).at_own_cut(
                mask)
        self._current = Choice(mask, timings=table)
        return self._current

    def state(self):
        return dict(
            importance_seconds=self.importance_seconds, choosing_seconds=self._choosing_seconds,
            drawn=self._drawn, random=self._evaluator.random.get_state(),
            scale=self._evaluator.scale, memory=self._evaluator.memory,
            budget=self._budget.left, timings=self._timings,
            loop=self._loop and (self._loop.timings, self._loop.reference))

    def restore(self, state, choice):
        """Resumes from `state`; on another device, keeps the timing table measured there."""
        self.importance_seconds = state['importance_seconds']
        self._choosing_seconds = state['choosing_seconds']
        self._current = choice
        while self._drawn < state['drawn']:
            self._next_batch()
        self._evaluator.random.set_state(state['random'])
        self._evaluator.memory.update(state.get('memory', {}))
        self._evaluator.scale, self._budget.left = state['scale'], state['budget']
        if state['timings'].key == self._timings.key:
            self._timings = state['timings']
            if self._loop is not None:
                self._loop.timings, self._loop.reference = state['loop']

    def _next_batch(self):
        self._drawn += 1
        return next(self._batches)

    def _learn_from(self, last):
        """Records what the last epoch's steps spent of the budget, and how long they waited."""
        if self._cache is not None:
            self._budget.spend(self._current, last)
        if self._loop is not None:
            (self._cache if last.kind == READ else self._loop).waited(last.wait_ms)

    def _drifted(self, epoch, last):
        """Returns whether drift until the next selection would cost more time than selecting."""
        if self._loop is None or not self._settings.interval:
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

    def _table_now(self, batch, last):
        """Returns (TensorTimings at the device's present speed, drift of their shares)."""
        if self._loop is None:
            return self._timings, 0.0
        ran = () if last is None else (
            self._current.mask, last.ms[last.kind], self._current.cost_of(last.kind))
        drift = self._loop.update(*batch, self._evaluator.pass_ms, *ran)
        return self._loop.timings, drift

    def _chosen(self, importance, table, rho, epoch, due):
        """Returns (mask, fallback, table with the cache's costs); None: keep the last selection."""
        if self._cache is None:
            rho = reachable(table, rho, self._layers)
            return choose_tensors(table, importance, rho, self._layers) + (table,)
        costs = CacheCosts(self._cache, table, epoch, self._settings.num_epochs + 1)
        if not due and rho < costs.smallest_rho(self._layers):
            return None  # too few epochs remain to recover the cost of filling another cache
        return choose_cached_tensors(costs, importance, rho, self._layers)
