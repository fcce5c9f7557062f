"""What all scripts share: flags that stand in several, files of flags, and how a script ends.

Imports nothing heavy: `--help` and a mistyped flag answer at once.
"""

import os
import re
import shlex
import signal
import sys
import tempfile
import warnings

from elastic.errors import UserError, in_one_line
from elastic.settings import DEFAULTS, FLAGS

VERSION = '1.0.0'
SHARED = ('model_name', 'trust_model', 'keep_frozen', 'dataset_name', 'data_dir',
          'augmentation', 'class_weight', 'input_size', 'batch_size', 'head', 'head_features',
          'head_start', 'alpha', 'optimizer', 'weight_decay', 'clip_norm', 'inter_op_threads',
          'logs_dir')  # flags of training and profiling

FILES_HELP = ('@FILE reads flags from a file, one a line, such as logs/RUN/flags.txt; a flag '
              'given later overrides it.')
MOST_BYTES = 10 ** 6  # of a file of flags


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
        with open(os.path.expanduser(path), 'rb') as file:  # or a pipe: @<(echo "--rho 0.5")
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


def run(main, argv=None):
    """Calls main(argv) and exits with its result, or with 2 and one line for a user's error.

    If nobody reads the output any more (`| head -1`), exits with the status of SIGPIPE.
    """
    for number, name in ((1, 'stdout'), (2, 'stderr')):
        if getattr(sys, name) is None:  # closed by whoever started this process
            drop_output(number)
            setattr(sys, name, os.fdopen(number, 'w'))
    if main.__module__ == '__main__':
        _use_utf_8()
    warnings.formatwarning = lambda message, *_, **__: 'warning: {}\n'.format(message)
    if hasattr(sys.stdout, 'reconfigure'):  # Python 3.7
        sys.stdout.reconfigure(errors='backslashreplace')  # names of files that are not UTF-8
    try:
        _find_home()
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


def _use_utf_8():
    """Starts this script again where names of files are not UTF-8, as TensorFlow takes them to be.

    Output keeps the encoding of the terminal; what that lacks becomes \\u.. codes.
    """
    output = getattr(sys.stdout, 'encoding', None) or 'utf-8'
    encodings = [sys.getfilesystemencoding()] + [output] * (sys.version_info < (3, 7))
    again = dict(os.environ, PYTHONUTF8='1', LC_ALL='C.UTF-8',
                 PYTHONIOENCODING=output + ':backslashreplace')
    if os.environ != again and {each.lower() for each in encodings} != {'utf-8'}:
        with open('/proc/self/cmdline', 'rb') as file:
            os.execve(sys.executable, file.read().split(b'\0')[:-1], again)


def _find_home():
    """Makes ~ the folder of temporary files for a user without a home folder, as in containers."""
    home = os.path.expanduser('~')
    if not (os.path.isabs(home) and os.path.isdir(home)):
        os.environ['HOME'] = tempfile.gettempdir()
        warnings.warn('this user has no home folder: {} stands in for it; to choose another, set '
                      'HOME'.format(os.environ['HOME']))


def drop_output(*numbers):
    """Lets these file descriptors write nowhere, also what is still buffered."""
    for number in numbers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
