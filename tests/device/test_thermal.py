"""Tests temperature, clock and throttling of devices, and their records in a run."""

import glob
import os

import pytest
import tensorflow as tf

import main
from boards import (
    COOLER,
    COUNT,
    POLICY,
    THROTTLED,
    ZONE,
    board,
    change,
    found,
    stand_on,
    vcgencmd,
    zones,
)
from elastic.device import thermal
from elastic.runs.clock import Clock
from elastic.runs.folder import DEVICE_COLUMNS, read_run
from small_runs import quick_flags

HOT = ZONE.format(0) + 'temp'


@pytest.mark.parametrize('name, reading', [
    ('RASPBERRY_PI_4B', (48.686, None, False)),  # cpufreq only gives the requested clock
    ('TX2', (45.5, (4 * 2035.2 + 2 * 345.6) / 6, False)), ('PC', (61.0, 3200.0, False)),
    ('OTHER_ARM', (52.0, 1200.0, False))])
def test_boards_report_temperature_and_clock(tmp_path, name, reading):
    assert found(*board(tmp_path, name)).read()[:3] == pytest.approx(reading)


def test_a_container_reports_nothing_and_nothing_is_invented(tmp_path):
    (tmp_path / 'sys/class/thermal').mkdir(parents=True)
    assert found(str(tmp_path)) is None
    clock = Clock(monitor=thermal.Monitor(found(str(tmp_path))))
    with clock.sampling(), clock('step'):
        pass
    assert clock.monitor.epoch() == dict.fromkeys(DEVICE_COLUMNS)


def test_only_cpus_that_the_process_may_use_count(tmp_path):
    root, _ = board(tmp_path, 'TX2')
    assert found(root, [1, 2]).read().cpu_mhz == 345.6
    assert found(root, [9]).read().cpu_mhz is None


def test_zones_that_are_off_are_left_out(tmp_path):
    change(tmp_path, zones(('cpu', 0), ('gpu', -40000), ('ddr', 31000), ('npu', 2147483647),
                           ('vpu', 'N/A')))
    (tmp_path / ZONE.format(5) / 'temp').mkdir(parents=True)  # cannot be read
    change(tmp_path, {ZONE.format(5) + 'type': 'cv0-thermal'})
    assert found(str(tmp_path)).read() == thermal.Reading(31.0)


@pytest.mark.parametrize('name, changed, throttled', [
    ('TX2', {COOLER.format(0) + 'cur_state': 9}, False),  # the fan
    ('TX2', {COOLER.format(2) + 'cur_state': 1}, True),
    ('OTHER_ARM', {COOLER.format(0) + 'cur_state': 3}, True),
    ('RASPBERRY_PI_4B', {THROTTLED: '50000'}, False),
    ('RASPBERRY_PI_4B', {THROTTLED: '50005'}, True),
    ('RASPBERRY_PI_4B', {THROTTLED: '80008'}, True),
    ('RASPBERRY_PI_4B', {THROTTLED: '1'}, False)])
def test_whatever_slows_the_device_down_now_is_throttling(tmp_path, name, changed, throttled):
    device = found(*board(tmp_path, name))
    change(tmp_path, changed)
    device.read()  # the first one reports bits that grew since the device was found
    assert device.read().throttled is throttled


# ---------------------------------------------------------------- Raspberry Pi

SAYS = dict(get_throttled='throttled=0x0', measure_clock='frequency(48)=600117184')


@pytest.mark.parametrize('place', ['usr/bin', 'opt/vc/bin'])
def test_vcgencmd_reports_the_true_clock_and_the_bits(tmp_path, place):
    root, cpus = board(tmp_path, 'RASPBERRY_PI_4B')
    vcgencmd(tmp_path, SAYS, place)
    device = found(root, cpus)
    device.firmware.period = 0
    assert device.read()[1:3] == (600.117184, False)
    vcgencmd(tmp_path, dict(SAYS, get_throttled='throttled=0xe0006'))
    assert device.read()[1:3] == (600.117184, True)


def test_vcgencmd_is_asked_seldom(tmp_path):
    root, cpus = board(tmp_path, 'RASPBERRY_PI_4B')
    vcgencmd(tmp_path, SAYS)
    device = found(root, cpus)
    device.firmware.period = 1000
    for _ in range(20):
        device.read()
    assert (tmp_path / 'asked').read_text().split() == ['get_throttled', 'measure_clock']


@pytest.mark.parametrize('says', [
    {}, dict.fromkeys(SAYS, 'error=1 error_msg="Command not registered"'),
    dict.fromkeys(SAYS, 'VCHI initialization failed')], ids=['no answer', 'error', 'no permission'])
def test_without_vcgencmd_the_kernels_file_has_the_bits_but_no_clock(tmp_path, says):
    root, cpus = board(tmp_path, 'RASPBERRY_PI_4B')
    vcgencmd(tmp_path, says)
    assert found(root, cpus).read()[1:3] == (None, False)
    (tmp_path / THROTTLED).unlink()
    assert found(root, cpus).read() == thermal.Reading(48.686)


# ---------------------------------------------------------------- epochs

def recorded(root, monitor, *readings):
    """Returns the columns of an epoch that trains from 10 to 20 s. readings: (seconds, files)."""
    for seconds, files in readings:
        change(root, files)
        monitor.sampler.sample(seconds)
    monitor.trained(10, 20)
    return monitor.epoch()


