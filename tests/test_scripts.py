"""Tests that shell scripts parse, and that they make, keep or refuse virtual environments."""

import os
import shutil
import subprocess
import sys
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPTS = os.path.join(ROOT, 'scripts')
STACK = ('today' if sys.version_info >= (3, 10) else
         'paper' if sys.version_info >= (3, 7) else 'tx2')
VENV = {'today': '.venv', 'paper': '.venv-paper', 'tx2': '.venv-tx2'}[STACK]
PYTHON = 'python{}.{}'.format(*sys.version_info)
TOOLS = 'basename bash cat cksum dirname ls mkdir mv readlink rm rmdir tail env uname'.split()


needs_a_stack = pytest.mark.skipif(sys.version_info[:2] == (3, 9),
                                   reason='no stack is made with Python 3.9')


def run(*command, **options):
    """Returns (status, stdout, stderr) of a command."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=600, **options)
    return done.returncode, done.stdout, done.stderr


def test_every_script_parses():
    scripts = [os.path.join(SCRIPTS, name) for name in os.listdir(SCRIPTS) if name.endswith('.sh')]
    for script in scripts + [os.path.join(ROOT, '.ci', 'run')]:
        assert run('bash', '-n', script) == (0, '', '')
        assert os.path.basename(script).startswith('_') or os.access(script, os.X_OK), script


def write_script(path, *lines):
    path.write_text('\n'.join(('#!/bin/sh',) + lines) + '\n')
    path.chmod(0o755)


@pytest.fixture
def bare(tmp_path):
    """Returns (folder, variables) of a repository of scripts alone, with no Python on the PATH."""
    repository, tools = tmp_path / 'repository', tmp_path / 'bin'
    shutil.copytree(SCRIPTS, str(repository / 'scripts'))
    for name in ('requirements.txt', 'requirements-dev.txt'):
        (repository / name).write_text('# nothing\n')
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    write_script(tools / 'sync', 'exec "{}" "$@"'.format(shutil.which('sync')))
    return repository, {'PATH': str(tools), 'HOME': str(tmp_path), 'PIP_NO_INDEX': '1',
                        'PIP_CONFIG_FILE': os.devnull, 'LANG': 'C.UTF-8'}


@pytest.fixture
def equipped(bare):
    """Adds this interpreter to the PATH, after a shim that fails, as in pyenv."""
    repository, environment = bare
    tools, shims = repository.parent / 'bin', repository.parent / 'shims'
    shims.mkdir()
    write_script(tools / PYTHON, 'exec "{}" "$@"'.format(sys.executable))
    write_script(shims / PYTHON, 'echo "{}: command not found" >&2'.format(PYTHON), 'exit 127')
    return repository, dict(environment, PATH='{}:{}'.format(shims, tools))


def processor(environment, machine):
    """Makes `uname -m` print this machine."""
    uname = os.path.join(environment['PATH'].split(':')[-1], 'uname')
    os.remove(uname)
    with open(uname, 'w') as script:
        script.write('#!/bin/sh\necho {}\n'.format(machine))
    os.chmod(uname, 0o755)


ENSURE_VENV = ['bash', '-c', 'set -euo pipefail; source scripts/_venv.sh; '
               'ensure_venv {} "$@"; echo "$PYTHON"'.format(STACK), 'bash']


def ensure_venv(repository, environment, *more):
    return run(*(ENSURE_VENV + list(more)), cwd=str(repository), env=environment)


@pytest.mark.parametrize('arguments, status, text', [
    (['--help'], 0, 'usage: run_tests.sh'),
    (['--stack', 'papr'], 2, "unknown stack 'papr'; allowed: today, paper, tx2"),
    (['--stack=papr'], 2, "unknown stack 'papr'"),
    (['tests/test_plot.py', '--stack'], 2, "unknown stack ''"),
])
def test_help_and_unknown_stack_make_nothing(bare, arguments, status, text):
    repository, environment = bare
    link = repository.parent / 'tests'
    link.symlink_to(repository / 'scripts' / 'run_tests.sh')
    before = sorted(os.listdir(str(repository)))
    result = run('bash', link, *arguments, cwd='/', env=environment)
    assert result[0] == status
    assert text in result[1] + result[2]
    assert sorted(os.listdir(str(repository))) == before


def test_a_missing_python_is_named(bare):
    repository, environment = bare
    write_script(repository.parent / 'bin' / PYTHON, 'exit 127')
    status, _, errors = ensure_venv(repository, environment)
    assert status == 2
    assert 'no Python found for the {} stack'.format(STACK) in errors
    assert {'today': '3.11 or 3.12 or 3.13 or 3.10', 'paper': '3.8', 'tx2': '3.6'}[STACK] in errors
    assert errors.count('\n') == 1
    assert not (repository / VENV).exists()


@needs_a_stack
@pytest.mark.thorough
def test_an_environment_is_made_once_and_follows_requirements(equipped):
    repository, environment = equipped
    venv = repository / VENV

    status, output, errors = ensure_venv(repository, environment)
    assert status == 0, errors
    assert output.strip() == str(venv / 'bin' / 'python')
    assert errors.startswith('Making {} with Python 3.'.format(VENV))
    assert not (venv / 'making').exists()
    assert run(output.strip(), '-c', 'import sys; assert sys.prefix != sys.base_prefix')[0] == 0
    assert ensure_venv(repository, environment) == (0, output, '')

    (repository / 'requirements.txt').write_text('no-such-package-here\n')
    status, _, errors = ensure_venv(repository, environment)
    assert status == 1
    assert 'Bringing {} up to date'.format(VENV) in errors
    assert 'No matching distribution found for no-such-package-here' in errors
    assert not (venv / 'making').exists()  # else it would be gone after a restart
    assert ensure_venv(repository, environment)[0] == 1  # tries a failed update again


@needs_a_stack
@pytest.mark.thorough
def test_what_tests_need_is_installed_beside_the_rest_and_stays_up_to_date(equipped):
    repository, environment = equipped
    install = str(repository / 'scripts' / 'install.sh')
    status, output, errors = run(install, '--stack', STACK, env=environment)
    assert status == 0 and output == 'To use it: . {}/bin/activate\n'.format(VENV), errors
    assert 'installing requirements.txt' in errors
    status, _, errors = ensure_venv(repository, environment, 'dev')
    assert status == 0 and 'up to date with requirements-dev.txt' in errors
    for more in ([], ['dev']):
        assert ensure_venv(repository, environment, *more)[::2] == (0, '')
    (repository / 'requirements-dev.txt').write_text('no-such-package-here\n')
    assert ensure_venv(repository, environment)[::2] == (0, '')
    assert ensure_venv(repository, environment, 'dev')[0] == 1
    (repository / 'requirements.txt').write_text('# newer\n')
    assert ensure_venv(repository, environment)[0] == 0  # what tests lack stops no other command
    assert ensure_venv(repository, environment, 'dev')[0] == 1
    assert run(install, '--stack', 'papr', env=environment)[0] == 2
    assert run(install, 'tests', env=environment)[0] == 2


@needs_a_stack
@pytest.mark.thorough
def test_only_an_unfinished_environment_is_made_again(equipped):
    repository, environment = equipped
    venv = repository / VENV
    venv.mkdir()
    (venv / 'mine').write_text('')
    status, _, errors = ensure_venv(repository, environment)
    assert (status, (venv / 'mine').exists()) == (2, True)
    assert 'not a virtual environment' in errors

    (venv / 'making').write_text(str(os.getpid()))  # a number that another process has by now
    status, _, errors = ensure_venv(repository, environment)
    assert (status, (venv / 'mine').exists()) == (0, False), errors
    assert 'was left unfinished: making it again' in errors


def cut_power(repository):
    """Makes `sync` kill the script that calls it, as if the power failed before it returns."""
    write_script(repository.parent / 'bin' / 'sync', 'kill -KILL $PPID')


def restore_power(repository):
    write_script(repository.parent / 'bin' / 'sync', 'exec "{}" "$@"'.format(shutil.which('sync')))


@needs_a_stack
@pytest.mark.thorough
def test_after_a_power_cut_only_what_reached_the_disk_counts_as_installed(equipped):
    repository, environment = equipped
    venv = repository / VENV
    cut_power(repository)
    assert ensure_venv(repository, environment)[0] == -9
    pip, = venv.glob('lib/python*/site-packages/pip/__init__.py')
    pip.write_bytes(b'')  # as a journal leaves files whose content was not written
    restore_power(repository)
    status, _, errors = ensure_venv(repository, environment)
    assert status == 0 and 'was left unfinished: making it again' in errors, errors
    assert pip.stat().st_size and (venv / 'requirements.cksum').exists()

    (repository / 'requirements.txt').write_text('# newer\n')
    cut_power(repository)
    assert ensure_venv(repository, environment)[0] == -9  # while it is updated
    restore_power(repository)
    (venv / 'kept').write_text('')
    status, _, errors = ensure_venv(repository, environment)  # as after a kill: nothing is lost
    assert status == 0 and 'up to date' in errors and (venv / 'kept').exists(), errors

    (repository / 'requirements.txt').write_text('# newest\n')
    cut_power(repository)
    assert ensure_venv(repository, environment)[0] == -9
    restore_power(repository)
    (venv / 'making').write_text('the boot_id before the power cut')
    status, _, errors = ensure_venv(repository, environment)
    assert status == 0 and 'making it again' in errors and not (venv / 'kept').exists(), errors


def started(repository, environment):
    """Starts a script; returns its process, whose outputs are text in pipes."""
    return subprocess.Popen(ENSURE_VENV, cwd=str(repository), env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


@needs_a_stack
@pytest.mark.thorough
def test_a_second_script_waits_for_the_first_even_if_that_is_killed(equipped):
    repository, environment = equipped
    syncs, go = repository.parent / 'syncs', repository.parent / 'go'
    os.mkfifo(str(go))
    write_script(repository.parent / 'bin' / 'sync', ': >"{}"'.format(syncs),
                 'read -r line <"{}"'.format(go))
    first = started(repository, environment)
    while not syncs.exists():  # it has installed everything
        assert first.poll() is None
        time.sleep(0.01)
    second = started(repository, environment)
    waits = second.stderr.readline()
    assert waits.startswith('Waiting for process {}, which makes or updates {} '.format(
        first.pid, VENV)), waits
    first.kill()
    restore_power(repository)
    go.write_text('\n')
    _, errors = first.communicate()
    output, later = second.communicate()
    assert (first.returncode, second.returncode) == (-9, 0), errors + later
    assert output.strip() == str(repository / VENV / 'bin' / 'python')
    assert later.startswith('waited ') and later.count('\n') == 4, later
    assert 'making it again' in later
    assert ensure_venv(repository, environment) == (0, output, '')


@needs_a_stack
def test_where_files_cannot_be_locked_a_line_says_so(equipped, tmp_path):
    repository, environment = equipped
    (tmp_path / 'sitecustomize.py').write_text(
        'import errno, fcntl, os\n'
        'def flock(*_): raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))\n'
        'fcntl.flock = flock\n')
    (repository / VENV).mkdir()
    (repository / VENV / 'mine').write_text('')
    status, _, errors = ensure_venv(repository, dict(environment, PYTHONPATH=str(tmp_path)))
    assert status == 2 and errors.startswith(
        'warning: {} cannot be locked here (No locks available): start no second script'.format(
            VENV)), errors


@needs_a_stack
def test_a_figure_script_checks_its_arguments_before_anything_is_installed(equipped):
    repository, environment = equipped
    shutil.copytree(os.path.join(ROOT, 'elastic'), str(repository / 'elastic'))
    script = str(repository / 'scripts' / 'run_figure17ac_ego.sh')
    for folder in (repository, repository / 'scripts'):  # works from any folder
        status, _, errors = run(script, '--only', 'vgg16', cwd=str(folder), env=environment)
        assert status == 2 and "--only 'vgg16' fits no run of this figure" in errors
    status, output, _ = run(script, '--help', env=environment)
    assert status == 0 and 'usage: run_figure17ac_ego.sh [--rehearse]' in output
    for python, code, says in ((sys.executable, 2, "--only 'vgg16' fits no run"),
                               ('no/such/python', 2, 'PYTHON=no/such/python does not run')):
        status, _, errors = run(script, '--only', 'vgg16', env=dict(
            environment, PYTHON=python, PATH=os.environ['PATH']))
        assert status == code and says in errors
    assert not (repository / VENV).exists()


@pytest.mark.skipif(STACK != 'tx2', reason="a Jetson TX2's TensorFlow is for Python 3.6 alone")
def test_on_a_jetson_nvidias_tensorflow_is_used_or_asked_for(equipped):
    repository, environment = equipped
    processor(environment, 'aarch64')
    status, _, errors = ensure_venv(repository, environment)
    assert status == 2 and errors.count('\n') == 1
    assert 'has no TensorFlow, and for this board only NVIDIA builds one' in errors
    assert not (repository / VENV).exists()

    package = repository.parent / 'site' / 'tensorflow'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text('')
    environment['PYTHONPATH'] = str(package.parent)
    status, _, errors = ensure_venv(repository, environment)
    assert status == 0, errors
    assert 'include-system-site-packages = true' in (repository / VENV / 'pyvenv.cfg').read_text()


def elf_of_another_machine(path):
    """Writes the first bytes of a program for a processor that does not exist."""
    path.parent.mkdir(parents=True)
    path.write_bytes(b'\x7fELF\x02\x01\x01' + bytes(9) + b'\x02\x00\xff\xfe' + bytes(44))
    path.chmod(0o755)


@pytest.mark.parametrize('machine, says', [
    ('other', '{} was made on other, this is mine: making it again'),  # its Python may run here
    (None, 'the Python of {} does not run here: making it again')])
def test_an_environment_copied_from_another_machine_is_not_used(bare, machine, says):
    repository, environment = bare
    venv = repository / VENV
    elf_of_another_machine(venv / 'bin' / 'python')
    (venv / 'pyvenv.cfg').write_text('')
    if machine:
        (venv / 'machine').write_text(machine)
    (venv / 'mine').write_text('')
    processor(environment, 'mine')
    status, _, errors = ensure_venv(repository, environment)
    assert status == 2 and 'no Python found' in errors and (venv / 'mine').exists()

    # A Python that makes no environment; other tests show that it is made again with a real one.
    write_script(repository.parent / 'bin' / PYTHON,
                 'case "$2" in venv) exit 1 ;; *ensurepip*) echo "$0" ;; esac')
    status, _, errors = ensure_venv(repository, environment)
    assert errors.splitlines()[0] == says.format(VENV)
    assert status == 1 and ' -m venv ' in errors and not (venv / 'mine').exists()


@pytest.mark.parametrize('version, stack, wanted', [
    ('3.5.3', 'today', '3.11'), ('3.9.2', 'today', '3.11'), ('3.14.0', 'today', '3.11'),
    ('3.6.9', 'tx2', '3.6')])
def test_a_python_without_a_stack_is_refused_with_one_that_has(bare, version, stack, wanted):
    """Also covers a Python without its venv module, as on a new Jetson."""
    repository, environment = bare
    write_script(repository.parent / 'bin' / 'python3',
                 '[ "$1" = --version ] && echo "Python {}"'.format(version))
    status, _, errors = run(str(repository / 'scripts' / 'run_figure15.sh'), env=environment)
    assert status == 2 and errors.count('\n') == 1
    assert 'no Python found for the {} stack: put {}'.format(stack, wanted) in errors
    assert 'apt install python{}-venv'.format(wanted) in errors


def test_an_unsuitable_given_python_is_refused_in_one_line(bare, tmp_path):
    repository, environment = bare
    old, empty = tmp_path / 'python3.5', tmp_path / 'empty'
    write_script(old, 'case "$2" in *version_info*) exit 1 ;; esac')
    script = os.path.join(SCRIPTS, 'run_figure17ac_ego.sh')
    status, _, errors = run(script, env=dict(environment, PYTHON=str(old)))
    assert (status, errors) == (
        2, 'error: PYTHON={} is older than 3.6; give a newer one\n'.format(old))

    run(sys.executable, '-m', 'venv', '--without-pip', empty)
    python = empty / 'bin' / 'python'
    status, _, errors = run(script, '--dry_run', env=dict(environment, PYTHON=str(python)))
    assert status == 2
    assert errors == ('error: {} lacks numpy and tensorflow and matplotlib: install what '
                      'requirements.txt names first\n'.format(python))
