"""Turns trees of plain values and arrays into JSON and back; no code is run.

A tree holds dicts with str keys, lists, tuples, frozensets, NamedTuples, arrays, numbers, str,
None, and tf.Variables, which become arrays.
"""

import io
import json

import numpy as np

TREE = 'tree'  # the name of the JSON among the arrays


def packed(value, arrays):
    """Returns a tree as JSON; adds its arrays to the dict `arrays`."""
    if isinstance(value, np.generic):
        value = value.item()
    if hasattr(value, 'read_value') or (
            isinstance(value, np.ndarray) and not value.dtype.hasobject):
        name = 'array_{}'.format(len(arrays))
        arrays[name] = value
        return {'array': name}
    if isinstance(value, dict):
        return {'dict': {key: packed(of_key, arrays) for key, of_key in value.items()}}
    if hasattr(value, '_asdict'):
        return {'record': type(value).__name__, 'fields': packed(value._asdict(), arrays)}
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            items = sorted(value) if kind is frozenset else value
            return {name: [packed(item, arrays) for item in items]}
    return value


COLLECTIONS = {'list': list, 'tuple': tuple, 'frozenset': frozenset}


def unpacked(value, arrays, records):
    """Returns the tree that was packed."""
    if not isinstance(value, dict):
        return value
    if 'array' in value:
        return arrays[value['array']]
    if 'dict' in value:
        return {key: unpacked(of_key, arrays, records) for key, of_key in value['dict'].items()}
    if 'record' in value:
        return records[value['record']](**unpacked(value['fields'], arrays, records))
    name, items = next(iter(value.items()))
    return COLLECTIONS[name](unpacked(item, arrays, records) for item in items)


def to_bytes(tree):
    """Returns a tree as bytes; raises TypeError if it holds anything else than the above."""
    arrays, out = {}, io.BytesIO()
    text = json.dumps(packed(tree, arrays)).encode()
    np.savez(out, **dict(arrays, **{TREE: np.frombuffer(text, np.uint8)}))
    return out.getvalue()


def from_bytes(content, records=()):
    """Returns the tree of `to_bytes`. records: the NamedTuple classes that it may hold."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return unpacked(json.loads(arrays[TREE].tobytes().decode()), arrays,
                        {kind.__name__: kind for kind in records})
