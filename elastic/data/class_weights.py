"""Weights the loss by class, for data sets in which some classes have far more images."""

import csv
import os

import numpy as np

from elastic.data.class_names import matches
from elastic.errors import UserError, finite, nearest
from elastic.texts import shortened, table

BALANCED = 'balanced'
SHOWN = 20  # classes in the table that a run prints
NAMED = 10  # classes in an error


def weights_table(rows):
    """Returns a table for people; of many classes, those with the most and the least images.

    rows: of class_weights.
    """
    lines = [[name, '{:,}'.format(images), '{:.3g}'.format(weight)]
             for name, images, weight in rows]
    if len(rows) > SHOWN:
        lines = [lines[i] for i in sorted(range(len(rows)), key=lambda i: -rows[i][1])]
        lines[SHOWN // 2:-SHOWN // 2] = [['({} more)'.format(len(rows) - SHOWN), '', '']]
    return table(['class', 'training images', 'weight'], lines)


def class_weights(given, class_names, counts):
    """Returns [[class, training images, weight]] of --class_weight, in the order of the labels.

    given: 'balanced' weights each of C classes with images by n / (C * its images), so that all
    count the same; or the path of a CSV file. counts: (C,), training images of each class. Raises
    UserError as read_class_weights, and for a name that is no class or has no weight.
    """
    images = np.rint(counts).astype(int)
    if given == BALANCED:
        weights = images.sum() / (np.count_nonzero(images) * np.maximum(images, 1.0))
    else:
        weights = _weights_in(given, class_names)
    return [list(row) for row in zip(class_names, images.tolist(), map(float, weights))]


def _weights_in(path, class_names):
    """Returns the weights of the classes in a CSV file, in their order."""
    weights = read_class_weights(path)
    meant = matches(weights, class_names)
    wrong = [name for name in weights if name not in meant]
    if wrong:
        raise UserError("--class_weight {}: '{}' is no class{}; the classes are {}".format(
            path, wrong[0], nearest(wrong[0], class_names), shortened(class_names, NAMED)))
    weights = {meant[name]: weight for name, weight in weights.items()}
    if len(weights) < len(meant):
        raise UserError('--class_weight {}: two of the names mean the same class'.format(path))
    missing = [name for name in class_names if name not in weights]
    if missing:
        raise UserError('--class_weight {}: no weight for {}; every class needs one'.format(
            path, shortened(missing, NAMED)))
    return [weights[name] for name in class_names]


def check_class_weight(given):
    """Raises UserError if this --class_weight cannot be used with any data set."""
    if given not in (None, BALANCED):
        read_class_weights(given)


def read_class_weights(path):
    """Returns class name -> weight from a CSV file with lines of `name,weight`.

    The first line may be that header. Raises UserError for a file that cannot be read, a line of
    another form, a weight that is not positive, and a name that comes twice.
    """
    def fault(text):
        return UserError('--class_weight {}: {}'.format(path, text))
    if not os.path.isfile(path):
        raise fault("no such file; give '{}' or a CSV file of name,weight".format(BALANCED))
    try:
        with open(path, encoding='utf-8-sig', newline='') as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise fault('cannot be read ({})'.format(error))
    weights = {}
    for number, row in enumerate(rows, 1):
        if not row or number == 1 and row == ['name', 'weight']:
            continue
        try:
            name, weight = row
            weight = finite(weight)
        except ValueError:
            weight = 0
        if weight <= 0:
            raise fault("line {} is '{}'; needed is name,weight with a weight above 0".format(
                number, ','.join(row)))
        if name in weights:
            raise fault("'{}' has two weights".format(name))
        weights[name] = weight
    return weights
