"""Tests that flags are read from files, and that each run keeps such a file."""

import os

import pytest

import main
import profiler
from elastic import command_line
from elastic.command_line import with_files
from elastic.flags import flag_lines
from image_folders import write_photos
from small_runs import run_settings_of


def written(tmp_path, content):
    """Returns @FILE of a file with this content, bytes or str."""
    path = tmp_path / 'flags.txt'
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return '@{}'.format(path)


# --- reading

@pytest.mark.parametrize('content, words', [
    ('--rho 0.5\n--seed=3\n', ['--rho', '0.5', '--seed=3']),
    ("# don't\n\n  # two\n--save_model\n", ['--save_model']),
    ('--dataset_name "folder:my photos/#1"\n--run_name it\\\'s', [
        '--dataset_name', 'folder:my photos/#1', '--run_name', "it's"]),
    ('--dataset_name folder:a#b', ['--dataset_name', 'folder:a#b']),
    ('--model_name @mine.keras', ['--model_name', '@mine.keras']),
    ('\ufeff--rho 0.5\r\n--seed 3\r\n', ['--rho', '0.5', '--seed', '3']),
    ('', [])])
def test_each_line_is_read_as_a_shell_reads_it(tmp_path, content, words):
    assert with_files(['--a', written(tmp_path, content), '--b']) == ['--a'] + words + ['--b']


def test_a_later_flag_overrides_an_earlier_one(tmp_path):
    file = written(tmp_path, '--rho 0.5\n--seed 3\n')
    args = main.parse_arguments(['--seed', '1', file, '--rho', '0.7'])
    assert (args.seed, args.rho) == (3, 0.7)
    assert profiler.parse_arguments([written(tmp_path, '--alpha 0.5\n--plot')]).alpha == 0.5


def test_paths_that_begin_with_the_sign_can_be_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / '@x').write_text('--rho 0.5')
    assert main.parse_arguments(['@@x', '--logs_dir', './@x']).logs_dir == './@x'
    assert main.parse_arguments(['--logs_dir=@x']).logs_dir == '@x'


def refused(arguments, capsys):
    """Returns the last line that main.py prints as it refuses its arguments with status 2."""
    with pytest.raises(SystemExit) as stop:
        command_line.run(main.main, arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ''
    usage, line = err.splitlines() if err.startswith('usage: ') else ('', err.rstrip('\n'))
    assert usage.count('\n') == line.count('\n') == 0
    return line


@pytest.mark.parametrize('content, words', [
    (b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR', 'is not a file of flags'),
    (b'--rho 0.5\n' * 10 ** 6, 'at most 1,000,000 bytes'),
    ('--seed 3\n--run_name "half', "line 2: No closing quotation"),
    ('@flags.txt', 'unrecognized arguments: @'), ('--batch_size 0', 'argument --batch_size')])
def test_a_bad_file_is_refused_in_one_line(content, words, tmp_path, capsys):
    line = refused([written(tmp_path, content), '--logs_dir', str(tmp_path)], capsys)
    assert words in line and 'error: ' in line
    assert os.listdir(str(tmp_path)) == ['flags.txt']


@pytest.mark.parametrize('name, words', [
    ('nowhere.txt', 'No such file or directory'), ('', 'Is a directory'), ('a/b', 'No such file'),
    ('/dev/zero', 'is not a file of flags')])
def test_a_file_that_cannot_be_read_is_refused(name, words, tmp_path, capsys):
    line = refused(['@' + os.path.join(str(tmp_path), name)], capsys)
    assert words in line and str(name) in line


def test_flags_may_come_from_a_pipe():
    read, write = os.pipe()
    with os.fdopen(write, 'w') as pipe:
        pipe.write('--rho 0.5\n')
    assert with_files(['@/dev/fd/{}'.format(read), '--seed', '1']) == [
        '--rho', '0.5', '--seed', '1']
    os.close(read)


# --- the file of a run

@pytest.mark.parametrize('flags', [
    [], ['--train_type', 'full_training', '--deterministic', '--num_classes', '10'],
    ['--train_type', 'elastic_training_weight_magnitude', '--closed_loop', '0', '--seed', '5'],
    ['--prefix_cache', 'on', '--weights', 'none', '--bn_statistics', 'frozen', '--cache_gb', '2',
     '--class_weight', 'balanced', '--validation_share', '0.1', '--keep', 'best'],
    ['--train_type', 'prunetrain', '--prune_threshold', '1e-7', '--learning_rate', '1.5e-05'],
    ['--run_name', "a b/it's", '--export', 'litert_int8', '--checkpoint_minutes', '2.5'],
    ['--skip_bad_images', '--trust_model', '--save_txt', '--steps_per_epoch', '7', '--restart'],
    ['--dataset_name', 'tfds:eurosat/rgb:2.0.0', '--data_dir', '/some/where', '--clip_norm', '1'],
    ['--dataset_name', 'digits', '--logs_dir=-logs', '--inter_op_threads', '2']])
def test_the_flags_of_a_run_give_the_same_settings(flags, tmp_path):
    settings = run_settings_of(flags)
    lines = flag_lines(settings)
    again = run_settings_of([written(tmp_path, '\n'.join(lines))])
    without = settings.records._replace(restart=False)
    assert again == settings._replace(records=without) and flag_lines(again) == lines
    assert not any('restart' in line for line in lines)


def test_flags_that_neither_decide_nor_were_given_are_left_out():
    flags = ['--train_type', 'full_training', '--dataset_name', 'digits']
    lines = flag_lines(run_settings_of(flags))
    names = {line.split()[0] for line in lines}
    assert {'--train_type', '--learning_rate', '--seed', '--run_name', '--dataset_name'} <= names
    assert not names & {'--rho', '--prune_threshold', '--logs_dir', '--checkpoint_minutes'}


def test_names_that_are_not_utf_8_and_relative_paths_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = os.fsdecode(b'my \xff photos')
    write_photos(tmp_path / folder)
    settings = run_settings_of(['--dataset_name', 'folder:' + folder, '--batch_size', '2'])
    lines = flag_lines(settings)
    assert run_settings_of([written(tmp_path, os.fsencode('\n'.join(lines)))]) == settings
    assert "--dataset_name 'folder:{}'".format(folder) in lines
