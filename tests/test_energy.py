"""Energy of a run: integrals of recorded sensors, wrap-around, sensors that stop, meter logs."""

import json
import time

import pytest
from test_plot import make_run

import energy
from command_line import UserError
from train import Clock


def tree(root, files):
    """Writes a recorded sysfs tree: path -> content."""
    for path, content in files.items():
        path = root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content) + '\n')
    return str(root)


IIO = 'sys/bus/i2c/devices/0-0040/iio:device0/'
XAVIER_NX = {  # with two more channels of another INA3221, as on a TX2
    IIO + 'rail_name_0': 'VDD_IN', IIO + 'in_power0_input': 4876,
    IIO + 'rail_name_1': 'VDD_CPU_GPU_CV', IIO + 'in_power1_input': 691,
    IIO + 'rail_name_2': 'VDD_SOC', IIO + 'in_power2_input': 1139}
TX2 = {  # VDD_M2_IN is the supply of a card, not of the board
    IIO + 'rail_name_0': 'VDD_SYS_GPU', IIO + 'in_power0_input': 152,
    IIO + 'rail_name_1': 'VDD_SYS_SOC', IIO + 'in_power1_input': 458,
    IIO.replace('40', '41') + 'rail_name_0': 'VDD_IN',
    IIO.replace('40', '41') + 'in_power0_input': 2750,
    IIO.replace('40', '42') + 'rail_name_2': 'VDD_M2_IN',
    IIO.replace('40', '42') + 'in_power2_input': 5}
AGX_XAVIER = {
    IIO + 'rail_name_0': 'GPU', IIO + 'in_power0_input': 1500,
    IIO + 'rail_name_1': 'CPU', IIO + 'in_power1_input': 2500,
    IIO.replace('40', '41') + 'rail_name_0': 'CV', IIO.replace('40', '41') + 'in_power0_input': 0,
    IIO.replace('40', '41') + 'rail_name_1': 'NC', IIO.replace('40', '41') + 'in_power1_input': 77}
HWMON = 'sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/'
ORIN_NANO = {
    HWMON + 'in1_label': 'VDD_IN', HWMON + 'in1_input': 5056, HWMON + 'curr1_input': 1000,
    HWMON + 'in2_label': 'VDD_CPU_GPU_CV', HWMON + 'in2_input': 5048, HWMON + 'curr2_input': 120,
    HWMON + 'in7_label': 'sum of shunt voltages', HWMON + 'in7_input': 12}
RAPL = 'sys/class/powercap/'
INTEL = {
    RAPL + 'intel-rapl:0/name': 'package-0', RAPL + 'intel-rapl:0/energy_uj': 262143000000,
    RAPL + 'intel-rapl:0/max_energy_range_uj': 262143328850,
    RAPL + 'intel-rapl:0:0/name': 'core', RAPL + 'intel-rapl:0:0/energy_uj': 12,
    RAPL + 'intel-rapl:0:0/max_energy_range_uj': 262143328850,
    RAPL + 'intel-rapl:0:2/name': 'dram', RAPL + 'intel-rapl:0:2/energy_uj': 500000,
    RAPL + 'intel-rapl:0:2/max_energy_range_uj': 65712999613,
    RAPL + 'intel-rapl-mmio:0/name': 'package-0', RAPL + 'intel-rapl-mmio:0/energy_uj': 1,
    RAPL + 'intel-rapl-mmio:0/max_energy_range_uj': 262143328850,
    RAPL + 'intel-rapl/enabled': 1}


@pytest.mark.parametrize('files, names, watts', [
    (XAVIER_NX, ['rail VDD_IN'], 4.876),                    # the board, not its parts once more
    (TX2, ['rail VDD_IN'], 2.75),
    (AGX_XAVIER, ['rail CPU', 'rail CV', 'rail GPU'], 4.0),  # no rail of the whole: their sum
    (ORIN_NANO, ['rail VDD_IN'], 5.056)], ids=['iio', 'TX2', 'no total', 'hwmon'])
def test_rails_of_a_jetson_are_integrated_and_no_part_counts_twice(tmp_path, files, names, watts):
    sensors, notes = energy.find_sensors(tree(tmp_path, files))
    assert [sensor.name for sensor in sensors] == names and notes == []
    assert sum(sensor.advance(10.0) for sensor in sensors) == 0
    assert sum(sensor.advance(12.5) for sensor in sensors) == pytest.approx(2.5 * watts)


