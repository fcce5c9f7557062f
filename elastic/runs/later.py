"""Keeps what runs that continue a run need: some of its images, and the sums of its solved head."""

import os
import sys
import time

from elastic.data.replay import FOLDER, keep_images
from elastic.schemes import statistics


def keep_for_later(settings, found, images, model, dataset):
    """Keeps what --replay and --keep_statistics ask for; prints how much, or why that failed.

    settings: RunSettings. found: statistics.Statistics of the trained model, if they are at hand;
    None: one more pass over the images makes them. images: data.images.Images of the Dataset.
    """
    folder, begin = settings.records.folder, time.perf_counter()
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
    except OSError as error:
        print('not kept for later runs: {}'.format(error), file=sys.stderr)
