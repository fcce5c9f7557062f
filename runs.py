"""The run folder logs/<run_name>/: what a training run writes and what the figures read.

    settings.json   the flags, written first: a folder is reused only by the same settings
    epochs.csv      a row an epoch, written as it ends
    selections.csv  a row a tensor for each selection
    summary.json    written last: a folder without it is an unfinished run
    events.*        TensorBoard
    checkpoint/     weights, where asked for
"""

import contextlib
import csv
import glob
import json
import math
import os
import shutil
from typing import NamedTuple

import numpy as np

import command_line
from command_line import UserError
from schemes import SCHEMES

SUMMARY_KEYS = ('scheme', 'rho', 'model_name', 'importance', 'dataset_name', 'seed', 'epochs',
                'stack', 'host')
EPOCH_COLUMNS = ('epoch', 'learning_rate', 'train_accuracy', 'train_loss', 'train_penalty',
                 'test_accuracy', 'test_loss', 'step_ms', 'step_seconds', 'selection_seconds',
                 'importance_seconds', 'validation_seconds', 'train_seconds')


VARIED = ('importance', 'interval', 'granularity', 'probe_batches', 'prune_interval',
          'prune_penalty_ratio', 'prune_threshold', 'views', 'augmentation', 'train_images',
          'prefix_cache')  # of runs of one scheme


class SelectionRow(NamedTuple):
    """One tensor of one selection; importance and time_share are None where none was recorded."""
    epoch: int
    tensor: int
    name: str
    shape: str
    selected: bool
    importance: float
    time_share: float


class Run(NamedTuple):
    """The records of one finished run; `epochs` maps a column to its values, one an epoch."""
    summary: dict
    epochs: dict
    selections: list


def fault(folder, text):
    """The UserError that names the run in `folder`."""
    return UserError(f"run '{os.path.basename(os.path.abspath(folder))}': {text}")


def run_folder(run, logs_dir):
    """Path of the run that a command line gives by its name under --logs_dir, or by its path."""
    named = os.path.join(logs_dir, run)
    path = os.path.exists(run) or os.path.dirname(run)
    return run if path and not os.path.exists(named) else named


def read_runs(folders):
    """The Runs of these folders, as read_run; UserError for one that is given twice: it would count
    as two.
    """
    paths = [os.path.realpath(folder) for folder in folders]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise fault(path, 'given twice')
    return [read_run(folder) for folder in folders]


def read_run(folder):
    """The Run in `folder`, checked: UserError if it is missing, unfinished or has a hole."""
    folder = os.path.abspath(folder)
    if not os.path.isdir(folder):
        parent, name = os.path.split(folder)
        runs = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
        raise fault(folder, f'no folder {folder}{command_line.nearest(name, runs)}')
    path = os.path.join(folder, 'summary.json')
    if not os.path.exists(path):
        raise fault(folder, f'unfinished: it has no {path}')
    summary = read_json(path, f"run '{os.path.basename(folder)}': ")
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    if missing:
        raise fault(folder, f"summary.json lacks {', '.join(missing)}")
    if summary['scheme'] not in SCHEMES or not summary.get('finished', True):
        raise fault(folder, f"summary.json: scheme is {summary['scheme']}, finished is "
                     f"{summary.get('finished')}; allowed are true and {', '.join(SCHEMES)}")
    summary['run_name'] = os.path.basename(folder)
    for key in VARIED:
        summary.setdefault(key, None)
    return Run(summary, _read_epochs(folder, summary['epochs']),
               _read_selections(folder, summary['epochs']))


def read_json(path, where=''):
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(f'{where}cannot read {path}: {error}')
    if not isinstance(content, dict):
        raise UserError(f'{where}{path} is not a JSON object')
    return content


def finite(text):
    if not math.isfinite(float(text)):
        raise ValueError
    return float(text)


def _read_csv(folder, name, kinds):
    """The rows of a CSV file as dicts; kinds: column -> what turns the text of a cell into a value.

    UserError, naming run, file, row and column, for a missing column or a cell of another kind.
    """
    try:
        with open(os.path.join(folder, name), encoding='utf-8', newline='') as file:
            reader = csv.DictReader(file)
            rows, header = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise fault(folder, f'{name} cannot be read: {error}')
    for column, kind in kinds.items():
        if column not in header:
            raise fault(folder, f'{name} has no column {column}')
        for index, row in enumerate(rows):
            try:
                row[column] = kind(row[column])
            except (KeyError, TypeError, ValueError):
                raise fault(folder, f"{name}, row {index + 1}: {column} is "
                             f"'{row[column] or ''}', which is not a value of this column")
    return rows


