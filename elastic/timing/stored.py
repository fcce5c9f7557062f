"""Finds the stored timing table of a network, and checks what it is valid for.

A table is valid for a network, a step, a machine and its software.
"""

import hashlib
import json
import os
import re

from elastic.device.host import host_description
from elastic.networks.names import is_saved
from elastic.timing.table import TensorTimings

TABLE_FILE = 'timings.json'
WIDER = 0.01  # of a step, below the noise of measuring it (docs/benchmarks.md)
# Variables of the environment that decide how TensorFlow computes, and on how many threads.
ENVIRONMENT = ('TF_ENABLE_ONEDNN_OPTS', 'XLA_FLAGS', 'TF_XLA_FLAGS', 'TF_NUM_INTEROP_THREADS',
               'TF_NUM_INTRAOP_THREADS', 'OMP_NUM_THREADS')


def table_path(logs_dir, model_name, input_size, num_classes, batch_size, head=''):
    """Returns logs/<model>_<size>_<classes>_<batch>_profile/timings.json.

    head: str, of tables that differ by it.
    """
    name = os.path.splitext(os.path.basename(os.path.normpath(model_name)))[0]
    return os.path.join(logs_dir, '{}_{}_{}_{}{}_profile'.format(
        name, input_size, num_classes, batch_size, head and '_' + head), TABLE_FILE)


def stored_table(path, key):
    """Returns the TensorTimings at `path` if its key is `key`; else None, and prints why."""
    if not os.path.exists(path):
        print('no timing table at {}: profiling'.format(path))
        return None
    try:
        table = TensorTimings.load(path)
    except (ValueError, KeyError, TypeError) as error:
        print('the timing table cannot be used ({}): profiling again'.format(error))
        return None
    differing = [f'{k}: {table.key.get(k)} there, {key.get(k)} now'
                 for k in sorted(set(key).union(table.key)) if key.get(k) != table.key.get(k)]
    if differing:
        print(f'the timing table at {path} is for other settings ({", ".join(differing)}): '
              'profiling again')
        return None
    print('timing table: {}'.format(path))
    return table


def wider_table(path, key, model):
    """Returns the stored_table at `path`, of the same network with fewer classes, for a model.

    Returns None if its key differs, or if the new classes would change a step by more than WIDER.
    """
    table = stored_table(path, key)
    if table is None:
        return None
    # The forward pass and the error gradient of a layer take about as long as its weight gradient.
    head_ms, classes = 3 * table.t_dw[-2:].sum() + table.t_up[-2:].sum(), model.output_shape[-1]
    change = (classes / key['num_classes'] - 1) * head_ms / table.t_step
    print('  of {} classes: with {} a step takes {:.1f} % longer{}'.format(
        key['num_classes'], classes, 100 * change, ', so it is not used' * bool(change > WIDER)))
    return None if change > WIDER else table._replace(
        shapes=[tuple(int(n) for n in v.shape) for v in model.trainable_variables])


def table_key(settings, model):
    """Returns the dict of all that a timing table of this model with num_classes depends on.

    settings: profiler.StepSettings. A saved model is known by its content, not by its path.
    """
    weighted = {} if settings.class_weight is None else {'weighted': True}  # the loss, by class
    return dict(
        model='saved' if is_saved(settings.model_name) else settings.model_name,
        alpha=settings.alpha, input_size=settings.input_size,
        batch_size=settings.batch_size, num_classes=settings.num_classes,
        optimizer=settings.optimizer, decay=bool(settings.weight_decay),
        clipped=settings.clip_norm is not None, bn_statistics=settings.bn_statistics,
        augmentation=settings.augmentation, **weighted,
        **machine_key(model, settings.num_classes))


def machine_key(model, classes=None):
    """Returns the part of a table's key that says which network it is for, and which machine.

    classes: as in `fingerprint`.
    """
    import tensorflow as tf
    from tensorflow import keras

    from elastic.compat.keras_stack import flat_layers
    dtypes = {dtype for layer in flat_layers(model) if layer.weights
              for dtype in (layer.compute_dtype, layer.variable_dtype)}
    return dict(
        network=fingerprint(model, classes), dtype=', '.join(sorted(dtypes)),
        inter_op_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        intra_op_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        host=host_description(), tensorflow=tf.__version__, keras=keras.__version__)


def fingerprint(model, classes=None):
    """Returns a hash of what a step of the model computes.

    It covers classes, settings and dtypes of all layers in order, and names, shapes and dtypes of
    all weights; but neither the values of weights nor the numbers in Keras' names.
    classes: number of classes that its output layer is taken to have; None: those it has.
    """
    from tensorflow import keras

    from elastic.compat.keras_stack import flat_layers, variable_name

    def plain(value):
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, dict):  # an activation, a regulariser
            return value.get('class_name')
        return value if isinstance(value, (str, int, float, type(None))) else type(value).__name__

    def settings(layer):
        inside = [layer] + flat_layers(layer)
        try:
            config = {} if any(isinstance(part, keras.Model) for part in inside) else (
                layer.get_config())
        except Exception:  # a layer of the user's own may have none, or a broken one
            config = {}
        return {key: plain(value) for key, value in config.items() if key != 'name'}
    content = [[type(layer).__name__, layer.compute_dtype, settings(layer)]
               for layer in flat_layers(model)]
    weights = [[re.sub(r'_\d+(?=/)', '', variable_name(v)), list(v.shape), str(v.dtype)]
               for v in model.trainable_variables + model.non_trainable_variables]
    if classes is not None and classes != model.output_shape[-1]:
        content[-1][2]['units'] = classes
        for _, shape, _ in weights[:len(model.trainable_variables)][-2:]:
            shape[-1] = classes
    text = json.dumps([content, weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
