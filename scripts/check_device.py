"""What a device is, and what on it stands in the way of training. Changes nothing.

    scripts/check_device.sh [--gpu] [--hours]

A line for each thing: `ok`; `!!` for what stands in the way, with its remedy below; `--` for what
is not there, or not told, and need not be. Status 1 where there is a `!!`. Needs no environment,
but tells less without; reads files below DEVICE_ROOT (default: /), so that a recorded board is read
as a real one is.
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
from elastic.device.sensors import READ_ERRORS, paths, text

OK, TROUBLE, NOT_TOLD = 'ok', '!!', '--'
ROOT = _root.ROOT
GB = 1e9
STACKS = ('today', 'paper', 'tx2')
ENVIRONMENT_GB, RUNS_GB, DATA_GB = 4, 1, 8  # of disk; data: of figure 15, archives and all
PHOTO_SETS = ('caltech_birds2011', 'oxford_iiit_pet', 'stanford_dogs')
STEP_GB = 1.5  # of memory: ResNet50, 224x224, four images
ROOMY_GB = 6   # of memory: from here on it does without swap
SLOW_GOVERNORS = ('powersave', 'conservative', 'userspace')
UNDERVOLTAGE, SINCE_BOOT = 0x1, 16  # of a Raspberry Pi's get_throttled; all other bits are heat's
MACHINES = {b'\x3e\x00': 'x86_64', b'\xb7\x00': 'aarch64', b'\x28\x00': 'armv7l'}  # by ELF header
IMPORT = ('from elastic.command_line import quiet_tensorflow; quiet_tensorflow(); '
          'import tensorflow as tf; '
          'print(tf.__version__); print(len(tf.config.list_physical_devices("GPU")))')
INSTALL = 'scripts/run_tests.sh --quick makes it'


class Row(NamedTuple):
    """thing, told: for people. mark: OK, TROUBLE or NOT_TOLD. remedy: of TROUBLE."""
    thing: str
    mark: str
    told: str
    remedy: str = ''


def output_of(command, **options):
    """(status, stdout, stderr), stripped; status None and the reason where it does not start."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True, cwd=ROOT, **options)
    except (OSError, subprocess.SubprocessError) as error:
        return None, '', getattr(error, 'strerror', None) or str(error)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def text_or(path, otherwise=''):
    try:
        return text(path).strip('\x00')
    except READ_ERRORS:
        return otherwise


# ---------------------------------------------------------------- the board

def model_of(root):
    """Name of the board, or of the computer; '' where none is told."""
    dmi = os.path.join(root, 'sys/class/dmi/id/')
    return text_or(os.path.join(root, 'proc/device-tree/model')) or ' '.join(
        filter(None, [text_or(dmi + 'sys_vendor'), text_or(dmi + 'product_name')]))


def is_tegra(root):
    return (os.path.exists(os.path.join(root, 'etc/nv_tegra_release'))
            or 'nvidia,tegra' in text_or(os.path.join(root, 'proc/device-tree/compatible')))


def guide(root):
    return 'docs/jetson_tx2.md' if is_tegra(root) else 'docs/raspberry_pi.md'


def board(root):
    return Row('board', OK if model_of(root) else NOT_TOLD, model_of(root) or 'not told')


def processor(bits=64 if sys.maxsize > 2 ** 32 else 32):
    told = '{}, {} cores, {}-bit system'.format(
        platform.machine(), len(command_line.usable_cpus()), bits)
    if bits == 32:
        return Row('processor', TROUBLE, told,
                   'there is no TensorFlow for it: put a 64-bit system on the card')
    return Row('processor', OK, told)


# ---------------------------------------------------------------- Python and TensorFlow

def python():
    """Which stacks the Pythons of this device can make, by scripts/_venv.sh."""
    code = ('source scripts/_venv.sh; stack_versions {0} 2>/dev/null && '
            '{{ find_python {0} || true; }}')
    found, wanted = [], []
    for stack in STACKS:
        if stack == 'paper' and platform.machine() == 'aarch64':
            continue  # no TensorFlow 2.7 for Python 3.8 there
        status, out, _ = output_of(['bash', '-c', code.format(stack)])
        if status:
            continue  # a stack that these scripts do not know
        versions, _, interpreter = out.partition('\n')
        wanted.append('{} for {}'.format(versions.replace(' ', ', '), stack))
        if interpreter:
            found.append('{} ({})'.format(stack, interpreter))
    if found:
        return Row('Python', OK, 'stacks: ' + ', '.join(found))
    return Row('Python', TROUBLE, 'none that has a stack: {}'.format('; '.join(wanted)),
               'sudo apt install python3-venv; if that is another Python: pyenv, or a newer system')


