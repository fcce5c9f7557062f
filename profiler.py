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

PARTS = (1 / 3, 2 / 3)  # of the backward pass, from the output on: measured apart
DEPTH_SCALE = 2.0       # so far at most they may change what the trace says
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
    t_loop: what the training loop adds to any step: the input pipeline's share of the cores,
    waiting for it, Python. 0 in a profile, known once the loop runs (closed_loop.py).
    seconds: how long the profile took.
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
    t_loop: float = 0.0
    seconds: float = 0.0

    @property
    def t_step(self):
        """ms: the whole step of full training."""
        return self.t_fp + self.t_bp + self.t_update + self.t_loop

    @property
    def fixed(self):
        """ms that every step pays, whatever it trains: forward pass, loop, optimizer's fixed part.
        """
        return self.t_fp + self.t_loop + max(0.0, self.t_update - float(self.t_up.sum()))

    def rescaled(self, t_fp, t_bp):
        """The table with both passes as measured now, ms; the update follows both together."""
        backward = t_bp / self.t_bp
        whole = (t_fp + t_bp) / (self.t_fp + self.t_bp)
        return self._replace(
            t_fp=t_fp, t_bp=t_bp, t_dw=self.t_dw * backward,
            t_dy=self.t_dy * backward, group_ms=self.group_ms * backward, t_up=self.t_up * whole,
            t_update=self.t_update * whole)

    def backward_time(self, mask):
        """ms of the backward pass for the (N,) bool mask: the union of the ops its tensors need."""
        needed = self.group_matrix() @ np.asarray(mask, dtype=np.float64)
        return float(self.group_ms[needed > 0].sum())

    def chain_time(self, mask):
        """ms by t_dw and t_dy: equal to backward_time for all tensors, else an upper bound."""
        chosen = np.asarray(mask, dtype=bool)[self.order]
        deepest = int(np.argmax(chosen)) if chosen.any() else len(chosen)
        return float(self.t_dw[self.order][chosen].sum() + self.t_dy[self.order][deepest:].sum())

    def step_time(self, mask):
        """ms of a whole training step for the (N,) bool mask."""
        mask = np.asarray(mask, dtype=bool)
        return self.fixed + self.backward_time(mask) + float(self.t_up[mask].sum())

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

    from backbone import statistics_from_batch
    from keras_stack import restored_afterwards, variable_name
    from masked_step import StepMaker
    from training_step import make_optimizer
    begin, variables = time.perf_counter(), model.trainable_variables
    rng = np.random.RandomState(0)
    images = tf.constant(rng.uniform(0, 255, (batch_size,) + tuple(input_shape)), tf.float32)
    labels = tf.constant(rng.randint(0, num_classes, batch_size), tf.int32)
    everything = np.ones(len(variables), dtype=bool)
    with restored_afterwards(model.variables):
        statistics_from_batch(model, images)
        trained_by = make_optimizer(optimizer, 1e-6, 1000, variables)
        maker = StepMaker(model, trained_by, weight_decay, images, labels)
        graph = executed_graph(maker, images, labels)
        trace = record_trace(maker.step(everything), images, labels, folder, num_steps)
        times = attribute(graph, read_trace(trace, num_steps), len(variables))
        totals = measure_totals(maker, times.groups, images, labels, seconds)
    return build_table([variable_name(v) for v in variables],
                       [tuple(int(n) for n in v.shape) for v in variables], times, totals,
                       key or {})._replace(seconds=time.perf_counter() - begin)


class Totals(NamedTuple):
    """Untraced ms per step, at the threading of training; deepest: the tensor of t_chain.

    t_chain: backward pass of the deepest tensor alone: the error gradient's whole way.
    upper: (tensors, ms) of the backward pass of all tensors above some depth, deepest set first.
    """
    t_fp: float
    t_bp: float
    t_update: float
    t_chain: float
    deepest: int
    upper: Tuple = ()


def measure_totals(maker, groups, images, labels, seconds):
    """Totals, medians of interleaved runs: tracing inflates small ops, so only its shares are used.

    maker: masked_step.StepMaker of the training step.
    """
    n = len(maker.model.trainable_variables)
    deepest = int(chain_timings(groups, n)[2][0])
    everything = np.ones(n, dtype=bool)
    upper = upper_parts(groups, n)
    functions = [maker.forward(), maker.step(np.arange(n) == deepest, update=False),
                 maker.step(everything, update=False), maker.step(everything)]
    functions += [maker.step(np.isin(np.arange(n), part), update=False) for part in upper]
    ms = interleaved_ms(functions, images, labels, seconds)  # (rounds, functions)
    t_fp = float(np.median(ms[:, 0]))
    # Differences within a round, so that a slow spell of the machine cancels.
    t_chain, t_bp, t_all, *parts = np.maximum(np.median(ms[:, 1:] - ms[:, :1], axis=0), 1e-3)
    return Totals(t_fp, float(t_bp), float(max(t_all - t_bp, 0.0)), float(t_chain), deepest,
                  tuple(zip(upper, map(float, parts))))


