"""Damages files: they are read or refused in words, and do no harm."""

import contextlib
import math

import numpy as np
import pytest

from cached_runs import network
from elastic.compat import keras_stack
from elastic.device.meter_log import metered_joules, read_meter
from elastic.errors import UserError
from elastic.networks.saved_model import from_saved_model
from elastic.runs.folder import read_run
from elastic.timing.op_times import read_trace
from elastic.timing.stored import stored_table
from made_runs import make_run
from timing_tables import table_of_branching
from xplanes import CPU, GPU, xplane

COUNT = 10  # damaged files of each kind


def damaged(content, rng):
    """Returns the bytes with a few of them changed, removed, doubled, cut off or inserted."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randint(len(content) or 1), rng.randint(1, 40)
        kind = rng.randint(5)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << rng.randint(8)
        elif kind == 1:
            del content[at:at + length]
        elif kind == 2:
            content[at:at] = content[at:at + length]
        elif kind == 3:
            del content[at:]
        else:
            content[at:at] = rng.bytes(length)
    return bytes(content)


def timing_table(folder):
    path = str(folder / 'timings.json')
    table_of_branching().save(path)
    return folder / 'timings.json', lambda: stored_table(path, {})


def records(folder):
    run = make_run(folder, 'run')
    return run / 'epochs.csv', lambda: read_run(str(run))


def meter(folder):
    path = folder / 'meter.csv'
    path.write_text('timestamp,watts\n' + ''.join(
        '{}.5,{}\n'.format(1000 + second, 5 + second % 3) for second in range(60)))

    def check():
        joules = metered_joules(read_meter(str(path)), [[1010.0, 1020.0]])
        assert math.isfinite(joules)
    return path, check


def trace(folder):
    path = xplane(folder / 'host.xplane.pb', {CPU: [
        ('a/Conv2D:Conv2D', 1, {}), ('b/MatMul:MatMul', 2, {})],
        GPU: [('sgemm', 3, {'tf_op': ('ref', 'b/MatMul:MatMul'), 'kernel_details': 'regs:32'})]})

    def check():
        times, _ = read_trace(str(path), 1, gpu=False)
        assert all(0 <= ms < 1e6 for ms in times.values())
    return folder / 'host.xplane.pb', check


def model(folder):
    path = folder / keras_stack.MODEL_FILE
    network().save(str(path))

    def check():
        assert from_saved_model(str(path), (32, 32, 3), 10, 'frozen').output_shape == (None, 10)
    return path, check


@pytest.mark.parametrize('make', [timing_table, records, meter, trace, model])
def test_damaged_files_are_read_or_refused_in_words(tmp_path, make):
    path, check = make(tmp_path)
    check()
    content, rng = path.read_bytes(), np.random.RandomState(2)
    for _ in range(COUNT):
        path.write_bytes(damaged(content, rng))
        with contextlib.suppress(UserError):
            check()
