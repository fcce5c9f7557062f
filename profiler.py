"""Tensor timing profiler: how long the backward pass needs for each tensor (paper, section 4.1).

    python profiler.py --model_name resnet50 --num_classes 200

Records real training steps with the TensorFlow profiler, attributes op times to tensors through the
graph (backward_graph.py), and writes trace, table (CSV, JSON) under
logs/<model>_<size>_<classes>_<batch>_profile/. Once per device, model, input, batch and threading:
the table carries a key of all these and is reused only where the key matches exactly.
"""

import argparse
import csv
import json
import os
import platform
import time
from typing import Dict, List, NamedTuple, Tuple

import numpy as np

import command_line
from command_line import UserError

MIN_COVERAGE = 0.95
TABLE_FILE = 'timings.json'


class TensorTimings(NamedTuple):
    """What each of the N trainable tensors costs, in ms per step, model.trainable_variables order.

    names: N strings; shapes: N tuples.
    t_dw: (N,) own gradient: ops that no other tensor needs.
    t_dy: (N,) increment of the shared ops when the error gradient goes on to this tensor.
    t_up: (N,) the optimizer's ops for this tensor alone.
    t_fp, t_bp, t_update: forward pass, backward pass of all tensors, optimizer and decay of all.
    order: (N,) int, tensors by depth in the graph, deepest first; t_dy accumulates from its end.
    group_tensors: G lists of tensor indices; group_ms: (G,) ops that exactly these tensors need.
    estimated: (N,) bool, where part of the time had no trace event and was estimated.
    coverage: share of the traced time outside the forward pass that was attributed.
    left_out: (event, ms) that was not. key: what the table is valid for.
    """
    names: List[str]
    shapes: List[Tuple]
    t_dw: np.ndarray
    t_dy: np.ndarray
    t_up: np.ndarray
    t_fp: float
    t_bp: float
    t_update: float
    order: np.ndarray
    group_tensors: List[List[int]]
    group_ms: np.ndarray
    estimated: np.ndarray
    coverage: float
    left_out: List
    key: Dict

    @property
    def t_step(self):
        """ms: the whole step of full training."""
        return self.t_fp + self.t_bp + self.t_update

    @property
    def fixed(self):
        """ms: what every step pays whatever it trains: forward pass, fixed part of the optimizer."""
        return self.t_fp + max(0.0, self.t_update - float(self.t_up.sum()))

    def backward_time(self, mask):
        """ms of the backward pass for the (N,) bool mask: the union of the ops its tensors need."""
        needed = self.group_matrix() @ np.asarray(mask, dtype=np.float64)
        return float(self.group_ms[needed > 0].sum())

    def chain_time(self, mask):
        """ms by t_dw and t_dy: equal to backward_time for all tensors, an upper bound for others."""
        chosen = np.asarray(mask, dtype=bool)[self.order]
        deepest = int(np.argmax(chosen)) if chosen.any() else len(chosen)
        return float(self.t_dw[self.order][chosen].sum() + self.t_dy[self.order][deepest:].sum())

    def step_time(self, mask):
        """ms of a whole training step for the (N,) bool mask."""
        return self.fixed + self.backward_time(mask) + float(self.t_up[np.asarray(mask, bool)].sum())

    def group_matrix(self):
        """(G, N) float64: 1 where the group's ops are needed by the tensor."""
        matrix = np.zeros((len(self.group_tensors), len(self.names)))
        for row, tensors in zip(matrix, self.group_tensors):
            row[tensors] = 1
        return matrix

    def save(self, path):
        """Writes the table as JSON at `path` and, for people, as CSV beside it."""
        content = {field: value.tolist() if isinstance(value, np.ndarray) else value
                   for field, value in self._asdict().items()}
        _write_whole(path, json.dumps(content))
        rows = [['name', 'shape', 't_dw_ms', 't_dy_ms', 't_up_ms', 'share', 'time']]
        rows += [[name, 'x'.join(map(str, shape)), '%.5f' % dw, '%.5f' % dy, '%.5f' % up,
                  '%.5f' % ((dw + dy) / self.t_bp), 'estimated' if guess else 'measured']
                 for name, shape, dw, dy, up, guess in zip(
                     self.names, self.shapes, self.t_dw, self.t_dy, self.t_up, self.estimated)]
        _write_whole(os.path.splitext(path)[0] + '.csv', rows)

    @classmethod
    def load(cls, path):
        """The table that save wrote; ValueError where the file is not one."""
        with open(path) as source:
            content = json.load(source)
        if not isinstance(content, dict) or set(content) != set(cls._fields):
            raise ValueError("'{}' is not a timing table of this version".format(path))
        for field in ('t_dw', 't_dy', 't_up', 'group_ms'):
            content[field] = np.array(content[field], dtype=np.float64)
        content['order'] = np.array(content['order'], dtype=np.int64)
        content['estimated'] = np.array(content['estimated'], dtype=bool)
        content['shapes'] = [tuple(shape) for shape in content['shapes']]
        return cls(**content)