def test_power_is_integrated_by_trapezoids(tmp_path):
    root = tree(tmp_path, XAVIER_NX)
    (rail,), _ = energy.find_sensors(root)
    joules = []
    for now, milliwatts in ((0.0, 2000), (1.0, 4000), (3.0, 1000)):
        tree(tmp_path, {IIO + 'in_power0_input': milliwatts})
        joules.append(rail.advance(now))
    assert joules == pytest.approx([0, 3, 5])


def test_rapl_counts_packages_and_memory_over_a_wrap(tmp_path):
    sensors, notes = energy.find_sensors(tree(tmp_path, INTEL))
    assert [sensor.name for sensor in sensors] == [
        'RAPL package-0 of intel-rapl:0', 'RAPL dram of intel-rapl:0:2'] and notes == []
    assert [sensor.advance(0.0) for sensor in sensors] == [0, 0]
    tree(tmp_path, {RAPL + 'intel-rapl:0/energy_uj': 1671150,
                    RAPL + 'intel-rapl:0:2/energy_uj': 750000})
    assert [sensor.advance(1.0) for sensor in sensors] == pytest.approx([2.0, 0.25])


def test_a_counter_that_goes_back_without_a_range_is_no_number():
    readings = iter([5.0, 4.0])
    counter = energy.Counter('GPU 0', lambda: next(readings))
    counter.advance(0.0)
    with pytest.raises(ValueError, match='went back'):
        counter.advance(1.0)


def test_counters_for_root_alone_are_named_and_the_rest_does_not_pass_for_all(tmp_path):
    root = tree(tmp_path, INTEL)
    (tmp_path / RAPL / 'intel-rapl:0/energy_uj').unlink()
    (tmp_path / RAPL / 'intel-rapl:0/energy_uj').mkdir()  # cannot be read, whoever runs the tests
    sensors, notes = energy.find_sensors(root)
    assert sensors == [] and len(notes) == 1 and 'energy_uj cannot be read' in notes[0]
    result = energy.Meter(sensors, notes).result()
    assert result['energy_joules'] is None and 'energy_uj cannot be read' in result['energy_note']


@pytest.mark.timing
def test_only_what_runs_is_measured_and_validation_is_left_out(tmp_path):
    root = tree(tmp_path, XAVIER_NX)
    meter = energy.Meter(*energy.find_sensors(root), period=0.02)
    clock = Clock(meter)
    for bucket, milliwatts in (('step', 3000), ('validation', 900000), ('selection', 3000)):
        tree(tmp_path, {IIO + 'in_power0_input': milliwatts})
        with clock(bucket):
            time.sleep(0.1)
    result = meter.result()
    assert result['energy_joules'] == pytest.approx(3 * clock.train_seconds, rel=0.2)
    assert result['energy_source'] == 'rail VDD_IN' and result['energy_note'] is None
    (a, b), (c, d) = result['training_intervals']
    assert a < b <= c - 0.09 and c < d


@pytest.mark.timing
def test_power_between_the_ends_is_sampled(tmp_path):
    root = tree(tmp_path, dict(XAVIER_NX, **{IIO + 'in_power0_input': 0}))
    meter = energy.Meter(*energy.find_sensors(root), period=0.01)

    def set_milliwatts(value):  # never half written: the thread may be reading
        tree(tmp_path, {'next': value})
        (tmp_path / 'next').replace(tmp_path / IIO / 'in_power0_input')
        time.sleep(0.1)
    with meter.running():
        set_milliwatts(10000)
        set_milliwatts(0)
    assert meter.result()['energy_joules'] > 0.5


@pytest.mark.timing
@pytest.mark.parametrize('files', [AGX_XAVIER, INTEL], ids=['rails', 'counters'])
def test_sampling_takes_less_than_a_hundredth_of_the_time(tmp_path, files):
    """Readings alone: how long a device's own bus takes for one is another matter."""
    assert energy.PERIOD <= 1  # at least one reading a second
    sensors, _ = energy.find_sensors(tree(tmp_path, files))
    meter, count = energy.Meter(sensors), 50
    with meter.running():
        begin = time.perf_counter()
        for _ in range(count):
            meter._read()
        spent = time.perf_counter() - begin
    assert meter.result()['energy_joules'] is not None
    assert spent < 0.01 * count * energy.PERIOD


def test_a_sensor_that_disappears_leaves_no_number(tmp_path):
    root = tree(tmp_path, AGX_XAVIER)
    meter = energy.Meter(*energy.find_sensors(root), period=0.01)
    with meter.running():
        (tmp_path / IIO / 'in_power1_input').unlink()
        time.sleep(0.05)
    result = meter.result()
    assert result['energy_joules'] is None
    assert 'rail CPU stopped answering' in result['energy_note']


