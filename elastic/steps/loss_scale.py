"""Scales the loss of float16 networks, in a way that leaves the tensors of a step independent."""

import tensorflow as tf


class LossScale:
    """Scales the loss of float16 networks dynamically, as Keras' LossScaleOptimizer does.

    Small gradients vanish in float16. So the loss is multiplied by a scale, and the gradients are
    divided by it. A step in which a gradient overflows only halves the scale; GROWTH_STEPS steps
    without overflow double it. Keras puts all updates into one branch of a condition, from which no
    reduced step can be cut. Here the tensors share only the variable `overflows`.
    """
    FIRST, GROWTH_STEPS = 2.0 ** 15, 2000

    def __init__(self):
        self.scale = tf.Variable(self.FIRST, trainable=False)
        self.good_steps = tf.Variable(0, trainable=False)
        self.overflows = tf.Variable(0, trainable=False)  # overflowed gradients, this step
        self.variables = [self.scale, self.good_steps, self.overflows]

    def guard(self, gradients, written, update):
        """Calls `update`; if a gradient overflowed, restores the variables `written`."""
        self.overflows.assign(0, read_value=False)
        for gradient in gradients:
            finite = tf.reduce_all(tf.math.is_finite(gradient))
            self.overflows.assign_add(tf.cast(~finite, tf.int32), read_value=False)
        fine = tf.equal(self.overflows.read_value(), 0)  # same variable, so after all additions
        before = [variable.read_value() for variable in written]
        update()
        for variable, value in zip(written, before):
            variable.assign(tf.where(fine, variable.read_value(), value), read_value=False)
        good = tf.where(fine, self.good_steps + 1, 0)
        grow = good >= self.GROWTH_STEPS
        self.good_steps.assign(tf.where(grow, 0, good), read_value=False)
        self.scale.assign(tf.where(fine, tf.where(grow, 2 * self.scale, self.scale),
                                   tf.maximum(self.scale / 2, 1.0)), read_value=False)
