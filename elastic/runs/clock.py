"""The clock of a run, which separates training time from validation and checkpoints."""

import contextlib
import time

from elastic.device.energy import Meter
from elastic.device.thermal import Monitor


class Clock:
    """Adds up seconds in named buckets: `with clock('step'):` adds to one of them.

    meter, monitor: get the intervals of the buckets in TRAINING; by default without sensors.
    """
    TRAINING = ('step', 'selection', 'head')
    OTHER = ('validation', 'checkpoint', 'resume')

    def __init__(self, meter=None, monitor=None):
        self.seconds = dict.fromkeys(self.TRAINING + self.OTHER, 0.0)
        self.meter, self.monitor = meter or Meter([]), monitor or Monitor()
        self._bucket, self._begin = None, 0.0

    @contextlib.contextmanager
    def sampling(self):
        """Reads the sensors within this context, in the background."""
        with self.meter.sampler.running(), self.monitor.sampler.running():
            yield

    @contextlib.contextmanager
    def __call__(self, bucket):
        """Counts in `bucket` within this context; the bucket around it pauses."""
        outer = self._bucket
        self._switch(bucket)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, bucket):
        now = time.perf_counter()
        if self._bucket is not None:
            self.seconds[self._bucket] += now - self._begin
        if self._bucket in self.TRAINING:
            self.meter.trained(self._begin, now)
            self.monitor.trained(self._begin, now)
        self._bucket, self._begin = bucket, time.perf_counter()

    def move(self, seconds, source, target):
        """Moves seconds that were counted in bucket `source` to bucket `target`."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def train_seconds(self):
        return sum(self.seconds[bucket] for bucket in self.TRAINING)

    def state(self):
        """Returns what was counted so far, for `restore`."""
        return dict(seconds=self.seconds, meter=self.meter.state(), monitor=self.monitor.state())

    def restore(self, state):
        """Adds what an interrupted run counted."""
        for name, seconds in state['seconds'].items():
            self.seconds[name] += seconds
        self.meter.restore(state['meter'])
        self.monitor.restore(state['monitor'])
