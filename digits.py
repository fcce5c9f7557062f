"""The digit domains: scikit-learn's bundled 8x8 digits, drawn large and in colour.

`digits` is the source domain, `digits_shifted` the target, `digits_inverted` another one. All draw
their test images from the same originals, which no training image of any of them shows.
"""

import numpy as np

from batches import Split, loads

DIGIT_NAMES = ('digits', 'digits_shifted', 'digits_inverted')
SPLIT_SEED = 1797  # of the fixed splits; not the run's seed: every run tests on the same images
DIGIT_TEST_SHARE = 0.25
RENDERINGS = {'train': 8, 'test': 5}  # of each original digit: 10,776 and 2,250 images
DIGIT_STYLES = {  # quarter turns, shift off the centre (of the image), levels of noise, ink, paper
    'digits': (0, 0.1, 8, (150, 255), (0, 60)),
    'digits_shifted': (1, 0.1, 12, (150, 255), (0, 100)),
    'digits_inverted': (2, 0.1, 12, (0, 100), (150, 255))}


def cut(members, test_share, rng):
    """Training part and test part of one class, each in the order of `members`.

    Both parts get some of a class with two members; a single one goes to training.
    """
    count = min(max(1, int(round(test_share * len(members)))), len(members) - 1)
    order = rng.permutation(len(members))
    return [[members[i] for i in sorted(part)] for part in (order[count:], order[:count])]


def digit_originals(split_name):
    """Indices into scikit-learn's 1,797 digits of the originals behind 'train' or 'test'.

    The same for all domains: no digit that tests the target domain was trained on in the source.
    """
    from sklearn.datasets import load_digits
    labels, rng = load_digits().target, np.random.RandomState(SPLIT_SEED)
    parts = [cut(np.flatnonzero(labels == label), DIGIT_TEST_SHARE, rng) for label in range(10)]
    return np.sort(np.concatenate([part[split_name == 'test'] for part in parts]))


def rendering(name, split_name, input_size):
    """(labels, number of images, fetch): renderings of 8x8 digits, the same in every run.

    `digits`: upright, light ink of any colour on dark. `digits_shifted`: turned by 90 degrees, on a
    far more coloured background, noisier. `digits_inverted`: upside down, dark ink on light.
    labels: () -> (count,) int32. fetch: index () int64 -> image (input_size, input_size, 3) uint8,
    label () int32, in a graph.
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

    return lambda: labels, count, fetch


@loads(*DIGIT_NAMES)
def digit_splits(name, input_size, data_dir):
    """Drawn when fetched; data_dir: not read."""
    return (tuple('0123456789'),) + tuple(
        Split(input_size, *rendering(name, part, input_size)) for part in ('train', 'test'))
