"""Makes the repository's modules importable; every script in this folder imports it first."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.path.insert(0, ROOT)


def add_model_flags(parser):
    """Adds to an argparse parser the flags of scripts that run a trained model."""
    from elastic.options import add_flag, as_path, number
    from elastic.settings import LOGS_DIR
    parser.add_argument('--input_size', type=number(int, low=8), metavar='PIXELS',
                        help='for a model that takes images of any size')
    parser.add_argument('--logs_dir', type=as_path, default=LOGS_DIR, metavar='DIR',
                        help='folder of the runs (default: %(default)s)')
    add_flag(parser, '--trust_model', 'load a saved model that holds code, which then runs')
