"""Tests that what may never end (a pipe, a device) is refused wherever a file is read."""

import os
import socket

import pytest

from elastic.command_line import UserError
from elastic.data.class_weights import read_class_weights
from elastic.data.photo import MOST_FILE_BYTES, fault_of, read_image
from elastic.device.meter_log import check_meter, read_meter
from elastic.export.predictor import open_predictor
from elastic.files import read_json, read_npz
from elastic.networks.names import canonical_name
from elastic.regular_file import open_regular, open_text
from elastic.runs.folder import read_rows

READERS = {
    'weights': read_class_weights,
    'log': read_meter, 'header of a log': check_meter, 'json': read_json,
    'npz': lambda path: read_npz(path, 'x'), 'image': lambda path: read_image(path, 8),
    'header of an image': lambda path: raised(fault_of(path)),
    'records': lambda path: read_rows(os.path.dirname(path), os.path.basename(path), {}),
    'model': lambda path: open_predictor(path), 'network': lambda path: canonical_name(path)}


def raised(fault):
    raise ValueError(fault)


pytestmark = pytest.mark.timeout(60)  # a test that waits for a pipe would not end


@pytest.mark.parametrize('kind', ['pipe', 'link to a pipe', 'socket', 'device', 'folder'])
@pytest.mark.parametrize('reader', sorted(READERS))
def test_whatever_reads_a_file_refuses_what_is_none(reader, kind, tmp_path, monkeypatch):
    path = str(tmp_path / ('a.keras' if reader in ('model', 'network') else 'a'))
    if kind == 'socket':
        place = socket.socket(socket.AF_UNIX)
        monkeypatch.chdir(tmp_path)  # the name of a socket is short
        place.bind(os.path.basename(path))
    elif kind == 'device':
        os.symlink('/dev/zero', path)
    elif kind == 'folder':
        if reader in ('model', 'network'):
            pytest.skip('a folder can be a model')
        os.mkdir(path)
    else:
        os.mkfifo(path + ('' if kind == 'pipe' else '.pipe'))
        if kind != 'pipe':
            os.symlink(path + '.pipe', path)
    with pytest.raises(ValueError) as error:
        READERS[reader](path)
    assert '\n' not in str(error.value)


def test_names_of_classes_beside_a_model_come_from_a_file(tmp_path):
    from tensorflow import keras

    from elastic.compat import keras_stack
    inputs = keras.Input((8, 8, 3))
    outputs = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(inputs))
    path = str(tmp_path / keras_stack.MODEL_FILE)
    keras.Model(inputs, outputs).save(path)
    os.mkfifo(str(tmp_path / 'class_names.txt'))
    with pytest.raises(UserError, match='names of the classes: .*a pipe or device, not a file'):
        open_predictor(path)


def test_a_file_larger_than_the_limit_is_not_opened(tmp_path):
    path = tmp_path / 'file'
    path.write_bytes(b'12345')
    with open_regular(str(path), 5) as file:
        assert file.read() == b'12345'
    with open_text(str(path)) as file:
        assert file.read() == '12345'
    with pytest.raises(OSError, match='larger than 4 bytes'):
        open_regular(str(path), 4)
    with open(str(path), 'wb') as file:
        file.truncate(MOST_FILE_BYTES + 1)  # takes no space
    assert fault_of(str(path)) == 'larger than 256,000,000 bytes'


def test_a_pipe_that_replaced_a_file_is_noticed_when_it_is_open(tmp_path, monkeypatch):
    path, stat = str(tmp_path / 'file'), os.stat
    open(path, 'w').close()

    def replaced(name, *more, **options):
        found = stat(name, *more, **options)
        if name == path:
            monkeypatch.undo()
            os.remove(path)
            os.mkfifo(path)
        return found
    monkeypatch.setattr(os, 'stat', replaced)
    with pytest.raises(OSError, match='a pipe or device'):
        open_regular(path)


def test_a_log_without_line_ends_takes_little_memory(tmp_path):
    from elastic.device.host import peak_bytes
    path = tmp_path / 'log.csv'
    with open(str(path), 'wb') as file:
        file.truncate(2 * 10 ** 8)
    before = peak_bytes()
    with pytest.raises(UserError, match='line 1: the line is too long'):
        read_meter(str(path))
    assert peak_bytes() - before < 10 ** 8
