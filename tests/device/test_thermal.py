"""Tests temperature, clock and throttling of devices, and their records in a run."""

import csv
import glob
import itertools
import os
import time

import pytest
import tensorflow as tf

import main
import train
from boards import (
    COOLER,
    COUNT,
    POLICY,
    THROTTLED,
    ZONE,
    board,
    change,
    vcgencmd,
    zones,
)
from cached_runs import SIZE, digits, network
from elastic.compat import keras_stack
from elastic.device import sensors, thermal
from elastic.runs import checkpoint
from elastic.runs.clock import Clock
from elastic.runs.folder import DEVICE_COLUMNS, read_run
from elastic.runs.recorder import Recorder
from elastic.runs.session import RECORDS, Session
from elastic.schemes.fixed import FixedScheme
from elastic.settings import Settings

HOT = ZONE.format(0) + 'temp'


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Waits for sensors, however busy the machine is."""
    monkeypatch.setattr(sensors, 'PATIENCE', 300)
    monkeypatch.setattr(thermal, 'FIRMWARE_TIMEOUT', 300)


@pytest.mark.parametrize('name, reading', [
    ('RASPBERRY_PI_4B', (48.686, None, False)),  # cpufreq only gives the requested clock
    ('TX2', (45.5, (4 * 2035.2 + 2 * 345.6) / 6, False)), ('PC', (61.0, 3200.0, False)),
    ('OTHER_ARM', (52.0, 1200.0, False))])
def test_boards_report_temperature_and_clock(tmp_path, name, reading):
    found = thermal.find_device(*board(tmp_path, name)).read()
    assert found[:3] == pytest.approx(reading)


def test_a_container_reports_nothing_and_nothing_is_invented(tmp_path):
    (tmp_path / 'sys/class/thermal').mkdir(parents=True)
    assert thermal.find_device(str(tmp_path)) is None
    monitor = thermal.Monitor(thermal.find_device(str(tmp_path)))
    with Clock(monitor=monitor)('step'):
        pass
    assert monitor.epoch() == dict.fromkeys(DEVICE_COLUMNS)


def test_only_cpus_that_the_process_may_use_count(tmp_path):
    root, _ = board(tmp_path, 'TX2')
    assert thermal.find_device(root, [1, 2]).read().cpu_mhz == 345.6
    assert thermal.find_device(root, [9]).read().cpu_mhz is None


def test_zones_that_are_off_are_left_out(tmp_path):
    change(tmp_path, zones(('cpu', 0), ('gpu', -40000), ('ddr', 31000), ('npu', 2147483647),
                           ('vpu', 'N/A')))
    (tmp_path / ZONE.format(5) / 'temp').mkdir(parents=True)  # cannot be read
    change(tmp_path, {ZONE.format(5) + 'type': 'cv0-thermal'})
    assert thermal.find_device(str(tmp_path)).read() == thermal.Reading(31.0)


@pytest.mark.parametrize('name, changed, throttled', [
    ('TX2', {COOLER.format(0) + 'cur_state': 9}, False),  # the fan
    ('TX2', {COOLER.format(2) + 'cur_state': 1}, True),
    ('TX2', {COOLER.format(5) + 'cur_state': 2}, True),
    ('OTHER_ARM', {COOLER.format(0) + 'cur_state': 3}, True),
    ('RASPBERRY_PI_4B', {THROTTLED: '50000'}, False),
    ('RASPBERRY_PI_4B', {THROTTLED: '50005'}, True),
    ('RASPBERRY_PI_4B', {THROTTLED: 'e0002'}, True),
    ('RASPBERRY_PI_4B', {THROTTLED: '80008'}, True),
    ('RASPBERRY_PI_4B', {THROTTLED: '1'}, False)])
def test_whatever_slows_the_device_down_now_is_throttling(tmp_path, name, changed, throttled):
    device = thermal.find_device(*board(tmp_path, name))
    change(tmp_path, changed)
    assert device.read().throttled is throttled


def test_throttling_is_none_if_the_device_does_not_report_it(tmp_path):
    root, cpus = board(tmp_path, 'OTHER_ARM')
    change(tmp_path, {COOLER.format(0) + 'type': 'gpio-fan'})
    monitor = thermal.Monitor(thermal.find_device(root, cpus))
    with monitor.running():
        pass
    row = monitor.epoch()
    assert row['throttled'] is None and row['temperature_c'] == 52.0


# ---------------------------------------------------------------- Raspberry Pi

SAYS = dict(get_throttled='throttled=0x0', measure_clock='frequency(48)=600117184')


@pytest.mark.parametrize('place', ['usr/bin', 'opt/vc/bin'])
def test_vcgencmd_reports_the_true_clock_and_the_bits(tmp_path, monkeypatch, place):
    monkeypatch.setattr(thermal, 'FIRMWARE_PERIOD', 0)
    root, cpus = board(tmp_path, 'RASPBERRY_PI_4B')
    vcgencmd(tmp_path, SAYS, place)
    device = thermal.find_device(root, cpus)
    assert device.read()[1:3] == (600.117184, False)
    vcgencmd(tmp_path, dict(SAYS, get_throttled='throttled=0xe0006'))
    assert device.read()[1:3] == (600.117184, True)


def test_vcgencmd_is_asked_seldom(tmp_path, monkeypatch):
    monkeypatch.setattr(thermal, 'FIRMWARE_PERIOD', 1000)
    root, cpus = board(tmp_path, 'RASPBERRY_PI_4B')
    vcgencmd(tmp_path, SAYS)
    device = thermal.find_device(root, cpus)
    for _ in range(20):
        device.read()
    assert (tmp_path / 'asked').read_text().split() == ['get_throttled', 'measure_clock']


@pytest.mark.parametrize('says', [
    {}, dict.fromkeys(SAYS, 'error=1 error_msg="Command not registered"'),
    dict.fromkeys(SAYS, 'VCHI initialization failed')], ids=['no answer', 'error', 'no permission'])
def test_without_vcgencmd_the_kernels_file_has_the_bits_but_no_clock(tmp_path, says):
    root, cpus = board(tmp_path, 'RASPBERRY_PI_4B')
    vcgencmd(tmp_path, says)
    assert thermal.find_device(root, cpus).read()[1:3] == (None, False)
    (tmp_path / THROTTLED).unlink()
    assert thermal.find_device(root, cpus).read() == thermal.Reading(48.686)


# ---------------------------------------------------------------- epochs

def watched(monitor, root, before=None, within=None):
    """Returns the columns of an epoch. before, within: files that change before and in training."""
    change(root, before or {})
    with monitor.running():
        change(root, within or {})
    return monitor.epoch()


def test_bits_since_boot_mark_the_epoch_in_which_they_turned_on(tmp_path):
    monitor = thermal.Monitor(thermal.find_device(*board(tmp_path, 'RASPBERRY_PI_4B')))
    flags = [watched(monitor, tmp_path, *changes)['throttled'] for changes in (
        ({THROTTLED: '20000'}, {}), ({}, {THROTTLED: '60000'}), ({}, {}),
        ({THROTTLED: 'e0000'}, {}), ({}, {THROTTLED: 'f0000'}), ({}, {THROTTLED: 'e0004'}),
        ({THROTTLED: 'e0000'}, {}))]
    assert flags == [0, 1, 0, 0, 0, 1, 0]  # low voltage alone (bit 0) is no throttling


def test_counters_mark_the_epoch_in_which_they_grew(tmp_path):
    monitor = thermal.Monitor(thermal.find_device(*board(tmp_path, 'PC')))
    core, package = COUNT.format(1, 'core'), COUNT.format(0, 'package')
    flags = [watched(monitor, tmp_path, *changes)['throttled'] for changes in (
        ({}, {}), ({}, {core: 8}), ({package: 9}, {}), ({}, {package: 10}), ({}, {}))]
    assert flags == [0, 1, 0, 1, 0]


def test_each_epoch_has_its_own_highest_temperature(tmp_path):
    monitor = thermal.Monitor(thermal.find_device(*board(tmp_path, 'OTHER_ARM')))
    heat = [watched(monitor, tmp_path, {HOT: before}, {HOT: within})['temperature_c']
            for before, within in ((70000, 55000), (50000, 60000), (40000, 40000))]
    assert heat == [70.0, 60.0, 40.0]


@pytest.mark.timing
def test_the_clock_is_the_mean_over_time_without_validation(tmp_path):
    monitor = thermal.Monitor(thermal.find_device(*board(tmp_path, 'OTHER_ARM')), period=0.01)
    clock = Clock(monitor=monitor)
    for bucket, mhz, seconds in (('step', 1000, 0.3), ('validation', 9000, 0.3),
                                 ('selection', 2000, 0.1)):
        change(tmp_path, {POLICY.format(0): 1000 * mhz})
        with clock(bucket):
            time.sleep(seconds)
    step, selection = clock.seconds['step'], clock.seconds['selection']
    assert monitor.epoch()['cpu_mhz'] == pytest.approx(
        (1000 * step + 2000 * selection) / (step + selection), rel=0.05)


@pytest.mark.timing
def test_the_device_is_watched_between_start_and_end(tmp_path):
    monitor = thermal.Monitor(thermal.find_device(*board(tmp_path, 'TX2')), period=0.01)
    with monitor.running():
        for heat, state in ((85000, 1), (50000, 0)):
            change(tmp_path, {HOT: heat, COOLER.format(1) + 'cur_state': state})
            time.sleep(0.1)
    row = monitor.epoch()
    assert row['temperature_c'] == 85.0 and row['throttled'] == 1


@pytest.mark.timing
@pytest.mark.parametrize('name', ['RASPBERRY_PI_4B', 'TX2', 'PC'])
def test_reading_takes_less_than_a_hundredth_of_the_time(tmp_path, name):
    """Measures our code alone; the drivers of a real device may be slower."""
    root, cpus = board(tmp_path, name)
    vcgencmd(tmp_path, SAYS)
    device, count = thermal.find_device(root, cpus), 50
    begin = time.perf_counter()
    for _ in range(count):
        device.read()
    assert time.perf_counter() - begin < 0.01 * count * thermal.PERIOD


# ---------------------------------------------------------------- real runs

@pytest.mark.thorough
def test_a_run_records_what_its_board_reported(tmp_path, monkeypatch, capsys):
    """Checks the records for figures, TensorBoard, and the terminal."""
    root, cpus = board(tmp_path / 'board', 'TX2')
    find, pays = thermal.find_device, checkpoint.Keeper.pays
    epochs = iter([(83000, 1), (47000, 0)])

    def between_epochs(keeper):
        heat, state = next(epochs, (20000, 0))
        change(root, {HOT: heat, COOLER.format(2) + 'cur_state': state})
        return pays(keeper)
    monkeypatch.setattr(thermal, 'find_device', lambda: find(root, cpus))
    monkeypatch.setattr(checkpoint.Keeper, 'pays', between_epochs)
    model = str(tmp_path / keras_stack.MODEL_FILE)
    network().save(model)
    assert main.main([
        '--model_name', model, '--bn_statistics', 'frozen', '--input_size', str(SIZE),
        '--batch_size', '8', '--dataset_name', 'digits', '--train_images', '40',
        '--validation_steps', '2', '--num_epochs', '3',
        '--train_type', 'full_training', '--prefix_cache', 'off', '--learning_rate', '0.01',
        '--save_txt', '1', '--logs_dir', str(tmp_path / 'logs'), '--run_name', 'run']) == 0
    folder = str(tmp_path / 'logs' / 'run')
    run = read_run(folder)
    assert run.epochs['temperature_c'] == [45.5, 83.0, 47.0]
    assert run.epochs['cpu_mhz'] == pytest.approx([(4 * 2035.2 + 2 * 345.6) / 6] * 3)
    assert run.epochs['throttled'] == [False, True, False]
    assert run.summary['throttled_epochs'] == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('epoch ')]
    assert [line.endswith('s trained   throttled') for line in lines] == [False, True, False]
    with open(os.path.join(folder, 'epochs.txt')) as table:
        assert table.read().splitlines()[3].split()[-3:] == ['83', '1472', '1']
    assert shown(folder, 'device/throttled') == [0, 1, 0]
    assert shown(folder, 'device/temperature_c') == [45.5, 83.0, 47.0]


def shown(folder, tag):
    """Returns a tag's values in TensorBoard, by epoch."""
    values = {event.step: float(tf.make_ndarray(value.tensor))
              for path in glob.glob(os.path.join(folder, 'events.out.*'))
              for event in tf.compat.v1.train.summary_iterator(path)
              for value in event.summary.value if value.tag == tag}
    return [values[epoch] for epoch in sorted(values)]