def _write_whole(path, content):
    with open(path + '.part', 'w', newline='') as out:
        if isinstance(content, str):
            out.write(content)
        else:
            csv.writer(out).writerows(content)
    os.replace(path + '.part', path)


def chain_timings(groups, num_tensors):
    """(t_dw, t_dy, order): the chain that bounds the graph from above.

    groups: bit mask of the tensors that need some ops -> ms.
    t_dw[k] is the group of k alone. The shared groups are laid along the tensors by depth, a
    tensor's depth being the shared time it needs: t_dy of a tensor is what its shared ops add to
    those of the tensors nearer the output. For masks whose tensors all lie on one path this is
    exact; where paths branch, it charges the branches that a mask does not need.
    """
    t_dw = np.array([groups.get(1 << k, 0.0) for k in range(num_tensors)])
    shared = [(mask, ms) for mask, ms in groups.items() if mask & (mask - 1)]
    depth = np.array([sum(ms for mask, ms in shared if mask >> k & 1) for k in range(num_tensors)])
    # Stable, on the reversed list: of equally deep tensors the later variable is nearer the output.
    order = np.argsort(-depth, kind='stable')
    t_dy, covered = np.zeros(num_tensors), 0
    for k in order[::-1]:
        added = [(mask, ms) for mask, ms in shared if mask >> int(k) & 1]
        t_dy[k] = sum(ms for _, ms in added)
        shared = [(mask, ms) for mask, ms in shared if not mask >> int(k) & 1]
        covered += len(added)
    return t_dw, t_dy, order


def profile_model(model, input_shape, num_classes, batch_size, optimizer='sgd', weight_decay=5e-4,
                  folder=None, key=None, num_steps=5, seconds=8.0):
    """TensorTimings of one training step of `model` on this machine.

    input_shape: (height, width, channels); optimizer: 'sgd' or 'adam'.
    folder: where the trace stays; a temporary one, deleted, when None.
    key: stored in the table. num_steps: traced steps.
    seconds: about how long the untraced, interleaved runs that give the totals may take.
    The model's variables are as before afterwards.
    """
    import tempfile

    from backward_graph import attribute, executed_graph, read_trace, record_trace
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return profile_model(model, input_shape, num_classes, batch_size, optimizer,
                                 weight_decay, temporary, key, num_steps, seconds)
    import tensorflow as tf

    from keras_stack import restored_afterwards, variable_name
    from training_step import TrainingStep, make_optimizer
    variables = model.trainable_variables
    rng = np.random.RandomState(0)
    images = tf.constant(rng.uniform(0, 255, (batch_size,) + tuple(input_shape)), tf.float32)
    labels = tf.constant(rng.randint(0, num_classes, batch_size), tf.int32)
    everything = np.ones(len(variables), dtype=bool)
    with restored_afterwards(model.variables):
        trained_by = make_optimizer(optimizer, 1e-6, 1000, variables)
        step = TrainingStep(model, trained_by, everything, weight_decay)
        with_gradients = TrainingStep(model, trained_by, everything, weight_decay,
                                      outputs_gradients=True)
        graph = executed_graph(with_gradients, images, labels)
        trace = record_trace(step, images, labels, folder, num_steps)
        times = attribute(graph, read_trace(trace, num_steps), len(variables))
        totals = measure_totals(step, times.groups, images, labels, seconds)
    return build_table([variable_name(v) for v in variables],
                       [tuple(int(n) for n in v.shape) for v in variables], times, totals, key or {})


class Totals(NamedTuple):
    """Untraced ms per step, at the threading of training; deepest: the tensor of t_chain.

    t_chain: backward pass of the deepest tensor alone: the error gradient's whole way.
    """
    t_fp: float
    t_bp: float
    t_update: float
    t_chain: float
    deepest: int