def machine_of(path):
    """Processor that a program or library was built for; None where its header does not tell."""
    try:
        with open(path, 'rb') as file:
            header = file.read(20)
    except OSError:
        return None
    return MACHINES.get(header[18:20]) if header[:4] == b'\x7fELF' else None


def environments(repository=ROOT):
    """A Row for each environment of the repository; where there is none, for the Python that runs
    this, if it has a TensorFlow: PYTHON=python3 trains with that.
    """
    folders = sorted(glob.glob(os.path.join(repository, '.venv*')))
    if folders:
        return [environment(folder) for folder in folders]
    if importlib.util.find_spec('tensorflow'):
        return [import_of(sys.executable, 'TensorFlow', 'install it again for this Python')]
    return [Row('TensorFlow', NOT_TOLD, 'no environment yet: {}'.format(INSTALL))]


def environment(folder):
    """The Row of one: whether its Python, its packages and its TensorFlow run here."""
    name, interpreter = os.path.basename(folder), os.path.join(folder, 'bin', 'python')
    again = 'rm -r {}; then {}'.format(folder, INSTALL)
    status, _, reason = output_of([interpreter, '-c', ''])
    if status != 0:
        return Row(name, TROUBLE, 'its Python does not run here: {}'.format(last_line(reason)),
                   'made on another machine? ' + again)
    libraries = glob.glob(os.path.join(folder, 'lib/python*/site-packages/*/*.so'))
    built_for = machine_of(libraries[0]) if libraries else None
    here = machine_of(os.path.realpath(interpreter))
    if built_for and here and built_for != here:
        return Row(name, TROUBLE, 'its packages are for {}, this is {}'.format(built_for, here),
                   again)
    return import_of(interpreter, name, again)


def import_of(interpreter, name, remedy):
    """The Row of the TensorFlow that a Python imports."""
    status, out, reason = output_of([interpreter, '-c', IMPORT])
    if status is None or status < 0 or len(out.split()) != 2:
        what = 'ended by signal {}'.format(-status) if status and status < 0 else last_line(reason)
        return Row(name, TROUBLE, 'TensorFlow cannot be imported: {}'.format(what),
                   remedy + '; on signal 4 the processor is too old for this build')
    version, gpus = out.split()
    return Row(name, OK, 'TensorFlow {}, {} GPU{}'.format(
        version, gpus if int(gpus) else 'no', 's' if int(gpus) > 1 else ''))


def last_line(words):
    return (words.splitlines() or ['no reason given'])[-1][:200]


def gpu(root, rows, required):
    """rows: of environments()."""
    hardware = ['Tegra'] if is_tegra(root) else []
    if root == '/' and shutil.which('nvidia-smi'):
        status, out, _ = output_of(['nvidia-smi', '--query-gpu=name', '--format=csv,noheader'])
        hardware += out.splitlines() if status == 0 else []
    working = [row for row in rows if row.told.startswith('TensorFlow 2')]
    seen = [row for row in working if ', no GPU' not in row.told]
    if seen:
        return Row('GPU', OK, '{}, seen by {}'.format(
            ', '.join(hardware) or 'there', ', '.join(row.thing for row in seen)))
    if hardware and working:
        return Row('GPU', TROUBLE, '{}, which TensorFlow does not see: it trains on the CPU'.format(
            ', '.join(hardware)), "a Jetson needs NVIDIA's own TensorFlow (docs/jetson_tx2.md); "
            "elsewhere: pip install 'tensorflow[and-cuda]' of the same version")
    if required and not hardware:
        return Row('GPU', TROUBLE, 'none, and --gpu asks for one',
                   'without --gpu: it trains on the CPU; else use a board with an NVIDIA GPU')
    if required:
        return Row('GPU', TROUBLE, '{}; no environment tells whether it is of use'.format(
            ', '.join(hardware)), INSTALL)
    return Row('GPU', NOT_TOLD, ', '.join(hardware) or 'none; it trains on the CPU')


# ---------------------------------------------------------------- memory and disk

