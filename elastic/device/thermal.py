"""Heat and speed of the device while it trains: what it tells itself; never estimated.

    python -m elastic.device.thermal        what this device tells, and what it reads now

Each epoch's row gets the highest temperature, the mean clock of the processor, and whether the
device was throttled: slowed down by heat or by its supply, so that times of that epoch are not
those of the others. Read are thermal zones, cpufreq, cooling devices that slow something down
(Jetson and other Arm boards), the counters of Intel processors, and a Raspberry Pi's firmware,
which slows it down without telling the kernel. What a device does not tell is None.
"""

import argparse
import collections
import contextlib
import fnmatch
import os
import re
import shutil
import subprocess
import time
from typing import Dict, NamedTuple, Optional

from elastic import command_line
from elastic.device.sensors import READ_ERRORS, Sampler, paths, text

PERIOD = 2.0  # s between two readings
FIRMWARE_PERIOD = 10.0  # s between two calls of vcgencmd, a program of its own
FIRMWARE_TIMEOUT = 5.0  # s
PLAUSIBLE = (0.0, 150.0)  # °C, without the ends; zones that are off read 0 or -40 or less
NOT_ITS_HEAT = ('PMIC-Die',  # always 100 °C on a Jetson
                'thermal-fan-est', 'iwlwifi*', 'INT3400*', '*battery*')
SLOWS_DOWN = ('cpufreq-*', 'thermal-cpufreq-*', '*-balanced', '*throttle*', 'tegra[-_]heavy')
CPUS = 'sys/devices/system/cpu/'
GET_THROTTLED = 'sys/devices/platform/soc/soc:firmware/get_throttled'
# Of its number: clock capped, throttled, soft temperature limit. Bit 0, the voltage, shows in them.
BITS = (1, 2, 3)
SINCE_BOOT = 16  # bits higher stands for each whether it ever was so
NOTHING = 'this device tells neither temperature nor clock nor throttling'


class Reading(NamedTuple):
    """What a device tells at one moment.

    temperature_c: of the hottest zone. cpu_mhz: mean of the CPUs. throttled: now. None where not
    told. counts: name -> what has grown by the next reading if it was throttled in between.
    """
    temperature_c: Optional[float] = None
    cpu_mhz: Optional[float] = None
    throttled: Optional[bool] = None
    counts: Dict = {}


# ---------------------------------------------------------------- what the device offers

def find_device(root='/', cpus=None):
    """The Device below a root of the file system; None where it tells nothing.

    cpus: numbers of those whose clock is told; None: those which this process may use.
    """
    device = Device(root, command_line.usable_cpus() if cpus is None else cpus)
    return None if device.read() == Reading() else device


class Device:
    """Where a device tells of its heat and speed. Arguments as find_device."""

    def __init__(self, root, cpus):
        self.zones = [path for path in paths(root, 'sys/class/thermal/thermal_zone*/temp')
                      if not _is_of(path, NOT_ITS_HEAT)]
        self.coolers = [path for path in paths(root, 'sys/class/thermal/cooling_device*/cur_state')
                        if _is_of(path, SLOWS_DOWN)]
        self.firmware = firmware_of(root)
        # CPUs of one policy share a file: read once, it counts as often.
        self.clocks = {} if self.firmware or _is_raspberry_pi(root) else collections.Counter(
            os.path.realpath(path) for cpu in sorted(cpus) for path in paths(
                root, '{}cpu{}/cpufreq/scaling_cur_freq'.format(CPUS, cpu)))
        self.counters = [path for cpu in sorted(cpus) for path in paths(
            root, '{}cpu{}/thermal_throttle/*_throttle_count'.format(CPUS, cpu))]

    def read(self):
        """The Reading of now; a part that does not answer is left out of it."""
        heat = [degrees for degrees in _numbers(self.zones, 1e3).values()
                if PLAUSIBLE[0] < degrees < PLAUSIBLE[1]]
        bits, mhz = self.firmware.read() if self.firmware else (None, self._mean_clock())
        throttled, counts = self._throttling(bits)
        return Reading(max(heat) if heat else None, mhz, throttled, counts)

    def _mean_clock(self):
        """MHz, each CPU counting once."""
        mhz = _numbers(self.clocks, 1e3)  # kHz
        cpus = sum(self.clocks[path] for path in mhz)
        return sum(mhz[path] * self.clocks[path] for path in mhz) / cpus if cpus else None

    def _throttling(self, bits):
        """(throttled, counts) of a Reading; bits: the firmware's number or None."""
        states, counts, now = _numbers(self.coolers), _numbers(self.counters), False
        if bits is not None:
            now = any(bits >> bit & 1 for bit in BITS)
            counts.update({'bit {}'.format(bit): bits >> (bit + SINCE_BOOT) & 1 for bit in BITS})
        if not states and not counts:
            return None, counts
        return now or any(state > 0 for state in states.values()), counts


