"""Holds which bytes the step of any mask holds at which time, and adds up its working memory."""

from typing import NamedTuple

import numpy as np


class Memory(NamedTuple):
    """Holds E entries (bit mask, bytes), of the same form as the (bit mask, ms) of times.

    An entry is a stretch of the order of execution in which a tensor of the graph is held, if one
    of N trainable tensors is trained that needs it until then. liveness.py makes them.
    sets: (G, N) bool, sets of trainable tensors. of: (E,) int, the set of each entry.
    begin, end: (E,) int, from which event of the step to which other one.
    fixed, image: (E,) bytes, and further bytes for each image of a batch.
    kept: (G,) bytes that the forward pass leaves for each set of tensors.
    batch: images of the step. weights: bytes of all trainable tensors.
    """
    sets: np.ndarray
    of: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    fixed: np.ndarray
    image: np.ndarray
    kept: np.ndarray
    batch: int
    weights: int

    def peak(self, mask, images=None):
        """Returns the most bytes that the step of a mask holds at once, without the variables.

        mask: (N,) bool. images: batch size; default: that of the step.
        """
        sets = (self.sets & np.asarray(mask, dtype=bool)).any(axis=1)
        return self._peak(sets, images or self.batch)

    def forward_peak(self):
        """Returns the most bytes that the forward pass alone holds at once."""
        return self._peak(self.sets.all(axis=1), self.batch)

    def importance_peak(self, images):
        """Returns the most bytes that importance holds if it takes so many images at once.

        Beside the passes of all tensors, that are the weights before the trial update and the
        gradients that are added up.
        """
        return self.peak(np.ones(self.sets.shape[1], bool), images) + 2 * self.weights

    def _peak(self, sets, images):
        size = (self.fixed + self.image * images) * sets[self.of]
        change = np.bincount(self.begin, size, self.end.max() + 1)
        change -= np.bincount(self.end, size, len(change))
        return float(np.cumsum(change).max())

    def stored(self):
        """Returns a dict for JSON, that `restored` takes."""
        content = {name: value.tolist() if isinstance(value, np.ndarray) else value
                   for name, value in self._asdict().items()}
        content['sets'] = [np.flatnonzero(row).tolist() for row in self.sets]
        return dict(content, tensors=self.sets.shape[1])

    @classmethod
    def restored(cls, content):
        """Returns the Memory that `stored` described."""
        content = dict(content)
        tensors = np.arange(content.pop('tensors'))
        content['sets'] = np.array([np.isin(tensors, row) for row in content['sets']], dtype=bool)
        for name in ('of', 'begin', 'end'):
            content[name] = np.array(content[name], dtype=np.int64)
        for name in ('fixed', 'image', 'kept'):
            content[name] = np.array(content[name], dtype=np.float64)
        return cls(**content)


class Room(NamedTuple):
    """Holds the memory that a step may take. memory: Memory of the steps. nbytes: the most."""
    memory: Memory
    nbytes: float

    def fits(self, mask):
        """Returns whether the step of the (N,) bool mask never holds more."""
        return self.memory.peak(mask) <= self.nbytes


def largest_batch(fits, most, whole=None):
    """Returns the largest number of images, up to `most`, for which fits(images); None if none.

    whole: a number of images that it has to divide; None: there is none. fits: (int) -> bool.
    """
    return next((n for n in range(most, 0, -1) if not (whole and whole % n) and fits(n)), None)
