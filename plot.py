"""Draws figures and a table of finished runs, and figures of timing tables.

    python plot.py curves RUN [RUN ...] --output figures/NAME   accuracy and loss over training time
    python plot.py selection RUN --output figures/NAME          tensors trained in each epoch
    python plot.py confusion RUN --output figures/NAME          which classes are mistaken for which
    python plot.py timings TABLE.json --output figures/NAME     t_dw and t_dy of every tensor
    python plot.py devices TABLE.json [...] --output figures/NAME   the same on several devices
    python plot.py rates RUN --output figures/NAME              the test of --learning_rate auto
    python plot.py forgetting RUN --output figures/NAME         what a continued run forgot
    python plot.py table RUN [RUN ...]                          accuracy, time, speed-up, as text

RUN is the name of a folder under --logs_dir, or a path. Each figure is a PNG, a PDF and a CSV with
its numbers. A run that is missing, unfinished or incomplete is an error: nothing is skipped or
filled in. TABLE.json is a timings.json that profiler.py wrote below --logs_dir.
scripts/paper_plots.py draws the figures of the paper.
"""

import argparse
import math
from typing import NamedTuple

import numpy as np

from elastic import command_line, errors
from elastic.errors import UserError
from elastic.figures import compare
from elastic.figures.bars import device_bars, timing_bars
from elastic.figures.confusion import confusion_of_run
from elastic.figures.forgetting import forgetting
from elastic.figures.rates import range_tests
from elastic.figures.selection import selection_map
from elastic.figures.style import WIDTH, write_figure
from elastic.files import check_writable
from elastic.options import as_path
from elastic.runs.folder import judged_on, read_runs, run_folder
from elastic.runs.labels import CONFIGURATION, configuration, label_of
from elastic.schemes.fixed import SCHEMES
from elastic.settings import LOGS_DIR

LINES = ('-', '--', ':', '-.', (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))  # styles within one scheme
MARK = {'color': '#222222', 'marker': 'x', 'markersize': 4.5, 'markeredgewidth': 1.1,
        'linestyle': 'none', 'zorder': 4}  # an epoch in which the device was throttled
LOG_FROM = 1000  # ratio of largest to smallest loss from which the axis is logarithmic
TIME_UNITS = (('s', 1, 180), ('min', 60, 3 * 3600), ('h', 3600, math.inf))  # name, s, up to s
QUANTITIES = ('train_seconds', 'accuracy', 'loss')  # of each epoch


class Curve(NamedTuple):
    """Holds the mean of the n runs of one configuration, which differ in their seed.

    summary: of the first run. variant: number of the configuration within its scheme, from 0.
    mean, std: one of QUANTITIES -> (epochs,) float64; std is the sample deviation, NaN for n = 1.
        A run that ended early stays where it ended.
    throttled: (epochs,) int, number of runs in which the device was throttled.
    final: (n,) float64, test accuracy of the kept weights.
    """
    summary: dict
    label: str
    variant: int
    color: str
    n: int
    mean: dict
    std: dict
    throttled: np.ndarray
    final: np.ndarray


def column_of(quantity, summary):
    """Returns the column of epochs.csv that has one of QUANTITIES."""
    return quantity if quantity == 'train_seconds' else judged_on(summary) + '_' + quantity


