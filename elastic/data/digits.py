"""The digit domains: scikit-learn's bundled 8x8 digits, drawn large and in colour.

`digits` is the source domain, `digits_shifted` the target, `digits_inverted` another one. All draw
their test images from the same originals, which no training image of any of them shows.
"""

import numpy as np

from elastic.data.split import SPLIT_SEED, Split, train_and_test

DIGIT_NAMES = ('digits', 'digits_shifted', 'digits_inverted')
DIGIT_TEST_SHARE = 0.25
RENDERINGS = {'train': 8, 'test': 5}  # of each original digit: 10,776 and 2,250 images
DIGIT_STYLES = {  # quarter turns, shift off the centre (of the image), levels of noise, ink, paper
    'digits': (0, 0.1, 8, (150, 255), (0, 60)),
    'digits_shifted': (1, 0.1, 12, (150, 255), (0, 100)),
    'digits_inverted': (2, 0.1, 12, (0, 100), (150, 255))}


def digit_originals(split_name):
    """Returns which of scikit-learn's 1,797 digits the images of 'train' or 'test' are drawn from.

    All domains share them: no digit that tests the target domain trained the source domain.
    """
    from sklearn.datasets import load_digits
    labels, rng = load_digits().target, np.random.RandomState(SPLIT_SEED)
    parts = [train_and_test(np.flatnonzero(labels == label), DIGIT_TEST_SHARE, rng)
             for label in range(10)]
    return np.sort(np.concatenate([part[split_name == 'test'] for part in parts]))


def rendering(name, split_name, input_size):
    """Returns the Split that draws 8x8 digits large, the same in every run.

    `digits`: upright, light ink of any colour on dark. `digits_shifted`: turned by 90 degrees, on a
    far more coloured background, noisier. `digits_inverted`: upside down, dark ink on light.
    """
    import tensorflow as tf
    from sklearn.datasets import load_digits
    turns, shift, noise_level, ink_levels, paper_levels = DIGIT_STYLES[name]
    digits, which = load_digits(), np.tile(digit_originals(split_name), RENDERINGS[split_name])
    shapes = np.rot90(digits.images, turns, axes=(1, 2)) / 16  # (1797, 8, 8), 1 = ink
    render_seed = [SPLIT_SEED, DIGIT_NAMES.index(name), int(split_name == 'test')]
    rng, count = np.random.RandomState(render_seed), len(which)
    step = 8 / (input_size * rng.uniform(0.8, 0.95, (count, 1)))  # original pixels per pixel
    centre = input_size * (0.5 + rng.uniform(-shift, shift, (count, 2)))
    ink, paper = [rng.uniform(*levels, size=(count, 3)) for levels in (ink_levels, paper_levels)]
    transforms = np.zeros((count, 8))
    transforms[:, [0, 4]] = step
    transforms[:, [2, 5]] = 3.5 + step * (0.5 - centre)  # where output pixel (0, 0) is read
    arrays = [array.astype(np.float32) for array in (shapes[which], transforms, ink, paper)]
    labels, noise_key = digits.target[which].astype(np.int32), rng.randint(2 ** 31)

    def fetch(index):
        shape, transform, inked, blank = [tf.gather(array, index) for array in arrays]
        amount = tf.raw_ops.ImageProjectiveTransformV3(
            images=shape[None, ..., None], transforms=transform[None],
            output_shape=[input_size, input_size], fill_value=0.0, interpolation='BILINEAR',
            fill_mode='CONSTANT')[0]  # (S, S, 1), 0 = paper, 1 = ink
        noise = tf.random.stateless_normal((input_size, input_size, 3), (noise_key, index),
                                           stddev=noise_level)
        image = tf.round(blank + amount * (inked - blank) + noise)
        return tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8), tf.gather(labels, index)

    return Split(input_size, lambda: labels, count, fetch)


def digit_splits(name, input_size, data_dir):
    """Returns the class names and the training and the test Split of a digit domain.

    data_dir: not read; images are drawn when they are fetched.
    """
    return (tuple('0123456789'),) + tuple(
        rendering(name, part, input_size) for part in ('train', 'test'))
