"""Tests what check_device.sh reports of recorded boards, environments, disks and this machine."""

import os
import shutil
import subprocess
import sys

import pytest

import check_device
from boards import board, change, vcgencmd
from check_device import ABSENT, OK, PROBLEM

ROOT = check_device.ROOT
MEMINFO = ('MemTotal: {:d} kB\nMemFree: 1 kB\nMemAvailable: {:d} kB\n'
           'SwapTotal: {:d} kB\nSwapFree: {:d} kB')
GOVERNOR = 'sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor'
RAIL = 'sys/bus/i2c/devices/0-0041/iio:device1/'
ZRAM = 'Filename Type Size Used Priority\n/dev/zram0 partition 2000000 0 100'


def meminfo(total, free, swap):
    """Returns the files of a board with this memory and swap, in GB."""
    return {'proc/meminfo': MEMINFO.format(*(int(gb * 1e9 / 1024) for gb in (
        total, free, swap, swap))), 'proc/swaps': ZRAM if swap else ZRAM.split('\n')[0]}


@pytest.fixture
def pi(tmp_path):
    """Returns the files of a Raspberry Pi 4B with 4 GB and without problems."""
    root, _ = board(tmp_path, 'RASPBERRY_PI_4B')
    change(root, meminfo(4, 3.5, 2))
    change(root, {GOVERNOR.format(0): 'ondemand'})
    vcgencmd(root, {'get_throttled': 'throttled=0x0', 'measure_clock': 'frequency(48)=1500345728'})
    return root


@pytest.fixture
def tx2(tmp_path):
    """Returns the files of a Jetson TX2 without problems."""
    root, _ = board(tmp_path, 'TX2')
    change(root, meminfo(8, 6, 4))
    change(root, {'proc/device-tree/model': 'quill\0', GOVERNOR.format(0): 'schedutil',
                  'proc/device-tree/compatible': 'nvidia,p2597-0000+p3310-1000\0nvidia,tegra186\0',
                  RAIL + 'rail_name_0': 'VDD_IN', RAIL + 'in_power0_input': 2750})
    nvpmodel(root, 'MAXN', 0)
    return root


def nvpmodel(root, name, number):
    change(root, {'usr/sbin/nvpmodel': '#!/bin/sh\nprintf "NV Power Mode: {}\\n{}\\n"'.format(
        name, number)})
    os.chmod(os.path.join(root, 'usr/sbin/nvpmodel'), 0o755)


def rows_of(root):
    """Returns {thing: Row} of all that is read from files."""
    rows = [check_device.board(root), check_device.governor(root), check_device.power_mode(root),
            check_device.power_sensor(root)]
    rows += check_device.memory(root) + check_device.throttling(root)
    return {row.thing: row for row in rows if row}


def test_a_board_that_is_set_up_has_no_problem(pi):
    rows = rows_of(pi)
    assert rows['board'].finding == 'Raspberry Pi 4 Model B Rev 1.4'
    assert rows['swap'].finding == '2.0 GB on /dev/zram0'
    assert rows['heat'].finding == '49 °C, not throttled'
    assert 'power mode' not in rows
    assert {row.mark for row in rows.values()} == {OK, ABSENT}
    # A Pi has no power sensor.
    assert [row.thing for row in rows.values() if row.mark == ABSENT] == ['power']


def test_a_jetson_shows_its_power_mode_and_its_rails(tx2):
    rows = rows_of(tx2)
    assert rows['power mode'].finding == 'MAXN (0)' and rows['power'].finding == 'rail VDD_IN'
    assert {row.mark for row in rows.values()} == {OK}
    assert check_device.guide(tx2) == 'docs/jetson_tx2.md'