def accuracy_over_time(run_folders, output):
    """Draws test accuracy and test loss over training time; returns the paths written.

    With --validation_share, these are accuracy and loss on the validation images, and the legend
    gives the final test accuracy.
    Runs that differ only in their seed become one curve: their mean at each epoch, over their mean
    time, in a band of one sample standard deviation. Time includes selection but not validation.
    Raises UserError as read_run, and for runs of different hosts, software stacks, data sets or
    validation images.
    """
    curves = curves_of(read_runs(run_folders))
    header, rows = curve_rows(curves)
    unit, seconds = time_unit(max(curve.mean['train_seconds'][-1] for curve in curves))
    marks = legend_of_marks(curves)
    texts = [_legend_text(curve, unit, seconds) for curve in curves] + [
        mark.get_label() for mark in marks]
    half = math.ceil(len(texts) / 2)
    columns = 2 if max(map(len, texts[:half])) + max(map(len, texts[half - 1:])) < 105 else 1
    height = 3.36 + 0.18 * math.ceil(len(texts) / columns) + 0.2 * len(_speed_ups(curves))

    def draw(figure):
        lines = _draw_curves(figure, curves, unit, seconds)
        figure.legend(lines + marks, texts, loc='lower center', ncol=columns, borderaxespad=0.2,
                      columnspacing=2, handlelength=3)
    return write_figure(output, (WIDTH, height), draw, header, rows)


def time_unit(longest):
    """Returns (name, seconds) of the unit that suits times up to `longest` seconds."""
    return next((name, seconds) for name, seconds, limit in TIME_UNITS if longest < limit)


def curve_rows(curves):
    """Returns the header and rows of the CSV of some Curves, one row per epoch."""
    throttled = any(curve.throttled.any() for curve in curves)
    keys = CONFIGURATION + ('dataset_name', 'host')
    header = keys + ('n', 'epoch') + tuple(
        column_of(quantity, curves[0].summary) + part
        for quantity in QUANTITIES for part in ('_mean', '_std')) + ('throttled',) * throttled
    rows = [[curve.summary[key] for key in keys] + [curve.n, epoch + 1] + [
        float(values[quantity][epoch]) for quantity in QUANTITIES
        for values in (curve.mean, curve.std)] + [int(curve.throttled[epoch])] * throttled
            for curve in curves for epoch in range(len(curve.throttled))]
    return header, rows


def check_alike(runs, *keys):
    """Raises UserError if one of these keys of the summaries differs between Runs."""
    first = runs[0].summary
    for run in runs:
        for key in keys:
            if run.summary[key] != first[key]:
                raise UserError(f"run '{run.summary['run_name']}' has {key} {run.summary[key]}, "
                                f"run '{first['run_name']}' has {first[key]}; a figure compares "
                                f'runs with the same {key}')


def grouped(runs, value_of):
    """Returns value -> Runs, in the order of first appearance. value_of: (summary) -> value."""
    groups = {}
    for run in runs:
        groups.setdefault(value_of(run.summary), []).append(run)
    return groups


def curves_of(runs):
    """Returns the Curves of some Runs, in the order of SCHEMES.

    Raises UserError for runs that cannot be compared.
    """
    if not runs:
        raise UserError('no run given; name at least one')
    check_alike(runs, 'host', 'stack', 'dataset_name', 'validation_share')
    groups = grouped(runs, configuration)
    curves, palette = [], [kind.color for kind in SCHEMES.values()]
    one_scheme = 1 == len({scheme for scheme, *_ in groups}) < len(groups)
    for key in sorted(groups, key=lambda key: (list(SCHEMES).index(key[0]), str(key[1:]))):
        group, summary = groups[key], groups[key][0].summary
        if summary['patience'] is None:
            check_alike(group, 'epochs')
        n, variant = len(group), sum(curve.summary['scheme'] == key[0] for curve in curves)
        color = palette[variant % len(palette)] if one_scheme else SCHEMES[key[0]].color
        values = np.array([_filled(group, column_of(quantity, summary))
                           for quantity in QUANTITIES])  # (3, n, epochs)
        std = values.std(axis=1, ddof=1) if n > 1 else np.full_like(values[:, 0], np.nan)
        curves.append(Curve(
            summary, label_of(key, groups, n), variant, color, n,
            dict(zip(QUANTITIES, values.mean(axis=1))), dict(zip(QUANTITIES, std)),
            np.array(_filled(group, 'throttled', False), bool).sum(axis=0),
            np.array([run.summary['final_accuracy'] for run in group])))
    return curves


