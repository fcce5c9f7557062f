"""Says before which epochs of a run tensors are selected."""


def due_epochs(settings):
    """Returns the epochs, from 1, before which tensors are selected."""
    first = settings.first_epochs + 1
    dates = range(1, settings.num_epochs + 1, settings.interval or settings.num_epochs)
    return [first] + [epoch for epoch in dates if epoch > first]


def until(dates, epoch, num_epochs):
    """Returns the epoch of the selection after `epoch`; num_epochs + 1 if there is none."""
    return next((date for date in dates if date > epoch), num_epochs + 1)
