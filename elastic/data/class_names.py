"""Compares names of classes as people do: two names differ only where a difference can be seen."""

import re
import unicodedata

from elastic.files import printable

# Blanks without width, soft hyphens and marks of direction; not joiners, which shape letters.
INVISIBLE = re.compile('[\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]')


def shown(name):
    """Returns the name of a class as people see it: in one Unicode form and one line.

    Blanks, tabs and line separators become single blanks, none at the ends.
    """
    return printable(unicodedata.normalize('NFC', ' '.join(INVISIBLE.sub('', name).split())))


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
