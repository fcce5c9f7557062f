"""Compares names of classes as people do: two names differ only where a difference can be seen."""

import functools
import re
import unicodedata

import numpy as np

from elastic.errors import UserError
from elastic.files import printable

# Blanks without width, soft hyphens and marks of direction; not joiners, which shape letters.
INVISIBLE = re.compile('[\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]')
nfc = functools.partial(unicodedata.normalize, 'NFC')  # so that names sort alike on any disk


def shown(name):
    """Returns the name of a class as people see it: in one Unicode form and one line.

    Blanks, tabs and line separators become single blanks, none at the ends.
    """
    return printable(nfc(' '.join(INVISIBLE.sub('', name).split())))


def matches(given, names):
    """Returns which of `names` people mean by each given name; others are left out.

    Equal names come first, then those that look alike, then those in other case. A name that may
    mean two is left out.
    """
    found = {}
    for form in (lambda name: shown(name).casefold(), shown, str):
        meant = {}
        for name in names:
            meant.setdefault(form(name), []).append(name)
        found.update((name, meant[form(name)][0]) for name in given
                     if len(meant.get(form(name), ())) == 1)
    return found


def joined(old, new):
    """Returns how the classes of new images join those of a run that is continued.

    Returns (names: the old ones in their order, then the others sorted; numbers: (len(new),) int32,
    the place of each new name among them; lines on names of another form).
    Raises UserError if two new names mean one old class, or if one may mean two.
    """
    meant, alike = matches(new, old), [shown(name).casefold() for name in old]
    known = list(meant.values())
    unclear = [ascii(name) for name in new if known.count(meant.get(name)) > 1
               or name not in meant and shown(name).casefold() in alike]
    if unclear:
        raise UserError('it is not clear which classes of the run that is continued are meant by '
                        '{}: rename them, or put their images together'.format(', '.join(unclear)))
    names = tuple(old) + tuple(sorted(name for name in new if name not in meant))
    return (names, np.array([names.index(meant.get(name, name)) for name in new], np.int32),
            ['class {!r} of the new images is {!r} of the run that is continued'.format(name, other)
             for name, other in meant.items() if name != other])
