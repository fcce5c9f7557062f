"""Makes the optimizer of a run, and the schedule of its learning rate."""

import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.settings import AUTO

UNTESTED = 1e-3  # of --learning_rate auto, for the importance before its test


class WarmupCosine(keras.optimizers.schedules.LearningRateSchedule):
    """Raises the learning rate linearly over `warmup_steps`, then lowers it to 0 as a cosine.

    The first rate is above 0, because the importance before the first step is that of an update at
    this rate.
    begin: number of steps before, at the full rate. movable: whether `end_at` may be called.
    scale: a tf.Variable by which all rates are multiplied, if `scaled`; else None.
    """

    def __init__(self, learning_rate, total_steps, warmup_steps=0, begin=0, movable=False,
                 scaled=False):
        super().__init__()
        self.warmup_steps, self.begin = warmup_steps, begin
        self.scale = tf.Variable(1.0, trainable=False) if scaled else None
        steps = max(1, total_steps - begin - warmup_steps)
        self._steps = tf.Variable(float(steps), trainable=False) if movable else steps
        self.decay = keras.optimizers.schedules.CosineDecay(learning_rate, self._steps)

    def end_at(self, total_steps):
        """Lets the cosine reach 0 after this number of steps; functions traced before follow."""
        self._steps.assign(max(1, total_steps - self.begin - self.warmup_steps))

    def at(self, step, rate):
        """Sets the scale so that the rate after `step` steps is `rate`."""
        self.scale.assign(rate / max(float(self._usual(step)), 1e-12))

    def __call__(self, step):
        rate = self._usual(step)
        return rate if self.scale is None else rate * self.scale

    def _usual(self, step):
        if self.begin:
            step = tf.maximum(step - self.begin, 0) + self.warmup_steps * tf.cast(
                step < self.begin, step.dtype)
        if not self.warmup_steps:
            return self.decay(step)
        cosine = self.decay(tf.maximum(step - self.warmup_steps, 0))
        return cosine * tf.minimum(1.0, (tf.cast(step, tf.float32) + 1) / self.warmup_steps)


def make_optimizer(name, learning_rate, total_steps, variables, warmup_steps=0, clip_norm=None):
    """Returns optimizer_with WarmupCosine over all steps."""
    return optimizer_with(name, WarmupCosine(learning_rate, total_steps, warmup_steps), variables,
                          clip_norm)


def optimizer_with(name, rate, variables, clip_norm=None):
    """Returns SGD with momentum 0.9, or keras_stack.Adam, with slots for all variables.

    rate: the learning rate, a schedule. Weight decay is part of TrainingStep.
    clip_norm: largest norm of each tensor's gradient. Clipping the global norm would make the
    update of a tensor depend on which others are trained; its importance does not.
    """
    if name == 'sgd':
        optimizer = keras.optimizers.SGD(rate, momentum=0.9, clipnorm=clip_norm)
    else:
        optimizer = keras_stack.Adam(rate, clipnorm=clip_norm)
    keras_stack.build_optimizer(optimizer, variables)
    return optimizer


def optimizer_for(dataset, settings, variables):
    """Returns the optimizer of a run on this datasets.Dataset with these settings.Settings."""
    auto = settings.learning_rate == AUTO
    rate = WarmupCosine(UNTESTED if auto else settings.learning_rate,
                        settings.num_epochs * dataset.steps, settings.warmup_steps,
                        settings.first_epochs * dataset.steps, settings.deadline is not None,
                        settings.solves or auto)
    return optimizer_with(settings.optimizer, rate, variables, settings.clip_norm)
