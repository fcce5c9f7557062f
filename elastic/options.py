"""Says what a flag of a command line is: the kind of its values, its help, what it decides."""

import argparse
import math
import operator
import os

as_path = os.path.expanduser  # the argparse type of a path, in which ~ is the home folder


def boolean(text):
    """Is the argparse type of a boolean: 'False' is never read as true."""
    value = {'1': True, 'true': True, 'yes': True, '0': False, 'false': False, 'no': False}.get(
        text.lower())
    if value is None:
        raise argparse.ArgumentTypeError("'{}' is not 1, 0, true or false".format(text))
    return value


def number(kind, low=None, high=None, above=None, below=None, word=None):
    """Returns an argparse type: finite numbers of `kind`, low <= x <= high, above < x < below.

    word: a text that is allowed, too, and returned as it is.
    """
    limits = [limit for limit in (
        ('at least', low, operator.ge), ('above', above, operator.gt),
        ('at most', high, operator.le), ('below', below, operator.lt)) if limit[1] is not None]
    allowed = '{} {}'.format('a whole number' if kind is int else 'a number', ', '.join(
        '{} {}'.format(*limit) for limit in limits))
    allowed += ' or ' + word if word else ''

    def parse(text):
        if text == word:
            return word
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError("'{}' is not {}".format(text, allowed))
        if (kind is float and not math.isfinite(value)
                or not all(holds(value, bound) for _, bound, holds in limits)):
            raise argparse.ArgumentTypeError("{} is not {}".format(text, allowed))
        return value
    parse.metavar = 'N' if kind is int else 'X|' + word if word else 'X'
    return parse


def add_flag(parser, name, text, default=False):
    """Adds a boolean flag, which may stand alone or be followed by 1/0 or true/false."""
    parser.add_argument(name, type=boolean, nargs='?', const=True, default=default, metavar='BOOL',
                        help=text + (' (default: true)' if default else ''))


class Flag:
    """Declares a flag, in place of the type of a field: `rho: Flag(number(float), 'help') = 0.5`.

    kind: argparse type; bool; a tuple of choices; or list, if the choices are not known here. text:
    help, to which the default is added; {} stands for such choices.
    of: the schemes that it belongs to, ELASTIC, PRUNE or CACHED; None: all. decides: whether it
    decides the outcome of a run. label: how figures and tables name a value, where runs of one
    scheme differ in it; None: they are not told apart by it.
    """

    def __init__(self, kind, text, metavar=None, of=None, decides=True, label=None):
        self.kind, self.text, self.of, self.decides, self.label = kind, text, of, decides, label
        self.metavar = metavar or getattr(kind, 'metavar', None)

    def __call__(self):
        raise TypeError('a declaration of a flag, which Python 3.6 takes for a type')

    def add_to(self, parser, name, default, words=()):
        """Adds --name to an argparse parser. words: what stands for {} in the help."""
        if self.kind is bool:
            add_flag(parser, '--' + name, self.text, default)
            return
        choices = self.kind if isinstance(self.kind, tuple) else None
        if self.kind is list:
            choices = words
        shown = default is not None and '(default: ' not in self.text
        text = self.text.format(', '.join(words))
        parser.add_argument('--' + name, default=default, choices=choices, metavar=self.metavar,
                            type=None if choices else self.kind,
                            help=text + (' (default: %(default)s)' if shown else ''))
