"""Makes small stores of the prefix cache, in memory and in a file, with random bits."""

import numpy as np
import pytest

from elastic.cache.stores import Field, FileStore, MemoryStore

IMAGES, BATCH = 23, 4


def values(field, count=IMAGES, seed=0):
    """Returns a (count,) + field.shape array of random bits, NaN and infinity among them."""
    size = max(1, int(np.prod(field.shape))) * np.dtype(field.dtype).itemsize
    bits = np.random.RandomState(seed).randint(0, 256, (count, size)).astype(np.uint8)
    if field.dtype == np.bool_:
        bits &= 1
    return bits.view(field.dtype).reshape((count,) + field.shape)


def bits(tensors):
    return [(tensor.shape, tensor.dtype, tensor.tobytes()) for tensor in tensors]


def opened(kind, folder, fields, num_images=IMAGES):
    if kind == 'memory':
        return MemoryStore(fields, num_images)
    return FileStore(fields, num_images, str(folder))


def filled(kind, folder, fields, seed=0):
    """Returns a store of IMAGES records, written in shuffled order, and the tensors by image."""
    tensors = [values(field, seed=seed + i) for i, field in enumerate(fields)]
    store = opened(kind, folder, fields)
    order = np.random.RandomState(seed).permutation(IMAGES)
    for numbers in (order[:9], order[9:]):
        store.put(numbers, [tensor[numbers] for tensor in tensors])
    return store, tensors


both_kinds = pytest.mark.parametrize('kind', ['memory', 'file'])
FIELDS = [Field((3, 5, 2), np.float32), Field((7,), np.float16), Field((), np.int32)]