def _filled(runs, column, after=None):
    """Returns the column of each run, as long as the longest. after: value; None: the last one."""
    longest = max(run.summary['epochs'] for run in runs)
    return [run.epochs[column] + [run.epochs[column][-1] if after is None else after]
            * (longest - run.summary['epochs']) for run in runs]


def _speed_ups(curves):
    """Returns the (full, elastic) pairs of Curves with the same model and number of epochs."""
    return [(full, elastic) for full in curves for elastic in curves
            if (full.summary['scheme'], elastic.summary['scheme'])
            == ('full_training', 'elastic_training')
            and all(full.summary[key] == elastic.summary[key] for key in ('model_name', 'epochs'))]


def _legend_text(curve, unit, seconds):
    mean, std, test = 100 * curve.mean['accuracy'][-1], 100 * curve.std['accuracy'][-1], ''
    if judged_on(curve.summary) != 'test':
        final, test = 100 * curve.final, 'test '
        mean, std = final.mean(), final.std(ddof=min(1, curve.n - 1))
    spread = f' ± {std:.1f}' if curve.n > 1 else ''
    time = curve.mean['train_seconds'][-1] / seconds
    return f'{curve.label}: {test}{mean:.1f}{spread} % in {time:.1f} {unit}'


def draw_title(figure, text, runs):
    """Draws two lines at the top. runs: Runs or Curves of one device and software stack."""
    height = figure.get_size_inches()[1]
    figure.text(0.08, 1 - 0.08 / height, text, va='top', fontsize=9)
    figure.text(0.08, 1 - 0.26 / height, '{host}; {stack}'.format(**runs[0].summary), va='top',
                fontsize=6, color='#666666')


def _draw_curves(figure, curves, unit, seconds):
    """Draws both panels; returns one line per Curve. seconds: in one `unit` of time."""
    width, height = figure.get_size_inches()
    pairs = _speed_ups(curves)
    top = 1 - (0.52 + 0.2 * len(pairs)) / height
    left, right = figure.subplots(1, 2, gridspec_kw={
        'left': 0.6 / width, 'right': 1 - 0.1 / width, 'wspace': 0.22, 'top': top,
        'bottom': top - 2.3 / height})
    models = ', '.join(sorted({curve.summary['model_name'] for curve in curves}))
    draw_title(figure, f"{models} on {curves[0].summary['dataset_name']}", curves)
    lines = draw_panels(left, right, curves, seconds)
    images = judged_on(curves[0].summary)
    for axis, title in ((left, images + ' accuracy (%)'), (right, images + ' loss')):
        axis.set(xlabel=f'training time ({unit}), validation excluded', ylabel=title)
    for level, (full, elastic) in enumerate(pairs):
        _draw_speed_up(left, full, elastic, seconds, level)
    return lines


def draw_panels(accuracy, loss, curves, seconds):
    """Draws Curves in two axes over the training time; returns one line per Curve.

    seconds: in one unit of the time axes. The axis of losses becomes logarithmic if one that nearly
    diverged would flatten the others.
    """
    lines = [_draw_curve(accuracy, curve, 'accuracy', seconds, 100) for curve in curves]
    for curve in curves:
        _draw_curve(loss, curve, 'loss', seconds, 1)
    losses = np.concatenate([curve.mean['loss'] for curve in curves])
    if 0 < LOG_FROM * losses.min() < losses.max():
        loss.set_yscale('log')
    for axis in (accuracy, loss):
        axis.set_xlim(left=0)
        axis.grid(True)
    return lines


