"""Draws the figures of the paper from run folders.

    python scripts/paper_plots.py FIGURE RUN [RUN ...] --output figures/NAME

Each figure is a function that takes run folders and the path of the picture without its ending. It
writes PNG, PDF and CSV, and returns their paths. It raises UserError for a run that cannot be read,
and for runs from different devices or software stacks, whose times cannot be compared.
"""

import textwrap

import numpy as np

import _root  # noqa: F401
from elastic import command_line
from elastic.errors import UserError
from elastic.figures.selection import IDLE, draw_tensors
from elastic.figures.style import BLUE, ORANGE, WIDTH, write_figure
from elastic.runs.folder import judged_on, read_runs, selection_per_epoch
from elastic.runs.labels import configuration, label_of
from elastic.schemes.fixed import SCHEMES
from plot import (
    accuracy_over_time,
    check_alike,
    curve_rows,
    curves_of,
    draw_by_name,
    draw_panels,
    draw_title,
    grouped,
    legend_of_marks,
    time_unit,
)


def _read(folders, *same, needed=None):
    """Returns the Runs, all from one device.

    same: keys in which their summaries must agree, too. needed: a key that none may lack.
    Raises UserError for others.
    """
    runs = read_runs(folders)
    check_alike(runs, 'host', 'stack')
    for run in runs:
        if needed is not None and run.summary[needed] is None:
            raise UserError("run '{}' has no {} in its summary.json: it does not fit this figure"
                            .format(run.summary['run_name'], needed))
    check_alike(runs, *same)
    return runs


def _by(runs, key):
    """Returns value -> Runs, in the order of first appearance."""
    return grouped(runs, lambda summary: summary[key])


def _top(figure):
    return 1 - 0.62 / figure.get_size_inches()[1]


# ---------------------------------------------------------------- figures 15 and 16

