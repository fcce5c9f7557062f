"""Judges the epochs of a run: by the test images, or by validation images, to keep the best."""

from elastic.compat import keras_stack
from elastic.settings import KEPT


def judge_of(dataset, settings):
    """Returns the judge of a run: BestEpoch with validation images, else LastEpoch."""
    if dataset.validation is None:
        return LastEpoch()
    return BestEpoch(settings.keep, settings.patience)


class LastEpoch:
    """Judges each epoch by the test images, and keeps the last one.

    images: which images judge, as the Dataset and the records name them. tests_at_end: whether a
    final test follows.
    """
    images, tests_at_end = 'test', False

    def epoch(self, run):
        """Returns the Evaluation after an epoch of a run.Run.

        Loss and accuracy are the chief's: rounding may differ between boards, but not a decision.
        """
        judged = run.judged(getattr(run.dataset, self.images))
        loss, accuracy = run.cluster.of_chief(lambda: judged[:2])
        return judged._replace(loss=loss, accuracy=accuracy)

    def is_over(self, epochs):
        """Returns whether training ends after this number of epochs."""
        return False

    def end(self, run):
        """Returns what the summary says of the kept weights."""
        return run.tally.outcome()

    def state(self):
        """Returns the tree that `restore` takes."""
        return dict(vars(self))

    def restore(self, state):
        """Resumes from `state`."""
        vars(self).update(state)


class BestEpoch(LastEpoch):
    """Remembers the best epoch so far: of the highest accuracy, then of the lowest loss.

    keep: 'best' also keeps its weights; 'last' does not.
    patience: number of epochs without a better one after which training ends; None: never.
    best: its number, from 1; 0 before the first.
    """
    images, tests_at_end = 'validation', True

    def __init__(self, keep, patience=None):
        self.best, self._score, self._weights = 0, None, None
        self._keeps, self._patience = keep == KEPT[1], patience

    def epoch(self, run):
        judged = super().epoch(run)
        self.judge(run.epoch, judged.loss, judged.accuracy, run.maker.model)
        return judged

    def judge(self, epoch, loss, accuracy, model):
        """Takes the loss and accuracy on the validation images after an epoch of `model`."""
        if self._score is None or (accuracy, -loss) > self._score:
            self.best, self._score = epoch, (accuracy, -loss)
            if self._keeps:
                self._weights = [keras_stack.raw(v).numpy() for v in model.variables]

    def is_over(self, epochs):
        return self._patience is not None and epochs - self.best >= self._patience

    def end(self, run):
        if run.epoch <= run.settings.num_epochs:
            print('training ends: no epoch was better than epoch {} for {} epochs'.format(
                self.best, self._patience))
        with run.clock('validation'):
            if self._keeps:
                keras_stack.assign_arrays(run.maker.model.variables, self._weights)
            tested = run.judged(run.dataset.test)
        run.session.recorder.predictions(run.dataset, tested)
        last = run.tally.last
        kept, accuracy, loss = (self.best, self._score[0], -self._score[1]) if self._keeps else (
            run.tally.epochs, last['validation_accuracy'], last['validation_loss'])
        return dict(kept_epoch=kept, final_loss=tested.loss, final_accuracy=tested.accuracy,
                    best_accuracy=None,  # of the test images, which are used once
                    validation_accuracy=accuracy, validation_loss=loss)
