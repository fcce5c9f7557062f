"""Draws which tensors a run trained, and when."""

import os

import numpy as np

from elastic.errors import UserError
from elastic.figures.style import BLUE, WIDTH, stem_of, write_figure
from elastic.runs.folder import fault, read_run, read_selection_file, selection_per_epoch
from elastic.runs.labels import configuration, label_of

PALE, IDLE, NEUTRAL = '#A8CBE6', '#E9E9E9', '#8C8C8C'


def selection_map(run_folder, output):
    """Draws which tensors were trained in which epoch; returns the paths written.

    The line at the top sums the time shares of the selected tensors. It leaves out the time to
    propagate the error gradient through unselected tensors. run_folder: or a CSV file that
    train.ElasticTraining wrote. Raises UserError as read_run, and for a run without selections.
    """
    if str(run_folder).endswith('.csv') and not os.path.isdir(run_folder):
        run = read_selection_file(run_folder)
        if os.path.realpath(run_folder) == os.path.realpath(stem_of(output) + '.csv'):
            raise UserError("--output {} would overwrite '{}'; give another name".format(
                output, run_folder))
    else:
        run = read_run(run_folder)
    if not run.selections:
        raise fault(run_folder, 'selections.csv is absent or empty; draw a run of elastic training')
    mask, share = selection_per_epoch(run)
    names = {row.tensor: row.name for row in run.selections}
    rows = [[epoch + 1, tensor, names[tensor], int(mask[epoch, tensor]),
             float(share[epoch, tensor])] for epoch, tensor in np.ndindex(*mask.shape)]
    return write_figure(
        output, (WIDTH, 4.8), lambda figure: _draw_selection(figure, run, mask, share),
        ['epoch', 'tensor', 'name', 'selected', 'time_share'], rows)


def _draw_selection(figure, run, mask, share):
    epochs, count = mask.shape
    grid = figure.add_gridspec(2, 2, width_ratios=[4.6, 1], height_ratios=[1, 4.6], left=0.085,
                               right=0.985, top=0.93, bottom=0.115, wspace=0.05, hspace=0.07)
    tensors = figure.add_subplot(grid[1, 0])
    draw_tensors(tensors, mask)
    starts = sorted({row.epoch for row in run.selections} - {1})
    for start in starts if len(starts) <= 40 else []:
        tensors.axvline(start - 0.5, color='white', linewidth=1.4)
    tensors.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    tensors.set_ylabel('tensor index (bottom: input, top: classifier)')
    title = run.summary['run_name']
    if 'scheme' in run.summary:
        title = '{}: {model_name} on {dataset_name}, seed {seed}'.format(
            label_of(configuration(run.summary)), **run.summary)
    figure.text(0.085, 0.985, title, va='top', fontsize=9)
    top = figure.add_subplot(grid[0, 0], sharex=tensors)
    figure.legend(handles=_draw_share_per_epoch(top, mask, share), loc='upper right',
                  bbox_to_anchor=(1, 0.945))
    if not np.isnan(share).any():
        side = figure.add_subplot(grid[1, 1], sharey=tensors)
        side.barh(range(count), 100 * share.mean(axis=0), height=1, color=NEUTRAL, linewidth=0)
        side.set_xlabel('backward + update\ntime share (%)')
        side.tick_params(labelleft=False)


def draw_tensors(axis, share):
    """Draws which tensors were trained in which epoch; returns the colormap.

    share: (epochs, N), of the runs that trained each tensor; bool for one run.
    """
    from matplotlib.colors import LinearSegmentedColormap
    colors = LinearSegmentedColormap.from_list('trained', [IDLE, BLUE])
    epochs, count = share.shape
    axis.imshow(share.T, cmap=colors, vmin=0, vmax=1, aspect='auto', origin='lower',
                interpolation='nearest', extent=(0.5, epochs + 0.5, -0.5, count - 0.5))
    axis.set_xlabel('epoch')
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return colors


def _draw_share_per_epoch(axis, mask, share):
    """Draws bars of the trained tensors and a line of their time; returns the legend's handles."""
    from matplotlib.patches import Patch
    epochs, count = mask.shape
    axis.bar(np.arange(epochs) + 1, 100 * mask.mean(axis=1), width=1, color=PALE)
    axis.set(ylim=(0, 105), yticks=[0, 50, 100], ylabel='trained (%)')
    axis.tick_params(labelbottom=False)
    handles = [Patch(color=BLUE, label='trained'), Patch(color=IDLE, label='not trained'),
               Patch(color=PALE, label=f'% of {count} tensors')]
    if not np.isnan(share).any():
        time = 100 * np.where(mask, share, 0).sum(axis=1)
        handles += axis.step(np.arange(epochs + 1) + 0.5, np.append(time, time[-1]), where='post',
                             color='#222222', linewidth=1.2, label='% of the time')
    return handles
