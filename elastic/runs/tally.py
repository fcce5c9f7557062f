"""Sums up the epochs of a run in constant space, for its summary: however many there are."""

import collections

import numpy as np

from elastic.steps.epoch import SOLVE

BIN = 1e-3  # relative width of the bins that step times are counted in


class Tally:
    """Counts the epochs of a run, and the times of its steps.

    epochs: their number. last: the record of the last one; None before the first.
    best_accuracy: on the test images; None if they judge no epoch.
    throttled: number of throttled epochs; None if the device reports none.
    """
    PLAIN_FIELDS = ('epochs', 'last', 'best_accuracy', 'throttled')

    def __init__(self):
        self.epochs, self.last, self.best_accuracy, self.throttled = 0, None, None, None
        self._counts, self._sums = {}, {}  # kind of step -> bin -> number; -> ms of all steps

    def add(self, row, ms):
        """Adds an epoch. row: dict of folder.epoch_columns. ms: kind of step -> ms of each step."""
        self.epochs, self.last = self.epochs + 1, row
        accuracy = row.get('test_accuracy')
        if accuracy is not None:
            self.best_accuracy = max(accuracy, accuracy if self.best_accuracy is None
                                     else self.best_accuracy)
        if row['throttled'] is not None:
            self.throttled = (self.throttled or 0) + row['throttled']
        for kind, each in ms.items():
            if kind == SOLVE:
                continue
            bins = np.round(np.log(np.maximum(each, 1e-6)) / BIN).astype(int)
            self._counts.setdefault(kind, collections.Counter()).update(bins.tolist())
            self._sums[kind] = self._sums.get(kind, 0.0) + sum(each)

    @property
    def step_ms(self):
        """Returns the ms of a step: the median, or the mean if there are steps of several kinds."""
        if not self._counts:
            return self.last['step_ms']
        if len(self._counts) == 1:
            return next(iter(self.medians.values()))
        return sum(self._sums.values()) / sum(
            sum(counts.values()) for counts in self._counts.values())

    @property
    def medians(self):
        """Returns kind of step -> median of its ms, to half of BIN."""
        return {kind: _median(counts) for kind, counts in self._counts.items()}

    def outcome(self):
        """Returns what the summary says of the weights of the last epoch."""
        return dict(final_accuracy=self.last['test_accuracy'], final_loss=self.last['test_loss'],
                    best_accuracy=self.best_accuracy)

    def state(self):
        """Returns the tree that `restore` takes."""
        return dict({name: getattr(self, name) for name in self.PLAIN_FIELDS}, sums=self._sums,
                    counts={kind: np.array(sorted(counts.items()))
                            for kind, counts in self._counts.items()})

    def restore(self, state):
        """Resumes from `state`."""
        for name in self.PLAIN_FIELDS:
            setattr(self, name, state[name])
        self._sums = state['sums']
        self._counts = {kind: collections.Counter(dict(counts.tolist()))
                        for kind, counts in state['counts'].items()}


def _median(counts):
    """Returns the median of the values in these bins. counts: bin -> number."""
    bins, numbers = np.array(sorted(counts.items())).T
    ends = np.cumsum(numbers)
    middle = np.searchsorted(ends, [(ends[-1] - 1) // 2, ends[-1] // 2], 'right')
    return float(np.mean(np.exp(BIN * bins[middle])))
