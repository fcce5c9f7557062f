"""Reports what this device is, and what on it stands in the way of training. Changes nothing.

    scripts/check_device.sh [--gpu] [--hours]

Each line is marked `ok`, `!!` or `--`. `!!` marks a problem, with its remedy below; the status is
then 1. `--` marks what is absent or unknown and not needed. Works without an environment, but
reports less then. Reads files below DEVICE_ROOT (default: /), such as those of a recorded board.
"""

import argparse
import glob
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import _root
from elastic import command_line
from elastic.command_line import UserError
from elastic.device import thermal
from elastic.device.sensors import answer_of, in_time, paths, text_or_nothing

OK, PROBLEM, ABSENT = 'ok', '!!', '--'
ROOT = _root.ROOT
GB = 1e9
STACKS = ('today', 'paper', 'tx2')
ENVIRONMENT_GB, RUNS_GB, DATA_GB = 4, 1, 8  # of disk; data are those of figure 15, with archives
PHOTO_SETS = ('caltech_birds2011', 'oxford_iiit_pet', 'stanford_dogs')
STEP_GB = 1.5  # of memory, which ResNet50 needs at 224x224 with four images
ROOMY_GB = 6   # of memory; with this much, no swap is needed
SLOW_GOVERNORS = ('powersave', 'conservative', 'userspace')
UNDERVOLTAGE, HOT, SINCE_BOOT = 0x1, 0xe, 16  # bits of a Raspberry Pi's get_throttled; a shift
MACHINES = {b'\x3e\x00': 'x86_64', b'\xb7\x00': 'aarch64', b'\x28\x00': 'armv7l'}  # in ELF headers
IMPORT = ('from elastic.command_line import quiet_tensorflow; quiet_tensorflow(); '
          'import tensorflow as tf; '
          'print(tf.__version__); print(len(tf.config.list_physical_devices("GPU")))')
TOOL_SECONDS, IMPORT_SECONDS = 10, 600  # a GPU that hangs also stops who asks for it
INSTALL = 'scripts/install.sh makes it'


class Row(NamedTuple):
    """One line of the report; mark: OK, PROBLEM or ABSENT. remedy: of a PROBLEM."""
    thing: str
    mark: str
    finding: str
    remedy: str = ''


def output_of(command, seconds=None, **options):
    """Returns (status, stdout, stderr) of a command; (None, '', reason) if it does not start.

    seconds: the longest wait, after which the reason says so; default: no limit.
    """
    try:
        status, out, errors = answer_of(command, seconds, universal_newlines=True, cwd=ROOT,
                                        **options)
    except subprocess.TimeoutExpired:
        return None, '', 'no answer within {:g} s'.format(seconds)
    except OSError as error:
        return None, '', error.strerror or str(error)
    return status, out.strip(), errors.strip()


def last_line(message):
    return (message.splitlines() or ['no reason given'])[-1][:200]


# ---------------------------------------------------------------- the board

def is_tegra(root):
    return (os.path.exists(os.path.join(root, 'etc/nv_tegra_release'))
            or 'nvidia,tegra' in text_or_nothing(root, 'proc/device-tree/compatible'))


def guide(root):
    return 'docs/jetson_tx2.md' if is_tegra(root) else 'docs/raspberry_pi.md'


def board(root):
    """Returns the Row with the name of the board or computer."""
    name = text_or_nothing(root, 'proc/device-tree/model') or ' '.join(filter(None, [
        text_or_nothing(root, 'sys/class/dmi/id', part) for part in ('sys_vendor',
                                                                     'product_name')]))
    return Row('board', OK if name else ABSENT, name or 'unknown')


def processor(bits=64 if sys.maxsize > 2 ** 32 else 32):
    finding = '{}, {} cores, {}-bit system'.format(
        platform.machine(), len(command_line.usable_cpus()), bits)
    if bits == 32:
        return Row('processor', PROBLEM, finding,
                   'TensorFlow does not exist for it: install a 64-bit system')
    return Row('processor', OK, finding)


# ---------------------------------------------------------------- Python and TensorFlow

def python():
    """Returns the Row of the stacks that scripts/_venv.sh can make with this device's Pythons."""
    code = ('source scripts/_venv.sh; stack_versions {0} 2>/dev/null && '
            '{{ find_python {0} || true; }}')
    found, wanted = [], []
    for stack in STACKS:
        if stack == 'paper' and platform.machine() == 'aarch64':
            continue  # TensorFlow 2.7 for Python 3.8 does not exist there
        status, out, _ = output_of(['bash', '-c', code.format(stack)])
        if status:
            continue  # this version of the scripts does not know the stack
        versions, _, interpreter = out.partition('\n')
        wanted.append('{} for {}'.format(versions.replace(' ', ', '), stack))
        if interpreter:
            found.append('{} ({})'.format(stack, interpreter))
    if found:
        return Row('Python', OK, 'stacks: ' + ', '.join(found))
    return Row('Python', PROBLEM, 'none that has a stack: {}'.format('; '.join(wanted)),
               'sudo apt install python3-venv; if that is another Python: pyenv, or a newer system')


