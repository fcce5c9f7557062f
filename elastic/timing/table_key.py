"""Says what a timing table is valid for: network, step, machine, software."""

import hashlib
import json
import os
import re

from elastic.device.host import host_description
from elastic.networks.names import is_saved

# Variables of the environment that decide how TensorFlow computes, and on how many threads.
ENVIRONMENT = ('TF_ENABLE_ONEDNN_OPTS', 'XLA_FLAGS', 'TF_XLA_FLAGS', 'TF_NUM_INTEROP_THREADS',
               'TF_NUM_INTRAOP_THREADS', 'OMP_NUM_THREADS')


def table_key(settings, model, classes=None):
    """Returns the dict of all that a timing table of this model depends on.

    settings: profiler.StepSettings. A saved model is known by its content, not by its path.
    classes: as in `fingerprint`.
    """
    import tensorflow as tf
    from tensorflow import keras

    from elastic.compat.keras_stack import flat_layers
    dtypes = {dtype for layer in flat_layers(model) if layer.weights
              for dtype in (layer.compute_dtype, layer.variable_dtype)}
    weighted = {} if settings.class_weight is None else {'weighted': True}  # the loss, by class
    return dict(
        model='saved' if is_saved(settings.model_name) else settings.model_name,
        network=fingerprint(model, classes), alpha=settings.alpha, input_size=settings.input_size,
        batch_size=settings.batch_size, num_classes=settings.num_classes,
        optimizer=settings.optimizer, decay=bool(settings.weight_decay),
        clipped=settings.clip_norm is not None, bn_statistics=settings.bn_statistics,
        augmentation=settings.augmentation, dtype=', '.join(sorted(dtypes)),
        inter_op_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        intra_op_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        host=host_description(), tensorflow=tf.__version__, keras=keras.__version__, **weighted)


def fingerprint(model, classes=None):
    """Returns a hash of what a step of the model computes.

    It covers classes, settings and dtypes of all layers in order, and names, shapes and dtypes of
    all weights; but neither the values of weights nor the numbers in Keras' names.
    classes: number of classes that its output layer is taken to have; None: as it is.
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
    if classes is not None:
        content[-1][2]['units'] = classes
        for _, shape, _ in weights[:len(model.trainable_variables)][-2:]:
            shape[-1] = classes
    text = json.dumps([content, weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
