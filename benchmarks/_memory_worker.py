"""Measures the working memory of steps of one network, and predicts it, in a process of its own.

    _memory_worker.py NETWORK ALPHA INPUT_SIZE BATCH_SIZE [MASK]       (started by memory.py)

Without MASK, TensorFlow's allocator counts: bytes of tensors, for all masks. With it, the process's
resident memory is measured, for this mask alone, as freed memory does not all return to the system.
"""

import glob
import json
import os
import sys
import tempfile

import _bench
import _path
import numpy as np

from elastic.compat import start
from elastic.device import host
from elastic.schemes.fixed import HEAD, fixed_mask

NUM_CLASSES, CALLS = 10, 3


def masks_of(model):
    """Returns name -> (N,) bool."""
    count = len(model.trainable_variables)
    places, small = np.arange(count), fixed_mask('bn_plus_bias_training', model)
    return {'head': fixed_mask(HEAD, model), 'last 15 %': places >= 0.85 * count,
            'last 30 %': places >= 0.7 * count, 'last 60 %': places >= 0.4 * count,
            'kernels': ~small | (places >= count - 2), 'BN + bias': small,
            'random 30 %': np.random.RandomState(0).rand(count) < 0.3,
            'full': np.ones(count, bool)}


def counted_bytes(call):
    """Returns the most bytes of tensors in CALLS calls; None if the trace has no allocations.

    The order of ops, and with it the peak, differs between calls.
    A convolution's workspace for more images than there are counts as far as it is used.
    """
    import tensorflow as tf

    from elastic.compat.tf_internals import xplane_pb2
    call()  # compiles
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options=tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0))
        for _ in range(CALLS):
            call()
        tf.profiler.experimental.stop()
        space = xplane_pb2.XSpace()
        with open(glob.glob(folder + '/plugins/profile/*/*.xplane.pb')[0], 'rb') as file:
            space.ParseFromString(file.read())
    events = []
    for plane in space.planes:
        names = {i: each.name for i, each in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if names[event.metadata_id] in ('MemoryAllocation', 'MemoryDeallocation'):
                    stats = {plane.stat_metadata[s.metadata_id].name: (
                        s.str_value or s.int64_value or s.uint64_value
                        or plane.stat_metadata[s.ref_value].name) for s in event.stats}
                    events.append((1000 * line.timestamp_ns + event.offset_ps,
                                   names[event.metadata_id] == 'MemoryAllocation', stats))
    now = most = 0
    sizes, batch = {}, int(sys.argv[4])
    for _, allocates, stats in sorted(events, key=lambda event: event[:2]):
        size = int(stats.get('requested_bytes') or 0)
        if not allocates:
            now -= sizes.pop(stats['addr'], size)
            continue
        if stats.get('region_type') == 'temp' and 'Conv2DBackprop' in str(stats.get('tf_op')):
            size = size * min(batch, int(stats['shape'][1:].split(',')[0])) // int(
                stats['shape'][1:].split(',')[0])
        sizes[stats['addr']] = size
        now += size
        most = max(most, now)
    return most if events else None


def resident_bytes(call):
    """Returns the most memory that the process held during CALLS calls, beyond that before."""
    host.release_memory()
    host.reset_peak()
    before = host.resident_bytes()
    for _ in range(CALLS):
        call()
    return host.peak_bytes() - before


def main(name, alpha, size, batch, mask=None):
    os.chdir(_path.ROOT)
    if mask is None:
        os.environ['TF_CPU_ALLOCATOR_USE_BFC'] = '1'  # the only allocator of a CPU that counts
    start.start_tensorflow(seed=0)
    import tensorflow as tf

    from elastic.selection.importance import Evaluator
    from elastic.timing.liveness import memory_of
    from models import build_model
    shape = (int(size), int(size), 3)
    model = build_model(name, shape, NUM_CLASSES, 'none', float(alpha), 'frozen')
    inputs = tf.random.stateless_uniform((int(batch),) + shape, (0, 0), 0, 255)
    labels = tf.range(int(batch)) % NUM_CLASSES
    maker = _bench.step_maker(model, inputs, labels)
    memory, masks, found = memory_of(maker), masks_of(model), {}
    predicted = {each: memory.peak(masks[each]) for each in masks}
    predicted.update(forward=memory.forward_peak(), importance=memory.importance_peak(int(batch)))
    for each in [mask] if mask else [each for each in predicted if each != 'importance']:
        if each == 'importance':
            trial = Evaluator(maker).trial
            found[each] = dict(resident=resident_bytes(
                lambda trial=trial: trial(inputs, labels, 0.5)))
        else:
            step = maker.forward() if each == 'forward' else maker.step(masks[each])

            def call(step=step):
                step(inputs, labels)[0].numpy()
            found[each] = dict(resident=resident_bytes(call)) if mask else dict(
                counted=counted_bytes(call))
        found[each].update(predicted=predicted[each], process=host.peak_bytes())
    print(json.dumps(found))


if __name__ == '__main__':
    main(*sys.argv[1:])
