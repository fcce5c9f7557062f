"""Measures the cost of copying cached activations, by their size and by where they fit."""

import numpy as np

from elastic.cache import stores
from elastic.cache.stores import CacheLost

TRIED_BYTES = (1 << 12, 1 << 18)  # an image; sizes between and beyond lie on a line through both


class CopyTimes:
    """Computes the cost of copying cached activations to and from the store of a run.

    num_images: training images, one record each. folder: for what does not fit into memory.
    cache_gb, memory_bytes: as in stores.open_store.
    measured: dict 'memory' or 'disk' -> (reading, writing) ms a batch, for each of TRIED_BYTES;
    a missing one is measured when it is needed.
    """

    def __init__(self, num_images, batch_size, folder, cache_gb=None, memory_bytes=None,
                 measured=None):
        self._num_images, self._batch_size = num_images, batch_size
        self._folder, self._cache_gb, self._memory_bytes = folder, cache_gb, memory_bytes
        self.cut = self.store = None  # the present prefix_cut.Cut and Store
        self._measured = {} if measured is None else measured
        self._wait_ms = 0.0  # overhead of a reading step

    def copying(self, nbytes):
        """Returns (reading, writing), (N,) ms a batch each, of caches that replace the present one.

        nbytes: (N,) of one image's activations, inf without a cut. Caches that do not fit cost inf.
        """
        memory, disk = self._room()
        whole = (nbytes + 4) * self._num_images  # with the label
        fits = whole <= max(memory, disk)
        on_disk, size = fits & (whole > memory), np.where(fits, nbytes + 4, 0)
        read, write = [ms(size) for ms in self._rates(False)]
        if on_disk.any():
            read, write = [np.where(on_disk, ms(size), in_memory)
                           for ms, in_memory in zip(self._rates(True), (read, write))]
        return np.where(fits, read + self._wait_ms, np.inf), np.where(fits, write, np.inf)

    def copying_present(self):
        """Returns (reading, writing), ms a batch each, of the present cache."""
        read, write = self._copying_alone()
        return read + self._wait_ms, write

    def _copying_alone(self):
        return [float(ms(self.cut.nbytes + 4))
                for ms in self._rates(isinstance(self.store, stores.FileStore))]

    def too_large(self, nbytes):
        """Returns one line if not even the smallest of these caches, (N,) bytes, fits, or None."""
        size, room = (np.min(nbytes) + 4) * self._num_images, self._room()
        return stores.no_room(size, *room) if max(room) < size < np.inf else None

    def read_ms_by_size(self, nbytes):
        """Returns a function from bytes per image to ms per batch that is read.

        nbytes: per image, decides whether memory or the disk is meant.
        """
        memory, _ = self._room()
        return self._rates((nbytes + 4) * self._num_images > memory)[0]

    def waited(self, wait_ms):
        """Adds to the cost of reading what reading steps waited, median ms, beyond copying."""
        if self.store is not None:
            self._wait_ms = max(0.0, wait_ms - self._copying_alone()[0])

    def _room(self):
        return stores.room(self._folder, self._cache_gb, self._memory_bytes, self.store)

    def _rates(self, on_disk):
        """Returns two functions (reading, writing), bytes of an image -> ms a batch."""
        place = 'disk' if on_disk else 'memory'
        if place not in self._measured:
            try:
                self._measured[place] = [stores.measured_rates(
                    size, self._batch_size, self._folder if on_disk else None)
                    for size in TRIED_BYTES]
            except CacheLost as error:
                print('the prefix cache stays in memory: {}'.format(error))
                self._measured[place] = [(np.inf, np.inf)] * 2
        return [_line(low, high) for low, high in zip(*self._measured[place])]


def _line(low, high):
    """Returns a function, bytes -> ms, through the ms of both TRIED_BYTES."""
    small, large = TRIED_BYTES
    slope = max(0.0, (high - low) / (large - small)) if np.isfinite(high) else 0.0
    return lambda nbytes: low + slope * np.maximum(nbytes - small, 0)
