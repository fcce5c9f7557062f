"""Makes the tables of drift.py, and what they answer."""

import numpy as np
from _accuracy_table import mean_error, plus_minus
from _drift_streams import ELASTIC, FULL, HALF, HEAD, LAST, RANDOM

from elastic import texts

TITLES = dict(end='all exams, at the end (%)', new='new exams (%)', bwt='backward transfer',
              worst='worst forgetting', first='first exam', next='next exam (%)', gap='gap')
IRRELEVANT = 1.0  # points; or two standard errors


class Results:
    """Holds the results of one stream. lines: {(stream, equal, row, kept, seed): line}."""

    def __init__(self, lines, stream):
        self._of = {}
        for (name, equal, row, kept, seed), line in lines.items():
            if name == stream:
                self._of.setdefault((equal, row, int(kept)), {})[seed] = line

    def _values(self, key, measure):
        return {seed: float(line[measure]) for seed, line in self._of.get(key, {}).items()}

    def _text(self, one, other, measure, kept, equal='seconds'):
        return _shown(self._paired(one, other, measure, kept, equal))

    def _paired(self, one, other, measure, kept, equal='seconds'):
        """Returns [points] by which row `one` exceeds another, of each seed."""
        one, other = [self._values((equal, row, kept), measure) for row in (one, other)]
        return [100 * (one[seed] - other[seed]) for seed in one if seed in other]

    def table(self, equal, order):
        """Returns the table, of the rows in this order."""
        rows = []
        for key in sorted(filter(lambda key: key[0] == equal, self._of),
                          key=lambda key: (order.index(key[1]), key[2])):
            found = {name: list(self._values(key, name).values())
                     for name in list(TITLES) + ['seconds', 'steps', 'bytes']}
            found = {name: np.array(each)[np.isfinite(each)] for name, each in found.items()}
            rows.append([key[1], key[2], len(found['end'])] + [
                plus_minus(*mean_error(100 * found[name]), '{:.1f}') if len(found[name]) else ''
                for name in TITLES] + [
                '{:.1f}'.format(np.mean(found['seconds'])), '{:.0f}'.format(
                    np.mean(found['steps'])), '{:.1f}'.format(np.mean(found['bytes']) / 1e6)])
        return texts.table(
            ['', 'kept', 'n'] + list(TITLES.values()) + ['train (s)', 'steps', 'MB'], rows)

    def _at_equal_new(self, kept):
        """Returns by how much elastic training forgets less at equal accuracy in new exams.

        Full training has two points, equal seconds and equal epochs. Its backward transfer is taken
        between them, where its accuracy in new exams is nearest to that of elastic training.
        """
        keys = [('seconds', ELASTIC, kept), ('seconds', FULL, kept), ('epochs', FULL, kept)]
        new, bwt = [[self._values(key, name) for key in keys] for name in ('new', 'bwt')]
        return [100 * (bwt[0][seed] - np.interp(new[0][seed], *zip(*sorted(
            (new[i][seed], bwt[i][seed]) for i in (1, 2)))))
            for seed in new[0] if seed in new[1] and seed in new[2]]

    def answers(self):
        """Returns a list of lines. Differences are in points and paired by seed."""
        counts = sorted({key[2] for key in self._of if key[:2] == ('seconds', FULL)})
        if not counts:
            return []
        lines = ['Does rho 0.35 forget less than full training? {} kept: backward transfer {}, new '
                 'exams {}; backward transfer at equal new accuracy {}.'.format(
                     kept, *[self._text(ELASTIC, FULL, name, kept) for name in ('bwt', 'new')] + [
                         _shown(self._at_equal_new(kept))]) for kept in counts]
        lines.append('Is it the importance? {} kept, rho 0.35: {}.'.format(counts[0], '; '.join(
            'to {}, all exams {}, backward transfer {}, new exams {}'.format(
                other, *[self._text(ELASTIC, other, name, counts[0])
                         for name in ('end', 'bwt', 'new')]) for other in (RANDOM, LAST))))
        found = [(kept, self._paired(ELASTIC, FULL, 'end', kept)) for kept in counts]
        least = [kept for kept, points in found if points and abs(np.mean(points)) <= max(
            IRRELEVANT, 2 * np.nan_to_num(mean_error(points)[1]))]
        lines.append('How many kept images make it irrelevant? {}: all exams, rho 0.35 to full, {}.'
                     .format(least[0] if least else 'more than these', ', '.join(
                         '{} with {}'.format(_shown(points), kept) for kept, points in found)))
        for kept in counts:
            ends = {row: np.mean(list(self._values(('seconds', row, kept), 'end').values()))
                    for row in (FULL, HALF, ELASTIC, HEAD) if ('seconds', row, kept) in self._of}
            best, *others = sorted(ends, key=ends.get)[::-1]
            lines.append('Which rho? {} kept: {}, {:.1f} % in all exams{}.'.format(
                kept, best, 100 * ends[best], ''.join('; to {} {}'.format(other, self._text(
                    best, other, 'end', kept)) for other in others)))
        for kept in counts:
            seconds = [np.mean(list(self._values(('epochs', row, kept), 'seconds').values()))
                       for row in (FULL, ELASTIC) if ('epochs', row, kept) in self._of]
            if len(seconds) == 2:
                lines.append('At equal epochs, {} kept: rho 0.35 is {:.2f} times as fast as full; '
                             'all exams {}.'.format(kept, seconds[0] / seconds[1], self._text(
                                 ELASTIC, FULL, 'end', kept, 'epochs')))
        return lines


def _shown(points):
    return plus_minus(*mean_error(points), '{:+.1f}') if points else 'not measured'
