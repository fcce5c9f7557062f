"""Holds the cost of each tensor, and predicts the step time of any mask."""

import csv
import os
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from elastic.errors import UserError
from elastic.files import read_json, whole, write_json
from elastic.timing.memory import Memory


class CacheCost(NamedTuple):
    """Holds what a prefix cache costs and saves if tensor k is the deepest trained (DESIGN 5).

    fill_share: (N,) share of the steps to the end of the run that fill the cache; the others read.
    skipped: (N,) share of the forward pass that a reading step skips.
    read_ms, write_ms: (N,) ms to copy the cached activations of one step; inf if there is no cut or
    the cache does not fit.
    cut: prefix_cut.Cut, the same for all k; None if each k has its own.
    """
    fill_share: np.ndarray
    skipped: np.ndarray
    read_ms: np.ndarray
    write_ms: np.ndarray
    cut: Any = None

    @property
    def trainable(self):
        """Returns the (N,) bool of the tensors that can be trained with this cache."""
        return np.isfinite(self.read_ms)

    def restricted_to(self, tensors):
        """Returns the cost of this cache if it serves only `tensors`, (N,) bool."""
        return self._replace(read_ms=np.where(tensors, self.read_ms, np.inf),
                             write_ms=np.where(tensors, self.write_ms, np.inf))


class Profile(NamedTuple):
    """Explains a measurement; no cost depends on it.

    estimated: (N,) bool, tensors whose time was partly estimated, as the trace had no event.
    coverage, left_out: as in attribution.OpTimes.
    spread: half the interquartile range of the full step's time, over its median.
    traced_ms: (G,) ms of the groups of ops in the trace, whose shares gave group_ms.
    kernel_share: share of the full step in which a GPU ran kernels, 0..1; None on a CPU.
    peak_bytes: train type -> the most memory that it held, bytes; {}: not measured.
    row_ms: ms to copy cached activations, as copy_times.CopyTimes measured them.
    A table's file keeps the fields in STORED.
    """
    estimated: np.ndarray
    coverage: float = 1.0
    left_out: Sequence = ()
    spread: float = 0.0
    traced_ms: Any = None
    kernel_share: Any = None
    peak_bytes: Dict = {}
    row_ms: Dict = {}


class WireCost(NamedTuple):
    """Holds the ms in which several workers exchange what a step computes.

    fixed: of the results, and of all that does not depend on the mask; 0 without other workers.
    t_comm: (N,) of the gradient of each tensor.
    """
    fixed: float = 0.0
    t_comm: Any = 0.0


NOT_STORED = {'cache', 'wire'}  # fields of a TensorTimings that its file leaves out
STORED = ('estimated', 'coverage', 'kernel_share', 'peak_bytes', 'row_ms')  # of a Profile


