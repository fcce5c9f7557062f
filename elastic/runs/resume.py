"""Decides whether a run resumes from a checkpoint, and warns of what has changed since then."""

import platform

import tensorflow as tf
from tensorflow import keras

from elastic.command_line import UserError
from elastic.device.host import host_description
from elastic.runs import checkpoint
from elastic.runs.folder import changed_settings
from elastic.schemes.scheme import Choice
from elastic.selection.importance import Trial
from elastic.steps.epoch import EpochResult
from elastic.steps.prefix_cut import Cut
from elastic.timing.table import CacheCost, Profile, TensorTimings

RECORDS = (Choice, Trial, TensorTimings, Profile, CacheCost, Cut, EpochResult)  # in checkpoints


def stack_description():
    """Returns the versions of TensorFlow, Keras and Python."""
    return 'TensorFlow {}, Keras {}, Python {}.{}'.format(
        tf.__version__, keras.__version__, *platform.python_version_tuple()[:2])


def about_this(decisive):
    """Returns the settings, host and stack, which should be the same when a run resumes."""
    return dict(settings=decisive, host=host_description(), stack=stack_description())


def interrupted_run(folder, decisive, restart=False):
    """Returns the tree of the checkpoint that this run resumes from; None if it starts.

    decisive: dict of flags.decisive_settings. Raises UserError if those of the checkpoint differ.
    """
    resumed = None if restart else checkpoint.read(folder, RECORDS)
    if resumed is None:
        return None
    about, before = about_this(decisive), resumed['about']
    changed = changed_settings(before['settings'], about['settings'])
    if changed:
        raise UserError('the checkpoint in {} has other settings ({}); start over with --restart'
                        .format(folder, ', '.join(changed)))
    if resumed['damaged']:
        print('warning: {}: resuming from the checkpoint before it'.format(resumed['damaged']))
    for what, differs in (('stack', 'the weights by rounding, and the noise of dropout'),
                          ('host', 'times, and with them the selections')):
        if before[what] != about[what]:
            print('warning: interrupted on {}, resumes on {}: {} will differ'.format(
                before[what], about[what], differs))
    return resumed


def check_images(resumed, fingerprint):
    """Raises UserError if a run resumes on other images. fingerprint: of the Dataset."""
    if resumed is not None and resumed['about']['images'] != fingerprint:
        raise UserError('the images have changed since the run was interrupted: restore them or '
                        'start over with --restart')