def memory(root):
    """[Row of the memory, Row of the swap]."""
    sizes = {name: float(kb) * 1024 / GB for name, kb in re.findall(
        r'^(\w+): +(\d+) kB', text_or(os.path.join(root, 'proc/meminfo')), re.M)}
    if 'MemAvailable' not in sizes:
        return [Row('memory', NOT_TOLD, 'not told')]
    total, free, swap = (sizes.get(name, 0.0) for name in (
        'MemTotal', 'MemAvailable', 'SwapTotal'))
    told = '{:.1f} of {:.1f} GB free'.format(free, total)
    rows = [Row('memory', OK, told)]
    if free + sizes.get('SwapFree', 0.0) < STEP_GB:
        rows = [Row('memory', TROUBLE, '{}, swap included less than the {} GB that ResNet50 takes '
                    '(224x224, four images)'.format(told, STEP_GB),
                    'end other programs, add swap ({}), or train with a smaller --input_size or '
                    '--batch_size'.format(guide(root)))]
    where = [line.split()[0] for line in text_or(
        os.path.join(root, 'proc/swaps')).splitlines()[1:]]
    if swap:
        rows.append(Row('swap', OK, '{:.1f} GB{}'.format(
            swap, ' on ' + ', '.join(where) if where else '')))
    elif total < ROOMY_GB:
        rows.append(Row('swap', TROUBLE, 'none: whoever needs too much for a moment is ended by '
                        'the kernel', '2 GB of it, not on the card: {}'.format(guide(root))))
    else:
        rows.append(Row('swap', NOT_TOLD, 'none, and with this memory none is needed'))
    return rows


def disk(folder=ROOT, free=None):
    """Of the repository: for the environment, and for what runs write."""
    free = shutil.disk_usage(folder).free / GB if free is None else free
    made = bool(glob.glob(os.path.join(folder, '.venv*', 'requirements.cksum')))
    needed = RUNS_GB if made else ENVIRONMENT_GB + RUNS_GB
    told = '{:.1f} GB free{}'.format(free, card_of(folder))
    if free < needed:
        return Row('disk', TROUBLE, '{}, {} GB are needed for {}'.format(
            told, needed, 'runs' if made else 'the environment and runs'),
            'make room, or move the repository to a larger card or an SSD')
    return Row('disk', OK, told)


def card_of(folder):
    """Says where the disk of a folder is a card, which writing wears; '' where it is none."""
    device = os.stat(folder).st_dev
    path = os.path.realpath('/sys/dev/block/{}:{}'.format(os.major(device), os.minor(device)))
    name = re.search(r'mmcblk\d+', path)
    return ', on {}: a card or eMMC, which writing wears'.format(name.group()) if name else ''


