"""Where Keras 2.6, 2.7 and 3 (the stacks' own) truly differ; nothing else is here.

What is said of 2.7 holds for 2.6 too where that is not named.
"""

import contextlib
import os
import random

import numpy as np
import tensorflow as tf
from tensorflow import keras

KERAS_3 = int(keras.__version__.split('.')[0]) >= 3
MODEL_FILE = 'model.keras' if KERAS_3 else 'model.h5'


def set_seed(seed):
    """Seeds what Keras, TensorFlow, NumPy and Python draw from."""
    if hasattr(keras.utils, 'set_random_seed'):
        keras.utils.set_random_seed(seed)
    else:  # 2.6, which draws by TensorFlow's seed
        random.seed(seed)
        np.random.seed(seed)
        tf.random.set_seed(seed)


def keep_tracebacks():
    """Keras raises errors as they are: not without its own frames, which tell the layer's name."""
    filtering = keras.config if KERAS_3 else tf.debugging
    if hasattr(filtering, 'disable_traceback_filtering'):  # 2.6 leaves nothing out
        filtering.disable_traceback_filtering()


def raw(variable):
    """The tf.Variable behind a Keras variable: what a gradient tape can watch.

    In Keras 2.7 a variable of a float16 layer is wrapped, to be cast where it is read.
    """
    if KERAS_3:
        return variable if callable(variable.value) else variable.value
    return getattr(variable, '_variable', variable)


def computes_in_float16(model):
    """Whether gradients of some layer may vanish for want of exponent: loss scaling is for that."""
    return any(layer.compute_dtype == 'float16' for layer in [model] + flat_layers(model))


def variable_name(variable):
    """`layer/kernel`, the same on both stacks: the last two parts of the path, without ':0'."""
    path = (variable.path if KERAS_3 else variable.name).split(':')[0].split('/')
    if path[-1] == 'depthwise_kernel':  # Keras 2.7; Keras 3 calls it kernel
        path[-1] = 'kernel'
    return '/'.join(path[-2:])


def layer_path(variable):
    """What the tensors of one layer have in common: the path without its last part."""
    return (variable.path if KERAS_3 else variable.name).rsplit('/', 1)[0]


def build_optimizer(optimizer, variables):
    """Creates the slots of all variables now, so that any subset of them can be updated later.

    Keras 3 refuses a variable that the optimizer was not built on; Keras 2.7 would create slots at
    the first update, and those of a trial update would stay behind.
    """
    if KERAS_3:
        optimizer.build(variables)
    else:
        optimizer._create_all_weights(variables)


def model_variables(model):
    """Weights and, in Keras 3, the states of random numbers; Keras 2.7 keeps these in the ops."""
    return model.variables if KERAS_3 else model.weights


def optimizer_variables(optimizer):
    """Iteration count and slots."""
    return list(optimizer.variables if KERAS_3 else optimizer.variables())


def slots(optimizer, variables):
    """What the optimizer, SGD or Adam, keeps of each of `variables`: a list of lists.

    Of the shape of the variable, but for Adam's count of its updates: a scalar.
    """
    if not KERAS_3:
        names = sorted(optimizer.get_slot_names())
        return [[optimizer.get_slot(v, name) for name in names] for v in variables]
    kinds = [getattr(optimizer, kind, ()) for kind in (
        'momentums', '_momentums', '_velocities', '_counts')]
    return [list(of_one) for of_one in zip(*[kind for kind in kinds if len(kind)])]


class Adam(keras.optimizers.Adam):
    """Keras' Adam, whose bias correction takes the updates of the very variable, not all steps.

    By the count of all steps, the first update of a tensor that joins late would be three times
    too large. As TensorFlow's own kernel on both stacks: in Keras 3 the update takes half as long.
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
    """One update of one variable. 1 is computed from the gradient, for then the graph tells whose
    count it raises, and masked_step.py leaves that out with the rest of the update.
    """
    one = tf.cast(tf.cast(tf.raw_ops.Size(input=gradient), tf.bool), count.dtype)
    step = count + one
    count.assign(step, read_value=False)
    powers = [tf.cast(tf.pow(tf.cast(beta, count.dtype), step), variable.dtype)
              for beta in (beta_1, beta_2)]
    return tf.raw_ops.ResourceApplyAdam(
        var=variable.handle, m=m.handle, v=v.handle, beta1_power=powers[0], beta2_power=powers[1],
        lr=rate, beta1=beta_1, beta2=beta_2, epsilon=epsilon, grad=gradient)


def momenta(optimizer, variables):
    """tf.Variables: SGD's momentum of each of `variables`; none of other optimizers."""
    if not isinstance(optimizer, keras.optimizers.SGD):
        return []
    return [raw(slot) for of_one in slots(optimizer, variables) for slot in of_one]


