"""Tests what check_device.py reports of recorded boards, environments, disks and this machine."""

import sys

import pytest

import check_device
from boards import board, change, vcgencmd
from check_device import Row, heat, memory

MEMINFO = 'MemTotal: 4000000 kB\nMemFree: 1 kB\nMemAvailable: {} kB\nSwapFree: {} kB'


@pytest.fixture
def pi(tmp_path):
    """Returns the files of a Raspberry Pi 4B with 4 GB and without problems."""
    root, _ = board(tmp_path, 'RASPBERRY_PI_4B')
    change(root, {'proc/meminfo': MEMINFO.format(3500000, 0)})
    vcgencmd(root, {'get_throttled': 'throttled=0x0', 'measure_clock': 'frequency(48)=1500345728'})
    return root


@pytest.mark.parametrize('files, row, fine, finding', [
    ({}, memory, True, '3.6 of 4.1 GB free, 0.0 GB of swap'),
    ({}, heat, True, '49 °C, not throttled'),
    ({'proc/meminfo': MEMINFO.format(1000000, 0)}, memory, False, '1.0 of 4.1 GB'),
    ({'proc/meminfo': MEMINFO.format(1000000, 600000)}, memory, True, '0.6 GB of swap'),
    ({'answers/get_throttled': 'throttled=0x50005'}, heat, False, 'too low'),
    ({'answers/get_throttled': 'throttled=0x8'}, heat, False, 'slowed down now'),
    ({'answers/get_throttled': 'throttled=0x80000'}, heat, True, 'not throttled')])
def test_memory_heat_and_supply_of_a_board(pi, files, row, fine, finding):
    change(pi, files)
    found = row(pi)
    assert found.fine is fine and finding in found.finding
    lines = check_device.report([found]).splitlines()
    assert [line.lstrip()[:3] for line in lines[1:]] == ['-> '] * (not fine)


def test_what_a_container_does_not_show_is_no_problem(tmp_path):
    assert {memory(str(tmp_path)).fine, heat(str(tmp_path)).fine} == {None}


def test_a_32_bit_system_has_no_tensorflow():
    row = check_device.processor(32)
    assert row.fine is False and 'a 64-bit system' in row.remedy
    assert check_device.processor().fine is True


@pytest.mark.parametrize('program, fine, finding', [
    (b'\x7fELF\x02\x01\x01' + bytes(9) + b'\x02\x00\xfe\xfe' + bytes(44), False,
     'Exec format error'),  # for another processor
    (b'#!/bin/sh\nkill -ILL $$\n', False, 'signal 4'),
    (b'#!/bin/sh\necho "ImportError: no libcudart" >&2; exit 1\n', False, 'no libcudart'),
    pytest.param('#!/bin/sh\nexec "{}" "$@"\n'.format(sys.executable).encode(), True,
                 'TensorFlow 2.', marks=pytest.mark.thorough)])
def test_an_environment_is_fine_if_its_tensorflow_can_be_imported(
        tmp_path, monkeypatch, program, fine, finding):
    python = tmp_path / '.venv' / 'bin' / 'python'
    python.parent.mkdir(parents=True)
    python.write_bytes(program)
    python.chmod(0o755)
    row, = check_device.environments(str(tmp_path))
    assert (row.thing, row.fine) == ('.venv', fine) and finding in row.finding
    assert 'rm -r {}; then scripts/install.sh'.format(tmp_path / '.venv') in row.remedy
    monkeypatch.setattr(sys, 'executable', str(python))
    row, = check_device.environments('/nowhere')  # the Python that runs this
    assert (row.thing, row.fine) == ('TensorFlow', fine) and finding in row.finding


@pytest.mark.parametrize('rows, required, fine', [
    ([], False, None),
    ([Row('.venv', True, 'TensorFlow 2.7.0, GPUs: 0')], True, False),
    ([Row('.venv', False, 'TensorFlow cannot be imported: no GPU')], True, False),
    ([Row('.venv', True, 'TensorFlow 2.7.0, GPUs: 1')], True, True)])
def test_a_gpu_that_is_required_and_not_seen_is_a_problem(rows, required, fine):
    assert check_device.gpu(rows, required).fine is fine


def test_too_little_disk_is_a_problem(tmp_path):
    folder = str(tmp_path)
    assert check_device.disk(folder, free=10).fine is True
    row = check_device.disk(folder, free=4)
    assert row.fine is False and '5 GB needed for the environment' in row.finding
    (tmp_path / '.venv' / 'bin' / 'python').mkdir(parents=True)
    assert check_device.disk(folder, free=4).fine is True
    assert check_device.disk(folder, free=0.5).fine is False
