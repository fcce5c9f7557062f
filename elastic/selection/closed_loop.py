"""Corrects the timing table while the device changes speed: heat, other programs, fewer cores.

If the device slows down as a whole, the shares in the table stay, and so does the choice of
tensors. Forward and backward pass can also slow down differently, which step times do not show. So
both passes are measured again before each selection.
"""

from typing import Any, NamedTuple, Sequence

import numpy as np

from elastic.timing.totals import fitted_scales

CALLS = (2, 5)      # of each pass, in a quick look, and in a longer one if that shows drift
NOISE = (0.25, 0.10)  # largest drift of backward over forward time that is noise, in each look
AGREE = (0.10, 0.25)  # shares of a step: a difference between them comes from gradients' overlap
LEAST = (0.8, 1 / 3)  # smallest scales of weight gradients and of the path of the error gradient
MOST = (6.0, 3.0)   # the largest: overlap hides up to 80 % of weight gradients in a profile
STEP_DRIFT = 0.10   # of the predicted step; a larger difference calls for a new selection
WINDOW = 50         # last steps of an epoch that are compared with the prediction


class Steps(NamedTuple):
    """Holds the steps that were last trained. mask: (N,) bool. ms: of each, at least one.

    cache: CacheCost if they read cached activations, else None.
    """
    mask: np.ndarray
    ms: Sequence
    cache: Any = None

    def predicted_ms(self, table):
        """Returns what a TensorTimings says of such a step."""
        if self.cache is None:
            return table.step_time(self.mask)
        return table._replace(cache=self.cache).reading_time(self.mask)

    def taken_ms(self, loop_ms):
        """Returns what one of the last steps took. loop_ms: of it, the wait for its images."""
        return float(np.median(self.ms[-WINDOW:])) - (loop_ms if self.cache is None else 0.0)


class ClosedLoop:
    """Keeps the timing table true to the present speed of the device, if `update` is called.

    timings: the present TensorTimings, at first the profiler's. reference: TensorTimings as of the
    last correction of shares. maker: masked_step.StepMaker of the training step.
    """

    def __init__(self, timings, maker):
        self.timings = self.reference = timings
        self._maker, self._forward = maker, None

    def waited(self, wait_ms):
        """Records how long a step without a cache waits for its batch, in ms."""
        self.timings = self.timings._replace(t_loop=wait_ms)

    def state(self):
        """Returns the tables that `restore` takes."""
        return [self.timings, self.reference]

    def restore(self, tables):
        """Resumes from what `state` returned, unless another device measured it."""
        if tables[0].key == self.timings.key:
            self.timings, self.reference = tables

    def update(self, inputs, labels, both_ms=(), steps=None):
        """Measures both passes on this batch, corrects `timings`, and returns the drift of shares.

        The drift is the change of backward over forward time since the last correction of shares, 0
        within NOISE. With drift, the table follows the passes. Without, its shares stay, and the
        steps give the speed: there are hundreds of them, and few passes. If steps and passes
        disagree, weight gradients overlap with the error gradient more or less than before; the
        table follows that until the next update.
        both_ms: ms of forward and backward passes of all tensors that were just run, if any; None:
        such passes do not fit in memory, and the steps alone are followed.
        steps: Steps since the last update; None before the first. Call `waited` first.
        """
        table, drift = self._by_passes(inputs, labels, both_ms)
        if steps is not None:
            taken = steps.taken_ms(self.timings.t_loop)
            table = _by_overlap(table, steps, taken)
            if not drift and steps.cache is None:  # a reading step is too short to show the speed
                table = _by_speed(table, steps, taken)
        self.timings = table._replace(t_loop=self.timings.t_loop)
        return drift

    def _by_passes(self, inputs, labels, both_ms):
        """Returns (the reference at the speed of both passes, drift of its shares)."""
        old = self.reference
        if both_ms is None:
            return old, 0.0
        for calls, noise in zip(CALLS, NOISE):
            t_fp, t_bp = self.measure(inputs, labels, calls, both_ms)
            drift = (t_bp / t_fp) / (old.t_bp / old.t_fp) - 1
            if abs(drift) <= noise:
                speed = (t_fp + t_bp) / (old.t_fp + old.t_bp)
                return old.rescaled(speed * old.t_fp, speed * old.t_bp), 0.0
            both_ms = ()
        self.reference = old.rescaled(t_fp, t_bp)
        return self.reference, drift

    def measure(self, inputs, labels, calls, both_ms=()):
        """Returns (t_fp, t_bp), ms of the forward and the backward pass as the table counts them.

        Times the functions that the profile timed: the forward pass, and both passes. The table's
        t_bp, a difference of whole steps, is scaled by the difference of the two, now over then.
        both_ms: as in update; if given, only the forward pass is called.
        """
        if self._forward is None:
            self._forward = self._maker.forward()
        functions = [self._forward]
        if not both_ms:
            functions.append(self._maker.gradients(averaged=False))

        def settled_ms(function):
            function.milliseconds(inputs, labels)  # as training steps, each follows itself
            return function.milliseconds(inputs, labels)
        ms = np.array([[settled_ms(function) for function in functions] for _ in range(calls)])
        # The minimum: disturbances only add, and would move the median of a few calls.
        t_fp, t_both = ms[:, 0].min(), min(both_ms or ms[:, 1])
        old = self.reference
        return t_fp, max(t_both - t_fp, 1e-3) * old.t_bp / (old.t_both - old.t_fp)


def _by_overlap(table, steps, taken_ms):
    """Returns the table that explains how steps differ from passes, where that can be overlap."""
    more_ms = taken_ms - steps.predicted_ms(table)
    if not table.wire.fixed and AGREE[0] < abs(more_ms) / table.plain_time(steps.mask) <= AGREE[1]:
        return explaining(table, steps.mask, more_ms)  # not kept: an epoch may be disturbed
    return table


def _by_speed(table, steps, taken_ms):
    """Returns the table at the speed that the steps show."""
    wire = table.wire_time(steps.mask)  # does not follow the speed of the device
    speed = max(taken_ms - wire, 1e-3) / (steps.predicted_ms(table) - wire)
    return table.rescaled(speed * table.t_fp, speed * table.t_bp)


def explaining(table, mask, more_ms):
    """Returns the table in which a step of the (N,) bool mask takes `more_ms` ms more.

    Weight gradients and the path of the error gradient get a scale each, within LEAST and MOST; the
    full backward pass takes as long as before.
    """
    own = table.group_tensors.sum(axis=1) == 1
    parts = table.group_ms[:, None] * np.column_stack([own, ~own])
    needed = table.group_tensors[:, np.asarray(mask, dtype=bool)].any(axis=1)
    ms = [table.t_bp, table.backward_time(mask) + more_ms]
    scales = fitted_scales(np.array([parts.sum(axis=0), parts[needed].sum(axis=0)]), ms, LEAST,
                           MOST)
    return table._replace(group_ms=parts @ scales, t_dw=table.t_dw * scales[0],
                          t_dy=table.t_dy * scales[1])


def steps_drift_ms(step_ms, predicted_ms, of_ms):
    """Returns the ms that the last steps took too long, any sign; 0 within STEP_DRIFT of of_ms."""
    more_ms = float(np.median(step_ms[-WINDOW:])) - predicted_ms
    return more_ms if abs(more_ms) > STEP_DRIFT * of_ms else 0.0
