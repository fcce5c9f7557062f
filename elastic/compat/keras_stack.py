"""Hides the differences between Keras 2.6, 2.7 and 3.

Notes on Keras 2.7 also hold for 2.6, unless they name it.
"""

import contextlib
import functools
import importlib
import random
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow import keras

KERAS_3 = int(keras.__version__.split('.')[0]) >= 3
MODEL_FILE = 'model.keras' if KERAS_3 else 'model.h5'
# Decorates a class, so that saved models that contain it can be loaded.
register = keras.utils.register_keras_serializable(package='elastic')


def set_seed(seed):
    """Seeds the random numbers of Keras, TensorFlow, NumPy and Python."""
    if hasattr(keras.utils, 'set_random_seed'):
        keras.utils.set_random_seed(seed)
    else:  # 2.6, which uses TensorFlow's seed
        random.seed(seed)
        np.random.seed(seed)
        tf.random.set_seed(seed)


def keep_tracebacks():
    """Makes Keras keep its frames in tracebacks: they show the layer's name."""
    filtering = keras.config if KERAS_3 else tf.debugging
    if hasattr(filtering, 'disable_traceback_filtering'):  # 2.6 does not filter
        filtering.disable_traceback_filtering()


def raw(variable):
    """Returns the tf.Variable inside a Keras variable, which a gradient tape can watch.

    Keras 2.7 wraps the variables of float16 layers to cast them when they are read.
    """
    if KERAS_3:
        return variable if callable(variable.value) else variable.value
    return getattr(variable, '_variable', variable)


def computes_in_float16(model):
    """Returns whether a layer computes in float16, whose small gradients need loss scaling."""
    return any(layer.compute_dtype == 'float16' for layer in [model] + flat_layers(model))


def variable_name(variable):
    """Returns the last two parts of a variable's path, e.g. `layer/kernel`, alike on all stacks."""
    path = (variable.path if KERAS_3 else variable.name).split(':')[0].split('/')
    if path[-1] == 'depthwise_kernel':  # Keras 2.7; Keras 3 calls it kernel
        path[-1] = 'kernel'
    return '/'.join(path[-2:])


def layer_path(variable):
    """Returns a variable's path without its last part, which all tensors of a layer share."""
    return (variable.path if KERAS_3 else variable.name).rsplit('/', 1)[0]


def build_optimizer(optimizer, variables):
    """Creates the slots of all variables, so that any subset can be updated later."""
    if KERAS_3:
        optimizer.build(variables)
    else:
        optimizer._create_all_weights(variables)


def apply_gradients(optimizer, pairs):
    """Updates each variable of the pairs (gradient, variable), on one device."""
    if KERAS_3:  # sums over devices by a custom gradient, for whose sake TensorFlow frees no graph
        with mock.patch.object(optimizer, '_all_reduce_sum_gradients', list):
            optimizer.apply_gradients(pairs)
    else:
        optimizer.apply_gradients(pairs)


def optimizer_variables(optimizer):
    """Returns the iteration count and the slots as a list."""
    return list(optimizer.variables if KERAS_3 else optimizer.variables())


def slots(optimizer, variables):
    """Returns, for each variable, the list of its slots in SGD or Adam; [] if it has none.

    A slot has the shape of its variable, except Adam's count of updates, which is a scalar.
    """
    if not KERAS_3:
        names = sorted(optimizer.get_slot_names())
        return [[optimizer.get_slot(v, name) for name in names] for v in variables]
    kinds = [getattr(optimizer, kind, ()) for kind in (
        'momentums', '_momentums', '_velocities', '_counts')]
    return [[kind[i] for kind in kinds if len(kind)] for i in range(len(variables))]


