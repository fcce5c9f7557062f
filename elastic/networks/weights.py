"""Writes the weights of a model to a .npz file, and reads them back on any stack."""

import warnings

import numpy as np

from elastic.compat.keras_stack import assign_arrays, variable_name, weights_were_set
from elastic.errors import UserError
from elastic.files import read_npz, write_npz

WEIGHTS_FORMAT = 'elastic-weights-1'


def save_weights(model, path):
    """Writes all weights of a model to a .npz file, trainable arrays first, then BN statistics.

    Keras 2 and 3 list variables in the same order, so each reads the other's file. The file appears
    complete or not at all.
    """
    arrays = {}
    for kind, variables in _kinds(model):
        for i, variable in enumerate(variables):
            arrays['{}/{:05d}/{}'.format(kind, i, variable_name(variable))] = variable
    write_npz(path, WEIGHTS_FORMAT, arrays)


def load_weights(model, path, known=None):
    """Reads a file of save_weights into a model; assigns all arrays or none.

    known: number of classes, the first ones, that the file's head (its last two trainable arrays)
    may be for: then the other classes of the model's head keep their initial values. If it is for
    any other number of classes, the whole head keeps them, with a warning.
    Raises UserError that lists all other mismatches. Reads no pickled objects.
    """
    stored = read_npz(path, WEIGHTS_FORMAT)
    head = {id(variable) for variable in model.trainable_weights[-2:]}
    assignments, mismatches, only_head = [], [], True
    for kind, variables in _kinds(model):
        arrays = [(key.split('/', 2)[-1], stored[key]) for key in sorted(stored)
                  if key.startswith(kind + '/')]
        if len(arrays) != len(variables):
            mismatches.append('{} {} arrays in the file, {} in the model'.format(
                len(arrays), kind, len(variables)))
            only_head = False
        for variable, (name, array) in zip(variables, arrays):
            own = variable_name(variable)
            numbers = array.dtype.kind in 'biufV'  # V: bfloat16, which NumPy does not know
            if numbers and tuple(variable.shape) == array.shape and (
                    own.split('/')[-1] == name.split('/')[-1]):
                assignments.append((variable, array))
                continue
            wider = _widened(variable, array, known) if numbers and id(variable) in head else None
            if wider is not None:
                assignments.append((variable, wider))
                continue
            mismatches.append('{} {}{} in the file, {} {} in the model'.format(
                name, 'x'.join(map(str, array.shape)), '' if numbers else ' {}'.format(array.dtype),
                own, 'x'.join(map(str, variable.shape))))
            only_head = only_head and id(variable) in head
    if mismatches and not only_head:
        raise UserError("'{}' holds weights of another architecture ({} mismatches):\n  {}".format(
            path, len(mismatches), '\n  '.join(mismatches)))
    if mismatches:
        warnings.warn('{} was trained on other classes; the head keeps its initial weights '
                      '({})'.format(path, '; '.join(mismatches)))
    assign_arrays(*zip(*assignments))
    weights_were_set(model)


def _widened(variable, array, known):
    """Returns the variable's values with the array in the first `known` columns; None if it is not
    of as many, or of other features.
    """
    values = variable.numpy()
    if values.ndim != array.ndim or array.shape != values.shape[:-1] + (known,):
        return None
    array = array.view(values.dtype) if array.dtype.kind == 'V' else array  # bfloat16
    return np.concatenate([array.astype(values.dtype), values[..., known:]], axis=-1)


def _kinds(model):
    return (('trainable', model.trainable_weights), ('statistics', model.non_trainable_weights))
