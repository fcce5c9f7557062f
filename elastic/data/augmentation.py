"""Augmentation: how training images are flipped and turned, and which version an epoch shows.

A view is one draw of a flip and an angle for each training image. All draws of a view are made at
once and read by image number. So an image is a pure function of (seed, image, view), in whatever
batch it is and at whatever place.
"""

import numpy as np

from elastic.command_line import one_of
from elastic.settings import VIEWS

ROTATION = 0.2  # of a full turn, to either side, as in the paper


def epochs_of_a_view(views, interval, kind):
    """Returns for how many epochs an image keeps its flip and its angle; 0: for all.

    views: 'fresh', a new view in each epoch, or 'held', the same for `interval` epochs.
    kind: of augmentation; without one, all views are alike, and so they are one.
    """
    one_of(views, VIEWS, 'kind of views')
    if kind == 'none':
        return 0
    return 1 if views == 'fresh' else interval


def view_of_epoch(epoch, epochs):
    """Returns the number, from 0, of the view that an epoch, from 1, shows.

    epochs: for how many an image keeps its view, see epochs_of_a_view.
    """
    return (epoch - 1) // epochs if epochs else 0


def augmentation_draws(seed, stream, view, count):
    """Returns the draws of a view for the images 0 to count - 1.

    flip: (count,) bool. turn: (count, 2) float32, cosine and sine of the angle.
    stream: int, of the epochs or of the probe.
    NumPy draws the same numbers beside every version of TensorFlow, whose vectorised cosine also
    depends on the place of a number in its array. RandomFlip and RandomRotation of Keras draw from
    global state: a batch would depend on everything drawn before it.
    """
    rng = np.random.RandomState([seed, stream, view, 1])  # four numbers: three draw the order
    flip = rng.uniform(size=count) < 0.5
    angle = rng.uniform(-1, 1, count) * ROTATION * 2 * np.pi
    return flip, np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def augment(images, flip, turn):
    """Returns the images flipped and turned: bilinear, reflected at the border.

    Equals RandomFlip('horizontal') and RandomRotation(0.2) of Keras with these draws.
    images: (B, S, S, 3) float32, as is what is returned. flip: (B,) bool. turn: (B, 2) float32.
    """
    import tensorflow as tf
    size = tf.shape(images)[1]
    images = tf.where(flip[:, None, None, None], images[:, :, ::-1], images)
    cos, sin = turn[:, 0], turn[:, 1]
    zero, middle = tf.zeros_like(cos), tf.cast(size - 1, tf.float32) / 2
    # Output (x, y) is read at input (cos x - sin y + dx, sin x + cos y + dy); the middle stays.
    transforms = tf.stack([cos, -sin, middle * (1 - cos + sin),
                           sin, cos, middle * (1 - sin - cos), zero, zero], axis=1)  # (B, 8)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images, transforms=transforms, output_shape=[size, size], fill_value=0.0,
        interpolation='BILINEAR', fill_mode='REFLECT')
