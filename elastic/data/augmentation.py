"""Flips and rotates training images.

A view is one augmented version of every training image. All flips and angles of a view are drawn at
once and looked up by image number. So an augmented image depends on the seed, the image and the
view, but not on its batch.
"""

import numpy as np

ROTATION = 0.2  # largest angle to either side, as a share of a full turn, as in the paper


def augmentation_draws(seed, stream, view, count):
    """Returns the flips, (count,) bool, and rotations, (count, 2) float32, of the first images.

    A rotation is the cosine and the sine of its angle. stream, view: numbers of Stream and view.

    NumPy draws the same numbers with every version of TensorFlow. Keras' layers draw from a global
    state, and TensorFlow's vectorised cosine depends on an element's place in its array.
    """
    rng = np.random.RandomState([seed, stream, view, 1])  # four numbers; the order draws from three
    flip = rng.uniform(size=count) < 0.5
    angle = rng.uniform(-1, 1, count) * ROTATION * 2 * np.pi
    return flip, np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def augment(images, flip, turn=None):
    """Returns the images, (B, S, S, 3) float32, flipped and rotated.

    Equals Keras' RandomFlip('horizontal') and RandomRotation(0.2), bilinear, reflecting the border.
    flip: (B,) bool. turn: (B, 2) float32, cosine and sine; None: no rotation.
    """
    import tensorflow as tf
    images = tf.where(flip[:, None, None, None], images[:, :, ::-1], images)
    if turn is None:
        return images
    size = tf.shape(images)[1]
    cos, sin = turn[:, 0], turn[:, 1]
    zero, middle = tf.zeros_like(cos), tf.cast(size - 1, tf.float32) / 2
    # Output (x, y) is read at input (cos x - sin y + dx, sin x + cos y + dy); the middle stays.
    transforms = tf.stack([cos, -sin, middle * (1 - cos + sin),
                           sin, cos, middle * (1 - sin - cos), zero, zero], axis=1)  # (B, 8)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images, transforms=transforms, output_shape=[size, size], fill_value=0.0,
        interpolation='BILINEAR', fill_mode='REFLECT')
