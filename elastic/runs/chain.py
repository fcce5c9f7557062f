"""Reads the finished run that --continue_from names, and the runs before it."""

import os
import re
from typing import Any, NamedTuple

from elastic.errors import UserError
from elastic.export.predictor import CHECKPOINT, WEIGHTS
from elastic.files import read_json
from elastic.runs.folder import fault, read_run
from elastic.settings import DEFAULTS, FLAGS, PRUNE

# Flags of what is trained, which are inherited together.
WHAT = ('train_type', 'train_tensors', 'importance', 'head_epochs')
# Flags of the network, which a continued run keeps.
FIXED = ('model_name', 'alpha', 'input_size', 'weights', 'keep_frozen', 'head', 'head_features',
         'head_start')
# Flags that depend on the images or the devices, or that would solve the head again.
NOT_INHERITED = ('continue_from', 'weights', 'dataset_name', 'num_classes', 'train_images',
                 'test_images', 'workers', 'deadline')


class Earlier(NamedTuple):
    """Holds a finished run that another continues: its folder, settings.json and summary.json."""
    folder: str
    settings: Any
    summary: Any

    @property
    def name(self):
        return os.path.basename(os.path.abspath(self.folder))

    @property
    def weights(self):
        """Returns the path of its weights."""
        return os.path.join(self.folder, CHECKPOINT, WEIGHTS)

    @property
    def class_names(self):
        """Returns the names of its classes, in the order of the outputs."""
        return tuple(self.summary['class_names'])

    @property
    def before(self):
        """Returns the folder of the run that it continues; None if it continues none."""
        path = self.summary.get('run_before')
        return path and os.path.normpath(os.path.join(self.folder, path))

    def words(self, given):
        """Returns its flags that a run which continues it inherits, for a command line.

        given: the arguments of that run as given; None, those that were not.
        """
        found = dict(self.settings, head_features=self.summary.get('head_features'),
                     weights=self.weights)
        if found.get('deadline') is not None:  # it chose them
            found['rho'] = self.summary.get('rho')
        other = WHAT if (given.train_type, given.train_tensors) != (None, None) else ()
        names = set(FLAGS).difference(NOT_INHERITED, other).union(['weights'])
        return ['--{}={}'.format(name, found[name]) for name in sorted(names)
                if found.get(name) is not None and FLAGS[name].decides]

    def check_network(self, given):
        """Raises UserError if a flag of the network was given another value than its own.

        given: as in `words`.
        """
        own = dict(DEFAULTS, **dict(word[2:].split('=', 1) for word in self.words(given)))
        wrong = [name for name in FIXED if getattr(given, name) is not None
                 and str(getattr(given, name)).lower() != str(own[name]).lower()]
        if wrong:
            raise UserError('--continue_from keeps the network of run {!r}: leave --{} out'.format(
                self.name, wrong[0]))

    def check_stack(self, stack):
        """Raises UserError if it was trained with another Keras; prints other versions.

        stack: str, as in summary.json.
        """
        def generation(text):
            return re.search(r'Keras (\d+)', text).group(1)
        before = self.summary['stack']
        if generation(before) != generation(stack):
            raise fault(self.folder, 'was trained on {}, and this is {}: continue it on its own '
                        'stack, or start a new run with --weights {}'.format(
                            before, stack, self.weights))
        if before != stack:
            print('run {} was trained on {}: the same network differs by rounding here'.format(
                self.name, before))


def earlier_run(folder):
    """Returns the Earlier in `folder`; raises UserError if it cannot be continued."""
    summary = read_run(folder).summary
    found = Earlier(folder, read_json(os.path.join(folder, 'settings.json')), summary)
    if summary['scheme'] == PRUNE:
        raise fault(folder, 'prune_training has removed channels, so it cannot be continued; '
                    'continue from a run of another scheme')
    if not os.path.exists(found.weights) or not summary.get('class_names'):
        raise fault(folder, 'has no {}, so it cannot be continued; train it again with --restart'
                    .format(found.weights if summary.get('class_names') else 'names of classes'))
    return found


def chain_of(folder):
    """Returns the Earlier runs from `folder` back to the first, and what is missing.

    The second value is None, or a line on the run before which the chain is broken.
    """
    found = []
    while folder not in [None] + [run.folder for run in found]:
        try:
            found.append(earlier_run(folder))
        except UserError as error:
            return found, str(error)
        folder = found[-1].before
    return found, None


def check_place(folder, earlier):
    """Raises UserError if a run in `folder` would write into a run of the chain of `earlier`."""
    place = os.path.realpath(folder)
    for run in chain_of(earlier)[0]:
        old = os.path.realpath(run.folder)
        if (place + os.sep).startswith(old + os.sep) or old.startswith(place + os.sep):
            raise UserError("the run would be written into '{}', the folder of a run that it "
                            'continues; choose another --run_name'.format(run.folder))
