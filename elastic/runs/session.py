"""One process of a run: the records, times and checkpoints that it keeps while it trains."""

from elastic.runs.checkpoint import Keeper
from elastic.runs.clock import Clock


class Session:
    """What the training loop writes to.

    recorder: recorder.Recorder. clock: clock.Clock.
    keeper: checkpoint.Keeper; by default one that keeps nothing.
    resumed: the tree of the checkpoint that the run resumes from, see checkpoint.read; None where
    it starts.
    """

    def __init__(self, recorder, clock=None, keeper=None, resumed=None):
        self.recorder, self.resumed = recorder, resumed
        self.clock, self.keeper = clock or Clock(), keeper or Keeper()

    def preparing(self):
        """Returns a context whose time counts as selection, as resume where the run resumes."""
        return self.clock('selection' if self.resumed is None else 'resume')

    def keep(self, state):
        """Writes a checkpoint of the records and of `state()`; returns whether it could."""
        with self.clock('checkpoint'):
            return self.keeper.keep(lambda: dict(run=state(), records=self.recorder.state()))
