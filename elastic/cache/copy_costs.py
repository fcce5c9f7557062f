"""What it takes to copy rows of the prefix cache, by how large they are and where they fit."""

import numpy as np

from elastic.cache import stores
from elastic.cache.stores import CacheLost

TRIED_ROWS = (1 << 12, 1 << 18)  # bytes, whose reading and writing is measured


class RowCosts:
    """Of one run's cache, prefix_cache.PrefixCache, whose rows may move.

    num_images: that have a row each. folder: for rows that do not fit into memory. cache_gb: see
    stores.room. memory_bytes: see stores.open_store. measured: dict where rows lie ->
    (reading, writing) ms a batch, of TRIED_ROWS; what it lacks is measured and added.
    """

    def __init__(self, num_images, batch_size, folder, cache_gb=None, memory_bytes=None,
                 measured=None):
        self._num_images, self._batch_size = num_images, batch_size
        self._folder, self._cache_gb, self._memory_bytes = folder, cache_gb, memory_bytes
        self.cut = self._store = None  # of the tensors now in training: prefix_cut.Cut, Store
        self._measured = {} if measured is None else measured
        self._wait_ms = 0.0  # see waited

    def copying(self, nbytes):
        """(reading, writing): (N,) ms a batch of a new cache, which the present one makes room for;
        inf where it does not fit. nbytes: (N,) of one image without its label, inf for none.
        """
        size = np.where(np.isfinite(nbytes), nbytes, 0) + 4  # and the label
        memory, disk = self._room()
        whole = size * self._num_images
        fits = np.isfinite(nbytes) & (whole <= max(memory, disk))
        on_disk = fits & (whole > memory)
        read, write = [ms(size) for ms in self._rates(False)]
        if on_disk.any():
            read, write = [np.where(on_disk, ms(size), of_memory)
                           for ms, of_memory in zip(self._rates(True), (read, write))]
        return np.where(fits, read + self._wait_ms, np.inf), np.where(fits, write, np.inf)

    def too_large(self, nbytes):
        """One line where not even the smallest of new caches fits, else None; nbytes: see copying.
        """
        size, room = (np.min(nbytes) + 4) * self._num_images, self._room()
        return stores.no_room(size, *room) if max(room) < size < np.inf else None

    def copying_kept(self):
        """(reading, writing): ms a batch of the present cache."""
        read, write = self._rates(isinstance(self._store, stores.FileStore))
        size = self.cut.nbytes + 4
        return float(read(size)) + self._wait_ms, float(write(size))

    def read_ms_of_row(self, nbytes):
        """Function, bytes of one image -> ms to read them for a batch: from where a cache of
        `nbytes` an image would be.
        """
        memory, _ = self._room()
        return self._rates((nbytes + 4) * self._num_images > memory)[0]

    def _room(self):
        """(bytes of memory, bytes of disk) that a new cache may take, the present one freed."""
        memory, disk = stores.room_without(self._store, self._folder, self._cache_gb)
        return memory if self._memory_bytes is None else self._memory_bytes, disk

    def waited(self, wait_ms):
        """From now on a step that reads waits so long for its rows, and for Python, if they are as
        large as those now stored: of these, all that copying such rows does not explain.
        """
        if self.cut is not None and self._store is not None:
            on_disk = isinstance(self._store, stores.FileStore)
            self._wait_ms = max(0.0, wait_ms - float(self._rates(on_disk)[0](self.cut.nbytes + 4)))

    def _rates(self, on_disk):
        """(reading, writing): functions, bytes of a row -> ms a batch; measured once a run.

        Of a file, where all that does not fit into memory goes, rows come from the disk itself.
        """
        place = 'disk' if on_disk else 'memory'
        if place not in self._measured:
            try:
                self._measured[place] = [stores.measured_rates(
                    size, self._batch_size, self._folder if on_disk else None, on_disk)
                    for size in TRIED_ROWS]
            except CacheLost as error:
                print('the prefix cache stays in memory: {}'.format(error))
                self._measured[place] = [(np.inf, np.inf)] * 2
        return [_line(low, high) for low, high in zip(*self._measured[place])]

    def _costs(self):
        """What `_restore_costs` takes: a resumed run has the prices it had."""
        return dict(measured=self._measured, wait_ms=self._wait_ms)

    def _restore_costs(self, state):
        self._measured, self._wait_ms = state['measured'], state['wait_ms']


def _line(low, high):
    """Function, bytes of a row -> ms, through what TRIED_ROWS took."""
    small, large = TRIED_ROWS
    slope = max(0.0, (high - low) / (large - small)) if np.isfinite(high) else 0.0
    return lambda nbytes: low + slope * np.maximum(nbytes - small, 0)
