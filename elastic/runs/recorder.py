"""Writes the records of a run as it trains: tables that folder.py reads, and TensorBoard."""

import contextlib
import csv
import os
import shlex
import shutil

import numpy as np
import tensorflow as tf

from elastic import errors, texts
from elastic.data.photo_list import PHOTOS, listed
from elastic.data.replay import FOLDER as REPLAY
from elastic.files import flush_folder, make_folder, remove_parts, whole, write_json, write_rows
from elastic.runs import checkpoint
from elastic.runs.claim import Claim
from elastic.runs.classes import (
    CLASSES,
    PREDICTIONS,
    Predictions,
    read_predictions,
    write_classes,
    write_predictions,
)
from elastic.runs.exams import EXAMS, FORGETTING
from elastic.runs.folder import (
    DEVICE_COLUMNS,
    RATE_COLUMNS,
    Run,
    SelectionRow,
    epoch_columns,
    fault,
    is_finished,
    judged_on,
    read_selections,
    selection_per_epoch,
)

TAGS = {'train/accuracy': 'train_accuracy', 'train/classification_loss': 'train_loss',
        'train/penalty': 'train_penalty', 'train/learning_rate': 'learning_rate',
        'time/step_ms': 'step_ms', 'time/train_seconds': 'train_seconds'}
TAGS.update({'device/' + column: column for column in DEVICE_COLUMNS})
MOST_COLUMNS = 256  # of mask_picture; with more epochs, one stands for 2, 3, 4 ... of them
TENSOR_PIXELS, EPOCH_PIXELS = 4, 16
COLOURS = np.array([(233, 233, 233), (0, 114, 178)], np.uint8)


def open_run(folder, settings, resumed=None, restart=False, photos=None):
    """Prepares the folder of a run; removes old records unless the run resumes.

    settings: dict of flags.decisive_settings.
    resumed: the tree of the checkpoint that the run resumes from; None if it starts.
    restart: whether to replace any run in the folder. photos: as in data.images.Images, or None.
    Returns the Claim for Recorder; None, with nothing changed, if the run is already finished.
    Raises UserError as is_finished does, and if another process trains or has trained this run.
    """
    make_folder(folder)
    with contextlib.ExitStack() as unless_opened:
        claim = Claim(folder)
        unless_opened.callback(claim.close)
        if is_finished(folder, settings, restart):  # another process may have finished it
            return None
        expected = [] if resumed is None else resumed['stamps']
        if not restart and checkpoint.stamps(folder) != expected:
            raise fault(folder, 'another process has trained it in the meantime; start again')
        remove_parts(folder)
        if resumed is None:
            _clear(folder)
        elif resumed['damaged']:
            checkpoint.remove_damaged(folder)
        write_json(os.path.join(folder, 'settings.json'), settings)
        if photos and resumed is None:
            write_json(os.path.join(folder, PHOTOS), listed(photos))
        unless_opened.pop_all()
    return claim


def records_of(folder):
    """Returns the names of the files that grow while a run trains."""
    return [name for name in os.listdir(folder) if name.startswith('events.out.')
            or name in ('epochs.csv', 'selections.csv', 'rates.csv')]


def _clear(folder):
    """Removes the checkpoints of a run and its summary, then all other records but the settings."""
    checkpoint.remove(folder)
    for stale in [['summary.json'],
                  ['epochs.txt', 'flags.txt', PHOTOS, PREDICTIONS, CLASSES, EXAMS, FORGETTING]
                  + records_of(folder)]:
        for name in stale:
            if os.path.exists(os.path.join(folder, name)):
                os.remove(os.path.join(folder, name))
        flush_folder(folder)  # else a power cut may leave the summary of records that are gone
    for name in ('checkpoint', REPLAY):
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def selection_rows(epoch, names, shapes, mask, importance=None, time_share=None):
    """Returns the rows of a selection for a file of SelectionRow; arguments: see Recorder."""
    blank = [''] * len(names)
    return zip([epoch] * len(names), range(len(names)), names,
               ['x'.join(map(str, shape)) for shape in shapes], np.asarray(mask, dtype=int),
               blank if importance is None else importance,
               blank if time_share is None else time_share)


