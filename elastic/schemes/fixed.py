"""The training schemes: their names, what the fixed ones train, and how figures show them.

A fixed scheme trains the same tensors from start to end. To add one is to write its function here.
ElasticScheme (train.py) and PruneTrainScheme (prunetrain.py) choose again between epochs.
"""

from typing import Callable, NamedTuple, Optional

import numpy as np

from elastic.schemes.scheme import Choice, Scheme


class SchemeKind(NamedTuple):
    """label, color, end marker: in figures; colours of Okabe and Ito, safe for the colour-blind.

    trains: (names, head) -> (N,) bool, of a fixed scheme. names: of the N trainable variables, in
    model.trainable_variables order; head: (N,) bool, those of the output layer.
    frozen_front: whether layers next to the input stay frozen, so that a prefix cache may serve.
    """
    label: str
    color: str
    marker: str
    trains: Optional[Callable] = None
    frozen_front: bool = True


SCHEMES = {}


def fixed(label, color, marker, frozen_front=True):
    """Makes a function (names, head) -> (N,) bool a --train_type of its name."""
    def register(function):
        SCHEMES[function.__name__] = SchemeKind(label, color, marker, function, frozen_front)
        return function
    return register


@fixed('Full training', '#333333', 'o', frozen_front=False)
def full_training(names, head):
    """Everything."""
    return np.ones(len(names), dtype=bool)


@fixed('Head only', '#56B4E9', 's')
def traditional_tl_training(names, head):
    """The output layer."""
    return head


@fixed('BN + bias', '#009E73', '^', frozen_front=False)
def bn_plus_bias_training(names, head):
    """Every normalisation's gamma and beta, every bias, and the output layer."""
    small = [name.split('/')[-1] in ('gamma', 'beta', 'bias') for name in names]
    return head | np.array(small)


SCHEMES.update(
    prune_training=SchemeKind('PruneTrain', '#0072B2', 'v', frozen_front=False),
    elastic_training=SchemeKind('ElasticTrainer', '#D55E00', 'D'),
    elastic_training_weight_magnitude=SchemeKind('Elastic, weight magnitude', '#CC79A7', 'P'),
    elastic_training_grad_magnitude=SchemeKind('Elastic, gradient magnitude', '#E69F00', 'X'))


class FixedScheme(Scheme):
    """Trains the same tensors from start to end; name: of a fixed scheme in SCHEMES."""

    def select(self, epoch, last):
        return Choice(fixed_mask(self.name, self.maker.model)) if epoch == 1 else None


def fixed_mask(name, model):
    """Returns the (N,) bool mask of what the fixed scheme of that name trains of the model."""
    from elastic.compat import keras_stack
    from elastic.networks.backbone import output_layer
    variables, head = model.trainable_variables, {
        id(v) for v in output_layer(model).trainable_weights}
    return SCHEMES[name].trains([keras_stack.variable_name(v) for v in variables],
                                np.array([id(v) in head for v in variables]))