def machine_of(path):
    """Returns the processor that a program or library was built for; None if unknown."""
    try:
        with open(path, 'rb') as file:
            header = file.read(20)
    except OSError:
        return None
    return MACHINES.get(header[18:20]) if header[:4] == b'\x7fELF' else None


def environments(repository=ROOT):
    """Returns a Row for each environment of the repository.

    Without any, returns the Row of the running Python, which PYTHON=python3 would use.
    """
    folders = sorted(glob.glob(os.path.join(repository, '.venv*')))
    if folders:
        return [environment(folder) for folder in folders]
    if importlib.util.find_spec('tensorflow'):
        return [import_of(sys.executable, 'TensorFlow', 'install it again for this Python')]
    return [Row('TensorFlow', ABSENT, 'no environment yet: {}'.format(INSTALL))]


def environment(folder):
    """Returns the Row that says whether an environment's Python and packages run here."""
    name, interpreter = os.path.basename(folder), os.path.join(folder, 'bin', 'python')
    again = 'rm -r {}; then {}'.format(folder, INSTALL)
    status, _, reason = output_of([interpreter, '-c', ''])
    if status != 0:
        return Row(name, PROBLEM, 'its Python does not run here: {}'.format(last_line(reason)),
                   'made on another machine? ' + again)
    libraries = glob.glob(os.path.join(folder, 'lib/python*/site-packages/*/*.so'))
    built_for = machine_of(libraries[0]) if libraries else None
    here = machine_of(os.path.realpath(interpreter))
    if built_for and here and built_for != here:
        return Row(name, PROBLEM, 'its packages are for {}, this is {}'.format(built_for, here),
                   again)
    return import_of(interpreter, name, again)


def import_of(interpreter, name, remedy):
    """Returns the Row of the TensorFlow that a Python imports."""
    status, out, reason = output_of([interpreter, '-c', IMPORT], IMPORT_SECONDS)
    if status is None or status < 0 or len(out.split()) != 2:
        what = 'ended by signal {}'.format(-status) if status and status < 0 else last_line(reason)
        return Row(name, PROBLEM, 'TensorFlow cannot be imported: {}'.format(what),
                   remedy + '; on signal 4 the processor is too old for this build')
    version, gpus = out.split()
    return Row(name, OK, 'TensorFlow {}, {} GPU{}'.format(
        version, gpus if int(gpus) else 'no', 's' if int(gpus) > 1 else ''))


def gpu(root, rows, required):
    """Returns the Row of the GPU, by the Rows of environments()."""
    hardware = ['Tegra'] if is_tegra(root) else []
    if root == '/' and shutil.which('nvidia-smi'):
        status, out, _ = output_of(['nvidia-smi', '--query-gpu=name', '--format=csv,noheader'],
                                   TOOL_SECONDS)
        hardware += out.splitlines() if status == 0 else []
    working = [row for row in rows if row.finding.startswith('TensorFlow 2')]
    seen = [row.thing for row in working if ', no GPU' not in row.finding]
    names = ', '.join(hardware)
    if seen:
        return Row('GPU', OK, '{}, seen by {}'.format(names or 'present', ', '.join(seen)))
    if hardware and working:
        return Row('GPU', PROBLEM, names + ', which TensorFlow does not see: it trains on the CPU',
                   "a Jetson needs NVIDIA's own TensorFlow (docs/jetson_tx2.md); elsewhere: "
                   "pip install 'tensorflow[and-cuda]' of the same version")
    if required and not hardware:
        return Row('GPU', PROBLEM, 'none, and --gpu asks for one',
                   'leave out --gpu to train on the CPU, or use a board with an NVIDIA GPU')
    if required:
        return Row('GPU', PROBLEM, names + '; no environment to try it with', INSTALL)
    return Row('GPU', ABSENT, names or 'none; it trains on the CPU')


# ---------------------------------------------------------------- memory and disk

