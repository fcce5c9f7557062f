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

    If the file's head (its last two trainable arrays) is for another number of classes, the model's
    head keeps its initial values, with a warning; those of new classes alone if the file has the
    `known` first ones. Raises UserError that lists all other mismatches. Reads no pickled objects.
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
            elif known and id(variable) in head and numbers and (
                    array.shape == tuple(variable.shape[:-1]) + (known,)):
                new = variable.numpy()[..., known:]
                array = array.view(new.dtype) if array.dtype.kind == 'V' else array
                assignments.append((variable, np.concatenate([array, new], -1)))
            else:
                mismatches.append('{} {}{} in the file, {} {} in the model'.format(
                    name, 'x'.join(map(str, array.shape)),
                    '' if numbers else ' {}'.format(array.dtype),
                    own, 'x'.join(map(str, variable.shape))))
                only_head = only_head and id(variable) in head and not known
    if mismatches and not only_head:
        raise UserError("'{}' holds weights of another architecture ({} mismatches):\n  {}".format(
            path, len(mismatches), '\n  '.join(mismatches)))
    if mismatches:
        warnings.warn('{} was trained on other classes; the head keeps its initial weights '
                      '({})'.format(path, '; '.join(mismatches)))
    assign_arrays(*zip(*assignments))
    weights_were_set(model)


def _kinds(model):
    return (('trainable', model.trainable_weights), ('statistics', model.non_trainable_weights))
