"""Energy of a run: integrals of recorded sensors, wrap-around, sensors that stop, meter logs."""

import json
import shutil
import sys
import time
import tracemalloc
import types

import pytest
from test_plot import make_run

import energy
from command_line import UserError
from meter_log import check_meter, metered_joules, read_meter
from stopwatch import Clock


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


@pytest.mark.parametrize('readings, joules', [
    ([10.0, BlockingIOError(11, 'try again'), 15.0], 5), ([10.0, ValueError(''), 15.0], 5),
    ([10.0, 3.0, 15.0], 5),  # one reading of a counter that makes no sense
    ([10.0, BlockingIOError(11, 'try again'), OSError(19, 'no such device')], None),
    ([10.0, 3.0, 3.0], None)], ids=['busy', 'empty', 'glitch', 'gone', 'went back'])
def test_a_reading_that_fails_once_is_taken_again(readings, joules):
    rest = iter(readings)

    def read():
        value = next(rest)
        if isinstance(value, Exception):
            raise value
        return value
    meter = energy.Meter([energy.Counter('GPU 0', read)], period=60)
    with meter.running():
        pass
    result = meter.result()
    assert result['energy_joules'] == joules
    assert (result['energy_note'] is None) == (joules is not None)


class FakeNVML(types.ModuleType):
    """The part of NVIDIA's pynvml that is used; GPUs are numbered by PCI bus."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus, counts=True):
        super().__init__('pynvml')
        self.gpus, self.counts, self.reading, self.asked = gpus, counts, 1000, []

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._found(index in range(len(self.gpus)) and self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._found(uuid in self.gpus and uuid)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self.asked.append(handle)
        return self._found(self.counts and self.reading)  # mJ

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._found(self.reading)  # mW

    def _found(self, value):
        if not value:
            raise self.NVMLError('Not Found')
        return value


@pytest.mark.parametrize('gpus, visible, order, chosen, says', [
    (['a'], None, None, 'a', None), (['a'], '0', None, 'a', None), (['a'], '1', None, None, 'Not'),
    (['a', 'b'], None, None, None, 'choose one'),
    (['a', 'b'], '1', None, None, 'CUDA_DEVICE_ORDER=PCI_BUS_ID'),
    (['a', 'b'], '1', 'FASTEST_FIRST', None, 'CUDA_DEVICE_ORDER=PCI_BUS_ID'),
    (['a', 'b'], '1,0', 'PCI_BUS_ID', 'b', None), (['a', 'b'], 'b', None, 'b', None),
    (['a', 'b'], '', None, None, None)])
def test_a_gpu_is_measured_only_where_it_is_the_one_that_trains(monkeypatch, gpus, visible, order,
                                                                chosen, says):
    nvml, notes = FakeNVML(gpus), []
    monkeypatch.setitem(sys.modules, 'pynvml', nvml)
    for name, value in (('CUDA_VISIBLE_DEVICES', visible), ('CUDA_DEVICE_ORDER', order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    sensors = energy.nvidia_gpus(notes)
    assert len(sensors) == (chosen is not None)
    assert nvml.asked == ([chosen] if chosen else [])
    assert len(notes) == (says is not None) and (says is None or says in notes[0])


@pytest.mark.parametrize('counts, joules', [(True, 2.0), (False, 4.0)])  # of 1 and 3 J, or W
def test_a_gpu_counts_joules_or_tells_watts(monkeypatch, counts, joules):
    nvml, notes = FakeNVML(['a'], counts), []
    monkeypatch.setitem(sys.modules, 'pynvml', nvml)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    (gpu,) = energy.nvidia_gpus(notes)
    assert gpu.advance(10.0) == 0 and notes == []
    nvml.reading = 3000
    assert gpu.advance(12.0) == pytest.approx(joules)
    nvml.reading = 0  # the driver raises its own kind of error
    with pytest.raises(RuntimeError, match='Not Found'):
        gpu.advance(13.0)


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


def metered(tmp_path, path, intervals):
    """The energy in the summary of a run that trained then, by the log in `path`."""
    run = make_run(tmp_path, 'metered', training_intervals=intervals, energy_joules=None)
    try:
        energy.add_to_run(str(run), path)
    except UserError:
        pass
    summary = json.loads((run / 'summary.json').read_text())
    shutil.rmtree(str(run))
    return {key: summary[key] for key in ('energy_joules', 'energy_source', 'energy_note',
                                          'training_intervals')}


def test_a_meter_log_is_integrated_over_the_training_intervals(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 4), (102, 4), (103, 8), (104, 8)])
    log = read_meter(path)
    assert metered_joules(log, [[100, 104]]) == pytest.approx(3 + 4 + 6 + 8)
    assert metered_joules(log, [[100.5, 100.75], [103.5, 104]]) == pytest.approx(
        0.25 * 3.25 + 4)
    assert metered(tmp_path, path, [[101, 102]]) == {
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
        read_meter(meter_log(tmp_path / 'meter.csv', rows, header))


def test_a_log_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2)])
    with open(path, 'a') as log:
        log.write('102')
    (times, watts), = read_meter(path).stretches
    assert (list(times), list(watts)) == ([100, 101], [2, 2])
    check_meter(path)
    (tmp_path / 'meter.csv').write_text('')  # it may start later
    check_meter(path)
    with pytest.raises(UserError, match='columns time, power'):
        check_meter(meter_log(tmp_path / 'meter.csv', [(1, 2)], 'time,power'))
    with pytest.raises(UserError, match='cannot read'):
        check_meter(str(tmp_path / 'none'))


def test_a_log_with_a_hole_or_too_short_gives_no_number_but_the_reason(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2), (110, 2), (111, 2)])
    for interval, says in (([100, 111], 'a hole of 9 s at 101'), ([99, 101], 'covers 100 to 111'),
                           ([110, 112], 'covers 100 to 111')):
        result = metered(tmp_path, path, [interval])
        assert result['energy_joules'] is None and says in result['energy_note']
    assert metered(tmp_path, path, [[110, 111]])['energy_joules'] == pytest.approx(2)
    assert 'cannot read' in metered(tmp_path, str(tmp_path / 'none'), [[1, 2]])['energy_note']


DAMAGED = {  # what stands between the readings of 102 s and of 104 s
    'header again': 'timestamp,watts', 'cut line': '103', 'cut into the next': '103,2103.5,2',
    'stray quote': '103,"2', 'NUL bytes': '\0' * 100, 'NUL block': '\0' * 200000,
    'no text': '\udcff', 'negative': '103,-2', 'went back': '101.5,7'}


@pytest.mark.parametrize('line', list(DAMAGED.values()), ids=list(DAMAGED))
def test_a_damaged_line_counts_only_within_training(tmp_path, line):
    path = tmp_path / 'meter.csv'
    path.write_bytes('\n'.join(['timestamp,watts', '100,2', '101,2', '102,2', line, '104,2',
                                '105,2', '106,2', '']).encode('utf-8', 'surrogateescape'))
    good = metered(tmp_path, str(path), [[100, 101], [104, 106]])
    assert (good['energy_joules'], good['energy_note']) == (pytest.approx(6), None)
    bad = metered(tmp_path, str(path), [[100, 101], [101, 105]])
    assert bad['energy_joules'] is None
    assert bad['energy_note'].startswith('{}, line 5: '.format(path))


def test_a_log_that_ends_in_damage_names_it(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2), (102, '\0')])
    assert metered(tmp_path, path, [[100, 101]])['energy_joules'] == pytest.approx(2)
    assert 'line 4: ' in metered(tmp_path, path, [[100, 102]])['energy_note']


def test_readings_of_two_clocks_are_never_mixed(tmp_path):
    """A board boots with an older time, later gets the right one, and boots again in 1970."""
    seconds = list(range(100, 120)) + list(range(110, 125)) + list(range(300, 310)) + [5, 6, 310]
    watts = [2] * 20 + [50] * 15 + [3] * 13
    path = meter_log(tmp_path / 'meter.csv', zip(seconds, watts))
    for interval, joules in (([100, 110], 20), ([120, 124], 200), ([301, 305], 12)):
        assert metered(tmp_path, path, [interval])['energy_joules'] == pytest.approx(joules)
    for interval, says in (([105, 112], 'line 22: timestamps must grow'),  # told by both clocks
                           ([112, 118], 'line 22: timestamps must grow'),
                           ([118, 122], 'line 22: timestamps must grow'),
                           ([123, 301], 'a hole of 176 s at 124')):
        result = metered(tmp_path, path, [interval])
        assert result['energy_joules'] is None and says in result['energy_note']


def peak_memory(call, *arguments):
    """Bytes that the call held at once."""
    tracemalloc.start()
    try:
        call(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_log_fits_into_a_small_board(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(1700000000 + i, 2.5) for i in range(20000)])
    assert peak_memory(read_meter, path) < 20000 * 100
    with open(path, 'r+b') as log:
        log.truncate(1 << 25)  # zeros without a line's end: to be read whole or not at all
    assert peak_memory(check_meter, path) < 1e6


def test_a_damaged_header_is_refused_before_training(tmp_path):
    (tmp_path / 'meter.csv').write_bytes(b'\0' * 200000 + b'\n')
    with pytest.raises(UserError, match='meter.csv, line 1: '):
        check_meter(str(tmp_path / 'meter.csv'))


def test_a_log_is_added_to_a_finished_run(tmp_path, capsys):
    run = make_run(tmp_path, 'run', training_intervals=[[100, 102]], energy_joules=None)
    path = meter_log(tmp_path / 'meter.csv', [(99, 5), (103, 5)])
    energy.main([str(run), '--meter_csv', path])
    assert capsys.readouterr().out.endswith('10.0 J\n')
    assert json.loads((run / 'summary.json').read_text())['energy_joules'] == pytest.approx(10)
    stepped = make_run(tmp_path, 'stepped', training_intervals=None, energy_joules=None)
    with pytest.raises(UserError, match='the clock was set during training'):
        energy.main([str(stepped), '--meter_csv', path])
    measured = make_run(tmp_path, 'measured', training_intervals=[[90, 102]], energy_joules=7)
    before = (measured / 'summary.json').read_bytes()
    with pytest.raises(UserError, match='covers 99 to 103'):
        energy.main([str(measured), '--meter_csv', path])
    assert (measured / 'summary.json').read_bytes() == before
    with pytest.raises(UserError, match='did not record when it trained'):
        energy.main([str(make_run(tmp_path, 'old')), '--meter_csv', path])
    with pytest.raises(UserError, match='belong together'):
        energy.main([str(run)])


def test_the_script_lists_what_this_device_offers(capsys):
    energy.main([])
    out = capsys.readouterr().out
    assert 'power (W)' in out or energy.NO_SENSOR in out
