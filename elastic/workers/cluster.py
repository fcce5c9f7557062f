"""Sums arrays over the workers that train one model, and hands values from one to all.

Every worker must make the same calls in the same order. One primitive, the sum of an array over the
workers, serves for all: a mean is a sum that is divided; a value of one worker is a sum to which
the others add zeros.
"""

import contextlib
import threading
import time

import numpy as np
import tensorflow as tf

from elastic import trees
from elastic.compat import tf_internals
from elastic.errors import UserError
from elastic.workers.addresses import WorkerLost, refuses, wait_for_all

GROUP = 1  # the key of the group of all workers
FIRST_KEY = 2 ** 30  # of sums outside a step; those within one have smaller keys
EVERY = 1.0  # s between two looks at the others
ANSWER_MS = 5000  # the longest wait for one answer
LOST_AFTER = 30.0  # s without an answer: a large gradient on a slow wire may delay it


class Cluster:
    """Holds the workers that train one model. One process alone is a cluster of size 1.

    workers: addresses.Workers; None: this process alone. timeout: seconds to
    wait for another; needed with workers.
    """

    def __init__(self, workers=None, timeout=None):
        self.workers, self.timeout = workers, timeout
        self.size = 1 if workers is None else len(workers.addresses)
        self.index = 0 if workers is None else workers.index
        self._key, self._heartbeat = FIRST_KEY, None

    @property
    def is_chief(self):
        """Returns whether this worker keeps the records of the run."""
        return self.index == 0

    def join(self):
        """Waits for all workers and starts TensorFlow's server; call it before any other op.

        Raises UserError as wait_for_all does.
        """
        if self.size > 1:
            wait_for_all(self.workers, self.timeout)
            tf_internals.join_cluster(self.workers.addresses, self.index)
            end = time.monotonic() + self.timeout  # a server may start later than this one
            while not all(tf_internals.is_alive(index, ANSWER_MS) for index in self.workers.others
                          ) and time.monotonic() < end:
                time.sleep(0.1)
            self.total(np.zeros(1, np.float32))
            self._heartbeat = Heartbeat(self.workers)
            self._heartbeat.start()
            print('worker {} of {}; {} keeps the records'.format(
                self.index, self.size, 'this one' if self.is_chief else self.workers.name(0)))

    def leave(self):
        """Stops to look whether the others are there; call it after the last exchange."""
        if self._heartbeat is not None:
            self._heartbeat.stop()

    # ------------------------------------------------------------------------------- exchanges

    def total(self, array):
        """Returns the sum of an array over the workers, of the same shape and dtype.

        array: float32, float64, int32 or int64, of one shape on all workers.
        """
        if self.size == 1:
            return np.asarray(array)
        self._key += 1
        with self.watched(), tf.device('CPU:0'):
            return collective_sum(tf.constant(array), self, self._key).numpy()

    def mean(self, array):
        """Returns the float64 mean of an array over the workers; the array itself for one."""
        return array if self.size == 1 else self.total(np.asarray(array, np.float64)) / self.size

    def rows(self, values):
        """Returns (size, n): a row of n numbers, float64, from each worker."""
        values = np.atleast_1d(np.asarray(values, np.float64))
        found = np.zeros((self.size, len(values)))
        found[self.index] = values
        return self.total(found)

    def of_worker(self, owner, make, records=()):
        """Returns the tree that make() returns on worker `owner`, on all workers.

        records: the NamedTuple classes that the tree (trees.py) may hold.
        """
        if self.size == 1:
            return make()
        mine = self.index == owner
        tree = make() if mine else None
        content = np.frombuffer(trees.to_bytes(tree) if mine else b'', np.uint8)
        length = int(self.total(np.array([len(content)], np.int64))[0])
        padded = np.zeros(-(-length // 4) * 4, np.uint8)
        padded[:len(content)] = content
        found = self.total(padded.view(np.int32)).view(np.uint8)[:length].tobytes()
        return tree if mine else trees.from_bytes(found, records)

    def of_chief(self, make, records=()):
        """Returns the tree that make() returns on the chief, on all workers."""
        return self.of_worker(0, make, records)

    def check_same(self, values):
        """Raises UserError, which names a worker, unless all have the chief's values.

        values: dict name -> anything that JSON can store.
        """
        chief, *others = [self.of_worker(index, lambda: values) for index in range(self.size)]
        for index, other in enumerate(others, 1):
            for name, value in chief.items():
                if other.get(name) != value:
                    raise UserError('{} has {} {}, {} has {}: use the same on all workers'.format(
                        self.workers.name(index), name, other.get(name), self.workers.name(0),
                        value))

    # ------------------------------------------------------------------------------- failures

    @contextlib.contextmanager
    def watched(self):
        """Within this context, an error that another worker caused becomes WorkerLost."""
        try:
            yield
        except tf.errors.OpError as error:
            if self.size == 1 or isinstance(error, tf.errors.ResourceExhaustedError):
                raise
            left = self._lost()
            if not left and not isinstance(error, (
                    tf.errors.UnavailableError, tf.errors.DeadlineExceededError,
                    tf.errors.AbortedError, tf.errors.CancelledError)):
                raise
            raise WorkerLost('{} no longer answer{}'.format(
                ' and '.join(map(self.workers.name, left)) or 'another worker',
                's' * (len(left) < 2)))

    def _lost(self):
        """Returns the indices of the workers that are gone or do not answer."""
        if self._heartbeat is not None and self._heartbeat.lost:
            return self._heartbeat.lost
        return [index for index in self.workers.others
                if not tf_internals.is_alive(index, ANSWER_MS)]


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


def collective_sum(tensor, cluster, key):
    """Returns the op that sums a tensor over the workers of a Cluster.

    key: int, the same on all workers for the same sum, and of no sum of another shape.
    """
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor, group_size=cluster.size, group_key=GROUP, instance_key=key,
        ordering_token=[], merge_op='Add', final_op='Id', communication_hint='ring',
        timeout_seconds=cluster.timeout)


ALONE = Cluster()
