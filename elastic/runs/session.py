"""One process of a run: what it resumes from; its records, times and checkpoints."""

import contextlib
import gc
import platform

import tensorflow as tf
from tensorflow import keras

from elastic.device import energy, thermal
from elastic.device.host import host_description
from elastic.errors import UserError
from elastic.runs import checkpoint
from elastic.runs.clock import Clock
from elastic.runs.recorder import Recorder, open_run
from elastic.schemes.scheme import Choice
from elastic.selection.importance import Trial
from elastic.steps.epoch import EpochResult
from elastic.workers.agreement import TABLE

RECORDS = TABLE + (Choice, Trial, EpochResult)  # in checkpoints


def here():
    """Returns the machine and the software, which should be the same when a run resumes."""
    stack = 'TensorFlow {}, Keras {}, Python {}.{}'.format(
        tf.__version__, keras.__version__, *platform.python_version_tuple()[:2])
    return dict(host=host_description(), stack=stack)


def interrupted_run(folder, restart=False):
    """Returns the tree of the checkpoint that this run resumes from; None if it starts.

    Its settings are those of settings.json, which is_finished compares.
    """
    resumed = None if restart else checkpoint.read(folder, RECORDS)
    if resumed is None:
        return None
    before, now = resumed['about'], here()
    if resumed['damaged']:
        print('warning: {}: resuming from the checkpoint before it'.format(resumed['damaged']))
    for what, differs in (('stack', 'the weights by rounding, and the noise of dropout'),
                          ('host', 'times, and with them the selections')):
        if before[what] != now[what]:
            print('warning: interrupted on {}, resumes on {}: {} will differ'.format(
                before[what], now[what], differs))
    return resumed


def joint_resume(cluster, folder, restart):
    """Returns the tree of interrupted_run on the chief, on all workers of a cluster.Cluster."""
    resumed = cluster.of_chief(lambda: interrupted_run(folder, restart), RECORDS)
    if resumed is not None and not cluster.is_chief:
        resumed.update(stamps=[], damaged=None)  # those of the chief's folder, as its files
        resumed['records'] = {}
    return resumed


class Session:
    """Holds what the training loop writes to.

    keeper: checkpoint.Keeper; by default one that keeps nothing.
    resumed: the tree of the checkpoint that the run resumes from; None if it starts.
    statistics: statistics.Statistics of the head that was solved in this process, once it was, if
    they are kept and nothing is trained after that; else None.
    """
    statistics = None

    def __init__(self, recorder, clock=None, keeper=None, resumed=None):
        self.recorder, self.resumed = recorder, resumed
        self.clock, self.keeper = clock or Clock(), keeper or checkpoint.Keeper()

    def preparing(self):
        """Returns a context whose time counts as selection, or as resume if the run resumes."""
        return self.clock('selection' if self.resumed is None else 'resume')


@contextlib.contextmanager
def open_session(records, decisive, about, dataset, resumed, signals, keeps=True):
    """Yields the Session of a run that begins to train; None if it is already finished.

    records: settings.RecordSettings. decisive, resumed: as in open_run. dataset: datasets.Dataset.
    signals: signals.Signals, which from now on stop the loop only between steps.
    about: dict that goes into each checkpoint. keeps: whether to write checkpoints.
    Raises UserError as open_run does, if a run resumes on other images, and with the path of an
    image that becomes unreadable within this context.
    """
    if resumed is not None and resumed['about']['images'] != dataset.fingerprint:
        raise UserError('the images have changed since the run was interrupted: restore them or '
                        'start over with --restart')
    claim = open_run(records.folder, decisive, resumed, records.restart, dataset.photos)
    if claim is None:
        yield None
        return
    keeper = checkpoint.Keeper(records.folder if keeps else None, records.checkpoint_minutes,
                               dict(about, **here()), signals.stop)
    with Recorder(records.folder, claim, resumed and resumed['records']) as recorder, (
            _bad_image_named(dataset)):
        signals.deferred = True
        clock = Clock(energy.Meter(*energy.find_sensors()), thermal.monitor_here())
        gc.collect()
        getattr(gc, 'freeze', int)()  # from now on collections need not scan TensorFlow
        with clock.sampling():
            yield Session(recorder, clock, keeper, resumed)


@contextlib.contextmanager
def _bad_image_named(dataset):
    try:
        yield
    except tf.errors.ResourceExhaustedError:  # no image's fault
        raise
    except tf.errors.OpError:
        bad = dataset.first_fault()
        if bad is None:
            raise
        raise UserError("cannot read image '{}' any more ({}); to leave it out and resume from the "
                        'last checkpoint, run the same command with --skip_bad_images'.format(*bad))
