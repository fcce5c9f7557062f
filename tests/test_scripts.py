"""Tests that shell scripts parse, and that they make, keep or refuse virtual environments."""

import glob
import os
import shutil
import subprocess
import sys
import time

import pytest

from small_runs import ROOT

STACK = ('today' if sys.version_info >= (3, 10) else
         'paper' if sys.version_info >= (3, 7) else 'tx2')
VENV = {'today': '.venv', 'paper': '.venv-paper', 'tx2': '.venv-tx2'}[STACK]
PYTHON = 'python{}.{}'.format(*sys.version_info)
TOOLS = 'basename bash cat dirname env head ls mkdir readlink rm tail uname'.split()
ENSURE_VENV = ['bash', '-c', 'set -euo pipefail; source scripts/_venv.sh; '
               'ensure_venv {} "$@"; echo "$PYTHON"'.format(STACK), 'bash']


def run(*command, **options):
    """Returns (status, stdout, stderr) of a command."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=600, **options)
    return done.returncode, done.stdout, done.stderr


def test_every_script_parses():
    scripts = glob.glob(os.path.join(ROOT, 'scripts', '*.sh'))
    for script in scripts + [os.path.join(ROOT, '.ci', 'run'),
                             os.path.join(ROOT, 'tests', 'boards', 'emulate_pi.sh')]:
        assert run('bash', '-n', script) == (0, '', '')
        assert script.endswith('_venv.sh') or os.access(script, os.X_OK), script


def write_script(path, *lines):
    path.write_text('\n'.join(('#!/bin/sh',) + lines) + '\n')
    path.chmod(0o755)


class Machine:
    """A machine with the scripts alone, and programs that a test can replace."""

    def __init__(self, folder):
        self.repository, self.tools = folder / 'repository', folder / 'bin'
        shutil.copytree(os.path.join(ROOT, 'scripts'), str(self.repository / 'scripts'),
                        symlinks=True)
        self.requires(**{'requirements': '# nothing', 'requirements-dev': '# nothing'})
        self.venv = self.repository / VENV
        self.tools.mkdir()
        for tool in TOOLS:
            (self.tools / tool).symlink_to(shutil.which(tool))
        self.put('sync', 'exit 0')
        self.environment = {'PATH': str(self.tools), 'HOME': str(folder), 'PIP_NO_INDEX': '1',
                            'PIP_CONFIG_FILE': os.devnull, 'LANG': 'C.UTF-8'}

    def put(self, name, *lines):
        """Puts a program on the PATH."""
        (self.tools / name).exists() and (self.tools / name).unlink()
        write_script(self.tools / name, *lines)

    def requires(self, **files):
        for name, text in files.items():
            (self.repository / '{}.txt'.format(name)).write_text(text + '\n')

    def run(self, script, *arguments, **variables):
        """Returns (status, stdout, stderr) of one of the scripts, called from another folder."""
        return run(self.repository / 'scripts' / script, *arguments, cwd='/',
                   env=dict(self.environment, **variables))

    def ensure_venv(self, *more):
        return run(*(ENSURE_VENV + list(more)), cwd=str(self.repository), env=self.environment)


@pytest.fixture
def bare(tmp_path):
    """Returns a Machine without Python."""
    return Machine(tmp_path)


@pytest.fixture
def machine(bare):
    """Returns a Machine with this Python on the PATH, after a shim that fails, as in pyenv."""
    shims = bare.repository.parent / 'shims'
    shims.mkdir()
    write_script(shims / PYTHON, 'echo "{}: command not found" >&2'.format(PYTHON), 'exit 127')
    bare.put(PYTHON, 'exec "{}" "$@"'.format(sys.executable))
    bare.environment['PATH'] = '{}:{}'.format(shims, bare.tools)
    return bare


@pytest.mark.parametrize('arguments, status, text', [
    (['--help'], 0, 'usage: run_tests.sh'),
    (['--stack=papr'], 2, "unknown stack 'papr'; allowed: today, paper, tx2"),
    (['tests/test_plot.py', '--stack'], 2, "unknown stack ''")])
def test_help_and_unknown_stack_make_nothing(bare, arguments, status, text):
    link = bare.repository.parent / 'tests'
    link.symlink_to(bare.repository / 'scripts' / 'run_tests.sh')
    before = sorted(os.listdir(str(bare.repository)))
    result = run('bash', link, *arguments, cwd='/', env=bare.environment)
    assert result[0] == status and text in result[1] + result[2]
    assert sorted(os.listdir(str(bare.repository))) == before


@pytest.mark.parametrize('script', ['install.sh', 'run_figure15.sh'])
@pytest.mark.parametrize('version', ['', '3.9.2', '3.6.9'])
def test_without_a_python_that_fits_one_line_says_what_to_install(bare, version, script):
    """Also covers a Python without its venv module, as on a new Debian or Jetson."""
    bare.put('python3', 'exit 127' if not version else
             '[ "$1" = --version ] && echo "Python {}"'.format(version))
    stack, wanted = ('tx2', '3.6') if '3.6' in version and 'figure' in script else (
        'today', '3.11 or 3.12 or 3.13 or 3.10')
    status, _, errors = bare.run(script)
    assert status == 2 and errors.count('\n') == 1 and errors.startswith(
        'error: no Python found for the {} stack: put {}, with its venv module, on the PATH or '
        'under pyenv (apt install python{}-venv, '.format(stack, wanted, wanted.split()[0]))
    assert not list(bare.repository.glob('.venv*'))


@pytest.mark.thorough
def test_an_environment_is_made_once_and_follows_requirements(machine):
    status, output, errors = machine.run('install.sh', '--stack', STACK)
    assert status == 0 and output == 'To use it: . {}/bin/activate\n'.format(VENV), errors
    assert errors.startswith('Installing in {}, with Python 3.'.format(machine.venv))
    status, output, errors = machine.ensure_venv()
    assert (status, output, errors) == (0, '{}/bin/python\n'.format(machine.venv), '')
    assert run(output.strip(), '-c', 'import sys; assert sys.prefix != sys.base_prefix')[0] == 0

    status, _, errors = machine.ensure_venv('dev')
    assert status == 0 and errors.startswith('Installing in ')
    (machine.venv / 'kept').write_text('')
    assert machine.ensure_venv()[::2] == machine.ensure_venv('dev')[::2] == (0, '')
    machine.requires(**{'requirements-dev': 'no-such-package-here'})
    assert machine.ensure_venv()[::2] == (0, '')  # what tests lack stops no other command
    for _ in range(2):  # tries a failed update again
        status, _, errors = machine.ensure_venv('dev')
        assert status == 1 and 'no matching distribution found for no-such-package-here' in (
            errors.lower())
    machine.requires(requirements='#')  # the last line became shorter
    assert 'Installing' in machine.ensure_venv()[2]
    assert (machine.venv / 'kept').exists()  # updates and failures lose nothing


@pytest.mark.thorough
def test_an_interrupted_installation_is_made_again(machine):
    """A kill may leave half a package; a power cut empty files that pip counts as installed."""
    machine.put('sync', 'kill -KILL $PPID')  # before anything counts as installed
    assert machine.ensure_venv()[0] == -9
    pip, = machine.venv.glob('lib/python*/site-packages/pip/__init__.py')
    pip.write_bytes(b'')
    machine.put('sync', 'exit 0')
    assert machine.ensure_venv()[0] == 0
    assert pip.stat().st_size and machine.ensure_venv()[::2] == (0, '')


@pytest.mark.thorough
def test_a_second_script_waits_for_the_first(machine):
    def start():
        return subprocess.Popen(ENSURE_VENV, cwd=str(machine.repository), env=machine.environment,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                universal_newlines=True)
    go, syncs = machine.tools.parent / 'go', machine.tools.parent / 'syncs'
    os.mkfifo(str(go))
    machine.put('sync', ': >"{}"'.format(syncs), 'read -r line <"{}"'.format(go))
    first = start()
    while not syncs.exists():  # it has installed everything
        assert first.poll() is None
        time.sleep(0.01)
    second = start()
    assert second.stderr.readline().startswith(
        'Waiting for the script that makes {}'.format(machine.venv))
    time.sleep(2)  # in which a script that does not wait removes what the first has made
    assert machine.venv.joinpath('pyvenv.cfg').exists() and second.poll() is None
    go.write_text('\n')
    first.communicate()
    assert 'Installing' not in second.communicate()[1]
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.parametrize('installed', [None, '/elsewhere/.venv on x86_64\n'])
def test_a_folder_that_is_no_environment_of_this_place_is_refused_untouched(machine, installed):
    """Also covers one that was copied from another path or processor; its Python may run here."""
    machine.venv.mkdir()
    (machine.venv / 'mine').write_text('')
    if installed:
        run(sys.executable, '-m', 'venv', '--without-pip', str(machine.venv))
        (machine.venv / 'installed').write_text(installed)
    status, _, errors = machine.ensure_venv()
    assert (status, errors) == (2, 'error: {} was made elsewhere, or by another Python; remove it '
                                'first\n'.format(machine.venv))
    assert (machine.venv / 'mine').exists()


@pytest.mark.skipif(STACK != 'tx2', reason="a Jetson TX2's TensorFlow is for Python 3.6 alone")
def test_on_a_jetson_nvidias_tensorflow_is_used_or_asked_for(machine):
    machine.put('uname', 'echo aarch64')
    status, _, errors = machine.ensure_venv()
    assert status == 2 and "No module named 'tensorflow'" in errors and not machine.venv.exists()
    package = machine.repository.parent / 'site' / 'tensorflow'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text('')
    machine.environment['PYTHONPATH'] = str(package.parent)
    status, _, errors = machine.ensure_venv()
    assert status == 0, errors
    assert 'include-system-site-packages = true' in (machine.venv / 'pyvenv.cfg').read_text()


# ---------------------------------------------------------------- other scripts

def test_a_device_is_checked_before_anything_is_installed(bare):
    status, output, errors = bare.run('check_device.sh')
    assert (status, output) == (1, '') and errors.startswith('error: no Python 3.6 or later found')
    shutil.copytree(os.path.join(ROOT, 'elastic'), str(bare.repository / 'elastic'))
    bare.put('python3', 'exec "{}" -S "$@"'.format(sys.executable))
    before = sorted(os.listdir(str(bare.repository)))
    status, output, errors = bare.run('check_device.sh')
    lines = output.splitlines()
    things = [line.split('  ')[0] for line in lines if not line.startswith(' ')]
    assert errors == '' and things == [
        'processor', 'Python', 'TensorFlow', 'GPU', 'memory', 'disk', 'heat']
    assert {line[12:14] for line in lines} <= {'ok', '!!', '--', '  '}  # a column
    assert status == ('  !!  ' in output)
    status, output, _ = bare.run('check_device.sh', '--gpu')
    assert status == 1 and 'GPU         !!  seen by no TensorFlow' in output
    status, output, errors = bare.run('check_device.sh', '--gpus')
    assert (status, output) == (2, '') and 'unrecognized arguments: --gpus' in errors
    assert sorted(os.listdir(str(bare.repository))) == before


def test_a_figure_script_checks_its_arguments_before_anything_is_installed(machine):
    shutil.copytree(os.path.join(ROOT, 'elastic'), str(machine.repository / 'elastic'))
    status, output, _ = machine.run('run_figure17ac_ego.sh', '--help')
    assert status == 0 and 'usage: run_figure17ac_ego.sh [--rehearse]' in output
    for script, variables in (('run_figure17ac_ego.sh', {}),
                              ('run_figure_cache.sh', {'PYTHON': sys.executable})):
        status, _, errors = machine.run(script, '--only', 'vgg16', **variables)
        assert status == 2 and "--only 'vgg16' fits no run of this figure" in errors
    assert not machine.venv.exists()


def test_an_unsuitable_given_python_is_refused_in_one_line(bare, tmp_path):
    old, empty = tmp_path / 'python3.5', tmp_path / 'empty'
    write_script(old, 'case "$2" in *version_info*) exit 1 ;; esac')
    for python in (str(old), 'no/such/python'):
        status, _, errors = bare.run('run_figure17ac_ego.sh', PYTHON=python)
        assert (status, errors) == (
            2, 'error: PYTHON={} does not run, or is older than 3.6\n'.format(python))

    run(sys.executable, '-m', 'venv', '--without-pip', empty)
    python = empty / 'bin' / 'python'
    script = os.path.join(ROOT, 'scripts', 'run_figure17ac_ego.sh')
    status, _, errors = run(script, '--dry_run', env=dict(bare.environment, PYTHON=str(python)))
    assert status == 2
    assert errors == ('error: {} lacks numpy and tensorflow and matplotlib: install what '
                      'requirements.txt names first\n'.format(python))
