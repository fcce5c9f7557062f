"""Turns trees of plain values and arrays into JSON and back; no code is run.

A tree holds dicts with str keys, lists, tuples, frozensets, NamedTuples, arrays, numbers, str,
None, and tf.Variables, which become arrays.
"""

import io
import json

import numpy as np

TREE = 'tree'  # the name of the JSON among the arrays


def _packed(value, arrays):
    """Returns a tree as JSON; adds its arrays to the dict `arrays`."""
    if isinstance(value, np.generic):
        value = value.item()
    if hasattr(value, 'read_value') or (
            isinstance(value, np.ndarray) and not value.dtype.hasobject):
        name = 'array_{}'.format(len(arrays))
        arrays[name] = value
        return {'array': name}
    if isinstance(value, dict):
        return {'dict': {key: _packed(of_key, arrays) for key, of_key in value.items()}}
    if hasattr(value, '_asdict'):
        return {'record': type(value).__name__, 'fields': _packed(value._asdict(), arrays)}
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            items = sorted(value) if kind is frozenset else value
            return {name: [_packed(item, arrays) for item in items]}
    return value


COLLECTIONS = {'list': list, 'tuple': tuple, 'frozenset': frozenset}


def _unpacked(value, arrays, records):
    if not isinstance(value, dict):
        return value
    if 'array' in value:
        return arrays[value['array']]
    if 'dict' in value:
        return {key: _unpacked(of_key, arrays, records) for key, of_key in value['dict'].items()}
    if 'record' in value:
        return records[value['record']](**_unpacked(value['fields'], arrays, records))
    name, items = next(iter(value.items()))
    return COLLECTIONS[name](_unpacked(item, arrays, records) for item in items)


def to_arrays(tree):
    """Returns a tree as name -> array; raises TypeError if it holds anything but the above."""
    arrays = {}
    text = json.dumps(_packed(tree, arrays)).encode()
    return dict(arrays, **{TREE: np.frombuffer(text, np.uint8)})


def from_arrays(arrays, records=()):
    """Returns the tree of `to_arrays`. records: the NamedTuple classes that it may hold."""
    return _unpacked(json.loads(arrays[TREE].tobytes().decode()), arrays,
                     {kind.__name__: kind for kind in records})


def to_bytes(tree):
    """Returns a tree as bytes; raises TypeError as to_arrays does."""
    out = io.BytesIO()
    np.savez(out, **to_arrays(tree))
    return out.getvalue()


def from_bytes(content, records=()):
    """Returns the tree of `to_bytes`. records: as in from_arrays."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return from_arrays(arrays, records)