class TensorTimings(NamedTuple):
    """Holds the cost of each of N tensors in ms per step, in model.trainable_variables order.

    A mask is (N,) bool, True for each tensor that is trained.
    names: N strings; shapes: N tuples.
    t_dw: (N,) weight gradient: ops that no other tensor needs.
    t_dy: (N,) shared ops added to carry the error gradient on to this tensor.
    t_up: (N,) the optimizer's ops for this tensor alone.
    t_fp, t_bp: forward pass, backward pass of all tensors.
    t_update: update and decay of all tensors, and the fixed work of each step: moving statistics,
    learning rate, iteration count.
    depth: (N,) int, 0 for the tensor nearest to the output, N - 1 for the deepest; the order in
    which t_dy adds up.
    group_tensors: (G, N) bool, the tensors that need each group of ops. group_ms: (G,) per group.
    key: what the table is valid for. profile: Profile.
    t_loop: waiting for input and Python in each step of the training loop. 0 in a profile;
    closed_loop.py measures it.
    t_both: both passes of all tensors, keeping every gradient to the end, as importance does.
    closed_loop.py compares later passes with it.
    t_prefix: (N,) the part of the forward pass that cached activations save if tensor k is the
    deepest. cut_bytes: (N,) their bytes for one image; inf if the prefix cannot be cut off.
    op_rates: rates of attribution.OpTimes, by which a cut is placed.
    cache: CacheCost of the steps; None if each computes the whole forward pass.
    wire: WireCost of the workers.
    memory: memory.Memory of the step; None: not known.
    """
    names: List[str]
    shapes: List[Tuple]
    t_dw: np.ndarray
    t_dy: np.ndarray
    t_up: np.ndarray
    t_fp: float
    t_bp: float
    t_update: float
    depth: np.ndarray
    group_tensors: np.ndarray
    group_ms: np.ndarray
    key: Dict
    profile: Profile
    t_loop: float = 0.0
    t_both: float = 0.0
    t_prefix: Any = 0.0
    cut_bytes: Any = None
    op_rates: Dict = {}
    cache: Any = None
    wire: WireCost = WireCost()
    memory: Any = None

    @property
    def t_step(self):
        """Returns the ms of a step of full training."""
        return self.t_fp + self.t_bp + self.t_update + self.t_loop + self.wire_time(
            np.ones(len(self.names), bool))

    @property
    def fixed(self):
        """Returns the ms of each step, whatever it trains: forward pass, loop, part of the update.

        With several workers, also the exchange of its results.
        """
        return self.t_fp + self.t_loop + max(
            0.0, self.t_update - float(self.t_up.sum())) + self.wire.fixed

    @property
    def t_own(self):
        """Returns the (N,) ms that no other tensor shares beside t_dw: update, exchange."""
        return self.t_up + self.wire.t_comm

    def wire_time(self, mask):
        """Returns the ms in which the workers exchange results and gradients."""
        return self.wire.fixed + float(np.sum(self.wire.t_comm * np.asarray(mask, dtype=bool)))

    def rescaled(self, t_fp, t_bp):
        """Returns the table with both passes as measured now; the update scales with their sum."""
        backward = t_bp / self.t_bp
        whole = (t_fp + t_bp) / (self.t_fp + self.t_bp)
        return self._replace(
            t_fp=t_fp, t_bp=t_bp, t_both=t_fp + (self.t_both - self.t_fp) * backward,
            t_dw=self.t_dw * backward, t_dy=self.t_dy * backward,
            group_ms=self.group_ms * backward, t_up=self.t_up * whole,
            t_update=self.t_update * whole,
            t_prefix=self.t_prefix * t_fp / self.t_fp)

    def repeated(self, times):
        """Returns the table of steps that run both passes `times` times before one update."""
        return self if times == 1 else self.rescaled(times * self.t_fp, times * self.t_bp)._replace(
            t_up=self.t_up, t_update=self.t_update)

    def backward_time(self, mask):
        """Returns the ms of the backward pass: each op that any tensor of the mask needs, once."""
        needed = (self.group_tensors & np.asarray(mask, dtype=bool)).any(axis=1)
        return float(self.group_ms[needed].sum())

    def step_time(self, mask):
        """Returns the ms of a step; with a cache, the mean of filling and reading steps."""
        return self.plain_time(mask) + float(self.cache_ms[self.deepest(mask)])

    def filling_time(self, mask):
        """Returns the ms of a step that computes the whole forward pass."""
        return self.plain_time(mask) + (
            float(self.cache.write_ms[self.deepest(mask)]) if self.is_cached(mask) else 0.0)

    def reading_time(self, mask):
        """Returns the ms of a step that reads cached activations; no images are prepared."""
        return self.plain_time(mask) + float(self._more_to_read[self.deepest(mask)])

    def fill_share(self, mask):
        """Returns the share of steps that fill a prefix cache; the others read it."""
        return float(self.cache.fill_share[self.deepest(mask)])

    def plain_time(self, mask):
        """Returns the ms of a step without a prefix cache."""
        mask = np.asarray(mask, dtype=bool)
        return self.fixed + self.backward_time(mask) + float(self.t_own[mask].sum())

    def deepest(self, mask):
        """Returns the index of the deepest tensor of a mask."""
        return int(np.where(mask, self.depth, -1).argmax())

    def is_cached(self, mask):
        """Returns whether steps are faster with the prefix cache."""
        return bool(self.cache_ms[self.deepest(mask)] < 0)

    @property
    def cache_ms(self):
        """Returns (N,) ms, <= 0, that the cache adds to a step if tensor k is the deepest.

        It is 0 where there is no cache or it does not pay.
        """
        if self.cache is None:
            return np.zeros(len(self.names))
        fill = self.cache.fill_share
        with np.errstate(invalid='ignore'):  # 0 * inf
            return np.fmin((1 - fill) * self._more_to_read + fill * self.cache.write_ms, 0.0)

    @property
    def _more_to_read(self):
        """Returns the (N,) ms by which a reading step is longer than one without a cache."""
        return self.cache.read_ms - self.cache.skipped * self.t_fp - self.t_loop

    def cached_at_best(self, epochs):
        """Returns this table with an ideal cache: filled once in `epochs` epochs, free to copy.

        A rho that is infeasible here is infeasible with any real cache.
        """
        ms = np.where(np.isfinite(self.cut_bytes), 0.0, np.inf)
        return self._replace(cache=CacheCost(
            np.full(len(ms), 1 / epochs), self.t_prefix / self.t_fp, ms, ms))

    @property
    def kept_bytes(self):
        """Returns N pairs (m_dw, m_dy) of whole bytes; empty texts where memory is not known.

        The forward pass leaves m_dw for each tensor alone, and m_dy, shared, to carry the error
        gradient on to it.
        """
        if self.memory is None:
            return [('', '')] * len(self.names)
        m_dw, m_dy, _ = chain_timings(self.memory.sets, self.memory.kept)
        return np.column_stack([m_dw, m_dy]).astype(np.int64).tolist()

    def save(self, path):
        """Writes the table as JSON to `path`, and as CSV next to it, for people."""
        content = {field: value.tolist() if isinstance(value, np.ndarray) else value
                   for field, value in self._asdict().items() if field not in NOT_STORED}
        content['profile'] = {field: getattr(self.profile, field) for field in STORED}
        content['profile']['estimated'] = self.profile.estimated.tolist()
        content['group_tensors'] = [np.flatnonzero(row).tolist() for row in self.group_tensors]
        content['memory'] = self.memory and self.memory.stored()
        write_json(path, content)
        rows = [['name', 'shape', 't_dw_ms', 't_dy_ms', 't_up_ms', 'share', 'time', 'm_dw_bytes',
                 'm_dy_bytes']]
        rows += [[name, 'x'.join(map(str, shape)), '%.5f' % dw, '%.5f' % dy, '%.5f' % up,
                  '%.5f' % ((dw + dy) / self.t_bp), 'estimated' if guess else 'measured', *kept]
                 for name, shape, dw, dy, up, guess, kept in zip(
                     self.names, self.shapes, self.t_dw, self.t_dy, self.t_up,
                     self.profile.estimated, self.kept_bytes)]
        with whole(os.path.splitext(path)[0] + '.csv') as part, open(part, 'w', newline='') as out:
            csv.writer(out).writerows(rows)

    @classmethod
    def load(cls, path):
        """Returns the table that `save` wrote; raises UserError if the file is not one."""
        content = read_json(path)
        if set(content) != set(cls._fields) - NOT_STORED or set(content['profile']) != set(STORED):
            raise UserError("'{}' is not a timing table of this version".format(path))
        for field in ('t_dw', 't_dy', 't_up', 'group_ms', 't_prefix', 'cut_bytes'):
            content[field] = np.array(content[field], dtype=np.float64)
        tensors = np.arange(len(content['names']))
        content['group_tensors'] = np.array([np.isin(tensors, members) for members in content[
            'group_tensors']], dtype=bool).reshape(-1, len(tensors))
        content['depth'] = np.array(content['depth'], dtype=np.int64)
        content['memory'] = content['memory'] and Memory.restored(content['memory'])
        content['profile'] = Profile(**content['profile'])._replace(
            estimated=np.array(content['profile']['estimated'], dtype=bool))
        content['shapes'] = [tuple(shape) for shape in content['shapes']]
        return cls(**content)


