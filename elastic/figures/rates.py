"""Draws the test that found a run's learning rate."""

import os

from elastic.errors import finite
from elastic.figures.style import BLUE, VERMILION, write_figure
from elastic.runs.folder import RATE_COLUMNS, fault, read_rows


def range_tests(run_folder, output):
    """Draws the change of the loss over the learning rate; returns the paths written.

    Raises UserError for a run without --learning_rate auto.
    """
    if not os.path.exists(os.path.join(run_folder, 'rates.csv')):
        raise fault(run_folder, 'rates.csv is absent; draw a run with --learning_rate auto')
    rows = read_rows(run_folder, 'rates.csv', dict.fromkeys(RATE_COLUMNS, finite))
    rows = [[row[column] for column in RATE_COLUMNS] for row in rows]
    return write_figure(output, (4.6, 3.0), lambda figure: _draw(figure, rows), RATE_COLUMNS, rows)


def _draw(figure, rows):
    axis = figure.add_subplot()
    for colour, epoch in zip((BLUE, VERMILION), sorted({row[0] for row in rows})):
        rates, before, losses, change, chosen = zip(*(row[1:] for row in rows if row[0] == epoch))
        axis.plot(rates, [100 * (loss / old - 1) for loss, old in zip(losses, before)], 'o',
                  markersize=2.5, color=colour, alpha=0.4)
        axis.plot(rates, [100 * share for share in change], color=colour,
                  label='before epoch {:.0f}'.format(epoch))
        axis.axvline(chosen[0], color=colour, linestyle='--', linewidth=0.9)
    lowest = 100 * min(row[4] for row in rows)
    axis.set(xscale='log', xlabel='learning rate (dashed: chosen)',
             ylabel='change of the loss (%)', ylim=(1.3 * lowest, -0.6 * lowest))
    axis.grid(True)
    axis.legend(loc='upper left')
    figure.tight_layout()
