"""Builds timing tables from fixed rates: nothing is measured, every machine gets the same."""

import os

import numpy as np
import tensorflow as tf
from tensorflow import keras

import main
import profiler
from elastic.compat.keras_stack import variable_name
from elastic.compat.start import start_tensorflow
from elastic.steps.function_graph import work_of
from elastic.steps.prefix_steps import PrefixSteps
from elastic.steps.step_graph import constants, estimated_ms, reachable
from elastic.timing.attribution import attribute
from elastic.timing.stored import table_key
from elastic.timing.totals import build_table, prefix_cuts
from elastic.workers.cluster import ALONE
from small_runs import run_settings_of
from timing_tables import totals_as_traced

RATES = {'* flops': 1e-6, '* elements': 1e-5}  # ms per unit of work, for every type of op
# ms per batch to read and to write each of TRIED_BYTES (copy_times.CopyTimes).
COPY_MS = {place: [(0.001, 0.001), (0.05, 0.05)] for place in ('memory', 'disk')}


def fixed_table(maker, t_fp=2.0, t_bp=4.0, t_update=0.5, key=None):
    """Returns the TensorTimings of a StepMaker: shares by RATES, the given totals in ms per step.

    key: what the table is valid for. Takes a tenth of a second, as no step is timed.
    """
    nodes, work = maker.graph.nodes, work_of(maker.concrete.graph)
    run = reachable([name for name, node in nodes.items() if node.op == '_Retval']
                    + list(maker.effects(set()).values()), lambda name: nodes[name].data)
    run -= constants(nodes)
    work = {name: amount for name, amount in work.items() if name in run}
    times = {name: estimated_ms(nodes[name].op, amount, RATES) for name, amount in work.items()}
    times = attribute(maker.graph._replace(work=work), times, len(maker.variables))
    _, skipped, cut_bytes = prefix_cuts(PrefixSteps(maker), times, *_batch_of(maker))
    totals = totals_as_traced(times, t_fp, t_bp, t_update, t_both=t_fp + t_bp,
                              suffixes=[(0.0, 0.0)], skipped=skipped, cut_bytes=cut_bytes)
    table = build_table([variable_name(v) for v in maker.model.trainable_variables],
                        [tuple(int(n) for n in v.shape) for v in maker.variables], times, totals,
                        {} if key is None else key)
    return table._replace(profile=table.profile._replace(row_ms=dict(COPY_MS)))


def _batch_of(maker):
    """Returns random (inputs, labels) for the step."""
    (inputs, labels), _ = maker.concrete.structured_input_signature
    rng = np.random.RandomState(0)
    return tf.nest.map_structure(
        lambda spec: tf.cast(tf.constant(rng.uniform(0, 255 if spec.dtype.is_floating else 2,
                                                     spec.shape.as_list())), spec.dtype),
        (inputs, labels))


def fixed_profile(model, input_shape=None, num_classes=None, batch_size=None, optimizer='sgd',
                  batch=None, folder=None, key=None, num_steps=None, seconds=None, **update):
    """Returns the fixed_table of this step; takes the arguments of profiler.profile_model."""
    if batch is None:
        batch = (tf.zeros((batch_size,) + tuple(input_shape)), tf.zeros((batch_size,), tf.int32))
    settings = profiler.UpdateSettings(optimizer, **update)
    return fixed_table(profiler.step_maker(model, settings, *batch), key=key)


def store_table(flags, *ms):
    """Stores the fixed_table of a run where main.py finds it, with these flags; returns its path.

    ms: totals of the table, t_fp and t_bp; default: those of fixed_table.
    """
    settings = run_settings_of(flags)
    start_tensorflow(settings.inter_op_threads)
    images = main.images_of(settings)
    features = main.features_to_read(settings, images, ALONE, None)
    model = main.model_of(settings, len(images.class_names), features)
    dataset = main.load_data(settings, images)
    step, folder = main.timed_step(settings, dataset)
    table = fixed_profile(model, step.image_shape, step.num_classes, step.batch_size,
                          step.optimizer, weight_decay=step.weight_decay, clip_norm=step.clip_norm,
                          class_weight=step.class_weight, key=table_key(step, model))
    path = profiler.path_of_table(step, folder)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    (table.rescaled(*ms) if ms else table).save(path)
    keras.backend.clear_session()  # the layers of the run get the names of a new process
    return path
