"""Command lines of small runs, and real processes of them."""

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SMALL = ['--model_name', 'mobilenetv2', '--alpha', '0.35', '--input_size', '32', '--batch_size',
         '64', '--dataset_name', 'digits_shifted', '--weights', 'none', '--num_epochs', '2',
         '--learning_rate', '0.02', '--steps_per_epoch', '12', '--validation_steps', '4']


def script(*arguments, **environment):
    """A real process: what a user sees."""
    result = subprocess.run([sys.executable] + list(arguments), cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True,
                            env=dict(os.environ, **environment))
    return result.returncode, result.stdout, result.stderr


def flags(tmp_path, *more):
    return SMALL + ['--logs_dir', str(tmp_path)] + list(more)
