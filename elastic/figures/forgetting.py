"""Draws what a continued run has forgotten of the runs before it."""

import numpy as np

from elastic.figures.style import BLUE, VERMILION, WIDTH, write_figure
from elastic.runs.exams import FORGETTING_COLUMNS, read_scores

BEFORE = '#999999'
MOST_ROWS = 40  # with more, classes that changed least are left out


def forgetting(run_folder, output):
    """Draws the accuracy on images of each earlier run, and of its classes, before and after.

    Returns the paths written. Raises UserError for a run that continues none.
    """
    scores = read_scores(run_folder)
    change = [abs(score.after - score.before) if score.class_name else np.inf for score in scores]
    shown = [scores[i] for i in sorted(np.argsort(change)[::-1][:MOST_ROWS])]
    return write_figure(output, (WIDTH, 0.9 + 0.2 * len(shown)), lambda figure: _draw(
        figure, shown), FORGETTING_COLUMNS, scores)


def _draw(figure, scores):
    axis, rows = figure.add_subplot(), np.arange(len(scores))
    before, after = [100 * np.array([getattr(score, when) for score in scores])
                     for when in ('before', 'after')]
    axis.hlines(rows, before, after, color=np.where(after < before, VERMILION, BLUE), linewidth=1.4)
    axis.plot(before, rows, 'o', markersize=5, color=BEFORE, label='before')
    axis.plot(after, rows, 'D', markersize=4.5, color=BLUE, label='after (orange line: fell)')
    axis.set_yticks(rows)
    axis.set_yticklabels([score.class_name or 'all of ' + score.run for score in scores])
    axis.set(xlim=(-2, 102), ylim=(len(scores) - 0.5, -0.5), xlabel='accuracy (%)')
    axis.grid(True, axis='x')
    axis.legend(loc='lower center', bbox_to_anchor=(0.5, 1), ncol=2)
    figure.tight_layout()
