"""Keeps the timing table true while the device changes speed: heat, other programs, fewer cores.

The table of the profiler is measured once. A device that slows down as a whole keeps its shares,
and with them the choice of tensors; one whose forward and backward pass slow down differently does
not. One step time per mask cannot tell the two apart, so before a selection both are measured anew.
"""

import time

import numpy as np

CALLS = 3              # of the forward pass and of forward and backward pass, each time
CONFIRMING_CALLS = 9   # where those say that shares have drifted
NOISE = 0.10           # drift of backward over forward time that a few calls show by accident
SHARE_DRIFT = 0.25     # from which on the shares of all tensors are measured anew
STEP_DRIFT = 0.10      # of the measured step against the predicted one: calls for a new selection
WINDOW = 50            # last steps of an epoch that are compared with the prediction
LOOP_LIMIT = 0.3       # of a step: what the loop may be believed to add


class ClosedLoop:
    """The timing table as it is now.

    timings: TensorTimings of the profiler. maker: masked_step.StepMaker of the training step.
    profile: () -> TensorTimings measured anew, for when shares have drifted; None: never.
    """

    def __init__(self, timings, maker, profile=None):
        self.timings = timings
        self.profiled = timings
        self.profile = profile
        self.profiles = 0  # how often it was measured anew
        self._forward = maker.forward()
        self._both = maker.step(np.ones(len(timings.names), dtype=bool), update=False)
        self._warm = False

    def update(self, images, labels, mask=None, step_ms=()):
        """Measures both passes on this batch and puts `timings` right; returns the drift of shares.

        mask, step_ms: of the steps that ran up to now. What they took beyond their prediction is
        the loop's own: the input pipeline's share of the cores, waiting for it, Python.
        The drift is the change of backward over forward time since the profile, 0 for none or what
        may be noise. Beyond SHARE_DRIFT the profile is taken again.
        """
        t_fp, t_bp, drift = self._confirmed(images, labels)
        if self.profile is not None and abs(drift) > SHARE_DRIFT:
            print('backward over forward time changed by {:+.0f} % since the profile: profiling '
                  'again'.format(100 * drift))
            self.profiled = self.profile()
            self.profiles += 1
            t_fp, t_bp, drift = self._confirmed(images, labels)
        table = self.profiled.rescaled(t_fp, t_bp)
        t_loop = self.timings.t_loop
        if len(step_ms):
            predicted = table.step_time(mask)
            beyond = float(np.median(step_ms[-WINDOW:])) - predicted
            t_loop = min(max(0.0, beyond), LOOP_LIMIT * predicted)
        self.timings = table._replace(t_loop=t_loop)
        return drift

    def _confirmed(self, images, labels):
        """(t_fp, t_bp, drift) as now; with the profile's shares where drift may be noise."""
        old = self.profiled
        for calls in (CALLS, CONFIRMING_CALLS):
            t_fp, t_bp = self.measure(images, labels, calls)
            drift = (t_bp / t_fp) / (old.t_bp / old.t_fp) - 1
            if abs(drift) <= NOISE:
                speed = (t_fp + t_bp) / (old.t_fp + old.t_bp)
                return speed * old.t_fp, speed * old.t_bp, 0.0
        return t_fp, t_bp, drift

    def measure(self, images, labels, calls):
        """(t_fp, t_bp): ms of the forward and of the backward pass, medians of calls in turn."""
        if not self._warm:  # the first call compiles
            self._forward(images, labels)
            self._both(images, labels)[0].numpy()
            self._warm = True
        ms = []
        for _ in range(calls):
            row = []
            for function in (self._forward, self._both):
                begin = time.perf_counter()
                function(images, labels)[0].numpy()  # waits for the device
                row.append(1e3 * (time.perf_counter() - begin))
            ms.append(row)
        t_fp, t_both = np.median(ms, axis=0)
        return float(t_fp), max(float(t_both - t_fp), 1e-3)


def steps_drifted(step_ms, predicted_ms):
    """True where the last steps take so much more or less than predicted that it is no accident."""
    measured = float(np.median(step_ms[-WINDOW:]))
    return abs(measured / predicted_ms - 1) > STEP_DRIFT
