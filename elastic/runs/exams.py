"""Tests a continued run on the test images of the runs before it, and says what was forgotten.

    exams.csv        one row per test image of a run before
    forgetting.csv   one row per run before, for all its images, and one per class

The images are read again where they lie, and only those that are as that run had them.
"""

import os
from typing import NamedTuple

import numpy as np

from elastic.data.batches import in_order
from elastic.data.image_folder import FOLDER, split_of
from elastic.data.images import load_images, unprepared
from elastic.data.photo_list import stamps_of, still_there
from elastic.errors import UserError, finite, first_line
from elastic.files import write_table
from elastic.runs.chain import chain_of
from elastic.runs.checkpoint import Interrupted
from elastic.runs.classes import PREDICTION_COLUMNS, PREDICTIONS
from elastic.runs.folder import fault, read_rows
from elastic.settings import DataSettings
from elastic.texts import table

EXAMS, FORGETTING = 'exams.csv', 'forgetting.csv'
FORGETTING_COLUMNS = ('run', 'class', 'images', 'before', 'after', 'p_value')
NOISE = 0.05  # p value of the paired test below which a fall is more than noise
MOST_CLASSES = 10  # that fell, of each run, in the printed table


class Score(NamedTuple):
    """Holds the accuracy on images of an earlier run, before and after training.

    class_name: '' for all classes. p_value: of paired_p_value.
    """
    run: str
    class_name: str
    images: int
    before: float
    after: float
    p_value: float


def paired_p_value(before, after):
    """Returns the probability that chance alone loses as many images, or more.

    before, after: (n,) bool, whether each image is classified rightly. By chance, half of the
    images that changed are lost (McNemar's exact test, of one side).
    """
    from scipy.special import bdtrc
    lost, won = int(np.sum(before & ~after)), int(np.sum(~before & after))
    return float(bdtrc(lost - 1, lost + won, 0.5))


def scores_of(run, labels, before, after):
    """Returns the Scores of the images of a run: of all, then of each class.

    labels: (n,) names of classes. before, after: as in paired_p_value.
    """
    labels = np.array(labels)
    parts = [('', labels == labels)] + [(name, labels == name) for name in sorted(set(labels))]
    return [Score(run, name, int(some.sum()), float(before[some].mean()), float(after[some].mean()),
                  paired_p_value(before[some], after[some])) for name, some in parts]


def exam_of(run, before, class_names, input_size, seen=()):
    """Returns (Split of the test images of a chain.Earlier, image -> whether it was right before).

    before: the Earlier that is continued. class_names: of the run that continues it. seen: of
    photo_list.stamps_of, the images that it is trained on. Raises UserError if none can be tested.
    """
    name, kinds = run.settings['dataset_name'], dict(image=str, label=str, predicted=str)
    if run is before:
        rows = read_rows(run.folder, PREDICTIONS, kinds)
    else:
        rows = [row for row in read_rows(before.folder, EXAMS, dict(kinds, run=str))
                if os.path.normpath(os.path.join(before.folder, row['run'])) == run.folder]
    if name.startswith(FOLDER):
        split = _photos(run, os.path.expanduser(name[len(FOLDER):]), rows, class_names, input_size,
                        seen)
    else:
        split = _images(run, name, rows, class_names, input_size)
    return split, {row['image']: row['label'] == row['predicted'] for row in rows}


def _photos(run, root, rows, class_names, input_size, seen):
    place, classes = still_there(run.folder, root, [row['image'] for row in rows], seen), {}
    if not place:
        raise fault(run.folder, 'none of its test images is in {} as it was, or all are trained on '
                    'now'.format(root))
    for row in rows:
        if row['image'] in place:
            classes.setdefault(row['label'], []).append(place[row['image']])
    return split_of(classes, class_names, input_size, root)


def _images(run, name, rows, class_names, input_size):
    data_dir = run.settings.get('data_dir')
    reason = unprepared(name, data_dir)
    if reason:
        raise fault(run.folder, reason)
    split = load_images(name, input_size, DataSettings(
        data_dir, test_images=run.settings.get('test_images'),
        old_classes=class_names)).test.spaced(len(rows))
    labels = [class_names[label] for label in split.labels()]
    if list(zip(split.named(), labels)) != [(row['image'], row['label']) for row in rows]:
        raise fault(run.folder, 'the test images of {} have changed, or run before did not test '
                    'them'.format(name))
    return split