CORE = COUNT.format(1, 'core')


@pytest.mark.parametrize('name, epochs', [
    ('RASPBERRY_PI_4B', [('20000', '20000', 0), ('20000', '60000', 1), ('60000', '60000', 0),
                         ('e0000', 'e0000', 0), ('f0000', 'f0000', 0), ('e0004', 'e0000', 1)]),
    ('PC', [(7, 7, 0), (7, 8, 1), (9, 9, 0), (9, 10, 1), (10, 10, 0)])])
def test_bits_since_boot_and_counters_mark_the_epoch_in_which_they_grew(tmp_path, name, epochs):
    """epochs: (before training, in it, whether that is throttling). Low voltage alone is none."""
    path = dict(RASPBERRY_PI_4B=THROTTLED, PC=CORE)[name]
    monitor = thermal.Monitor(found(*board(tmp_path, name)))
    flags = [recorded(tmp_path, monitor, (9, {path: before}), (10, {}), (20, {path: within}))
             for before, within, _ in epochs]
    assert [flag['throttled'] for flag in flags] == [throttled for _, _, throttled in epochs]


def test_an_epoch_has_the_highest_temperature_and_mean_clock_of_its_training(tmp_path):
    monitor = thermal.Monitor(found(*board(tmp_path, 'OTHER_ARM')))
    mhz = POLICY.format(0)
    validated = 5, {HOT: 99000, mhz: 9000000, COOLER.format(0) + 'cur_state': 1}
    trained = [(10, {HOT: 60000, mhz: 1000000, COOLER.format(0) + 'cur_state': 0}),
               (15, {HOT: 70000}), (16, {HOT: 50000, mhz: 1600000})]
    expected = dict(temperature_c=70.0, cpu_mhz=1200.0, throttled=0)
    assert recorded(tmp_path, monitor, validated, *trained) == expected
    assert recorded(tmp_path, monitor, (6, {}), (9, {HOT: 30000}), (21, {HOT: 80000})) == dict(
        expected, temperature_c=30.0, cpu_mhz=1600.0)  # between two readings, the last one counts
    change(tmp_path, {COOLER.format(0) + 'type': 'gpio-fan'})
    monitor = thermal.Monitor(found(str(tmp_path), [0]))
    assert recorded(tmp_path, monitor, (10, {}))['throttled'] is None


def test_an_interrupted_epoch_keeps_what_was_seen_before(tmp_path):
    monitor = thermal.Monitor(found(*board(tmp_path, 'OTHER_ARM')))
    cooler = COOLER.format(0) + 'cur_state'
    change(tmp_path, {HOT: 90000, cooler: 1})
    monitor.sampler.sample(10)
    monitor.trained(10, 12)
    resumed = thermal.Monitor(found(str(tmp_path), [0]))
    resumed.restore(monitor.state())
    assert recorded(tmp_path, resumed, (15, {HOT: 30000, cooler: 0})) == dict(
        temperature_c=90.0, cpu_mhz=1200.0, throttled=1)
    assert recorded(tmp_path, resumed, (16, {}))['temperature_c'] == 30.0


# ---------------------------------------------------------------- a whole run

@pytest.mark.thorough
def test_a_run_records_what_its_board_reports(tmp_path, monkeypatch, capsys):
    """Checks the records for figures, TensorBoard, and the terminal."""
    root, cpus = board(tmp_path / 'board', 'TX2')
    change(root, {COOLER.format(2) + 'cur_state': 1})
    stand_on(monkeypatch, root, cpus)
    assert main.main(quick_flags(tmp_path, '--train_type', 'full_training', '--run_name', 'run',
                                 '--save_txt')) == 0
    folder = str(tmp_path / 'run')
    run = read_run(folder)
    for column, value in zip(DEVICE_COLUMNS, (45.5, (4 * 2035.2 + 2 * 345.6) / 6, 1)):
        assert run.epochs[column] == [pytest.approx(value)] * 2
        assert shown(folder, 'device/' + column) == [pytest.approx(value)] * 2
    assert run.summary['throttled_epochs'] == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('epoch ')]
    assert [line.endswith('s trained   throttled') for line in lines] == [True] * 2
    with open(os.path.join(folder, 'epochs.txt')) as table:
        assert table.read().split()[-3:] == ['45.5', '1472', '1']


def shown(folder, tag):
    """Returns a tag's values in TensorBoard, by epoch."""
    values = {event.step: float(tf.make_ndarray(value.tensor))
              for path in glob.glob(os.path.join(folder, 'events.out.*'))
              for event in tf.compat.v1.train.summary_iterator(path)
              for value in event.summary.value if value.tag == tag}
    return [values[epoch] for epoch in sorted(values)]


def test_the_command_shows_what_the_device_reports(tmp_path, monkeypatch, capsys):
    stand_on(monkeypatch, tmp_path / 'nothing', [0])
    thermal.main([])
    assert capsys.readouterr().out.strip() == thermal.NOTHING
    monkeypatch.undo()
    stand_on(monkeypatch, *board(tmp_path, 'TX2'))
    thermal.main([])
    rows = [line.rsplit('  ', 1) for line in capsys.readouterr().out.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ['temperature (°C)', '45.5'], ['clock (MHz)', '1472'], ['throttled', 'no']]
