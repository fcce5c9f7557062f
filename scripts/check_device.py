"""Reports what on this device stands in the way of training, with remedies. Changes nothing.

    scripts/check_device.sh [--gpu]

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
from typing import NamedTuple, Optional

from _root import ROOT
from elastic import command_line
from elastic.device import host, thermal
from elastic.device.sensors import PATIENCE, in_time, text_or_nothing

MARKS = {True: 'ok', False: '!!', None: '--'}
GB = 1e9
ENVIRONMENT_GB, RUNS_GB = 4, 1  # of disk
STEP_GB = 1.5  # of memory, which ResNet50 needs at 224x224 with four images
LOW_VOLTAGE = 0x1  # bit of a Raspberry Pi's get_throttled
IMPORT_SECONDS = 600  # a GPU that hangs also stops who asks for it
IMPORT = ('from elastic.compat.start import quiet_tensorflow; quiet_tensorflow(); '
          'import tensorflow as tf; '
          'print(tf.__version__, len(tf.config.list_physical_devices("GPU")))')


class Row(NamedTuple):
    """One line of the report; fine: None if absent or unknown. remedy: shown with a problem."""
    thing: str
    fine: Optional[bool]
    finding: str
    remedy: str = ''


def processor(bits=64 if sys.maxsize > 2 ** 32 else 32):
    return Row('processor', bits == 64, '{}, {} cores, {}-bit system'.format(
        platform.machine(), len(host.usable_cpus()), bits),
               'TensorFlow does not exist for it: install a 64-bit system')


def python():
    """Returns the Row of a Python with which scripts/_venv.sh can make an environment."""
    # TensorFlow 2.7 for Python 3.8 does not exist on 64-bit Arm.
    stacks = 'today tx2' if platform.machine() == 'aarch64' else 'today paper tx2'
    found = subprocess.run(
        ['bash', '-c', 'source scripts/_venv.sh; for stack in {}; do find_python $stack && break; '
         'done'.format(stacks)], cwd=ROOT, stdout=subprocess.PIPE, universal_newlines=True).stdout
    return Row('Python', bool(found),
               found.strip() or 'none that has a TensorFlow and can make environments',
               'sudo apt install python3-venv; scripts/install.sh names the versions that fit')


def environments(repository=ROOT):
    """Returns a Row for each environment of the repository.

    Without any, returns the Row of the running Python, which PYTHON=python3 would use.
    """
    pythons = sorted(glob.glob(os.path.join(repository, '.venv*', 'bin', 'python')))
    if pythons:
        return [tensorflow(python, python.split(os.sep)[-3],
                           'made elsewhere? rm -r {}; then scripts/install.sh makes it'.format(
                               os.path.dirname(os.path.dirname(python)))) for python in pythons]
    if importlib.util.find_spec('tensorflow'):
        return [tensorflow(sys.executable, 'TensorFlow', 'install it again for this Python')]
    return [Row('TensorFlow', None, 'no environment yet: scripts/install.sh makes it')]


def tensorflow(interpreter, name, remedy):
    """Returns the Row of the TensorFlow that a Python imports."""
    try:
        done = subprocess.run([interpreter, '-c', IMPORT], stdout=subprocess.PIPE, cwd=ROOT,
                              stderr=subprocess.PIPE, universal_newlines=True,
                              timeout=IMPORT_SECONDS)
        found = re.match(r'(\S+) (\d+)$', done.stdout)
        why = ('signal {}'.format(-done.returncode) if done.returncode < 0 else
               (done.stderr.strip() or 'no reason given').splitlines()[-1][:200])
    except (OSError, subprocess.TimeoutExpired) as error:
        found, why = None, str(error)
    return Row(name, bool(found), 'TensorFlow {}, GPUs: {}'.format(*found.groups()) if found else
               'TensorFlow cannot be imported: {}'.format(why),
               remedy + '; on signal 4 the processor is too old for this build')


def gpu(rows, required):
    """Returns the Row of the GPU, by the Rows of environments()."""
    seen = [row.thing for row in rows if row.fine and not row.finding.endswith('GPUs: 0')]
    if not seen and not required:
        return Row('GPU', None, 'none that TensorFlow sees; it trains on the CPU')
    return Row('GPU', bool(seen), 'seen by {}'.format(', '.join(seen) or 'no TensorFlow'),
               "a Jetson needs NVIDIA's own TensorFlow (docs/jetson_tx2.md); elsewhere: "
               "pip install 'tensorflow[and-cuda]' of the same version")


def memory(root):
    """Returns the Row of memory and swap."""
    sizes = {name: float(kb) * 1024 / GB for name, kb in re.findall(
        r'^(\w+): +(\d+) kB', text_or_nothing(root, 'proc/meminfo'), re.M)}
    if 'MemAvailable' not in sizes:
        return Row('memory', None, 'unknown')
    free, swap = sizes['MemAvailable'], sizes.get('SwapFree', 0.0)
    return Row('memory', free + swap >= STEP_GB,
               '{:.1f} of {:.1f} GB free, {:.1f} GB of swap; ResNet50 needs {} GB'.format(
                   free, sizes.get('MemTotal', free), swap, STEP_GB),
               'end other programs, add swap (docs/raspberry_pi.md), or train with a smaller '
               '--input_size or --batch_size')


def disk(folder=ROOT, free=None):
    """Returns the Row of the repository's disk: room for the environment and for runs."""
    free = shutil.disk_usage(folder).free / GB if free is None else free
    made = glob.glob(os.path.join(folder, '.venv*', 'bin', 'python'))
    needed = RUNS_GB if made else ENVIRONMENT_GB + RUNS_GB
    return Row('disk', free >= needed, '{:.1f} GB free, {} GB needed for {}runs'.format(
        free, needed, '' if made else 'the environment and '),
               'make room, or move the repository to a larger card or an SSD')


def heat(root, seconds=PATIENCE):
    """Returns the Row of heat and power supply, now. seconds: how long reading them may take."""
    try:
        device = thermal.find_device(root, seconds=seconds)
        if device is None:
            return Row('heat', None, thermal.NOTHING)
        reading, (bits, _) = in_time(lambda: (device.read(), device.firmware.read()), seconds)
    except TimeoutError as error:
        return Row('heat', None, 'unknown: {}'.format(error))
    low = bits and bits & LOW_VOLTAGE
    slow = {None: 'throttling unknown', False: 'not throttled', True: 'slowed down now'}
    finding = [reading.temperature_c and '{:.0f} °C'.format(reading.temperature_c),
               slow[reading.throttled], low and 'the voltage is too low', device.firmware.note]
    return Row('heat', not (low or reading.throttled), ', '.join(filter(None, finding)),
               "cool it (heat sink and fan); for the voltage: the maker's supply, a short cable")


def report(rows):
    """Returns aligned lines, each remedy below its problem."""
    width = max(len(row.thing) for row in rows)
    lines = []
    for row in rows:
        lines.append('{:{}}  {}  {}'.format(row.thing, width, MARKS[row.fine], row.finding))
        if row.fine is False:
            lines.append('{:{}}      -> {}'.format('', width, row.remedy))
    return '\n'.join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog='check_device.sh', description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gpu', action='store_true',
                        help='require a GPU that TensorFlow can use: status 1 without one')
    args = parser.parse_args(argv)
    root, made = os.environ.get('DEVICE_ROOT', '/'), environments()
    rows = [processor(), python()] + made + [gpu(made, args.gpu), memory(root), disk(), heat(root)]
    print(report(rows))
    return int(any(row.fine is False for row in rows))


if __name__ == '__main__':
    command_line.run(main)
