"""Traced shares and untraced totals become a timing table.

A trace tells which op takes which share, but not what a step takes: tracing inflates small ops, and
runs ops one at a time. So steps as training takes them are timed, in turn: of all tensors, of the
one nearest the output, of the deepest, of some on the way; the forward pass, and its rest behind
some cuts. What the trace told is scaled so that these come out as measured.
"""

from typing import Any, NamedTuple

import numpy as np

from elastic.timing.stopwatch import interleaved_ms, undisturbed
from elastic.timing.table import Profile, TensorTimings, chain_timings, own_ms, shared_ms

LEAST, MOST = 0.1, 5.0  # scale of own or shared gradients over that of both together
DOUBT = 0.03  # of the backward pass: what the deepest tensor's step may be off by
SUFFIXES = (0.0, 0.15, 0.5)  # of the forward pass, from which on it is timed
WAYS = (1 / 3, 2 / 3)  # of the error gradient's way, to which a step is timed


class Totals(NamedTuple):
    """Untraced ms per step, at the threading of training; deepest: the tensor of t_chain.

    t_update: the optimizer's update and decay of all tensors. t_always: what every step does beside
    it and both passes: moving statistics, learning rate, iteration count.
    t_chain: backward pass of the deepest tensor alone: the error gradient's whole way.
    t_both: see TensorTimings.
    spread: see Profile.
    suffixes: (share of the traced forward pass, of the measured one) behind some cuts.
    chains: (tensor k, ms of the backward pass of k alone) of some on the way to the deepest.
    """
    t_fp: float
    t_bp: float
    t_update: float
    t_always: float
    t_chain: float
    deepest: int
    t_both: float = 0.0
    spread: float = 0.0
    suffixes: Any = ()
    chains: Any = ()


def totals_of_steps(times, tensors, t_fp, t_update, t_both, beyond, spread, suffixes=()):
    """Totals from what steps take: t_fp + t_always + their backward pass + their update.

    times: OpTimes, whose shares tell what little the step of the tensor nearest the output does
    for it. tensors: the deepest, the nearest, others. t_fp, t_update, t_both: ms, each measured
    alone. beyond: ms beyond the forward pass that the steps take of all tensors, then of each of
    `tensors` alone. suffixes: see Totals.
    """
    deepest, nearest = tensors[:2]
    full, of_deepest, of_nearest, *of_others = [max(ms, 1e-3) for ms in beyond]
    t_update = min(t_update, full / 2)  # of a tiny network the call itself takes longer
    share = sum(times.group_ms[times.group_tensors[:, nearest]]) / max(sum(times.group_ms), 1e-9)
    t_up = times.update * t_update / max(times.update.sum(), 1e-9)
    # of_nearest = t_always + share * t_bp + t_up, with t_bp = full - t_always - t_update
    t_always = (of_nearest - share * (full - t_update) - t_up[nearest]) / max(1 - share, 1e-9)
    t_always = float(np.clip(t_always, 0, (full - t_update) / 2))
    t_bp = full - t_always - t_update
    t_chain = min(max(of_deepest - t_always - float(t_up[deepest]), 1e-3), t_bp)
    chains = [(k, ms - t_always - float(t_up[k])) for k, ms in zip(tensors[2:], of_others)]
    return Totals(t_fp, t_bp, t_update, t_always, t_chain, deepest, max(t_both, t_fp + 1e-3),
                  spread, suffixes, chains)


