"""Makes the table of finished runs: accuracy, training time, and speed-up over full training.

Runs that differ only in their seed share a row, which shows medians and, in brackets, the range.
"""

import numpy as np

from elastic import texts
from elastic.runs.labels import distinctions
from elastic.settings import VARIED

HEADER = ('scheme', 'runs', 'final (%)', 'best (%)', 'train (s)', 'step (ms)', 'select (%)',
          'speed-up', 'of steps', 'to full (points)')
WHAT = ('model_name', 'dataset_name')
LEGEND = ('\n\nspeed-up, of steps: training time and step of full training over this one; to full: '
          'final accuracy less\nthat of full training. Medians of runs [least, most].')


def table(runs):
    """Returns the text of the table. runs: list of folder.Run.

    Speed-ups and differences of accuracy are to full training of the same network and data set, of
    the most epochs, if there is any.
    """
    groups, full = {}, {}
    for run in runs:
        key = tuple(run.summary[name] for name in ('scheme', 'rho') + WHAT + VARIED)
        groups.setdefault(key, []).append(run.summary)
    longest = sorted(groups.items(), key=lambda item: item[1][0]['epochs'], reverse=True)
    for key, group in longest:
        if key[0] == 'full_training':
            full.setdefault(key[2:4], group)
    throttled = [_throttled(group) for group in groups.values()]
    rows = [[_label(key, groups)] + _numbers(group, full.get(key[2:4])) + [text] * any(throttled)
            for (key, group), text in zip(groups.items(), throttled)]
    return texts.table(HEADER + ('throttled',) * any(throttled), rows) + LEGEND


def _label(key, keys):
    """Returns the scheme, rho, the network and data set and the flags that differ between runs."""
    label = key[0] + ('' if key[1] is None else ' rho {:g}'.format(key[1]))
    for place in (2, 3):
        label += ', {}'.format(key[place]) if len({other[place] for other in keys}) > 1 else ''
    return label + ''.join(', {} {}'.format(*flag) for flag in distinctions(key, keys))


def _numbers(group, full):
    share = float(np.median([s['selection_seconds'] / s['train_seconds'] for s in group]))
    measured = ['' if group[0][key] is None else _spread(
        [scale * s[key] for s in group], '{:.1f}') for key, scale in (
            ('final_accuracy', 100), ('best_accuracy', 100), ('train_seconds', 1), ('step_ms', 1))]
    speed_ups = [_spread(_ratios(full, group, key), '{:.2f}') if full else ''
                 for key in ('train_seconds', 'step_ms')]
    points = '{:+.1f}'.format(100 * (_median(group, 'final_accuracy') - _median(
        full, 'final_accuracy'))) if full and group is not full else ''
    return [len(group)] + measured + ['{:.1f}'.format(100 * share)] + speed_ups + [points]


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
