"""Holds what all command lines share: flags, one-line errors, aligned tables, quiet TensorFlow.

Imports nothing heavy: `--help` and a mistyped flag answer at once.
"""

import contextlib
import difflib
import errno
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
import warnings

from elastic.settings import DEFAULTS, FLAGS

VERSION = '1.0.0'
SHARED = ('model_name', 'trust_model', 'keep_frozen', 'dataset_name', 'data_dir',
          'augmentation', 'class_weight', 'input_size', 'batch_size', 'head', 'head_features',
          'head_start', 'alpha', 'optimizer', 'weight_decay', 'clip_norm', 'inter_op_threads',
          'logs_dir')  # flags of training and profiling

FILES_HELP = ('@FILE reads flags from a file, one a line, such as logs/RUN/flags.txt; a flag '
              'given later overrides it.')
MOST_BYTES = 10 ** 6  # of a file of flags

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENODEV,
               errno.ENXIO, errno.ESTALE, errno.ENOTCONN)  # full, worn out, or gone
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
RESUME = 'run the same command to resume from the last checkpoint, if there is one'
DISK_REMEDY = '; once the disk can be written again, ' + RESUME


class UserError(ValueError):
    """Says that something the user gave cannot be used.

    The message says what was given, what is allowed and what to do. Its first line stands alone;
    further lines list details. Scripts print it and exit with status 2.
    """


def nearest(given, allowed):
    """Returns ` (did you mean 'x'?)` with the most similar allowed name, or '' if none is."""
    by_lower = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(given.lower(), list(by_lower), n=1, cutoff=0.5)
    return " (did you mean '{}'?)".format(by_lower[close[0]]) if close else ''


def first_line(error):
    """Returns the first line of an error's text, at most 200 characters."""
    return (str(error).strip().splitlines() or [''])[0][:200]


def finite(text):
    """Returns the number in a text; raises ValueError unless it is finite."""
    if not math.isfinite(float(text)):
        raise ValueError
    return float(text)


def one_of(given, allowed, what):
    """Returns `given` if it is one of `allowed`; else raises UserError with the most similar."""
    if given in allowed:
        return given
    raise UserError("unknown {} '{}'{}; allowed: {}".format(
        what, given, nearest(given, allowed), ', '.join(allowed)))


def add_flags(parser, names, words=None):
    """Adds the flags of these settings, which settings.py declares, to an argparse parser.

    words: name of a flag -> list, for Flag.add_to.
    """
    for name in names:
        FLAGS[name].add_to(parser, name, DEFAULTS[name], (words or {}).get(name, ()))


def add_shared_flags(parser):
    """Adds --version and the flags that training and profiling share."""
    parser.add_argument('--version', action='version', version='ElasticTrainer ' + VERSION)
    add_flags(parser, SHARED)


def with_files(argv=None):
    """Returns the command line with each @FILE replaced by the flags in that file.

    argv: default: that of the process. A line of the file is read as a shell reads it, without
    expansions; a line that begins with # is a comment. In it, @ has no special meaning.
    Raises UserError for a file that cannot be read, and for one that is not text.
    """
    arguments = []
    for given in sys.argv[1:] if argv is None else argv:
        arguments += _flags_in(given[1:]) if given.startswith('@') else [given]
    return arguments


def _flags_in(path):
    """Returns the words in a file of flags."""
    try:
        with open(path, 'rb') as file:  # may be a pipe, such as @<(echo "--rho 0.5")
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError("cannot read flags from '{}': {}; a value that begins with @ is given as "
                        '--flag=@VALUE, a path as ./@PATH'.format(path, error.strerror))
    text = os.fsdecode(content)
    if len(content) > MOST_BYTES or re.search('[\0-\x08\x0b\x0c\x0e-\x1f]', text):
        raise UserError("'{}' is not a file of flags: it needs text with one flag a line, such as "
                        "'--rho 0.5', of at most {:,} bytes".format(path, MOST_BYTES))
    words = []
    for number, line in enumerate(text.lstrip('\ufeff').split('\n'), 1):
        try:
            words += [] if line.lstrip().startswith('#') else shlex.split(line)
        except ValueError as error:
            raise UserError("'{}', line {}: {}".format(path, number, error))
    return words


