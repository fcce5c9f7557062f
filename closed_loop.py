"""Keeps the timing table true while the device changes speed: heat, other programs, fewer cores.

The table of the profiler is measured once. A device that slows down as a whole keeps its shares,
and with them the choice of tensors; one whose forward and backward pass slow down differently does
not. One step time per mask cannot tell the two apart, so before a selection both are measured anew.
"""

import numpy as np

CALLS = 3              # of the forward pass and of forward and backward pass, each time
CONFIRMING_CALLS = 7   # where those say that shares have drifted: so many, and again
MOST_CALLS = 35        # until the medians are known within
PRECISION = 0.03       # or training would be held up
NOISE = 0.10           # drift of backward over forward time that a few calls show by accident
SHARE_DRIFT = 0.25     # from which on the shares of all tensors are measured anew
CONFIRMING_SHARE = 0.01  # of the training time that is left: what confirming may take
PROFILE_SHARE = 0.05   # the same, for a new profile
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
        self._refused = 0.0  # drift at which a new profile was of no use
        self._maker = maker
        self._forward = self._both = None

    def update(self, images, labels, both_ms=(), mask=None, step_ms=(), wait_ms=0.0,
               remaining_seconds=float('inf')):
        """Measures both passes on this batch and puts `timings` right; returns the drift of shares.

        both_ms: of forward and backward pass of all tensors, where some were just run.
        mask, step_ms: of the steps that ran up to now; wait_ms: what of each was spent outside the
        step function. Hundreds of steps tell the device's speed better than a few passes: they do
        where both agree within noise. What steps took beyond their prediction is the loop's own:
        waiting for input, Python, and where they disagree the input pipeline's use of the cores.
        remaining_seconds: of training. The drift is the change of backward over forward time since
        the profile, 0 for none or what may be noise. Beyond SHARE_DRIFT the profile is taken again
        if that takes no more than PROFILE_SHARE of what remains. Where what slows the device down
        also disturbs the new profile, the old one's shares, rescaled, are nearer the truth.
        """
        steps = None
        if len(step_ms):
            taken = float(np.median(step_ms[-WINDOW:]))
            steps = mask, taken - wait_ms
        t_fp, t_bp, drift = self._confirmed(images, labels, both_ms, steps, remaining_seconds)
        if self.profile is not None and abs(drift - self._refused) > SHARE_DRIFT < abs(drift):
            text = 'backward over forward time changed by {:+.0f} % since the profile: '.format(
                100 * drift)
            if self.profiled.seconds > PROFILE_SHARE * remaining_seconds:
                print(text + 'table rescaled; a new profile would take {:.0f} of the {:.0f} s left'
                      .format(self.profiled.seconds, remaining_seconds))
            else:
                print(text + 'profiling again')
                t_fp, t_bp, drift = self._profile_again(images, labels, t_fp, t_bp, drift)
        table = self.profiled.rescaled(t_fp, t_bp)
        t_loop = self.timings.t_loop
        if len(step_ms):
            predicted = table.step_time(mask)
            t_loop = min(max(0.0, taken - predicted), LOOP_LIMIT * predicted)
        self.timings = table._replace(t_loop=t_loop)
        return drift

    def _profile_again(self, images, labels, t_fp, t_bp, drift):
        """(t_fp, t_bp, drift) against the new profile, or as given where that was disturbed."""
        table = self.profile()
        self.profiles += 1
        if table.disturbed:
            print('steps varied by {:.0f} % during the new profile: the old one is rescaled instead'
                  .format(100 * table.spread))
            self._refused = drift
            return t_fp, t_bp, drift
        self.profiled, self._refused = table, 0.0
        return self._confirmed(images, labels)

    def _confirmed(self, images, labels, both_ms=(), steps=None, remaining_seconds=float('inf')):
        """(t_fp, t_bp, drift) as now; with the profile's shares where drift may be noise.

        steps: (mask, ms) of the steps that ran up to now. Passes that would make them take far
        longer than they took were disturbed themselves, as a loop can only add to them, unless
        their ratio says that shares have drifted far.
        Training that is nearly over is not held up by confirming: then differences below
        SHARE_DRIFT count as noise.
        """
        old = self.profiled
        t_fp, t_bp = self.measure(images, labels, CALLS, both_ms)
        drift, excess = self._compared(t_fp, t_bp, steps)
        if max(abs(drift), abs(excess)) > NOISE:
            calls = min(CONFIRMING_SHARE * remaining_seconds / ((2 * t_fp + t_bp) / 1e3),
                        MOST_CALLS)
            if calls >= CONFIRMING_CALLS:
                t_fp, t_bp = self.measure(images, labels, calls)
                drift, excess = self._compared(t_fp, t_bp, steps)
            elif max(abs(drift), abs(excess)) <= SHARE_DRIFT:
                drift = excess = 0.0
        speed = (t_fp + t_bp) / (old.t_fp + old.t_bp)
        disturbed = excess > SHARE_DRIFT and abs(drift) <= SHARE_DRIFT
        if steps is not None and (disturbed or max(abs(drift), -excess) <= NOISE):
            speed, drift = steps[1] / old.step_time(steps[0]), 0.0
        if abs(drift) <= NOISE:
            return speed * old.t_fp, speed * old.t_bp, 0.0
        return t_fp, t_bp, drift

    def _compared(self, t_fp, t_bp, steps):
        """(drift of shares since the profile, how much longer the steps would take than they did).

        Both relative; the second 0 where there are no steps.
        """
        old = self.profiled
        drift = (t_bp / t_fp) / (old.t_bp / old.t_fp) - 1
        if steps is None:
            return drift, 0.0
        mask, ms = steps
        return drift, old.rescaled(t_fp, t_bp).step_time(mask) / max(ms, 1e-3) - 1

    def measure(self, images, labels, calls, both_ms=()):
        """(t_fp, t_bp): ms of the forward and of the backward pass, called in turn.

        Of few calls the least: what disturbs a call makes it longer, and two or three have no
        median worth the name. From CONFIRMING_CALLS on the median, of no more calls than it takes
        to know it within PRECISION: beside a busy program that is many.
        both_ms: as in update; then only the forward pass is called.
        """
        if self._forward is None:
            self._forward = self._maker.forward()
            self._forward(images, labels)[0].numpy()  # the first call compiles
        if not len(both_ms) and self._both is None:
            everything = np.ones(len(self.timings.names), dtype=bool)
            self._both = self._maker.step(everything, update=False)
            self._both(images, labels)[0].numpy()
        functions = [self._forward] if len(both_ms) else [self._forward, self._both]
        ms = []
        while len(ms) < int(calls) and not (
                ms and len(ms) % CONFIRMING_CALLS == 0 and uncertainty(ms) <= PRECISION):
            ms.append([function.milliseconds(images, labels) for function in functions])
        typical = np.median if calls >= CONFIRMING_CALLS else np.min
        t_fp = float(typical([row[0] for row in ms]))
        t_both = float(typical(both_ms if len(both_ms) else [row[1] for row in ms]))
        return t_fp, max(t_both - t_fp, 1e-3)


def uncertainty(ms):
    """Standard error of the medians of the columns, relative, the largest; by their quartiles."""
    low, middle, high = np.percentile(ms, (25, 50, 75), axis=0)
    # Of a normal distribution: sigma = 0.74 (high - low); of its median: 1.25 sigma / sqrt(n).
    return float(np.max((high - low) / middle)) * 0.93 / np.sqrt(len(ms))


def steps_drifted(step_ms, predicted_ms):
    """True where the last steps take so much more or less than predicted that it is no accident."""
    measured = float(np.median(step_ms[-WINDOW:]))
    return abs(measured / predicted_ms - 1) > STEP_DRIFT
