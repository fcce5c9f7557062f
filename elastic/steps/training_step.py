"""Traces the training step of any subset of tensors, which a reduced step has to equal."""

import itertools
import warnings
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.steps.loss_scale import LossScale

# Ops that pass class scores on, or clip them; the op before shows whether these are logits.
PASSED_ON = ('Identity', 'IdentityN', 'Cast', 'Reshape', 'Squeeze', 'EnsureShape', 'ClipByValue',
             'Minimum', 'Maximum')
# Names that `compile` accepts for the loss that is trained here.
CROSS_ENTROPIES = ('sparse_categorical_crossentropy', 'categorical_crossentropy')


class StepResult(NamedTuple):
    """Holds the results of a training step, as scalar tensors.

    loss: float32, mean cross-entropy of the batch, weighted if the step has class weights.
    correct: int32, correctly classified examples.
    penalty: float32, sum of regularisers, add_loss, and PruneTrain's lasso.
    """
    loss: Any
    correct: Any
    penalty: Any

    @property
    def objective(self):
        """Returns the sum that training minimises."""
        return self.loss + self.penalty


NUM_RESULTS = len(StepResult._fields)


class Objective(NamedTuple):
    """Says what a step minimises besides the mean cross-entropy and the model's own losses.

    penalty: (model) -> scalar tensor, which is added. class_weight: as in cross_entropy.
    loss_scale: the LossScale of an earlier step; None: a new one if the model needs one.
    """
    penalty: Any = None
    class_weight: Any = None
    loss_scale: Any = None

    def results(self, model, inputs, labels):
        """Returns the StepResult of one batch; works only while a graph is traced."""
        predictions = model(inputs, training=True)  # (B, classes)
        loss, correct = cross_entropy(labels, predictions, self.class_weight), count_correct(
            labels, predictions)
        others = list(model.losses) + ([self.penalty(model)] if self.penalty else [])
        others = [tf.cast(other, tf.float32) for other in others] or [tf.zeros(())]
        return StepResult(loss, correct, tf.add_n(others))

    def reports(self, model):
        """Returns the list of what else an updating step returns, after its StepResult."""
        return []


PLAIN = Objective()


def check_classifier(model):
    """Raises UserError for a model that has several outputs, or its own training step or loss."""
    outputs = getattr(model, 'outputs', None) or [None]
    if len(outputs) > 1:
        raise UserError('the model has {} outputs ({}): only classifiers with one output can be '
                        'trained; pass keras.Model(inputs, output)'.format(
                            len(outputs), ', '.join(getattr(model, 'output_names', ()))))
    if type(model).train_step is not keras.Model.train_step:
        raise UserError("{} overrides train_step, which would not be called: only models that "
                        "use Keras' train_step can be trained".format(type(model).__name__))
    own = getattr(type(model), 'compute_loss', None)  # Keras 3
    if own is not getattr(keras.Model, 'compute_loss', None):
        raise UserError('{} overrides compute_loss, which would not be called: only models that '
                        'train by cross-entropy can be trained'.format(type(model).__name__))
    name, smoothing = compiled_loss(model)
    if name and (name not in CROSS_ENTROPIES or smoothing):
        raise UserError("the model was compiled with the loss '{}'{}, which would not be used: "
                        'allowed is cross-entropy of integer labels; to train with that, load it '
                        'with compile=False'.format(
                            name, ' with smoothed labels' if smoothing else ''))


def compiled_loss(model):
    """Returns (name of the loss that the model was compiled with, its label smoothing)."""
    loss = getattr(model, 'loss', None)
    name = getattr(loss, 'name', None) or getattr(loss, '__name__', None) or loss
    smoothing = getattr(loss, 'label_smoothing', 0) or getattr(loss, '_fn_kwargs', {}).get(
        'label_smoothing', 0)
    return name, smoothing


def cross_entropy(labels, predictions, class_weight=None):
    """Returns the mean cross-entropy, a float32 scalar; works only while a graph is traced.

    labels: (B,), integers. predictions: (B, classes), probabilities if a softmax or sigmoid op
    produced them, else logits. class_weight: (classes,), factors of the cross-entropy of each
    example; the mean over the B examples is taken afterwards, as Keras does. None: all are 1.
    """
    check_predictions(labels, predictions)
    weights = None if class_weight is None else tf.gather(
        tf.constant(class_weight, tf.float32), labels)  # (B,)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=are_logits(predictions))(
        labels, tf.cast(predictions, tf.float32), sample_weight=weights)


