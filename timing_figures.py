"""Figures of timing tables: t_dw and t_dy of every tensor, on one device or on several.

Takes the profiler's timings.json, or what profiler.py --save_table wrote on several devices.
"""

import os

from command_line import UserError
from cost_file import load
from figure_file import write_figure
from files import read_json
from runs import finite

OWN, CARRIED = '#0072B2', '#E69F00'
SAME = ('model', 'alpha', 'input_size', 'batch_size', 'num_classes')  # of what is compared
HEADER = ('tensor', 'name', 't_dw_ms', 't_dy_ms', 't_fp_ms', 't_bp_ms', 't_update_ms')


def timing_bars(path, output):
    """Time of every tensor's part of the backward pass, t_dw and t_dy stacked.

    path: of the profiler's table. Returns the paths written; UserError for a table with a hole.
    """
    model, *columns = _columns(read_json(path), path)
    names, t_dw, t_dy, totals = columns

    def draw(figure):
        axis = figure.add_axes([0.075, 0.15, 0.915, 0.68])
        _draw_bars(axis, t_dw, t_dy)
        axis.set(ylabel='time (ms per step)')
        figure.text(0.075, 0.985, '{}: {}'.format(model, _totals_text(totals)), va='top',
                    fontsize=9)
        _draw_legend(figure, [axis], [' ({:.1f} ms)'.format(sum(each)) for each in (t_dw, t_dy)],
                     0.075, 0.94)
    return write_figure(output, (7.2, 3), draw, ('model',) + HEADER,
                        [[model] + row for row in _rows(*columns)])


def device_bars(paths, output):
    """timing_bars of one network on several devices, a panel each, in the order given.

    paths: of tables of costs. Each panel has an axis of its own, as devices may lie a hundredfold
    apart; its title tells how far. Returns the paths written; UserError for a table that is damaged
    or of another kind, and for tables of different networks or steps.
    """
    tables = [load(path) for path in paths]
    for path, table in zip(paths, tables):
        if _network(table) != _network(tables[0]):
            raise UserError('{} is of {}, {} of {}: devices are compared by one network'.format(
                paths[0], _told(tables[0]), path, _told(table)))
    columns = [_columns(table, path) for path, table in zip(paths, tables)]
    labels = labels_of(tables, paths)
    steps_ms = [sum(totals) for *_, totals in columns]

    def draw(figure):
        axes = figure.subplots(len(tables), 1, sharex=True, squeeze=False)[:, 0]
        height = figure.get_size_inches()[1]
        figure.subplots_adjust(0.09, 0.45 / height, 0.99, 1 - 0.85 / height, hspace=0.42)
        figure.text(0.09, 1 - 0.06 / height, _told(tables[0]), va='top', fontsize=9)
        for axis, label, step_ms, (_, _, t_dw, t_dy, totals) in zip(
                axes, labels, steps_ms, columns):
            _draw_bars(axis, t_dw, t_dy)
            axis.set(ylabel='ms per step', xlabel=axis.get_xlabel() if axis is axes[-1] else '')
            slower = '' if axis is axes[0] else '; {:.2f} times the first'.format(
                step_ms / steps_ms[0])
            axis.set_title('{}\n{}{}'.format(label, _totals_text(totals), slower), loc='left',
                           fontsize=7, color='#444444')
        _draw_legend(figure, axes, ['', ''], 0.09, 1 - 0.22 / height)
    rows = [[table['key']['host'], table['key']['tensorflow'], table['model']] + row
            for table, each in zip(tables, columns) for row in _rows(*each[1:])]
    return write_figure(output, (7.2, 1.3 + 1.75 * len(tables)), draw,
                        ('host', 'tensorflow', 'model') + HEADER, rows)


def labels_of(tables, paths):
    """A text for each table of costs: its host; where two share that, TensorFlow's version too, and
    where they share both, the file's name.
    """
    hosts = [table['key']['host'] for table in tables]
    labels = [host if hosts.count(host) == 1 else '{}, TensorFlow {}'.format(
        host, table['key']['tensorflow']) for host, table in zip(hosts, tables)]
    return [label if labels.count(label) == 1 else '{} ({})'.format(
        label, os.path.basename(path)) for label, path in zip(labels, paths)]


def _network(table):
    """What must be the same in tables that are compared: the fingerprint in their key tells Keras 2
    from Keras 3, too.
    """
    return [table['key'].get(name) for name in SAME] + [table['names'], table['shapes']]


def _told(table):
    return '{}, {}x{}, {} at a time, {} classes, {} tensors'.format(
        table['model'], *[table['key'].get(name) for name in (
            'input_size', 'input_size', 'batch_size', 'num_classes')], len(table['names']))


def _columns(table, path):
    """(model, names, t_dw, t_dy, [t_fp, t_bp, t_update]) of a table that was read from `path`;
    UserError where it has a hole.
    """
    try:
        model = table['key'].get('model', path)
        names, *times = [table[key] for key in ('names', 't_dw', 't_dy')]
        t_dw, t_dy = [[finite(time) for time in column] for column in times]
        totals = [finite(table[key]) for key in ('t_fp', 't_bp', 't_update')]
        counts = [len(names), len(t_dw), len(t_dy)]
    except KeyError as error:
        raise UserError(f'the timing table {path} lacks {error.args[0]}')
    except (AttributeError, TypeError, ValueError):
        raise UserError(f'{path} is no timing table, or has a time that is not a number')
    if len(set(counts)) > 1 or not counts[0]:
        raise UserError('the timing table {} has {} names, {} t_dw and {} t_dy'.format(
            path, *counts))
    return model, names, t_dw, t_dy, totals


def _rows(names, t_dw, t_dy, totals):
    return [[tensor, *row, *totals] for tensor, row in enumerate(zip(names, t_dw, t_dy))]


def _totals_text(totals):
    return 'forward {:,.1f} ms, backward {:,.1f} ms, update {:,.1f} ms per step'.format(*totals)


def _draw_bars(axis, t_dw, t_dy):
    axis.bar(range(len(t_dw)), t_dw, width=0.9, color=OWN, label='t_dw, own gradient')
    axis.bar(range(len(t_dw)), t_dy, width=0.9, bottom=t_dw, color=CARRIED,
             label='t_dy, carrying the error gradient to it')
    axis.set(xlim=(-0.8, len(t_dw) - 0.2), xlabel='tensor index (left: input, right: classifier)')
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(True, axis='y')


def _draw_legend(figure, axes, added, left, top):
    """One for all axes; added: to the labels of t_dw and t_dy. left, top: as shares of the figure.
    """
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, [label + text for label, text in zip(labels, added)], loc='upper left',
                  bbox_to_anchor=(left, top), ncol=2, borderaxespad=0, borderpad=0)
