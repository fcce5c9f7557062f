"""Saves the model of a finished run: at its end, or later from the weights that it keeps."""

import contextlib
import os

from elastic.errors import UserError, first_line
from elastic.export.litert import FILE
from elastic.export.predictor import CHECKPOINT, KERAS_FILES, WEIGHTS
from elastic.runs.claim import Claim
from elastic.runs.folder import fault


def lacks_model(records):
    """Returns whether a run has not saved what its RecordSettings ask for."""
    folder = os.path.join(records.folder, CHECKPOINT)
    path = os.path.join(folder, FILE)
    if records.export and os.path.exists(path):
        with open(path, 'rb') as file:
            return not file.read().endswith(records.export.encode())
    return bool(records.export) or records.save_model and not any(
        os.path.exists(os.path.join(folder, name)) for name in KERAS_FILES)


def add_model(records, summary, model, dataset):
    """Saves what --save_model and --export ask for, if a finished run lacks it.

    records: RecordSettings. summary: of summary.json. model, dataset: () -> the trained keras.Model
    or the datasets.Dataset. Raises UserError whatever fails: the run stays finished.
    """
    if not lacks_model(records):
        return
    from elastic.export.saving import report_export, save_network
    folder, kind = os.path.join(records.folder, CHECKPOINT), records.export
    with contextlib.closing(Claim(records.folder)):
        network, data = model(), kind and dataset()
        try:
            save_network(folder, network, summary['class_names'], kind, data)
        except Exception as error:  # of many types: Keras, HDF5, the converter, disks
            again = '' if isinstance(error, UserError) else (
                '; the same command tries again, without training')
            raise UserError('{} is finished and keeps its weights, but saving the model failed: '
                            '{}{}'.format(records.folder,
                                          first_line(error) or type(error).__name__, again))
    if kind:
        report_export(os.path.join(folder, FILE), kind, data, summary['final_accuracy'])


def kept_model(settings, summary, build):
    """Returns the trained model of a finished run, from the weights that it keeps.

    settings: RunSettings. build: (RunSettings, number of classes, features of the head) -> model.
    """
    path = os.path.join(settings.records.folder, CHECKPOINT, WEIGHTS)
    if not os.path.exists(path):
        raise fault(settings.records.folder, 'its model cannot be saved, as it has no {}: train it '
                    'again with --restart'.format(path))
    widths, network = summary.get('channel_widths'), settings.model
    if widths is None:
        settings = settings._replace(model=network._replace(weights=path))
    model = build(settings, len(summary['class_names']),
                  summary.get('head_features') or network.head_features)
    if widths is not None:
        from elastic.networks.weights import load_weights
        from elastic.schemes.prunetrain import narrower_model, structure
        model = narrower_model(model, structure(model), widths)
        load_weights(model, path)
    return model