def build_table(names, shapes, times, totals, key, prefix=None):
    """TensorTimings from traced shares (OpTimes) and untraced Totals.

    Own gradients and the error gradient's way are scaled apart, so that both the backward pass of
    all tensors and that of the deepest one alone come out as measured: with several inter-op
    threads, own gradients partly overlap with the error gradient and cost less than in the trace,
    where ops run one at a time. The way itself is scaled by steps that follow it in part:
    ResNet50's last three blocks take 65 % of it by the trace and 71 % untraced, on the paper's
    stack (64x64, batch 4).
    prefix: (traced ms, bytes), (N,) each: see t_prefix and cut_bytes; None: no prefix can be cut.
    """
    n = len(names)
    timed = times.group_ms > 0
    group_tensors, traced = times.group_tensors[timed], times.group_ms[timed]
    scaled = scaled_groups(group_tensors, traced, totals)
    t_dw, t_dy, depth = chain_timings(group_tensors, scaled)
    t_up = times.update * totals.t_update / max(times.update.sum(), 1e-9)
    estimated = times.group_tensors[times.estimated_ms > 0].any(axis=0)
    rows = np.lexsort(group_tensors.T)  # an order that does not depend on the graph's
    skipped, cut_bytes = prefix or (np.zeros(n), np.full(n, np.inf))
    left = measured_share(1 - skipped / max(sum(times.forward.values()), 1e-9), totals.suffixes)
    profile = Profile(estimated, times.coverage, times.left_out[:20], totals.spread, traced[rows],
                      kernel_share(times.kernels, totals))
    return TensorTimings(names, shapes, t_dw, t_dy, t_up, totals.t_fp, totals.t_bp,
                         totals.t_update + totals.t_always, depth, group_tensors[rows],
                         scaled[rows], key, profile,
                         t_both=totals.t_both, t_prefix=(1 - left) * totals.t_fp,
                         cut_bytes=cut_bytes, op_rates=times.rates)


def kernel_share(kernels, totals):
    """Share of the untraced full step during which a GPU ran kernels, 0..1; None on a CPU.

    kernels: ms, of OpTimes. Tracing slows the launches down and not what they launch.
    """
    step = totals.t_fp + totals.t_bp + totals.t_update + totals.t_always
    return None if kernels is None else min(1.0, kernels / step)


def measured_share(traced, places):
    """Share of the measured time, from that of the traced time, which is off where few or small ops
    are in it: as at `places`, (traced share, measured share), and in between; all of all.
    """
    places = np.array(sorted(places) + [(1.0, 1.0)])
    return np.interp(traced, places[:, 0], np.clip(np.maximum.accumulate(places[:, 1]), 0, 1))


def scaled_groups(group_tensors, group_ms, totals):
    """Returns the (G,) ms of groups of ops, from traced ms and Totals; each group took some."""
    own, shared = own_and_shared_scale(group_tensors, group_ms, totals)
    is_shared, scaled = group_tensors.sum(axis=1) > 1, group_ms * own
    scaled[is_shared] = way_of_the_error_gradient(group_tensors, group_ms, totals, own, shared)
    return scaled


def own_and_shared_scale(group_tensors, group_ms, totals):
    """(scale of groups of one tensor, scale of shared groups): measured over traced ms.

    Solves own * W + shared * Y = t_bp and own * w + shared * y = t_chain, w and y being the share
    of the deepest tensor, as nearly as scales from LEAST to MOST of one scale for both allow:
    beside the error gradient's way own gradients may cost next to nothing. One scale for both where
    steps do not tell the two apart: where DOUBT in t_chain would move either by as much as it is,
    as in a small network of which the deepest tensor's own gradient is nearly all.
    """
    own, deepest = group_tensors.sum(axis=1) == 1, group_tensors[:, totals.deepest]
    total_own, deepest_own = sum(group_ms[own]), sum(group_ms[own & deepest])
    total_shared = sum(group_ms) - total_own
    deepest_shared = sum(group_ms[deepest]) - deepest_own
    even = totals.t_bp / max(total_own + total_shared, 1e-9)
    matrix = np.array([[total_own, total_shared], [deepest_own, deepest_shared]])
    if abs(np.linalg.det(matrix)) <= DOUBT * (total_own + total_shared) * matrix[0].max():
        return even, even
    own = np.clip(np.linalg.solve(matrix, [totals.t_bp, totals.t_chain])[0], LEAST * even,
                  MOST * even)
    shared = (totals.t_bp - own * total_own) / total_shared
    return (float(own), float(shared)) if shared > LEAST * even else (even, even)


def way_of_the_error_gradient(group_tensors, group_ms, totals, own, shared):
    """Returns the ms of each shared group of ops; they add up to `shared` times their traced ms.

    group_tensors: (G, N) bool; group_ms: (G,) traced. own, shared: of own_and_shared_scale. What
    lies between two tensors whose steps were measured, totals.chains and the deepest, gets what
    lies between their times; LEAST of its traced share at least. On a chain steps come out as
    measured; where paths branch, as nearly as their common sum allows.
    """
    is_shared = group_tensors.sum(axis=1) > 1
    ways, to_reach = group_ms[is_shared], shared_ms(group_tensors, group_ms)  # (N,) ms
    whole = to_reach[totals.deepest]
    if not whole:
        return ways * shared
    alone = own_ms(group_tensors, group_ms)
    places = [(0.0, 0.0)] + [
        (to_reach[k] / whole, (ms - own * alone[k]) / shared / whole)
        for k, ms in totals.chains if 0 < to_reach[k] < whole]
    # Each way ends at the tensor nearest the output that needs it.
    ends = np.where(group_tensors[is_shared], to_reach, np.inf).min(axis=1)
    before, after = measured_share(np.array([ends - ways, ends]) / whole, places)
    scaled = np.maximum((after - before) * whole, LEAST * ways)
    return scaled * shared * sum(ways) / sum(scaled)


