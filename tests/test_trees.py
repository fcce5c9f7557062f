"""Tests that trees of plain values and arrays survive as bytes."""

from typing import NamedTuple

import numpy as np
import pytest

from elastic.trees import from_bytes, to_bytes


class Record(NamedTuple):
    mask: np.ndarray
    names: tuple = ('a', 'b')


TREE = dict(record=Record(np.array([True, False])), numbers=[1, 2.5, float('inf'), None, 'text'],
            chosen=frozenset(['b', 'a']), array=np.arange(6, dtype=np.int16).reshape(2, 3))


def test_a_tree_survives_as_bytes():
    tree = from_bytes(to_bytes(TREE), [Record])
    assert isinstance(tree['record'], Record) and tree['record'].names == ('a', 'b')
    assert (tree['record'].mask == [True, False]).all()
    assert tree['numbers'] == TREE['numbers'] and tree['chosen'] == TREE['chosen']
    assert tree['array'].dtype == np.int16 and (tree['array'] == TREE['array']).all()


def test_a_tree_of_other_objects_is_refused():
    with pytest.raises(TypeError):
        to_bytes([object()])


def test_bytes_never_name_a_class_that_was_not_allowed():
    with pytest.raises(KeyError):
        from_bytes(to_bytes(TREE))
