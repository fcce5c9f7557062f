"""Sums up the epochs of a run for its summary."""

import numpy as np

from elastic.steps.epoch import SOLVE


class Tally:
    """Counts the epochs of a run, and the times of its steps.

    epochs: their number. last: the record of the last one; None before the first.
    best_accuracy: on the test images; None if they judge no epoch.
    throttled: number of throttled epochs; None if the device reports none.
    steps: kind of step -> [(number, sum of ms, median ms)] of each epoch that has such steps.
    """

    def __init__(self):
        self.epochs, self.last, self.best_accuracy, self.throttled = 0, None, None, None
        self.steps = {}

    def add(self, row, ms):
        """Adds an epoch. row: dict of folder.epoch_columns. ms: kind of step -> ms of each step."""
        self.epochs, self.last = self.epochs + 1, row
        accuracy = row.get('test_accuracy')
        if accuracy is not None:
            self.best_accuracy = max(accuracy, self.best_accuracy or 0.0)
        if row['throttled'] is not None:
            self.throttled = (self.throttled or 0) + row['throttled']
        for kind, each in ms.items():
            if kind != SOLVE:
                self.steps.setdefault(kind, []).append(
                    (len(each), float(sum(each)), float(np.median(each))))

    @property
    def step_ms(self):
        """Returns the ms of a step: the median, or the mean if there are steps of several kinds."""
        if not self.steps:
            return self.last['step_ms']
        if len(self.steps) == 1:
            return next(iter(self.medians.values()))
        numbers, sums, _ = np.transpose([epoch for epochs in self.steps.values()
                                         for epoch in epochs])
        return float(sums.sum() / numbers.sum())

    @property
    def medians(self):
        """Returns kind of step -> ms: the median, over epochs, of the median of an epoch."""
        return {kind: float(np.median([median for *_, median in epochs]))
                for kind, epochs in self.steps.items()}

    def outcome(self):
        """Returns what the summary says of the weights of the last epoch."""
        return dict(final_accuracy=self.last['test_accuracy'], final_loss=self.last['test_loss'],
                    best_accuracy=self.best_accuracy)

    def state(self):
        """Returns the tree that `restore` takes."""
        return dict(vars(self), steps={kind: np.array(epochs)
                                       for kind, epochs in self.steps.items()})

    def restore(self, state):
        """Resumes from `state`."""
        vars(self).update(
            state, steps={kind: epochs.tolist() for kind, epochs in state['steps'].items()})
