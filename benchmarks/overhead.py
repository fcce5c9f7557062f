"""Measures what a selection costs: importance, solving, switching masks, memory; and the profile.

    python benchmarks/overhead.py [--models resnet50 mobilenetv2@224]

Each network and size runs in its own process. The elastic scheme selects several times in a row,
each time on another batch. A full step runs after each selection, so that all costs are in full
steps of the same minute. `whole` is the whole selection: importance, both passes of the closed
loop, solving, cutting the new step out of the graph, and the extra time of its first call. `switch`
is the last two of these. For comparison, a step of the same mask is traced again: the table has the
cost of that, and the time of our step relative to the traced one. Memory is the process's resident
set after the third and after the last selection.
"""

import argparse
import os
import resource
import tempfile
import time

import _bench
import numpy as np
from tqdm import tqdm

from elastic import command_line, options, texts
from elastic.device import host
from elastic.settings import TRAINING, Settings

DEFAULT_MODELS = ['resnet50', 'mobilenetv2', 'resnet50@224', 'mobilenetv2@224']
WHOLE_STEPS = {96: 6.0, 224: 4.0}  # goals, by input size
MEMORY_SHARE = 0.02
RETRACED = 3  # of the selections
PLAIN_ROUNDS = 9


def profile_cost(prepared, input_size):
    """Returns (TensorTimings, dict of the profiler's seconds, trace size and extra memory)."""
    from profiler import profile_model
    before, begin = host.resident_bytes() / 2 ** 20, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        table = profile_model(prepared.model, (input_size, input_size, 3), _bench.NUM_CLASSES,
                              prepared.batch_size, folder=folder)
        trace = sum(os.path.getsize(os.path.join(path, name))
                    for path, _, names in os.walk(folder) for name in names)
    return table, dict(profile_seconds=time.perf_counter() - begin, trace_mb=trace / 2 ** 20,
                       profile_peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                       - before, before_mb=before)


def run_model(name, input_size, selections, rho, seed):
    """Returns the result of one network and size: medians over the selections."""
    prepared = _bench.prepare(name, input_size, seed)
    from elastic.steps.epoch import PLAIN, EpochResult
    from elastic.steps.training_step import TrainingStep
    table, result = profile_cost(prepared, input_size)
    maker, batch = prepared.maker, prepared.batch
    scheme = scheme_of(maker, prepared, table, rho, selections)
    full = _bench.call(maker.step(prepared.everything), prepared)
    scheme.select(1, None)  # compiles the passes
    for _ in range(3):
        full()
    rows, memory, last = [], [], None
    for i in tqdm(range(selections), desc='{} {}'.format(name, input_size), unit='selection',
                  leave=False, disable=None):
        importance_seconds, begin = scheme.importance_seconds, time.perf_counter()
        mask = scheme.select(2 + i, last).mask
        selected = time.perf_counter()
        step = maker.step(mask)
        run = _bench.call(step, prepared)
        run()
        called = time.perf_counter()
        steps = [step.milliseconds(*batch) for _ in range(5)]
        usual_ms = float(np.median(steps))
        last = EpochResult(0.0, 0.0, 0.0, {PLAIN: steps}, {PLAIN: [0.0] * len(steps)}, 0.0)
        row = dict(importance=1e3 * (scheme.importance_seconds - importance_seconds),
                   switch=1e3 * (called - selected) - usual_ms,
                   whole=1e3 * (called - begin) - usual_ms, step=usual_ms,
                   full=float(np.median([_bench.milliseconds(full) for _ in range(3)])))
        if i < RETRACED:
            begin = time.perf_counter()
            traced = TrainingStep(maker.model, maker.optimizer, mask, TRAINING.weight_decay)
            traced(*batch)[0].numpy()
            row['retrace'] = 1e3 * (time.perf_counter() - begin) - usual_ms
            pair, _ = _bench.interleaved([run, _bench.call(traced, prepared)], PLAIN_ROUNDS)
            row['of_plain'] = float(np.median(pair[:, 0] / pair[:, 1]))
            del traced
        rows.append(row)
        memory.append(host.resident_bytes() / 2 ** 20)
    result.update({key + '_ms': float(np.median([row[key] for row in rows if key in row]))
                   for key in ('importance', 'switch', 'whole', 'retrace', 'step', 'full')},
                  of_plain=float(np.median([row['of_plain'] for row in rows[:RETRACED]])))
    for key in ('importance', 'switch', 'whole', 'retrace'):
        steps = [row[key] / row['full'] for row in rows if key in row]
        result[key + '_steps'] = [float(np.median(steps))] + _bench.spread(steps)
    return dict(_bench.machine(), model=name, input_size=input_size, memory_mb=memory,
                batch_size=prepared.batch_size, rho=rho, **result)


def scheme_of(maker, prepared, table, rho, selections):
    """Returns the elastic scheme, which selects each time on another batch of noise."""
    import tensorflow as tf

    from train import ElasticScheme

    def probe():
        rng = np.random.RandomState(1)
        while True:
            yield (tf.constant(rng.uniform(0, 255, prepared.images.shape), tf.float32),
                   tf.constant(rng.randint(0, _bench.NUM_CLASSES, prepared.batch_size), tf.int32))
    settings = Settings(num_epochs=2 * selections, interval=1, rho=rho)
    return ElasticScheme(maker, probe(), table, settings)


def row_of(result):
    early, late = result['memory_mb'][2], result['memory_mb'][-1]
    goal = WHOLE_STEPS.get(result['input_size'])
    checks = [(goal is None or result['whole_steps'][0] <= goal, 'whole'),
              (late <= early * (1 + MEMORY_SHARE), 'memory')]
    missed = [text for met, text in checks if not met]
    return [result['model'], result['input_size'], result['batch_size'],
            '%.0f' % result['full_ms']] + [
                _bench.with_spread(steps[0], steps[1:], 2) for steps in (
                    result['whole_steps'], result['importance_steps'], result['switch_steps'])] + [
            '%.1f' % result['retrace_steps'][0], '%.2f' % result['of_plain'],
            '%.0f -> %.0f (%+.1f %%)' % (early, late, 100 * (late / early - 1)),
            '%.0f' % result['profile_seconds'], '%+.0f' % result['profile_peak_mb'],
            '%.1f' % result['trace_mb'], 'MISSED ' + ', '.join(missed) if missed else 'met']


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--selections', type=options.number(int, low=4), default=20)
    parser.add_argument('--rho', type=options.number(float, above=0, high=1), default=0.6)
    _bench.add_flags(parser, 'overhead', DEFAULT_MODELS)
    args = _bench.parsed(parser, argv)
    results = list(_bench.each('overhead', _bench.calls(
        args, args.selections, args.rho, args.seed)))
    print('costs in full steps, medians [10 %, 90 %]; goals: whole {}, memory +{:g} %'.format(
        ', '.join('{:g} at {}'.format(steps, size) for size, steps in WHOLE_STEPS.items()),
        100 * MEMORY_SHARE))
    print(texts.table(
        ['model', 'size', 'batch', 'full step (ms)', 'whole (steps)', 'importance (steps)',
         'switch (steps)', 're-traced (steps)', 'step of plain', 'memory (MB)', 'profile (s)',
         'its peak (MB)', 'trace (MB)', 'goals'],
        [row_of(result) for result in results], '<>>>>>>>>>>>><'))
    _bench.write('overhead', results, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
