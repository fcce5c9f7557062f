"""Hangs real sensors: pipes that nobody writes, a vcgencmd that never answers. Nothing waits."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest

import check_device
import main
from boards import LONG, ZONE, board, change, found, stand_on, vcgencmd
from elastic.device import energy, thermal
from elastic.runs.folder import DEVICE_COLUMNS
from small_runs import quick_flags, script

HEAT = ZONE.format(0) + 'temp'
RAIL = 'sys/bus/i2c/devices/0-0041/iio:device1/'
RAILS = {RAIL + 'rail_name_0': 'VDD_IN', RAIL + 'in_power0_input': 2750}
POWER = RAIL + 'in_power0_input'


def hang(root, path):
    """Replaces a file below `root` by a pipe that nobody writes; returns its path."""
    path = os.path.join(str(root), path)
    os.remove(path)
    os.mkfifo(path)
    return path


def waits(path, sampler):
    """Returns the thread that reads this pipe, once it does; then the sampler counts as late."""
    while True:
        for thread in threading.enumerate():
            if getattr(thread, 'reads', '') == path:
                sampler.late = 0
                return thread
        time.sleep(0.001)


@pytest.fixture
def rails(tmp_path):
    """Returns the root of a board with one rail."""
    change(tmp_path, RAILS)
    return str(tmp_path)


@pytest.fixture
def arm(tmp_path):
    """Returns (root, numbers of the CPUs) of an Arm board."""
    return board(tmp_path, 'OTHER_ARM')


def unanswered(path, seconds=0.5):
    return 'no answer from {} within {:g} s'.format(path, seconds)


def test_power_that_hangs_in_training_is_not_measured_and_says_so(rails):
    meter = energy.Meter(*energy.find_sensors(rails, LONG))
    path = hang(rails, POWER)
    with meter.sampler.running():
        thread = waits(path, meter.sampler)
        meter.trained(0, 1)
        with open(path, 'w') as pipe:  # the bus recovers
            pipe.write('3000\n')
        meter.sampler.late = LONG
        meter.trained(1, 2)
    thread.join()
    assert [meter.result()[key] for key in ('energy_joules', 'energy_note')] == [
        None, 'rail VDD_IN stopped answering: ' + unanswered(path, 0)]


def test_heat_that_hangs_in_training_leaves_empty_cells_and_a_note(arm):
    monitor = thermal.Monitor(found(*arm))
    monitor.sampler.sample(0)
    monitor.trained(0, 1)
    assert monitor.epoch()['temperature_c'] == 52.0 and monitor.note is None
    path = hang(arm[0], HEAT)
    with monitor.sampler.running():
        waits(path, monitor.sampler)
        monitor.trained(1, 2)
    assert monitor.epoch() == dict.fromkeys(DEVICE_COLUMNS)
    assert monitor.note == 'temperature, clock and throttling: ' + unanswered(path, 0)
    resumed = thermal.Monitor()
    resumed.restore(monitor.state())
    assert resumed.note == monitor.note


def test_a_sensor_that_hangs_is_not_found(rails, arm):
    path = hang(rails, RAIL + 'rail_name_0')
    assert energy.find_sensors(rails) == ([], ['power sensors: ' + unanswered(path)])
    path = hang(arm[0], HEAT)
    with pytest.raises(TimeoutError, match=unanswered(path)):
        thermal.find_device(*arm)


def test_a_check_of_the_device_reports_sensors_that_hang(arm):
    path = hang(arm[0], HEAT)
    row = check_device.heat(arm[0])
    assert (row.fine, row.finding) == (None, 'unknown: ' + unanswered(path))


def test_the_end_of_a_process_does_not_wait_for_a_sensor(rails):
    path = hang(rails, POWER)
    code = ('import time; from elastic.device import energy\n'
            'meter = energy.Meter(*energy.find_sensors({!r}, 300)); meter.sampler.late = 0.5\n'
            'with meter.sampler.running(): time.sleep(1)\n'
            'print(meter.result()["energy_note"])').format(rails)
    assert script('-c', code) == (
        0, 'rail VDD_IN stopped answering: {}\n'.format(unanswered(path)), '')


# ---------------------------------------------------------------- vcgencmd

SLEEPS = "#!/bin/sh\necho $$ >> {}/asked\ntrap '' TERM\nexec sleep 1000"


@pytest.fixture
def pi(tmp_path):
    """Returns (root, CPUs) of a Raspberry Pi whose vcgencmd answers."""
    root, cpus = board(tmp_path, 'RASPBERRY_PI_4B')
    vcgencmd(root, dict(get_throttled='throttled=0x0', measure_clock='frequency(48)=600117184'))
    return root, cpus


def sleeping(root):
    """Lets vcgencmd sleep, and ignore SIGTERM."""
    change(root, {'usr/bin/vcgencmd': SLEEPS.format(root), 'asked': ''})
    os.chmod(os.path.join(root, 'usr/bin/vcgencmd'), 0o755)


def assert_killed(root, times):
    """Asserts that vcgencmd was started so many times, and runs no more."""
    with open(os.path.join(root, 'asked')) as lines:
        numbers = list(map(int, lines.read().split()))
    assert len(numbers) == times
    for number in numbers:
        with contextlib.suppress(ChildProcessError):  # subprocess has seen its end
            assert os.waitpid(number, 0)[1] == signal.SIGKILL


def test_a_vcgencmd_that_sleeps_costs_only_what_it_would_say(pi):
    sleeping(pi[0])
    device = thermal.find_device(*pi, seconds=LONG)
    assert device.read()[:3] == (48.686, None, False)  # the kernel's file has the bits
    monitor = thermal.Monitor(device)
    monitor.sampler.sample(0)
    monitor.trained(0, 1)
    assert monitor.epoch() == dict(temperature_c=48.686, throttled=0, cpu_mhz=None)
    assert monitor.note == 'vcgencmd: no answer within 0.4 s'
    assert_killed(pi[0], 1)
    assert check_device.heat(pi[0], LONG).finding == (
        '49 °C, not throttled, vcgencmd: no answer within 0.4 s')


def test_a_vcgencmd_that_falls_asleep_is_asked_twice(pi):
    device = found(*pi)
    assert device.read().cpu_mhz == 600.117184
    sleeping(pi[0])
    device.firmware.period, device.firmware.seconds = 0, thermal.FIRMWARE_TIMEOUT
    assert [device.read().cpu_mhz for _ in range(4)] == [None] * 4
    assert device.firmware.note == 'vcgencmd: no answer within 0.4 s'
    assert_killed(pi[0], thermal.FIRMWARE_TRIES)


# ---------------------------------------------------------------- a whole run

@pytest.mark.thorough
def test_a_run_trains_on_while_its_sensors_hang(tmp_path, monkeypatch, capsys):
    root, cpus = board(tmp_path / 'board', 'OTHER_ARM')
    change(root, RAILS)
    pipes = [hang(root, path) for path in (HEAT, RAIL + 'rail_name_0')]
    stand_on(monkeypatch, root, cpus)
    assert main.main(quick_flags(tmp_path, '--run_name', 'run', '--train_type',
                                 'full_training')) == 0
    summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
    notes = ['temperature, clock and throttling: ' + unanswered(pipes[0]),
             'power sensors: ' + unanswered(pipes[1])]
    assert [summary['device_note'], summary['energy_note']] == notes
    assert summary['energy_joules'] is summary['throttled_epochs'] is None
    assert [line for line in capsys.readouterr().out.splitlines() if 'answer' in line] == [
        'not recorded: ' + note for note in notes]
