"""Makes the tables of drift.py, and what they answer."""

import numpy as np
from _accuracy_table import mean_error, plus_minus

from elastic import texts

MEASURES = [('end', 'all exams, at the end (%)'), ('new', 'new exams (%)'),
            ('bwt', 'backward transfer'), ('worst', 'worst forgetting'), ('first', 'first exam'),
            ('next', 'next exam (%)'), ('gap', 'gap')]
RHOS = {'full': 1.0, 'elastic 0.5': 0.5, 'elastic 0.35': 0.35, 'head': 0.0}


class Results:
    """Holds the results of one stream. lines: {(stream, equal, row, kept, seed): line}."""

    def __init__(self, lines, stream):
        self._of = {}
        for (name, equal, row, kept, seed), line in lines.items():
            if name == stream:
                self._of.setdefault((row, int(kept), equal), {})[seed] = line

    def values(self, key, measure):
        return {seed: float(line[measure]) for seed, line in self._of.get(key, {}).items()}

    def keys(self, equal):
        return [key for key in self._of if key[2] == equal]

    def differences(self, measure, one, other):
        """Returns [points] of `one` minus `other`, (row, kept, equal), of the seeds of both."""
        one, other = self.values(one, measure), self.values(other, measure)
        return [100 * (one[seed] - other[seed]) for seed in sorted(one) if seed in other]

    def difference(self, measure, one, other):
        """Returns (mean, standard error) of the paired differences in points; None without any."""
        found = self.differences(measure, one, other)
        return mean_error(found) if found else None


def shown(found, form='{:+.1f}'):
    return 'not measured' if found is None else plus_minus(*found, form)


def table_of(results, equal, order):
    """Returns the table of one stream. order: labels of the rows."""
    rows = []
    for key in sorted(results.keys(equal), key=lambda key: (order.index(key[0]), key[1])):
        row, kept, _ = key
        cells = [row, kept, len(results.values(key, 'end'))]
        for measure, _ in MEASURES:
            mean, error = mean_error(list(results.values(key, measure).values()))
            cells.append('' if np.isnan(mean) else plus_minus(100 * mean, 100 * error, '{:.1f}'))
        means = [np.mean(list(results.values(key, name).values())) for name in (
            'seconds', 'steps', 'bytes')]
        rows.append(cells + ['{:.1f}'.format(means[0]), '{:.0f}'.format(means[1]),
                             '{:.1f}'.format(means[2] / 1e6)])
    return texts.table(['', 'kept', 'n'] + [title for _, title in MEASURES]
                       + ['train (s)', 'steps', 'MB'], rows)


def at_equal_new(results, kept, row='elastic 0.35'):
    """Returns (mean, error) of how much less a row forgets than full training, in points.

    Full training has two points: equal seconds and equal epochs. Its backward transfer is taken on
    the line between both, where its accuracy on new exams is nearest to that of the row.
    """
    found = []
    row = (row, kept, 'seconds')
    full = [('full', kept, equal) for equal in ('seconds', 'epochs')]
    new, bwt = [[results.values(key, name) for key in [row] + full] for name in ('new', 'bwt')]
    for seed in set(new[0]).intersection(*new[1:]):
        points = sorted((new[i][seed], bwt[i][seed]) for i in (1, 2))
        found.append(100 * (bwt[0][seed] - np.interp(new[0][seed], *zip(*points))))
    return mean_error(found) if found else None


def answers(results, equal='seconds'):
    """Returns the answers of one stream, one line each; differences are paired by seed."""
    counts = sorted({key[1] for key in results.keys(equal)})

    def to(one, other, measure, kept=counts[0]):
        return results.difference(measure, (one, kept, equal), (other, kept, equal))
    lines = ['Does elastic training forget less than full? Backward transfer {} points, new exams '
             '{} (rho 0.35 minus full, {} kept); at equal accuracy on new exams {}.'.format(
                 *[shown(to('elastic 0.35', 'full', name)) for name in ('bwt', 'new')],
                 counts[0], shown(at_equal_new(results, counts[0])))]
    lines.append('Is it the importance? Rho 0.35 minus random tensors of the same rho: backward '
                 'transfer {}, new exams {}, all exams {}; minus the last tensors: {}, {}, {}.'
                 .format(*[shown(to('elastic 0.35', other, name)) for other in (
                     'random 0.35', 'last 0.35') for name in ('bwt', 'new', 'end')]))
    ends = [(kept, to('elastic 0.35', 'full', 'end', kept)) for kept in counts]
    level = [kept for kept, found in ends if found and abs(found[0]) <= max(1, 2 * found[1])]
    lines.append('How many kept images make it irrelevant? {}; all exams, rho 0.35 minus full: {}.'
                 .format('none of these' if not level else '{} do'.format(level[0]), ', '.join(
                     '{} with {} kept'.format(shown(found), kept) for kept, found in ends)))
    for kept in counts:
        ends = {row: np.mean(list(results.values((row, kept, equal), 'end').values()))
                for row in RHOS if results.values((row, kept, equal), 'end')}
        best = sorted(ends, key=ends.get)[::-1]
        if len(best) > 1:
            lines.append('Which rho, with {} kept? {}: {:.1f} %, {} points to {}.'.format(
                kept, best[0], 100 * ends[best[0]], shown(to(best[0], best[1], 'end', kept)),
                best[1]))
    return lines