def upper_parts(groups, num_tensors):
    """Lists of the tensors nearest the output, that take at most PARTS of the traced backward pass.

    The longest first; fewer where two are the same or one is empty.
    """
    t_dw, t_dy, order = chain_timings(groups, num_tensors)
    above = np.cumsum((t_dw + t_dy)[order][::-1]) / max(sum(groups.values()), 1e-9)
    counts = [int(np.searchsorted(above, share)) for share in PARTS]
    return [[int(k) for k in order[num_tensors - count:]]
            for count in sorted(set(counts), reverse=True) if 0 < count < num_tensors]


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
            function(images, labels)[0].numpy()  # waits for the device
            row.append((time.perf_counter() - begin) * 1e3)
        samples.append(row)
    return np.array(samples)


def build_table(names, shapes, times, totals, key):
    """TensorTimings from traced shares (OpTimes) and untraced Totals.

    Own gradients and the error gradient's way are scaled apart, so that both the backward pass of
    all tensors and that of the deepest one alone come out as measured: with several inter-op
    threads, own gradients partly overlap with the error gradient and cost less than in the trace,
    where ops run one at a time. How much differs with depth: see scaled_by_depth.
    """
    n = len(names)
    own, shared = own_and_shared_scale(times.groups, totals, n)
    scaled = {mask: ms * (shared if mask & (mask - 1) else own)
              for mask, ms in times.groups.items() if ms > 0}
    scaled = scaled_by_depth(scaled, totals)
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

    Solves own * W + shared * Y = t_bp and own * w + shared * y = t_chain, w and y being the share
    of the deepest tensor; one scale for both where that has no sensible solution.
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


def scaled_by_depth(groups, totals):
    """The groups with those between two depths scaled to what was measured between them.

    Small late ops use two cores less well one at a time than in a training step, early ones as
    well. Limited to DEPTH_SCALE, and the sum kept.
    """
    bits = [sum(1 << k for k in part) for part, _ in totals.upper]
    ends = [totals.t_bp] + [ms for _, ms in totals.upper] + [0.0]
    depth = {mask: sum(mask & part != 0 for part in bits) for mask in groups}
    scales = []
    for i, (whole, above) in enumerate(zip(ends, ends[1:])):
        traced = sum(ms for mask, ms in groups.items() if depth[mask] == i)
        scales.append(min(max((whole - above) / max(traced, 1e-9), 1 / DEPTH_SCALE), DEPTH_SCALE))
    scaled = {mask: ms * scales[depth[mask]] for mask, ms in groups.items()}
    rest = sum(groups.values()) / max(sum(scaled.values()), 1e-9)
    return {mask: ms * rest for mask, ms in scaled.items()}


def _tensors(mask):
    return [k for k in range(mask.bit_length()) if mask >> k & 1]


def table_key(model_name, alpha, input_size, batch_size, num_classes, optimizer, weight_decay,
              bn_statistics, augmentation):
    """What a timing table is valid for: the network, the step, this machine, this software."""
    import tensorflow as tf
    from tensorflow import keras
    return dict(
        model=model_name, alpha=alpha, input_size=input_size, batch_size=batch_size,
        num_classes=num_classes, optimizer=optimizer, decay=bool(weight_decay),
        bn_statistics=bn_statistics, augmentation=augmentation, dtype=keras.backend.floatx(),
        inter_op_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        intra_op_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        host=host_description(), tensorflow=tf.__version__, keras=keras.__version__)


def host_description():
    """Processor, number of usable cores and GPUs of this machine, in one line."""
    import tensorflow as tf
    name = platform.processor() or platform.machine()
    for path, field in (('/proc/device-tree/model', None), ('/proc/cpuinfo', 'model name')):
        if os.path.exists(path):
            with open(path, errors='replace') as lines:
                found = [line.split(':', 1)[-1] for line in lines if field is None or field in line]
            if found:
                name = found[0]
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    gpus = [tf.config.experimental.get_device_details(gpu).get('device_name', 'GPU')
            for gpu in tf.config.list_physical_devices('GPU')]
    return ', '.join(['{}, {} cores'.format(name.strip(' \x00\n\t'), cores)] + gpus)


def table_folder(logs_dir, model_name, input_size, num_classes, batch_size):
    """logs/<model>_<size>_<classes>_<batch>_profile."""
    name = os.path.splitext(os.path.basename(os.path.normpath(model_name)))[0]
    return os.path.join(logs_dir, '{}_{}_{}_{}_profile'.format(
        name, input_size, num_classes, batch_size))


