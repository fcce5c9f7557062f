"""Tests that files and folders are written whole or not at all, and that JSON is read back."""

import io
import os
import threading
from contextlib import redirect_stdout

import pytest

from elastic import files
from elastic.errors import UserError
from elastic.runs.recorder import open_run


def test_a_file_is_replaced_only_at_the_end(tmp_path):
    path = tmp_path / 'file'
    path.write_text('old')
    with files.whole(str(path)) as part:
        with open(part, 'w') as out:
            out.write('new')
        assert path.read_text() == 'old'
    assert path.read_text() == 'new' and os.listdir(str(tmp_path)) == ['file']


@pytest.mark.parametrize('error', [KeyError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_no_part(tmp_path, error):
    path = tmp_path / 'file'
    path.write_text('old')
    with pytest.raises(error), files.whole(str(path), str(tmp_path / 'before')) as part:
        with open(part, 'w') as out:
            out.write('new')
        raise error
    assert path.read_text() == 'old' and os.listdir(str(tmp_path)) == ['file']


def test_a_folder_is_replaced_completely_or_not_at_all(tmp_path):
    folder = tmp_path / 'net_profile'
    with files.whole_folder(str(folder)) as new:
        (tmp_path / new / 'timings.json').write_text('first')
    with pytest.raises(KeyError), files.whole_folder(str(folder)) as new:
        (tmp_path / new / 'timings.json').write_text('second')
        raise KeyError
    assert (folder / 'timings.json').read_text() == 'first'
    assert os.listdir(str(tmp_path)) == ['net_profile']
    with files.whole_folder(str(folder)) as new:
        os.makedirs(os.path.join(new, 'plugins', 'profile'))
    assert os.listdir(str(tmp_path)) == ['net_profile'] and os.listdir(str(folder)) == ['plugins']


def test_the_next_process_removes_a_folder_that_a_killed_one_left(tmp_path):
    left = tmp_path / ('net_profile' + files.PART)
    left.mkdir()
    (left / 'half').write_text('')
    with files.whole_folder(str(tmp_path / 'net_profile')) as new:
        assert os.listdir(new) == []
    assert os.listdir(str(tmp_path)) == ['net_profile']


def test_a_starting_run_removes_the_unfinished_files_of_a_killed_one(tmp_path):
    (tmp_path / 'checkpoint.k2j.part' / 'checkpoint').mkdir(parents=True)
    (tmp_path / 'settings.json.part').write_text('{"se')
    open_run(str(tmp_path), {}).close()
    assert os.listdir(str(tmp_path)) == ['settings.json']


def test_json_is_read_as_it_was_written(tmp_path):
    path = tmp_path / 'settings.json'
    content = dict(rho=0.1 + 0.2, seeds=[0, 1], none=None, name='é', nested=dict(b=1, a=[2.5]))
    files.write_json(str(path), content)
    assert files.read_json(str(path)) == content
    path.write_text('{"rho"')
    with pytest.raises(UserError, match='^run: cannot read .*settings.json'):
        files.read_json(str(path), 'run: ')


def test_names_come_back_from_a_file_of_lines():
    names = ['a b', 'acer\u2028palmatum', 'bell\x07', 'two\r\nlines', 'café', '苹果']
    lines = ''.join(files.printable(name) + '\n' for name in names)
    assert lines.splitlines() == files.names_in(lines.encode()) == [
        'a b', 'acer\\u2028palmatum', 'bell\\x07', 'two\\r\\nlines', 'café', '苹果']
    assert files.names_in('\ufeffone\r\ntwo\x85three\r\n'.encode()) == ['one', 'two\x85three']


def test_who_asks_for_a_folder_that_another_one_has_alone_waits(tmp_path):
    order, folder, asked = [], str(tmp_path / 'new' / 'folder'), threading.Event()

    def ask():
        with redirect_stdout(io.StringIO()) as output:
            output.write = lambda text: asked.set()
            with files.alone_in(folder, 'waiting'):
                order.append('second')
    thread = threading.Thread(target=ask)
    with files.alone_in(folder, 'waiting'):
        thread.start()
        assert asked.wait(60)
        order.append('first')
    thread.join()
    assert order == ['first', 'second']
