"""Defines training schemes: before each epoch, a scheme decides which tensors are trained.

FixedScheme is in fixed.py, ElasticScheme in train.py, PruneTrainScheme in prunetrain.py.
"""

from typing import NamedTuple, Optional, Sequence

import numpy as np

from elastic.steps.epoch import READ


class Choice(NamedTuple):
    """Holds the tensors to train from now on, and what they were chosen by.

    mask: (N,) bool, in the order of model.trainable_variables.
    importance: (N,). timings: TensorTimings. rho: the budget. Fixed schemes have None of these.
    fallback: whether no affordable tensor had positive importance.
    trials: an importance.Trial for each probe batch.
    drift: change of the time shares since the profile, from closed_loop.ClosedLoop.update.
    """
    mask: np.ndarray
    importance: Optional[np.ndarray] = None
    timings: Optional[object] = None
    fallback: bool = False
    trials: Sequence = ()
    drift: float = 0.0
    rho: Optional[float] = None

    @property
    def predicted_ms(self):
        """Returns the predicted ms of a step; with a prefix cache, the mean over its epochs."""
        return self.timings.step_time(self.mask)

    @property
    def time_share(self):
        """Returns the (N,) share of each tensor in backward pass and update; None if unknown."""
        if self.timings is None:
            return None
        ms = self.timings.t_dw + self.timings.t_dy + self.timings.t_up
        return ms / ms.sum()

    def cost_of(self, kind):
        """Returns the CacheCost if steps of this kind (epoch.Call) read a cache, else None."""
        return self.timings.cache if self.timings and kind == READ else None

    def predicted_of(self, kind):
        """Returns (predicted ms, reference ms) of a step of this kind (epoch.Call).

        The reference is the predicted ms of a mean step, divided by the share of steps of this
        kind. So an error in rare steps counts less.
        """
        table = self.timings
        if not table.is_cached(self.mask):
            return self.predicted_ms, self.predicted_ms
        fill = table.fill_share(self.mask)
        ms = table.reading_time if kind == READ else table.filling_time
        return ms(self.mask), self.predicted_ms / max(1 - fill if kind == READ else fill, 1e-9)

    def mean_ms(self, counts):
        """Returns the predicted mean ms of these steps. counts: kind -> number of steps."""
        ms = sum(count * self.predicted_of(kind)[0] for kind, count in counts.items())
        return ms / sum(counts.values())


class Scheme:
    """Decides before each epoch which tensors are trained.

    name: the train type. maker: masked_step.StepMaker; a scheme that replaces the model also
    replaces its maker. summary: dict, the scheme's part of summary.json.
    importance_seconds: seconds spent on importance so far.
    """

    def __init__(self, name, maker):
        self.name, self.maker = name, maker
        self.summary, self.importance_seconds = {}, 0.0

    def select(self, epoch, last):
        """Returns the Choice to use from `epoch` on; None keeps the one in use.

        epoch: from 1. last: EpochResult of the previous epoch, None before the first.
        """

    def replan(self, settings):
        """Uses these settings.Settings, of other epochs or another rho, from now on."""

    def state(self):
        """Returns the tree that `restore` takes, or None."""

    def restore(self, state, choice):
        """Resumes from `state` with `choice` in use; the caller then assigns maker.everything."""
