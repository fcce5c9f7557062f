"""Saves a trained network for use elsewhere."""

import errno
import os
import shutil
import warnings

import numpy as np

from elastic.compat.keras_stack import MODEL_FILE
from elastic.export import litert
from elastic.export.plain import foreign_layers, plain_model
from elastic.export.predictor import CLASS_NAMES, probabilities_of
from elastic.files import printable, whole_folder
from elastic.networks.weights import save_weights


def save_network(path, model, dataset, kind=None):
    """Writes the folder at `path` whole; prints what it wrote.

    weights.npz: weights, for each stack of this project. MODEL_FILE: a plain Keras model of this
    stack's Keras, from images in 0..255 to the outputs of `model`. CLASS_NAMES: in the order of
    these outputs. kind: one of settings.EXPORTS, to write a LiteRT file too, or None.
    dataset: datasets.Dataset, for class names and for calibration.
    Raises OSError before it writes the model if there is too little room.
    """
    plain = plain_model(model)
    foreign = foreign_layers(plain)
    if foreign:
        warnings.warn('{} holds layers that do not come with Keras: {}'.format(
            MODEL_FILE, ', '.join(foreign)))
    with whole_folder(path) as new:
        weights = os.path.join(new, 'weights.npz')
        save_weights(model, weights)
        needed = 2 ** 20 + 1.5 * os.path.getsize(weights)
        if shutil.disk_usage(new).free < needed:  # HDF5 would end in a traceback
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        plain.save(os.path.join(new, MODEL_FILE))
        with open(os.path.join(new, CLASS_NAMES), 'w', encoding='utf-8') as file:
            file.writelines(printable(name) + '\n' for name in dataset.class_names)
        if kind is not None:
            litert.write_litert(
                os.path.join(new, litert.FILE), probabilities_of(plain), plain.input_shape[1],
                dataset.class_names, calibration_images(dataset) if kind == 'litert_int8' else None)
        print('saved {}: {}'.format(path, ', '.join(sorted(os.listdir(new)))))


def calibration_images(dataset):
    """Returns training images, unchanged, [(1, S, S, 3) float32]."""
    batches = dataset.calibration(litert.CALIBRATION_IMAGES)
    return [image[None] for images, _ in batches for image in images.numpy()]


def accuracy_of(path, dataset):
    """Returns the test accuracy of a LiteRT file."""
    from tqdm import tqdm
    predictor, correct = litert.LiteRTModel(path), 0
    for images, labels in tqdm(dataset.test, 'LiteRT', leave=False, disable=None):
        predicted = predictor.probabilities(images.numpy()).argmax(axis=1)
        correct += int(np.sum(predicted == labels.numpy()))
    return correct / dataset.test_size
