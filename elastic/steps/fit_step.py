"""Makes Keras' own training step one that can be cut, and takes the batches of model.fit."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_fit
from elastic.errors import UserError
from elastic.steps.training_step import (
    Objective,
    StepResult,
    check_classifier,
    check_predictions,
    compiled_loss,
)

TIES = ('global_clipnorm', 'gradient_accumulation_steps', 'ema_overwrite_frequency')
INPUTS, WEIGHTS = 'inputs in fit', 'sample weights'  # of a batch; no model has such inputs


class FitObjective(Objective):
    """Is the compiled loss, with sample weights; a step updates the metrics, as Keras' own does.

    Takes what `batch_of` returns. The loss of its StepResult includes the penalty, which is 0. The
    number of correct examples is 0, too: metrics count them, and each op costs a small step time.
    An updating step returns the metrics, too, so that no second call has to read them.
    """

    def results(self, model, inputs, labels):
        examples, weights = inputs[INPUTS], inputs[WEIGHTS]
        predictions = model(examples, training=True)  # (B, classes)
        check_predictions(labels, predictions)
        loss = keras_fit.loss_in_fit(model, examples, labels, predictions, weights)
        return StepResult(tf.cast(loss, tf.float32), tf.zeros((), tf.int32), tf.zeros(()))

    def reports(self, model):
        return tf.nest.flatten(keras_fit.metric_results(model))


def batch_of(data, source='fit'):
    """Returns (dict of inputs and sample weights, labels) of a batch of Keras, weights being (B,).

    data: (x, y) or (x, y, sample weights); without these, they are 1. Labels (B, 1) become (B,).
    Raises UserError without labels. source: str, where the batch is from.
    """
    check_labelled(data, source)
    inputs, labels, weights = tuple(data) + (None,) * (3 - len(data))
    if labels.shape[1:] == (1,):
        labels = labels[:, 0]
    if weights is None:
        weights = tf.constant(np.ones(len(labels), np.float32))  # a third of the time of tf.ones
    return {INPUTS: inputs, WEIGHTS: weights}, labels


def check_labelled(data, source):
    """Raises UserError unless data are (inputs, labels), or these and sample weights."""
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3) or (
            not hasattr(data[1], 'shape')):
        raise UserError('{} has no labels: needed are (inputs, labels), labels being the index of '
                        'the class of each example'.format(source))


def model_inputs(inputs):
    """Returns what the model takes, from the inputs of a step in `fit` or elsewhere."""
    in_fit = isinstance(inputs, dict) and set(inputs) == {INPUTS, WEIGHTS}
    return inputs[INPUTS] if in_fit else inputs


def probe_batches(probe, inputs, labels, seed):
    """Yields (inputs, labels) of a probe without end, each of the size of the given batch.

    probe: tf.data of batches, which keep their order, or arrays, (inputs, labels), which are
    shuffled. Raises UserError for one without examples or labels, or of examples of other shapes.
    """
    size = int(labels.shape[0])
    if isinstance(probe, tf.data.Dataset):
        check_labelled(probe.element_spec, 'the probe')
        probe = probe.unbatch()
    else:
        check_labelled(probe, 'the probe')
        arrays = tf.nest.map_structure(tf.convert_to_tensor, tuple(
            tuple(part) if isinstance(part, list) else part for part in probe))
        order = tf.data.Dataset.range(len(probe[1])).shuffle(max(1, len(probe[1])), seed)
        probe = order.map(lambda i: tf.nest.map_structure(lambda array: array[i], arrays))
    for data in probe.repeat().batch(size, drop_remainder=True):
        found = batch_of(data, 'the probe')
        shapes = [str(tf.nest.map_structure(lambda leaf: tuple(leaf.shape)[1:], (
            batch[0][INPUTS], batch[1]))) for batch in (found, (inputs, labels))]
        if shapes[0] != shapes[1]:
            raise UserError('the examples of the probe have shapes {}, those of fit {}: the probe '
                            'has to hold examples like those of fit'.format(*shapes))
        yield tf.nest.map_structure(lambda array, like: tf.cast(array, like.dtype),
                                    found, (inputs, labels))
    raise UserError('the probe is empty: tensors are chosen by its examples')


def check_fit(model):
    """Raises UserError for what cannot be trained elastically inside model.fit."""
    name, smoothing = compiled_loss(model)
    if name != 'sparse_categorical_crossentropy' or smoothing:
        raise UserError("the model was compiled with the loss '{}': elastic training needs "
                        "'sparse_categorical_crossentropy'".format(name or None))
    check_classifier(model)
    if type(model).make_train_function is not keras.Model.make_train_function:
        raise UserError('{} overrides make_train_function, which would not be called'.format(
            type(model).__name__))
    strategy = type(model.distribute_strategy).__name__
    steps = keras_fit.steps_per_execution(model)
    faults = [
        (strategy != '_DefaultDistributionStrategy',
         'a {}: make the model without tf.distribute, on one device'.format(strategy)),
        (steps > 1, 'steps_per_execution={}: compile with 1'.format(steps)),
        (model.run_eagerly or tf.config.functions_run_eagerly(),
         'run_eagerly: a step has to be a graph; compile without it'),
        (keras_fit.compiled_by_xla(model),
         'jit_compile=True: XLA would compile each selection again; compile without it')]
    faults += [(getattr(model.optimizer, name, None), '{} of the optimizer, which ties all tensors '
                'together: leave it out'.format(name)) for name in TIES]
    for given, text in faults:
        if given:
            raise UserError('elastic training cannot use ' + text)


def check_tensors(model):
    """Raises UserError unless at least two tensors of the model are trainable."""
    if len(model.trainable_variables) < 2:
        raise UserError('{} of the {} tensors of the model is trainable: elastic training chooses '
                        'among two or more; set layer.trainable = True and compile again'.format(
                            len(model.trainable_variables) or 'none', len(model.variables)))
