"""Tests the energy of a run: integrals of recorded sensors, wrap-around, sensors that stop."""

import itertools
import time
from unittest import mock

import numpy as np
import pytest

from boards import LONG, change
from elastic.device import energy
from elastic.runs.clock import Clock


def found(root):
    """Returns the sensors of a recorded board, which answer, and notes."""
    return energy.find_sensors(str(root), LONG)


IIO = 'sys/bus/i2c/devices/0-0040/iio:device0/'
HWMON = 'sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/'
RAPL = 'sys/class/powercap/'
XAVIER_NX = {  # with two channels of another INA3221, as on a TX2
    IIO + 'rail_name_0': 'VDD_IN', IIO + 'in_power0_input': 4876,
    IIO + 'rail_name_1': 'VDD_CPU_GPU_CV', IIO + 'in_power1_input': 691,
    IIO + 'rail_name_2': 'VDD_SOC', IIO + 'in_power2_input': 1139}
TX2 = {  # VDD_M2_IN supplies a card, not the board
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
ORIN_NANO = {
    HWMON + 'in1_label': 'VDD_IN', HWMON + 'in1_input': 5056, HWMON + 'curr1_input': 1000,
    HWMON + 'in2_label': 'VDD_CPU_GPU_CV', HWMON + 'in2_input': 5048, HWMON + 'curr2_input': 120,
    HWMON + 'in7_label': 'sum of shunt voltages', HWMON + 'in7_input': 12}
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
    (XAVIER_NX, ['rail VDD_IN'], 4.876),                    # the whole board, not its parts
    (TX2, ['rail VDD_IN'], 2.75),
    (AGX_XAVIER, ['rail CPU', 'rail CV', 'rail GPU'], 4.0),  # the sum: no rail has the whole board
    (ORIN_NANO, ['rail VDD_IN'], 5.056)], ids=['iio', 'TX2', 'no total', 'hwmon'])
def test_rails_of_a_jetson_are_integrated_and_no_part_counts_twice(tmp_path, files, names, watts):
    sensors, notes = found(change(tmp_path, files))
    assert [sensor.name for sensor in sensors] == names and notes == []
    assert sum(sensor.advance(10.0) for sensor in sensors) == 0
    assert sum(sensor.advance(12.5) for sensor in sensors) == pytest.approx(2.5 * watts)


def test_power_is_integrated_by_trapezoids(tmp_path):
    root = change(tmp_path, XAVIER_NX)
    (rail,), _ = found(root)
    joules = []
    for now, milliwatts in ((0.0, 2000), (1.0, 4000), (3.0, 1000)):
        change(tmp_path, {IIO + 'in_power0_input': milliwatts})
        joules.append(rail.advance(now))
    assert joules == pytest.approx([0, 3, 5])


def test_rapl_counts_packages_and_memory_over_a_wrap(tmp_path):
    sensors, notes = found(change(tmp_path, INTEL))
    assert [sensor.name for sensor in sensors] == [
        'RAPL package-0 of intel-rapl:0', 'RAPL dram of intel-rapl:0:2'] and notes == []
    assert [sensor.advance(0.0) for sensor in sensors] == [0, 0]
    change(tmp_path, {RAPL + 'intel-rapl:0/energy_uj': 1671150,
                    RAPL + 'intel-rapl:0:2/energy_uj': 750000})
    assert [sensor.advance(1.0) for sensor in sensors] == pytest.approx([2.0, 0.25])


def test_one_unreadable_counter_rules_out_all_and_is_named(tmp_path):
    root = change(tmp_path, INTEL)
    (tmp_path / RAPL / 'intel-rapl:0/energy_uj').unlink()
    (tmp_path / RAPL / 'intel-rapl:0/energy_uj').mkdir()  # no user can read it, not even root
    sensors, notes = found(root)
    assert sensors == [] and len(notes) == 1 and 'energy_uj cannot be read' in notes[0]
    result = energy.Meter(sensors, notes).result()
    assert result['energy_joules'] is None and 'energy_uj cannot be read' in result['energy_note']


