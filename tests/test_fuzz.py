"""Damages files: ours must be refused or read correctly, others must do no harm."""

import math

import numpy as np
import pytest

from cached_runs import network
from elastic.command_line import UserError, with_files
from elastic.compat import keras_stack
from elastic.device.meter_log import metered_joules, read_meter
from elastic.files import checksum_of_file, read_json, write_json
from elastic.networks.saved_model import from_saved_model
from elastic.runs import checkpoint
from elastic.runs.folder import read_run
from elastic.timing.op_times import read_trace
from elastic.timing.table import TensorTimings
from made_runs import make_run
from models import load_weights, save_weights
from timing_tables import table_of_branching
from xplanes import CPU, GPU, xplane

COUNT = 10  # damaged files of each kind
REFUSED = object()


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


def read_or_refused(read, *errors):
    """Returns read(), or REFUSED if it raises one of `errors` with a message."""
    try:
        return read()
    except errors as error:
        assert str(error)
        return REFUSED


# ---------------------------------------------------------------- ours

def checkpoint_file(folder):
    checkpoint.write(str(folder), dict(epoch=3, values=[np.arange(50.0)]))

    def read():
        found = checkpoint.read(str(folder))
        return found['epoch'], found['values'][0].tobytes()
    return folder / checkpoint.FOLDER / checkpoint.LAST, read, UserError


def weights_file(folder):
    model, path = network(), folder / 'weights.npz'
    save_weights(model, str(path))

    def read():
        for variable in model.weights:
            variable.assign(0 * variable)
        load_weights(model, str(path))
        return [keras_stack.raw(variable).numpy().tobytes() for variable in model.weights]
    return path, read, UserError


def timing_table(folder):
    path = folder / 'timings.json'
    table_of_branching().save(str(path))

    def read():
        table = TensorTimings.load(str(path))
        return table.t_step, table.t_dw.tobytes(), table.names
    return path, read, UserError


def json_file(folder):
    path = folder / 'settings.json'
    write_json(str(path), dict(seed=7, learning_rate=0.02, model_name='resnet50'))

    def read():
        content = read_json(str(path))
        return content['seed'], content['learning_rate'], content['model_name']
    return path, read, (UserError, KeyError)


def records(name):
    def make(folder):
        run = make_run(folder, 'run')
        summary = read_json(str(run / 'summary.json'))
        files = {table: checksum_of_file(str(run / table))
                 for table in ('epochs.csv', 'selections.csv')}
        write_json(str(run / 'summary.json'), dict(summary, files=files))

        def read():
            found = read_run(str(run))
            return found.summary['final_accuracy'], found.epochs, found.selections
        return run / name, read, UserError
    return make


OURS = dict(checkpoint=checkpoint_file, weights=weights_file, table=timing_table, json=json_file,
            summary=records('summary.json'), epochs=records('epochs.csv'),
            selections=records('selections.csv'))


@pytest.mark.parametrize('kind', sorted(OURS))
def test_our_damaged_files_are_refused_or_read_correctly(tmp_path, kind):
    path, read, error = OURS[kind](tmp_path)
    right, content, rng, refused = read(), path.read_bytes(), np.random.RandomState(1), 0
    for _ in range(COUNT):
        path.write_bytes(damaged(content, rng))
        found = read_or_refused(read, *(error if isinstance(error, tuple) else (error,)))
        refused += found is REFUSED
        assert found is REFUSED or found == right
    assert refused > COUNT / 2


# ---------------------------------------------------------------- others'

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


def flag_file(folder):
    path = folder / 'flags.txt'
    path.write_text('# a run\n--rho 0.5\n--seed 3 --save_model\n--dataset_name "folder:a b"\n')

    def check():
        assert all(isinstance(word, str) for word in with_files(['@' + str(path)]))
    return path, check


@pytest.mark.parametrize('make', [meter, trace, model, flag_file])
def test_foreign_damaged_files_are_read_or_refused_in_words(tmp_path, make):
    path, check = make(tmp_path)
    check()
    content, rng = path.read_bytes(), np.random.RandomState(2)
    for _ in range(COUNT):
        path.write_bytes(damaged(content, rng))
        read_or_refused(check, UserError)
