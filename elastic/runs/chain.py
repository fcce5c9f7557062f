"""Reads the finished run that --continue_from names, and the runs before it."""

import os
import re
from typing import Any, NamedTuple

from elastic.errors import UserError
from elastic.export.predictor import CHECKPOINT, WEIGHTS
from elastic.files import read_json
from elastic.runs.folder import fault, read_run
from elastic.settings import DEFAULTS, FLAGS, PRUNE
from elastic.texts import shortened

# Flags of the network, which a continued run keeps; of what is trained, inherited together.
FIXED = ('model_name', 'alpha', 'input_size', 'weights', 'keep_frozen', 'head', 'head_features',
         'head_start')
WHAT = ('train_type', 'train_tensors', 'importance', 'head_epochs')
# Flags that depend on the images or the devices, or that would solve the head again.
NOT_INHERITED = ('continue_from', 'dataset_name', 'num_classes', 'train_images', 'test_images',
                 'workers', 'deadline')


class Earlier(NamedTuple):
    """Holds a finished run that another continues: its folder, settings.json and summary.json.

    before: the folder of the run that it continues; None if it continues none.
    """
    folder: str
    settings: Any
    summary: Any
    before: Any

    @property
    def name(self):
        return os.path.basename(os.path.abspath(self.folder))

    @property
    def weights(self):
        return os.path.join(self.folder, CHECKPOINT, WEIGHTS)

    @property
    def class_names(self):
        return tuple(self.summary['class_names'])

    def inherited(self, given):
        """Returns the flags that a run inherits from it, name -> value.

        given: the arguments of that run; None where not given. Raises UserError if a flag of the
        network was given another value.
        """
        own = dict(self.settings, head_features=self.summary.get('head_features'),
                   weights=self.weights, rho=self.summary.get('rho'))
        for name in FIXED:
            value, kept = getattr(given, name), own.get(name)
            kept = DEFAULTS[name] if kept is None else kept
            if value is not None and str(value).lower() != str(kept).lower():
                raise UserError('--continue_from keeps the network of run {!r}: leave --{} {} out'
                                .format(self.name, name, value))
        other = WHAT if (given.train_type, given.train_tensors) != (None, None) else ()
        return {name: own[name] for name in sorted(set(FLAGS).difference(NOT_INHERITED, other))
                if own.get(name) is not None and FLAGS[name].decides}

    def check_stack(self, stack):
        """Raises UserError if it was trained with another Keras; prints other versions.

        stack: as in summary.json.
        """
        before = self.summary['stack']
        if re.findall(r'Keras (\d+)', before) != re.findall(r'Keras (\d+)', stack):
            raise fault(self.folder, 'was trained on {}, and this is {}: continue it on its own '
                        'stack, or start a new run with --weights {}'.format(
                            before, stack, self.weights))
        if before != stack:
            print('run {} was trained on {}: results differ by rounding'.format(self.name, before))

    def check_known(self, images, name):
        """Raises UserError if no training image of data set `name` is of one of its classes."""
        if not (images.train.labels() < len(self.class_names)).any():
            raise UserError('no image of {} is of a class of run {}, which would forget them all: '
                            'add images of its classes ({})'.format(
                                name, self.name, shortened(self.class_names)))


def earlier_run(folder):
    """Returns the Earlier in `folder`; raises UserError if it cannot be continued."""
    folder, summary = os.path.normpath(folder), read_run(folder).summary
    before = summary.get('run_before')
    found = Earlier(folder, read_json(os.path.join(folder, 'settings.json')), summary,
                    before and os.path.normpath(os.path.join(folder, before)))
    if summary['scheme'] == PRUNE:
        raise fault(folder, 'cannot be continued, as prune_training has removed channels: choose a '
                    'run of another scheme')
    if not (os.path.exists(found.weights) and summary.get('class_names')):
        raise fault(folder, 'cannot be continued, as it kept no weights ({}): train it again with '
                    '--restart'.format(found.weights))
    return found


def chain_of(folder):
    """Returns the Earlier runs from `folder` back to the first, and None.

    Where one of them is missing, returns those up to it, and a line that says so.
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
    place = os.path.join(os.path.realpath(folder), '')
    for run in chain_of(earlier)[0]:
        old = os.path.join(os.path.realpath(run.folder), '')
        if place.startswith(old) or old.startswith(place):
            raise UserError("the run would be written into '{}', the folder of a run that it "
                            'continues: choose another --run_name'.format(run.folder))