def data(folder=None, free=None):
    """The three photo sets of the figures: prepared, or room for them."""
    folder = os.path.expanduser(folder or os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets'))
    there = [name for name in PHOTO_SETS if os.path.isdir(os.path.join(folder, name))]
    if len(there) == len(PHOTO_SETS):
        return Row('data', OK, 'all three photo sets in {}'.format(folder))
    disk_of = folder
    while not os.path.exists(disk_of):
        disk_of = os.path.dirname(disk_of)
    free = shutil.disk_usage(disk_of).free / GB if free is None else free
    told = '{} in {}, {:.1f} GB free'.format(', '.join(there) or 'no photo sets yet', folder, free)
    if free < DATA_GB:
        return Row('data', TROUBLE, '{}; all three of figure 15 take {} GB'.format(told, DATA_GB),
                   'name a folder on a larger disk: export TFDS_DATA_DIR=DIR; digits need none')
    return Row('data', NOT_TOLD, told)


# ---------------------------------------------------------------- speed and power

def throttling(root):
    """[Rows] of heat and supply, now and since the device was started."""
    device, firmware = thermal.find_device(root), thermal.firmware_of(root)
    if device is None:
        return [Row('heat', NOT_TOLD, thermal.NOTHING)]
    reading, bits = device.read(), (firmware.read()[0] if firmware else None) or 0
    degrees = '' if reading.temperature_c is None else '{:.0f} °C'.format(reading.temperature_c)
    rows, ever = [], bits | bits >> SINCE_BOOT
    if ever & UNDERVOLTAGE:
        rows.append(Row('supply', TROUBLE, 'the voltage is too low{}'.format(
            '' if bits & UNDERVOLTAGE else ', or was since the start'),
            'it slows the processor down: use the maker\'s power supply and a short cable'))
    hot = ever & 0xe
    if reading.throttled or hot:
        when = 'slowed down now' if reading.throttled else 'was slowed down since the start'
        return rows + [Row('heat', TROUBLE, ', '.join(filter(None, [degrees, when])),
                           'cool it (heat sink and fan), wait, and start it anew: {}'.format(
                               guide(root)))]
    told = [degrees or 'no temperature told',
            'throttling not told' if reading.throttled is None else 'not throttled']
    return rows + [Row('heat', OK, ', '.join(told))]


def governor(root):
    names = sorted({text_or(path) for path in paths(
        root, 'sys/devices/system/cpu/cpu*/cpufreq/scaling_governor')} - {''})
    slow = [name for name in names if name in SLOW_GOVERNORS]
    if slow:
        return Row('governor', TROUBLE, '{}: keeps the clock low'.format(', '.join(slow)),
                   'echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/'
                   'scaling_governor')
    return Row('governor', OK if names else NOT_TOLD, ', '.join(names) or 'not told')


def power_mode(root):
    """A Jetson's, by nvpmodel; None elsewhere."""
    program = os.path.join(root, 'usr/sbin/nvpmodel')
    if not os.path.exists(program):
        return None
    status, out, reason = output_of([program, '-q'], timeout=10)
    mode = re.search(r'NV Power Mode: *(\S+)\s+(\d+)', out)
    if status != 0 or not mode:
        return Row('power mode', NOT_TOLD, 'nvpmodel -q does not tell ({}); ask it with '
                   'sudo'.format(last_line(reason or out)))
    if mode.group(2) != '0':
        return Row('power mode', TROUBLE, '{} ({}): not all cores, or not at full clock'.format(
            mode.group(1), mode.group(2)), 'sudo nvpmodel -m 0; sudo jetson_clocks')
    return Row('power mode', OK, '{} (0)'.format(mode.group(1)))


def power_sensor(root):
    try:
        from elastic.device import energy
    except ImportError:
        return Row('power', NOT_TOLD, 'told once there is an environment')
    sensors, notes = energy.find_sensors(root)
    if not sensors:
        return Row('power', NOT_TOLD, '; '.join(notes) or energy.NO_SENSOR)
    return Row('power', OK, ', '.join(sensor.name for sensor in sensors))


# ---------------------------------------------------------------- hours, and all of it

def hours():
    """A Row for each figure: the hours that it takes here, from steps timed now."""
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
            yield Row('figure ' + thing, TROUBLE, last_line(reason),
                      'scripts/{} --dry_run tells more'.format(name))


def check(root, gpu_required=False):
    """The Rows of a device."""
    made = environments()
    rows = [board(root), processor(), python()] + made + [gpu(root, made, gpu_required)]
    rows += memory(root) + [disk(), data()] + throttling(root)
    return [row for row in rows + [governor(root), power_mode(root), power_sensor(root)] if row]


def report(rows):
    """Aligned lines; a remedy stands below what it is for."""
    width = max(len(row.thing) for row in rows)
    lines = []
    for row in rows:
        lines.append('{:{}}  {}  {}'.format(row.thing, width, row.mark, row.told))
        if row.remedy:
            lines.append('{:{}}      -> {}'.format('', width, row.remedy))
    return '\n'.join(lines)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        prog='check_device.sh', description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gpu', action='store_true',
                        help='a GPU that TensorFlow can use is asked for: without one, status 1')
    parser.add_argument('--hours', action='store_true',
                        help='also the hours that each figure takes here; times their networks '
                             'first: minutes on a PC, more on a board')
    args = parser.parse_args(argv)
    if args.hours and importlib.util.find_spec('tensorflow') is None:
        raise UserError('--hours times steps, for which there is no environment yet: {}'.format(
            INSTALL))
    return args


def main(argv=None):
    args = parse_arguments(argv)
    rows = check(os.environ.get('DEVICE_ROOT', '/'), args.gpu)
    if args.hours:
        rows += hours()
    print(report(rows))
    if not args.hours:
        print('\nthe hours of each figure here: scripts/check_device.sh --hours')
    return int(any(row.mark == TROUBLE for row in rows))


if __name__ == '__main__':
    command_line.run(main)
