"""Plans the epochs of a run, with or without a deadline.

`plan`, a pure function, finds rho and the number of epochs. Deadline measures the run, plans again
after each epoch, and finds the step at which the run stops.
"""

import itertools
import math
import os
import time
from typing import NamedTuple

from elastic.compat import keras_stack
from elastic.schemes.solved_head import views_of
from elastic.settings import AUTO
from elastic.steps.epoch import validate
from elastic.steps.rates import STEPS
from elastic.texts import duration_text

# EfficientNet-Lite0 on Fashion-MNIST with the prefix cache: rho 0.5 loses nothing against full
# training, 0.35 nearly nothing, 0.25 two points (docs/benchmarks.md).
FLOOR, ENOUGH = 0.3, 0.5
GOAL, MOST = 12, 36  # epochs: fewer only if there is no time at FLOOR, more only beyond ENOUGH
PROFILE = 60.0  # s that must be left to begin a profile; with less, the head alone is solved
SOLVING = 5.0  # s beside the features
SELECTION = (3.0, 8)  # s and full steps that a selection takes, until one was measured
TIMED = 4  # batches that show what judging an image costs, before training
WORTH_WHILE = 0.1  # least share of an epoch that is trained as the last one
FINISH = 1.0  # s to save and to leave the process, beside the final test
EXPORT = 20.0  # s more to convert the model


def due_epochs(settings):
    """Returns the epochs, from 1, before which tensors are selected."""
    first = settings.first_epochs + 1
    dates = range(1, settings.num_epochs + 1, settings.interval or settings.num_epochs)
    return [first] + [epoch for epoch in dates if epoch > first]


def until(dates, epoch, num_epochs):
    """Returns the epoch of the selection after `epoch`; num_epochs + 1 if there is none."""
    return next((date for date in dates if date > epoch), num_epochs + 1)


class Plan(NamedTuple):
    """Holds what to do with the time. rho: of each step. num_epochs: of the whole run."""
    rho: float
    num_epochs: int

    def __str__(self):
        return 'rho {:.2f} for {} epoch{}'.format(self.rho, self.num_epochs,
                                                  's' * (self.num_epochs > 1))