def memory(root):
    """Returns the Rows of memory and swap."""
    sizes = {name: float(kb) * 1024 / GB for name, kb in re.findall(
        r'^(\w+): +(\d+) kB', text_or_nothing(root, 'proc/meminfo'), re.M)}
    if 'MemAvailable' not in sizes:
        return [Row('memory', ABSENT, 'unknown')]
    total, free, swap = (sizes.get(name, 0.0) for name in (
        'MemTotal', 'MemAvailable', 'SwapTotal'))
    finding = '{:.1f} of {:.1f} GB free'.format(free, total)
    rows = [Row('memory', OK, finding)]
    if free + sizes.get('SwapFree', 0.0) < STEP_GB:
        rows = [Row('memory', PROBLEM, '{}; even with swap less than the {} GB that ResNet50 needs '
                    '(224x224, four images)'.format(finding, STEP_GB),
                    'end other programs, add swap ({}), or train with a smaller --input_size or '
                    '--batch_size'.format(guide(root)))]
    where = [line.split()[0] for line in text_or_nothing(root, 'proc/swaps').splitlines()[1:]]
    if swap:
        rows.append(Row('swap', OK, '{:.1f} GB{}'.format(
            swap, ' on ' + ', '.join(where) if where else '')))
    elif total < ROOMY_GB:
        rows.append(Row('swap', PROBLEM, 'none: the kernel ends a program that briefly needs too '
                        'much', 'add 2 GB, not on the card: {}'.format(guide(root))))
    else:
        rows.append(Row('swap', ABSENT, 'none, and none is needed with this memory'))
    return rows


def disk(folder=ROOT, free=None):
    """Returns the Row of the repository's disk: room for the environment and for runs."""
    free = shutil.disk_usage(folder).free / GB if free is None else free
    made = bool(glob.glob(os.path.join(folder, '.venv*', 'requirements.cksum')))
    needed = RUNS_GB if made else ENVIRONMENT_GB + RUNS_GB
    finding = '{:.1f} GB free{}'.format(free, card_of(folder))
    if free < needed:
        return Row('disk', PROBLEM, '{}, {} GB are needed for {}'.format(
            finding, needed, 'runs' if made else 'the environment and runs'),
            'make room, or move the repository to a larger card or an SSD')
    return Row('disk', OK, finding)


def card_of(folder):
    """Returns a note if the folder is on a card, which writing wears; else ''."""
    device = os.stat(folder).st_dev
    path = os.path.realpath('/sys/dev/block/{}:{}'.format(os.major(device), os.minor(device)))
    name = re.search(r'mmcblk\d+', path)
    return ', on {}: a card or eMMC, which writing wears'.format(name.group()) if name else ''


