"""Holds what changes while a run trains, and stops and resumes it at any step.

`Run.state` is all that a checkpoint holds, and `Run.resume` puts it back, in one order.
"""

import functools
import time

import numpy as np

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.backbone import output_layer
from elastic.runs.checkpoint import Interrupted
from elastic.runs.judge import judge_of
from elastic.runs.progress import announce, epoch_label, print_epoch, record_epoch, summary_of
from elastic.runs.tally import Tally
from elastic.schemes import statistics
from elastic.schemes.fixed import HEAD, fixed_mask
from elastic.schemes.scheme import Choice
from elastic.schemes.solved_head import TRIED, safe_scale, solve_head
from elastic.settings import AUTO, TRAINING
from elastic.steps.epoch import Diverged, EpochProgress, run_epoch, validate
from elastic.steps.optimizer import UNTESTED
from elastic.steps.rates import JUDGED, STEPS, range_test
from elastic.steps.training_step import evaluation_function
from elastic.workers.addresses import WorkerLost
from elastic.workers.agreement import average_statistics
from elastic.workers.step_mean import cluster_of


class Run:
    """Holds the parts of a run, and its place in them.

    scheme: scheme.Scheme, whose maker holds the model. dataset: datasets.Dataset. settings:
    settings.Settings, which the plan may replace. session: session.Session. cache: PrefixCache or
    NoCache. plan: deadline.AllEpochs or Deadline. judge: judge.LastEpoch or BestEpoch.
    epoch: the current or next one, from 1. progress: its EpochProgress; None between epochs.
    choice: the Choice in use. choice_is_new: whether it was made before this epoch.
    result: EpochResult of the last epoch. head: values of the output layer that training starts
    from, once the best ones were judged; else None. tally: Tally of the epochs so far.
    before, importance_before: clock.seconds and scheme.importance_seconds when the epoch began.
    """

    def __init__(self, scheme, dataset, settings, session, cache, plan):
        self.scheme, self.dataset, self.settings, self.session = scheme, dataset, settings, session
        self.cache, self.plan, self.judge = cache, plan, judge_of(dataset, settings)
        self.clock, self.keeper, self.tally = session.clock, session.keeper, Tally()
        self.cluster = cluster_of(scheme.maker)
        self._use(scheme.maker)
        self.epoch, self.choice, self.choice_is_new = 1, None, False
        self.progress = self.result = self.head = None
        self.test_seconds = 0.0  # of the range test before this epoch
        self.before, self.importance_before = dict.fromkeys(self.clock.seconds, 0.0), 0.0

    def _use(self, maker):
        self.maker, self.step, self.evaluate = maker, None, evaluation_function(maker.model)
        self.cache.attach(maker)

    @property
    def goes_on(self):
        """Returns whether an epoch is left to train."""
        over = self.judge.is_over(self.tally.epochs)
        return self.epoch <= self.settings.num_epochs and not over

    @property
    def solves(self):
        """Returns whether this epoch solves the output layer."""
        return self.settings.solves and self.epoch == 1

    @property
    def tests_rates(self):
        """Returns whether a test finds the learning rate before this epoch, by its tensors."""
        firsts = 1, 1 + self.settings.first_epochs
        return self.settings.learning_rate == AUTO and self.epoch in firsts

    # ------------------------------------------------------------------------------- an epoch

    def solve(self):
        """Solves the output layer in this epoch."""
        trained = self.settings.trained_epochs > 0
        arguments = (self.maker.model, self.dataset, self.cluster,
                     functools.partial(self.pause, self.keeper.stop), trained)
        if self.settings.keep_statistics:
            self.result, self.head, found = statistics.solve(
                *arguments, self.settings.continue_from)
            self.session.statistics = None if trained else found
        else:
            self.result, self.head = solve_head(*arguments)
        self.choice, self.choice_is_new = Choice(fixed_mask(HEAD, self.maker.model)), True
        self.maker.optimizer.iterations.assign(self.dataset.steps)  # as after any other epoch

    def choose(self):
        """Asks the scheme what to train in this epoch, and makes its step."""
        self.importance_before, self.test_seconds = self.scheme.importance_seconds, 0.0
        if self.head is not None:
            keras_stack.assign_arrays(output_layer(self.maker.model).weights, self.head)
            self.head = None
        with self.cluster.watched():
            choice = self.scheme.select(self.epoch, self.result)
            self.choice_is_new = choice is not None
            if self.choice_is_new:
                self.choice = choice
                self._make_step()
            if self.tests_rates:
                self._find_rate()
            elif self.settings.solves and self.epoch == 2:
                self._keep_steady()
        self.progress = EpochProgress()

    def _make_step(self):
        if self.scheme.maker is not self.maker:
            self._use(self.scheme.maker)
        if self.step is None or (self.choice.mask != self.step.mask).any():
            self.step = None  # frees the old graph before the new one is made
            self.step = self.maker.step(self.choice.mask)
        self.cache.begin(self.step, self.choice.timings)

    def _keep_steady(self):
        """Finds the scale of the learning rate for the first epoch after the head was solved."""
        numbers, view = self.dataset.order(self.epoch)[:TRIED], self.dataset.view(self.epoch)
        scale = safe_scale(
            self.step, keras_stack.schedule(self.maker.optimizer).scale,
            list(self.dataset.batches(numbers, view)), self.evaluate, self.maker, self.cluster)
        if scale < 1:
            print('learning rate times {:.2g}: the first steps from the solved head would raise '
                  'the loss'.format(scale))

    def _find_rate(self):
        """Finds the learning rate for the tensors that train from now on."""
        begin = time.perf_counter()
        schedule, order = keras_stack.schedule(self.maker.optimizer), self.dataset.order(self.epoch)
        numbers = np.resize(order, (STEPS, order.shape[1]))
        images = list(self.dataset.validation.take(JUDGED)) if self.settings.solves else []

        def judge():
            return validate(self.evaluate, images).loss
        try:
            test = range_test(
                self.step, schedule, lambda: self.dataset.batches(
                    numbers, self.dataset.view(self.epoch)), self.maker, self.cluster,
                judge if images else None)
        except UserError as error:
            if self.settings.deadline is None:
                raise
            rate, why = TRAINING.learning_rate, str(error)  # the solved head is kept at least
        else:
            rate, why = test.rate, 'in a test of {} steps, the loss fell around {:.2g}'.format(
                len(test.rates), test.centre)
            self.session.recorder.range_test(test, self.epoch)
        schedule.scale.assign(rate / UNTESTED)
        self.test_seconds = time.perf_counter() - begin
        print('learning rate {:.2g}: {}'.format(rate, why))

    def announce(self):
        """Prints what was chosen before this epoch."""
        if self.choice_is_new:
            seconds = self.clock.seconds['selection'] - self.before['selection']
            announce(self.choice, self.settings, seconds, self.cache)

    def train_epoch(self):
        """Trains what is left of the epoch, and sorts its first calls out."""
        calls = self.plan.within(self.cache.calls(self.step, self.epoch, self.progress.count))
        try:
            with self.cluster.watched():
                self.result = run_epoch(
                    calls, self.dataset.steps, epoch_label(self.epoch, self.settings.num_epochs),
                    self.progress, functools.partial(self.pause, self.keeper.due))
        except Diverged as error:
            raise Diverged('{} (it was {:.3g})'.format(error, self.learning_rate))
        except WorkerLost as error:
            self.keep()
            raise WorkerLost(*error.args, 'in epoch {} after step {}'.format(
                self.epoch, self.progress.count))
        self.clock.move(self.result.first_call_seconds, 'step', 'selection')
        self.clock.move(self.result.remade_seconds, 'step', 'resume')

    def judged(self, images):
        """Returns the Evaluation of the present weights on tf.data of (images, labels)."""
        return validate(self.evaluate, images, functools.partial(self.pause, self.keeper.stop))

    def end_epoch(self):
        """Judges the epoch, records it, and moves on to the next one."""
        with self.clock('validation'):
            average_statistics(self.maker)
            judged = self.judge.epoch(self)
        row = self._row(judged)
        choice = self.choice if self.choice_is_new else None
        record_epoch(self.session.recorder, self.scheme, choice, row, self.result, self.cache)
        if self.epoch == self.settings.num_epochs and not self.judge.tests_at_end:
            self.session.recorder.predictions(self.dataset, judged)
        self.tally.add(row, self.result.ms)
        self.before, self.progress = dict(self.clock.seconds), None
        self.epoch += 1
        print_epoch(row, self.settings.num_epochs)
        self.plan.after(row, judged, self)

    @property
    def learning_rate(self):
        return float(keras_stack.learning_rate(self.maker.optimizer))

    def _row(self, judged):
        """Returns the record of the epoch that has ended. judged: its Evaluation."""
        result, seconds, images = self.result, self.clock.seconds, self.judge.images
        return dict(
            {images + '_accuracy': judged.accuracy, images + '_loss': judged.loss},
            epoch=self.epoch, learning_rate=self.learning_rate, train_accuracy=result.accuracy,
            train_loss=result.loss, train_penalty=result.penalty,
            step_ms=float(np.median(result.step_ms)),
            importance_seconds=self.scheme.importance_seconds - self.importance_before,
            train_seconds=self.clock.train_seconds, **self.clock.monitor.epoch(),
            **{name + '_seconds': seconds[name] - self.before[name] for name in seconds})

    def summary(self):
        """Tests the kept weights, and returns the measured part of the summary, a dict."""
        outcome = self.judge.end(self)
        self.cache.end()
        return summary_of(self.tally, self.clock, self.scheme, self.cache, outcome)

    # ------------------------------------------------------------------------- checkpoints

    PLACE = ('epoch', 'choice', 'choice_is_new', 'result', 'head', 'before', 'importance_before')

    def pause(self, due):
        """Writes a checkpoint if one is due: the only place where a run stops.

        due: () -> bool, of the Keeper. Raises Interrupted if the run is to stop.
        """
        if due():
            kept = self.keep()
            if self.keeper.stop() and self.goes_on:
                raise Interrupted(self.epoch, self.progress.count if self.progress else 0, kept)
            if self.keeper.stop() and self.judge.tests_at_end:
                raise Interrupted(self.tally.epochs, self.dataset.steps, kept)

    def keep(self):
        """Writes a checkpoint; returns whether that worked."""
        with self.clock('checkpoint'):
            return self.keeper.keep(self.state)

    def state(self):
        """Returns the tree of a checkpoint, between two steps."""
        run = dict(
            {name: getattr(self, name) for name in self.PLACE},
            progress=self.progress and vars(self.progress), tally=self.tally.state(),
            judge=self.judge.state(), scheme=self.scheme.state(),
            variables=self.maker.everything, cache=self.cache.state(), clock=self.clock.state())
        return dict(run=run, records=self.session.recorder.state(), deadline=self.plan.state())

    def resume(self):
        """Goes on from the session's checkpoint, if there is one.

        The plan and the recorder have resumed before. A scheme may make another model, which the
        weights fit; then the step is cut out of its graph, and the cache is filled for that step.
        """
        if self.session.resumed is None:
            return
        state = self.session.resumed.pop('run')  # pop: it is as large as the model
        for name in self.PLACE:
            setattr(self, name, state[name])
        self.progress = state['progress'] and EpochProgress(state['progress'])
        self.tally.restore(state['tally'])
        self.judge.restore(state['judge'])
        self.scheme.restore(state['scheme'], self.choice)
        self._use(self.scheme.maker)
        self.maker.assign(state['variables'])
        if self.choice is not None:
            self.step = self.maker.step(self.choice.mask)
            self.step.remade = True
        self.cache.restore(state['cache'], self.step)
        self.clock.restore(state['clock'])
