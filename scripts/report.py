"""Writes figures/report.html: all figures on one page, with what ran and what is missing.

    python scripts/report.py [--rehearsal]

The page contains its pictures, needs no network, and can be read on a phone.
"""

import argparse
import base64
import csv
import html
import os

import _root
from elastic import command_line
from elastic.command_line import UserError
from elastic.files import make_folder, read_json, whole
from elastic.runs.folder import read_run
from figure_grid import FIGURES, file_name, logs_dir, output_of, run_name, runs_of

ROOT = _root.ROOT

CSV_ROWS = 60  # of a figure's numbers on the page, to keep it readable; the file has them all
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem;
       color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
img { width: 100%; height: auto; border: 1px solid #e4e4e4; }
.wide { overflow-x: auto; } .missing { color: #a33c00; } .small { font-size: .85rem; color: #666; }
table { border-collapse: collapse; font-size: .8rem; white-space: nowrap; }
td, th { padding: .15rem .6rem; border-bottom: 1px solid #eee; text-align: right; }
td:first-child, th:first-child { text-align: left; }
summary { cursor: pointer; font-size: .9rem; }
"""


def write(rehearsal=False):
    """Writes report.html beside the figures from the finished runs; returns its path."""
    path = os.path.join(os.path.dirname(output_of('15', rehearsal)), 'report.html')
    page = '\n'.join(_head(rehearsal) + [_section(name, rehearsal) for name in FIGURES]
                     + ['</body></html>\n'])
    make_folder(os.path.join(ROOT, os.path.dirname(path)))
    with whole(os.path.join(ROOT, path)) as part, open(part, 'w', encoding='utf-8') as out:
        out.write(page)
    return path


def _head(rehearsal):
    drawn = sum(os.path.exists(_picture(name, rehearsal)) for name in FIGURES)
    title = 'ElasticTrainer: the figures of the paper' + (', rehearsed' if rehearsal else '')
    lead = '{} of {} figures are drawn.'.format(drawn, len(FIGURES))
    if rehearsal:
        lead += (' A rehearsal trains the same runs small and short, on built-in digits from '
                 'random weights. It shows that everything works, not how good the schemes are.')
    return ['<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<title>{}</title><style>{}</style></head><body>'.format(title, STYLE),
            '<h1>{}</h1><p>{}</p>'.format(title, lead)]


def _picture(name, rehearsal):
    return os.path.join(ROOT, output_of(name, rehearsal) + '.png')


def _section(name, rehearsal):
    figure = FIGURES[name]
    parts = ['<h2 id="figure{0}">Figure {0}: {1}</h2>'.format(name, html.escape(figure.title))]
    paper = figure.of_the_paper + (figure.hours and '; ' + figure.hours)
    parts.append('<p class="small">{}. Here: <code>scripts/run_{}.sh{}</code></p>'.format(
        html.escape(paper[0].upper() + paper[1:]), file_name(name),
        ' --rehearse' if rehearsal else ''))
    picture = _picture(name, rehearsal)
    drawn = _drawn(picture)
    runs, missing = _summaries(name, rehearsal, drawn.get('runs', []))
    if os.path.exists(picture):
        with open(picture, 'rb') as file:
            data = base64.b64encode(file.read()).decode('ascii')
        parts.append('<img alt="figure {}" src="data:image/png;base64,{}">'.format(name, data))
    else:
        parts.append('<p class="missing">Not drawn yet.</p>')
    if missing:
        why = drawn.get('left_out', {})
        lines = ['{}: {}'.format(run, why.get(run, reason)) for run, reason in missing]
        parts.append('<p class="missing">{} of {} runs missing or unfinished.</p>{}'.format(
            len(missing), len(missing) + len(runs), _details(
                'which', '<br>'.join(map(html.escape, lines)))))
    if runs:
        parts.append(_details('{} finished runs'.format(len(runs)), _runs_table(runs)))
    if os.path.exists(picture):
        parts.append(_details('numbers behind the picture', _csv_table(picture[:-4] + '.csv')))
    return '\n'.join(parts)


def _drawn(picture):
    """Returns what reproduce.draw recorded of the picture's runs; {} if there is none."""
    try:
        return read_json(picture[:-4] + '.runs.json')
    except UserError:
        return {}


def _summaries(name, rehearsal, drawn):
    """Returns (summaries of the finished runs, (name, reason) of the missing ones).

    Covers the runs of the picture and all runs of the figure, with as many seeds as were started.
    """
    logs, seeds = os.path.join(ROOT, logs_dir(rehearsal)), 1
    while any(os.path.isdir(os.path.join(logs, run_name(cell, seeds)))
              for cell in FIGURES[name].cells):
        seeds += 1
    names = [run.name for run in runs_of(name, seeds, rehearsal)]
    found, missing = [], []
    for run in names + [other for other in drawn if other not in names]:
        try:
            found.append(read_run(os.path.join(logs, run)).summary)
        except UserError as error:
            started = os.path.isdir(os.path.join(logs, run))
            missing.append((run, error if started else 'not started'))
    return found, missing


def _runs_table(summaries):
    rows = [[s['run_name'], '{:.1f}'.format(100 * s['final_accuracy']),
             '{:,.1f}'.format(s['train_seconds']), '{:.1f}'.format(s['step_ms']),
             _energy(s), s['host'], s['stack']] for s in summaries]
    return _table(['run', 'final accuracy (%)', 'training (s)', 'step (ms)', 'energy', 'device',
                   'software'], rows)


def _energy(summary):
    if summary['energy_joules'] is None:
        return 'not measured: {}'.format(summary['energy_note'])
    return '{:,.0f} J ({})'.format(summary['energy_joules'], summary['energy_source'])


def _csv_table(path):
    try:
        with open(path, encoding='utf-8', newline='') as file:
            header, *rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error):
        return '<p class="missing">{} cannot be read.</p>'.format(os.path.basename(path))
    text = _table(header, [[_short(cell) for cell in row] for row in rows[:CSV_ROWS]])
    left = len(rows) - CSV_ROWS
    return text + ('<p class="small">and {:,} more rows in {}</p>'.format(
        left, os.path.basename(path)) if left > 0 else '')


def _short(cell):
    try:
        return '{:.5g}'.format(float(cell)) if '.' in cell else cell
    except ValueError:
        return cell


def _table(header, rows):
    lines = ['<tr>{}</tr>'.format(''.join('<{0}>{1}</{0}>'.format(tag, html.escape(str(cell)))
                                          for cell in row))
             for tag, row in [('th', header)] + [('td', row) for row in rows]]
    return '<div class="wide"><table>{}</table></div>'.format('\n'.join(lines))


def _details(summary, body):
    return '<details><summary>{}</summary>{}</details>'.format(html.escape(summary), body)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_flag(parser, '--rehearsal', 'write the page of figures/rehearsal/')
    print(write(parser.parse_args(argv).rehearsal))
    return 0


if __name__ == '__main__':
    command_line.run(main)