def hold_exams(settings, model, dataset, session):
    """Tests a trained network on the test images of all runs before; returns the Scores.

    Writes EXAMS and FORGETTING, and TensorBoard; nothing if there is no run before. settings:
    RunSettings. dataset: datasets.Dataset. session: session.Session. Prints a line for each run
    whose images cannot be tested. Raises Interrupted if the session's keeper says stop.
    """
    if settings.training.continue_from is None:
        return []
    import tensorflow as tf

    from elastic.steps.epoch import validate
    from elastic.steps.training_step import evaluation_function
    folder, names = settings.records.folder, dataset.class_names
    evaluate = evaluation_function(model)

    def pause():
        if session.keeper.stop():
            raise Interrupted(settings.training.num_epochs, dataset.steps, False)
    runs, broken = chain_of(settings.training.continue_from)
    if broken:
        print('earlier runs are not tested: {}'.format(broken))
    scores, rows, seen = [], [], stamps_of(folder, dataset.train_names)
    for run in reversed(runs):
        try:
            split, before = exam_of(run, runs[0], names, settings.model.input_size, seen)
            tested = validate(evaluate, in_order(split, dataset.tested_at_once), pause)
        except (UserError, OSError, tf.errors.OpError) as error:
            print('images of run {} are not tested: {}'.format(run.name, first_line(error)))
            continue
        if split.size < len(before):
            print('{:,} of {:,} test images of run {} are gone, changed, or trained on: not tested'
                  .format(len(before) - split.size, len(before), run.name))
        images, labels = split.named(), [names[label] for label in tested.labels]
        scores += scores_of(run.name, labels, np.array([before[image] for image in images]),
                            tested.labels == tested.predicted)
        rows += zip([os.path.relpath(run.folder, folder)] * split.size, images, labels,
                    [names[guess] for guess in tested.predicted], tested.probability)
    write_table(os.path.join(folder, EXAMS), ('run',) + PREDICTION_COLUMNS, rows)
    write_table(os.path.join(folder, FORGETTING), FORGETTING_COLUMNS, scores)
    session.recorder.exams(scores, settings.training.num_epochs)
    return scores


def read_scores(folder):
    """Returns the Scores of a run; raises UserError if it has none."""
    if not os.path.exists(os.path.join(folder, FORGETTING)):
        raise fault(folder, 'has no {}, as it continues no run'.format(FORGETTING))
    kinds = dict(zip(FORGETTING_COLUMNS, (str, str, int, finite, finite, finite)))
    return [Score(*[row[column] for column in kinds]) for row in read_rows(
        folder, FORGETTING, kinds)]


def means_of(scores):
    """Returns what the summary says of the Scores: mean accuracies over the earlier runs."""
    found = [score[3:5] for score in scores if not score.class_name]
    return dict(zip(('exam_before', 'exam_after'), np.mean(found, axis=0).tolist() if found else (
        None, None)))


def continued(scores, before, folder):
    """Returns what the summary of the run in `folder` says of the run `before`, a path or None."""
    return {} if before is None else dict(
        means_of(scores), run_before=os.path.relpath(before, folder))


def report(scores):
    """Returns the lines that say what was forgotten, and warn of what is more than noise."""
    shown, whole = [], [score for score in scores if not score.class_name]
    for score in whole:
        fell = [other for other in scores if other.run == score.run and other.class_name
                and other.after < other.before]
        fell.sort(key=lambda other: other.after - other.before)
        shown += [(score.run, score)] + [('  ' + other.class_name, other)
                                         for other in fell[:MOST_CLASSES]]
    if len(whole) > 1:
        shown.append(('mean', Score('', '', sum(score.images for score in whole),
                                    *means_of(scores).values(), None)))
    rows = [(title, score.images) + tuple(form.format(100 * share) for form, share in (
        ('{:.1f}', score.before), ('{:.1f}', score.after), ('{:+.1f}', score.after - score.before)))
            for title, score in shown]
    return [table(('earlier run, classes that fell', 'test images', 'before (%)', 'after (%)',
                   'change (points)'), rows)] * bool(rows) + [
        'warning: images of run {}: accuracy fell from {:.1f} to {:.1f} %, by more than noise '
        '(paired test, p = {:.2g}); docs/new_data.md says what helps'.format(
            score.run, 100 * score.before, 100 * score.after, score.p_value)
        for score in whole if score.after < score.before and score.p_value < NOISE]
