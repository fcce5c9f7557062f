"""One curve in a panel, and the marks of epochs in which the device was throttled (thermal.py).

Takes axes of matplotlib and what plot.py made of finished runs. Without such epochs there is no
mark, and a picture is what it was before there were marks.
"""

import numpy as np

from schemes import SCHEMES

LINES = ('-', '--', ':', '-.', (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))  # of curves of one scheme
MARK = {'color': '#222222', 'marker': 'x', 'markersize': 4.5, 'markeredgewidth': 1.1,
        'linestyle': 'none', 'zorder': 4}


def draw_curve(axis, curve, column, seconds, scale):
    """Draws one plot.Curve, with a marker where its training ends; returns its line."""
    color, marker = curve.color, SCHEMES[curve.summary['scheme']].marker
    x = curve.mean['train_seconds'] / seconds
    mean, std = scale * curve.mean[column], scale * curve.std[column]
    if curve.n > 1:
        axis.fill_between(x, mean - std, mean + std, color=color, alpha=0.2, linewidth=0)
    line, = axis.plot(x, mean, color=color, linestyle=LINES[curve.variant % len(LINES)],
                      linewidth=1.4, marker=marker, markersize=6.5, markevery=[len(x) - 1],
                      markeredgecolor='white', markeredgewidth=0.8, zorder=3)
    if curve.throttled.any():
        axis.plot(x[curve.throttled > 0], mean[curve.throttled > 0], **MARK)
    return line


def mark_epochs(axis, throttled):
    """Marks epochs above a panel that has them along x; throttled: (epochs,) int."""
    if throttled.any():
        epochs = 1 + np.flatnonzero(throttled)
        axis.plot(epochs, np.full(len(epochs), 1.04), clip_on=False,
                  transform=axis.get_xaxis_transform(), **MARK)


def legend_of_marks(throttled):
    """[handle with its label], which the marks add to a legend; [] where there are none.

    throttled: of each curve or panel, (epochs,) int.
    """
    from matplotlib.lines import Line2D
    marked = any(epochs.any() for epochs in throttled)
    return [Line2D([], [], label='throttled', **MARK)] * marked
