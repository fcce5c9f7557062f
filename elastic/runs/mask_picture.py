"""Draws which tensors a run has trained, in a picture that stays small however long it is."""

import numpy as np

MOST_COLUMNS = 256  # with more epochs, a column stands for 2, 4, 8 ... of them
GROWTH = 1.125      # of the number of selections until the next picture: 100 for 100,000
TENSOR_PIXELS, EPOCH_PIXELS = 4, 16
COLOURS = np.array([(233, 233, 233), (0, 114, 178)], np.uint8)


class MaskPicture:
    """Keeps a column for every `stride` epochs: the mask with which the first of them trained.

    epoch: before which the last selection was made.
    """

    def __init__(self):
        self.epoch, self._mask = None, None
        self._columns, self._stride = [], 1
        self._selections = self._drawn = 0  # number so far, and in the last picture

    def add(self, epoch, mask):
        """Adds a selection before `epoch`. mask: (N,) bool; the first one is before epoch 1."""
        self._fill_until(epoch)
        self.epoch, self._mask = epoch, np.array(mask, dtype=bool)
        self._fill_until(epoch + 1)
        self._selections += 1

    def _fill_until(self, epoch):
        """Repeats the last mask in all columns that begin before `epoch`."""
        while 1 + len(self._columns) * self._stride < epoch:
            if len(self._columns) == MOST_COLUMNS:
                self._columns, self._stride = self._columns[::2], 2 * self._stride
            else:
                self._columns.append(self._mask)

    @property
    def is_behind(self):
        """Returns whether a selection was added since `draw`."""
        return self._selections > self._drawn

    @property
    def is_due(self):
        """Returns whether enough selections were added since `draw` for another picture."""
        return self._selections >= GROWTH * self._drawn

    def draw(self):
        """Returns trained tensors in blue over the epochs, the output layer at the top.

        (1, N * TENSOR_PIXELS, columns * EPOCH_PIXELS, 3) uint8.
        """
        self._drawn = self._selections
        grid = np.stack(self._columns, axis=1)[::-1].astype(int)  # (N, columns)
        return COLOURS[grid].repeat(TENSOR_PIXELS, axis=0).repeat(EPOCH_PIXELS, axis=1)[None]

    def state(self):
        """Returns the tree that `restore` takes."""
        return dict(epoch=self.epoch, mask=self._mask, columns=np.array(self._columns, dtype=bool),
                    stride=self._stride, selections=self._selections, drawn=self._drawn)

    def restore(self, state):
        """Resumes from `state`."""
        self.epoch, self._mask = state['epoch'], state['mask']
        self._columns, self._stride = list(state['columns']), state['stride']
        self._selections, self._drawn = state['selections'], state['drawn']
