"""Turns traced shares and untraced totals into a timing table.

A trace shows the share of each op, but not the time of a step: tracing slows small ops down, and
runs ops one at a time. So steps are timed as training runs them, in turn: the full step, the steps
of a few single tensors, the forward pass, and its rest after some cuts. Traced times are scaled to
explain these.
"""

from typing import Any, NamedTuple

import numpy as np

from elastic.device.host import release_memory
from elastic.steps.prefix_cut import ROUNDING
from elastic.timing.stopwatch import at_one_speed, interleaved_ms
from elastic.timing.table import Profile, TensorTimings, chain_timings, shared_ms

LEAST, MOST = 0.1, 5.0  # bounds of a part's scale, in units of one scale for all parts
NOISE = 0.005  # error of a measured step, as a share of the whole
DEVIATION = 0.5  # usual difference of two parts' scales, as a share of their mean
SUFFIXES = (0.0, 0.15, 0.5)  # shares of the forward pass that are timed, each from a cut on
PLACES = (1 / 3, 2 / 3)  # on the path of the error gradient; the tensors there are timed alone


class Totals(NamedTuple):
    """Holds untraced times in ms, at the threading of training.

    t_fp, t_update: forward pass; the optimizer's update and decay of all tensors.
    tensors: those timed alone: the deepest, the nearest to the output, others.
    beyond: ms beyond the forward pass of the full step, then of the step of each of `tensors`.
    t_both: as in TensorTimings; spread: as in Profile.
    suffixes: (share of the traced forward pass, of the measured one) after some cuts.
    skipped, cut_bytes: (N,) as in prefix_cuts; the default: no prefix can be cut off.
    """
    t_fp: float
    t_update: float
    tensors: Any
    beyond: Any
    t_both: float = 0.0
    spread: float = 0.0
    suffixes: Any = ()
    skipped: Any = 0.0
    cut_bytes: Any = np.inf


def build_table(names, shapes, times, totals, key):
    """Returns the TensorTimings of traced shares (OpTimes) and untraced Totals."""
    n = len(names)
    timed = times.group_ms > 0
    group_tensors, traced = times.group_tensors[timed], times.group_ms[timed]
    full = max(totals.beyond[0], 1e-3)
    t_update = min(totals.t_update, full / 2)  # in a tiny network the call itself takes longer
    t_up = times.update * t_update / max(times.update.sum(), 1e-9)
    t_always, scaled = explained(group_tensors, traced, t_up, full - t_update, totals)
    t_dw, t_dy, depth = chain_timings(group_tensors, scaled)
    estimated = times.group_tensors[times.estimated_ms > 0].any(axis=0)
    rows = np.lexsort(group_tensors.T)  # an order that does not depend on the graph's
    left = measured_share(np.full(n, 1 - totals.skipped), totals.suffixes)
    # Tracing slows the launches of kernels down, and not the kernels.
    kernels = times.kernels and min(1.0, times.kernels / (totals.t_fp + full))
    profile = Profile(estimated, times.coverage, times.left_out[:20], totals.spread, traced[rows],
                      kernels)
    return TensorTimings(names, shapes, t_dw, t_dy, t_up, totals.t_fp, full - t_update - t_always,
                         t_update + t_always, depth, group_tensors[rows], scaled[rows], key,
                         profile, t_both=max(totals.t_both, totals.t_fp + 1e-3),
                         t_prefix=(1 - left) * totals.t_fp,
                         cut_bytes=np.full(n, totals.cut_bytes), op_rates=times.rates)


def explained(group_tensors, traced, t_up, full, totals):
    """Returns (fixed ms of every step, (G,) ms of the groups) that explain `totals`.

    The model: ms of a step = fixed ms + sum over parts of scale x traced ms. The scales are those
    at which the M timed steps come out. Weight gradients are one part; the path of the error
    gradient has one for each stretch between timed tensors. With several inter-op threads, weight
    gradients partly overlap with the error gradient, and cost less than in the trace, where ops run
    one at a time.
    traced: (G,) ms, > 0. t_up: (N,) ms. full: ms of the full step without forward pass and update.
    """
    tensors = list(totals.tensors)
    alone = np.array(totals.beyond[1:]) - t_up[tensors]
    needed = group_tensors[:, tensors].T  # (M, G)
    share = needed[1] @ traced / traced.sum()
    # The step of the tensor nearest to the output does little else.
    t_always = float(np.clip((alone[1] - share * full) / max(1 - share, 1e-9), 0, full / 2))
    parts = parts_of(group_tensors, traced, tensors[:1] + tensors[2:])
    steps = np.vstack([np.ones(len(traced)), needed]) @ parts
    ms = np.append(full, alone) - t_always
    return t_always, parts @ fitted_scales(steps, ms, LEAST, MOST)


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


def parts_of(group_tensors, group_ms, tensors):
    """Returns the (G, S) ms of the groups of ops in each part of the backward pass.

    Part 0: groups that one tensor needs. The others: stretches of the path of the error gradient,
    cut at `tensors`, which include the deepest.
    """
    shared = group_tensors.sum(axis=1) > 1
    to_reach = shared_ms(group_tensors, group_ms)
    # A group ends at the tensor nearest to the output that needs it.
    ends = np.where(group_tensors, to_reach, np.inf).min(axis=1)[:, None]
    edges = np.append(np.unique(np.append(0, to_reach[tensors]))[:-1], np.inf)
    inside = [np.clip(place, edges[:-1], edges[1:]) for place in (ends - group_ms[:, None], ends)]
    return np.column_stack([np.where(shared, 0, group_ms), shared[:, None] * (
        inside[1] - inside[0])])