def time_of_groups(group_ms, needs):
    """Returns the (L,) ms of the groups that each item needs."""
    # Not by @, whose threads wait for busy cores.
    return np.einsum('g,gl->l', group_ms, needs)


def chain_timings(group_tensors, group_ms):
    """Returns (t_dw, t_dy, depth), (N,) each, as in TensorTimings: an upper bound of the graph.

    Depth orders the tensors by the ms of shared groups that they need. t_dw[k] is the group of
    tensor k alone; a shared group counts in t_dy of the tensor nearest to the output that needs it.
    Exact if all tensors of a mask lie on one path; else branches count that the mask does not need.
    """
    n = group_tensors.shape[1]
    # Stable: if two tensors need the same ms, the later variable counts as nearer to the output.
    order = np.argsort(-shared_ms(group_tensors, group_ms), kind='stable')
    depth = np.empty(n, dtype=np.int64)
    depth[order[::-1]] = np.arange(n)
    count = group_tensors.sum(axis=1)
    own, shared = count == 1, count > 1
    pays = np.where(group_tensors[shared], depth, n).argmin(axis=1)
    return (time_of_groups(group_ms[own], group_tensors[own]),
            np.bincount(pays, group_ms[shared], n), depth)


def shared_ms(group_tensors, group_ms):
    """Returns the (N,) ms of the ops that each tensor needs together with others."""
    shared = group_tensors.sum(axis=1) > 1
    return time_of_groups(group_ms[shared], group_tensors[shared])