@pytest.mark.parametrize('files, thing, finding, remedy', [
    (meminfo(2, 1.0, 0), 'memory', '1.0 of 2.0 GB free', 'add swap (docs/raspberry_pi.md)'),
    (meminfo(4, 3.5, 0), 'swap', 'none', 'add 2 GB'),
    ({GOVERNOR.format(0): 'powersave'}, 'governor', 'powersave', 'echo performance'),
    ({'answers/get_throttled': 'throttled=0x50005'}, 'supply', 'too low', 'power supply'),
    ({'answers/get_throttled': 'throttled=0x10000'}, 'supply', 'since the start', 'power supply'),
    ({'answers/get_throttled': 'throttled=0x8'}, 'heat', 'slowed down now', 'heat sink'),
    ({'answers/get_throttled': 'throttled=0x80000'}, 'heat', 'since the start', 'heat sink')])
def test_a_problem_has_its_remedy_below(pi, files, thing, finding, remedy):
    change(pi, files)
    row = rows_of(pi)[thing]
    assert row.mark == PROBLEM and finding in row.finding and remedy in row.remedy
    lines = check_device.report([row]).splitlines()
    assert len(lines) == 2 and lines[1].lstrip().startswith('-> ')


def test_a_board_with_much_memory_needs_no_swap(pi):
    change(pi, meminfo(8, 7, 0))
    assert rows_of(pi)['swap'].mark == ABSENT


def test_a_power_mode_without_all_cores_is_a_problem(tx2):
    nvpmodel(tx2, 'MAXP_CORE_ARM', 3)
    row = rows_of(tx2)['power mode']
    assert row.mark == PROBLEM and 'MAXP_CORE_ARM (3)' in row.finding
    assert 'sudo nvpmodel -m 0' in row.remedy
    change(tx2, {'usr/sbin/nvpmodel': '#!/bin/sh\necho "NVPM ERROR: not root" >&2; exit 1'})
    os.chmod(os.path.join(tx2, 'usr/sbin/nvpmodel'), 0o755)
    row = rows_of(tx2)['power mode']
    assert row.mark == ABSENT and 'not root' in row.finding


def test_what_a_container_does_not_show_is_no_problem(tmp_path):
    assert {row.mark for row in rows_of(str(tmp_path)).values()} <= {OK, ABSENT}


def test_a_32_bit_system_has_no_tensorflow():
    assert check_device.processor(32).mark == PROBLEM
    assert 'a 64-bit system' in check_device.processor(32).remedy
    assert check_device.processor().mark == OK


# ---------------------------------------------------------------- environments

def elf(machine):
    return b'\x7fELF\x02\x01\x01' + bytes(9) + b'\x02\x00' + machine + bytes(44)


def make_environment(folder, script):
    """Makes an environment whose Python is this shell script or these bytes."""
    python = folder / 'bin' / 'python'
    python.parent.mkdir(parents=True)
    python.write_bytes(script if isinstance(script, bytes) else
                       '#!/bin/sh\n{}\n'.format(script).encode())
    python.chmod(0o755)
    return str(folder)


def test_an_environment_for_another_processor_is_a_problem(tmp_path):
    row = check_device.environment(make_environment(tmp_path / '.venv', elf(b'\xfe\xfe')))
    assert row.mark == PROBLEM and 'its Python does not run here: Exec format error' in row.finding
    assert 'rm -r {}'.format(tmp_path / '.venv') in row.remedy


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='other systems have no ELF')
def test_packages_for_another_processor_are_a_problem(tmp_path):
    folder = tmp_path / '.venv'
    library = folder / 'lib' / 'python3.11' / 'site-packages' / 'numpy' / 'core.so'
    library.parent.mkdir(parents=True)
    (folder / 'bin').mkdir()
    (folder / 'bin' / 'python').symlink_to(sys.executable)
    here = check_device.machine_of(os.path.realpath(sys.executable))
    other = b'\xb7\x00' if here == 'x86_64' else b'\x3e\x00'
    library.write_bytes(elf(other))
    row = check_device.environment(str(folder))
    assert row.mark == PROBLEM and row.remedy.startswith('rm -r ')
    assert row.finding == 'its packages are for {}, this is {}'.format(
        check_device.MACHINES[other], here)


@pytest.mark.parametrize('ends, finding', [
    ('kill -ILL $$', 'ended by signal 4'),
    ('echo "ImportError: no libcudart" >&2; exit 1', 'ImportError: no libcudart')])
