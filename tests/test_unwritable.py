"""Tests that places that cannot be written are refused in one line, before anything heavy."""

import errno
import os

import pytest

from elastic import command_line, errors, files
from elastic.errors import UserError
from small_runs import script

MAIN = ['main.py', '--model_name', 'mobilenetv2', '--dataset_name', 'digits', '--weights', 'none']
LONG = 'x' * 300


@pytest.mark.parametrize('arguments, words', [
    (MAIN + ['--logs_dir', '{0}/file'], 'Not a directory'),
    (MAIN + ['--logs_dir', '{0}', '--run_name', 'a/' + LONG + '/b'], 'File name too long'),
    (['profiler.py', '--dataset_name', 'digits', '--logs_dir', '{0}/file'], 'Not a directory'),
    (['plot.py', 'curves', 'run', '--output', '{0}/file/a'], 'Not a directory'),
    (['scripts/predict.py', '{0}', '{0}/file', '--csv', '{0}'], 'Is a directory'),
    (['scripts/evaluate.py', '{0}', '--output', '{0}/loop/a'], 'Too many levels')])
def test_a_place_that_cannot_be_written_is_refused_without_tensorflow(tmp_path, arguments, words):
    (tmp_path / 'file').write_text('')
    (tmp_path / 'loop').symlink_to('loop')
    (tmp_path / 'tensorflow.py').write_text('raise SystemExit("tensorflow was imported")')
    before = sorted(os.listdir(str(tmp_path)))
    code, out, err = script(*[text.format(tmp_path) for text in arguments],
                            PYTHONPATH=str(tmp_path))
    assert code == 2 and err.startswith("error: cannot write to '") and words in err
    assert err.count('\n') == 1 and '; give another --' in err and out == ''
    assert sorted(os.listdir(str(tmp_path))) == before


@pytest.mark.parametrize('path, folder, words', [
    ('file/a/b', True, 'Not a directory'), ('loop/a', True, 'Too many levels of symbolic links'),
    (LONG, False, 'File name too long'), ('.', False, 'Is a directory'),
    ('/proc/self/a', True, "'/proc/self/a'")])  # not even by root
def test_a_place_that_cannot_be_written_is_named(tmp_path, path, folder, words):
    (tmp_path / 'file').write_text('')
    (tmp_path / 'loop').symlink_to('loop')
    with pytest.raises(UserError, match='^cannot write to .*; give another --flag$') as refused:
        files.check_writable(os.path.join(str(tmp_path), path), '--flag', folder)
    assert words in str(refused.value)


def test_a_place_that_can_be_written_passes_and_stays_empty(tmp_path):
    files.check_writable(str(tmp_path / 'a' / 'b'), '--logs_dir', folder=True)
    files.check_writable(str(tmp_path / 'a' / 'b.csv'), '--csv')
    longest = 'x' * os.statvfs(str(tmp_path)).f_namemax
    files.check_writable(str(tmp_path / longest), '--run_name', folder=True)
    with pytest.raises(UserError, match='File name too long'):
        files.check_writable(str(tmp_path / longest), '--csv')  # longer while it is written
    assert os.listdir(str(tmp_path)) == []


@pytest.mark.parametrize('number, words', [
    (errno.ENAMETOOLONG, ''), (errno.ENOTDIR, ''), (errno.ELOOP, ''), (errno.EINVAL, ''),
    (errno.ENODEV, 'once the disk can be written again'), (errno.ENXIO, 'resume'),
    (errno.ESTALE, 'resume'), (errno.ENOTCONN, 'resume'), (errno.EROFS, 'resume'),
    (errno.EMFILE, 'ulimit -n')])
def test_an_error_of_the_file_system_is_one_line(number, words, capsys):
    def fails(argv):
        raise OSError(number, os.strerror(number), 'logs/run/epochs.csv')
    with pytest.raises(SystemExit) as stop:
        command_line.run(fails)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and words in error
    assert error.startswith("error: {}: 'logs/run/epochs.csv'".format(os.strerror(number)))


def test_a_write_that_fails_names_its_file(tmp_path):
    with pytest.raises(OSError) as failed, files.whole(str(tmp_path / 'file')):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert failed.value.filename == str(tmp_path / 'file')


def test_an_error_without_a_file_keeps_its_traceback():
    for bug in (OSError('telescope not mounted'), OSError(errno.EINVAL, 'Invalid argument')):
        assert errors.in_one_line(bug) is None
