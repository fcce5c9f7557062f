"""Explains measured steps: a step is the sum of its parts, each traced time times a scale."""

import numpy as np

NOISE = 0.005  # of the whole: what the measured ms of a step may be off by
DEVIATION = 0.5  # of their mean: what the scales of two parts usually differ by


def fitted_scales(parts, ms, low, high):
    """Returns the (S,) scales with which the parts best explain M measured steps.

    Scales stay as equal as the steps allow: where a step says little about a part, such as a very
    small one, NOISE in the step hardly moves its scale. The first step comes out exactly.
    parts: (M, S) ms of each part in each step; the first step has all parts. ms: (M,) as measured.
    low, high: bounds of the scales, numbers or (S,), in units of one scale for all parts.
    """
    from scipy.optimize import lsq_linear
    whole = parts[0].sum()
    # In these units measured ms are 1 for the first step, and a scale for all parts is 1.
    steps = np.asarray(parts) / whole
    unequal = np.eye(len(parts[0])) - steps[0]
    scales = lsq_linear(np.vstack([steps / NOISE, unequal / DEVIATION]),
                        np.append(np.divide(ms, ms[0]) / NOISE, np.zeros(len(unequal))),
                        (low, high)).x
    return scales * ms[0] / whole / (steps[0] @ scales)
