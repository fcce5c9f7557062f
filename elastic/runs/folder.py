"""Reads the folder of a run, logs/<run_name>/, which recorder.py writes.

docs/records.md lists its files. settings.json is written first: only the same settings may reuse a
folder. summary.json is written last: a folder without it is an unfinished run.
"""

import csv
import os
from typing import NamedTuple

import numpy as np

from elastic import errors
from elastic.errors import UserError, finite
from elastic.files import PART, read_json
from elastic.schemes.fixed import SCHEMES
from elastic.settings import FLAGS, VARIED

TRAINED_BY = 'trained_by'
DEVICE_COLUMNS = ('temperature_c', 'cpu_mhz', 'throttled')  # empty if the device reports none
RATE_COLUMNS = ('epoch', 'learning_rate', 'loss_before', 'loss', 'change', 'chosen')
EPOCH_COLUMNS = ('epoch', 'learning_rate', 'train_accuracy', 'train_loss', 'train_penalty',
                 'test_accuracy', 'test_loss', 'step_ms', 'step_seconds', 'selection_seconds',
                 'importance_seconds', 'validation_seconds', 'train_seconds') + DEVICE_COLUMNS
SUMMARY_KEYS = ('scheme', 'rho', 'model_name', 'dataset_name', 'seed', 'epochs', 'stack', 'host',
                'throttled_epochs')


def judged_on(record):
    """Returns the images that judged an epoch or all epochs of a run: 'test' or 'validation'.

    record: a row of epochs.csv or the summary.
    """
    return 'validation' if 'validation_accuracy' in record else 'test'


def epoch_columns(record):
    """Returns the columns of epochs.csv; with validation images, these replace the test images.

    record: as in judged_on.
    """
    return tuple(column.replace('test_', judged_on(record) + '_') for column in EPOCH_COLUMNS)


class SelectionRow(NamedTuple):
    """Holds one tensor of one selection; importance, time_share: None if not recorded."""
    epoch: int
    tensor: int
    name: str
    shape: str
    selected: bool
    importance: float
    time_share: float


class Run(NamedTuple):
    """Holds the records of one finished run.

    epochs: column -> one value per epoch; None in DEVICE_COLUMNS if the device reported nothing.
    """
    summary: dict
    epochs: dict
    selections: list


def fault(folder, text):
    """Returns a UserError that names the run in `folder`."""
    return UserError(f"run '{os.path.basename(os.path.abspath(folder))}': {text}")


def run_folder(run, logs_dir):
    """Returns the path of a run, given its path or its name under --logs_dir."""
    named = os.path.join(logs_dir, run)
    path = os.path.exists(run) or os.path.dirname(run)
    return run if path and not os.path.exists(named) else named


def read_runs(folders):
    """Returns the Runs in these folders; raises UserError as read_run, or if one is repeated."""
    paths = [os.path.realpath(folder) for folder in folders]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise fault(path, 'given twice; name each run once')
    return [read_run(folder) for folder in folders]


def read_run(folder):
    """Returns the Run in `folder`; raises UserError if it is missing, unfinished or incomplete."""
    folder = os.path.abspath(folder)
    if not os.path.isdir(folder):
        parent, name = os.path.split(folder)
        runs = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
        raise fault(folder, f'no folder {folder}{errors.nearest(name, runs)}')
    path = os.path.join(folder, 'summary.json')
    if not os.path.exists(path):
        raise fault(folder, f'unfinished: it has no {path}; run its command again')
    # A flag that is younger than the run has its default.
    summary = dict(dict.fromkeys(VARIED), **read_json(path, f"run '{os.path.basename(folder)}': "))
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    if missing:
        raise fault(folder, f"summary.json lacks {', '.join(missing)}")
    if summary['scheme'] not in SCHEMES:
        raise fault(folder, f"summary.json: scheme is {summary['scheme']}; allowed: "
                    + ', '.join(SCHEMES))
    summary['run_name'] = os.path.basename(folder)
    epochs = _read_epochs(folder, summary['epochs'], epoch_columns(summary))
    selections = read_selections(folder)
    _check_selections(folder, selections, summary['epochs'])
    return Run(summary, epochs, selections)


def read_rows(folder, name, kinds):
    """Returns the rows of a CSV file as dicts. kinds: column -> function from a cell's text."""
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


