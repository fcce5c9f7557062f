"""Tests the picture of the trained tensors: a column for each epoch, fewer in a long run."""

import numpy as np
import pytest

from elastic.runs.recorder import COLOURS, MOST_COLUMNS, mask_picture


@pytest.mark.parametrize('epochs, stride', [
    (1, 1), (6, 1), (MOST_COLUMNS, 1), (MOST_COLUMNS + 1, 2), (3 * MOST_COLUMNS, 3)])
def test_the_picture_shows_every_or_every_second_or_third_epoch(epochs, stride):
    mask = np.random.RandomState(epochs).rand(epochs, 5) < 0.5
    shown = mask[::stride]
    picture = mask_picture(mask)
    assert picture.shape == (1, 5 * 4, len(shown) * 16, 3) and len(shown) <= MOST_COLUMNS
    blue = (picture[0, ::4, ::16] == COLOURS[1]).all(axis=-1)
    assert (blue[::-1].T == shown).all()  # the input at the bottom