def _read_epochs(folder, count):
    rows = _read_csv(folder, 'epochs.csv', dict.fromkeys(
        [column for column in EPOCH_COLUMNS if column != 'train_penalty'], finite))
    for index, row in enumerate(rows):
        row['train_penalty'] = finite(row.get('train_penalty') or 0)  # older runs have none
        if row['epoch'] != index + 1:
            raise fault(folder, f"epochs.csv, row {index + 1}: epoch is {row['epoch']:g}; epochs "
                         'must be 1, 2, ... in order')
    if not rows or len(rows) != count:
        raise fault(folder, f'unfinished: epochs.csv has {len(rows)} of the {count} epochs in '
                     'summary.json')
    epochs = {column: [row[column] for row in rows] for column in EPOCH_COLUMNS}
    if np.any(np.diff(epochs['train_seconds']) <= 0):
        raise fault(folder, 'epochs.csv: train_seconds does not grow from epoch to epoch')
    return epochs


def _read_selections(folder, epochs):
    if not os.path.exists(os.path.join(folder, 'selections.csv')):
        return []
    kinds = {'epoch': int, 'tensor': int, 'name': str, 'shape': str,
             'selected': {'0': False, '1': True}.__getitem__}
    for column in ('importance', 'time_share'):
        kinds[column] = lambda text: None if text == '' else finite(text)
    rows = [SelectionRow(*[row[column] for column in SelectionRow._fields])
            for row in _read_csv(folder, 'selections.csv', kinds)]
    tensors = {}
    for row in rows:
        tensors.setdefault(row.epoch, []).append(row.tensor)
    if tensors and not (min(tensors) == 1 and max(tensors) <= epochs):
        raise fault(folder, f'selections.csv: selections of epochs {min(tensors)} to '
                     f'{max(tensors)} in a run of epochs 1 to {epochs}')
    for epoch, given in sorted(tensors.items()):
        if sorted(given) != list(range(len(tensors[1]))):
            raise fault(folder, f'selections.csv: the selection of epoch {epoch} does not name '
                         f'each of the tensors 0 to {len(tensors[1]) - 1} once')
    return rows


def distinctions(values, rivals):
    """[(name, value)] of VARIED where the rivals differ; each is a tuple of values in its order.

    Without those that are None: left at its default, or of before there was such a flag.
    """
    return [(name, value) for name, value, others in zip(VARIED, values, zip(*rivals))
            if value is not None and len(set(others)) > 1]


def selection_per_epoch(run):
    """What was trained in each epoch: a selection holds until the next one.

    Returns mask (epochs, N) bool and time_share (epochs, N) float64, NaN where none was recorded.
    """
    mask = np.zeros((run.summary['epochs'], 1 + max(row.tensor for row in run.selections)), bool)
    share = np.full(mask.shape, np.nan)
    for row in sorted(run.selections, key=lambda row: row.epoch):
        mask[row.epoch - 1:, row.tensor] = row.selected
        share[row.epoch - 1:, row.tensor] = np.nan if row.time_share is None else row.time_share
    return mask, share


def is_finished(folder, settings):
    """True if the folder holds a finished run of these settings; changes nothing.

    settings: dict that JSON can hold. UserError where the folder holds anything but a run of the
    same settings.
    """
    if not os.path.isdir(folder) or all(name.endswith('.part') for name in os.listdir(folder)):
        return False
    path = os.path.join(folder, 'settings.json')
    if not os.path.exists(path):
        raise fault(folder, '{} exists and is not a run of this project; choose another '
                    '--run_name'.format(folder))
    before = read_json(path)
    changed = ['{} {} there, {} now'.format(key, before.get(key), settings.get(key))
               for key in sorted(set(before) | set(settings))
               if before.get(key) != settings.get(key)]
    if changed:
        raise fault(folder, 'exists with other settings ({}); choose another --run_name or remove '
                    '{}'.format(', '.join(changed), folder))
    try:  # a power cut may leave a summary that is empty
        return bool(read_json(os.path.join(folder, 'summary.json')).get('finished'))
    except UserError:
        return False


def open_run(folder, settings):
    """Makes the folder ready; the records of an interrupted run are cleared: it starts over.

    Returns the lock that Recorder holds, or None and changes nothing where the run is finished by
    now. UserError as is_finished, and where another process trains this run.
    """
    os.makedirs(folder, exist_ok=True)
    lock = _lock(folder)
    with contextlib.ExitStack() as unless_opened:
        unless_opened.callback(os.close, lock)
        if is_finished(folder, settings):  # what held before the lock need not hold any more
            return None
        _clear(folder)
        write_json(os.path.join(folder, 'settings.json'), settings)
        unless_opened.pop_all()
    return lock


def _clear(folder):
    """Removes the records of a run, but for its settings."""
    for stale in ['summary.json', 'epochs.csv', 'selections.csv', 'epochs.txt'] + [
            os.path.basename(path) for path in glob.glob(os.path.join(folder, 'events.out.*'))]:
        if os.path.exists(os.path.join(folder, stale)):
            os.remove(os.path.join(folder, stale))
    for checkpoint in ('checkpoint', 'checkpoint.part'):
        shutil.rmtree(os.path.join(folder, checkpoint), ignore_errors=True)


def _lock(folder):
    """An exclusive lock on a run's folder, which the system frees with the process at the latest.

    A number, to be closed with os.close.
    """
    import fcntl
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise fault(folder, 'another process is training it; wait for it or stop it')
    return lock


