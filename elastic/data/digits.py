"""Makes the digit domains: scikit-learn's 8x8 digits, drawn large and in colour.

`digits` is the source domain; `digits_shifted` and `digits_inverted` are target domains. All three
draw their test images from the same originals, which no training image shows.
"""

import numpy as np

from elastic.data.split import SPLIT_SEED, Split, stratified

DIGIT_NAMES = ('digits', 'digits_shifted', 'digits_inverted')
DIGIT_TEST_SHARE = 0.25
RENDERINGS = {'train': 8, 'test': 5}  # images per original: 10,776 and 2,250 in all
DIGIT_STYLES = {  # quarter turns, shift off the centre (of the image), noise, ink, paper
    'digits': (0, 0.1, 8, (150, 255), (0, 60)),             # upright, light on dark
    'digits_shifted': (1, 0.1, 12, (150, 255), (0, 100)),   # turned, a more colourful background
    'digits_inverted': (2, 0.1, 12, (0, 100), (150, 255))}  # upside down, dark on light


def digit_splits(name, input_size, data_dir):
    """Returns the class names, the training Split and the test Split of a digit domain."""
    del data_dir  # nothing is read: images are drawn when they are fetched
    return (tuple('0123456789'),) + tuple(
        _rendering(name, part, input_size) for part in ('train', 'test'))


def digit_originals(part):
    """Returns the numbers of scikit-learn's 1,797 digits that 'train' or 'test' images show."""
    from sklearn.datasets import load_digits
    return stratified(load_digits().target, DIGIT_TEST_SHARE)[part == 'test']


def _rendering(name, part, input_size):
    """Returns the Split of 'train' or 'test', the same in every run."""
    from sklearn.datasets import load_digits
    turns, shift, noise_level, ink_levels, paper_levels = DIGIT_STYLES[name]
    digits, which = load_digits(), np.tile(digit_originals(part), RENDERINGS[part])
    shapes = np.rot90(digits.images, turns, axes=(1, 2)) / 16  # (1797, 8, 8), 1 = ink
    rng = np.random.RandomState([SPLIT_SEED, DIGIT_NAMES.index(name), int(part == 'test')])
    count = len(which)
    step = 8 / (input_size * rng.uniform(0.8, 0.95, (count, 1)))  # original pixels per pixel
    centre = input_size * (0.5 + rng.uniform(-shift, shift, (count, 2)))
    ink, paper = [rng.uniform(*levels, size=(count, 3)) for levels in (ink_levels, paper_levels)]
    transforms = np.zeros((count, 8))
    transforms[:, [0, 4]] = step
    transforms[:, [2, 5]] = 3.5 + step * (0.5 - centre)  # where output pixel (0, 0) is read
    arrays = [array.astype(np.float32) for array in (shapes[which], transforms, ink, paper)]
    labels, noise_key = digits.target[which].astype(np.int32), rng.randint(2 ** 31)

    def fetch(index):
        import tensorflow as tf
        shape, transform, inked, blank = [tf.gather(array, index) for array in arrays]
        amount = tf.raw_ops.ImageProjectiveTransformV3(
            images=shape[None, ..., None], transforms=transform[None],
            output_shape=[input_size, input_size], fill_value=0.0, interpolation='BILINEAR',
            fill_mode='CONSTANT')[0]  # (S, S, 1), 0 = paper, 1 = ink
        noise = tf.random.stateless_normal((input_size, input_size, 3), (noise_key, index),
                                           stddev=noise_level)
        image = tf.round(blank + amount * (inked - blank) + noise)
        return tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8)

    return Split(input_size, lambda: labels, count, fetch)
