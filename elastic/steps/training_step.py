"""One optimisation step on a chosen subset of tensors, traced the plain way.

Of all tensors it is the graph that masked_step.py cuts every step from: those that are timed are
those that train. Of a subset it is what a cut step must equal.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.command_line import UserError
from elastic.compat import keras_stack

# Between the network's last activation and what it returns: do not change what that activation is.
PASSED_ON = ('Identity', 'IdentityN', 'Cast', 'Reshape', 'Squeeze', 'EnsureShape')
# Of cross-entropy, as `compile` knows it: what is trained here for integer labels.
CROSS_ENTROPIES = ('sparse_categorical_crossentropy', 'categorical_crossentropy')


class StepResult(NamedTuple):
    """What a training step returns, scalar tensors; behind them a traced one has its N gradients.

    loss: float32, mean cross-entropy of the batch. correct: int32, right answers in it.
    penalty: float32, what is trained beside the loss: regularisers, add_loss, PruneTrain's lasso.
    """
    loss: Any
    correct: Any
    penalty: Any

    @property
    def objective(self):
        """What the gradients are of."""
        return self.loss + self.penalty


NUM_RESULTS = len(StepResult._fields)


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


def make_optimizer(name, learning_rate, total_steps, variables, warmup_steps=0, clip_norm=None):
    """SGD with momentum 0.9, or Adam, on WarmupCosine over all steps; slots made for all variables.

    clip_norm: a gradient longer than that is shortened to it, each tensor's by itself. By the norm
    of all together a tensor's update would hang on what else is trained, which importance is not.
    Adam corrects its bias by the updates of each tensor, see keras_stack.Adam.
    Weight decay is not the optimizer's: see TrainingStep.
    """
    rate = WarmupCosine(learning_rate, total_steps, warmup_steps)
    if name == 'sgd':
        optimizer = keras.optimizers.SGD(rate, momentum=0.9, clipnorm=clip_norm)
    else:
        optimizer = keras_stack.Adam(rate, clipnorm=clip_norm)
    keras_stack.build_optimizer(optimizer, variables)
    return optimizer


def optimizer_for(dataset, settings, variables):
    """Returns the optimizer of a run, on its schedule over all steps.

    dataset: datasets.Dataset. settings: settings.Settings.
    """
    return make_optimizer(settings.optimizer, settings.learning_rate,
                          settings.num_epochs * dataset.steps, variables, settings.warmup_steps,
                          settings.clip_norm)


def check_classifier(model):
    """UserError, with the true reason, for a model that the step would not train as its user does.
    """
    outputs = getattr(model, 'outputs', None) or [None]
    if len(outputs) > 1:
        raise UserError('the model has {} outputs ({}): only classifiers with one output can be '
                        'trained; give it as keras.Model(inputs, the one output)'.format(
                            len(outputs), ', '.join(getattr(model, 'output_names', ()))))
    if type(model).train_step is not keras.Model.train_step:
        raise UserError("{} has a train_step of its own, which would not be run: only models that "
                        "train by Keras' own step can be trained".format(type(model).__name__))
    own = getattr(type(model), 'compute_loss', None)  # Keras 3
    if own is not getattr(keras.Model, 'compute_loss', None):
        raise UserError('{} has a compute_loss of its own, which would not be used: only models '
                        'that train by cross-entropy can be trained'.format(type(model).__name__))
    loss = getattr(model, 'loss', None)
    name = getattr(loss, 'name', None) or getattr(loss, '__name__', None) or loss
    smoothing = getattr(loss, 'label_smoothing', 0) or getattr(loss, '_fn_kwargs', {}).get(
        'label_smoothing', 0)
    if loss and (name not in CROSS_ENTROPIES or smoothing):
        raise UserError("the model was compiled with the loss '{}'{}, which would not be used: "
                        'allowed is cross-entropy of integer labels; load it with compile=False to '
                        'train by that'.format(name, ' with smoothed labels' if smoothing else ''))


def cross_entropy(labels, predictions):
    """Mean cross-entropy, float32, of (B,) integer labels on (B, classes) logits or probabilities.

    To call while a graph is traced: whether the predictions are probabilities is told by the op
    that made them, so that it holds for any model, subclassed ones too.
    """
    _check_predictions(labels, predictions)
    op = predictions.op
    while op.type in PASSED_ON:
        op = op.inputs[0].op
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=op.type not in ('Softmax', 'Sigmoid'))(
            labels, tf.cast(predictions, tf.float32))


def _check_predictions(labels, predictions):
    """UserError unless there is a row of class scores for each label, which is an integer."""
    if not tf.is_tensor(predictions):
        raise UserError('the model returns a {} of several outputs: only classifiers with one '
                        'output can be trained'.format(type(predictions).__name__))
    if predictions.shape.rank != 2 or (predictions.shape[1] or 2) < 2:
        raise UserError('the model returns an array of shape {}: a row of scores, of at least two '
                        'classes, is needed for each example'.format(tuple(predictions.shape)))
    if not labels.dtype.is_integer or labels.shape.rank != 1:
        raise UserError('labels are {} of shape {}: one integer, the index of its class, is needed '
                        'for each example (one-hot rows: give their argmax)'.format(
                            labels.dtype.name, tuple(labels.shape)))


class LossScale:
    """Dynamic loss scaling, as Keras' LossScaleOptimizer does it, for networks in float16.

    Small gradients vanish in float16, so that the loss is multiplied by a scale and gradients are
    divided by it. A step in which a gradient overflowed changes nothing but the scale, which is
    halved; after GROWTH_STEPS steps without it is doubled. Written out because Keras puts all
    updates into one branch of a condition, which no mask could be cut out of: here every op is of
    one tensor or of none, and tensors meet in the variable `overflows` alone.
    """
    FIRST, GROWTH_STEPS = 2.0 ** 15, 2000

    def __init__(self):
        self.scale = tf.Variable(self.FIRST, trainable=False)
        self.good_steps = tf.Variable(0, trainable=False)
        self.overflows = tf.Variable(0, trainable=False)  # gradients that did, of this step
        self.variables = [self.scale, self.good_steps, self.overflows]

    def unscaled(self, gradients):
        return [gradient / tf.cast(self.scale, gradient.dtype) for gradient in gradients]

    def guard(self, gradients, written, update):
        """Runs `update`; undoes what it did to the variables `written` where a gradient overflowed.
        """
        self.overflows.assign(0, read_value=False)
        for gradient in gradients:
            finite = tf.reduce_all(tf.math.is_finite(gradient))
            self.overflows.assign_add(tf.cast(~finite, tf.int32), read_value=False)
        fine = tf.equal(self.overflows.read_value(), 0)  # after all of them: same variable
        before = [variable.read_value() for variable in written]
        update()
        for variable, value in zip(written, before):
            variable.assign(tf.where(fine, variable.read_value(), value), read_value=False)
        good = tf.where(fine, self.good_steps + 1, 0)
        grow = good >= self.GROWTH_STEPS
        self.good_steps.assign(tf.where(grow, 0, good), read_value=False)
        self.scale.assign(tf.where(fine, tf.where(grow, 2 * self.scale, self.scale),
                                   tf.maximum(self.scale / 2, 1.0)), read_value=False)


class TrainingStep:
    """(inputs, labels) -> StepResult, after one update of the selected tensors.

    Only the selected gradients are computed: the tape watches nothing else, so that layers nearer
    the input than the deepest selected tensor are not even recorded. Unselected tensors keep their
    weights and their optimizer slots. Gradients of rows alone (Embedding) are made dense, as Keras
    3 does too: momentum and decay are of the whole tensor.

    model: any Keras classifier with one output; UserError for others (check_classifier).
    mask: (N,) bool, in model.trainable_variables order.
    weight_decay: decoupled (SGDW, AdamW): w -= learning_rate * weight_decay * w, before the update,
        which is the paper's optimizer; scaled by the decayed learning rate, so that both follow the
        cosine. Ours because TensorFlow Addons' cannot be installed on Arm or with today's
        TensorFlow.
    outputs_gradients: the N gradients behind the three results, in one flat list.
    update: False leaves out decay and update, and the optimizer may be None.
    penalty: (model) -> scalar tensor, trained beside the loss and the model's own losses.
    loss_scale: the LossScale of an earlier step, to go on with; by default one where a layer
        computes in float16, else None.
    """

    def __init__(self, model, optimizer, mask, weight_decay=0.0, outputs_gradients=False,
                 update=True, penalty=None, loss_scale=None):
        check_classifier(model)
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
        self.loss_scale = loss_scale or (
            LossScale() if keras_stack.computes_in_float16(model) else None)
        self.decay_ops = []  # names, as traced
        self.function = tf.function(self._step)

    def __call__(self, inputs, labels):
        return self.function(inputs, labels)

    def _step(self, inputs, labels):
        sources = [keras_stack.raw(v) for v in self.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            predictions = self.model(inputs, training=True)  # (B, classes)
            result = StepResult(cross_entropy(labels, predictions),
                                count_correct(labels, predictions), self._penalty())
            objective = result.objective
            if self.loss_scale:
                objective *= self.loss_scale.scale
        gradients = _apart([tf.convert_to_tensor(gradient) for gradient in tape.gradient(
            objective, sources, unconnected_gradients='zero')])
        if self.loss_scale:
            gradients = self.loss_scale.unscaled(gradients)
        if self.update:
            self._apply(gradients)
        return list(result) + gradients if self.outputs_gradients else result

    def _penalty(self):
        """Regularisers and add_loss of the call just traced, and `penalty`."""
        losses = list(self.model.losses) + ([self.penalty(self.model)] if self.penalty else [])
        return tf.add_n([tf.cast(loss, tf.float32) for loss in losses] or [tf.zeros(())])

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
            for variable in map(keras_stack.raw, self.variables):  # Keras' own reads it twice
                self.decay_ops.append(variable.assign_sub(
                    tf.cast(decay, variable.dtype) * variable, read_value=False).name)
        keras_stack.apply_gradients(self.optimizer, gradients, self.variables)


def _apart(gradients):
    """The gradients, each a tensor of its own: weights that are added share one, and the graph
    could not tell whose update is whose.
    """
    found = []
    for gradient in gradients:
        shared = any(gradient is other for other in found)
        found.append(gradient + tf.zeros((), gradient.dtype) if shared else gradient)
    return found


def evaluation_function(model):
    """tf.function (inputs, labels) -> (summed loss, number correct), in inference mode."""
    @tf.function
    def evaluate(inputs, labels):
        predictions = model(inputs, training=False)
        size = tf.cast(tf.shape(labels)[0], tf.float32)
        return cross_entropy(labels, predictions) * size, count_correct(labels, predictions)
    return evaluate


def count_correct(labels, predictions):
    """Scalar int32: how many of the (B,) labels are the argmax of the (B, classes) predictions."""
    hits = tf.equal(tf.argmax(predictions, axis=-1, output_type=labels.dtype), labels)
    return tf.reduce_sum(tf.cast(hits, tf.int32))