def test_a_tensorflow_that_cannot_be_imported_is_a_problem(tmp_path, ends, finding):
    folder = make_environment(tmp_path / '.venv', '[ -z "$2" ] || {{ {}; }}'.format(ends))
    row = check_device.environment(folder)
    assert row.mark == PROBLEM and finding in row.finding


@pytest.mark.thorough
def test_a_tensorflow_that_works_is_listed_with_its_gpus(tmp_path, monkeypatch):
    import tensorflow as tf
    make_environment(tmp_path / '.venv', 'exec "{}" "$@"'.format(sys.executable))
    row, = check_device.environments(str(tmp_path))
    assert (row.thing, row.mark) == ('.venv', OK)
    assert row.finding.startswith('TensorFlow {}, '.format(tf.__version__))
    given = make_environment(tmp_path / 'given', 'printf "2.6.2\\n2\\n"')
    monkeypatch.setattr(sys, 'executable', os.path.join(given, 'bin', 'python'))
    row, = check_device.environments(given)  # without an environment, the Python that runs this
    assert row == check_device.Row('TensorFlow', OK, 'TensorFlow 2.6.2, 2 GPUs')


@pytest.mark.parametrize('hardware, found, required, mark', [
    (False, [], False, ABSENT), (False, [], True, PROBLEM),
    (False, ['TensorFlow 2.7.0, no GPU'], True, PROBLEM),
    (True, [], False, ABSENT), (True, [], True, PROBLEM),
    (True, ['TensorFlow 2.7.0, no GPU'], False, PROBLEM),
    (True, ['TensorFlow 2.7.0, 1 GPU'], True, OK)])
def test_a_gpu_that_is_missing_or_unused_is_a_problem(tmp_path, hardware, found, required, mark):
    if hardware:
        change(tmp_path, {'etc/nv_tegra_release': '# R32 (release), REVISION: 6.1'})
    row = check_device.gpu(str(tmp_path), [check_device.Row('.venv', OK, words) for words in found],
                           required)
    assert row.mark == mark and bool(row.remedy) == (mark == PROBLEM)


# ---------------------------------------------------------------- disk

def test_too_little_disk_is_a_problem(tmp_path):
    folder = str(tmp_path)
    assert check_device.disk(folder, free=10).mark == OK
    row = check_device.disk(folder, free=4)
    assert row.mark == PROBLEM and '5 GB are needed for the environment' in row.finding
    (tmp_path / '.venv').mkdir()
    (tmp_path / '.venv' / 'requirements.cksum').write_text('')
    assert check_device.disk(folder, free=4).mark == OK  # the environment exists
    assert check_device.disk(folder, free=0.5).mark == PROBLEM


def test_missing_photo_sets_need_room_on_the_disk(tmp_path):
    folder = tmp_path / 'made' / 'later'
    row = check_device.data(str(folder), free=3)
    assert row.mark == PROBLEM and 'TFDS_DATA_DIR' in row.remedy
    assert check_device.data(str(folder), free=30).mark == ABSENT
    for name in check_device.PHOTO_SETS:
        (folder / name).mkdir(parents=True)
    assert check_device.data(str(folder), free=0).mark == OK


# ---------------------------------------------------------------- the script

@pytest.fixture
def repository(tmp_path):
    """Returns (folder, variables) of a repository with a Python but no environment."""
    folder, tools = tmp_path / 'repository', tmp_path / 'bin'
    shutil.copytree(os.path.join(ROOT, 'scripts'), str(folder / 'scripts'))
    for name in os.listdir(ROOT):
        if name.endswith('.py'):
            shutil.copy(os.path.join(ROOT, name), str(folder))
    shutil.copytree(os.path.join(ROOT, 'elastic'), str(folder / 'elastic'))
    tools.mkdir()
    for tool in ('bash', 'basename', 'cat', 'dirname', 'env', 'ls', 'readlink', 'uname'):
        (tools / tool).symlink_to(shutil.which(tool))
    make_environment(tmp_path / 'plain', 'exec "{}" -S "$@"'.format(sys.executable))
    (tools / 'python3').symlink_to(tmp_path / 'plain' / 'bin' / 'python')
    return folder, {'PATH': str(tools), 'HOME': str(tmp_path), 'LANG': 'C.UTF-8'}