def _draw_curve(axis, curve, quantity, seconds, scale):
    """Draws one Curve with its marks; returns its line. scale: factor for the quantity."""
    x = curve.mean['train_seconds'] / seconds
    mean, std = scale * curve.mean[quantity], scale * curve.std[quantity]
    if curve.n > 1:
        axis.fill_between(x, mean - std, mean + std, color=curve.color, alpha=0.2, linewidth=0)
    line, = axis.plot(x, mean, color=curve.color, linestyle=LINES[curve.variant % len(LINES)],
                      linewidth=1.4, marker=SCHEMES[curve.summary['scheme']].marker,
                      markersize=6.5, markevery=[len(x) - 1], markeredgecolor='white',
                      markeredgewidth=0.8, zorder=3)
    if curve.throttled.any():
        axis.plot(x[curve.throttled > 0], mean[curve.throttled > 0], **MARK)
    return line


def legend_of_marks(curves):
    """Returns [legend handle of the marks], or [] if no epoch was throttled."""
    from matplotlib.lines import Line2D
    marked = any(curve.throttled.any() for curve in curves)
    return [Line2D([], [], label='throttled', **MARK)] if marked else []


def _draw_speed_up(axis, full, elastic, seconds, level):
    """Draws an arrow above the panel, in row `level` (from 0), between the ends of two Curves."""
    low, high = axis.set_ylim(axis.get_ylim())
    y = high + (high - low) * (0.045 + 0.085 * level)
    ends = [curve.mean['train_seconds'][-1] / seconds for curve in (elastic, full)]
    for curve, x in zip((elastic, full), ends):
        axis.plot([x, x], [100 * curve.mean['accuracy'][-1], y], ':', linewidth=0.8,
                  color=curve.color, clip_on=False)
    axis.annotate('', (ends[0], y), (ends[1], y), annotation_clip=False, arrowprops={
        'arrowstyle': '<->', 'linewidth': 0.8, 'shrinkA': 0, 'shrinkB': 0})
    right = axis.get_xlim()[1]
    wide = abs(ends[1] - ends[0]) > 0.35 * right  # the text fits between the arrow heads
    axis.text(sum(ends) / 2 if wide else min(ends) - 0.02 * right, y, fontsize=8, va='center',
              s=f'{ends[1] / ends[0]:.2f}× speed-up', ha='center' if wide else 'right',
              bbox={'facecolor': 'white', 'linewidth': 0, 'pad': 1.5})


def draw_by_name(figures, description, argv=None):
    """Draws the figure that the command line names; prints the files written.

    figures: name -> (function, single): (input, output) -> lines to print. input: a path if
    `single`, else a list of paths. output: a path; None for `table`, which is only text.
    """
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('figure', help='one of ' + ', '.join(figures))
    parser.add_argument('inputs', nargs='+', type=as_path, metavar='RUN',
                        help='name under --logs_dir, or a path')
    parser.add_argument('--output', type=as_path,
                        help='figures/NAME, with or without .png; required for figures')
    parser.add_argument('--logs_dir', type=as_path, default=LOGS_DIR,
                        help='where the runs are (default: %(default)s)')
    args = parser.parse_args(argv)
    draw, single = figures[errors.one_of(args.figure, list(figures), 'figure')]
    if single and len(args.inputs) > 1:
        raise UserError(f"figure '{args.figure}' takes one input; {len(args.inputs)} given")
    if (args.output is None) != (args.figure == 'table'):
        raise UserError('a figure needs --output figures/NAME; `table` takes no --output')
    if args.output:
        check_writable(args.output + '.png', '--output')
    paths = [run_folder(run, args.logs_dir) for run in args.inputs]
    print('\n'.join(draw(paths[0] if single else paths, args.output)))


def main(argv=None):
    draw_by_name({'curves': (accuracy_over_time, False), 'selection': (selection_map, True),
                  'confusion': (confusion_of_run, True), 'timings': (timing_bars, True),
                  'devices': (device_bars, False), 'rates': (range_tests, True),
                  'forgetting': (forgetting, True),
                  'table': (lambda folders, _: [compare.table(read_runs(folders))], False)},
                 __doc__, argv)


if __name__ == '__main__':
    command_line.run(main)
