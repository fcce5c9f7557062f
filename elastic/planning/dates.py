"""Says before which epochs of a run tensors are selected."""

import bisect


def due_epochs(settings):
    """Returns the epochs, from 1, before which tensors are selected."""
    first = settings.first_epochs + 1
    dates = range(1, settings.num_epochs + 1, settings.interval or settings.num_epochs)
    return [first] + [epoch for epoch in dates if epoch > first]


def until(dates, epoch, num_epochs):
    """Returns the epoch of the selection after `epoch`; num_epochs + 1 if there is none."""
    after = bisect.bisect_right(dates, epoch)
    return dates[after] if after < len(dates) else num_epochs + 1
