"""Notices that another worker is gone, also while this one waits for it in vain."""

import threading
import time

from elastic.compat import tf_internals
from elastic.workers.addresses import refuses

EVERY = 1.0  # s between two looks at the others
ANSWER_MS = 5000  # the longest wait for one answer
LOST_AFTER = 30.0  # s without an answer: a large gradient on a slow wire may delay it


class Heartbeat(threading.Thread):
    """Looks at the other workers until `stop`; ends all waiting for them if one is lost.

    A process that is gone is lost at once, one that only does not answer after LOST_AFTER: it
    hangs, or its cable is cut.
    workers: addresses.Workers. lost: indices of workers; empty while all are there.
    """

    def __init__(self, workers):
        super().__init__(daemon=True)
        self.workers, self.lost = workers, []
        self._stopped = threading.Event()
        self._heard = dict.fromkeys(workers.others, time.monotonic())

    def run(self):
        while not self.lost and not self._stopped.wait(EVERY):
            self.look()
        if self.lost and not self._stopped.is_set():
            tf_internals.abort_collectives('lost ' + ', '.join(map(self.workers.name, self.lost)))

    def look(self):
        """Sets `lost`; takes a while if a worker does not answer."""
        for index in self.workers.others:
            if tf_internals.is_alive(index, ANSWER_MS):
                self._heard[index] = time.monotonic()
        self.lost = [index for index, heard in self._heard.items()
                     if time.monotonic() - heard > LOST_AFTER
                     or time.monotonic() - heard > EVERY and refuses(self.workers.addresses[index])]

    def stop(self):
        self._stopped.set()
