"""Draws timing tables as bars: t_dw and t_dy of every tensor, on one device or several."""

from elastic.errors import UserError
from elastic.figures.style import BLUE, ORANGE, WIDTH, write_figure
from elastic.timing.table import TensorTimings

LEGEND = {'loc': 'upper left', 'ncol': 2, 'borderaxespad': 0, 'borderpad': 0}
SAME = ('model', 'alpha', 'input_size', 'batch_size', 'num_classes')  # in all tables of a figure
HEADER = ('model', 'tensor', 'name', 't_dw_ms', 't_dy_ms', 't_fp_ms', 't_bp_ms', 't_update_ms')


def timing_bars(path, output):
    """Draws t_dw and t_dy of every tensor as stacked bars, and returns the paths written.

    path: of a timings.json. Raises UserError if it is no timing table, or damaged.
    """
    table = TensorTimings.load(path)

    def draw(figure):
        axis = figure.add_axes([0.075, 0.15, 0.915, 0.68])
        _draw_bars(axis, table, f' ({table.t_dw.sum():.1f} ms)', f' ({table.t_dy.sum():.1f} ms)')
        axis.set(ylabel='time (ms per step)')
        figure.text(0.075, 0.985, '{}: {}'.format(table.key.get('model', path), _totals_of(table)),
                    va='top', fontsize=9)
        figure.legend(bbox_to_anchor=(0.075, 0.94), **LEGEND)
    return write_figure(output, (WIDTH, 3), draw, HEADER, _rows(table, path))


def device_bars(paths, output):
    """Draws timing_bars of one network on several devices, and returns the paths written.

    paths: of timings.json files, one per device. Each panel has its own scale, as one device may be
    a hundred times slower than another. Raises UserError for a damaged table, and if networks or
    steps differ.
    """
    tables = [TensorTimings.load(path) for path in paths]
    for path, table in zip(paths, tables):
        if not {'host', 'tensorflow'} <= set(table.key):
            raise UserError('{} does not say on which device it was measured; use a timings.json '
                            'from profiler.py'.format(path))
        if _network(table) != _network(tables[0]):
            raise UserError('{} is for {}, {} for {}; give tables of one network to compare devices'
                            .format(paths[0], _title(tables[0]), path, _title(table)))
    labels = labels_of([table.key for table in tables], paths)

    def draw(figure):
        axes = figure.subplots(len(tables), 1, sharex=True, squeeze=False)[:, 0]
        height = figure.get_size_inches()[1]
        figure.subplots_adjust(0.09, 0.45 / height, 0.99, 1 - 0.85 / height, hspace=0.42)
        figure.text(0.09, 1 - 0.06 / height, _title(tables[0]), va='top', fontsize=9)
        for axis, label, table in zip(axes, labels, tables):
            _draw_bars(axis, table)
            axis.set(ylabel='ms per step', xlabel=axis.get_xlabel() if axis is axes[-1] else '')
            slower = '' if axis is axes[0] else '; {:.2f} times the first'.format(
                table.t_step / tables[0].t_step)
            axis.set_title('{}\n{}{}'.format(label, _totals_of(table), slower), loc='left',
                           fontsize=7, color='#444444')
        figure.legend(*axes[0].get_legend_handles_labels(),
                      bbox_to_anchor=(0.09, 1 - 0.22 / height), **LEGEND)
    rows = [[table.key['host'], table.key['tensorflow']] + row
            for path, table in zip(paths, tables) for row in _rows(table, path)]
    return write_figure(output, (WIDTH, 1.3 + 1.75 * len(tables)), draw,
                        ('host', 'tensorflow') + HEADER, rows)


def labels_of(keys, paths):
    """Returns a label for each table: its host, and if hosts are equal, TensorFlow or the path."""
    hosts = [key['host'] for key in keys]
    labels = [host if hosts.count(host) == 1 else '{}, TensorFlow {}'.format(
        host, key['tensorflow']) for host, key in zip(hosts, keys)]
    return [label if labels.count(label) == 1 else '{} ({})'.format(label, path)
            for label, path in zip(labels, paths)]


def _network(table):
    # The fingerprint in the key cannot serve: it differs between Keras 2 and Keras 3.
    return [table.key.get(name) for name in SAME] + [table.names, table.shapes]


def _title(table):
    return '{}, {}x{}, {} at a time, {} classes, {} tensors'.format(
        *[table.key.get(name) for name in (
            'model', 'input_size', 'input_size', 'batch_size', 'num_classes')], len(table.names))


def _rows(table, path):
    totals = [table.t_fp, table.t_bp, table.t_update]
    return [[table.key.get('model', path), tensor, *row, *totals] for tensor, row in enumerate(zip(
        table.names, table.t_dw.tolist(), table.t_dy.tolist()))]


def _totals_of(table):
    return 'forward {:,.1f} ms, backward {:,.1f} ms, update {:,.1f} ms per step'.format(
        table.t_fp, table.t_bp, table.t_update)


def _draw_bars(axis, table, of_dw='', of_dy=''):
    """Draws the bars; of_dw, of_dy: ends of their labels."""
    numbers = range(len(table.names))
    axis.bar(numbers, table.t_dw, width=0.9, color=BLUE, label='t_dw, weight gradient' + of_dw)
    axis.bar(numbers, table.t_dy, width=0.9, bottom=table.t_dw, color=ORANGE,
             label='t_dy, path of the error gradient to it' + of_dy)
    axis.set(xlim=(-0.8, len(numbers) - 0.2),
             xlabel='tensor index (left: input, right: classifier)')
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(True, axis='y')