def functional(model):
    """The functional model that holds the graph: the model itself, or what Keras 3 keeps inside a
    Sequential one. None for what has no graph, as a layer or a subclassed model.
    """
    model = getattr(model, '_functional', None) or model
    return model if getattr(model, '_nodes_by_depth', None) else None


def graph_nodes(network):
    """(layer, input tensors, output tensors) of every call in a functional or Sequential model.

    In order. The model's inputs are not among them.
    """
    network = functional(network)
    for depth in sorted(network._nodes_by_depth, reverse=True):
        for node in network._nodes_by_depth[depth]:
            layer = node.operation if KERAS_3 else node.layer
            if not isinstance(layer, keras.layers.InputLayer):
                inputs = node.arguments.keras_tensors if KERAS_3 else node.keras_inputs
                yield layer, inputs, tf.nest.flatten(node.outputs)


def apply_gradients(optimizer, gradients, variables):
    """One update of `variables` alone; the other tensors and their slots stay as they are."""
    if KERAS_3:
        optimizer.apply(gradients, variables)
    else:
        optimizer.apply_gradients(zip(gradients, variables))


def learning_rate(optimizer):
    """The learning rate of the next step: a scalar tensor."""
    rate = optimizer._learning_rate if KERAS_3 else optimizer._hyper['learning_rate']
    return rate(optimizer.iterations) if callable(rate) else keras.backend.cast(rate, 'float32')


@contextlib.contextmanager
def dropout_as_product(model):
    """Within, every dropout of the model computes inputs * noise, noise being its output for ones.

    Yields a list, which receives the product, a tensor, of each as it is traced: a graph in which
    ones stand for the noise is one without dropout.
    """
    layers = {id(layer): layer for layer in flat_layers(model)
              if isinstance(layer, keras.layers.Dropout)}.values()  # once, also if used twice
    products = []
    try:
        for layer in layers:
            layer.call = _product_call(layer, products)
        yield products
    finally:
        for layer in layers:
            del layer.call


def _product_call(layer, products):
    usual = layer.call

    def call(inputs, training=None):
        if not training or not layer.rate:
            return usual(inputs, training=training)
        products.append(tf.multiply(inputs, usual(tf.ones_like(inputs), training=training)))
        return products[-1]
    return call


def flat_layers(model):
    """Every layer of the model, nested ones included."""
    return list(model._flatten_layers(include_self=False))


def load_model(path, trust):
    """The saved model at `path`, not compiled; trust: whether code in it may run."""
    if KERAS_3:
        return keras.models.load_model(path, compile=False, safe_mode=not trust)
    return keras.models.load_model(path, compile=False)


def weights_were_set(model):
    """To call after assigning to weights: layers that computed something from them do so anew.

    keras.layers.Normalization, in EfficientNet, keeps its mean and variance as constants.
    """
    for layer in flat_layers(model):
        if hasattr(layer, 'finalize_state'):
            layer.finalize_state()


def cache_folder():
    """Where Keras looks for downloads: 2.7 does not heed KERAS_HOME, and may turn to /tmp."""
    if KERAS_3:
        return os.environ.get('KERAS_HOME', os.path.join('~', '.keras'))
    home = os.path.join('~', '.keras')
    return home if os.access(os.path.expanduser(home), os.W_OK) else os.path.join('/tmp', '.keras')


def register(cls):
    """Class decorator: saved models name this class and find it again."""
    return keras.utils.register_keras_serializable(package='elastic')(cls)


@contextlib.contextmanager
def restored_afterwards(variables):
    """Gives every variable back the exact value it had on entry, also after an error; yields these.

    A value that was read stays as it is: TensorFlow copies it when the variable is next written to.
    """
    before = [raw(v).read_value() for v in variables]
    try:
        yield before
    finally:
        for variable, value in zip(variables, before):
            raw(variable).assign(value, read_value=False)
