"""Writes the sysfs files of several boards: temperature, clock and throttling."""

import glob
import os

from elastic.device.thermal import find_device

LONG = 300  # s: waits for sensors that answer, however busy the machine is
ZONE, COOLER = 'sys/class/thermal/thermal_zone{}/', 'sys/class/thermal/cooling_device{}/'
POLICY = 'sys/devices/system/cpu/cpufreq/policy{}/scaling_cur_freq'
THROTTLED = 'sys/devices/platform/soc/soc:firmware/get_throttled'
COUNT = 'sys/devices/system/cpu/cpu{}/thermal_throttle/{}_throttle_count'


def zones(*zones):
    """Returns the files of thermal zones, each (type, temp)."""
    return {ZONE.format(number) + name: value for number, zone in enumerate(zones)
            for name, value in zip(('type', 'temp'), zone)}


def coolers(*coolers):
    """Returns the files of cooling devices, each (type, cur_state)."""
    return {COOLER.format(number) + name: value for number, cooler in enumerate(coolers)
            for name, value in zip(('type', 'cur_state'), cooler)}


RASPBERRY_PI_4B = dict(
    zones(('cpu-thermal', 48686)), **{
        'proc/device-tree/model': 'Raspberry Pi 4 Model B Rev 1.4\0',
        POLICY.format(0): 1500000, THROTTLED: 0})
TX2 = dict(zones(
    ('BCPU-therm', 45500), ('MCPU-therm', 45500), ('GPU-therm', 43500), ('PLL-therm', 45500),
    ('Tboard_tegra', 40000), ('Tdiode_tegra', 41250), ('PMIC-Die', 100000),
    ('thermal-fan-est', 46000)), **coolers(
        ('pwm-fan', 3), ('bcpu-throttle-alert', 0), ('mcpu-throttle-alert', 0),
        ('gpu-throttle-alert', 0), ('cpu-balanced', 0), ('gpu-balanced', 0)))
# The four A57 cores are busy, the two Denver cores idle.
TX2.update({POLICY.format(0): 2035200, POLICY.format(1): 345600})
PC = dict(zones(
    ('acpitz', 27800), ('INT3400 Thermal', 99000), ('x86_pkg_temp', 61000), ('iwlwifi_1', 88000)),
    **coolers(('Processor', 0), ('intel_powerclamp', -1), ('Fan', 1)))
PC.update({POLICY.format(0): 2800000, POLICY.format(1): 3600000})
PC.update({COUNT.format(cpu, of): 7 for cpu in range(2) for of in ('core', 'package')})
OTHER_ARM = dict(zones(('soc-thermal', 52000)), **coolers(('cpufreq-cpu0', 0), ('gpio-fan', 1)))
OTHER_ARM[POLICY.format(0)] = 1200000
CPUS = {'RASPBERRY_PI_4B': {0: 0, 1: 0, 2: 0, 3: 0}, 'TX2': {0: 0, 1: 1, 2: 1, 3: 0, 4: 0, 5: 0},
        'PC': {0: 0, 1: 1}, 'OTHER_ARM': {0: 0, 1: 0}}  # CPU -> policy


def change(root, files):
    """Writes files, path -> content, each atomically: a thread may read them. Returns the root."""
    for path, content in files.items():
        path = os.path.join(str(root), path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + '.part', 'w') as out:
            out.write('{}\n'.format(content))
        os.replace(path + '.part', path)
    return str(root)


def board(root, name):
    """Writes the files of a board; returns (root, numbers of its CPUs)."""
    change(root, globals()[name])
    for cpu, policy in CPUS[name].items():
        folder = os.path.join(str(root), 'sys/devices/system/cpu/cpu{}'.format(cpu))
        os.makedirs(folder, exist_ok=True)
        os.symlink('../cpufreq/policy{}'.format(policy), os.path.join(folder, 'cpufreq'))
    return str(root), sorted(CPUS[name])


def vcgencmd(root, says, place='usr/bin'):
    """Adds a vcgencmd that logs each question. says: dict of question -> answer."""
    change(root, {'answers/' + question: answer for question, answer in says.items()})
    change(root, {place + '/vcgencmd': '#!/bin/sh\necho $1 >> {0}/asked\nexec cat {0}/answers/$1'
                  .format(root)})
    os.chmod(os.path.join(str(root), place, 'vcgencmd'), 0o755)


def found(root, cpus=None):
    """Returns the Device of a board whose sensors answer."""
    return find_device(str(root), cpus, LONG, LONG)


def stand_on(monkeypatch, root, cpus):
    """Lets this process find the files of a board in place of its own /sys, and these CPUs."""
    usual = glob.glob
    monkeypatch.setattr(glob, 'glob', lambda pattern, **more: usual(
        str(root) + pattern if pattern.startswith('/sys/') else pattern, **more))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(cpus))
