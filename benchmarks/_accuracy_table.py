"""Makes the table of accuracy.py, and compares its rows with their goals."""

import _bench
import numpy as np

from elastic import texts

FULL = 'full'
RHO = 0.5
REACHED = (0.95, 0.99)  # of full training's final accuracy
SHORTER = {0.5: 2, 0.35: 3, 0.25: 4}  # rho with the cache -> full training in 1/n of the epochs
# rho -> (points that elastic training may lose, its speed-up).
GOALS = {0.5: (1.0, 1.9), 0.35: (2.0, 2.6)}
CACHED_GOALS = {0.5: (0.7, 1.9), 0.35: (1.5, 2.6), 0.25: (4.0, 3.5)}
IMAGENET_GOALS = {0.35: (0.5, 2.6), 0.25: (1.0, 3.5)}
HEAD_LOSES = 5.0  # points; if it loses less, the task is too easy


def in_a_part(n):
    return 'full, 1/{} of the epochs'.format(n)


def mean_error(values):
    """Returns (mean, standard error); the latter is NaN for one value."""
    values = np.asarray(values, dtype=float)
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float('nan')
    return float(values.mean()), float(error)


def verdict(result, results):
    """Returns whether one row meets each of its goals."""
    checks = []
    head = [other for other in results if other['label'] == 'head only']
    if result['label'] == FULL and head:
        gain = 100 * (result['accuracy'] - head[0]['accuracy'])
        checks.append(('head only {:+.1f}'.format(-gain), gain >= HEAD_LOSES))
    goals = result['cached_goals'] if result['cached'] else GOALS
    speed_up = result['speed_up']
    if result['scheme'] == 'elastic_training' and not result['variant']:
        if result['rho'] in goals:
            points, goal = goals[result['rho']]
            checks += [('{:+.1f} ({:+g})'.format(100 * result['to_full'], -points),
                        100 * result['to_full'] >= -points),
                       ('{:.2f}x ({:g})'.format(speed_up, goal), speed_up >= goal)]
        others = opponents(result, results)
        if others and (result['rho'] == RHO or result['cached']):
            checks.append(_ahead(result, max(others, key=lambda other: other['accuracy'])))
    if result['scheme'] == 'prune_training':
        checks.append(('{:,.0f} channels removed'.format(result['channels_removed']), True))
        if result['flags']:
            checks.append((' '.join(result['flags']), True))
    return _bench.verdict(checks)


def _ahead(result, other):
    """Returns (text, whether the result is ahead by more than two standard errors)."""
    both = sorted(set(result['accuracies']) & set(other['accuracies']))
    points, error = mean_error([100 * (result['accuracies'][seed] - other['accuracies'][seed])
                                for seed in both])
    return ('{} to {}'.format(plus_minus(points, error, '{:+.1f}'), other['label']),
            points > (2 * error if error == error else 0))


def opponents(result, results):
    """Returns the rows that took no more time, which a result is compared with.

    A result with the cache is also compared with full training in a share rho of the epochs, and
    with rules of other papers at its rho, but not with itself at another rho with the cache.
    """
    same = in_a_part(SHORTER[result['rho']]) if result['cached'] and result['rho'] in SHORTER else (
        None)

    def is_opponent(other):
        if result['cached'] and other['cached'] and other['scheme'] == result['scheme']:
            return other['variant'] and other['rho'] == result['rho']
        return other['label'] == same or other['seconds'] <= result['seconds']
    return [other for other in results if other is not result and is_opponent(other)]


def plus_minus(mean, error, form):
    return form.format(mean) + (' ± ' + form.format(error).lstrip('+') if error == error else '')


def report(results):
    """Returns the table of one network, with columns for energy and cache size if there are any.

    peak (MB) is the whole process, with a cache in memory.
    """
    metered = any(r['joules'] is not None for r in results)
    cached = any(r['cache_mb'] for r in results)
    cells = [[r['label'], r['n'], plus_minus(100 * r['accuracy'], 100 * r['accuracy_se'], '{:.1f}'),
              plus_minus(100 * r['best'], 100 * r['best_se'], '{:.1f}'),
              '' if r['label'] == FULL else plus_minus(
                  100 * r['to_full'], 100 * r['to_full_se'], '{:+.1f}'),
              plus_minus(r['seconds'], r['seconds_se'], '{:.1f}'),
              '{:.1f}'.format(r['selection_seconds']),
              plus_minus(r['speed_up'], r['speed_up_se'], '{:.2f}'),
              plus_minus(r['steps_speed_up'], r['steps_speed_up_se'], '{:.2f}')]
             + [_reached(seconds) for seconds in r['reached']]
             + ['{:,.0f}'.format(r['peak_memory_mb'])]
             + ['{:,.0f}'.format(r['cache_mb']) if r['cache_mb'] else ''] * cached
             + ['' if r['joules'] is None else '{:,.0f}'.format(r['joules'])] * metered
             + [verdict(r, results)] for r in results]
    return texts.table(
        [results[0]['model'], 'n', 'final (%)', 'best (%)', 'to full', 'train (s)', 'select (s)',
         'speed-up', 'of steps'] + ['to {:.0%} (s)'.format(share) for share in REACHED]
        + ['peak (MB)'] + ['cache (MB)'] * cached + ['energy (J)'] * metered + ['goals'], cells,
        '<' + '>' * (11 + cached + metered) + '<')


def _reached(seconds):
    """Returns mean and standard error of the seeds that got there, and their number if not all."""
    there = [value for value in seconds if value == value]
    share = ' ({}/{})'.format(len(there), len(seconds)) if len(there) < len(seconds) else ''
    return plus_minus(*mean_error(there), '{:.0f}') + share if there else 'never'
