"""Reads the tensors in a file of torch.save, without torch and without running code from it."""

import collections
import pickle

import numpy as np

from elastic.errors import UserError, first_line

MAGIC = 0x1950a86a20f9469cfc6c  # begins the format that torch wrote before version 1.6
HEADERS = 3  # pickles before that of the tensors: the magic number, the version, sizes of C types


def read_tensors(path):
    """Returns name -> array of the state dict in a file, in its order.

    Raises UserError if the file is damaged, of another format, or names anything but tensors.
    """
    try:
        with open(path, 'rb') as file:
            headers = [_Unpickler(file).load() for _ in range(HEADERS)]
            if headers[0] != MAGIC:
                raise ValueError('not of the format that torch wrote before version 1.6')
            tensors = _Unpickler(file).load()
            storages = {}
            dtypes = {storage: dtype for (storage, dtype), *_ in tensors.values()}
            for key in _Unpickler(file).load():
                count = int.from_bytes(file.read(8), 'little')
                data = file.read(count * dtypes[key].itemsize)
                storages[key] = np.frombuffer(data, dtypes[key], count)
        return {name: _array(storages[storage], *place)
                for name, ((storage, _), *place) in tensors.items()}
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError("'{}' cannot be read as tensors of torch: {}".format(
            path, first_line(error) or type(error).__name__))


def _array(storage, offset, shape, strides):
    """Returns an array from its place in a storage; offset and strides count elements."""
    span = sum((size - 1) * stride for size, stride in zip(shape, strides))
    if not 0 <= offset <= offset + span < len(storage):
        raise ValueError('a tensor reaches beyond its data')
    return np.lib.stride_tricks.as_strided(
        storage[offset:], shape, [storage.itemsize * stride for stride in strides]).copy()


def _tensor(storage, offset, shape, strides, *_):
    return storage, offset, shape, strides


class _Unpickler(pickle.Unpickler):
    """Admits dicts, numbers, texts, and the names below; calls nothing else."""

    ADMITTED = {('collections', 'OrderedDict'): collections.OrderedDict,
                ('torch._utils', '_rebuild_tensor_v2'): _tensor,
                ('torch', 'FloatStorage'): np.dtype('<f4'),
                ('torch', 'LongStorage'): np.dtype('<i8')}

    def find_class(self, module, name):
        if (module, name) not in self.ADMITTED:
            raise pickle.UnpicklingError('it names {}.{}, which is no tensor'.format(module, name))
        return self.ADMITTED[module, name]

    def persistent_load(self, place):
        """Returns (key, dtype) of a storage, whose data follows the pickles."""
        return place[2], place[1]
