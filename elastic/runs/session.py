"""One process of a run: its records, times and checkpoints while it trains."""

import contextlib
import gc

from elastic.command_line import UserError
from elastic.device import energy, thermal
from elastic.runs.checkpoint import Keeper
from elastic.runs.clock import Clock
from elastic.runs.recorder import Recorder


class Session:
    """Holds what the training loop writes to.

    recorder: recorder.Recorder. clock: clock.Clock.
    keeper: checkpoint.Keeper; by default one that keeps nothing.
    resumed: the tree of the checkpoint that the run resumes from; None if it starts.
    """

    def __init__(self, recorder, clock=None, keeper=None, resumed=None):
        self.recorder, self.resumed = recorder, resumed
        self.clock, self.keeper = clock or Clock(), keeper or Keeper()

    def preparing(self):
        """Returns a context whose time counts as selection, or as resume if the run resumes."""
        return self.clock('selection' if self.resumed is None else 'resume')

    def keep(self, state):
        """Writes a checkpoint of the records and of `state()`; returns whether it could."""
        with self.clock('checkpoint'):
            return self.keeper.keep(lambda: dict(run=state(), records=self.recorder.state()))


@contextlib.contextmanager
def open_session(records, lock, about, resumed, signals):
    """Yields (Session, energy.Meter) of a run that begins to train; closes its records on exit.

    records: settings.RecordSettings. lock: from recorder.open_run. about: dict that goes into each
    checkpoint. signals: signals.Signals, which from now on stop the loop only between steps.
    """
    keeper = Keeper(records.folder, records.checkpoint_minutes, about, signals.stop,
                    resumed and resumed['written'])
    with Recorder(records.folder, lock, resumed and resumed['records']) as recorder:
        signals.deferred = True
        meter = energy.Meter(*energy.find_sensors())
        clock = Clock(meter, thermal.Monitor(thermal.find_device()))
        gc.collect()
        getattr(gc, 'freeze', int)()  # from now on collections need not scan TensorFlow
        yield Session(recorder, clock, keeper, resumed), meter


@contextlib.contextmanager
def bad_image_named(dataset):
    """Within this context, an image that became unreadable raises a UserError with its path."""
    import tensorflow as tf
    try:
        yield
    except tf.errors.OpError as error:
        about_memory = isinstance(error, tf.errors.ResourceExhaustedError)
        bad = None if about_memory else dataset.first_fault()
        if bad is None:
            raise
        raise UserError("cannot read image '{}' any more ({}); to leave it out and resume from the "
                        'last checkpoint, run the same command with --skip_bad_images'.format(*bad))
