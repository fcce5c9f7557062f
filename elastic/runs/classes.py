"""Records what a network predicted for each test image, and how well it knows each class.

    predictions.csv   one row per test image
    classes.csv       one row per class, computed from it by scikit-learn
"""

import os
from typing import NamedTuple, Sequence

import numpy as np

from elastic.files import write_table
from elastic.runs.folder import fault, read_rows
from elastic.texts import table

PREDICTIONS, CLASSES = 'predictions.csv', 'classes.csv'
PREDICTION_COLUMNS = ('image', 'label', 'predicted', 'probability')
CLASS_COLUMNS = ('class', 'images', 'correct', 'accuracy', 'precision', 'f1')
MOST_CLASSES = 40  # in the printed table; with more, the worst
MOST_PAIRS, MOST_PHOTOS = 10, 12  # printed and drawn


class Predictions(NamedTuple):
    """Holds what a network predicted for n test images.

    class_names: C names. images: n names. labels, predicted: (n,) int, numbers of classes.
    probability: (n,) float, of the predicted class.
    """
    class_names: Sequence[str]
    images: Sequence[str]
    labels: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray

    @property
    def accuracy(self):
        return float(np.mean(self.labels == self.predicted))

    def confusion(self):
        """Returns the number of images, (C, C) int, by label and predicted class."""
        from sklearn.metrics import confusion_matrix
        return confusion_matrix(self.labels, self.predicted,
                                labels=np.arange(len(self.class_names)))

    def classes(self):
        """Returns a row of CLASS_COLUMNS per class; None where a share of nothing is asked for."""
        from sklearn.metrics import precision_recall_fscore_support
        numbers = np.arange(len(self.class_names))
        precision, recall, f1, images = precision_recall_fscore_support(
            self.labels, self.predicted, labels=numbers, zero_division=0)
        correct = np.bincount(self.labels[self.labels == self.predicted], minlength=len(numbers))
        given = np.bincount(self.predicted, minlength=len(numbers))
        return [(self.class_names[i], int(images[i]), int(correct[i]),
                 float(recall[i]) if images[i] else None,
                 float(precision[i]) if given[i] else None,
                 float(f1[i]) if images[i] or given[i] else None) for i in numbers]

    def worst_classes(self):
        """Returns the numbers of the classes with test images, the least accurate first."""
        rows = self.classes()
        return sorted((i for i, row in enumerate(rows) if row[1]),
                      key=lambda i: (rows[i][3], -rows[i][1]))

    def confused(self):
        """Returns [(label, predicted class, number of images)], the most frequent first."""
        counts = self.confusion()
        np.fill_diagonal(counts, 0)
        pairs = [(int(i), int(j), int(counts[i, j])) for i, j in np.argwhere(counts)]
        return sorted(pairs, key=lambda pair: -pair[2])

    def wrong(self):
        """Returns the numbers of the wrongly classified images, the most confident first."""
        wrong = np.flatnonzero(self.labels != self.predicted)
        return wrong[np.argsort(-self.probability[wrong], kind='mergesort')]


def write_predictions(path, predictions):
    """Writes Predictions as a CSV file with PREDICTION_COLUMNS."""
    names = predictions.class_names
    write_table(path, PREDICTION_COLUMNS, (
        (image, names[label], names[predicted], '{:.6g}'.format(probability))
        for image, label, predicted, probability in zip(*predictions[1:])))


def write_classes(path, predictions):
    """Writes how well each class is known, as a CSV file with CLASS_COLUMNS."""
    write_table(path, CLASS_COLUMNS, predictions.classes())


def read_predictions(folder, class_names):
    """Returns the Predictions of a run; raises UserError if it has none, or they are damaged."""
    if class_names is None or not os.path.exists(os.path.join(folder, PREDICTIONS)):
        raise fault(folder, 'has no {}: it is older than that file; scripts/evaluate.py evaluates '
                    'its saved model'.format(PREDICTIONS))
    number = {name: i for i, name in enumerate(class_names)}.__getitem__
    rows = read_rows(folder, PREDICTIONS, dict(image=str, label=number, predicted=number,
                                               probability=float))
    if not rows:
        raise fault(folder, '{} is empty'.format(PREDICTIONS))
    images, *columns = [[row[column] for row in rows] for column in PREDICTION_COLUMNS]
    return Predictions(tuple(class_names), images, *map(np.array, columns))


def report(predictions):
    """Returns the lines that say how well each class is known, and what is mistaken for what."""
    names, rows = predictions.class_names, predictions.classes()
    if len(names) > MOST_CLASSES:
        rows = [rows[i] for i in predictions.worst_classes()[:MOST_CLASSES // 2]]
    lines = ['accuracy {:.1f} % of {} test images'.format(
        100 * predictions.accuracy, len(predictions.images)), '']
    lines += [table(('class', 'test images', 'correct', 'accuracy (%)', 'precision (%)', 'F1 (%)'),
                    [row[:3] + tuple('' if share is None else '{:.1f}'.format(100 * share)
                                     for share in row[3:]) for row in rows])]
    if len(rows) < len(names):
        lines.append('these are the worst of {} classes'.format(len(names)))
    pairs, wrong = predictions.confused(), predictions.wrong()
    if pairs:
        lines += ['', table(('most confused', 'predicted', 'images'), [
            (names[i], names[j], count) for i, j, count in pairs[:MOST_PAIRS]], '<<>')]
        lines += ['', table(('most confidently wrong', 'label', 'predicted', 'probability (%)'), [
            (predictions.images[i], names[predictions.labels[i]], names[predictions.predicted[i]],
             '{:.1f}'.format(100 * predictions.probability[i])) for i in wrong[:MOST_PHOTOS]],
            '<<<>')]
    return lines + ['']