def _optional(text):
    return None if text == '' else finite(text)


def _read_epochs(folder, count, columns):
    kinds = dict(dict.fromkeys(columns, finite), **dict.fromkeys(DEVICE_COLUMNS, _optional))
    kinds['throttled'] = {'': None, '0': False, '1': True}.__getitem__
    rows = read_rows(folder, 'epochs.csv', kinds)
    for number, row in enumerate(rows, 1):
        if row['epoch'] != number:
            raise fault(folder, f"epochs.csv, row {number}: epoch is {row['epoch']:g}; epochs must "
                        'be 1, 2, ... in order')
    if not rows or len(rows) != count:
        raise fault(folder, f'unfinished: epochs.csv has {len(rows)} of the {count} epochs in '
                    'summary.json')
    epochs = {column: [row[column] for row in rows] for column in columns}
    if np.any(np.diff(epochs['train_seconds']) <= 0):
        raise fault(folder, 'epochs.csv: train_seconds does not grow from epoch to epoch')
    return epochs


def read_selection_file(path):
    """Returns a Run that has only selections, those in a file of in_fit.write_selections."""
    folder, name = os.path.split(os.path.abspath(path))
    rows = read_selections(folder, name)
    epochs = max((row.epoch for row in rows), default=0)
    _check_selections(folder, rows, epochs)
    return Run(dict(epochs=epochs, run_name=name), {}, rows)


def read_selections(folder, name='selections.csv'):
    """Returns the SelectionRows of a run, in the order of the file; [] without one."""
    if not os.path.exists(os.path.join(folder, name)):
        return []
    kinds = {'epoch': int, 'tensor': int, 'name': str, 'shape': str,
             'selected': {'0': False, '1': True}.__getitem__, 'importance': _optional,
             'time_share': _optional}
    return [SelectionRow(*[row[column] for column in SelectionRow._fields])
            for row in read_rows(folder, name, kinds)]


def _check_selections(folder, rows, epochs):
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


def selection_per_epoch(run):
    """Returns what was trained in each epoch; a selection holds until the next one.

    Returns the mask, (epochs, N) bool, and each tensor's share of the backward and update time,
    (epochs, N) float64, NaN if not recorded.
    """
    mask = np.zeros((run.summary['epochs'], 1 + max(row.tensor for row in run.selections)), bool)
    share = np.full(mask.shape, np.nan)
    for row in sorted(run.selections, key=lambda row: row.epoch):
        mask[row.epoch - 1:, row.tensor] = row.selected
        share[row.epoch - 1:, row.tensor] = np.nan if row.time_share is None else row.time_share
    return mask, share


def changed_settings(before, now):
    """Returns how two dicts differ, as 'rho 0.5 there, 0.7 now, ...'; a missing key is None.

    Flags that decide nothing do not count: older runs list --save_model and --export.
    """
    return ', '.join('{} {} there, {} now'.format(key, before.get(key), now.get(key))
                     for key in sorted(set(before) | set(now)) if before.get(key) != now.get(key)
                     and (key not in FLAGS or FLAGS[key].decides))


def is_finished(folder, settings, restart=False):
    """Returns whether the folder contains a finished run of these settings; changes nothing.

    settings: dict that JSON can store. restart: return False for any run. Raises UserError if the
    folder contains anything but a run, or a run of other settings.
    """
    if not os.path.isdir(folder) or all(name.endswith(PART) or name == TRAINED_BY
                                        for name in os.listdir(folder)):
        return False
    path = os.path.join(folder, 'settings.json')
    if not os.path.exists(path):
        raise fault(folder, '{} exists and is not the folder of a run; choose another --run_name'
                    .format(folder))
    if restart:
        return False
    changed = changed_settings(read_json(path), settings)
    if changed:
        path = os.path.join(folder, 'checkpoint', 'weights.npz')
        raise fault(folder, 'exists with other settings ({}); choose another --run_name{}, or '
                    'start over with --restart'.format(changed, os.path.exists(path) * (
                        ' (with --weights {} to train on from there)'.format(path))))
    path = os.path.join(folder, 'summary.json')
    if not os.path.exists(path) or not os.path.getsize(path):  # a power cut may leave an empty file
        return False
    try:
        return bool(read_json(path).get('finished'))
    except UserError as error:
        raise fault(folder, '{}; repair it, or start over with --restart'.format(error))
