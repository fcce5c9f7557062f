"""Tests the figure of a confusion matrix: its numbers, names and photos."""

import warnings

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import plot
from elastic.errors import UserError
from elastic.figures import confusion
from elastic.figures.confusion import draw_confusion, fitted, width_of
from elastic.runs.classes import PREDICTIONS, Predictions, write_predictions
from image_folders import encoded, write
from made_runs import assert_figure, make_run, read_csv, watched_figures


def made(size, images=4, wrong=0.3, names=None):
    """Returns Predictions for `images` of each of `size` classes, most of them right."""
    rng = np.random.RandomState(size)
    labels = np.repeat(np.arange(size), images)
    predicted = np.where(rng.rand(len(labels)) < wrong, rng.randint(0, size, len(labels)), labels)
    names = names or ['kind {}'.format(i) for i in range(size)]
    return Predictions(names, ['{}/{}.png'.format(names[k], i) for i, k in enumerate(labels)],
                       labels, predicted, rng.uniform(0.3, 1, len(labels)))


@pytest.fixture
def figures(monkeypatch):
    return watched_figures(monkeypatch)


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda each: hasattr(each, 'get_text'))
            if text.get_text()]


def overlapping(figure):
    """Returns the texts that leave the figure."""
    FigureCanvasAgg(figure).draw()
    box = figure.bbox
    return [text.get_text() for text in figure.findobj(lambda each: hasattr(each, 'get_text'))
            if text.get_text() and text.get_visible() and not (
                box.x0 - 1 <= text.get_window_extent().x0 <= text.get_window_extent().x1
                <= box.x1 + 1)]


def test_the_figure_of_a_run_is_complete_and_its_numbers_are_the_counts(tmp_path, capsys):
    predictions = made(3)
    run = make_run(tmp_path, 'run', class_names=list(predictions.class_names))
    write_predictions(str(run / PREDICTIONS), predictions)
    output = tmp_path / 'confusion'
    plot.main(['confusion', str(run), '--output', str(output)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith('accuracy {:.1f} %'.format(100 * predictions.accuracy))
    assert_figure(printed[-3:], output)
    rows = read_csv(printed[-1])
    assert [[int(row[name]) for name in predictions.class_names] for row in rows] == (
        predictions.confusion().tolist())
    assert [float(row['accuracy']) for row in rows] == [
        row[3] for row in predictions.classes()]


@pytest.mark.parametrize('size', [2, 20, 21, 40, 41, 200])
@pytest.mark.thorough
def test_numbers_names_or_lists_are_drawn_by_the_number_of_classes(figures, tmp_path, size):
    predictions = made(size)
    draw_confusion(predictions, 'run', 'digits', tmp_path / 'figure')
    figure, = figures
    found = texts(figure)
    counts = predictions.confusion()
    share = np.round(100 * counts[0, 0] / counts[0].sum())
    assert ('{:.0f}'.format(share) in found) == (size <= 20) or size > 20
    assert ('4 of 4' in found) == (size <= 20)
    assert ('kind 1' in found) == (size <= 40)
    assert ('least accurate' in found) == (size > 20)
    first, second, count = predictions.confused()[0]
    pair = '{} of 4:  kind {} → kind {}'.format(count, first, second)
    assert (pair in found) == (size > 20)
    assert not overlapping(figure)


def test_names_of_any_kind_can_be_drawn(figures, tmp_path):
    names = ('$5 and $\\frac$', '犬', 'W' * 300, 'a' * 80, '_{x}^', 'ß')
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # of letters that the font lacks
        draw_confusion(made(6, names=names), 'run $1$ on 犬.keras', 'digits', tmp_path / 'figure')
        assert not overlapping(figures[0])
    found = texts(figures[0])
    assert 'class 1' in found and 'ß' in found and '_{x}^' in found


def test_a_name_is_cut_in_its_middle_until_it_fits():
    assert fitted('daisy', 1, 8) == 'daisy'
    cut = fitted('n02099601-golden_retriever', 1, 8)
    assert cut.startswith('n020') and cut.endswith('ever') and '…' in cut
    assert 0.85 < width_of(cut, 8) <= 1


def test_untested_classes_and_a_faultless_network_are_drawn(figures, tmp_path):
    predictions = made(3, wrong=0)
    draw_confusion(predictions._replace(class_names=list('abcd')), 'run', 'digits',
                   tmp_path / 'figure')
    assert 'no images' in texts(figures[0])


def test_the_most_confident_mistakes_are_shown_while_their_files_exist(figures, tmp_path):
    predictions, data = made(2, 20, 1.0), 'folder:{}'.format(tmp_path)
    wrong = predictions.wrong()
    assert len(wrong) > 12
    assert draw_confusion(predictions, 'run', data, tmp_path / 'empty')[3:] == [
        '12 photos are not drawn: they are no longer in ' + data]
    for i in wrong[:12]:
        write(tmp_path / predictions.images[i], encoded(int(i), 'png'))
    write(tmp_path / predictions.images[wrong[1]], b'damaged since')
    assert draw_confusion(predictions, 'run', data, tmp_path / 'full')[3:] == [
        '1 photos are not drawn: they are no longer in ' + data]
    empty, full = figures
    assert len(full.axes) == len(empty.axes) + 11
    assert full.get_figheight() > empty.get_figheight() + 2
    assert any(text.endswith('{:.0f} %'.format(100 * predictions.probability[wrong[0]]))
               for text in texts(full))


def test_a_run_of_an_older_version_is_refused(tmp_path):
    run = make_run(tmp_path, 'run')
    with pytest.raises(UserError, match="run 'run': has no predictions.csv"):
        confusion.confusion_of_run(run, tmp_path / 'figure')