def suffixes_of(prefixes, cuts, skipped, images, labels):
    """[(k, () -> once the device is done)], forward passes from the cuts of some tensors k on: of
    the least that a cut leaves, and of about SUFFIXES of all.

    skipped: (N,) traced ms over those of the whole forward pass.
    """
    there = np.flatnonzero([cut is not None for cut in cuts])
    chosen = {int(there[np.argmin(abs(1 - skipped[there] - share))])
              for share in (SUFFIXES if len(there) else ())}
    tensors = sorted({tensor for k in chosen for tensor in cuts[k].tensors})
    stored = dict(zip(tensors, prefixes.outputs(tensors)(images, labels) if tensors else ()))
    calls = []
    for k in sorted(chosen):
        suffix, taken = prefixes.suffix(cuts[k]), [stored[tensor] for tensor in cuts[k].tensors]
        calls.append((k, lambda suffix=suffix, taken=taken: suffix(taken, labels)[0].numpy()))
    return calls


def tensors_to_time(group_tensors, group_ms):
    """[the deepest, the nearest the output, others between them], tensors whose steps are timed.

    The others need about WAYS of the shared ops, and little for themselves.
    """
    t_dw, _, depth = chain_timings(group_tensors, group_ms)
    ends, to_reach = [int(np.argmax(depth)), int(np.argmin(depth))], shared_ms(
        group_tensors, group_ms)
    between = {int(np.argmin(abs(to_reach - share * to_reach[ends[0]]) + t_dw)) for share in WAYS}
    return ends + sorted(between.difference(ends))


def measure_totals(prefixes, times, images, labels, seconds, cuts, skipped):
    """Totals, medians of interleaved runs: tracing inflates small ops, so only its shares are used.

    They come from steps as training takes them: of all tensors, of the deepest, of the one nearest
    the output and of some in between alone. So they add up to the full step, and hold what no pass
    does: moving statistics, the iteration count. The optimizer's update of all tensors runs alone:
    as the difference of two steps it would be lost in their noise.
    prefixes: PrefixSteps of the training step's StepMaker. times: its attribution.OpTimes.
    cuts: of prefix_cuts; skipped: of prefix_costs.
    """
    import tensorflow as tf
    maker = prefixes.maker
    everything = np.arange(len(maker.variables))
    tensors = tensors_to_time(times.group_tensors, times.group_ms)
    steps = [maker.forward(), maker.gradients(), maker.step(everything >= 0)]
    steps += [maker.step(everything == k) for k in tensors]
    apply, gradients = maker.update_alone(), [tf.zeros_like(v) for v in maker.variables]

    def run_update():
        apply(*gradients)
        maker.variables[-1].numpy()  # waits for the device
    calls = [run_update] + [lambda step=step: step(images, labels)[0].numpy() for step in steps]
    shares = skipped / max(sum(times.forward.values()), 1e-9)
    suffixes = suffixes_of(prefixes, cuts, shares, images, labels)
    rounds = interleaved_ms(calls + [call for _, call in suffixes], seconds)
    low, middle, high = np.percentile(rounds[:, 3], (25, 50, 75))  # the full step's, all of them
    columns = undisturbed(rounds).T  # (rounds,) each
    (update, forward, both), steps_ms = columns[:3], columns[3:len(calls)]
    # Differences within a round, so that a slow spell of the machine cancels.
    beyond = [float(np.median(ms - forward)) for ms in steps_ms]
    return totals_of_steps(times, tensors, float(np.median(forward)),
                           float(np.median(update)), float(np.median(both)), beyond,
                           float((high - low) / 2 / middle),
                           [(float(1 - shares[k]), float(np.median(ms / forward)))
                            for (k, _), ms in zip(suffixes, columns[len(calls):])])
