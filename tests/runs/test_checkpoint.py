"""Tests that checkpoints are read as they were written, and that damage is noticed."""

import os

import numpy as np
import pytest

from cached_runs import files_of_at_most
from elastic.errors import UserError
from elastic.runs import checkpoint

TREE = dict(epoch=3, rho=0.1 + 0.2, name='é', random=np.random.RandomState(3).get_state(),
            number=np.float32(0.5), shapes=[(3, 3), ()], empty={}, ms=np.arange(6.0).reshape(2, 3),
            arrays=[np.float32([1.5]), np.zeros((0, 4), bool), np.array(7, np.int64)])


def written(folder, **more):
    checkpoint.write(str(folder), dict(TREE, **more))
    return folder / checkpoint.FOLDER


def read(folder):
    return checkpoint.read(str(folder))


def test_a_tree_is_read_as_it_was_written(tmp_path):
    assert read(tmp_path) is None and checkpoint.stamps(str(tmp_path)) == []
    written(tmp_path)
    found = read(tmp_path)
    np.testing.assert_equal(found, dict(
        TREE, stamps=checkpoint.stamps(str(tmp_path)), damaged=None))
    assert found['shapes'] == TREE['shapes']  # with tuples


@pytest.mark.parametrize('value', [object(), np.array([object()]), {'f': print}])
def test_an_object_is_refused_and_the_last_checkpoint_stays(tmp_path, value):
    written(tmp_path)
    with pytest.raises((TypeError, ValueError)):
        checkpoint.write(str(tmp_path), dict(value=value))
    assert read(tmp_path)['epoch'] == 3


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path):
    place = written(tmp_path, number_of=1)
    written(tmp_path, number_of=2)
    assert sorted(os.listdir(str(place))) == ['before', 'last']
    assert read(tmp_path)['number_of'] == 2
    (place / 'last').write_bytes((place / 'last').read_bytes()[:-7])
    found = read(tmp_path)
    assert found['number_of'] == 1 and "last' cannot be read" in found['damaged']


def test_two_damaged_checkpoints_are_refused_and_kept(tmp_path):
    place = written(tmp_path)
    written(tmp_path)
    for name in ('last', 'before'):
        (place / name).write_bytes(b'')
    with pytest.raises(UserError, match='no checkpoint of .* can be used .*--restart'):
        read(tmp_path)
    assert sorted(os.listdir(str(place))) == ['before', 'last']


def test_a_flipped_bit_of_an_array_or_of_the_tree_is_noticed(tmp_path):
    written(tmp_path)
    path = written(tmp_path) / 'last'
    content = path.read_bytes()
    for held in (np.arange(6.0).tobytes(), b'"epoch": 3', b"'descr': '<f8'"):
        for at in range(content.index(held), content.index(held) + len(held)):
            damaged = bytearray(content)
            damaged[at] ^= 1 << at % 8
            path.write_bytes(damaged)
            assert "last' cannot be read" in read(tmp_path)['damaged']


def test_reading_a_checkpoint_runs_no_code(tmp_path):
    """The file is whole, and its array is a pickle."""
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'evil'),)
    place = written(tmp_path)
    with open(str(place / 'last'), 'wb') as file:
        np.savez(file, format=np.array(checkpoint.FORMAT),
                 tree=np.frombuffer(b'{"array": "x"}', np.uint8),
                 x=np.array([Evil()], dtype=object))
    with pytest.raises(UserError, match='cannot be read.*allow_pickle'):
        read(tmp_path)
    assert not (tmp_path / 'evil').exists()


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line(tmp_path):
    with open(str(written(tmp_path) / 'last'), 'wb') as file:
        file.write(b'ElasticTrainer checkpoint 1 ' + b'0' * 64 + b'\n')
        np.savez(file, tree=np.frombuffer(b'{"dict": {}}', np.uint8))
    with pytest.raises(UserError, match='format {}.*--restart'.format(checkpoint.FORMAT)) as error:
        read(tmp_path)
    assert '\n' not in str(error.value)


def test_a_full_disk_keeps_the_last_checkpoint_and_warns_once(tmp_path, capsys):
    place = written(tmp_path)
    keeper = checkpoint.Keeper(str(tmp_path))
    with files_of_at_most(2000):
        for printed in (1, 0):
            assert not keeper.keep(lambda: dict(TREE, large=np.zeros(10 ** 5)))
            assert capsys.readouterr().out.count('no checkpoint could be written') == printed
    assert read(tmp_path)['epoch'] == 3 and os.listdir(str(place)) == ['last']
    assert keeper.keep(lambda: dict(TREE, epoch=4))
    assert read(tmp_path)['epoch'] == 4


def test_a_checkpoint_is_due_after_some_minutes_or_before_a_stop(tmp_path):
    stopping = []
    keeper = checkpoint.Keeper(str(tmp_path), minutes=1e9, stop=lambda: bool(stopping))
    assert not keeper.due()
    stopping.append(True)
    assert keeper.due()
    assert checkpoint.Keeper(str(tmp_path), minutes=0.0).due()


def test_checkpoints_after_short_epochs_take_little_time(tmp_path):
    clock = [0.0]

    def slow_tree():
        clock[0] += 0.25
        return TREE
    keeper = checkpoint.Keeper(str(tmp_path), now=lambda: clock[0])
    assert keeper.pays() and not checkpoint.Keeper().pays()
    keeper.keep(slow_tree)
    assert not keeper.pays()
    clock[0] = 0.24 / checkpoint.COST
    assert not keeper.pays()
    clock[0] = 0.26 / checkpoint.COST
    assert keeper.pays()
