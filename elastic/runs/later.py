"""Keeps what is left of a trained run for later: weights, some images, sums of its solved head."""

import os
import sys
import time

from elastic.data.replay import FOLDER, keep_images
from elastic.errors import UserError, first_line
from elastic.export.predictor import CHECKPOINT
from elastic.export.saving import keep_weights
from elastic.schemes import statistics


def keep(folder, settings, found, images, model, dataset):
    """Writes the weights of a trained model, and what --replay and --keep_statistics ask for.

    Prints how much that is, or why it failed: the run ends without it. folder: of the run.
    settings: RunSettings. found: statistics.Statistics of the model, if they are at hand; None: one
    more pass over the images makes them. images: data.images.Images of the Dataset.
    """
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
