"""Errors that a user can mend, in one line: UserError, and those of a layer, memory or a disk."""

import difflib
import errno
import math
import os
import re
import sys
import traceback

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENODEV,
               errno.ENXIO, errno.ESTALE, errno.ENOTCONN)  # full, worn out, or gone
RESUME = 'run the same command to resume from the last checkpoint, if there is one'
MEMORY_REMEDY = '; it does not fit in memory: use a smaller --batch_size or --input_size'
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


def in_one_line(error):
    """Returns one line, with the layer's name, for an error that a model or a flag causes.

    Returns None for any other error: it is a bug, and its traceback is wanted.
    """
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
        return _of_file(error)
    if isinstance(error, OSError) and 'temporary directory' in str(error):
        return 'no folder for temporary files can be written, such as /tmp: set TMPDIR to one'
    chain = _chain_of(error)
    frames = [frame for each in chain for frame, _ in traceback.walk_tb(each.__traceback__)]
    layer = _layer(chain, frames)
    op_error = _is_op_error(error)
    if op_error and any(os.strerror(number) in str(error) for number in DISK_ERRORS):
        remedy = DISK_REMEDY
    elif isinstance(error, MemoryError) or _is_op_error(error, 'ResourceExhaustedError'):
        remedy = MEMORY_REMEDY
    elif op_error or layer and not _is_ours(frames[-1].f_code.co_filename):
        remedy = ''
    else:
        return None
    node = re.search(r'\{\{node ([^}]+)\}\}|\[\[node (\S+)', str(chain[-1]))
    if layer:
        place = "layer '{}' ({}): ".format(*layer)
    else:
        place = 'node {}: '.format(node.group(1) or node.group(2)) if node else ''
    return place + reason(chain[-1]) + remedy


def _is_op_error(error, name='OpError'):
    """Returns whether an error is of this class of tf.errors."""
    kinds = getattr(sys.modules.get('tensorflow'), 'errors', None)
    return kinds is not None and isinstance(error, getattr(kinds, name))


def _chain_of(error):
    """Returns an error and those in whose place it was raised, the last one first.

    tf.function raises a second error; AutoGraph hides the first.
    """
    chain = [error]
    while chain[-1].__context__ is not None and (
            not chain[-1].__suppress_context__ or hasattr(chain[-1], 'ag_error_metadata')):
        chain.append(chain[-1].__context__)
    return chain


def _of_file(error):
    """Returns the line of an OSError that has a file name; such errors seldom are bugs."""
    remedy = ''
    if error.errno in DISK_ERRORS:
        remedy = DISK_REMEDY
    elif error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files
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
