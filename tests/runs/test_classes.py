"""Tests what is computed from the predictions for each test image, and their files."""

import numpy as np
import pytest

from elastic.errors import UserError
from elastic.runs.classes import (
    CLASSES,
    PREDICTIONS,
    Predictions,
    read_predictions,
    report,
    write_classes,
    write_predictions,
)
from made_runs import read_csv

NAMES = ('cat, "tabby"', 'dog', 'mole', 'newt')
# cat: 2 of 3 right, one taken for a dog; dog: 1 of 2, one taken for a mole; mole: untested.
LABELS, PREDICTED = [0, 0, 0, 1, 1, 3], [0, 0, 1, 1, 2, 3]
PROBABILITY = [0.9, 0.8, 0.6, 0.7, 0.95, 0.5]


def predictions(labels=LABELS, predicted=PREDICTED, names=NAMES):
    return Predictions(names, ['a/{}.jpg'.format(i) for i in range(len(labels))],
                       np.array(labels), np.array(predicted), np.array(PROBABILITY[:len(labels)]))


def test_shares_of_each_class_are_counted_by_hand():
    found = predictions()
    assert found.accuracy == pytest.approx(4 / 6)
    assert found.confusion().tolist() == [[2, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    cat, dog, mole, newt = found.classes()
    assert cat == (NAMES[0], 3, 2, pytest.approx(2 / 3), 1.0, pytest.approx(0.8))
    assert dog == ('dog', 2, 1, 0.5, 0.5, 0.5)
    assert mole == ('mole', 0, 0, None, 0.0, 0.0)  # no test image, one wrong prediction
    assert newt == ('newt', 1, 1, 1.0, 1.0, 1.0)
    assert predictions([0, 1], [1, 1]).classes()[0][3:] == (0.0, None, 0.0)
    assert predictions([0, 1], [0, 1]).classes()[3] == ('newt', 0, 0, None, None, None)


def test_the_worst_come_first():
    found = predictions()
    assert found.worst_classes() == [1, 0, 3]  # an untested class is not among them
    assert found.confused() == [(0, 1, 1), (1, 2, 1)]
    assert found.wrong().tolist() == [4, 2]  # the most confident first


def test_predictions_and_shares_come_back_from_their_files(tmp_path):
    write_predictions(str(tmp_path / PREDICTIONS), predictions())
    again = read_predictions(str(tmp_path), list(NAMES))
    for one, other in zip(again, predictions()):
        np.testing.assert_array_equal(one, other)
    assert read_csv(tmp_path / PREDICTIONS)[2] == {
        'image': 'a/2.jpg', 'label': NAMES[0], 'predicted': 'dog', 'probability': '0.6'}
    write_classes(str(tmp_path / CLASSES), predictions())
    rows = read_csv(tmp_path / CLASSES)
    assert [row['class'] for row in rows] == list(NAMES)
    assert rows[2] == {'class': 'mole', 'images': '0', 'correct': '0', 'accuracy': '',  # of none
                       'precision': '0.0', 'f1': '0.0'}


@pytest.mark.parametrize('text, says', [
    (None, 'has no predictions.csv.*evaluate.py'),
    ('image,label,predicted,probability\n', 'predictions.csv is empty'),
    ('image,label,predicted,probability\na,dog,frog,0.5\n', "row 1: predicted is 'frog'")])
def test_damaged_predictions_are_refused(tmp_path, text, says):
    if text is not None:
        (tmp_path / PREDICTIONS).write_text(text)
    with pytest.raises(UserError, match=says):
        read_predictions(str(tmp_path), NAMES)


def test_the_report_names_classes_pairs_and_images():
    text = '\n'.join(report(predictions()))
    assert text.startswith('accuracy 66.7 % of 6 test images\n')
    lines = [line.split() for line in text.splitlines()]
    assert ['dog', '2', '1', '50.0', '50.0', '50.0'] in lines
    assert ['mole', '0', '0', '0.0', '0.0'] in lines
    assert lines.index(['a/4.jpg', 'dog', 'mole', '95.0']) < lines.index(
        ['a/2.jpg', 'cat,', '"tabby"', 'dog', '60.0'])
    everything_right = '\n'.join(report(predictions(LABELS, LABELS)))
    assert 'most' not in everything_right


def test_of_many_classes_the_worst_are_printed():
    names = tuple('class{:03d}'.format(i) for i in range(200))
    labels = np.arange(200)
    predicted = np.where(labels < 5, labels + 1, labels)
    found = Predictions(names, labels.astype(str), labels, predicted, labels / 200)
    text = '\n'.join(report(found))
    assert 'these are the worst of 200 classes' in text
    assert 'class004' in text and 'class150' not in text and text.count('\n') < 50
