"""The table of finished runs: accuracy, training time, speed-up over full training.

Runs that differ only in their seed share a row: medians, with the range in brackets. Where the
device was throttled (thermal.py), a column has in how many epochs of all.
"""

import numpy as np

from elastic import command_line
from elastic.runs.folder import VARIED, distinctions, read_runs

# Points that elastic training may lose to full training: from rho FEW_POINTS_FROM on, and below.
FEW_POINTS_FROM, FEW_POINTS, MORE_POINTS = 0.35, 2.0, 4.0
RESELECTION_SHARE = 0.05  # of the elastic run's training time


def table(run_folders):
    """Returns the text of the table of the runs in these folders, with its legend."""
    text, _ = compare(read_runs(run_folders))
    return (text + '\n\ntarget in brackets; speed-up: training time of full over this, medians of '
            'runs [least, most]')


def compare(runs):
    """Text of the table, and whether every target was met.

    runs: list of folder.Run on one data set. Targets are judged against full training on medians:
    elastic within a few points, steps 1 / rho times as fast, re-selection within
    RESELECTION_SHARE of the time; full training must beat the head alone by 5 points, or there is
    nothing to lose and the comparison means little.
    """
    groups = {}
    for run in runs:
        key = (run.summary['scheme'], run.summary['rho']) + tuple(
            run.summary[name] for name in VARIED)
        # Before the first epoch every scheme compiles its step; what comes later is re-selection.
        later = sum(run.epochs['selection_seconds'][1:])
        groups.setdefault(key, []).append(dict(run.summary, reselection_seconds=later))
    full, head = [next((group for key, group in groups.items() if key[0] == name), None)
                  for name in ('full_training', 'traditional_tl_training')]
    rows, verdicts = [], []
    for key, summaries in groups.items():
        scheme, rho = key[:2]
        targets = []
        if full and scheme == 'full_training' and head:
            gain = _points(full) - _points(head)
            targets = [('{:+.1f} points over head only (5)'.format(gain), gain >= 5)]
        elif full and scheme.startswith('elastic'):
            targets = _elastic_targets(summaries, full, rho)
        verdicts += [met for _, met in targets]
        rows.append([
            _label(key, groups), len(summaries),
            _spread([100 * s['final_accuracy'] for s in summaries], '{:.1f}'),
            _spread([100 * s['best_accuracy'] for s in summaries], '{:.1f}'),
            _spread([s['train_seconds'] for s in summaries], '{:.1f}'),
            _spread([s['step_ms'] for s in summaries], '{:.1f}'),
            '{:.1f}'.format(100 * _median(summaries, _selection_share)),
            _spread(_ratios(full, summaries, 'train_seconds'), '{:.2f}') if full else '',
            _spread(_ratios(full, summaries, 'step_ms'), '{:.2f}') if full else '',
            '; '.join(text + ('' if met else ' MISSED') for text, met in targets)])
    throttled = [_throttled(summaries) for summaries in groups.values()]
    header = ['scheme', 'runs', 'final (%)', 'best (%)', 'train (s)', 'step (ms)', 'select (%)',
              'speed-up', 'of steps', 'target']
    if any(throttled):
        rows = [row[:-1] + [text, row[-1]] for row, text in zip(rows, throttled)]
        header.insert(-1, 'throttled')
    return command_line.table(header, rows, '<{}<'.format('>' * (len(header) - 2))), all(verdicts)


def _label(key, keys):
    """Scheme and rho, and what else tells it from other runs of the scheme."""
    label = key[0] + ('' if key[1] is None else ' rho {:g}'.format(key[1]))
    rivals = [other[2:] for other in keys if other[0] == key[0]]
    return label + ''.join(', {} {}'.format(*told) for told in distinctions(key[2:], rivals))


def _elastic_targets(summaries, full, rho):
    loss = _points(full) - _points(summaries)
    share = _median(summaries, lambda s: s['reselection_seconds'] / s['train_seconds'])
    speed = float(np.median(_ratios(full, summaries, 'step_ms')))
    allowed = FEW_POINTS if rho >= FEW_POINTS_FROM else MORE_POINTS
    return [('{:+.1f} points to full (-{:g})'.format(-loss, allowed), loss <= allowed),
            ('steps {:.2f}x ({:.2f})'.format(speed, 1 / rho), speed >= 1 / rho),
            ('re-select {:.1f} % ({:g})'.format(100 * share, 100 * RESELECTION_SHARE),
             share < RESELECTION_SHARE)]


def _points(summaries):
    return 100 * _median(summaries, lambda s: s['final_accuracy'])


def _median(summaries, value):
    return float(np.median([value(s) for s in summaries]))


def _throttled(summaries):
    """'3 of 24': throttled epochs of all the runs; '' where there are none."""
    count = sum(s['throttled_epochs'] or 0 for s in summaries)
    return '{} of {}'.format(count, sum(s['epochs'] for s in summaries)) if count else ''


def _selection_share(summary):
    return summary['selection_seconds'] / summary['train_seconds']


def _ratios(full, summaries, key):
    """Full over this scheme, paired by seed where both ran it, else against the median."""
    by_seed = {s['seed']: s[key] for s in full}
    usual = _median(full, lambda s: s[key])
    return [by_seed.get(s['seed'], usual) / s[key] for s in summaries]


def _spread(values, form):
    text = form.format(float(np.median(values)))
    if len(values) == 1:
        return text
    return '{} [{}, {}]'.format(text, form.format(min(values)), form.format(max(values)))
