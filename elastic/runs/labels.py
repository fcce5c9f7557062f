"""Names the configuration of a run in figures and tables."""

from elastic.schemes.fixed import SCHEMES
from elastic.settings import FLAGS, VARIED

CONFIGURATION = ('scheme', 'rho', 'model_name') + VARIED  # runs that agree in these are averaged


def configuration(summary):
    """Returns the values of CONFIGURATION."""
    return tuple(summary[key] for key in CONFIGURATION)


def distinctions(key, keys):
    """Returns [(name, value)] of the flags in VARIED in which keys of the same scheme differ.

    A key begins with the scheme and ends with the values of VARIED. A value of None is left out:
    the flag does not apply to the run, or has its default.
    """
    rivals = [other[-len(VARIED):] for other in keys if other[0] == key[0]]
    return [(name, value) for name, value, others in zip(VARIED, key[-len(VARIED):], zip(*rivals))
            if value is not None and len(set(others)) > 1]


def label_of(key, keys=(), n=1):
    """Returns the label of configuration `key`: n, and how it differs from the others in `keys`."""
    label = SCHEMES[key[0]].label + ('' if key[1] is None else f', ρ = {key[1]:g}')
    label += f', {key[2]}' if len({other[2] for other in keys}) > 1 else ''
    for name, value in distinctions(key, keys):
        shown = '{:g}'.format(value) if isinstance(value, float) else value
        text = FLAGS[name].label.format(shown)
        label += ', ' + (text.replace('1 epochs', '1 epoch') if value == 1 else text)
    return label + (f', n = {n}' if n > 1 else '')
