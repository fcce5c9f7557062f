"""Times such as 90s or 1h30m, sizes such as 900MB, short lists, and aligned tables."""

import argparse
import math
import re


def duration(text):
    """Returns the seconds of a text such as 90, 90s, 45m or 1h30m; an argparse type."""
    found = re.match(r'(?:([0-9.]+)h)?(?:([0-9.]+)m)?(?:([0-9.]+)s?)?$', text)
    try:
        seconds = sum(float(part) * unit for part, unit in zip(found.groups(), (3600, 60, 1))
                      if part is not None)
    except (AttributeError, ValueError):  # no match, or a number with two points
        seconds = 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(
            "'{}' is not a time above 0; allowed are such as 90s, 45m, 1h30m".format(text))
    return seconds


duration.metavar = 'TIME'


def bytes_of(text):
    """Returns the bytes of a size such as 900MB, 1.5GB, 2e9 or 1,200 MB, as messages show it.

    Raises ValueError for any other text.
    """
    text = re.sub(r'(?<=\d),(?=\d{3}(?!\d))', '', text)
    found = re.match(r'([0-9.e]+) ?([KMG]?)B?$', text.upper().replace('E', 'e'))
    nbytes = float(found.group(1)) * 1000 ** ' KMG'.index(found.group(2) or ' ') if found else 0
    if not 1 <= nbytes < float('inf'):
        raise ValueError(text)
    return int(nbytes)


def count_or_size(text):
    """Returns the int of a text such as 1000, or a size such as 200MB as text; an argparse type."""
    try:
        if text.isdigit():
            return int(text)
        bytes_of(text if text.upper().endswith('B') else '')
        return text.upper()
    except ValueError:
        raise argparse.ArgumentTypeError("'{}' is not a number of images from 0 on, nor a size "
                                         'such as 200MB or 1GB'.format(text))


def size(text):
    """Returns the bytes of a text such as 900MB or 1.5GB, or AUTO as it is; an argparse type."""
    try:
        return text if text == 'auto' else bytes_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "'{}' is not a size above 0; allowed are such as 900MB, 1.5GB, or auto".format(text))


size.metavar = 'SIZE|auto'


def size_text(nbytes):
    """Returns bytes as such a text, in MB, rounded up."""
    return '{:,.0f} MB'.format(math.ceil(nbytes / 1e6))


def duration_text(seconds):
    """Returns seconds as such a text, rounded up: 1h30m, 45m10s, 90s."""
    seconds = math.ceil(round(seconds, 3))
    hours, minutes = divmod(seconds // 60, 60)
    if seconds < 120:
        return '{}s'.format(seconds)
    return '{}{}{}'.format('{}h'.format(hours) * bool(hours), '{}m'.format(minutes) * bool(minutes),
                           '{}s'.format(seconds % 60) * bool(seconds % 60))


def shortened(names, most=3):
    """Returns the first names, and how many more there are."""
    more = len(names) - most
    return ', '.join(names[:most]) + (' and {} more'.format(more) if more > 0 else '')


def table(header, rows, align=None):
    """Returns the text of a table with aligned columns.

    header: column titles, with units. rows: sequences of str or int.
    align: one '<' or '>' per column; default: the first column left, the others right.
    """
    rows = [[str(cell) for cell in row] for row in rows]
    align = align or '<' + '>' * (len(header) - 1)
    widths = [max([len(title)] + [len(row[i]) for row in rows])
              for i, title in enumerate(header)]
    lines = [header, ['-' * width for width in widths]] + rows
    return '\n'.join('  '.join('{:{}{}}'.format(cell, side, width)
                               for cell, side, width in zip(line, align, widths)).rstrip()
                     for line in lines)
