"""Reads temperature, clock and throttling of the device while it trains; estimates nothing.

    python -m elastic.device.thermal        shows what this device reports now

Each epoch records the highest temperature, the mean clock of the processor, and whether the device
was throttled: slowed down by heat or by its power supply, so that the epoch's times do not compare
with others. Sources are thermal zones, cpufreq, cooling devices that slow something down (Jetson
and other Arm boards), the counters of Intel processors, and a Raspberry Pi's firmware, which
throttles without the kernel. What a device does not report is None.
"""

import argparse
import contextlib
import fnmatch
import os
import re
import shutil
import subprocess
import time
from typing import NamedTuple, Optional

from elastic import command_line, texts
from elastic.device import host
from elastic.device.sensors import (
    NO_ANSWER,
    PATIENCE,
    READ_ERRORS,
    Sampler,
    in_time,
    paths,
    text,
    text_or_nothing,
)

PERIOD = 2.0  # s between two readings
FIRMWARE_PERIOD = 10.0  # s between two calls of vcgencmd, each of which starts a process
FIRMWARE_TIMEOUT = 0.4  # s, less than sensors.PATIENCE, so that the other sensors still count
FIRMWARE_TRIES = 2  # that fail in a row before vcgencmd is never asked again
PLAUSIBLE = (0.0, 150.0)  # °C, exclusive; zones that are off read 0, or -40 and below
OTHER_ZONES = ('PMIC-Die',  # always 100 °C on a Jetson
               'thermal-fan-est', 'iwlwifi*', 'INT3400*', '*battery*')
SLOWS_DOWN = ('cpufreq-*', 'thermal-cpufreq-*', '*-balanced', '*throttle*', 'tegra[-_]heavy')
CPU = 'sys/devices/system/cpu/cpu{}'
GET_THROTTLED = 'sys/devices/platform/soc/soc:firmware/get_throttled'
BITS = (1, 2, 3)  # clock capped, throttled, soft limit; bit 0, low voltage, shows in these
SINCE_BOOT = 16  # offset of the bits that show whether it has happened since boot
NOTHING = 'this device reports neither temperature nor clock nor throttling'


class Reading(NamedTuple):
    """Holds what a device reports at one moment; None for what it does not report.

    temperature_c: of the hottest zone. cpu_mhz: mean of the CPUs. throttled: whether it is now, or
    was since the reading before.
    """
    temperature_c: Optional[float] = None
    cpu_mhz: Optional[float] = None
    throttled: Optional[bool] = None


# ---------------------------------------------------------------- what this device reports

def find_device(root='/', cpus=None, seconds=PATIENCE, firmware_seconds=FIRMWARE_TIMEOUT):
    """Returns the Device, or None if it reports nothing. cpus: default: those of this process.

    Raises TimeoutError if a reading takes longer than `seconds`.
    """
    def find():
        device = Device(root, host.usable_cpus() if cpus is None else cpus,
                        Firmware(root, firmware_seconds))
        return None if device.read() == Reading() else device
    return in_time(find, seconds)


class Device:
    """Reads what a device reports of heat and speed.

    root: of the file system. cpus: numbers of the CPUs to read. firmware: Firmware.
    """

    def __init__(self, root, cpus, firmware):
        self.zones = [path for path in paths(root, 'sys/class/thermal/thermal_zone*/temp')
                      if not _has_type(path, OTHER_ZONES)]
        self.coolers = [path for path in paths(root, 'sys/class/thermal/cooling_device*/cur_state')
                        if _has_type(path, SLOWS_DOWN)]
        self.firmware = firmware
        folders = [os.path.join(root, CPU.format(cpu)) for cpu in sorted(cpus)]
        model = text_or_nothing(root, 'proc/device-tree/model')
        # A Raspberry Pi's cpufreq gives the clock that was requested, not the true one.
        self.clocks = [] if firmware.exists or 'Raspberry Pi' in model else [
            path for folder in folders for path in paths(folder, 'cpufreq/scaling_cur_freq')]
        self.counters = [path for folder in folders
                         for path in paths(folder, 'thermal_throttle/*_throttle_count')]
        self._counts = {}  # of the last reading; one grows whenever the device is throttled

    def read(self):
        """Returns the current Reading, without the parts that do not answer."""
        heat = [degrees for degrees in _numbers(self.zones, 1e3).values()
                if PLAUSIBLE[0] < degrees < PLAUSIBLE[1]]
        bits, mhz = self.firmware.read()
        clocks = _numbers(self.clocks, 1e3)  # kHz
        if clocks:
            mhz = sum(clocks.values()) / len(clocks)
        states, counts = _numbers(self.coolers), _numbers(self.counters)
        slowed = any(state > 0 for state in states.values())
        if bits is not None:
            slowed = slowed or any(bits >> bit & 1 for bit in BITS)
            counts.update({bit: bits >> (bit + SINCE_BOOT) & 1 for bit in BITS})
        slowed = slowed or any(count > self._counts.get(name, count)
                               for name, count in counts.items())
        self._counts.update(counts)
        return Reading(max(heat, default=None), mhz, slowed if states or counts else None)