class Firmware:
    """A Raspberry Pi's, by the program vcgencmd: asked seldom, and read() repeats what it said."""

    def __init__(self, program):
        self._program, self._asked, self._said = program, None, None

    def read(self):
        """(number of get_throttled, MHz of the processor); None for what it does not say."""
        now = time.perf_counter()
        if self._asked is None or now - self._asked >= FIRMWARE_PERIOD:
            bits = self._ask(r'throttled=(0x[0-9a-f]+)', 'get_throttled')
            hertz = self._ask(r'frequency\(\d+\)=([1-9]\d*)', 'measure_clock', 'arm')
            self._asked, self._said = now, (bits and int(bits, 16), hertz and int(hertz) / 1e6)
        return self._said

    def _ask(self, pattern, *question):
        try:
            # Without closing files it is spawned: a fork would copy the page tables of a process
            # that trains, and have each of its pages fault once.
            answer = subprocess.check_output((self._program,) + question, close_fds=False,
                                             stderr=subprocess.DEVNULL, timeout=FIRMWARE_TIMEOUT)
        except (OSError, subprocess.SubprocessError):
            return None
        found = re.match(pattern, answer.decode(errors='replace'))
        return found and found.group(1)


class FirmwareFile:
    """A Raspberry Pi's, by the number that the kernel last had from it. The clock that the kernel
    has is what it asked for: the true one is not told.
    """

    def __init__(self, path):
        self._path = path

    def read(self):
        """As Firmware.read."""
        try:
            return int(text(self._path), 16), None
        except READ_ERRORS:
            return None, None


def firmware_of(root):
    """The firmware of a Raspberry Pi as it can be asked; None elsewhere.

    vcgencmd comes first, as it alone has the true clock, and as the kernel's file is written by
    another driver, which may be missing, and warns in the kernel's log that it is old.
    """
    program = shutil.which('vcgencmd', path=os.pathsep.join(
        os.path.join(root, folder) for folder in ('usr/bin', 'opt/vc/bin')))
    firmware = program and Firmware(program)
    if firmware and firmware.read() != (None, None):
        return firmware
    path = os.path.join(root, GET_THROTTLED)
    return FirmwareFile(path) if os.path.exists(path) else None


def _is_raspberry_pi(root):
    try:
        return 'Raspberry Pi' in text(os.path.join(root, 'proc/device-tree/model'))
    except READ_ERRORS:
        return False


def _is_of(path, types):
    """Whether the `type` beside a file of sysfs matches one of the patterns."""
    try:
        kind = text(os.path.join(os.path.dirname(path), 'type'))
    except READ_ERRORS:
        return False
    return any(fnmatch.fnmatchcase(kind, pattern) for pattern in types)


def _numbers(files, divisor=1):
    """path -> number, of the files that answer."""
    found = {}
    for path in files:
        with contextlib.suppress(*READ_ERRORS):
            found[path] = float(text(path)) / divisor
    return found


# ---------------------------------------------------------------- beside training

class Monitor:
    """Takes down what a Device tells while `running()`, epoch by epoch. None tells nothing."""

    def __init__(self, device=None, period=PERIOD):
        self._device, self._sampler = device, Sampler(self._sample, period)
        self._counts, self._last = {}, None
        self._begin_epoch()

    def _begin_epoch(self):
        self._seen = dict(temperature_c=None, throttled=None, mhz_seconds=0.0, seconds=0.0)

    def running(self):
        """A context; what happens inside is watched."""
        return self._sampler.running() if self._device else contextlib.ExitStack()

    def _sample(self, begins):
        reading, now, seen = self._device.read(), time.perf_counter(), self._seen
        if reading.temperature_c is not None:
            seen['temperature_c'] = max(reading.temperature_c,
                                        seen['temperature_c'] or reading.temperature_c)
        if reading.cpu_mhz is not None and not begins:
            seen['mhz_seconds'] += reading.cpu_mhz * (now - self._last)
            seen['seconds'] += now - self._last
        if reading.throttled is not None:
            grown = not begins and any(count > self._counts.get(name, count)
                                       for name, count in reading.counts.items())
            seen['throttled'] = int(reading.throttled or grown or seen['throttled'] or 0)
        self._counts.update(reading.counts)
        self._last = now

    def epoch(self):
        """dict of folder.DEVICE_COLUMNS since the last call; None for what was not told."""
        seen = self._seen
        self._begin_epoch()
        return dict(temperature_c=seen['temperature_c'], throttled=seen['throttled'],
                    cpu_mhz=seen['mhz_seconds'] / seen['seconds'] if seen['seconds'] else None)

    def state(self):
        """What `restore` takes: what was seen of the epoch so far."""
        return self._seen

    def restore(self, state):
        """Goes on from `state`."""
        self._seen = dict(state)


def main(argv=None):
    parser = argparse.ArgumentParser('python -m elastic.device.thermal', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    device = find_device()
    if device is None:
        print(NOTHING)
        return 0
    reading = device.read()
    told = [('temperature (°C)', reading.temperature_c, '{:.1f}'.format),
            ('clock (MHz)', reading.cpu_mhz, '{:.0f}'.format),
            ('throttled', reading.throttled, {False: 'no', True: 'yes'}.get)]
    print(command_line.table(['', 'now'], [
        [name, 'not told' if value is None else form(value)] for name, value, form in told]))
    return 0


if __name__ == '__main__':
    command_line.run(main)
