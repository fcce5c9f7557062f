"""Explains measured steps as sums of traced parts, each times a scale."""

import numpy as np

NOISE = 0.005  # error of a measured step, as a share of the whole
DEVIATION = 0.5  # usual difference of two parts' scales, as a share of their mean


def fitted_scales(parts, ms, low, high):
    """Returns the (S,) scales with which the parts best explain M measured steps.

    Scales stay as equal as the steps allow: if the steps say little about a part, such as a very
    small one, NOISE hardly moves its scale. The first step is met exactly.
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
