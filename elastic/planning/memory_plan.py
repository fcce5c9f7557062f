"""Keeps a run within --memory: what the process may hold, and what is left to a training step.

All else that a run does has to fit, too: tests take no more images than a training batch, images
are decoded one batch ahead, the prefix cache lies on the disk, and importance and the profile take
as many images at once as there is room for.
"""

import math

from elastic.device import host
from elastic.errors import UserError
from elastic.schemes.fixed import HEAD, fixed_mask, is_elastic, matching_mask
from elastic.settings import AUTO, CHOSEN, PRUNE
from elastic.texts import size_text
from elastic.timing.liveness import memory_of
from elastic.timing.memory import Room, largest_batch

MARGIN = 0.1  # of the free memory, which `auto` leaves to other programs
# Bytes that a process takes while it trains, beside tensors: executors, stacks of threads, packed
# operands. MobileNetV2, EfficientNet-Lite0 and ResNet50 took 50 to 190 MB.
BESIDE = 180 * 10 ** 6
LATER = 100 * 10 ** 6  # of these, once the steps of a first selection have run: 85 MB
BESIDE_PROFILE = 190 * 10 ** 6  # of the other steps that a profile runs: 52 to 190 MB
GROWTH = 130 * 10 ** 6  # of the process by its first selection: what a profile and importance leave
STEP = 10 ** 7  # bytes, to which a refusal rounds up: from run to run, a process differs by as much


def set_limit(memory):
    """Limits the process to --memory, bytes or AUTO; call it once TensorFlow is imported.

    Warns of more than is free. Raises UserError for less than the process holds already.
    """
    host.limit_memory(None)  # that of an earlier `fit`
    held, free = host.resident_bytes(), host.available_bytes()
    limit = held + (1 - MARGIN) * free if memory == AUTO else memory
    if limit <= held:
        raise UserError('--memory {} is less than the {} that Python and TensorFlow alone take '
                        'here; use more'.format(size_text(limit), size_text(held)))
    if limit > held + free:
        print('warning: --memory {} is more than the {} that this machine has free: the run may '
              'swap or be killed'.format(size_text(limit), size_text(held + free)))
    host.limit_memory(limit)


def _held():
    host.release_memory()
    return host.resident_bytes()


class StepMemory:
    """Says what the steps of a StepMaker may hold, and what they would hold.

    memory: timing.memory.Memory of its steps. adds_up: whether they sum gradients up, in variables
    as large as the weights. beside: bytes that the process takes beside a step, at most.
    whole: whether importance needs the whole batch.
    """

    def __init__(self, maker, adds_up=False):
        self.memory = memory_of(maker)
        self.beside = BESIDE + adds_up * self.memory.weights
        self.whole = maker.whole_because is not None
        self._first = None  # bytes that the process held at the first selection
        self.least = self.memory.peak(fixed_mask(HEAD, maker.model))

    @property
    def room(self):
        """Returns the Room of the steps of a selection. What the head needs was checked before.

        What the process has gained since the first selection is part of what is set aside.
        """
        held = _held()
        self._first = self._first or held
        beside = max(self.beside + self._first - held, LATER)
        return Room(self.memory, max(host.memory_limit() - held - beside, self.least))

    def at_once(self, beside=0):
        """Returns how many images importance and the profile take at once: a divisor of a batch.

        It is 1 if even that exceeds the room. beside: bytes that they take beside it.
        """
        batch, most = self.memory.batch, host.memory_limit() - _held() - self.beside - beside
        return batch if self.whole else largest_batch(
            lambda images: self.memory.importance_peak(images) <= most, batch, batch) or 1


def check_memory(settings, maker):
    """Raises UserError if no step of a run fits into --memory; returns its StepMemory.

    settings: settings.Settings. maker: masked_step.StepMaker of what a step computes at once.
    """
    adds_up, kind = settings.micro_batch is not None, settings.train_type
    flag, elastic = '--micro_batch' if adds_up else '--batch_size', is_elastic(kind)
    step = StepMemory(maker, adds_up)
    name = HEAD if elastic else 'full_training' if kind == PRUNE else kind
    mask = matching_mask(settings.train_tensors, maker.model) if kind == CHOSEN else fixed_mask(
        name, maker.model)

    def need(images):
        """Returns the bytes of the smallest step of the run, and of importance if it is elastic."""
        importance = step.memory.importance_peak(images if step.whole else 1) if elastic else 0
        return max(step.memory.peak(mask, images), importance)
    batch, limit = step.memory.batch, host.memory_limit()
    held = _held() + step.beside + elastic * GROWTH
    if held + need(batch) <= limit:
        return step
    fitting = largest_batch(lambda images: held + need(images) <= limit, batch - 1,
                            batch if adds_up else None)
    needed = size_text(STEP * math.ceil((held + need(batch)) / STEP))
    raise UserError('--memory {} is too small: {} needs {} with {} {}; use that or more, {}'.format(
        size_text(limit), 'training the head alone' if elastic else 'this --train_type', needed,
        flag, batch, 'or {} {}'.format(flag, fitting) if fitting else
        'as not even a batch of one image fits'))
