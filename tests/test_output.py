"""Tests that a script whose output nobody takes any more runs to its end."""

import os
import pty
import subprocess
import sys

import pytest

from cached_runs import SIZE, network
from elastic.compat import keras_stack
from elastic.runs.folder import read_run
from small_runs import ROOT

# A script that prints 100 lines to each stream, more than buffers hold, then writes a file.
LONG = '''
import sys
from elastic import command_line
def main(argv):
    for number in range(100):
        print('line', number, 'x' * 1000)
        print('error', number, 'x' * 1000, file=sys.stderr)
    with open(argv[0], 'w') as file:
        file.write('done')
        file.flush()
    import os
    os.write(1, b'C++ to 1')
    os.write(2, b'C++ to 2')
    return 3
command_line.run(main, sys.argv[1:])
'''


def shell(command, *arguments):
    """Runs a bash command, in which "$@" is Python with these arguments; returns the child."""
    return subprocess.run(['bash', '-c', 'set -o pipefail; ' + command, 'bash', sys.executable]
                          + list(arguments), cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)


@pytest.mark.parametrize('command, lines', [
    ('"$@" | head -n 1', 1), ('"$@" 2>&1 | head -n 1', 1), ('"$@" >&-', 0), ('"$@" 2>&-', 100),
    ('"$@" <&- >&- 2>&-', 0), ('"$@" 2> /dev/full', 100), ('"$@" > /dev/full 2>&1', 0)])
def test_a_script_ends_with_its_own_status_and_without_a_traceback(tmp_path, command, lines):
    path = tmp_path / 'file'
    child = shell(command, '-c', LONG, str(path))
    assert child.returncode == 3
    assert path.read_text() == 'done'  # and nothing that was meant for a stream
    assert child.stdout.count('\n') == lines
    assert 'Traceback' not in child.stderr and 'Exception ignored' not in child.stderr


def test_a_full_disk_under_the_output_is_named_once(tmp_path):
    child = shell('"$@" > /dev/full', '-c', LONG, str(tmp_path / 'file'))
    assert child.returncode == 3 and child.stderr.count('warning: ') == 1
    assert 'warning: no more output, as it cannot be written: No space left' in child.stderr


def test_a_closed_terminal_does_not_end_a_script(tmp_path):
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, '-c', LONG, str(tmp_path / 'file')], cwd=ROOT,
                             stdout=theirs, stderr=theirs)  # no SIGHUP: it does not control it
    os.close(theirs)
    os.read(ours, 100)
    os.close(ours)
    assert child.wait() == 3 and (tmp_path / 'file').read_text() == 'done'


@pytest.mark.thorough
def test_training_ends_with_its_summary(tmp_path):
    path = str(tmp_path / keras_stack.MODEL_FILE)
    network().save(path)
    child = shell(
        '"$@" <&- 2>&- | head -n 1', 'main.py', '--model_name', path, '--bn_statistics', 'frozen',
        '--input_size', str(SIZE), '--batch_size', '8', '--dataset_name', 'digits',
        '--train_images', '40', '--validation_steps', '1', '--train_type', 'full_training',
        '--num_epochs', '2', '--logs_dir', str(tmp_path), '--run_name', 'run', '--save_model')
    assert child.returncode == 0 and child.stdout.count('\n') == 1
    assert read_run(str(tmp_path / 'run')).summary['epochs'] == 2