def test_a_device_that_reports_nothing_leaves_empty_cells(tmp_path):
    trained(tmp_path, checkpoint.Keeper(), None)
    rows = rows_of(tmp_path)
    assert [[row[column] for column in DEVICE_COLUMNS] for row in rows] == [['', '', '']] * 2
    assert shown(str(tmp_path), 'device/temperature_c') == []
    assert len(shown(str(tmp_path), 'test/accuracy')) == 2


def trained(folder, keeper, device):
    """Trains one process of a run of 14 steps; returns its summary, None if interrupted."""
    model, dataset = network(), digits()
    settings = Settings(num_epochs=2, learning_rate=0.01)
    resumed = checkpoint.read(str(folder), RECORDS)
    recorder = Recorder(str(folder), resumed=resumed and resumed['records'])
    try:
        return train.train(
            FixedScheme('full_training', train.step_maker(model, dataset, settings)), dataset,
            settings, Session(recorder, Clock(monitor=thermal.Monitor(device)), keeper, resumed))[0]
    except checkpoint.Interrupted:
        return None
    finally:
        recorder.writer.close()


def rows_of(folder):
    with open(str(folder / 'epochs.csv')) as source:
        return list(csv.DictReader(source))


@pytest.mark.thorough
def test_an_interrupted_epoch_keeps_what_was_seen_before(tmp_path):
    root, cpus = board(tmp_path / 'board', 'OTHER_ARM')
    cooler, logs = COOLER.format(0) + 'cur_state', tmp_path / 'run'
    change(root, {HOT: 90000, cooler: 1})
    steps = itertools.count(1)
    stopped = checkpoint.Keeper(str(logs), stop=lambda: next(steps) >= 4)
    assert trained(logs, stopped, thermal.find_device(root, cpus)) is None
    change(root, {HOT: 30000, cooler: 0})
    result = trained(logs, checkpoint.Keeper(str(logs)), thermal.find_device(root, cpus))
    assert [(float(row['temperature_c']), row['throttled']) for row in rows_of(logs)] == [
        (90.0, '1'), (30.0, '0')]
    assert result['throttled_epochs'] == 1


def test_the_command_shows_what_the_device_reports(tmp_path, monkeypatch, capsys):
    thermal.main([])
    here = thermal.find_device()
    assert (capsys.readouterr().out.strip() == thermal.NOTHING) == (here is None)
    root, cpus = board(tmp_path, 'RASPBERRY_PI_4B')
    device = thermal.find_device(root, cpus)
    monkeypatch.setattr(thermal, 'find_device', lambda: device)
    thermal.main([])
    rows = [line.rsplit('  ', 1) for line in capsys.readouterr().out.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ['temperature (°C)', '48.7'], ['clock (MHz)', 'not reported'], ['throttled', 'no']]
