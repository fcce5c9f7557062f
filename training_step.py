"""One optimisation step on a chosen subset of tensors, traced the plain way.

Of all tensors it is the graph that masked_step.py cuts every step from: those that are timed are
those that train. Of a subset it is what a cut step must equal.
"""

import numpy as np
import tensorflow as tf
from tensorflow import keras

import keras_stack
from backbone import ends_in_logits


class WarmupCosine(keras.optimizers.schedules.LearningRateSchedule):
    """Learning rate by step: up a line over the first `warmup_steps`, then a cosine down to 0.

    The first step takes a rate above 0, so that an importance evaluated before it has an update
    to judge by. Keras' CosineDecay warms up as well, but not in TensorFlow 2.7.
    """

    def __init__(self, learning_rate, total_steps, warmup_steps=0):
        super().__init__()
        self.warmup_steps = warmup_steps
        self.decay = keras.optimizers.schedules.CosineDecay(
            learning_rate, max(1, total_steps - warmup_steps))

    def __call__(self, step):
        if not self.warmup_steps:
            return self.decay(step)
        cosine = self.decay(tf.maximum(step - self.warmup_steps, 0))
        return cosine * tf.minimum(1.0, (tf.cast(step, tf.float32) + 1) / self.warmup_steps)


def make_optimizer(name, learning_rate, total_steps, variables, warmup_steps=0):
    """SGD with momentum 0.9, or Adam, on WarmupCosine over all steps; slots made for all variables.

    Adam corrects its bias by the updates of each tensor, see keras_stack.Adam.
    Weight decay is not the optimizer's: see TrainingStep.
    """
    rate = WarmupCosine(learning_rate, total_steps, warmup_steps)
    if name == 'sgd':
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    else:
        optimizer = keras_stack.Adam(rate)
    keras_stack.build_optimizer(optimizer, variables)
    return optimizer


def loss_function(model):
    """Mean cross-entropy of integer labels, on logits or on probabilities as the model ends."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=ends_in_logits(model))


class TrainingStep:
    """(images, labels) -> (loss, number correct), after one update of the selected tensors.

    Only the selected gradients are computed: the tape watches nothing else, so that layers nearer
    the input than the deepest selected tensor are not even recorded. Unselected tensors keep their
    weights and their optimizer slots.

    mask: (N,) bool, in model.trainable_variables order.
    weight_decay: decoupled (SGDW, AdamW): w -= learning_rate * weight_decay * w, before the update,
        which is the paper's optimizer; scaled by the decayed learning rate, so that both follow the
        cosine. Ours because TensorFlow Addons' cannot be installed on Arm or with today's
        TensorFlow.
    outputs_gradients: also return the gradients, as a third result.
    update: False leaves out decay and update, and the optimizer may be None.
    penalty: (model) -> scalar tensor, trained beside the loss but no part of the loss returned.
    """

    def __init__(self, model, optimizer, mask, weight_decay=0.0, outputs_gradients=False,
                 update=True, penalty=None):
        self.model = model
        self.mask = np.asarray(mask, dtype=bool)
        if self.mask.shape != (len(model.trainable_variables),):
            raise ValueError('the mask has shape {}, the model {} trainable tensors'.format(
                self.mask.shape, len(model.trainable_variables)))
        self.variables = [v for v, chosen in zip(model.trainable_variables, self.mask)
                          if chosen]
        if not self.variables:
            raise ValueError('a training step needs at least one selected tensor')
        self.optimizer = optimizer
        self.weight_decay = weight_decay
        self.outputs_gradients = outputs_gradients
        self.update = update
        self.penalty = penalty
        self.loss = loss_function(model)
        self.function = tf.function(self._step)

    def __call__(self, images, labels):
        return self.function(images, labels)

    def _step(self, images, labels):
        sources = [keras_stack.raw(v) for v in self.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            predictions = self.model(images, training=True)  # (B, classes)
            loss = self.loss(labels, predictions)
            objective = loss + self.penalty(self.model) if self.penalty else loss
        gradients = tape.gradient(objective, sources, unconnected_gradients='zero')
        if self.update:
            self._apply(gradients)
        result = (loss, count_correct(labels, predictions))
        return result + (gradients,) if self.outputs_gradients else result

    def _apply(self, gradients):
        if self.weight_decay:
            decay = keras_stack.learning_rate(self.optimizer) * self.weight_decay
            for variable in map(keras_stack.raw, self.variables):  # Keras' own reads it twice
                variable.assign_sub(tf.cast(decay, variable.dtype) * variable, read_value=False)
        keras_stack.apply_gradients(self.optimizer, gradients, self.variables)


def evaluation_function(model):
    """tf.function (images, labels) -> (summed loss, number correct), in inference mode."""
    loss = loss_function(model)

    @tf.function
    def evaluate(images, labels):
        predictions = model(images, training=False)
        size = tf.cast(tf.shape(labels)[0], tf.float32)
        return loss(labels, predictions) * size, count_correct(labels, predictions)
    return evaluate


def count_correct(labels, predictions):
    """Scalar int32: how many of the (B,) labels are the argmax of the (B, classes) predictions."""
    hits = tf.equal(tf.argmax(predictions, axis=-1, output_type=labels.dtype), labels)
    return tf.reduce_sum(tf.cast(hits, tf.int32))