def curve_grid(folders, output):
    """Draws test accuracy and loss over training time, with a column for each data set.

    A single data set is drawn by plot.accuracy_over_time.
    """
    runs = _read(folders, 'validation_share')
    columns = {data: curves_of(group) for data, group in _by(runs, 'dataset_name').items()}
    if len(columns) == 1:
        return accuracy_over_time(folders, output)
    everything = sum(columns.values(), [])
    header, rows = curve_rows(everything)
    marks = legend_of_marks(everything)
    labels = {curve.label for curve in everything} | {mark.get_label() for mark in marks}
    more = 0.17 * max(0, -(-len(labels) // _legend_columns(labels, 4)) - 2)  # for a long legend
    return write_figure(output, (WIDTH, 5.0 + more), lambda figure: _draw_grid(
        figure, runs, columns, marks, more), header, rows)


def _draw_grid(figure, runs, columns, marks, more):
    """Draws panels and legend; more: inches that the legend needs beyond two lines."""
    height = figure.get_size_inches()[1]
    axes = figure.subplots(2, len(columns), gridspec_kw={
        'left': 0.08, 'right': 0.985, 'top': _top(figure) - 0.12 / height,
        'bottom': (0.86 + more) / height, 'wspace': 0.26, 'hspace': 0.3})
    draw_title(figure, ', '.join(_by(runs, 'model_name')), runs)
    lines = {}
    for (data, curves), accuracy, loss in zip(columns.items(), axes[0], axes[1]):
        name, seconds = time_unit(max(curve.mean['train_seconds'][-1] for curve in curves))
        drawn = draw_panels(accuracy, loss, curves, seconds)
        lines.update((curve.label, line) for curve, line in zip(curves, drawn))
        accuracy.set_title(data, fontsize=9)
        loss.set_xlabel('training time ({})'.format(name))
        ends = {curve.summary['scheme']: curve.mean['train_seconds'][-1] for curve in curves}
        if 'full_training' in ends and 'elastic_training' in ends:
            box = accuracy.legend([], [], title='{:.2f}× speed-up'.format(
                ends['full_training'] / ends['elastic_training']), title_fontsize=8, loc='best',
                frameon=True, facecolor='white', edgecolor='none')
            box.get_title().set_color(SCHEMES['elastic_training'].color)
    images = judged_on(runs[0].summary)
    axes[0][0].set_ylabel(images + ' accuracy (%)')
    axes[1][0].set_ylabel(images + ' loss')
    lines.update((mark.get_label(), mark) for mark in marks)
    _legend(figure, list(lines.values()), list(lines), 4, handlelength=3.2)  # fits the dashes


def _legend(figure, handles, labels, most, **options):
    """Draws the legend below the panels, in as many columns as fit, at most `most`."""
    figure.legend(handles, labels, loc='lower center', ncol=_legend_columns(labels, most),
                  borderaxespad=0.3, columnspacing=1.4, **options)


def _legend_columns(labels, most):
    return max(1, min(most, int(110 / (7 + max(map(len, labels))))))


# ---------------------------------------------------------------- figures 17, 19 and 23

def bars(folders, output):
    """Draws final test accuracy and training time of every configuration, grouped by network."""
    return _bar_figure(_read(folders, 'dataset_name'), 'model_name', (
        'final test accuracy (%)', 'final_accuracy', 100.0), output)


def energy_bars(folders, output):
    """Draws energy and training time of every configuration, grouped by data set.

    Without any sensor the picture says so. Raises UserError if only some runs have energy, or if
    they were measured by different sensors.
    """
    runs = _read(folders)
    without = [run for run in runs if run.summary['energy_joules'] is None]
    if without and len(without) < len(runs):
        raise UserError("run '{}' has no energy ({}), others of this figure have; remove its "
                        'folder to run it again, or add a meter log with '
                        '`python -m elastic.runs.metered`'.format(
                            without[0].summary['run_name'],
                            without[0].summary['energy_note']))
    for run in runs:
        if _source(run) != _source(runs[0]):
            raise UserError("run '{}' was measured by {}, run '{}' by {}: they cannot be compared "
                            'in one figure'.format(run.summary['run_name'], _source(run),
                                                   runs[0].summary['run_name'], _source(runs[0])))
    for run in without:
        run.summary['energy_joules'] = float('nan')
    return _bar_figure(runs, 'dataset_name', (
        'energy (kJ), ' + _source(runs[0]), 'energy_joules', 1e-3), output)


def _source(run):
    source = run.summary['energy_source'] or 'not measured'
    return 'external meter' if source.startswith('meter log') else source


def _bar_figure(runs, by, panel, output):
    """Draws one quantity and the training time, grouped by the key `by`.

    panel: (label, key, scale) of the quantity.
    """
    unit, seconds = time_unit(max(run.summary['train_seconds'] for run in runs))
    panels = [panel, ('training time ({})'.format(unit), 'train_seconds', 1 / seconds)]
    columns = {name: _bars(group) for name, group in _by(runs, by).items()}
    keys = ('model_name', 'dataset_name', 'scheme', 'rho')
    header = keys + ('n',) + tuple(
        key + part for _, key, _ in panels for part in ('_mean', '_std')) + ('energy_source',)
    rows = [[bar[0].summary[key] for key in keys] + [len(bar)]
            + [number for _, key, _ in panels for number in _mean_std(_values(bar, key))]
            + [bar[0].summary['energy_source'] or '']
            for column in columns.values() for bar in column]
    many = max(map(len, columns.values())) > 5
    return write_figure(output, (WIDTH, 3.3 if many else 3.1), lambda figure: _draw_bars(
        figure, runs, columns, panels), header, rows)


def _bars(runs):
    """Returns a list of Runs for each bar: those of one configuration, in the order of SCHEMES."""
    return sorted(grouped(runs, configuration).values(), key=lambda bar: (
        list(SCHEMES).index(bar[0].summary['scheme']), str(bar[0].summary['rho'])))


def _values(bar, key):
    return [float(run.summary[key]) for run in bar]


def _mean_std(values):
    return [float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else np.nan]


def _draw_bars(figure, runs, columns, panels):
    axes = figure.subplots(1, 2, gridspec_kw={
        'left': 0.08, 'right': 0.99, 'top': _top(figure), 'bottom': 0.24, 'wspace': 0.2})
    shown = ', '.join(sorted({run.summary['model_name'] for run in runs}))
    draw_title(figure, '{} on {}'.format(shown, ', '.join(_by(runs, 'dataset_name'))), runs)
    alone, everything = len(columns) == 1, sum(columns.values(), [])
    for axis, (text, key, scale) in zip(axes, panels):
        for i, column in enumerate(columns.values()):
            _draw_group(axis, i, column, key, scale, everything)
        axis.set(ylabel=text, xlim=(-0.5, len(columns) - 0.5))
        axis.margins(y=0.12)
        axis.set_xticks([] if alone else range(len(columns)))
        axis.set_xticklabels([] if alone else list(columns))
        axis.grid(True, axis='y')
        if key == 'energy_joules' and all(np.isnan(run.summary[key]) for run in runs):
            notes = {run.summary['energy_note'] for run in runs}
            axis.set_yticks([])
            axis.text(0.5, 0.5, 'not measured:\n' + '\n'.join(
                textwrap.fill(str(note), 44) for note in sorted(notes, key=str)),
                      ha='center', va='center', transform=axis.transAxes, fontsize=7)
    handles = {label_of(configuration(bar[0].summary)): _colour_of(bar, everything)
               for bar in everything}
    from matplotlib.patches import Patch
    _legend(figure, [Patch(color=color) for color in handles.values()], list(handles), 5)


def _draw_group(axis, i, column, key, scale, everything):
    """Draws the bars of one group around x = i; everything: the bars of all groups."""
    width = 0.8 / len(column)
    for j, bar in enumerate(column):
        mean, std = _mean_std(scale * np.array(_values(bar, key)))
        x = i + (j - (len(column) - 1) / 2) * width
        axis.bar(x, mean, 0.9 * width, color=_colour_of(bar, everything), linewidth=0,
                 yerr=None if np.isnan(std) else std, error_kw={'linewidth': 0.8})
        if not np.isnan(mean):
            axis.annotate('{:.1f}'.format(mean) if mean < 100 else '{:.0f}'.format(mean),
                          (x, mean + (0 if np.isnan(std) else std)), xytext=(0, 1.5),
                          textcoords='offset points', ha='center', fontsize=6)


def _colour_of(bar, bars):
    """Returns the scheme's colour; if bars have several rho, larger ones are paler."""
    from matplotlib.colors import to_rgb
    color = np.array(to_rgb(SCHEMES[bar[0].summary['scheme']].color))
    rhos = sorted({other[0].summary['rho'] for other in bars} - {None})
    rho = bar[0].summary['rho']
    pale = 0.0 if rho is None else 0.75 * rhos.index(rho) / len(rhos)
    return tuple(color + (1 - color) * pale)


# ---------------------------------------------------------------- figure 7

def importance_stability(folders, output):
    """Draws the similarity of successive importances and their cost, by interval and probe batches.

    Similarity is the cosine between the importance vectors of two successive selections, averaged
    over a run. Cost is the share of training time spent on importance. Both have mean and spread
    over the seeds; a single seed shows its least and most similar pair instead.
    Raises UserError for a run that selected only once.
    """
    runs = _read(folders, 'model_name', 'dataset_name', 'rho', 'epochs', needed='probe_batches')
    settings = {}  # (interval, probe batches) -> [(similarities, share of time)] by seed
    for run in runs:
        vectors = importances(run)
        if len(vectors) < 2:
            raise UserError("run '{}' selected once; similarity needs two selections: more epochs "
                            'than its interval of {}'.format(run.summary['run_name'],
                                                             run.summary['interval']))
        cosines = [float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
                   for a, b in zip(vectors, vectors[1:])]
        settings.setdefault((run.summary['interval'], run.summary['probe_batches']), []).append(
            (cosines, run.summary['importance_seconds'] / run.summary['train_seconds']))
    rows = [list(key) + [len(seeds)]
            + _mean_std([np.mean(cosines) for cosines, _ in seeds])
            + [min(min(cosines) for cosines, _ in seeds), max(max(cosines) for cosines, _ in seeds)]
            + _mean_std([share for _, share in seeds])
            for key, seeds in settings.items()]
    header = ['interval', 'probe_batches', 'n', 'similarity_mean', 'similarity_std',
              'similarity_least', 'similarity_most', 'importance_share_of_time_mean',
              'importance_share_of_time_std']
    return write_figure(output, (WIDTH, 4.4),
                        lambda figure: _draw_stability(figure, runs, rows), header, rows)


def importances(run):
    """Returns (evaluations, N) float64, the importance of every tensor at each evaluation.

    Leaves out selections between two evaluations, which reuse the old importance.
    """
    interval = run.summary['interval']
    epochs = sorted({row.epoch for row in run.selections
                     if row.epoch == 1 or interval and (row.epoch - 1) % interval == 0})
    return np.array([[row.importance for row in sorted(run.selections, key=lambda row: row.tensor)
                      if row.epoch == epoch] for epoch in epochs], dtype=float)


def _draw_stability(figure, runs, rows):
    axes = figure.subplots(2, 2, sharey='row', gridspec_kw={
        'left': 0.085, 'right': 0.985, 'top': _top(figure), 'bottom': 0.1, 'wspace': 0.08,
        'hspace': 0.2})
    draw_title(figure, 'successive importances, {model_name} on {dataset_name}'.format(
        **runs[0].summary), runs)
    least_interval, single = min(row[0] for row in rows), all(row[2] == 1 for row in rows)
    for column, (index, other, fixed, text) in enumerate((
            (0, 1, 1, 'selection interval (epochs)'), (1, 0, least_interval, 'probe batches'))):
        shown = sorted(row for row in rows if row[other] == fixed)
        for x, row in enumerate(shown):
            mean, std, least, most, cost, cost_std = row[3:]
            axes[0][column].bar(x, mean, 0.6, color=BLUE, error_kw={'linewidth': 0.8},
                                yerr=np.maximum(0, [[mean - least], [most - mean]])
                                if single else std)
            axes[1][column].bar(x, 100 * cost, 0.6, color=ORANGE, error_kw={'linewidth': 0.8},
                                yerr=None if single else 100 * cost_std)
        for axis in axes[:, column]:
            axis.set_xticks(range(len(shown)))
            axis.set_xticklabels([row[index] for row in shown])
            axis.grid(True, axis='y')
        axes[1][column].set_xlabel(text)
    axes[0][0].set_ylabel('similarity, ' + ('[least, most]' if single else 'mean ± std of seeds'))
    axes[1][0].set_ylabel('cost (% of training time)')


# ---------------------------------------------------------------- figure 21

def selection_panels(folders, output):
    """Draws which tensors were trained in which epoch, with a panel for each data set.

    Several seeds are shown by the share of them that trained a tensor.
    """
    runs, shares, rows = _read(folders, 'model_name', 'rho', 'epochs', needed='rho'), {}, []
    for run in runs:
        if not run.selections:
            raise UserError("run '{}' has no selections.csv; this figure needs one".format(
                run.summary['run_name']))
    for data, group in _by(runs, 'dataset_name').items():
        share = np.mean([selection_per_epoch(run)[0] for run in group], axis=0)  # (epochs, N)
        names = {row.tensor: row.name for row in group[0].selections}
        shares[data] = share
        rows += [[data, epoch + 1, tensor, names[tensor], float(share[epoch, tensor]), len(group)]
                 for epoch, tensor in np.ndindex(*share.shape)]
    header = ['dataset_name', 'epoch', 'tensor', 'name', 'selected', 'n']
    return write_figure(output, (WIDTH, 3.9), lambda figure: _draw_panels(
        figure, runs, shares, max(row[-1] for row in rows)), header, rows)


def _draw_panels(figure, runs, shares, seeds):
    """Draws one panel per data set.

    shares: data set -> (epochs, N), as in draw_tensors. seeds: the most of a data set.
    """
    from matplotlib.patches import Patch
    axes = figure.subplots(1, len(shares), squeeze=False, gridspec_kw={
        'left': 0.08, 'right': 0.985, 'top': _top(figure) - 0.05, 'bottom': 0.2,
        'wspace': 0.16})[0]
    draw_title(figure, 'tensors trained in each epoch, {}, ρ = {:g}'.format(
        runs[0].summary['model_name'], runs[0].summary['rho']), runs)
    for axis, (data, share) in zip(axes, shares.items()):
        colors = draw_tensors(axis, share)
        axis.set_title('{} ({:.0f} % trained)'.format(data, 100 * share.mean()), fontsize=8.5)
        axis.tick_params(labelleft=axis is axes[0])
    axes[0].set_ylabel('tensor index (bottom: input)')
    middle = [Patch(color=colors(0.5), label='in half of {} seeds'.format(seeds))] * (seeds > 1)
    figure.legend(handles=[Patch(color=BLUE, label='trained')] + middle + [
        Patch(color=IDLE, label='not trained')], loc='lower center', ncol=4, borderaxespad=0.3)


def main(argv=None):
    draw_by_name({draw.__name__: (draw, False) for draw in (
        curve_grid, bars, energy_bars, importance_stability, selection_panels)}, __doc__, argv)


if __name__ == '__main__':
    command_line.run(main)