def are_logits(predictions):
    """Returns whether no softmax or sigmoid made these (B, classes) scores of a traced graph."""
    return _maker(predictions).type not in ('Softmax', 'Sigmoid')


def _maker(predictions):
    """Returns the op that made these scores, before ops that only pass them on."""
    op = predictions.op
    while op.type in PASSED_ON:
        op = op.inputs[0].op
    return op


def class_probabilities(predictions):
    """Returns these (B, classes) scores of a traced graph as float32 probabilities."""
    scores = tf.cast(predictions, tf.float32)
    return tf.nn.softmax(scores) if are_logits(predictions) else scores


def warn_of_probabilities(model, inputs):
    """Warns if the model's outputs for this batch are probabilities but count as logits."""
    logits = []

    @tf.function
    def predict(inputs):
        predictions = model(inputs, training=False)
        logits.append(are_logits(predictions))
        return predictions
    outputs = predict(inputs).numpy()
    if logits[0] and outputs.min() >= 0 and np.allclose(outputs.sum(axis=1), 1, atol=1e-3):
        warnings.warn('the outputs of the model sum to one, but no softmax was found at its end: '
                      'the loss treats them as logits; save the model with softmax as its last '
                      'layer, or with logits as its output')


def check_predictions(labels, predictions):
    if not tf.is_tensor(predictions):
        raise UserError('the model returns a {} of several outputs: only classifiers with one '
                        'output can be trained'.format(type(predictions).__name__))
    if predictions.shape.rank != 2 or (predictions.shape[1] or 2) < 2:
        raise UserError('the model returns an array of shape {}; needed are scores of at least two '
                        'classes for each example'.format(tuple(predictions.shape)))
    _check_labels(labels)


def _check_labels(labels):
    if not labels.dtype.is_integer or labels.shape.rank != 1:
        raise UserError('labels are {} of shape {}; needed is one integer for each example, the '
                        'index of its class (for one-hot labels: their argmax)'.format(
                            labels.dtype.name, tuple(labels.shape)))


def as_batch(model, inputs, labels):
    """Returns (inputs, labels) as tensors; a tf.TensorSpec stays one.

    inputs: arrays in the structure that the model takes; if that is one array, also a list of
    examples. labels: integers, which become int64 unless they are int32; UserError for others.
    """
    if len(getattr(model, 'inputs', None) or ()) == 1 and isinstance(inputs, (list, tuple)) and (
            len(inputs) != 1 or not hasattr(inputs[0], 'shape')):
        inputs = tf.convert_to_tensor(inputs)
    inputs, labels = tf.nest.map_structure(_tensor, inputs), _tensor(labels)
    _check_labels(labels)
    odd = tf.is_tensor(labels) and labels.dtype not in (tf.int32, tf.int64)
    return inputs, tf.cast(labels, tf.int64) if odd else labels


def _tensor(value):
    known = tf.is_tensor(value) or isinstance(value, tf.TypeSpec)
    return value if known else tf.convert_to_tensor(value)


def checked_mask(mask, num_tensors):
    """Returns the mask as (N,) bool; raises ValueError for another shape or an empty mask."""
    mask = np.asarray(mask, dtype=bool)
    if mask.shape != (num_tensors,):
        raise ValueError('the mask has shape {}, the model {} trainable tensors'.format(
            mask.shape, num_tensors))
    if not mask.any():
        raise ValueError('a training step needs at least one selected tensor')
    return mask