def write_json(path, content):
    """Writes JSON so that the file appears whole or not at all, even where the power fails."""
    with open(path + '.part', 'w') as out:
        json.dump(content, out, indent=1, sort_keys=True)
        out.write('\n')
        out.flush()
        os.fsync(out.fileno())
    os.replace(path + '.part', path)


class Recorder:
    """Writes the records of one run as it goes: CSV for the figures, TensorBoard for the eye.

    lock: of open_run, freed when the run is finished or this object goes. As a context manager it
    leaves nothing behind of a run that fails before its first epoch ends.
    """

    def __init__(self, folder, lock=None):
        import tensorflow as tf
        self.folder, self._lock = folder, lock
        self.summary = tf.summary
        self.writer = tf.summary.create_file_writer(folder)
        self.masks = []  # (first epoch, mask), one a selection

    def epoch(self, row):
        """row: dict of EPOCH_COLUMNS; every value also becomes a TensorBoard scalar."""
        self._append('epochs.csv', EPOCH_COLUMNS, [[row[column] for column in EPOCH_COLUMNS]])
        tags = {'train/accuracy': 'train_accuracy', 'train/classification_loss': 'train_loss',
                'train/penalty': 'train_penalty', 'train/learning_rate': 'learning_rate',
                'test/accuracy': 'test_accuracy',
                'test/classification_loss': 'test_loss', 'time/step_ms': 'step_ms',
                'time/train_seconds': 'train_seconds'}
        self._scalars({tag: row[column] for tag, column in tags.items()}, int(row['epoch']))

    def elastic(self, scalars, epoch):
        """scalars: name -> value, shown in TensorBoard as elastic/<name>."""
        self._scalars({'elastic/' + name: value for name, value in scalars.items()}, epoch)

    def _scalars(self, values, epoch):
        with self.writer.as_default():
            for tag, value in values.items():
                self.summary.scalar(tag, value, step=epoch)
        self.writer.flush()

    def selection(self, epoch, names, shapes, mask, importance=None, time_share=None):
        """One selection, made before `epoch`; importance, time_share: (N,) or None."""
        blank = [''] * len(names)
        rows = zip([epoch] * len(names), range(len(names)), names,
                   ['x'.join(map(str, shape)) for shape in shapes], np.asarray(mask, dtype=int),
                   blank if importance is None else importance,
                   blank if time_share is None else time_share)
        self._append('selections.csv', SelectionRow._fields, rows)
        self.masks.append((epoch, np.asarray(mask, dtype=bool)))
        with self.writer.as_default():
            self.summary.image('elastic/mask', mask_image(self.masks), step=epoch)
        self.writer.flush()

    def finish(self, summary):
        """Writes summary.json: from now on the run counts as finished."""
        self.writer.close()
        for name in ('epochs.csv', 'selections.csv'):  # on the disk before the summary is
            if os.path.exists(os.path.join(self.folder, name)):
                with open(os.path.join(self.folder, name), 'a') as records:
                    os.fsync(records.fileno())
        write_json(os.path.join(self.folder, 'summary.json'), dict(summary, finished=True))
        self._unlock()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.writer.close()
        if not os.path.exists(os.path.join(self.folder, 'epochs.csv')):
            _clear(self.folder)
            os.remove(os.path.join(self.folder, 'settings.json'))
            if not os.listdir(self.folder):
                os.rmdir(self.folder)
        self._unlock()

    def _unlock(self):
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    __del__ = _unlock

    def text(self):
        """Writes epochs.txt: the table of epochs for people."""
        with open(os.path.join(self.folder, 'epochs.csv'), newline='') as source:
            header, *rows = list(csv.reader(source))
        rows = [[row[0]] + ['{:.5g}'.format(float(cell)) for cell in row[1:]] for row in rows]
        with open(os.path.join(self.folder, 'epochs.txt'), 'w') as out:
            out.write(command_line.table(header, rows) + '\n')

    def _append(self, name, header, rows):
        path = os.path.join(self.folder, name)
        new = not os.path.exists(path)
        with open(path, 'a', newline='') as out:
            table = csv.writer(out, lineterminator='\n')
            if new:
                table.writerow(header)
            table.writerows(rows)


def mask_image(masks, tensor_pixels=4, epoch_pixels=16):
    """(1, N * tensor_pixels, epochs * epoch_pixels, 3) uint8: trained tensors in blue.

    masks: (first epoch, (N,) bool) of each selection. The output is at the top, as in a network
    drawn from the ground up; a selection is as wide as the epochs that it lasted.
    """
    columns = []
    for i, (epoch, mask) in enumerate(masks):
        until = masks[i + 1][0] if i + 1 < len(masks) else epoch + 1
        columns += [mask] * (until - epoch)
    grid = np.stack(columns, axis=1)[::-1]  # (N, epochs)
    pixels = np.where(grid[..., None], (0, 114, 178), (233, 233, 233)).astype(np.uint8)
    return pixels.repeat(tensor_pixels, axis=0).repeat(epoch_pixels, axis=1)[None]
