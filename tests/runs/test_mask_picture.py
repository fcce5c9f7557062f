"""Tests the picture of the trained tensors: right while it is short, bounded when it is long."""

import numpy as np

from elastic.runs.mask_picture import COLOURS, EPOCH_PIXELS, MOST_COLUMNS, MaskPicture


def columns(picture):
    """Returns the (columns, N) bool that a picture shows, the input first."""
    pixels = picture.draw()[0, ::4, ::EPOCH_PIXELS]
    return (pixels == COLOURS[1]).all(axis=-1)[::-1].T


def mask_of(epoch, size=5):
    return np.random.RandomState(epoch).rand(size) < 0.5


def test_a_mask_is_shown_until_the_next_selection():
    picture = MaskPicture()
    for epoch in (1, 4, 6):
        picture.add(epoch, mask_of(epoch))
    assert (columns(picture) == [mask_of(epoch) for epoch in (1, 1, 1, 4, 4, 6)]).all()
    assert picture.draw().shape == (1, 5 * 4, 6 * 16, 3)


def test_a_long_run_shows_every_second_or_fourth_epoch():
    picture, last = MaskPicture(), 3 * MOST_COLUMNS
    for epoch in range(1, last + 1):
        picture.add(epoch, mask_of(epoch))
    assert (columns(picture) == [mask_of(epoch) for epoch in range(1, last + 1, 4)]).all()
    sparse = MaskPicture()
    for epoch in (1, last + 1):
        sparse.add(epoch, mask_of(epoch))
    assert (columns(sparse)[:-1] == mask_of(1)).all() and (
        columns(sparse)[-1] == mask_of(last + 1)).all()


def test_pictures_become_rare_and_stay_small():
    picture, drawn = MaskPicture(), []
    for epoch in range(1, 10001):
        picture.add(epoch, mask_of(epoch))
        if picture.is_due:
            drawn.append((epoch, picture.draw().shape[2]))
    assert [epoch for epoch, _ in drawn][:8] == list(range(1, 9)) and len(drawn) < 75
    assert max(width for _, width in drawn) <= MOST_COLUMNS * EPOCH_PIXELS
    assert picture.is_behind == (drawn[-1][0] != 10000)
    assert sum(value.nbytes for value in picture.state().values()
               if isinstance(value, np.ndarray)) <= 5 * (MOST_COLUMNS + 1)


def test_it_resumes_from_its_state():
    whole, first, resumed = MaskPicture(), MaskPicture(), MaskPicture()
    for epoch in range(1, 700, 3):
        whole.add(epoch, mask_of(epoch))
        if epoch < 400:
            first.add(epoch, mask_of(epoch))
        elif epoch == 400:
            resumed.restore(first.state())
        if epoch >= 400:
            resumed.add(epoch, mask_of(epoch))
        assert (whole if epoch < 400 else resumed).is_due == whole.is_due
    assert resumed.draw().tobytes() == whole.draw().tobytes()
