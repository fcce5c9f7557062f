"""Draws which classes a network mistakes for which, and its most confident mistakes."""

import contextlib
import functools
import os

import numpy as np

from elastic.data.image_folder import FOLDER
from elastic.data.photo import read_image
from elastic.figures.style import BLUE, WIDTH, write_figure
from elastic.runs.classes import MOST_PAIRS, MOST_PHOTOS, read_predictions, report
from elastic.runs.folder import read_run

TITLE, LEFT, GAP, LINE = 0.55, 0.35, 0.12, 0.14  # inches
NUMBERED = 20  # classes up to which the cells of the matrix hold numbers
NAMED = 40  # classes up to which the axes hold names
LONGEST = 1.5  # inches of a name at an axis
PHOTO_COLUMNS, PHOTO_PIXELS = 6, 192
MEAN = '#222222'  # colour of the line at the mean


def confusion_of_run(folder, output):
    """Draws the confusion matrix of a run; returns its report and the paths written, as lines."""
    summary = read_run(folder).summary
    predictions = read_predictions(folder, summary.get('class_names'))
    title = '{run_name}: {model_name} on {dataset_name}'.format(**summary)
    return report(predictions) + draw_confusion(predictions, title, summary['dataset_name'], output)


def draw_confusion(predictions, title, dataset_name, output):
    """Draws Predictions as a confusion matrix and the accuracy of each class.

    Below are the photos that were most confidently wrong, if the files of a folder: still exist,
    and the most confused and the worst classes if there are too many for numbers in cells.
    Returns the paths written, and a line on photos that are no longer there.
    """
    matrix, (photos, missing) = _Matrix(predictions), _photos(predictions, dataset_name)
    lists = LINE * (MOST_PAIRS + 2.5) if len(predictions.class_names) > NUMBERED else 0
    cell = (WIDTH - GAP) / PHOTO_COLUMNS  # inches, with the gap between two photos
    rows = -(-len(photos) // PHOTO_COLUMNS)
    height = TITLE + matrix.height + lists + (
        rows * (cell + 3 * LINE) + 1.5 * LINE if photos else 0)

    def draw(figure):
        figure.text(GAP / WIDTH, 1 - 0.08 / height, fitted(title, WIDTH - 2 * GAP, 9), va='top',
                    fontsize=9)
        figure.text(
            GAP / WIDTH, 1 - 0.26 / height, va='top', fontsize=8, color='#666666',
            s='accuracy {:.1f} % of {} test images (dashed line){}'.format(
                100 * predictions.accuracy, len(predictions.images),
                '' if lists else "; numbers in cells: % of the label's images"))
        matrix.draw(figure)
        top = height - TITLE - matrix.height  # inches from the bottom
        if lists:
            _draw_lists(figure, predictions, top)
        if photos:
            _draw_photos(figure, predictions, photos, top - lists, cell)
    paths = write_figure(
        output, (WIDTH, height), draw,
        ('label', 'images', 'accuracy') + tuple(predictions.class_names),
        [[row[0], row[1], row[3], *counts]
         for row, counts in zip(predictions.classes(), predictions.confusion())])
    if missing:
        paths.append('{} photos are not drawn: they are no longer in {}'.format(
            missing, dataset_name))
    return paths


# ---------------------------------------------------------------- text

def fitted(name, inches, font, number=None):
    """Returns a name as it is drawn, without its middle if it is wider than `inches`.

    Letters that the font lacks become question marks. number: of a class, which is drawn instead
    of a name with such letters.
    """
    text = ''.join(letter if ord(letter) in drawable_letters() else '?' for letter in name)
    if text != name and number is not None:
        return 'class {}'.format(number)
    name, most = text, len(text)
    while width_of(text, font) > inches and most > 5:
        most = min(most - 1, int(1.2 * most * inches / width_of(text, font)))
        text = '{}…{}'.format(name[:most // 2], name[-(most // 2 - 1):])
    return text.replace('$', r'\$')  # else matplotlib reads mathematics


@functools.lru_cache()
def drawable_letters():
    """Returns the frozenset of the code points that the font of the figures has."""
    from matplotlib.font_manager import findfont, get_font
    return frozenset(get_font(findfont('DejaVu Sans')).get_charmap())


def width_of(text, font):
    """Returns the width of a text in inches; font: its size in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    prop = FontProperties(family='DejaVu Sans')
    return TextPath((0, 0), text.replace('$', 'S'), size=font, prop=prop).get_extents().x1 / 72


# ---------------------------------------------------------------- matrix and bars

class _Matrix:
    """Draws the confusion matrix with a bar for each row. height: inches below the title."""

    def __init__(self, predictions):
        self._predictions, self._size = predictions, len(predictions.class_names)
        self._font = 8 if self._size <= NUMBERED else 6
        self._named, self._numbered = self._size <= NAMED, self._size <= NUMBERED
        self._names = [fitted(name, LONGEST, self._font, i)
                       for i, name in enumerate(predictions.class_names)] if self._named else []
        self._longest = max([0.3] + [width_of(name, self._font) + 0.07 for name in self._names])
        self._right = 0.7 if self._numbered else 0.2  # inches beside the bars
        self._side = min(4.5, max(2.0, 0.4 * self._size),
                         WIDTH - LEFT - self._longest - GAP - 1 - self._right)
        self._turned = self._named and self._longest > self._side / self._size
        self.height = self._side + (self._longest if self._turned else 0.15) + 0.45

    def draw(self, figure):
        """Draws both panels."""
        height = figure.get_figheight()
        left, bottom = LEFT + self._longest, 1 - (TITLE + self._side) / height
        axis = figure.add_axes([left / WIDTH, bottom, self._side / WIDTH, self._side / height])
        self._draw_matrix(figure, axis)
        begin = left + self._side + GAP
        width = min(1.9, WIDTH - begin - self._right)
        self._draw_accuracy(figure.add_axes(
            [begin / WIDTH, bottom, width / WIDTH, self._side / height], sharey=axis))

    def _draw_matrix(self, figure, axis):
        from matplotlib.colors import PowerNorm
        counts = self._predictions.confusion()
        share = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))  # (C, C), %
        # The root shows few mistakes among many images, which a linear scale would leave white.
        image = axis.imshow(np.ma.masked_equal(share, 0), cmap='Blues', aspect='auto',
                            norm=PowerNorm(0.5, 0, 100), interpolation='nearest')
        for spine in axis.spines.values():
            spine.set_visible(True)
        axis.tick_params(length=2, labelsize=self._font)
        axis.set(xlabel='predicted class', ylabel='label')
        if self._named:
            for each, turn in ((axis.xaxis, 90 if self._turned else 0), (axis.yaxis, 0)):
                each.set_ticks(range(self._size))
                each.set_ticklabels(self._names, rotation=turn)
        else:
            axis.set(xlabel='predicted class (number)', ylabel='label (number of the class)')
        if not self._numbered:
            self._draw_scale(figure, axis, image)
            return
        for i, j in np.argwhere(counts):
            axis.text(j, i, '{:.0f}'.format(share[i, j]) if share[i, j] >= 0.5 else '<1',
                      ha='center', va='center', fontsize=8 if self._size <= 10 else 6.5,
                      color='white' if share[i, j] > 40 else 'black')

    @staticmethod
    def _draw_scale(figure, axis, image):
        box, height = axis.get_position(), figure.get_figheight()
        bar = figure.add_axes([box.x1 - 0.28, box.y1 + 0.05 / height, 0.28, 0.07 / height])
        figure.colorbar(image, cax=bar, orientation='horizontal', ticks=[0, 1, 5, 20, 50, 100])
        bar.xaxis.set_ticks_position('top')
        bar.tick_params(labelsize=6, length=2, pad=1)
        bar.text(-0.03, 0.5, "% of the label's images", fontsize=6, ha='right', va='center',
                 transform=bar.transAxes)

    def _draw_accuracy(self, axis):
        rows = self._predictions.classes()
        axis.barh(range(self._size), [100 * (row[3] or 0) for row in rows], color=BLUE, linewidth=0,
                  height=0.8 if self._named else 1)
        axis.axvline(100 * self._predictions.accuracy, color=MEAN, linewidth=0.8, linestyle='--')
        axis.set(xlim=(0, 100), xlabel='accuracy (%)')
        axis.tick_params(labelleft=False, left=False, labelsize=self._font)
        axis.grid(True, axis='x')
        for i, (_, images, correct, *_) in enumerate(rows if self._numbered else ()):
            axis.text(103, i, '{} of {}'.format(correct, images) if images else 'no images',
                      va='center', fontsize=7)


# ---------------------------------------------------------------- lists and photos

def _draw_lists(figure, predictions, top):
    """Draws the most confused pairs of classes, and the worst classes. top: inches."""
    rows, names = predictions.classes(), predictions.class_names
    pairs = ['{} of {}:  {} → {}'.format(count, rows[i][1], fitted(names[i], 1.6, 7, i),
                                         fitted(names[j], 1.6, 7, j))
             for i, j, count in predictions.confused()[:MOST_PAIRS]]
    worst = ['{:.0f} % of {}:  {}'.format(100 * rows[i][3], rows[i][1], fitted(names[i], 1.9, 7, i))
             for i in predictions.worst_classes()[:MOST_PAIRS]]
    for x, title, lines in ((GAP, 'most confused (label → predicted)', pairs),
                            (4.4, 'least accurate', worst)):
        for i, text in enumerate([title] + lines):
            figure.text(x / WIDTH, (top - i * LINE) / figure.get_figheight(), text, va='top',
                        fontsize=7 if i else 8)


def _photos(predictions, dataset_name):
    """Returns ({number: image} of the most confidently wrong photos, how many are unreadable)."""
    found, wrong = {}, predictions.wrong()[:MOST_PHOTOS]
    if not dataset_name.startswith(FOLDER):
        return found, 0
    folder = os.path.expanduser(dataset_name[len(FOLDER):])
    for i in wrong:
        with contextlib.suppress(ValueError):  # moved, or damaged meanwhile
            found[i] = read_image(os.path.join(folder, predictions.images[i]), PHOTO_PIXELS)
    return found, len(wrong) - len(found)


def _draw_photos(figure, predictions, photos, top, cell):
    """Draws photos in rows. top: inches. cell: width of a photo, with the gap to the next one."""
    height, side = figure.get_figheight(), cell - GAP
    figure.text(GAP / WIDTH, top / height, 'most confidently wrong (label → predicted)', va='top',
                fontsize=8)
    for place, (i, photo) in enumerate(photos.items()):
        row, column = divmod(place, PHOTO_COLUMNS)
        bottom = top - 1.5 * LINE - row * (cell + 3 * LINE) - side
        axis = figure.add_axes([(GAP + column * cell) / WIDTH, bottom / height, side / WIDTH,
                                side / height])
        axis.imshow(photo)
        axis.axis('off')
        label, predicted = [fitted(predictions.class_names[number], side - 0.15, 6.5, number)
                            for number in (predictions.labels[i], predictions.predicted[i])]
        axis.text(0, -0.03, '{}\n→ {}\n{:.0f} %'.format(
            label, predicted, 100 * predictions.probability[i]), transform=axis.transAxes,
            fontsize=6.5, va='top')
