"""Draws the figure of accuracy.py: accuracy against training time."""

import math

from matplotlib import patheffects

from elastic.errors import UserError
from elastic.figures.style import write_figure
from elastic.schemes.fixed import SCHEMES


def accuracy_against_time(points, output):
    """Draws final accuracy against training time, one panel per model; returns the paths.

    points: dicts as accuracy.result_of makes them. Variants have a panel of their own beside the
    others, by accuracy, named by what follows the comma in their label.
    """
    if not points:
        raise UserError('no run given')
    models = sorted({point['model'] for point in points})
    header = ('model', 'label', 'scheme', 'rho', 'learning_rate', 'n', 'accuracy',
              'accuracy_se', 'seconds', 'seconds_se')
    return write_figure(output, (7.2, 0.6 + 3.4 * len(models)),
                        lambda figure: _draw_models(figure, models, points), header,
                        [[point[column] for column in header] for point in points])


def _draw_models(figure, models, points):
    height = figure.get_size_inches()[1]
    grid = figure.add_gridspec(len(models), 2, left=0.08, right=0.97, top=1 - 0.3 / height,
                               bottom=0.45 / height, hspace=0.35, wspace=0.5,
                               width_ratios=(2.3, 1))
    for row, model in enumerate(models):
        of_model = [point for point in points if point['model'] == model]
        varied = {point['rho'] for point in of_model if point['variant']}
        axis = figure.add_subplot(grid[row, 0] if varied else grid[row, :])
        _draw_points(axis, [point for point in of_model if not point['variant']])
        axis.set_title(model)
        if varied:
            _draw_variants(figure.add_subplot(grid[row, 1]), [
                point for point in of_model if point['rho'] in varied])


# Offset of a label from its marker, in points, and alignment; the first that hides nothing is used.
PLACES = [((x, y), 'left' if x > 0 else 'right' if x < 0 else 'center')
          for x, y in ((8, -3), (0, 7), (0, -14), (-8, -3), (7, 5), (7, -12), (-7, 5), (-7, -12),
                       (0, 18), (0, -25), (12, 14), (12, -22))]
WIDE = 20  # ratio of the longest to the shortest time from which the axis is logarithmic
HALO = [patheffects.withStroke(linewidth=2.5, foreground='white')]  # a line may run behind


def _draw_points(axis, points):
    shared = next(point['learning_rate'] for point in points
                  if point['scheme'] == 'full_training')
    for point in points:
        _errorbar(axis, point, point['seconds'], 100 * point['accuracy'],
                  xerr=_known(point['seconds_se']), yerr=_known(100 * point['accuracy_se']))
    line = sorted((point['seconds'], 100 * point['accuracy']) for point in points
                  if point['scheme'] == 'elastic_training'
                  and point['learning_rate'] == shared)
    if line:
        axis.plot(*zip(*line), color=SCHEMES['elastic_training'].color, linewidth=1)
    axis.set(ylabel='final test accuracy (%)',
             xlabel='training time (s), selection included, validation excluded')
    axis.margins(y=0.1)
    seconds = [point['seconds'] for point in points]
    if max(seconds) > WIDE * min(seconds):
        axis.set_xscale('log')
        axis.set_xlim(min(seconds) / 1.5, 2.5 * max(seconds))
    else:
        axis.set_xlim(left=0, right=1.55 * max(seconds))
    axis.grid(True)
    _label(axis, points)


def _label(axis, points):
    """Writes each label where it covers no marker and no other label."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox
    renderer = FigureCanvasAgg(axis.figure).get_renderer()
    at = [(point['seconds'], 100 * point['accuracy']) for point in points]
    centres = axis.transData.transform(at)
    size = 4.0 * axis.figure.dpi / 72  # half a marker
    taken = [Bbox([centre - size, centre + size]) for centre in centres]
    for point, place in zip(points, at):
        label = axis.annotate(point['label'], place, textcoords='offset points', xytext=(0, 0),
                              color='#222222', path_effects=HALO)
        for offset, align in PLACES:
            label.set(position=offset, ha=align)
            box = label.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def _draw_variants(axis, points):
    """Draws the accuracies of several choices at one rho, the best on top."""
    points = sorted(points, key=lambda point: point['accuracy'])
    names = [point['label'].partition(', ')[2] or point['label'] for point in points]
    for y, point in enumerate(points):
        _errorbar(axis, point, 100 * point['accuracy'], y, xerr=_known(100 * point['accuracy_se']))
    axis.set_yticks(range(len(points)))
    axis.set_yticklabels(names)
    axis.set_ylim(-0.6, len(points) - 0.4)
    axis.set(xlabel='final test accuracy (%)', title='choices at rho {:g}'.format(points[0]['rho']))
    axis.grid(True)


def _errorbar(axis, point, x, y, **errors):
    _, color, marker, *_ = SCHEMES[point['scheme']]
    axis.errorbar(x, y, color=color, marker=marker, markersize=4.5 if point['variant'] else 7,
                  markeredgecolor='white', linewidth=0.9, linestyle='none', zorder=3, **errors)


def _known(error):
    return None if math.isnan(error) else error