def meter_of(joules):
    """Returns a Meter of a counter. joules: (seconds) -> what it shows then."""
    now = []
    meter = energy.Meter([energy.Counter('GPU 0', lambda: joules(now[-1]))])
    meter.at = lambda *times: [now.append(at) or meter.sampler.sample(at) for at in times]
    return meter


def test_only_stretches_of_training_count_also_those_between_two_readings():
    stretches, read = [(10.2, 40.1), (50.1, 50.2), (50.2, 50.3), (60, 61)], 0
    times = np.arange(0, 70, 0.5)
    watts = np.full(len(times), 900.0)  # in validation
    for begin, end in stretches:
        watts[(times + 0.5 > begin) & (times < end)] = 3
    counted = np.append(0, np.cumsum(0.5 * watts))
    meter = meter_of(lambda at: counted[int(2 * at)])
    for begin, end in stretches:
        meter.at(*np.arange(read, end, 0.5))
        meter.trained(begin, end)
        read = meter.sampler.samples[-1][0] + 0.5
    assert meter.result()['energy_joules'] == pytest.approx(3 * (29.9 + 0.2 + 1))
    assert len(meter.sampler.samples) <= 5  # older ones are forgotten


def test_energy_before_the_next_reading_goes_into_a_checkpoint():
    meter, resumed = meter_of(lambda at: 4 * at), meter_of(lambda at: 4 * at)
    meter.at(0, 0.5, 1)
    meter.trained(0.2, 1.3)
    assert meter.state()['joules'] == pytest.approx(4 * 1.1)
    resumed.restore(meter.state())
    resumed.at(90, 90.5)
    resumed.trained(90, 90.5)
    assert resumed.result()['energy_joules'] == pytest.approx(4 * 1.6)
    assert len(resumed.result()['training_intervals']) == 2
    for changed in (energy.Meter([]), energy.Meter([energy.Power('other', lambda: 4)])):
        changed.restore(meter.state())
        assert 'sensors changed' in changed.result()['energy_note']


def test_the_clock_gives_the_meter_its_training_buckets(tmp_path):
    root = change(tmp_path, dict(XAVIER_NX, **{IIO + 'in_power0_input': 3000}))
    clock = Clock(energy.Meter(*found(root)))
    clock.meter.sampler.period = 0.001
    with clock.sampling():
        for bucket in ('selection', 'step', 'validation', 'step'):
            with clock(bucket):
                seen = len(clock.meter.sampler.samples)
                while len(clock.meter.sampler.samples) < seen + 3:
                    time.sleep(0.001)
        result = clock.meter.result()
    assert result['energy_joules'] == pytest.approx(3 * clock.train_seconds)
    assert result['energy_source'] == 'rail VDD_IN' and result['energy_note'] is None
    (a, b), (c, d) = result['training_intervals']
    assert a < b < c < d and b - a + d - c == pytest.approx(clock.train_seconds, abs=1e-3)


def result_of(meter):
    """Returns the energy_joules and energy_note of a meter whose sampler runs for a while."""
    meter.sampler.period = 0.001
    with meter.sampler.running():
        begin = time.perf_counter()
        while len(meter.sampler.samples) < 2 and meter.sampler.fault() is None:
            time.sleep(0.001)
        meter.trained(begin, time.perf_counter())
    return [meter.result()[key] for key in ('energy_joules', 'energy_note')]


@pytest.mark.parametrize('readings, reason', [
    ([10.0, BlockingIOError(11, 'try again'), 15.0], None),
    ([10.0, 3.0, 15.0], None),  # one reading makes no sense
    ([10.0, BlockingIOError(11, 'try again'), OSError(19, 'no such device')], 'no such device'),
    ([10.0, 3.0, 3.0], 'the counter went back')],
    ids=['busy', 'glitch', 'gone', 'went back'])
