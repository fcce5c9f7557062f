"""Names the folders of runs."""

import os

from elastic.data.image_folder import FOLDER
from elastic.data.tfds import TFDS
from elastic.errors import UserError
from elastic.files import printable
from elastic.settings import LAST, RANDOM
from elastic.texts import duration_text

MOST = 40  # characters of the run before, in the name of one that continues it


def checked_run_name(name, logs_dir):
    """Returns the name as a plain path; raises UserError unless it lies below `logs_dir`."""
    plain = os.path.normpath(name)
    if not name.strip() or os.path.isabs(name) or plain == '.' or (
            {'..', '~'}.intersection(name.replace('\\', '/').split('/'))):
        raise UserError("run name '{}' leaves {}/; allowed: a name below it".format(name, logs_dir))
    return plain


def default_run_name(args):
    """Returns the name of a run for which --run_name gives none. args: the arguments of main.py."""
    name = os.path.splitext(os.path.basename(os.path.normpath(args.model_name)))[0]
    data = args.dataset_name
    if data.startswith(TFDS):
        data = data[len(TFDS):].replace(':', '-')
    data = data.replace(FOLDER, '').strip('/').replace('/', '-')
    parts = [name, printable(data), args.train_type]
    if args.train_type.startswith('elastic'):
        parts.append('rho{:g}'.format(args.rho) if args.deadline is None else
                     duration_text(args.deadline))
    parts += [args.head] * (args.head != LAST) + [args.head_start] * (args.head_start != RANDOM)
    if args.continue_from is not None:
        parts.append('after_' + os.path.basename(args.continue_from)[-MOST:])
    return '_'.join(parts + ['seed{}'.format(args.seed)] * (args.seed > 0))
