"""Keeps the timing table true while the device changes speed: heat, other programs, fewer cores.

The table of the profiler is measured once. A device that slows down as a whole keeps its shares,
and with them the choice of tensors; one whose forward and backward pass slow down differently does
not. One step time per mask cannot tell the two apart, so before a selection both are measured anew.
"""

import numpy as np

from elastic.timing.fit import fitted_scales

CALLS = (2, 5)      # of both passes: a quick look; a long one where that says shares drifted
NOISE = (0.25, 0.10)  # drift of backward over forward time that so many show by accident
AGREE = (0.10, 0.25)  # of steps with what passes say of them: from, and up to what it is overlap
LEAST = (0.8, 1 / 3)  # change of weight gradients' time, and of the error gradient's path
MOST = (6.0, 3.0)   # overlapping hides up to 80 % of weight gradients in a profile
STEP_DRIFT = 0.10   # of the measured step against the predicted one: calls for a new selection
WINDOW = 50         # last steps of an epoch that are compared with the prediction


class ClosedLoop:
    """The timing table as it is now.

    timings: TensorTimings of the profiler. maker: masked_step.StepMaker of the training step.
    """

    def __init__(self, timings, maker):
        self.timings = timings
        self.reference = timings  # with the shares that were measured last
        self._maker = maker
        self._forward = None

    def waited(self, wait_ms):
        """From now on a step that computes all waits so long for its batch."""
        self.timings = self.timings._replace(t_loop=wait_ms)

    def update(self, inputs, labels, both_ms=(), mask=None, step_ms=(), wait_ms=0.0, cache=None):
        """Measures both passes on this batch and puts `timings` right; returns the drift of shares.

        both_ms: of forward and backward pass of all tensors, where some were just run.
        mask, step_ms: of the steps that ran up to now; wait_ms: what of each was spent outside the
        step function. cache: CacheCost where they read the prefix back, else None.
        The drift is the change of backward over forward time since shares were last put right, 0
        within NOISE. With drift the table follows the passes as measured. Without, its shares stay,
        and the speed is that of the steps, hundreds of which tell it better than a few passes;
        unless both disagree: then own gradients cost more or less beside the error gradient's way
        than they did, as on one core, where they no longer overlap, and the table follows that
        until the next look.
        Steps that read the prefix back tell such differences, not the speed: of a short step, what
        was priced wrongly is a large part, and the budget would grow by it.
        """
        old = self.reference
        for calls, noise in zip(CALLS, NOISE):
            t_fp, t_bp = self.measure(inputs, labels, calls, both_ms)
            drift = (t_bp / t_fp) / (old.t_bp / old.t_fp) - 1
            if abs(drift) <= noise:
                break
            both_ms = ()
        if abs(drift) > noise:
            self.reference = table = old.rescaled(t_fp, t_bp)
        else:
            drift, speed = 0.0, (t_fp + t_bp) / (old.t_fp + old.t_bp)
            table = old.rescaled(speed * old.t_fp, speed * old.t_bp)
        if len(step_ms):
            def price(timings):
                return timings.step_time(mask) if cache is None else timings._replace(
                    cache=cache).reading_time(mask)
            taken = float(np.median(step_ms[-WINDOW:])) - (wait_ms if cache is None else 0)
            more_ms = taken - price(table)
            if AGREE[0] < abs(more_ms) / table.plain_time(mask) <= AGREE[1]:
                table = explaining(table, mask, more_ms)
            if not drift and cache is None:  # of a step that reads, too little is left to tell
                speed = taken / price(table)
                table = table.rescaled(speed * table.t_fp, speed * table.t_bp)
            if cache is None:
                self.waited(wait_ms)
        self.timings = table._replace(t_loop=self.timings.t_loop)
        return drift

    def measure(self, inputs, labels, calls, both_ms=()):
        """(t_fp, t_bp): ms of the forward and of the backward pass as the table counts them.

        The profile ran the same two functions, so that like is compared with like: its t_bp, from
        differences of whole steps, changes as what the second takes beyond the first.
        both_ms: as in update; then only the forward pass is called.
        """
        if self._forward is None:
            self._forward = self._maker.forward()
        functions = [self._forward] + ([] if len(both_ms) else [self._maker.gradients()])
        ms = []
        for _ in range(calls):
            for function in functions:
                function.milliseconds(inputs, labels)  # each follows itself, as in the profile
                ms.append(function.milliseconds(inputs, labels))
        ms = np.reshape(ms, (calls, len(functions)))
        # The quickest: what disturbs only adds, and with so few calls it would move a median.
        t_fp, t_both = ms[:, 0].min(), min(both_ms if len(both_ms) else ms[:, 1])
        old = self.reference
        return t_fp, max(t_both - t_fp, 1e-3) * old.t_bp / (old.t_both - old.t_fp)


def explaining(table, mask, more_ms):
    """Returns the table whose step of the (N,) bool mask takes `more_ms` more, within LEAST, MOST.

    Weight gradients and the path of the error gradient have a scale each; the backward pass of all
    tensors takes as long as before.
    """
    own = table.group_tensors.sum(axis=1) == 1
    parts = table.group_ms[:, None] * np.column_stack([own, ~own])
    needed = table.group_tensors[:, np.asarray(mask, dtype=bool)].any(axis=1)
    ms = [table.t_bp, table.backward_time(mask) + more_ms]
    scales = fitted_scales(np.array([parts.sum(axis=0), parts[needed].sum(axis=0)]), ms, LEAST,
                           MOST)
    return table._replace(group_ms=parts @ scales, t_dw=table.t_dw * scales[0],
                          t_dy=table.t_dy * scales[1])


def steps_drift_ms(step_ms, predicted_ms, of_ms=None):
    """ms that the last steps take more than predicted, negative where less; 0 where that may be an
    accident.

    of_ms: what the difference is compared with, predicted_ms by default.
    """
    more_ms = float(np.median(step_ms[-WINDOW:])) - predicted_ms
    return more_ms if abs(more_ms) > STEP_DRIFT * (of_ms or predicted_ms) else 0.0
