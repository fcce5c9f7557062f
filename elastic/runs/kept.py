"""Keeps what is left of a trained run, and saves its model: at its end, or later."""

import contextlib
import os
import sys
import time

from elastic.data.replay import FOLDER, keep_images
from elastic.errors import UserError, first_line
from elastic.export.litert import FILE
from elastic.export.predictor import CHECKPOINT, KERAS_FILES, WEIGHTS
from elastic.runs.claim import Claim
from elastic.runs.folder import fault


def keep(folder, settings, found, images, model, dataset):
    """Writes the weights of a trained model, and what --replay and --keep_statistics ask for.

    Prints how much that is, or why it failed: the run ends without it. folder: of the run.
    settings: RunSettings. found: statistics.Statistics of the model, if they are at hand; None: one
    more pass over the images makes them. images: data.images.Images of the Dataset.
    """
    from elastic.export.saving import keep_weights
    from elastic.schemes import statistics
    keep_weights(os.path.join(folder, CHECKPOINT), model, dataset.class_names)
    begin = time.perf_counter()
    try:
        if settings.data.replay:
            print('{:,} images kept for later runs in {}'.format(
                keep_images(folder, images, settings.data.replay, dataset.left_out),
                os.path.join(folder, FOLDER)))
        if settings.training.keep_statistics:
            found = found or statistics.collect(model, dataset, settings.training.continue_from)
        if found is not None:
            print('sums over {:,} images kept for later runs in {} ({:.1f} s)'.format(
                found.images, statistics.write(folder, found), time.perf_counter() - begin))
    except (OSError, UserError, MemoryError) as error:
        print('not kept for later runs: {}'.format(first_line(error)), file=sys.stderr)


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
    """Saves the model of a finished run as --save_model and --export ask.

    records: RecordSettings. summary: of summary.json. model, dataset: () -> the trained keras.Model
    or the datasets.Dataset. Raises UserError whatever fails: the run stays finished.
    """
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
        from elastic.schemes.channels import Structure
        from elastic.schemes.prunetrain import narrower_model
        model = narrower_model(model, Structure(model), widths)
        load_weights(model, path)
    return model
