"""Makes command lines of small runs, and runs them as real processes."""

import contextlib
import csv
import io
import os
import signal
import subprocess
import sys

import numpy as np

from elastic.runs.folder import DEVICE_COLUMNS

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TIMES = ('seconds', 'step_ms') + DEVICE_COLUMNS
SMALL = ['--model_name', 'mobilenetv2', '--alpha', '0.35', '--input_size', '32', '--batch_size',
         '64', '--dataset_name', 'digits_shifted', '--weights', 'none', '--num_epochs', '2',
         '--learning_rate', '0.02', '--steps_per_epoch', '12', '--validation_steps', '4']


def script(*arguments, **environment):
    """Runs a script as a process; returns (exit status, output, errors)."""
    result = subprocess.run([sys.executable] + list(arguments), cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True,
                            env=dict(os.environ, **environment))
    return result.returncode, result.stdout, result.stderr


def flags(tmp_path, *more):
    """Returns the flags of a small MobileNetV2 on a few digits."""
    return SMALL + ['--logs_dir', str(tmp_path)] + list(more)


def quick_flags(logs, *more):
    """Returns the flags of a run of less than a second: 48 digits, a tiny network in `logs`."""
    from cached_runs import BATCH, SIZE, network
    from elastic.compat.keras_stack import MODEL_FILE
    path = os.path.join(str(logs), MODEL_FILE)
    if not os.path.exists(path):
        network().save(path)
    return ['--model_name', path, '--bn_statistics', 'frozen', '--input_size', str(SIZE),
            '--batch_size', str(BATCH), '--dataset_name', 'digits', '--train_images', '48',
            '--validation_steps', '2', '--num_epochs', '2', '--learning_rate', '0.02',
            '--prefix_cache', 'off', '--closed_loop', '0', '--logs_dir', str(logs)] + list(more)


def run_settings_of(flags):
    """Returns the RunSettings of a command line."""
    import main
    return main.run_settings(main.check_arguments(main.parse_arguments(list(flags))))


@contextlib.contextmanager
def at_line(words, call):
    """Yields what is printed within this context; calls call() once, at the first `words`."""
    class Output(io.StringIO):
        waiting = True

        def write(self, text):
            super().write(text)
            if self.waiting and words in self.getvalue():
                self.waiting = False
                call()
    with contextlib.redirect_stdout(Output()) as output:
        yield output


def stopped_at(words, flags):
    """Runs main.main with these flags; SIGTERM comes with the first `words` that it prints."""
    import main
    with at_line(words, lambda: os.kill(os.getpid(), signal.SIGTERM)) as output:
        assert main.main(flags) == 128 + signal.SIGTERM, output.getvalue()


def final_of(output):
    """Returns what a run printed of its final test."""
    return next(line.split(', trained')[0] for line in output.split('\n')
                if line.startswith('final test accuracy'))


def outcome(folder):
    """Returns the records of a run without times, and its weights."""
    records = []
    for name in ('epochs.csv', 'selections.csv', 'predictions.csv'):
        with open(os.path.join(str(folder), name)) as source:
            records += [{column: value for column, value in row.items()
                         if not column.endswith(TIMES)} for row in csv.DictReader(source)]
    with np.load(os.path.join(str(folder), 'checkpoint', 'weights.npz')) as weights:
        return records, {name: weights[name].tobytes() for name in weights.files}


STOP = '''import sys
sys.path.append({support!r})
from small_runs import stopped_at
stopped_at({words!r}, {flags!r})'''  # in a process of its own: --deterministic holds until its end


def assert_resumes_as_whole(words, folder, killed, whole):
    """Asserts that a run of flags `killed`, killed at these words, ends as one of flags `whole`.

    The runs are in `folder`, the second in folder/whole; it is made unless it is there.
    """
    if not (folder / 'whole').exists():
        status, out, err = script('main.py', *whole)
        assert status == 0, out + err
    status, out, err = script('-c', STOP.format(
        support=os.path.dirname(os.path.abspath(__file__)), words=words, flags=killed))
    assert status == 0, out + err
    name = killed[killed.index('--run_name') + 1]
    assert not (folder / name / 'summary.json').exists()
    status, out, err = script('main.py', *killed)
    assert status == 0 and 'resumes in epoch' in out, out + err
    assert outcome(folder / name) == outcome(folder / 'whole')
