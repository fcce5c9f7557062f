"""Writes a figure as a PNG, a PDF, and a CSV with its numbers, all in one style."""

import contextlib
import os

from elastic.errors import UserError
from elastic.files import make_folder, whole, write_rows

WIDTH = 7.2  # inches of a figure as wide as a page
BLUE, ORANGE, VERMILION = '#0072B2', '#E69F00', '#D55E00'  # of Okabe and Ito
RC_PARAMS = {'font.family': 'DejaVu Sans', 'font.size': 8.5, 'legend.fontsize': 8,
             'xtick.labelsize': 8, 'ytick.labelsize': 8, 'axes.linewidth': 0.7,
             'axes.spines.top': False, 'axes.spines.right': False, 'axes.axisbelow': True,
             'grid.color': '#E4E4E4', 'grid.linewidth': 0.6, 'legend.frameon': False,
             'pdf.fonttype': 42}


def stem_of(output):
    """Returns the path of a figure's files without their endings."""
    stem = os.fspath(output)
    return stem[:-4] if stem.endswith('.png') else stem


def write_figure(output, size, draw, header, rows):
    """Draws a figure, writes OUTPUT.png, .pdf and .csv, and returns their paths.

    size: inches. draw: called with the Figure. header, rows: of the CSV; NaN becomes an empty cell.
    After an error, existing files stay as they were.
    """
    import matplotlib
    from matplotlib.figure import Figure
    stem = stem_of(output)
    paths = [f'{stem}.{kind}' for kind in ('png', 'pdf', 'csv')]
    try:
        make_folder(os.path.dirname(stem) or '.')
        with contextlib.ExitStack() as files:
            png, pdf, table = [files.enter_context(whole(path)) for path in paths]
            with matplotlib.rc_context():
                matplotlib.rcdefaults()
                matplotlib.rcParams.update(RC_PARAMS)
                figure = Figure(figsize=size)
                draw(figure)
                figure.savefig(png, dpi=150, format='png')
                figure.savefig(pdf, metadata={'CreationDate': None}, format='pdf')
            write_rows(table, [['' if cell != cell else cell for cell in row]
                               for row in [header] + rows])
    except OSError as error:
        raise UserError(f'cannot write {stem}: {error}')
    return paths
