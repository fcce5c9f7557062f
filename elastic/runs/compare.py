"""Makes the table of finished runs: accuracy, training time, and speed-up over full training.

Runs that differ only in their seed share a row, which shows medians and, in brackets, the range.
"""

import numpy as np

from elastic import command_line
from elastic.runs.folder import VARIED, distinctions

# Points of accuracy that elastic training may lose to full training: FEW_POINTS if rho is at least
# FEW_POINTS_FROM, else MORE_POINTS.
FEW_POINTS_FROM, FEW_POINTS, MORE_POINTS = 0.35, 2.0, 4.0
# Points of accuracy by which full training must beat the head alone to be worth comparing.
HEAD_POINTS = 5
RESELECTION_SHARE = 0.05  # largest share of training time for all selections but the first
HEADER = ('scheme', 'runs', 'final (%)', 'best (%)', 'train (s)', 'step (ms)', 'select (%)',
          'speed-up', 'of steps')
LEGEND = ('\n\ntarget in brackets; speed-up: training time of full over this, medians of runs '
          '[least, most]')


def table(runs):
    """Returns the text of the table. runs: list of folder.Run on one data set.

    If there is full training to compare with, targets are checked on medians: elastic training
    loses few points, its steps are 1 / rho times as fast, and later selections are short.
    """
    groups = {}
    for run in runs:
        found, seconds = dict(run.summary), run.epochs['selection_seconds']
        found['selection_share'] = found['selection_seconds'] / found['train_seconds']
        # Before the first epoch every scheme compiles its step; later selections are extra time.
        found['reselection_share'] = sum(seconds[1:]) / found['train_seconds']
        key = tuple(found[name] for name in ('scheme', 'rho') + VARIED)
        groups.setdefault(key, []).append(found)
    full, head = [next((group for key, group in groups.items() if key[0] == name), None)
                  for name in ('full_training', 'traditional_tl_training')]
    throttled = [_throttled(group) for group in groups.values()]
    rows = [[_label(key, groups)] + _numbers(group, full) + ([text] if any(throttled) else [])
            + [_targets(key, group, full, head)]
            for (key, group), text in zip(groups.items(), throttled)]
    header = HEADER + (('throttled',) if any(throttled) else ()) + ('target',)
    align = '<{}<'.format('>' * (len(header) - 2))
    return command_line.table(header, rows, align) + LEGEND


def _label(key, keys):
    """Returns the scheme, rho, and the flags that differ between runs of the scheme."""
    label = key[0] + ('' if key[1] is None else ' rho {:g}'.format(key[1]))
    rivals = [other[2:] for other in keys if other[0] == key[0]]
    return label + ''.join(', {} {}'.format(*flag) for flag in distinctions(key[2:], rivals))


def _numbers(group, full):
    share = _median(group, 'selection_share')
    measured = ['' if group[0][key] is None else _spread(
        [scale * s[key] for s in group], '{:.1f}') for key, scale in (
            ('final_accuracy', 100), ('best_accuracy', 100), ('train_seconds', 1), ('step_ms', 1))]
    speed_ups = [_spread(_ratios(full, group, key), '{:.2f}') if full else ''
                 for key in ('train_seconds', 'step_ms')]
    return [len(group)] + measured + ['{:.1f}'.format(100 * share)] + speed_ups


def _targets(key, group, full, head):
    """Returns the targets of a row, each with its number and whether it was missed."""
    scheme, rho = key[:2]
    targets = []
    if full and scheme == 'full_training' and head:
        gain = 100 * _median(full, 'final_accuracy') - 100 * _median(head, 'final_accuracy')
        targets = [('{:+.1f} points over head only ({})'.format(gain, HEAD_POINTS),
                    gain >= HEAD_POINTS)]
    elif full and scheme.startswith('elastic'):
        loss = 100 * _median(full, 'final_accuracy') - 100 * _median(group, 'final_accuracy')
        share = _median(group, 'reselection_share')
        speed = float(np.median(_ratios(full, group, 'step_ms')))
        allowed = FEW_POINTS if rho >= FEW_POINTS_FROM else MORE_POINTS
        targets = [('{:+.1f} points to full (-{:g})'.format(-loss, allowed), loss <= allowed),
                   ('steps {:.2f}x ({:.2f})'.format(speed, 1 / rho), speed >= 1 / rho),
                   ('re-select {:.1f} % ({:g})'.format(100 * share, 100 * RESELECTION_SHARE),
                    share < RESELECTION_SHARE)]
    return '; '.join(text + ('' if met else ' MISSED') for text, met in targets)


def _median(group, key):
    return float(np.median([s[key] for s in group]))


def _throttled(group):
    """Returns '3 of 24' if 3 of the 24 epochs of all runs were throttled, else ''."""
    count = sum(s['throttled_epochs'] or 0 for s in group)
    return '{} of {}'.format(count, sum(s['epochs'] for s in group)) if count else ''


def _ratios(full, group, key):
    """Returns the ratio of full training (of the same seed, else the median) to each run."""
    by_seed = {s['seed']: s[key] for s in full}
    usual = _median(full, key)
    return [by_seed.get(s['seed'], usual) / s[key] for s in group]


def _spread(values, form):
    text = form.format(float(np.median(values)))
    if len(values) == 1:
        return text
    return '{} [{}, {}]'.format(text, form.format(min(values)), form.format(max(values)))