def measured_share(traced, places):
    """Returns the shares of measured time for shares of traced time, by linear interpolation.

    places: known pairs (traced share, measured share), besides that of the whole.
    """
    places = np.array(sorted(places) + [(1.0, 1.0)])
    return np.interp(traced, places[:, 0], np.clip(np.maximum.accumulate(places[:, 1]), 0, 1))


def prefix_cuts(prefixes, times, inputs, labels):
    """Returns N prefix_cut.Cut, the (N,) share of the traced forward pass, and (N,) bytes.

    The share is what a cut saves, the bytes are what it stores of each image. Cut k is for steps
    whose deepest tensor is k, and suits those that train all tensors nearer to the output too: an
    upper bound, like t_dy. It is None where the prefix cannot be cut off.
    prefixes: PrefixSteps of a masked_step.StepMaker. times: its OpTimes.
    """
    depth = chain_timings(times.group_tensors, times.group_ms)[2]
    cuts = [None] * len(depth)
    if prefixes.rows_apart(inputs, labels) <= ROUNDING:
        cuts = [prefixes.cut_off(depth <= depth[k], times.rates) for k in range(len(depth))]
    # Sorted, so that sums have equal bits in every process.
    skipped = [sum(times.forward.get(name, 0.0) for name in sorted(cut.skipped)) if cut else 0.0
               for cut in cuts]
    return (cuts, np.array(skipped) / max(sum(times.forward.values()), 1e-9),
            np.array([cut.nbytes if cut else np.inf for cut in cuts]))


def suffixes_of(prefixes, cuts, skipped, images, labels):
    """Returns (shares of the traced forward pass, functions) of its rests after some of the cuts.

    They are about SUFFIXES of the whole. A function returns once the device is done.
    skipped: (N,) share of the traced forward pass before each cut.
    """
    there = np.flatnonzero([cut is not None for cut in cuts])
    if not len(there):
        return [], []
    chosen = sorted({int(there[np.argmin(abs(1 - skipped[there] - share))]) for share in SUFFIXES})
    tensors = sorted({tensor for k in chosen for tensor in cuts[k].tensors})
    stored = dict(zip(tensors, prefixes.outputs(tensors)(images, labels)))

    def call(cut):
        suffix, taken = prefixes.suffix(cut), [stored[tensor] for tensor in cut.tensors]
        return lambda: suffix(taken, labels)[0].numpy()
    return [float(1 - skipped[k]) for k in chosen], [call(cuts[k]) for k in chosen]


def tensors_to_time(group_tensors, group_ms):
    """Returns the tensors to time alone: the deepest, the nearest to the output, others between.

    The others need about PLACES of the shared ops, and few that no other tensor needs.
    """
    t_dw, _, depth = chain_timings(group_tensors, group_ms)
    to_reach = shared_ms(group_tensors, group_ms)
    ends = [int(np.argmax(depth)), int(np.argmin(depth))]
    between = {int(np.argmin(abs(to_reach - share * to_reach[ends[0]]) + t_dw)) for share in PLACES}
    return ends + sorted(between.difference(ends))


def measure_totals(prefixes, times, images, labels, seconds):
    """Returns the Totals, from interleaved runs of about `seconds`.

    Whole steps are timed, to include work outside the passes: moving statistics, the iteration
    count. The optimizer's update is timed alone, as the difference of two steps is too noisy.
    prefixes: PrefixSteps of the training step's StepMaker. times: its attribution.OpTimes.
    """
    import tensorflow as tf
    maker = prefixes.maker
    cuts, skipped, cut_bytes = prefix_cuts(prefixes, times, images, labels)
    release_memory()
    everything = np.arange(len(maker.variables))
    tensors = tensors_to_time(times.group_tensors, times.group_ms)
    steps = [maker.forward(), maker.gradients(), maker.step(everything >= 0)]
    steps += [maker.step(everything == k) for k in tensors]
    apply, gradients = maker.update_alone(), [tf.zeros_like(v) for v in maker.variables]

    def run_update():
        apply(*gradients)
        maker.variables[-1].numpy()  # waits for the device
    calls = [run_update] + [lambda step=step: step(images, labels)[0].numpy() for step in steps]
    shares, suffixes = suffixes_of(prefixes, cuts, skipped, images, labels)
    totals = totals_of(interleaved_ms(calls + suffixes, seconds), tensors, shares)
    return totals._replace(skipped=skipped, cut_bytes=cut_bytes)


def totals_of(rounds_ms, tensors, suffixes):
    """Returns the Totals of (rounds, calls) ms, medians as if the machine kept one speed.

    The calls: update, forward pass, both passes, full step, the steps of `tensors`, suffixes.
    suffixes: their shares of the traced forward pass.
    """
    low, middle, high = np.percentile(rounds_ms[:, 3], (25, 50, 75))  # of the full step, as it ran
    ms = np.median(at_one_speed(rounds_ms), axis=0)
    update, forward, both = map(float, ms[:3])
    alone, rest = np.split(ms, [4 + len(tensors)])
    return Totals(forward, update, tensors, list(alone[3:] - forward), both,
                  float((high - low) / 2 / middle), list(zip(suffixes, rest / forward)))
