"""What the command lines share: argument types, one-line errors, aligned tables, quiet start-up.

Imports nothing heavy, so that `--help` and a mistyped flag answer at once.
"""

import argparse
import difflib
import math
import os
import sys
import tempfile
import warnings


class UserError(ValueError):
    """Something the user gave cannot be used.

    The message says what was given, what is allowed and what to do. Its first line stands alone;
    further lines, where there are any, list details. Scripts print it and exit with status 2.
    """


def nearest(given, allowed):
    """` (did you mean 'x'?)` for the allowed name nearest to `given`, or an empty string."""
    by_lower = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(given.lower(), list(by_lower), n=1, cutoff=0.5)
    return " (did you mean '{}'?)".format(by_lower[close[0]]) if close else ''


def one_of(given, allowed, what):
    """`given` itself if it is one of `allowed`; UserError naming the nearest one otherwise."""
    if given in allowed:
        return given
    raise UserError("unknown {} '{}'{}; allowed: {}".format(
        what, given, nearest(given, allowed), ', '.join(allowed)))


def boolean(text):
    """argparse type of a flag that may be bare, 1/0 or true/false: never 'False' read as true."""
    value = {'1': True, 'true': True, 'yes': True, '0': False, 'false': False, 'no': False}.get(
        text.lower())
    if value is None:
        raise argparse.ArgumentTypeError("'{}' is not 1, 0, true or false".format(text))
    return value


def number(kind, low=None, high=None, above=None, below=None):
    """argparse type: a finite number of `kind` with low <= x <= high and above < x < below."""
    limits = [text for text, bound in (('at least {}'.format(low), low),
                                       ('above {}'.format(above), above),
                                       ('at most {}'.format(high), high),
                                       ('below {}'.format(below), below)) if bound is not None]
    allowed = '{} {}'.format('a whole number' if kind is int else 'a number', ', '.join(limits))

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError("'{}' is not {}".format(text, allowed))
        if ((kind is float and not math.isfinite(value)) or (low is not None and value < low)
                or (high is not None and value > high) or (above is not None and value <= above)
                or (below is not None and value >= below)):
            raise argparse.ArgumentTypeError("{} is not {}".format(text, allowed))
        return value
    return parse


def add_flag(parser, name, help_text, default=False):
    """Adds a boolean flag that may be given bare, or with 1/0, true/false."""
    parser.add_argument(name, type=boolean, nargs='?', const=True, default=default, metavar='BOOL',
                        help=help_text + (' (default: true)' if default else ''))


def add_model_flags(parser):
    """The flags that decide what is timed, common to training and profiling."""
    parser.add_argument('--model_name', default='resnet50', metavar='NAME',
                        help='resnet50, vgg16, mobilenetv2, vit, any keras.applications class, or '
                             'the path of a saved Keras model (default: %(default)s)')
    parser.add_argument('--dataset_name', default='caltech_birds2011', metavar='NAME',
                        help='caltech_birds2011, oxford_iiit_pet, stanford_dogs, digits, '
                             'digits_shifted, digits_inverted or folder:PATH '
                             '(default: %(default)s)')
    parser.add_argument('--input_size', type=number(int, low=8), default=224, metavar='PIXELS',
                        help='images are resized to this square (default: %(default)s)')
    parser.add_argument('--batch_size', type=number(int, low=1), default=4, metavar='N',
                        help='images per step (default: %(default)s)')
    parser.add_argument('--alpha', type=number(float, above=0), default=1.0, metavar='X',
                        help='width multiplier of the MobileNet families (default: %(default)s)')
    parser.add_argument('--optimizer', choices=('sgd', 'adam'), default='sgd',
                        help='SGD with momentum 0.9, or Adam (recommended for vit), both with '
                             'decoupled weight decay (default: %(default)s)')
    parser.add_argument('--weight_decay', type=number(float, low=0), default=5e-4, metavar='X',
                        help='decoupled, times the learning rate (default: %(default)s)')
    parser.add_argument('--inter_op_threads', type=number(int, low=0), default=0, metavar='N',
                        help="ops that TensorFlow may run at once; 0: its own choice, one per "
                             'core, the fastest where we measured (default: %(default)s)')
    parser.add_argument('--logs_dir', default='logs', metavar='DIR',
                        help='where runs and timing tables are written (default: %(default)s)')


def run(main, argv=None):
    """Calls main(argv) and exits: a UserError as one line on stderr with status 2."""
    warnings.formatwarning = lambda message, *_: 'warning: {}\n'.format(message)
    try:
        sys.exit(main(argv))
    except UserError as error:
        print('error: {}'.format(error), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print('\ninterrupted', file=sys.stderr)
        sys.exit(130)


def quiet_tensorflow():
    """Imports TensorFlow without its start-up notices, which no log level silences.

    They are written straight to file descriptor 2 by its C++ side. If the import fails they are
    shown after all. A user who set TF_CPP_MIN_LOG_LEVEL sees everything.
    """
    if 'TF_CPP_MIN_LOG_LEVEL' in os.environ or 'tensorflow' in sys.modules:
        return
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as notices:
        os.dup2(notices.fileno(), 2)
        try:
            import tensorflow
            tensorflow.get_logger().setLevel('ERROR')
            tensorflow.config.list_physical_devices()
        except BaseException:
            os.dup2(terminal, 2)
            notices.seek(0)
            sys.stderr.write(notices.read().decode(errors='replace'))
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def start_tensorflow(inter_op_threads=0):
    """Imports TensorFlow quietly and sets the number of ops it may run at once (0: its own)."""
    quiet_tensorflow()
    import tensorflow as tf
    if inter_op_threads != tf.config.threading.get_inter_op_parallelism_threads():
        tf.config.threading.set_inter_op_parallelism_threads(inter_op_threads)


def table(header, rows, align=None):
    """Text of a table with aligned columns.

    header: column titles, with units; rows: sequences of str or numbers already formatted;
    align: one of '<' or '>' per column (default: first column left, the others right).
    """
    rows = [[str(cell) for cell in row] for row in rows]
    align = align or '<' + '>' * (len(header) - 1)
    widths = [max([len(title)] + [len(row[i]) for row in rows])
              for i, title in enumerate(header)]
    lines = [header, ['-' * width for width in widths]] + rows
    return '\n'.join('  '.join('{:{}{}}'.format(cell, side, width)
                               for cell, side, width in zip(line, align, widths)).rstrip()
                     for line in lines)
