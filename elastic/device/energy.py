"""Measures the energy of training in joules with the device's own sensors; never estimates it.

Sensors are the rails of a Jetson's INA3221 (sysfs), the RAPL counters of Intel and AMD processors
(powercap), and NVIDIA GPUs (NVML). A Raspberry Pi 4B has none: elastic.runs.metered adds the log of
an external meter.
"""

import os
import time

import numpy as np

from elastic.device.sensors import (
    LATE,
    NO_ANSWER,
    PATIENCE,
    READ_ERRORS,
    Sampler,
    in_time,
    paths,
    text,
)

PERIOD = 0.5  # s between two readings
SAME = 1e-3  # s; stretches of training that are no further apart count as one
CLOCK_STEP = 1.0  # s; a larger jump of the system clock makes a meter's log useless
WHOLE_BOARD = ('VDD_IN', 'POM_5V_IN')  # rails that supply a whole Jetson
TOO_FEW = NO_ANSWER + ' in time: training ended before the second reading of power'
NO_SENSOR = ('no power sensor found (Jetson INA3221, RAPL, NVML); add the log of an external meter '
             'with --meter_csv')


class Power:
    """Integrates a sensor of watts by the trapezoidal rule. watts: () -> float."""

    def __init__(self, name, watts):
        self.name, self._watts, self._last = name, watts, None

    def advance(self, now):
        """Returns the joules since the last call, 0 on the first. now: monotonic seconds."""
        watts, last = self._watts(), self._last
        self._last = now, watts
        return (now - last[0]) * (watts + last[1]) / 2 if last else 0.0


class Counter:
    """Reads a sensor that counts joules.

    joules: () -> float. wraps_at: joules at which the count restarts from 0, or None.
    """

    def __init__(self, name, joules, wraps_at=None):
        self.name, self._joules, self._wraps_at, self._last = name, joules, wraps_at, None

    def advance(self, now):
        """Returns the joules since the last call, 0 on the first."""
        joules = self._joules()
        grown = 0.0 if self._last is None else joules - self._last
        if grown < 0:
            if self._wraps_at is None:
                raise ValueError('the counter went back')
            grown += self._wraps_at
        self._last = joules  # only now: the next reading is compared with a good one
        return grown


# ---------------------------------------------------------------- sensors of this device

def find_sensors(root='/', seconds=PATIENCE, gpu_seconds=PATIENCE):
    """Returns sensors that measure the device, none of it twice, and notes on unusable sensors.

    root: folder that contains sys/. NVML is used only if it is '/'. seconds, gpu_seconds: how long
    sensors on the board and on a GPU may take. What takes longer is named in the notes.
    """
    try:
        rails = in_time(lambda: jetson_rails(root), seconds)
        if rails:
            return rails, []
        counters, notes = in_time(lambda: rapl_counters(root), seconds)
        if root != '/':
            return counters, notes
        import pynvml  # not within gpu_seconds: a slow card may take long to load it
        gpus, more = in_time(lambda: nvidia_gpus(pynvml), gpu_seconds)
    except ImportError:
        return counters, notes
    except TimeoutError as error:
        return [], ['power sensors: {}'.format(error)]
    return counters + gpus, notes + more


def jetson_rails(root):
    """Returns the Power of the rail of the whole board, or of all rails if there is none."""
    rails = {}
    for path in paths(root, 'sys/bus/i2c/devices/*/iio:device*/rail_name_*'):
        folder, name = os.path.split(path)
        power = os.path.join(folder, name.replace('rail_name_', 'in_power') + '_input')
        if os.path.exists(power):
            rails[text(path)] = lambda power=power: float(text(power)) / 1e3  # mW
    for path in paths(root, 'sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in*_label'):
        folder, name = os.path.split(path)
        name = name.replace('label', 'input')
        volts = os.path.join(folder, name)
        amperes = os.path.join(folder, name.replace('in', 'curr', 1))
        if os.path.exists(volts) and os.path.exists(amperes):
            rails[text(path)] = lambda volts=volts, amperes=amperes: (
                float(text(volts)) * float(text(amperes)) / 1e6)  # mV, mA
    whole = [name for name in rails if name in WHOLE_BOARD]
    rails.pop('NC', None)
    if 'VIN_SYS_5V0' in rails:  # an AGX Orin, where this rail feeds the other
        rails.pop('VDDQ_VDD2_1V8AO', None)
    return [Power('rail ' + name, rails[name]) for name in sorted(whole or rails)]