def in_one_line(error):
    """Returns one line, with the layer's name, for an error that a model or a flag causes.

    Returns None for any other error: it is a bug, and its traceback is wanted.
    """
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
        return _of_file(error)
    errors = getattr(sys.modules.get('tensorflow'), 'errors', None)
    of_op = errors is not None and isinstance(error, errors.OpError)
    chain = [error]  # tf.function raises a second error, AutoGraph hides the first
    while chain[-1].__context__ is not None and (
            not chain[-1].__suppress_context__ or hasattr(chain[-1], 'ag_error_metadata')):
        chain.append(chain[-1].__context__)
    frames = [frame for each in chain for frame, _ in traceback.walk_tb(each.__traceback__)]
    layer = _layer(chain, frames)
    if of_op and any(os.strerror(number) in str(error) for number in DISK_ERRORS):
        remedy = DISK_REMEDY
    elif isinstance(error, MemoryError) or of_op and isinstance(
            error, errors.ResourceExhaustedError):
        remedy = '; it does not fit in memory: use a smaller --batch_size or --input_size'
    elif of_op or layer and not _is_ours(frames[-1].f_code.co_filename):
        remedy = ''
    else:
        return None
    node = re.search(r'\{\{node ([^}]+)\}\}|\[\[node (\S+)', str(chain[-1]))
    if layer:
        place = "layer '{}' ({}): ".format(*layer)
    else:
        place = 'node {}: '.format(node.group(1) or node.group(2)) if node else ''
    return place + reason(chain[-1]) + remedy


def _of_file(error):
    """Returns the line of an OSError that has a file name; such errors seldom are bugs."""
    remedy = ''
    if error.errno in DISK_ERRORS:
        remedy = DISK_REMEDY
    elif error.errno in TOO_MANY_FILES:
        remedy = '; raise the limit (ulimit -n) or close other programs, and ' + RESUME
    name = error.filename
    return '{}{}{}'.format(error.strerror or error, '' if name is None else ": '{}'".format(
        os.fsdecode(name) if isinstance(name, bytes) else name), remedy)


def _is_ours(path):
    """Returns whether a file belongs to this project."""
    package = os.path.dirname(os.path.abspath(__file__))
    path = os.path.abspath(path or os.sep)
    return path.startswith(package + os.sep) or os.path.dirname(path) == os.path.dirname(package)


def _layer(chain, frames):
    """Returns (name, class) of the innermost layer that was running; None if it is one of ours."""
    # AutoGraph drops the frames of Keras 2.7, whose message names the layer.
    named = re.findall(r'calling layer "([^"]+)" \(type (\w+)\)', '\n'.join(map(str, chain)))
    if named and named[-1][1] != 'Backbone':
        return named[-1]
    tensorflow = sys.modules.get('tensorflow')
    for frame in reversed(frames if tensorflow else []):
        layer = frame.f_locals.get('self')
        if isinstance(layer, tensorflow.keras.layers.Layer):
            module = sys.modules.get(type(layer).__module__)
            ours = _is_ours(getattr(module, '__file__', None))
            return None if ours else (layer.name, type(layer).__name__)
    return None


def reason(error):
    """Returns the most specific line of an error's text."""
    text = re.sub(r'\{\{function_node [^}]*\}\} ?|\[Op:[^\]]*\].*', '', str(error))
    lines = [line.strip() for line in text.split('\n') if line.strip()] or [type(error).__name__]
    calls = [i for i, line in enumerate(lines) if 'Exception encountered when calling' in line]
    if calls and calls[-1] + 1 < len(lines):  # Keras 2.7 puts the reason below
        return lines[calls[-1] + 1][:400]
    if lines[0] == 'in user code:':  # tf.function puts the place above
        lines = [line for line in lines if re.match(r'\w+(Error|Exception): ', line)] or lines
        return lines[-1][:400]
    nodes = [i for i, line in enumerate(lines) if line.startswith('[[')]
    return lines[max(0, nodes[0] - 1) if nodes else 0][:400]