def run(repository, *arguments, **variables):
    """Returns (status, lines of stdout, stderr) of check_device.sh."""
    folder, environment = repository
    done = subprocess.run([str(folder / 'scripts' / 'check_device.sh')] + list(arguments),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd='/',
                          env=dict(environment, **variables))
    return done.returncode, done.stdout.decode('utf-8').splitlines(), done.stderr.decode()


def test_the_script_reports_before_anything_is_installed(repository, pi):
    folder, _ = repository
    before = sorted(os.listdir(str(folder)))
    status, lines, errors = run(repository, DEVICE_ROOT=pi)
    assert errors == ''
    things = [line.split('  ')[0] for line in lines if line.strip()]
    assert things[:5] == ['board', 'processor', 'Python', 'TensorFlow', 'GPU']
    marked = [line[line.index(mark):][:2] for line in lines for mark in (' ok ', ' !! ', ' -- ')
              if mark in line]
    assert len(marked) >= 10
    assert len({line.index(mark) for line in lines for mark in (' ok ', ' !! ', ' -- ')
                if mark in line}) == 1, 'the columns are not aligned'
    troubles = [i for i, line in enumerate(lines) if '  !!  ' in line]
    assert status == bool(troubles)
    assert all(lines[i + 1].lstrip().startswith('->') for i in troubles)
    assert sorted(name for name in os.listdir(str(folder)) if name != '__pycache__') == before


def test_a_problem_is_status_1_and_a_wrong_argument_2(repository, pi):
    status, lines, _ = run(repository, '--gpu', DEVICE_ROOT=pi)
    row, = [line for line in lines if line.startswith('GPU')]
    assert status == 1 and '!!  none, and --gpu asks for one' in row
    status, lines, errors = run(repository, '--gpus')
    assert (status, lines) == (2, []) and 'unrecognized arguments: --gpus' in errors
    status, lines, errors = run(repository, '--hours')
    assert (status, lines) == (2, []) and errors.startswith('error: --hours') and (
        errors.count('\n') == 1)


def test_a_device_whose_python_has_no_stack_is_a_problem(repository, tmp_path):
    folder, environment = repository
    if sys.version_info[:2] != (3, 9):
        os.remove(str(tmp_path / 'bin' / 'python3'))
        (tmp_path / 'bin' / 'python3').write_text(
            '#!/bin/sh\n[ "$#" -lt 3 ] || exit 1\nexec "{}" -S "$@"\n'.format(sys.executable))
        os.chmod(str(tmp_path / 'bin' / 'python3'), 0o755)
    status, lines, _ = run(repository)
    at, = [i for i, line in enumerate(lines) if line.startswith('Python')]
    assert status == 1 and '!!  none that has a stack: 3.11' in lines[at]
    assert 'apt install python3-venv' in lines[at + 1]
    os.remove(str(tmp_path / 'bin' / 'python3'))
    status, lines, errors = run(repository)
    assert (status, lines) == (1, []) and errors.startswith('error: no Python 3.6 or later found')


def test_hours_are_those_of_the_dry_runs(repository):
    folder, _ = repository
    for script in (folder / 'scripts').glob('run_figure*.sh'):
        script.unlink()
    for name, words in (('15', 'echo "total               98.2 h"'), ('15_ego', 'exit 3'),
                        ('_cache', 'echo "error: vgg16 does not fit" >&2; exit 1')):
        make_environment(folder / name, words)
        (folder / name / 'bin' / 'python').rename(folder / 'scripts' / 'run_figure{}.sh'.format(
            name))
    (folder / 'tensorflow.py').write_text('raise SystemExit("TensorFlow was loaded")')
    status, lines, _ = run(repository, '--hours')
    assert [line.split() for line in lines if line.startswith('figure')] == [
        'figure 15 ok 98.2 h'.split(), 'figure cache !! error: vgg16 does not fit'.split()]
    assert status == 1