def mask_picture(mask):
    """Returns trained tensors in blue over the epochs, the output layer at the top.

    mask: (epochs, N) bool. Returns (1, N * TENSOR_PIXELS, columns * EPOCH_PIXELS, 3) uint8.
    """
    stride = -(-len(mask) // MOST_COLUMNS)
    grid = mask[::stride].T[::-1].astype(int)  # (N, columns)
    return COLOURS[grid].repeat(TENSOR_PIXELS, axis=0).repeat(EPOCH_PIXELS, axis=1)[None]


class Recorder:
    """Writes the records of one run: CSV for the figures, TensorBoard for people.

    claim: from open_run; closed on exit, or when this object is deleted.
    resumed: the result of `state` to resume from; what was written later is removed.
    As a context manager, it removes the records of a run that fails before it can be resumed.
    """

    def __init__(self, folder, claim=None, resumed=None):
        self.folder, self._claim = folder, claim
        if resumed is not None:
            self._rewind(resumed)
        with self._for_tensorboard():
            self.writer = tf.summary.create_file_writer(os.fsencode(folder))

    def _path(self, name):
        return os.path.join(self.folder, name)

    def epoch(self, row):
        """Records an epoch; row: dict of folder.epoch_columns."""
        columns, images = epoch_columns(row), judged_on(row)
        self._append('epochs.csv', columns, [[row[column] for column in columns]])
        tags = dict(TAGS, **{images + '/accuracy': images + '_accuracy',
                             images + '/classification_loss': images + '_loss'})
        self._scalars({tag: row[column] for tag, column in tags.items()
                       if row[column] is not None}, int(row['epoch']))

    def elastic(self, scalars, epoch):
        """Records scalars, name -> value, in TensorBoard as elastic/<name>."""
        self._scalars({'elastic/' + name: value for name, value in scalars.items()}, epoch)

    def range_test(self, test, epoch):
        """Records a rate.RangeTest before this epoch: rates.csv, and TensorBoard."""
        rows = list(zip(test.rates, test.before, test.losses, test.change))
        self._append('rates.csv', RATE_COLUMNS, [(epoch,) + row + (test.rate,) for row in rows])
        for number, row in enumerate(rows):
            self._scalars({'range_test/' + name: value for name, value in zip(
                RATE_COLUMNS[1:], row)}, number)

    def exams(self, scores, epoch):
        """Shows exams.Scores of earlier runs in TensorBoard, before training and after `epoch`."""
        for score in scores:
            if not score.class_name:
                self._scalars({'forgetting/' + score.run: score.before}, 0)
                self._scalars({'forgetting/' + score.run: score.after}, epoch)

    def _scalars(self, values, epoch):
        with self._for_tensorboard(), self.writer.as_default():
            for tag, value in values.items():
                tf.summary.scalar(tag, value, step=epoch)
            self.writer.flush()

    @contextlib.contextmanager
    def _for_tensorboard(self):
        """Within this context, a disk that fails ends the events for TensorBoard, not the run."""
        try:
            yield
        except tf.errors.OpError as error:
            self.writer = tf.summary.create_noop_writer()
            print('no more events for TensorBoard, as they cannot be written ({}); training '
                  'continues'.format(errors.reason(error)))

    def selection(self, epoch, names, shapes, mask, importance=None, time_share=None):
        """Records the selection before `epoch`. importance, time_share: (N,) or None."""
        self._append('selections.csv', SelectionRow._fields, selection_rows(
            epoch, names, shapes, mask, importance, time_share))

    def _draw(self, summary):
        """Shows in TensorBoard which tensors were trained when.

        After resuming, a second worker has only the later selections; nobody reads its records.
        """
        selections = read_selections(self.folder)
        if not selections:
            return
        mask, _ = selection_per_epoch(Run(summary, {}, selections))
        with self._for_tensorboard(), self.writer.as_default():
            tf.summary.image('elastic/mask', mask_picture(mask), step=len(mask))

    def state(self):
        """Flushes all records to the disk; returns file name -> bytes, which `resumed` takes."""
        with self._for_tensorboard():
            self.writer.flush()
        sizes = {}
        for name in records_of(self.folder):
            with open(self._path(name), 'rb') as file:
                os.fsync(file.fileno())
                sizes[name] = os.fstat(file.fileno()).st_size
        flush_folder(self.folder)
        return sizes

    def _rewind(self, sizes):
        present = {name: os.path.getsize(self._path(name)) for name in records_of(self.folder)}
        short = [name for name in sorted(sizes) if present.get(name, 0) < sizes[name]
                 and name.endswith('.csv')]  # TensorBoard's may be deleted
        if short:
            raise fault(self.folder, '{} is shorter than at the last checkpoint; start over with '
                        '--restart'.format(', '.join(short)))
        for name, size in present.items():
            if name not in sizes:
                os.remove(self._path(name))
            elif size > sizes[name]:
                os.truncate(self._path(name), sizes[name])

    def predictions(self, dataset, tested):
        """Writes predictions.csv. tested: epoch.Evaluation of the test images of `dataset`."""
        write_predictions(self._path(PREDICTIONS), Predictions(
            dataset.class_names, dataset.test_names, *tested[2:]))

    def classes(self, class_names):
        """Writes classes.csv, from predictions.csv."""
        write_classes(self._path(CLASSES), read_predictions(self.folder, class_names))

    def finish(self, summary):
        """Writes summary.json, which marks the run as finished."""
        self._draw(summary)
        self.state()  # puts all records on the disk before the summary
        self._close()
        write_json(self._path('summary.json'), dict(summary, finished=True))
        checkpoint.remove(self.folder)

    def __enter__(self):
        return self

    def _close(self):
        with self._for_tensorboard():
            self.writer.close()

    def __exit__(self, *error):
        self._close()
        if not (os.path.exists(self._path('epochs.csv')) or checkpoint.stamps(self.folder)):
            _clear(self.folder)
            os.remove(self._path('settings.json'))
            self._close_claim()
            if not os.listdir(self.folder):
                os.rmdir(self.folder)
        self._close_claim()

    def _close_claim(self):
        if self._claim is not None:
            self._claim.close()

    __del__ = _close_claim

    def flags(self, lines):
        """Writes flags.txt, with which main.py repeats the run. lines: of flags.flag_lines."""
        path = self._path('flags.txt')
        lines = ['# To repeat this run: python main.py @{}, with --restart once it is finished'
                 .format(shlex.quote(path))] + lines
        with whole(path) as part, open(part, 'wb') as out:
            out.write(os.fsencode('\n'.join(lines) + '\n'))

    def text(self):
        """Writes epochs.txt, the table of epochs for people."""
        with open(self._path('epochs.csv'), newline='') as source:
            header, *rows = list(csv.reader(source))
        rows = [[row[0]] + [cell and '{:.5g}'.format(float(cell)) for cell in row[1:]]
                for row in rows]
        with whole(self._path('epochs.txt')) as part, open(part, 'w') as out:
            out.write(texts.table(header, rows) + '\n')

    def _append(self, name, header, rows):
        path = self._path(name)
        write_rows(path, ([] if os.path.exists(path) else [header]) + list(rows), 'a')