def run(main, argv=None):
    """Calls main(argv) and exits with its result, or with 2 and one line for a user's error.

    If nobody reads the output any more (`| head -1`), exits with the status of SIGPIPE.
    """
    warnings.formatwarning = lambda message, *_, **__: 'warning: {}\n'.format(message)
    if hasattr(sys.stdout, 'reconfigure'):  # Python 3.7
        sys.stdout.reconfigure(errors='backslashreplace')  # names of files that are not UTF-8
    try:
        status = main(argv)
        print(end='', flush=True)  # here, where an output that cannot be written has its one line
    except UserError as error:
        print('error: {}'.format(error), file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print('\ninterrupted', file=sys.stderr)
        status = 130
    except BrokenPipeError:
        drop_output(1, 2)
        status = 128 + signal.SIGPIPE
    except Exception as error:
        line = in_one_line(error)
        if line is None:
            raise
        print('error: {}'.format(line), file=sys.stderr)
        status = 2
    sys.exit(status)


def drop_output(*numbers):
    """Lets these file descriptors write nowhere, also what is still buffered."""
    for number in numbers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


@contextlib.contextmanager
def quiet():
    """Within this context, hides what is written to stderr, also by C++; shows it after an error.

    No log level silences all notices of TensorFlow, because C++ writes to file descriptor 2.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as notices:
        os.dup2(notices.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(terminal, 2)
            notices.seek(0)
            sys.stderr.write(notices.read().decode(errors='replace'))
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)


def quiet_tensorflow():
    """Imports TensorFlow without its start-up notices, unless TF_CPP_MIN_LOG_LEVEL is set."""
    if 'TF_CPP_MIN_LOG_LEVEL' in os.environ or 'tensorflow' in sys.modules:
        return
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
    with quiet():
        import tensorflow
        tensorflow.get_logger().setLevel('ERROR')
        tensorflow.config.list_physical_devices()


def usable_cpus():
    """Returns the set of the numbers of the CPUs that this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def start_tensorflow(inter_op_threads=0, deterministic=False, seed=None):
    """Imports TensorFlow quietly and sets its threads, determinism and seed.

    inter_op_threads: number of ops that may run at once; 0: TensorFlow chooses.
    Raises UserError if this TensorFlow has no deterministic ops.
    """
    quiet_tensorflow()
    import tensorflow as tf

    from elastic.compat import keras_stack
    keras_stack.keep_tracebacks()  # in_one_line reads them
    if inter_op_threads != tf.config.threading.get_inter_op_parallelism_threads():
        tf.config.threading.set_inter_op_parallelism_threads(inter_op_threads)
    if deterministic:
        if not hasattr(tf.config.experimental, 'enable_op_determinism'):
            raise UserError('--deterministic needs TensorFlow 2.9 or later; this is {}'.format(
                tf.__version__))
        tf.config.experimental.enable_op_determinism()
    if seed is not None:
        keras_stack.set_seed(seed)


def table(header, rows, align=None):
    """Returns the text of a table with aligned columns.

    header: column titles, with units. rows: sequences of str or int.
    align: one '<' or '>' per column; default: the first column left, the others right.
    """
    rows = [[str(cell) for cell in row] for row in rows]
    align = align or '<' + '>' * (len(header) - 1)
    widths = [max([len(title)] + [len(row[i]) for row in rows])
              for i, title in enumerate(header)]
    lines = [header, ['-' * width for width in widths]] + rows
    return '\n'.join('  '.join('{:{}{}}'.format(cell, side, width)
                               for cell, side, width in zip(line, align, widths)).rstrip()
                     for line in lines)