def test_a_reading_that_fails_once_is_repeated(readings, reason):
    rest = itertools.chain(readings, itertools.repeat(15.0))

    def read():
        value = next(rest)
        if isinstance(value, Exception):
            raise value
        return value
    joules, note = result_of(energy.Meter([energy.Counter('GPU 0', read)]))
    assert (joules is None) == (reason is not None)
    assert note is None or note.startswith('GPU 0 stopped answering: ') and reason in note


def test_a_training_of_less_than_two_readings_is_not_measured():
    meter = meter_of(lambda at: 4 * at)
    meter.at(0)
    meter.trained(0, 0.1)
    assert [meter.result()[key] for key in ('energy_joules', 'energy_note')] == [
        None, energy.TOO_FEW]


def fake_nvml(gpus, counts=True):
    """Returns what stands in for pynvml; GPUs are numbered by PCI bus, and show `reading`."""
    nvml = mock.Mock(NVMLError=LookupError, reading=1000)  # mJ or mW
    nvml.nvmlDeviceGetCount.return_value = len(gpus)
    nvml.nvmlDeviceGetHandleByIndex.side_effect = dict(enumerate(gpus)).__getitem__
    nvml.nvmlDeviceGetHandleByUUID.side_effect = {gpu: gpu for gpu in gpus}.__getitem__
    nvml.nvmlDeviceGetPowerUsage.side_effect = lambda handle: nvml.reading
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = (
        nvml.nvmlDeviceGetPowerUsage.side_effect if counts else LookupError('Not Supported'))
    return nvml


@pytest.mark.parametrize('gpus, visible, order, chosen, says', [
    (['a'], None, None, 'a', None), (['a'], '1', None, None, 'GPU: '),
    (['a', 'b'], None, None, None, 'choose one'),
    (['a', 'b'], '1', 'FASTEST_FIRST', None, 'CUDA_DEVICE_ORDER=PCI_BUS_ID'),
    (['a', 'b'], '1,0', 'PCI_BUS_ID', 'b', None), (['a', 'b'], 'b', None, 'b', None),
    (['a', 'b'], '', None, None, None)])
def test_only_the_gpu_that_trains_is_measured(monkeypatch, gpus, visible, order, chosen, says):
    nvml = fake_nvml(gpus)
    for name, value in (('CUDA_VISIBLE_DEVICES', visible), ('CUDA_DEVICE_ORDER', order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    sensors, notes = energy.nvidia_gpus(nvml)
    assert len(sensors) == (chosen is not None)
    asked = nvml.nvmlDeviceGetTotalEnergyConsumption.call_args_list
    assert asked == ([mock.call(chosen)] if chosen else [])
    assert len(notes) == (says is not None) and (says is None or says in notes[0])


@pytest.mark.parametrize('counts, joules', [(True, 2.0), (False, 4.0)])  # from 1 and 3 J, or W
def test_a_gpu_counts_joules_or_reports_watts(monkeypatch, counts, joules):
    nvml = fake_nvml(['a'], counts)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    (gpu,), notes = energy.nvidia_gpus(nvml)
    assert gpu.advance(10.0) == 0 and notes == []
    nvml.reading = 3000
    assert gpu.advance(12.0) == pytest.approx(joules)
    for read in (nvml.nvmlDeviceGetTotalEnergyConsumption, nvml.nvmlDeviceGetPowerUsage):
        read.side_effect = LookupError('Not Found')
    assert result_of(energy.Meter([gpu])) == [None, 'GPU 0 stopped answering: Not Found']


def test_a_device_without_a_sensor_says_so(tmp_path):
    clock = Clock(energy.Meter(*found(str(tmp_path))))
    with clock.sampling(), clock('step'):
        pass
    result = clock.meter.result()
    assert result['energy_joules'] is None and 'no power sensor found' in result['energy_note']
    assert len(result['training_intervals']) == 1
