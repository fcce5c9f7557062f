"""How long calls take beside each other, on a machine that others may share.

Takes functions that wait for the device; gives the ms of each call, round by round, so that a slow
spell hits all of them alike, and tells the rounds that something disturbed. And the clock of a run.
"""

import contextlib
import time

import numpy as np

DISTURBED = 1.15  # times the quickest round: of what took longer, something slowed the machine


def interleaved_ms(functions, seconds, rounds=(5, 40)):
    """(rounds, functions) float64: ms of each call, the functions in turn.

    functions: () -> anything, once the device is done. seconds: stops after about that long, but
    within the given least and most rounds; after three times as long where fewer were undisturbed.
    """
    for function in functions:
        function()  # the first call compiles
        function()
    samples, start, limit = [], time.perf_counter(), seconds
    while len(samples) < rounds[0] or (len(samples) < rounds[1]
                                       and time.perf_counter() - start < limit):
        samples.append([settled_ms(function) for function in functions])
        enough = len(undisturbed(np.array(samples), least=1)) >= rounds[0]
        limit = seconds if enough else 3 * seconds
    return np.array(samples)


def undisturbed(rounds_ms, least=3):
    """The rounds, (rounds, functions) ms, without those which took more than DISTURBED of the
    quickest, all functions together; but the quickest `least` stay.

    Neighbours on a shared host cannot be seen from here. They slow it by a third, for seconds, and
    change what overlaps.
    """
    whole = rounds_ms.sum(axis=1)
    limit = max(DISTURBED * whole.min(), np.sort(whole)[:least][-1])
    return rounds_ms[whole <= limit]


def settled_ms(function):
    """ms of the second of two calls in a row: in training a step follows itself. One behind another
    that is larger finds the processor's caches cold, which a short step shows (two inputs, 17 ms a
    full step: the head's step took 1.5 ms more).
    """
    function()
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


class Clock:
    """Monotonic seconds in named buckets; `with clock('step')` adds to one.

    meter: energy.Meter, monitor: thermal.Monitor, which run in those that count as training; None
    for none.
    """
    TRAINING = ('step', 'selection')

    def __init__(self, meter=None, monitor=None):
        self.seconds = dict.fromkeys(self.TRAINING + ('validation', 'checkpoint', 'resume',
                                                      'lost'), 0.0)
        self.monitor = monitor
        self._beside = {name: watch for name, watch in (('meter', meter), ('monitor', monitor))
                        if watch is not None}

    @contextlib.contextmanager
    def __call__(self, bucket):
        with contextlib.ExitStack() as stack:
            for watch in self._beside.values() if bucket in self.TRAINING else ():
                stack.enter_context(watch.running())
            begin = time.perf_counter()
            try:
                yield
            finally:
                self.seconds[bucket] += time.perf_counter() - begin

    def move(self, seconds, source, target):
        """Books seconds that were counted in `source` under `target` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def train_seconds(self):
        return sum(self.seconds[bucket] for bucket in self.TRAINING)

    def state(self):
        """What `restore` takes: all that was counted so far."""
        return dict(seconds=self.seconds,
                    **{name: watch.state() for name, watch in self._beside.items()})

    def restore(self, state):
        """Adds what an interrupted run counted."""
        for name, seconds in state['seconds'].items():
            self.seconds[name] += seconds
        for name, watch in self._beside.items():
            if state.get(name) is not None:
                watch.restore(state[name])
