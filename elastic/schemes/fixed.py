"""Lists the training schemes: what the fixed ones train, and how figures show all of them.

To add a fixed scheme, which trains the same tensors throughout a run, write its function here.
"""

import re
from typing import Callable, NamedTuple, Optional

import numpy as np

from elastic.errors import UserError
from elastic.schemes.scheme import Choice, Scheme


class SchemeKind(NamedTuple):
    """Describes one training scheme.

    label, color, marker: in figures; the colours of Okabe and Ito, safe for the colour-blind.
    trains: (names, head) -> (N,) bool mask of a fixed scheme, else None. names: of the trainable
    variables, in order. head: (N,) bool, those of the output layer.
    frozen_front: whether layers next to the input may stay frozen, so that a cache can be used.
    """
    label: str
    color: str
    marker: str
    trains: Optional[Callable] = None
    frozen_front: bool = True


SCHEMES = {}
HEAD = 'traditional_tl_training'


def fixed(label, color, marker, frozen_front=True):
    """Registers a function (names, head) -> (N,) bool as the --train_type of its name."""
    def register(function):
        SCHEMES[function.__name__] = SchemeKind(label, color, marker, function, frozen_front)
        return function
    return register


@fixed('Full training', '#333333', 'o', frozen_front=False)
def full_training(names, head):
    """Trains all tensors."""
    return np.ones(len(names), dtype=bool)


@fixed('Head only', '#56B4E9', 's')
def traditional_tl_training(names, head):
    """Trains the output layer."""
    return head


@fixed('BN + bias', '#009E73', '^', frozen_front=False)
def bn_plus_bias_training(names, head):
    """Trains gamma and beta of every normalization, every bias, and the output layer."""
    small = [name.split('/')[-1] in ('gamma', 'beta', 'bias') for name in names]
    return head | np.array(small)


SCHEMES.update(
    prune_training=SchemeKind('PruneTrain', '#0072B2', 'v', frozen_front=False),
    chosen_tensors=SchemeKind('Chosen tensors', '#999999', 'p'),
    elastic_training=SchemeKind('ElasticTrainer', '#D55E00', 'D'),
    elastic_training_weight_magnitude=SchemeKind('Elastic, weight magnitude', '#CC79A7', 'P'),
    elastic_training_grad_magnitude=SchemeKind('Elastic, gradient magnitude', '#E69F00', 'X'))


def is_elastic(train_type):
    """Returns whether the scheme selects tensors while the run trains."""
    return train_type.startswith('elastic')


class FixedScheme(Scheme):
    """Trains the same tensors throughout a run.

    name: of a fixed scheme in SCHEMES. choice: the Choice; default: what that scheme trains.
    first: the first epoch that trains.
    """

    def __init__(self, name, maker, choice=None, first=1):
        super().__init__(name, maker)
        self._choice, self._first = choice or Choice(fixed_mask(name, maker.model)), first

    def select(self, epoch, last):
        return self._choice if epoch == self._first else None


def matching_mask(expression, model):
    """Returns the (N,) bool mask of the tensors whose names match a regular expression.

    Raises UserError if it matches no tensor, or all.
    """
    from elastic.compat import keras_stack
    names = [keras_stack.variable_name(v) for v in model.trainable_variables]
    mask = np.array([re.search(expression, name) is not None for name in names])
    if mask.all():
        raise UserError("--train_tensors '{}' matches all {} tensors; use --train_type "
                        'full_training'.format(expression, len(names)))
    if not mask.any():
        raise UserError("--train_tensors '{}' matches none of the {} tensors; some of them are {}"
                        .format(expression, len(names), ', '.join(
                            names[i] for i in np.linspace(0, len(names) - 1, 7).astype(int))))
    return mask


def fixed_mask(name, model):
    """Returns the (N,) bool mask of the tensors that a fixed scheme trains."""
    from elastic.compat import keras_stack
    from elastic.networks.backbone import output_layer
    variables, head = model.trainable_variables, {
        id(v) for v in output_layer(model).trainable_weights}
    return SCHEMES[name].trains([keras_stack.variable_name(v) for v in variables],
                                np.array([id(v) in head for v in variables]))
