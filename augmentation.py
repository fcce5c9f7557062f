"""Views: how training images are flipped and turned, and which view an epoch shows.

A view is one draw of flip and angle for each training image. All images' draws of a view are made
at once and read by image number, so that an image is a pure function of (seed, image, view),
whatever batch it is in and at whatever place.

Takes the seed, numbers of views and images as they are; gives the images as in a view.
"""

import numpy as np

from command_line import one_of

ROTATION = 0.2  # of a full turn, to either side, as in the paper
KINDS = ('flip+rotate', 'none')
VIEWS = ('fresh', 'held')


def view_of_epoch(views, interval, kind):
    """(epoch, from 1) -> number of the view, from 0, that it shows of every image.

    fresh: a new one in each epoch. held: the same for `interval` epochs, for ever with interval 0.
    Without augmentation all views are alike, and so they are one.
    """
    if one_of(views, VIEWS, 'kind of views') == 'fresh' and kind != 'none':
        return lambda epoch: epoch - 1
    if not interval or kind == 'none':
        return lambda epoch: 0
    return lambda epoch: (epoch - 1) // interval


def augmentation_draws(seed, stream, view, count):
    """Draws for images 0 to count - 1: flip, (count,) bool; turn, (count, 2) float32, the angle's
    cosine and sine.

    Drawn with NumPy: the same in every version of TensorFlow, whose vectorised cosine moreover
    depends on the place of a number in its array. Not with Keras' RandomFlip and RandomRotation:
    they draw from global state, so that a batch would depend on everything drawn before it.
    stream: int, of the epochs or of the probe.
    """
    rng = np.random.RandomState([seed, stream, view, 1])  # four numbers: three draw the order
    flip = rng.uniform(size=count) < 0.5
    angle = rng.uniform(-1, 1, count) * ROTATION * 2 * np.pi
    return flip, np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def augment(images, flip, turn):
    """RandomFlip('horizontal') and RandomRotation(0.2): bilinear, reflected at the border.

    images: (B, S, S, 3) float32. flip, (B,), and turn, (B, 2): their draws. Returns the same shape
    and range.
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
