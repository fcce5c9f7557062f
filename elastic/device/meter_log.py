"""Reads the log of an external power meter: lines of `timestamp,watts`, seconds since 1970.

It serves devices without a sensor, such as a Raspberry Pi 4B. elastic.runs.metered adds the result
to finished runs.
"""

import array
import bisect
import csv
import math
from typing import NamedTuple

import numpy as np

from elastic.command_line import UserError, finite

LONGEST_LINE = 2 * 10 ** 5  # characters; a longer one counts as several, all of them damaged
MAX_GAP = 5.0  # s between two readings; the power during a longer gap is unknown


class MeterLog(NamedTuple):
    """Holds an external meter's log.

    stretches: [(times, watts)], arrays of float64, in the order of the file. Within a stretch,
        times grow by at most MAX_GAP.
    breaks: [(before, after, why)] around the stretches: seconds since 1970, infinite at both ends;
        `why` says what is wrong there, None if the log just begins or ends.
    """
    stretches: list
    breaks: list

    def span(self):
        """Returns the earliest and the latest timestamp; they are equal if no time passes."""
        return (min((times[0] for times, _ in self.stretches), default=0.0),
                max((times[-1] for times, _ in self.stretches), default=0.0))


def read_meter(path):
    """Returns the MeterLog in a file; raises UserError if it is none.

    A line that is no reading, or a timestamp that goes back, only breaks the log: a logger may have
    restarted, or a board without a clock battery booted in the past. Which clock was right is
    unknown, so readings on the two sides of a break are never joined.
    """
    log, last, why = MeterLog([], []), -math.inf, None
    for line, seconds, watts, fault in _readings(path):
        if fault or seconds <= last:
            why = why or '{}, line {}: {}'.format(path, line, fault or 'timestamps must grow')
            if fault:
                continue
        elif log.stretches and seconds - last > MAX_GAP:
            why = why or ('the meter log has a gap of {:.0f} s at {:.0f}; during training at most '
                          '{:g} s are allowed'.format(seconds - last, last, MAX_GAP))
        if why or not log.stretches:
            log.breaks.append((last, seconds, why))
            log.stretches.append((array.array('d'), array.array('d')))
        for values, value in zip(log.stretches[-1], (seconds, watts)):
            values.append(value)
        last, why = seconds, None
    log.breaks.append((last, math.inf, why))
    earliest, latest = log.span()
    if not earliest < latest:
        raise UserError(next((why for _, _, why in log.breaks if why), None)
                        or '{} has {} readings; at least two are needed'.format(
                            path, len(log.stretches)))
    return log


def _readings(path):
    """Yields (line number, seconds, watts, fault or None) of each line after the header."""
    header = []
    for number, line in enumerate(_lines(path), 1):
        try:
            cells = _cells(line)
            if not (header and cells):
                header = header or cells
                continue
            if len(cells) > len(header):  # a cut line joined with the next one
                raise ValueError
            row = dict(zip(header, cells))
            seconds, watts = finite(row['timestamp']), finite(row['watts'])
            yield number, seconds, watts, 'watts must not be negative' if watts < 0 else None
        except (csv.Error, KeyError, ValueError):
            yield number, None, None, ('expected the columns timestamp (seconds since 1970) and '
                                       'watts, both numbers')


def _cells(line):
    # Line by line, so that a stray quote in a damaged line does not swallow those that follow.
    return next(csv.reader([line], strict=True), [])


def _lines(path):
    """Yields the complete lines of a log; its last line may still be incomplete."""
    try:
        with open(path, encoding='utf-8', errors='replace', newline='') as file:
            for line in iter(lambda: file.readline(LONGEST_LINE), ''):
                if line.endswith('\n') or len(line) == LONGEST_LINE:
                    yield line
    except OSError as error:
        raise UserError('cannot read the meter log {}: {}'.format(path, error))


def check_meter(path):
    """Raises UserError if the file cannot become a meter's log; call it before training."""
    try:
        header = _cells(next(_lines(path), 'timestamp,watts'))  # the log may start later
    except csv.Error as error:
        raise UserError('{}, line 1: {}'.format(path, error))
    if not {'timestamp', 'watts'} <= set(header):
        raise UserError('{} has the columns {}; a meter log needs timestamp (seconds since 1970) '
                        'and watts'.format(path, ', '.join(header)))


def metered_joules(log, intervals):
    """Returns the joules in [start, end] intervals; interpolates power linearly between readings.

    intervals: seconds since 1970; None if the system clock was set in between (Meter.result).
    Raises UserError in that case, and if no single stretch covers an interval.
    """
    if intervals is None:
        raise UserError('the system clock was set during training, so that no meter log fits; '
                        'train again with a clock that is right from the start')
    return sum(_integral(log, start, end) for start, end in intervals)


def _integral(log, start, end):
    inside = [(times, watts) for times, watts in log.stretches
              if times[0] < end and times[-1] > start]
    if len(inside) != 1 or start < inside[0][0][0] or end > inside[0][0][-1]:
        raise UserError(_why_not(log, start, end))
    times, watts = inside[0]
    within = times[bisect.bisect_right(times, start):bisect.bisect_left(times, end)]
    points = np.concatenate([[start], within, [end]])
    at = np.interp(points, times, watts)
    return float(np.sum(np.diff(points) * (at[1:] + at[:-1]) / 2))


def _why_not(log, start, end):
    """Returns why [start, end] has no integral: the reason of the shortest break in it."""
    breaks = [(max(ends) - min(ends), why) for *ends, why in log.breaks
              if min(ends) < end and max(ends) > start]
    seconds, why = min(breaks, key=lambda item: item[0], default=(0.0, None))
    return why or ('the meter log covers {:.0f} to {:.0f}, training {:.0f} to {:.0f} (seconds '
                   'since 1970)'.format(*log.span() + (start, end)))