class Adam(keras.optimizers.Adam):
    """Corrects Adam's bias by the number of updates of each variable, not by the number of steps.

    By the number of steps, the first update of a tensor selected late would be three times too
    large. Both stacks use TensorFlow's kernel, which takes half the time of Keras 3's update.
    """

    if KERAS_3:
        def build(self, variables):
            super().build(variables)
            self._counts = [self.add_variable((), dtype='float32', name='count')
                            for _ in variables]

        def update_step(self, gradient, variable, learning_rate):
            slots = [of_all[self._get_variable_index(variable)].value for of_all in (
                self._momentums, self._velocities, self._counts)]
            _apply_adam(variable, *slots, gradient, learning_rate, self.beta_1, self.beta_2,
                        self.epsilon)
    else:
        def _create_slots(self, var_list):
            super()._create_slots(var_list)
            for variable in var_list:
                self.add_slot(variable, 'count', shape=())

        def _resource_apply_dense(self, grad, var, apply_state=None):
            slots = [self.get_slot(var, name) for name in ('m', 'v', 'count')]
            of_all = apply_state[var.device, var.dtype.base_dtype]
            return _apply_adam(var, *slots, grad, of_all['lr_t'], of_all['beta_1_t'],
                               of_all['beta_2_t'], of_all['epsilon'])


def _apply_adam(variable, m, v, count, gradient, rate, beta_1, beta_2, epsilon):
    # Computed from the gradient, so that the graph shows whose count it raises.
    one = tf.cast(tf.cast(tf.raw_ops.Size(input=gradient), tf.bool), count.dtype)
    step = count + one
    count.assign(step, read_value=False)
    powers = [tf.cast(tf.pow(tf.cast(beta, count.dtype), step), variable.dtype)
              for beta in (beta_1, beta_2)]
    return tf.raw_ops.ResourceApplyAdam(
        var=variable.handle, m=m.handle, v=v.handle, beta1_power=powers[0], beta2_power=powers[1],
        lr=rate, beta1=beta_1, beta2=beta_2, epsilon=epsilon, grad=gradient)


def momenta(optimizer, variables):
    """Returns SGD's momentum tf.Variables of `variables`; an empty list for other optimizers."""
    if not isinstance(optimizer, keras.optimizers.SGD):
        return []
    return [raw(slot) for of_one in slots(optimizer, variables) for slot in of_one]


def functional(model):
    """Returns the functional model itself or inside a Sequential; None if there is no graph."""
    model = getattr(model, '_functional', None) or model
    return model if getattr(model, '_nodes_by_depth', None) else None


def without_dicts(model):
    """Returns a model whose one input and one output are arrays, where it has them in a dict."""
    graph, ends = functional(model), '_{}s_struct' if KERAS_3 else '_nested_{}s'
    in_dicts = graph is not None and len(graph.inputs) == len(graph.outputs) == 1 and any(
        isinstance(getattr(graph, ends.format(end)), dict) for end in ('input', 'output'))
    return keras.Model(graph.inputs[0], graph.outputs[0]) if in_dicts else model


def graph_nodes(network):
    """Yields (layer, input tensors, output tensors) of each call in order, without input layers."""
    network = functional(network)
    for depth in sorted(network._nodes_by_depth, reverse=True):
        for node in network._nodes_by_depth[depth]:
            layer = node.operation if KERAS_3 else node.layer
            if not isinstance(layer, keras.layers.InputLayer):
                inputs = node.arguments.keras_tensors if KERAS_3 else node.keras_inputs
                yield layer, inputs, tf.nest.flatten(node.outputs)


def producer(tensor):
    """Returns (layer, its input tensors) of the call that made a symbolic tensor of Keras."""
    history = tensor._keras_history
    layer = history.operation if KERAS_3 else history.layer
    node = layer._inbound_nodes[history.node_index]
    return layer, node.arguments.keras_tensors if KERAS_3 else tf.nest.flatten(node.keras_inputs)


def own_variables(layer):
    """Returns the variables of a layer, not of layers inside it, that train unless it is frozen."""
    return layer._trainable_variables if KERAS_3 else layer._trainable_weights


def schedule(optimizer):
    """Returns the learning rate of an optimizer, as it was given."""
    return optimizer._learning_rate if KERAS_3 else optimizer._hyper['learning_rate']