def data(folder=None, free=None):
    """Returns the Row of the figures' three photo sets: prepared, or whether there is room."""
    folder = os.path.expanduser(folder or os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets'))
    there = [name for name in PHOTO_SETS if os.path.isdir(os.path.join(folder, name))]
    if len(there) == len(PHOTO_SETS):
        return Row('data', OK, 'all three photo sets in {}'.format(folder))
    disk_of = folder
    while not os.path.exists(disk_of):
        disk_of = os.path.dirname(disk_of)
    free = shutil.disk_usage(disk_of).free / GB if free is None else free
    finding = '{} in {}, {:.1f} GB free'.format(
        ', '.join(there) or 'no photo sets yet', folder, free)
    if free < DATA_GB:
        return Row('data', PROBLEM, '{}; figure 15 needs {} GB for all three'.format(
            finding, DATA_GB),
            'name a folder on a larger disk: export TFDS_DATA_DIR=DIR; digits need none')
    return Row('data', ABSENT, finding)


# ---------------------------------------------------------------- speed and power

def throttling(root):
    """Returns the Rows of heat and power supply, now and since the device started."""
    try:
        device = thermal.find_device(root)
        if device is None:
            return [Row('heat', ABSENT, thermal.NOTHING)]
        reading, (bits, _) = in_time(lambda: (device.read(), device.firmware.read()))
    except TimeoutError as error:
        return [Row('heat', ABSENT, 'unknown: {}'.format(error))]
    bits = bits or 0
    degrees = '' if reading.temperature_c is None else '{:.0f} °C'.format(reading.temperature_c)
    rows, ever = [], bits | bits >> SINCE_BOOT
    if ever & UNDERVOLTAGE:
        rows.append(Row('supply', PROBLEM, 'the voltage is too low{}'.format(
            '' if bits & UNDERVOLTAGE else ', or was since the start'),
            "this slows the processor down: use the maker's power supply and a short cable"))
    if reading.throttled or ever & HOT:
        when = 'slowed down now' if reading.throttled else 'was slowed down since the start'
        return rows + [Row('heat', PROBLEM, ', '.join(filter(None, [degrees, when])),
                           'cool it (heat sink and fan), wait, and restart it: {}'.format(
                               guide(root)))]
    finding = [degrees or 'temperature unknown',
               'throttling unknown' if reading.throttled is None else 'not throttled',
               device.firmware.note]
    return rows + [Row('heat', OK, ', '.join(filter(None, finding)))]


def governor(root):
    try:
        names = in_time(lambda: sorted({text_or_nothing(path) for path in paths(
            root, 'sys/devices/system/cpu/cpu*/cpufreq/scaling_governor')} - {''}))
    except TimeoutError as error:
        return Row('governor', ABSENT, 'unknown: {}'.format(error))
    slow = [name for name in names if name in SLOW_GOVERNORS]
    if slow:
        return Row('governor', PROBLEM, '{}: keeps the clock low'.format(', '.join(slow)),
                   'echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/'
                   'scaling_governor')
    return Row('governor', OK if names else ABSENT, ', '.join(names) or 'unknown')


def power_mode(root):
    """Returns the Row of a Jetson's nvpmodel; None elsewhere."""
    program = os.path.join(root, 'usr/sbin/nvpmodel')
    if not os.path.exists(program):
        return None
    status, out, reason = output_of([program, '-q'], TOOL_SECONDS)
    mode = re.search(r'NV Power Mode: *(\S+)\s+(\d+)', out)
    if status != 0 or not mode:
        return Row('power mode', ABSENT, 'unknown: nvpmodel -q says "{}"; try it with '
                   'sudo'.format(last_line(reason or out)))
    if mode.group(2) != '0':
        return Row('power mode', PROBLEM, '{} ({}): not all cores, or not at full clock'.format(
            mode.group(1), mode.group(2)), 'sudo nvpmodel -m 0; sudo jetson_clocks')
    return Row('power mode', OK, '{} (0)'.format(mode.group(1)))


def power_sensor(root):
    try:
        from elastic.device import energy
    except ImportError:
        return Row('power', ABSENT, 'unknown until there is an environment')
    sensors, notes = energy.find_sensors(root, TOOL_SECONDS)
    if not sensors:
        return Row('power', ABSENT, '; '.join(notes) or energy.NO_SENSOR)
    return Row('power', OK, ', '.join(sensor.name for sensor in sensors))


# ---------------------------------------------------------------- the report

def hours():
    """Yields a Row with the hours of each figure here, from steps that are timed now."""
    scripts = glob.glob(os.path.join(ROOT, 'scripts', 'run_figure*.sh'))
    for script in sorted(path for path in scripts if not path.endswith('_ego.sh')):
        name = os.path.basename(script)
        print('{} --dry_run'.format(name), file=sys.stderr, flush=True)
        status, out, reason = output_of([script, '--dry_run'], env=dict(
            os.environ, PYTHON=sys.executable))
        total = re.search(r'^total +(.+?) *$', out, re.M)
        thing = re.sub('run_figure_?|.sh', '', name)
        if status == 0 and total:
            yield Row('figure ' + thing, OK, total.group(1))
        else:
            yield Row('figure ' + thing, PROBLEM, last_line(reason),
                      'scripts/{} --dry_run shows more'.format(name))


def check(root, gpu_required=False):
    """Returns the Rows of a device."""
    made = environments()
    rows = [board(root), processor(), python()] + made + [gpu(root, made, gpu_required)]
    rows += memory(root) + [disk(), data()] + throttling(root)
    return [row for row in rows + [governor(root), power_mode(root), power_sensor(root)] if row]


def report(rows):
    """Returns aligned lines, each remedy below its problem."""
    width = max(len(row.thing) for row in rows)
    lines = []
    for row in rows:
        lines.append('{:{}}  {}  {}'.format(row.thing, width, row.mark, row.finding))
        if row.remedy:
            lines.append('{:{}}      -> {}'.format('', width, row.remedy))
    return '\n'.join(lines)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        prog='check_device.sh', description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gpu', action='store_true',
                        help='require a GPU that TensorFlow can use: status 1 without one')
    parser.add_argument('--hours', action='store_true',
                        help='also estimate the hours of each figure here; this times their '
                             'networks first: minutes on a PC, longer on a board')
    args = parser.parse_args(argv)
    if args.hours and importlib.util.find_spec('tensorflow') is None:
        raise UserError('--hours times steps, which needs an environment: {}'.format(INSTALL))
    return args


def main(argv=None):
    args = parse_arguments(argv)
    rows = check(os.environ.get('DEVICE_ROOT', '/'), args.gpu)
    if args.hours:
        rows += hours()
    print(report(rows))
    if not args.hours:
        print('\nthe hours of each figure here: scripts/check_device.sh --hours')
    return int(any(row.mark == PROBLEM for row in rows))


if __name__ == '__main__':
    command_line.run(main)
