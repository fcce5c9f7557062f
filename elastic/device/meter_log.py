"""Reads the log of an external power meter: lines of `timestamp,watts`, seconds since 1970.

It serves devices without a sensor, such as a Raspberry Pi 4B. elastic.runs.metered adds the result
to finished runs.
"""

import csv

import numpy as np

from elastic.device.energy import joules_within
from elastic.errors import UserError, finite

COLUMNS = ('timestamp', 'watts')
LONGEST_LINE = 10 ** 4  # characters
MAX_GAP = 5.0  # s between two readings; the power during a longer gap is unknown


def read_meter(path):
    """Returns (times, watts) of a log: two float64 arrays of shape (n,), n >= 2, times growing.

    Raises UserError with the line that is no reading, or whose timestamp does not grow.
    """
    rows, times, watts = _rows(path), [], []
    header = _header(path, rows)
    for line, cells in rows:
        try:
            if len(cells) > len(header):  # a cut line joined with the next one
                raise ValueError
            seconds, power = [finite(cells[header.index(name)]) for name in COLUMNS]
        except (IndexError, ValueError):
            raise _fault(path, line, '{} and {} must be numbers'.format(*COLUMNS))
        if power < 0:
            raise _fault(path, line, 'watts must not be negative')
        if times and seconds <= times[-1]:
            raise _fault(path, line, 'timestamps must grow')
        times.append(seconds)
        watts.append(power)
    if len(times) < 2:
        raise UserError('{} has {} readings; at least two are needed'.format(path, len(times)))
    return np.array(times), np.array(watts)


def check_meter(path):
    """Raises UserError if the file cannot become a meter's log; call it before training."""
    _header(path, _rows(path))


def _header(path, rows):
    """Returns the names of the columns: those expected if there is no line yet."""
    line, header = next(rows, (1, list(COLUMNS)))
    names = [name.lower() for name in header]
    if not set(COLUMNS) <= set(names):
        raise UserError('{}, line {}: a meter log has the columns timestamp (seconds since 1970) '
                        'and watts, not {:.80}'.format(path, line, repr(','.join(header))))
    return names


def _rows(path):
    """Yields (line number, cells) of the lines that are not blank.

    An incomplete last line does not count: the log may still grow. The first line shows whether
    semicolons, tabs, commas or blanks separate columns. A comma within a number is decimal.
    """
    number, separator = 1, None
    try:
        with open(path, 'rb') as file:
            wide = file.read(2) in (b'\xff\xfe', b'\xfe\xff')  # as some spreadsheets save it
        with open(path, encoding='utf-16' if wide else 'utf-8-sig',
                  errors='replace', newline='') as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), ''), 1):
                if len(line) == LONGEST_LINE:
                    raise csv.Error('the line is too long')
                if line[-1] not in '\r\n':
                    return
                line = line.strip(' \r\n\ufeff')
                separator = separator or next((each for each in ';\t, ' if each in line), None)
                # Line by line, so that a stray quote does not swallow those that follow.
                cells = next(csv.reader([line], delimiter=separator or ',', skipinitialspace=True,
                                        strict=True), [])
                cells = [cell.strip() for cell in cells]
                if any(cells):
                    yield number, [cell.replace(',', '.') for cell in cells]
    except csv.Error as error:
        raise _fault(path, number, error)
    except OSError as error:
        raise UserError('cannot read the meter log {}: {}'.format(path, error))


def _fault(path, line, reason):
    return UserError('{}, line {}: {}; correct or remove the line'.format(path, line, reason))


def metered_joules(log, intervals):
    """Returns the joules in [start, end] intervals.

    log: from read_meter. intervals: seconds since 1970; None if the system clock was set in between
    (Meter.result). Raises UserError in that case, and if the log does not cover an interval or has
    a gap in it.
    """
    if intervals is None:
        raise UserError('the system clock was set during training, so that no meter log fits; '
                        'train again with a clock that is right from the start')
    times, watts = log
    gaps = [times[i:i + 2] for i in np.flatnonzero(np.diff(times) > MAX_GAP)]
    for start, end in intervals:
        if start < times[0] or end > times[-1]:
            raise UserError('the meter log covers {:.0f} to {:.0f}, training {:.0f} to {:.0f} '
                            '(seconds since 1970)'.format(times[0], times[-1], start, end))
        for before, after in gaps:
            if before < end and after > start:
                raise UserError('the meter log has a gap of {:.0f} s at {:.0f}; during training at '
                                'most {:g} s are allowed'.format(after - before, before, MAX_GAP))
    joules = np.cumsum(np.diff(times) * (watts[1:] + watts[:-1]) / 2)
    return joules_within(times, np.append(0.0, joules), intervals)