def measure_totals(step, groups, images, labels, seconds):
    """Totals, medians of interleaved runs: tracing inflates small ops, so only its shares are used.

    step: the TrainingStep of all tensors.
    """
    from training_step import TrainingStep, forward_function
    n = len(step.variables)
    deepest = int(chain_timings(groups, n)[2][0])
    functions = [forward_function(step.model),
                 TrainingStep(step.model, step.optimizer, np.arange(n) == deepest, update=False),
                 TrainingStep(step.model, step.optimizer, np.ones(n, dtype=bool), update=False),
                 step]
    ms = interleaved_ms(functions, images, labels, seconds)  # (rounds, 4)
    t_fp = float(np.median(ms[:, 0]))
    # Differences within a round, so that a slow spell of the machine cancels.
    t_chain, t_bp, t_all = [float(np.median(ms[:, i] - ms[:, 0])) for i in (1, 2, 3)]
    t_bp = max(t_bp, 1e-3)
    return Totals(t_fp, t_bp, max(t_all - t_bp, 0.0), max(t_chain, 1e-3), deepest)


def interleaved_ms(functions, images, labels, seconds, rounds=(5, 40)):
    """(rounds, functions) float64: ms of each call, the functions in turn.

    seconds: stops after about that long, but within the given least and most rounds.
    """
    for function in functions:
        function(images, labels)  # the first call traces and compiles
        function(images, labels)
    samples, start = [], time.perf_counter()
    while len(samples) < rounds[0] or (len(samples) < rounds[1]
                                       and time.perf_counter() - start < seconds):
        row = []
        for function in functions:
            begin = time.perf_counter()
            result = function(images, labels)
            (result[0] if isinstance(result, tuple) else result).numpy()  # waits for the device
            row.append((time.perf_counter() - begin) * 1e3)
        samples.append(row)
    return np.array(samples)


def build_table(names, shapes, times, totals, key):
    """TensorTimings from traced shares (OpTimes) and untraced Totals.

    Own gradients and the error gradient's way are scaled apart, so that both the backward pass of
    all tensors and that of the deepest one alone come out as measured: with several inter-op
    threads, own gradients partly overlap with the error gradient and cost less than in the trace,
    where ops run one at a time.
    """
    n = len(names)
    own, shared = own_and_shared_scale(times.groups, totals, n)
    scaled = {mask: ms * (shared if mask & (mask - 1) else own)
              for mask, ms in times.groups.items() if ms > 0}
    t_dw, t_dy, order = chain_timings(scaled, n)
    traced_update = times.update.sum() + times.update_fixed
    t_up = times.update * (totals.t_update / traced_update if traced_update else 0.0)
    estimated = np.zeros(n, dtype=bool)
    for mask in times.estimated:
        for k in _tensors(mask):
            estimated[k] = True
    groups = sorted(scaled.items())
    return TensorTimings(names, shapes, t_dw, t_dy, t_up, totals.t_fp, totals.t_bp,
                         totals.t_update, order, [_tensors(mask) for mask, _ in groups],
                         np.array([ms for _, ms in groups]), estimated, times.coverage,
                         times.left_out[:20], key)


def own_and_shared_scale(groups, totals, num_tensors):
    """(scale of groups of one tensor, scale of shared groups): measured over traced ms.

    Solves own * W + shared * Y = t_bp and own * w + shared * y = t_chain, w and y being the share of
    the deepest tensor; one scale for both where that has no sensible solution.
    """
    bit = 1 << totals.deepest
    total_own = sum(ms for mask, ms in groups.items() if not mask & (mask - 1))
    total_shared = sum(groups.values()) - total_own
    deepest_own = groups.get(bit, 0.0)
    deepest_shared = sum(ms for mask, ms in groups.items() if mask & bit and mask & (mask - 1))
    even = totals.t_bp / max(total_own + total_shared, 1e-9)
    matrix = np.array([[total_own, total_shared], [deepest_own, deepest_shared]])
    if abs(np.linalg.det(matrix)) < 1e-6 * (matrix ** 2).sum():
        return even, even
    own, shared = np.linalg.solve(matrix, [totals.t_bp, totals.t_chain])
    if not (0.2 * even < own < 5 * even and 0.2 * even < shared < 5 * even):
        return even, even
    return float(own), float(shared)


def _tensors(mask):
    return [k for k in range(mask.bit_length()) if mask >> k & 1]