class Pace(NamedTuple):
    """Holds what training costs here, in seconds.

    steps: per epoch. full_step: of full training. epoch: beside its steps, as for validation.
    selection: one of them. interval: epochs from one to the next; 0: there is one.
    lows: smallest rho in reach, of a single epoch, and of several. head: to solve it, and to find
    the learning rate, at first.
    image: to judge one image. validation_images, test_images: how many are judged after each epoch,
    and in the final test. saving: at the end of the run, beside that test.
    """
    steps: int
    full_step: float
    epoch: float
    selection: float
    interval: int
    lows: tuple
    head: float = 0.0
    image: float = 0.0
    validation_images: int = 0
    test_images: int = 0
    saving: float = 0.0

    @property
    def finish(self):
        """Returns the seconds of the final test and of saving."""
        return self.saving + self.test_images * self.image

    def rho(self, seconds, epochs):
        """Returns the rho at which these epochs take `seconds`."""
        selections = -(-epochs // self.interval) if self.interval else 1
        spare = seconds - epochs * self.epoch - selections * self.selection
        return spare / (epochs * self.steps * self.full_step)

    def least(self, epochs):
        """Returns the smallest rho that is worth training at."""
        return max(FLOOR, self.lows[epochs > 1])


def plan(seconds, pace, done=0):
    """Returns the Plan for these seconds after `done` epochs; None if no epoch fits.

    Lowers rho to FLOOR before it gives up epochs: of the same time, fewer epochs lose more. What is
    left beyond ENOUGH buys more epochs, up to MOST.
    """
    goal = max(1, GOAL - done)
    epochs = next((n for n in range(goal, 0, -1) if pace.rho(seconds, n) >= pace.least(n)), None)
    if epochs is None:
        return None
    while pace.rho(seconds, epochs) > ENOUGH and done + epochs < MOST:
        epochs += 1
    rho = math.floor(1e3 * min(ENOUGH, pace.rho(seconds, epochs))) / 1e3
    return Plan(max(rho, pace.least(epochs)), done + epochs)


def carried_on(found, seconds, each, done):
    """Returns (the Plan at the same rho, epochs after which these seconds are used up, a float).

    each: seconds of an epoch. The last epoch is cut short; a part below WORTH_WHILE is left out.
    """
    end = min(MOST, done + max(0.0, seconds) / each)
    return found._replace(num_epochs=math.ceil(end - WORTH_WHILE)), end


def first_pace(settings, table, dataset, lows):
    """Returns the Pace by the timing table, before anything was measured.

    settings: RunSettings. table: TensorTimings. dataset: datasets.Dataset. lows: as in Pace.
    """
    full_step, one_image = table.t_step / 1e3, table.t_fp / 1e3 / settings.batch_size
    judged = sum(len(labels) for _, labels in dataset.validation)
    head = SOLVING + views_of(dataset) * dataset.num_images * one_image
    if settings.training.learning_rate == AUTO:
        head += 2 * STEPS * ENOUGH * full_step  # of the test that finds it
    return Pace(dataset.steps, full_step, epoch=judged * one_image,
                selection=SELECTION[0] + SELECTION[1] * full_step,
                interval=settings.training.interval, lows=lows, head=head, image=one_image,
                validation_images=judged, test_images=dataset.test_size,
                saving=FINISH + (EXPORT if settings.records.export else 0.0))


def process_seconds():
    """Returns the seconds since this process started, on a clock that also counts sleep."""
    with open('/proc/self/stat') as status:  # the name in brackets may contain spaces
        ticks = int(status.read().rsplit(')', 1)[1].split()[19])
    now = time.clock_gettime(getattr(time, 'CLOCK_BOOTTIME', 7))
    return now - ticks / os.sysconf('SC_CLK_TCK')


class AllEpochs:
    """Plans a run without a deadline: all its epochs, each with all its steps.

    summary: what summary.json says of it.
    """
    summary = {}

    def begin_training(self, evaluate, images):
        """Prepares for the first epoch.

        evaluate: from training_step.evaluation_function. images: tf.data of validation images.
        """

    def within(self, calls):
        """Returns the Calls of an epoch for which there is time."""
        return calls

    def after(self, row, judged, run):
        """Plans what is left after an epoch. row: its record. judged: its Evaluation."""

    def state(self):
        """Returns the tree that `restore` takes."""


class Deadline(AllEpochs):
    """Ends a run after `seconds`, counted from the start of the process.

    pace: Pace. now: () -> seconds since this process started.
    stopped: whether the last epoch was cut short.
    plan: the Plan, once `begin` or `restore` was called.
    """
    def __init__(self, seconds, pace, now=process_seconds):
        self.seconds, self.pace, self._now = seconds, pace, now
        self._resumed, self.stopped = 0.0, False
        self.plan, self._warmup_epochs = None, 0
        self._epoch_ended, self._end = None, math.inf

    @property
    def used(self):
        """Returns the seconds that all processes of the run have used."""
        return self._resumed + self._now()

    @property
    def left(self):
        """Returns the seconds left to train in."""
        return self.seconds - self.used - self.pace.finish

    def begin(self):
        """Makes the first plan, and prints it. Its first epoch solves the head, in any case."""
        found = plan(self.left - self.pace.head, self.pace, 1)
        self.plan = found = found or Plan(self.pace.least(1), 1)
        self._warmup_epochs = found.num_epochs / 4
        print('deadline {}, {} used: the head is solved first, then {}'.format(
            duration_text(self.seconds), duration_text(self.used),
            '{}{}'.format(found, self._why(found)) if found.num_epochs > 1 else
            'no time is left to train'))

    def _why(self, found):
        if found.num_epochs == MOST and self.pace.rho(self.left, MOST) > ENOUGH:
            return '; more would gain little, so the run will end early'
        if found.num_epochs < GOAL:
            return '; {} at that rho would need {}'.format(GOAL, duration_text(
                self.used + self.pace.finish + self.left * GOAL / found.num_epochs))
        return ''

    @property
    def summary(self):
        return dict(rho=self.plan.rho, seconds_used=self.used)

    def settings(self, settings):
        """Returns the settings.Settings with the present Plan."""
        most = int(self._warmup_epochs * self.pace.steps)
        return settings._replace(
            rho=self.plan.rho, num_epochs=self.plan.num_epochs,
            warmup_steps=min(settings.warmup_steps, most))

    def begin_training(self, evaluate, images):
        """Learns what judging an image costs here, so that the first epoch can end in time.

        The first call traces the graph, which may take seconds; it is over before training begins.
        """
        batches = iter(images.take(TIMED))
        first = next(batches)
        validate(evaluate, [first])
        begin = self.used
        judged = validate(evaluate, itertools.chain([first], batches))
        image = max(self.pace.image, (self.used - begin) / len(judged.labels))
        self.pace = self.pace._replace(
            image=image, epoch=max(self.pace.epoch, self.pace.validation_images * image))

    def within(self, calls):
        """Yields the Calls of an epoch, the first in any case, until there is no time for more."""
        self.stopped, begin = False, self.used
        for call in calls:
            yield call
            begin, step = self.used, self.used - begin
            if self.left < self.pace.epoch + step:
                self.stopped = True
                return

    def after(self, row, judged, run):
        """Takes what an epoch cost, and plans what is left; prints a Plan that differs."""
        choice, settings, images = run.choice, run.settings, len(judged.labels)
        self._learn(row, run, images)
        done, self._end = row['epoch'], math.inf
        ended = self.plan._replace(num_epochs=done)
        if self.stopped or done >= MOST:
            found = ended
        elif done + 1 in due_epochs(settings._replace(num_epochs=done + 1)):
            found = plan(self.left, self.pace, done) or ended
        else:
            rho = choice.predicted_ms / choice.timings.t_step
            each = rho * self.pace.steps * self.pace.full_step + self.pace.epoch
            found, self._end = carried_on(self.plan, self.left, each, done)
        self._change(found)
        run.settings = self.settings(settings)
        run.scheme.replan(run.settings)
        keras_stack.schedule(run.maker.optimizer).end_at(self.total_steps)

    @property
    def total_steps(self):
        """Returns the number of steps after which the learning rate is to reach 0."""
        return int(self.pace.steps * min(self._end, self.plan.num_epochs))

    def _change(self, found):
        before, self.plan = self.plan, found
        if found.num_epochs < 2 <= before.num_epochs:
            print('deadline: {} left, too little to train'.format(
                duration_text(max(0.0, self.left))))
        elif found.num_epochs != before.num_epochs or abs(found.rho - before.rho) > 0.02:
            print('deadline: {} left; {} instead of {}'.format(
                duration_text(max(0.0, self.left)), found, before))

    def _learn(self, row, run, images):
        used, pace, choice, result = self.used, self.pace, run.choice, run.result
        if self._epoch_ended is not None:  # the first one also has first calls
            beside = used - self._epoch_ended - row['step_seconds'] - row['selection_seconds']
            pace = pace._replace(epoch=max(0.0, beside),
                                 image=row['validation_seconds'] / images)
        self._epoch_ended = used
        if choice.timings is None:  # the head was solved
            return
        mean_ms = sum(result.step_ms) / len(result.step_ms)
        pace = pace._replace(full_step=choice.timings.t_step / 1e3
                             * mean_ms / choice.mean_ms(result.counts))
        if run.choice_is_new:
            pace = pace._replace(selection=row['selection_seconds'] - run.test_seconds)
        self.pace = pace

    def state(self):
        return dict(warmup_epochs=self._warmup_epochs, used=self.used, rho=self.plan.rho,
                    num_epochs=self.plan.num_epochs)

    def restore(self, state):
        """Resumes from `state`; __init__ gets the Pace."""
        self.plan, self._resumed = Plan(state['rho'], state['num_epochs']), state['used']
        self._warmup_epochs = state['warmup_epochs']