class Firmware:
    """Reads what the firmware of a Raspberry Pi reports.

    exists: whether there is any. note: why vcgencmd is not asked any more, if it hung; else None.
    seconds: how long vcgencmd may take. period: seconds between two calls.

    vcgencmd alone knows the true clock. It is asked rarely, and never again if it does not answer
    at first, or hangs FIRMWARE_TRIES times in a row. Without it, a file has the bits that the
    kernel last got; its driver is deprecated.
    """

    def __init__(self, root, seconds):
        self.seconds, self.period = seconds, FIRMWARE_PERIOD
        self._file = os.path.join(root, GET_THROTTLED)
        self._program = shutil.which('vcgencmd', path=os.pathsep.join(
            os.path.join(root, folder) for folder in ('usr/bin', 'opt/vc/bin')))
        self.note, self._tries = None, 1
        if self._program and self._ask() == (None, None):
            self._program = None
        self.exists = bool(self._program) or os.path.exists(self._file)

    def read(self):
        """Returns the number of get_throttled and the MHz of the processor, or None for either."""
        if self._program is None:
            try:
                return int(text(self._file), 16), None
            except READ_ERRORS:
                return None, None
        if time.perf_counter() - self._asked >= self.period:
            self._ask()
        return self._said

    def _ask(self):
        self._asked = time.perf_counter()
        try:
            bits = self._answer(r'throttled=(0x[0-9a-f]+)', 'get_throttled')
            hertz = self._answer(r'frequency\(\d+\)=([1-9]\d*)', 'measure_clock', 'arm')
            self._tries = FIRMWARE_TRIES
        except subprocess.TimeoutExpired:
            bits = hertz = None
            self._tries -= 1
            if not self._tries:
                self._program, self.note = None, 'vcgencmd: {} within {:g} s'.format(
                    NO_ANSWER, self.seconds)
        self._said = bits and int(bits, 16), hertz and int(hertz) / 1e6
        return self._said

    def _answer(self, pattern, *question):
        """Returns the part of vcgencmd's answer in the pattern's group; None if it fails.

        Raises subprocess.TimeoutExpired if vcgencmd takes too long. It is killed then but not
        waited for: while it waits for a driver, it cannot be killed.
        """
        try:
            # close_fds=False lets Python spawn instead of fork. A fork would copy the page tables
            # of the training process, and make each of its pages fault once.
            process = subprocess.Popen((self._program,) + question, stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL, close_fds=False)
            answer, _ = process.communicate(timeout=self.seconds)
        except OSError:
            return None
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        found = None if process.returncode else re.match(pattern, answer.decode(errors='replace'))
        return found and found.group(1)


def _has_type(path, patterns):
    """Returns whether the file `type` in the same folder matches one of the patterns."""
    kind = text_or_nothing(os.path.dirname(path), 'type')
    return any(fnmatch.fnmatchcase(kind, pattern) for pattern in patterns)


def _numbers(files, divisor=1):
    """Returns path -> number for the files that answer."""
    found = {}
    for path in files:
        with contextlib.suppress(*READ_ERRORS):
            found[path] = float(text(path)) / divisor
    return found


# ---------------------------------------------------------------- records of training

UNWATCHED = 'temperature, clock and throttling: {}'


class Monitor:
    """Records, for each epoch, what a Device (or None) reports while it trains.

    sampler: reads the device. note: what hung, so that it is no longer recorded; None if nothing
    did.
    """

    def __init__(self, device=None, note=None):
        self.note, self._device = note, device
        self.sampler = Sampler(device and (lambda now: device.read()), PERIOD)
        self._readings = []  # of this epoch's training
        self._last = Reading()  # which stands for an epoch between two readings

    def trained(self, begin, end):
        """Adds the readings of a stretch of training, in seconds of time.perf_counter."""
        reason = self.sampler.fault()
        if reason is not None:
            self.note = UNWATCHED.format(reason)
            self.sampler, self._readings, self._last = Sampler(None, PERIOD), [], Reading()
            return
        samples = [sample for sample in list(self.sampler.samples) if sample[0] <= end]
        del self.sampler.samples[:len(samples)]
        self._readings += [reading for at, reading in samples if at >= begin]
        if samples:
            self._last = samples[-1][1]
            self.note = self.note or self._device.firmware.note

    def epoch(self):
        """Returns the dict of folder.DEVICE_COLUMNS for the training since the last call."""
        readings, self._readings = self._readings or [self._last], []
        heat, mhz, throttled = [[value for value in values if value is not None]
                                for values in zip(*readings)]
        return dict(temperature_c=max(heat, default=None),
                    cpu_mhz=sum(mhz) / len(mhz) if mhz else None,
                    throttled=int(any(throttled)) if throttled else None)

    def state(self):
        """Returns the records of this epoch so far, for `restore`."""
        return dict(readings=[tuple(reading) for reading in self._readings], note=self.note)

    def restore(self, state):
        """Continues the epoch of an interrupted run."""
        self._readings, self.note = list(state['readings']), self.note or state['note']


def monitor_here():
    """Returns the Monitor of this device."""
    try:
        return Monitor(find_device())
    except TimeoutError as error:
        return Monitor(note=UNWATCHED.format(error))


def main(argv=None):
    parser = argparse.ArgumentParser('python -m elastic.device.thermal', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    try:
        device = find_device()
        reading = device and in_time(device.read)
    except TimeoutError as error:
        print(error)
        return 0
    if reading is None:
        print(NOTHING)
        return 0
    values = [('temperature (°C)', reading.temperature_c, '{:.1f}'.format),
              ('clock (MHz)', reading.cpu_mhz, '{:.0f}'.format),
              ('throttled', reading.throttled, {False: 'no', True: 'yes'}.get)]
    print(texts.table(['', 'now'], [
        [name, 'not reported' if value is None else form(value)] for name, value, form in values]))
    if device.firmware.note:
        print(device.firmware.note)
    return 0


if __name__ == '__main__':
    command_line.run(main)