def learning_rate(optimizer):
    """Returns the learning rate of the next step, a scalar tensor."""
    rate = schedule(optimizer)
    return rate(optimizer.iterations) if callable(rate) else keras.backend.cast(rate, 'float32')


@contextlib.contextmanager
def dropout_as_product(model):
    """Within this context, each dropout computes inputs * noise, where noise is dropout(ones).

    Yields a list to which each traced dropout appends its product, a tensor. To turn dropout off in
    the graph, replace the noise by ones.
    """
    products = []
    dropouts = [layer for layer in flat_layers(model) if isinstance(layer, keras.layers.Dropout)]
    with _replaced_calls(dropouts, lambda layer: _product_call(layer, products)):
        yield products


@contextlib.contextmanager
def _replaced_calls(layers, replacement):
    """Within this context, each layer's `call` is replacement(layer)."""
    try:
        for layer in layers:
            layer.call = replacement(layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop('call', None)


def _product_call(layer, products):
    usual = layer.call

    def call(inputs, training=None):
        if not training or not layer.rate:
            return usual(inputs, training=training)
        products.append(tf.multiply(inputs, usual(tf.ones_like(inputs), training=training)))
        return products[-1]
    return call


def outputs_by_variable(model, inputs):
    """Returns id of a variable -> output of the layer that owns it, a (B, ...) array.

    The model runs on one batch in inference mode. Variables inside loops, as of an RNN's cell, are
    left out.
    """
    outputs = {}
    owners = [layer for layer in flat_layers(model) if own_variables(layer)]
    with _replaced_calls(owners, lambda layer: _recording_call(layer, outputs)):
        model(inputs, training=False)
    return outputs


def _recording_call(layer, outputs):
    usual = layer.call

    @functools.wraps(usual)
    def call(*arguments, **options):
        result = usual(*arguments, **options)
        tensor = tf.nest.flatten(result)[0]
        if hasattr(tensor, 'numpy'):
            outputs.update(dict.fromkeys(
                (id(raw(variable)) for variable in own_variables(layer)), tensor.numpy()))
        return result
    return call


def flat_layers(model):
    """Returns every layer of the model and of the models inside it, each once."""
    return list(model._flatten_layers(include_self=False))


def load_model(path, trust):
    """Returns the saved model at `path`, uncompiled. trust: whether code in it may run."""
    options = {'safe_mode': not trust} if KERAS_3 else {}
    return keras.models.load_model(path, compile=False, **options)


def assign_arrays(variables, values):
    """Assigns arrays to variables, also arrays that were stored on disk."""
    for variable, value in zip(map(raw, variables), values):
        if value.dtype.kind == 'V':  # NumPy itself does not know bfloat16
            value = value.view(variable.dtype.as_numpy_dtype)
        variable.assign(value, read_value=False)


def weights_were_set(model):
    """Makes layers recompute constants that they derive from weights; call it after assigning.

    keras.layers.Normalization, in EfficientNet, derives such constants from mean and variance.
    """
    for layer in flat_layers(model):
        if hasattr(layer, 'finalize_state'):
            layer.finalize_state()


@contextlib.contextmanager
def downloads_by(get_file):
    """Within this context, networks of Keras and vit-keras get their weights by this function."""
    name = 'keras.src.utils.file_utils' if KERAS_3 else 'keras.utils.data_utils'
    with mock.patch.object(importlib.import_module(name), 'get_file', get_file), (
            mock.patch.object(keras.utils, 'get_file', get_file)):
        yield


@contextlib.contextmanager
def restored_afterwards(variables):
    """Restores every variable bit for bit on exit, even after an error; yields the values.

    No copy is needed: TensorFlow makes one when a variable whose value was read is next written.
    """
    before = [raw(v).read_value() for v in variables]
    try:
        yield before
    finally:
        for variable, value in zip(variables, before):
            raw(variable).assign(value, read_value=False)