class TrainingStep:
    """Updates the selected tensors on one batch: (inputs, labels) -> StepResult.

    No other gradient is computed, and other weights and slots stay. Sparse gradients (Embedding)
    are made dense, as in Keras 3, because momentum and decay apply to the whole tensor.

    model: any Keras classifier with one output; UserError for others (check_classifier).
    optimizer: None omits decay and update.
    mask: (N,) bool, in the order of model.trainable_variables.
    weight_decay: decoupled as in the paper (SGDW, AdamW): w -= learning_rate * weight_decay * w
        before the update.
    outputs_gradients: whether to return a list: the three results, the selected gradients, then
        the reports of the objective.
    objective: Objective; in `objective` of the step, it has the loss_scale in use, if any.
    """

    def __init__(self, model, optimizer, mask, weight_decay=0.0, outputs_gradients=False,
                 objective=PLAIN):
        check_classifier(model)
        self.model = model
        self.mask = checked_mask(mask, len(model.trainable_variables))
        self.variables = list(itertools.compress(model.trainable_variables, self.mask))
        self.optimizer = optimizer
        self.weight_decay = weight_decay
        self.outputs_gradients = outputs_gradients
        self.loss_scale = objective.loss_scale or (
            LossScale() if keras_stack.computes_in_float16(model) else None)
        self.objective = objective._replace(loss_scale=self.loss_scale)
        self.decay_ops = []  # names, as traced
        self.function = tf.function(self._step)

    def __call__(self, inputs, labels):
        return self.function(inputs, labels)

    def _step(self, inputs, labels):
        sources = [keras_stack.raw(v) for v in self.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            result = self.objective.results(self.model, inputs, labels)
            objective = result.objective
            if self.loss_scale:
                objective *= self.loss_scale.scale
        gradients = _apart([tf.convert_to_tensor(gradient) for gradient in tape.gradient(
            objective, sources, unconnected_gradients='zero')])
        if self.loss_scale:
            gradients = [gradient / tf.cast(self.loss_scale.scale, gradient.dtype)
                         for gradient in gradients]
        if self.optimizer is not None:
            self._apply(gradients)
        if not self.outputs_gradients:
            return result
        return list(result) + gradients + self.objective.reports(self.model)

    def _apply(self, gradients):
        if not self.loss_scale:
            self._decay_and_update(gradients)
            return
        written = self.variables + keras_stack.optimizer_variables(self.optimizer)
        self.loss_scale.guard(gradients, [keras_stack.raw(v) for v in written],
                              lambda: self._decay_and_update(gradients))

    def _decay_and_update(self, gradients):
        if self.weight_decay:
            decay = keras_stack.learning_rate(self.optimizer) * self.weight_decay
            for variable in map(keras_stack.raw, self.variables):  # a Keras variable reads it twice
                self.decay_ops.append(variable.assign_sub(
                    tf.cast(decay, variable.dtype) * variable, read_value=False).name)
        keras_stack.apply_gradients(self.optimizer, list(zip(gradients, self.variables)))


def _apart(gradients):
    """Returns the gradients as separate tensors."""
    # Weights that are added together share one: the graph would not show which update is whose.
    found = []
    for gradient in gradients:
        shared = any(gradient is other for other in found)
        found.append(gradient + tf.zeros((), gradient.dtype) if shared else gradient)
    return found


def evaluation_function(model, class_weight=None):
    """Returns a function that evaluates a batch, (inputs, labels), in inference mode.

    It returns the sum of losses, the number correct, and of each example the predicted class, (B,)
    int, and its probability, (B,) float32. Batches of all sizes share one trace, unless the model
    is built for one size or subclassed.
    class_weight: as in cross_entropy.
    """
    def evaluate(inputs, labels):
        predictions = model(inputs, training=False)
        size = tf.cast(tf.shape(labels)[0], tf.float32)
        loss = cross_entropy(labels, predictions, class_weight) * size  # checks them first
        predicted = tf.argmax(predictions, axis=-1, output_type=labels.dtype)
        return (loss, count_correct(labels, predictions), predicted,
                _largest_probability(predictions))
    function = tf.function(evaluate)

    def evaluate_any_size(*batch):
        batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
        specs = tf.nest.map_structure(
            lambda each: tf.TensorSpec((None,) + tuple(each.shape[1:]), each.dtype), batch)
        return function.get_concrete_function(*specs)(*batch)
    inputs = getattr(model, 'inputs', None)
    takes_any_size = inputs and all(each.shape[0] is None for each in inputs)
    return evaluate_any_size if takes_any_size else function


def _largest_probability(predictions):
    """Returns the (B,) float32 largest of the class_probabilities of each example."""
    maker = _maker(predictions)
    if maker.type == 'Sigmoid':
        # If only argmax reads a sigmoid, TensorFlow skips it, which decides between values of 1.
        logits = tf.reshape(maker.inputs[0], tf.shape(predictions))
        return tf.sigmoid(tf.cast(tf.reduce_max(logits, axis=-1), tf.float32))
    return tf.reduce_max(class_probabilities(predictions), axis=-1)


def count_correct(labels, predictions):
    """Returns how many of the (B,) labels are the argmax of the (B, classes) predictions, int32."""
    hits = tf.equal(tf.argmax(predictions, axis=-1, output_type=labels.dtype), labels)
    return tf.reduce_sum(tf.cast(hits, tf.int32))
