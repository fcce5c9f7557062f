"""Runs and times the steps of an epoch, and validates on the test set."""

import functools
import math
import time
from typing import Any, Callable, Dict, NamedTuple

import numpy as np
from tqdm import tqdm

PLAIN, FILL, READ = 'plain', 'fill', 'read'
SOLVE = 'solve'  # the batches of the epoch that solves the head, which train nothing


class Diverged(RuntimeError):
    """Signals that the loss is no longer finite."""


class Call(NamedTuple):
    """Holds one training step on one batch.

    kind: PLAIN; FILL, which also writes the prefix cache; or READ, which reads it.
    run: () -> training_step.StepResult. step: the cut_steps.MaskedStep that it calls.
    """
    kind: str
    run: Callable
    step: Any


def plain_calls(step, batches):
    """Yields the Call of a MaskedStep for each (inputs, labels) of `batches`."""
    for inputs, labels in batches:
        yield Call(PLAIN, functools.partial(step, inputs, labels), step)


class EpochResult(NamedTuple):
    """Holds the outcome of an epoch.

    loss, accuracy, penalty: means over the epoch (training_step.StepResult).
    ms: kind of Call -> ms of each step but first calls, including the wait for its batch.
    waits: kind -> the part of these ms outside the step function: waiting for input, Python.
    first_call_seconds: by how much first calls of new step functions took longer than other steps.
    firsts: kind -> number of these first calls.
    remade_seconds: as first_call_seconds, for functions that a resumed run had to make again.
    """
    loss: float
    accuracy: float
    penalty: float
    ms: Dict
    waits: Dict
    first_call_seconds: float
    firsts: Dict = {}
    remade_seconds: float = 0.0

    @property
    def step_ms(self):
        """Returns the ms of the steps of all kinds."""
        return [ms for kind in sorted(self.ms) for ms in self.ms[kind]]

    @property
    def kind(self):
        """Returns the kind of most steps."""
        return max(self.ms, key=lambda kind: len(self.ms[kind]))

    @property
    def wait_ms(self):
        """Returns the median wait of the most frequent kind, in ms."""
        return float(np.median(self.waits[self.kind]))

    @property
    def counts(self):
        """Returns the number of steps of each kind."""
        return {kind: len(ms) + self.firsts.get(kind, 0) for kind, ms in self.ms.items()}


class EpochProgress:
    """Sums up the steps of an epoch so far and keeps their times. count: number of steps."""

    def __init__(self, state=None):
        self.loss = self.penalty = 0.0
        self.correct = self.seen = self.count = 0
        self.ms, self.waits, self.firsts = {}, {}, []
        vars(self).update(state or {})

    def add(self, call, result, loss, ms, wait_ms):
        """Adds one step: its Call, its StepResult, the loss as a float, and its times in ms."""
        self.loss += loss
        self.penalty += float(result.penalty)
        self.correct += int(result.correct)
        self.seen += call.step.examples
        if call.step.compiled:
            self.ms.setdefault(call.kind, []).append(ms)
            self.waits.setdefault(call.kind, []).append(wait_ms)
        else:
            self.firsts.append([call.kind, ms, wait_ms, call.step.remade])
            call.step.compiled = True
        self.count += 1

    def result(self):
        """Returns the EpochResult."""
        ms, waits = dict(self.ms), dict(self.waits)
        left_out, extra = {}, [0.0, 0.0]
        for kind, first_ms, wait_ms, again in self.firsts:
            if kind in self.ms:
                extra[again] += max(0.0, first_ms - float(np.median(self.ms[kind])))
                left_out[kind] = left_out.get(kind, 0) + 1
            else:  # this kind has only first calls
                ms.setdefault(kind, []).append(first_ms)
                waits.setdefault(kind, []).append(wait_ms)
        return EpochResult(self.loss / self.count, self.correct / self.seen,
                           self.penalty / self.count, ms, waits, extra[0] / 1e3, left_out,
                           extra[1] / 1e3)


def run_epoch(calls, num_steps, title, progress=None, pause=lambda: None):
    """Runs and times all Calls, with a progress bar; returns the EpochResult.

    progress: EpochProgress to continue. pause: called after every step, outside its time; it may
    raise to end the epoch, which a later call can continue with the iterator `calls`.
    Raises Diverged if the loss is not finite.
    """
    progress = progress or EpochProgress()
    with tqdm(total=num_steps, desc=title, unit='step', leave=False, disable=None,
              mininterval=0.5, initial=progress.count) as bar:
        begin = time.perf_counter()
        for call in calls:
            called = time.perf_counter()
            result = call.run()
            loss = float(result.loss)  # waits for the device
            busy = time.perf_counter() - called
            if not math.isfinite(loss + float(result.penalty)):
                raise Diverged('the loss is {} at step {} of {}: use --clip_norm, more '
                               '--warmup_steps or a smaller --learning_rate'.format(
                                   loss, progress.count + 1, title))
            now = time.perf_counter()
            progress.add(call, result, loss, 1e3 * (now - begin), 1e3 * (now - begin - busy))
            bar.set_postfix(loss='{:.3f}'.format(progress.loss / progress.count),
                            acc='{:.1f}%'.format(100 * progress.correct / progress.seen),
                            ms='{:.1f}'.format(1e3 * (now - begin)), refresh=False)
            bar.update()
            pause()
            begin = time.perf_counter()
    return progress.result()


class Evaluation(NamedTuple):
    """Holds the outcome of a test on n images.

    loss, accuracy: means over the images. labels, predicted: (n,) int, numbers of classes.
    probability: (n,) float32, of the predicted class.
    """
    loss: float
    accuracy: float
    labels: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray


def validate(evaluate, batches, pause=lambda: None):
    """Returns the Evaluation of these batches. evaluate: from training_step.evaluation_function.

    pause: called after every batch; it may raise.
    """
    loss, correct, rows = 0.0, 0, []
    for images, labels in batches:
        batch_loss, hits, *found = evaluate(images, labels)
        loss += float(batch_loss)
        correct += int(hits)
        rows.append([each.numpy() for each in [labels] + found])
        pause()
    labels, predicted, probability = map(np.concatenate, zip(*rows))
    return Evaluation(loss / len(labels), correct / len(labels), labels, predicted, probability)
