"""Finds the best epoch of a run by validation images, and keeps its weights."""

from elastic.compat import keras_stack
from elastic.settings import KEPT


class BestEpoch:
    """Remembers the best epoch so far: of the highest accuracy, then of the lowest loss.

    keep: 'best' also keeps its weights; 'last' does not.
    patience: number of epochs without a better one after which training ends; None: never.
    epoch: from 1; 0 before the first.
    """

    def __init__(self, keep, patience=None):
        self.epoch, self._score, self._weights = 0, None, None
        self._keeps, self._patience = keep == KEPT[1], patience

    def judge(self, epoch, loss, accuracy, model):
        """Takes the loss and accuracy on the validation images after an epoch of `model`."""
        if self._score is None or (accuracy, -loss) > self._score:
            self.epoch, self._score = epoch, (accuracy, -loss)
            if self._keeps:
                self._weights = [keras_stack.raw(v).numpy() for v in model.variables]

    def is_over(self, epochs):
        """Returns whether training ends after this number of epochs."""
        return self._patience is not None and epochs - self.epoch >= self._patience

    def put_back(self, model):
        """Gives the model the weights of the best epoch, if they were kept."""
        if self._keeps:
            keras_stack.assign_arrays(model.variables, self._weights)

    def outcome(self, tally, tested):
        """Returns what the summary says of the kept weights.

        tally: Tally of all epochs. tested: their (loss, accuracy) on the test images.
        """
        last = tally.last
        kept, accuracy, loss = (self.epoch, self._score[0], -self._score[1]) if self._keeps else (
            tally.epochs, last['validation_accuracy'], last['validation_loss'])
        return dict(kept_epoch=kept, final_loss=tested[0], final_accuracy=tested[1],
                    best_accuracy=None,  # of the test images, which are used once
                    validation_accuracy=accuracy, validation_loss=loss)

    def state(self):
        """Returns the tree that `restore` takes."""
        return dict(epoch=self.epoch, score=self._score, weights=self._weights)

    def restore(self, state):
        """Resumes from `state`."""
        self.epoch, self._score, self._weights = [
            state[name] for name in ('epoch', 'score', 'weights')]
