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

    def run(self):
        heard = dict.fromkeys(self.workers.others, time.monotonic())
        while not self.lost and not self._stopped.wait(EVERY):
            for index in heard:  # takes a while if a worker does not answer
                if tf_internals.is_alive(index, ANSWER_MS):
                    heard[index] = time.monotonic()
            silent = {index: time.monotonic() - last for index, last in heard.items()}  # s
            self.lost = [index for index, seconds in silent.items() if seconds > LOST_AFTER
                         or seconds > EVERY and refuses(self.workers.addresses[index])]
        if self.lost and not self._stopped.is_set():
            tf_internals.abort_collectives('lost ' + ', '.join(map(self.workers.name, self.lost)))

    def stop(self):
        self._stopped.set()
