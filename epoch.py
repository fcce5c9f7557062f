"""One epoch: its steps, run and timed, and the test set behind it.

Takes an iterable of Calls, each one training step on its batch, wherever that comes from; gives an
EpochResult.
"""

import functools
import math
import time
from typing import Any, Callable, Dict, NamedTuple

import numpy as np
from tqdm import tqdm

PLAIN, FILL, CONVERT, READ = 'plain', 'fill', 'convert', 'read'


class Diverged(RuntimeError):
    """The loss is no longer finite."""


class Call(NamedTuple):
    """One training step on one batch.

    kind: PLAIN; FILL, which also writes the prefix cache; CONVERT, which writes it, too, from what
    it reads of the one before; READ, which reads it.
    run: () -> training_step.StepResult. step: the masked_step.MaskedStep that it calls.
    size: examples.
    """
    kind: str
    run: Callable
    step: Any
    size: int


def plain_calls(step, batches):
    """Generator of the Calls of a MaskedStep for (inputs, labels) of tf.data."""
    for inputs, labels in batches:
        yield Call(PLAIN, functools.partial(step, inputs, labels), step, int(labels.shape[0]))


class EpochResult(NamedTuple):
    """loss, accuracy, penalty: means over the epoch (training_step.StepResult).

    ms: kind of Call -> ms of every step but a first call, with what it waited for its batch.
    waits: kind -> ms of these spent outside the step function: input that is not ready, Python.
    first_call_seconds: how much longer first calls of new step functions took than usual ones.
    """
    loss: float
    accuracy: float
    penalty: float
    ms: Dict
    waits: Dict
    first_call_seconds: float

    @property
    def step_ms(self):
        """Of all kinds."""
        return [ms for kind in sorted(self.ms) for ms in self.ms[kind]]

    @property
    def kind(self):
        """That of most steps."""
        return max(self.ms, key=lambda kind: len(self.ms[kind]))

    @property
    def wait_ms(self):
        """Median, of the steps of most steps' kind."""
        return float(np.median(self.waits[self.kind]))


def run_epoch(calls, num_steps, title):
    """Runs the Calls: updates, running loss and accuracy, time of every step."""
    total_loss, penalty, correct, seen, count = 0.0, 0.0, 0, 0, 0
    ms, waits, firsts = {}, {}, []
    with tqdm(total=num_steps, desc=title, unit='step', leave=False, disable=None,
              mininterval=0.5) as bar:
        begin = time.perf_counter()
        for call in calls:
            called = time.perf_counter()
            result = call.run()
            loss = float(result.loss)  # waits for the device
            busy = time.perf_counter() - called
            penalty += float(result.penalty)
            if not math.isfinite(loss + penalty):
                raise Diverged('the loss is {} at step {} of {}: use a smaller --learning_rate'
                               .format(loss, count + 1, title))
            total_loss, count = total_loss + loss, count + 1
            correct += int(result.correct)
            seen += call.size
            now = time.perf_counter()
            if call.step.called:
                ms.setdefault(call.kind, []).append(1e3 * (now - begin))
                waits.setdefault(call.kind, []).append(1e3 * (now - begin - busy))
            else:
                firsts.append((call.kind, 1e3 * (now - begin), 1e3 * (now - begin - busy)))
                call.step.called = True
            bar.set_postfix(loss='{:.3f}'.format(total_loss / count),
                            acc='{:.1f}%'.format(100 * correct / seen),
                            ms='{:.1f}'.format(1e3 * (now - begin)), refresh=False)
            begin = now
            bar.update()
    extra = 0.0
    for kind, first_ms, wait in firsts:
        if kind in ms:
            extra += max(0.0, first_ms - float(np.median(ms[kind])))
        else:  # the only one of its kind
            ms[kind], waits[kind] = [first_ms], [wait]
    return EpochResult(total_loss / count, correct / seen, penalty / count, ms, waits, extra / 1e3)


def validate(evaluate, batches):
    """(mean loss, accuracy) over the whole test set, in inference mode."""
    loss, correct, seen = 0.0, 0, 0
    for images, labels in batches:
        batch_loss, hits = evaluate(images, labels)
        loss += float(batch_loss)
        correct += int(hits)
        seen += int(labels.shape[0])
    return loss / seen, correct / seen