def rapl_counters(root):
    """Returns the Counters of memory and of processor packages with their cores, and notes.

    Returns no Counters if one cannot be read, because the others would pass for the whole.
    """
    counters, faults = [], []
    for path in paths(root, 'sys/class/powercap/*/name'):
        zone, name = os.path.dirname(path), text(path)
        energy = os.path.join(zone, 'energy_uj')
        if 'mmio' in os.path.basename(zone) or not (name.startswith('package') or name == 'dram'):
            continue  # memory-mapped zones count the same packages again
        try:
            wraps_at = float(text(os.path.join(zone, 'max_energy_range_uj'))) / 1e6
            float(text(energy))
        except READ_ERRORS as error:
            faults.append('RAPL {}: {} cannot be read ({}); root may allow it: chmod a+r {}'
                          .format(name, energy, getattr(error, 'strerror', None) or error, energy))
        else:
            counters.append(Counter('RAPL {} of {}'.format(name, os.path.basename(zone)),
                                    lambda energy=energy: float(text(energy)) / 1e6, wraps_at))
    return [] if faults else counters, faults


def nvidia_gpus(pynvml):
    """Returns [sensor] of the GPU that trains, or [] if that GPU is unknown, and notes.

    pynvml: the module. The GPU is the only one, or the first in CUDA_VISIBLE_DEVICES. CUDA numbers
    GPUs by speed, NVML by PCI bus, unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    try:
        pynvml.nvmlInit()
    except Exception:  # whatever NVML raises: there is no NVIDIA driver
        return [], []
    try:
        chosen = os.environ.get('CUDA_VISIBLE_DEVICES')
        count = pynvml.nvmlDeviceGetCount()
        if count == 0 or chosen in ('', '-1'):
            return [], []
        if chosen is None and count > 1:
            return [], ['{} GPUs: choose one with CUDA_VISIBLE_DEVICES and '
                        'CUDA_DEVICE_ORDER=PCI_BUS_ID'.format(count)]
        first = (chosen or '0').split(',')[0].strip()
        if first.isdigit() and count > 1 and os.environ.get('CUDA_DEVICE_ORDER') != 'PCI_BUS_ID':
            return [], ['{} GPUs: which one is number {} is only certain with CUDA_DEVICE_ORDER='
                        'PCI_BUS_ID; set it, or give the UUID in CUDA_VISIBLE_DEVICES'.format(
                            count, first)]
        handle = (pynvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdigit()
                  else pynvml.nvmlDeviceGetHandleByUUID(first))
        return [_gpu_sensor(pynvml, handle, 'GPU ' + first)], []
    except pynvml.NVMLError as error:
        return [], ['GPU: {}'.format(error)]


def _gpu_sensor(pynvml, handle, name):
    try:
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        return Counter(name, lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)  # mJ
    except pynvml.NVMLError:  # GPUs before Volta do not count
        pynvml.nvmlDeviceGetPowerUsage(handle)
        return Power(name, lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)  # mW


# ---------------------------------------------------------------- energy of training

def joules_within(times, joules, stretches):
    """Returns the joules in all stretches; between two readings they grow evenly.

    times: (n,) s. joules: (n,), counted since any moment. stretches: (m, 2), starts and ends in s.
    """
    ends = np.interp(np.reshape(stretches, (-1, 2)), times, joules)
    return float(np.sum(ends[:, 1] - ends[:, 0]))


class Meter:
    """Adds up the joules of all sensors in stretches of training.

    sensors, notes: from find_sensors. If a sensor stops answering, there is no result: the sum of
    the others would be too small.
    sampler: reads the joules of all sensors since its first reading.
    """

    def __init__(self, sensors, notes=()):
        self._sensors, self._notes = sensors, notes
        self.sampler = Sampler(self._read if sensors else None, PERIOD)
        self._counted, self._asked = 0.0, None  # of the sampler's thread
        self._joules, self._fault = 0.0, None
        self._open = []  # stretches that are not yet in _joules, as readings after them are missing
        self._intervals = []  # [start, end] of each stretch, in seconds since 1970
        self._was_set = False  # whether an earlier process of this run saw the system clock set
        self._clock_offset = time.time() - time.perf_counter()

    def _read(self, now):
        for sensor in self._sensors:
            self._asked = sensor.name
            try:
                joules = sensor.advance(now)
            except Exception:  # whatever it raises: a busy bus answers the second time
                joules = sensor.advance(now)
            self._counted += joules
        return self._counted

    def trained(self, begin, end):
        """Adds a stretch of training. begin, end: seconds of time.perf_counter."""
        start, stop = self._clock_offset + begin, self._clock_offset + end
        if self._intervals and abs(start - self._intervals[-1][1]) < SAME:
            self._intervals[-1][1] = stop
        else:
            self._intervals.append([start, stop])
        if not self._answers():
            return
        samples = self.sampler.samples
        if self._open and samples and samples[-1][0] >= self._open[-1][1]:
            self._joules, self._open = self._joules_now(), []
            older = sum(at < begin for at, _ in list(samples))
            del samples[:max(0, older - 2)]  # two give the power as this stretch begins
        self._open.append((begin, end))

    def _answers(self):
        """Returns whether the sensors answer and always have; if not, notes why."""
        reason = self.sampler.fault()
        if reason and self._fault is None:
            self._fault = '{} stopped answering: {}'.format(self._asked, reason)
        return bool(self._sensors) and self._fault is None

    def _joules_now(self):
        """Returns the joules so far; the power since the last reading is taken as unchanged."""
        samples = list(self.sampler.samples) if self._open else []
        if len(samples) < 2:
            return self._joules
        (before, less), (last, more) = samples[-2:]
        samples.append((last + LATE, more + LATE * (more - less) / (last - before)))
        return self._joules + joules_within(*zip(*samples), self._open)

    def state(self):
        """Returns the measurements so far, for `restore`."""
        return dict(joules=self._joules_now(), intervals=np.array(self._intervals),
                    fault=self._fault, clock_was_set=self._clock_was_set(),
                    sensors=[sensor.name for sensor in self._sensors])

    def restore(self, state):
        """Adds the measurements of an interrupted run, which must be of the same sensors."""
        names = [sensor.name for sensor in self._sensors]
        self._joules += state['joules']
        self._fault = self._fault or state['fault']
        if names != state['sensors']:
            self._fault = 'sensors changed since the run was interrupted: {} then, {} now'.format(
                *[', '.join(each) or 'none' for each in (state['sensors'], names)])
        self._intervals = state['intervals'].tolist() + self._intervals
        self._was_set = state['clock_was_set']

    def _clock_was_set(self):
        # A board without a clock battery gets the time from the network, perhaps during training.
        return self._was_set or abs(
            time.time() - time.perf_counter() - self._clock_offset) > CLOCK_STEP

    def result(self):
        """Returns the keys of summary.json on energy.

        energy_joules: None if it was not measured. energy_source: the sensors. energy_note: why it
        was not measured, or what is left out. training_intervals: seconds since 1970; None if the
        system clock was set in between.
        """
        source = ', '.join(sensor.name for sensor in self._sensors) or None
        measured, note = self._answers(), self._fault
        if measured and self._open and len(self.sampler.samples) < 2:
            measured, note = False, TOO_FEW
        note = note or '; '.join(self._notes) or (None if source else NO_SENSOR)
        return dict(energy_joules=self._joules_now() if measured else None, energy_source=source,
                    energy_note=note,
                    training_intervals=None if self._clock_was_set() else self._intervals)
