"""Small stores of the prefix cache, in memory and in a file, of rows of random bits."""

import numpy as np
import pytest

from elastic.cache.stores import Field, FileStore, MemoryStore

IMAGES, BATCH = 23, 4


def values(row, count=IMAGES, seed=0):
    """(count,) + row.shape of random bits, NaN and infinity among them."""
    size = max(1, int(np.prod(row.shape))) * np.dtype(row.dtype).itemsize
    bits = np.random.RandomState(seed).randint(0, 256, (count, size)).astype(np.uint8)
    if row.dtype == np.bool_:
        bits &= 1
    return bits.view(row.dtype).reshape((count,) + row.shape)


def bits(tensors):
    return [(tensor.shape, tensor.dtype, tensor.tobytes()) for tensor in tensors]


def opened(kind, folder, rows, num_images=IMAGES):
    if kind == 'memory':
        return MemoryStore(rows, num_images)
    return FileStore(rows, num_images, str(folder))


def filled(kind, folder, rows, seed=0):
    """A store of IMAGES rows, put in a shuffled order, and the tensors by image."""
    tensors = [values(row, seed=seed + i) for i, row in enumerate(rows)]
    store = opened(kind, folder, rows)
    order = np.random.RandomState(seed).permutation(IMAGES)
    for numbers in (order[:9], order[9:]):
        store.put(numbers, [tensor[numbers] for tensor in tensors])
    return store, tensors


both_kinds = pytest.mark.parametrize('kind', ['memory', 'file'])
FIELDS = [Field((3, 5, 2), np.float32), Field((7,), np.float16), Field((), np.int32)]
