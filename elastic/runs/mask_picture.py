"""Draws which tensors a run has trained."""

import numpy as np

MOST_COLUMNS = 256  # with more epochs, a column stands for 2, 3, 4 ... of them
TENSOR_PIXELS, EPOCH_PIXELS = 4, 16
COLOURS = np.array([(233, 233, 233), (0, 114, 178)], np.uint8)


def mask_picture(mask):
    """Returns trained tensors in blue over the epochs, the output layer at the top.

    mask: (epochs, N) bool. Returns (1, N * TENSOR_PIXELS, columns * EPOCH_PIXELS, 3) uint8.
    """
    stride = -(-len(mask) // MOST_COLUMNS)
    grid = mask[::stride].T[::-1].astype(int)  # (N, columns)
    return COLOURS[grid].repeat(TENSOR_PIXELS, axis=0).repeat(EPOCH_PIXELS, axis=1)[None]