def test_a_device_without_a_sensor_says_so(tmp_path):
    meter = energy.Meter(*energy.find_sensors(str(tmp_path)))
    with meter.running():
        pass
    result = meter.result()
    assert result['energy_joules'] is None and 'no power sensor found' in result['energy_note']
    assert len(result['training_intervals']) == 1


# ---------------------------------------------------------------- an external meter

def meter_log(path, rows, header='timestamp,watts'):
    path.write_text('\n'.join([header] + ['{},{}'.format(*row) for row in rows]) + '\n')
    return str(path)


def test_a_meter_log_is_integrated_over_the_training_intervals(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 4), (102, 4), (103, 8), (104, 8)])
    times, watts = energy.read_meter(path)
    assert energy.metered_joules(times, watts, [[100, 104]]) == pytest.approx(3 + 4 + 6 + 8)
    assert energy.metered_joules(times, watts, [[100.5, 100.75], [103.5, 104]]) == pytest.approx(
        0.25 * 3.25 + 4)
    assert energy.from_meter(path, [[101, 102]]) == {
        'energy_joules': pytest.approx(4), 'energy_source': 'meter log meter.csv',
        'energy_note': None, 'training_intervals': [[101, 102]]}


@pytest.mark.parametrize('rows, header, says', [
    ([(100, 2), (101, 'x')], 'timestamp,watts', 'line 3: expected the columns'),
    ([(100, 2), (101, 3)], 'time,power', 'line 2: expected the columns'),
    ([(100, 2), (100, 3)], 'timestamp,watts', 'line 3.*must grow'),
    ([(100, 2), (101, -3)], 'timestamp,watts', 'line 3.*negative'),
    ([(100, 2)], 'timestamp,watts', 'has 1 readings')])
def test_a_log_that_is_none_is_refused_with_its_line(tmp_path, rows, header, says):
    with pytest.raises(UserError, match=says):
        energy.read_meter(meter_log(tmp_path / 'meter.csv', rows, header))


def test_a_log_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2)])
    with open(path, 'a') as log:
        log.write('102')
    assert energy.read_meter(path) == ([100, 101], [2, 2])
    energy.check_meter(path)
    (tmp_path / 'meter.csv').write_text('')  # it may start later
    energy.check_meter(path)
    with pytest.raises(UserError, match='columns time, power'):
        energy.check_meter(meter_log(tmp_path / 'meter.csv', [(1, 2)], 'time,power'))
    with pytest.raises(UserError, match='cannot read'):
        energy.check_meter(str(tmp_path / 'none'))


def test_a_log_with_a_hole_or_too_short_gives_no_number_but_the_reason(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2), (110, 2), (111, 2)])
    for interval, says in (([100, 111], 'a hole of 9 s at 101'), ([99, 101], 'covers 100 to 111'),
                           ([110, 112], 'covers 100 to 111')):
        result = energy.from_meter(path, [interval])
        assert result['energy_joules'] is None and says in result['energy_note']
    assert energy.from_meter(path, [[110, 111]])['energy_joules'] == pytest.approx(2)
    assert 'cannot read' in energy.from_meter(str(tmp_path / 'none'), [[1, 2]])['energy_note']


def test_a_log_is_added_to_a_finished_run(tmp_path, capsys):
    run = make_run(tmp_path, 'run', training_intervals=[[100, 102]], energy_joules=None)
    path = meter_log(tmp_path / 'meter.csv', [(99, 5), (103, 5)])
    energy.main([str(run), '--meter_csv', path])
    assert capsys.readouterr().out.endswith('10.0 J\n')
    assert json.loads((run / 'summary.json').read_text())['energy_joules'] == pytest.approx(10)
    stepped = make_run(tmp_path, 'stepped', training_intervals=None, energy_joules=None)
    with pytest.raises(UserError, match='the clock was set during training'):
        energy.main([str(stepped), '--meter_csv', path])
    with pytest.raises(UserError, match='did not record when it trained'):
        energy.main([str(make_run(tmp_path, 'old')), '--meter_csv', path])
    with pytest.raises(UserError, match='belong together'):
        energy.main([str(run)])


def test_the_script_lists_what_this_device_offers(capsys):
    energy.main([])
    out = capsys.readouterr().out
    assert 'power (W)' in out or energy.NO_SENSOR in out