def stored_table(folder, key):
    """The TensorTimings in `folder` if its key is exactly `key`; else None, and prints why."""
    path = os.path.join(folder, TABLE_FILE)
    if not os.path.exists(path):
        print('no timing table at {}: profiling'.format(path))
        return None
    try:
        table = TensorTimings.load(path)
    except (ValueError, KeyError, TypeError) as error:
        print('the timing table cannot be used ({}): profiling again'.format(error))
        return None
    differing = sorted(k for k in set(key) | set(table.key) if key.get(k) != table.key.get(k))
    if differing:
        print('the timing table at {} is for other settings ({}): profiling again'.format(
            path, ', '.join('{}: {} there, {} now'.format(k, table.key.get(k), key.get(k))
                            for k in differing)))
        return None
    print('timing table: {}'.format(path))
    return table


def table_for(model, input_size, num_classes, batch_size, optimizer, weight_decay, key, folder,
              again=False):
    """The stored table where its key matches; else measured now and stored, trace beside it.

    again: measured in any case.
    """
    table = None if again else stored_table(folder, key)
    if table is None:
        os.makedirs(folder, exist_ok=True)
        begin = time.perf_counter()
        table = profile_model(model, (input_size, input_size, 3), num_classes, batch_size,
                              optimizer, weight_decay, folder, key)
        table.save(os.path.join(folder, TABLE_FILE))
        print('profiled in {:.1f} s: {}'.format(time.perf_counter() - begin,
                                                os.path.join(folder, TABLE_FILE)))
        warn_of_coverage(table)
    return table


def warn_of_coverage(table):
    """Says so, with names, where too little of the traced time could be attributed."""
    if table.coverage < MIN_COVERAGE:
        print('warning: only {:.1f} % of the traced time outside the forward pass was attributed '
              '(at least {:.0f} % is usual); left out: {}'.format(
                  100 * table.coverage, 100 * MIN_COVERAGE, ', '.join(
                      '{} ({:.2f} ms)'.format(name, ms) for name, ms in table.left_out[:10])))


def describe(table):
    """Text of the table: a row a tensor, then the totals."""
    rows = [[k, name, 'x'.join(map(str, shape)), '%.3f' % dw, '%.3f' % dy, '%.3f' % up,
             '%.2f' % (100 * (dw + dy) / table.t_bp), 'estimated' if guess else 'measured']
            for k, (name, shape, dw, dy, up, guess) in enumerate(zip(
                table.names, table.shapes, table.t_dw, table.t_dy, table.t_up, table.estimated))]
    tensors = command_line.table(
        ['', 'tensor', 'shape', 't_dw (ms)', 't_dy (ms)', 't_up (ms)', 'backward (%)', 'time'],
        rows, '><>>>>><')
    full = table.t_step
    totals = command_line.table(['per step', 'ms', '%'], [
        [name, '%.2f' % ms, '%.1f' % (100 * ms / full)] for name, ms in (
            ('forward pass (t_fp)', table.t_fp), ('backward pass (t_bp)', table.t_bp),
            ('update (t_update)', table.t_update), ('full step', full))])
    return '{}\n\n{}\n\nattributed: {:.1f} % of the traced time outside the forward pass'.format(
        tensors, totals, 100 * table.coverage)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    command_line.add_model_flags(parser)
    parser.add_argument('--num_classes', type=command_line.number(int, low=2), default=200,
                        metavar='N', help='width of the head (default: %(default)s)')
    parser.add_argument('--bn_statistics', choices=('frozen', 'train'), default='frozen',
                        help='as in training: frozen with pretrained weights, train from scratch '
                             '(default: %(default)s)')
    command_line.add_flag(parser, '--plot', 'also draw t_dw and t_dy of every tensor')
    command_line.add_flag(parser, '--force', 'measure again even where a table matches')
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_arguments(argv)
    from datasets import augmentation, check_dataset_name
    from models import build_model, canonical_name
    name = canonical_name(args.model_name)
    check_dataset_name(args.dataset_name)
    command_line.start_tensorflow(args.inter_op_threads)
    saved = os.path.exists(name)
    model = build_model(name, (args.input_size, args.input_size, 3), args.num_classes,
                        'imagenet' if saved else 'none', args.alpha, args.bn_statistics)
    folder = table_folder(args.logs_dir, name, args.input_size, args.num_classes, args.batch_size)
    key = table_key(name, args.alpha, args.input_size, args.batch_size, args.num_classes,
                    args.optimizer, args.weight_decay, args.bn_statistics,
                    augmentation(args.dataset_name))
    table = table_for(model, args.input_size, args.num_classes, args.batch_size, args.optimizer,
                      args.weight_decay, key, folder, again=args.force)
    print(describe(table))
    if args.plot:
        import plot
        content = table._asdict()
        content.update(t_dw=table.t_dw.tolist(), t_dy=table.t_dy.tolist(), model=name)
        print('\n'.join(plot.timing_bars(content, os.path.join(folder, 'timings'))))
    return 0


if __name__ == '__main__':
    command_line.run(main)
