"""Keeps the timing table true while the device changes speed: heat, other programs, fewer cores.

The table of the profiler is measured once. A device that slows down as a whole keeps its shares,
and with them the choice of tensors; one whose forward and backward pass slow down differently does
not. One step time per mask cannot tell the two apart, so before a selection both are measured anew.
"""

import time

import numpy as np

CALLS = 3              # of the forward pass and of forward and backward pass, each time
CONFIRMING_CALLS = 9   # before the table is given up
SHARE_DRIFT = 0.25     # of backward over forward time, from which on shares are measured anew
STEP_DRIFT = 0.10      # of the measured step against the predicted one: calls for a new selection
WINDOW = 50            # last steps of an epoch that are compared with the prediction


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

    def update(self, images, labels, wait_ms=None):
        """Measures both passes on this batch and rescales `timings`; returns the drift of shares.

        wait_ms: what a step of the loop takes outside the step itself, None where not known yet.
        The drift is the change of backward over forward time since the profile, 0: none. Beyond
        SHARE_DRIFT, and confirmed by more calls, the profile is taken again.
        """
        t_fp, t_bp = self.measure(images, labels, CALLS)
        drift = self._drift(t_fp, t_bp)
        if self.profile is not None and abs(drift) > SHARE_DRIFT:
            t_fp, t_bp = self.measure(images, labels, CONFIRMING_CALLS)
            drift = self._drift(t_fp, t_bp)
            if abs(drift) > SHARE_DRIFT:
                print('backward over forward time changed by {:+.0f} % since the profile: '
                      'profiling again'.format(100 * drift))
                self.profiled = self.profile()
                self.profiles += 1
                t_fp, t_bp = self.measure(images, labels, CONFIRMING_CALLS)
        wait_ms = self.timings.t_wait if wait_ms is None else wait_ms
        self.timings = self.profiled.rescaled(t_fp, t_bp, wait_ms)
        return drift

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

    def _drift(self, t_fp, t_bp):
        return (t_bp / t_fp) / (self.profiled.t_bp / self.profiled.t_fp) - 1


def steps_drifted(step_ms, predicted_ms):
    """True where the last steps take so much more or less than predicted that it is no accident."""
    measured = float(np.median(step_ms[-WINDOW:]))
    return abs(measured / predicted_ms - 1) > STEP_DRIFT
