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
from elastic.data.photo_list import PHOTOS, still_there
from elastic.errors import UserError, first_line
from elastic.runs.chain import chain_of
from elastic.runs.checkpoint import Interrupted
from elastic.runs.classes import PREDICTION_COLUMNS, PREDICTIONS, write_table
from elastic.runs.folder import fault, finite_or_none, read_rows
from elastic.settings import DataSettings
from elastic.texts import table

EXAMS, FORGETTING = 'exams.csv', 'forgetting.csv'
FORGETTING_COLUMNS = ('run', 'class', 'images', 'first', 'before', 'after', 'p_value')
NOISE = 0.05  # p value of the paired test below which a fall is more than noise
MOST_CLASSES = 10  # that fell, of each run, in the printed table


class Score(NamedTuple):
    """Holds how many of some images of an earlier run are classified rightly, as shares.

    run: its name. class_name: '' for all classes. first: by that run itself. before: by the run
    that is continued; None if it did not test them. p_value: of a fall as large, by chance alone.
    """
    run: str
    class_name: str
    images: int
    first: float
    before: float
    after: float
    p_value: float

    @property
    def fell(self):
        return self.before is not None and self.after < self.before


class Exam(NamedTuple):
    """Holds the test images of an earlier run.

    run: the chain.Earlier. split: Split of the images that are still there. left_out: how many are
    not. answers: run -> image -> whether it was right, of the run itself and of the one before.
    """
    run: object
    split: object
    left_out: int
    first: dict
    before: dict


def paired_p_value(before, after):
    """Returns the probability, without any forgetting, of as many images lost, or more.

    before, after: (n,) bool, whether each image is classified rightly. Of the images that changed,
    half would be lost by chance (McNemar's exact test, of one side).
    """
    from scipy.stats import binom
    lost, won = int(np.sum(before & ~after)), int(np.sum(~before & after))
    return float(binom.sf(lost - 1, lost + won, 0.5))


def scores_of(exam, labels, right):
    """Returns the Scores of an Exam: of all images, then of each class.

    labels: (n,) names of classes. right: (n,) bool, whether the trained network is right.
    """
    names, labels = exam.split.named(), np.array(labels)
    first, before = [np.array([answers.get(name, False) for name in names])
                     for answers in (exam.first, exam.before)]  # `before` has all or none
    found = []
    for name in [''] + sorted(set(labels)):
        some = labels == name if name else np.ones(len(labels), bool)
        known = [float(before[some].mean()), paired_p_value(before[some], right[some])] if (
            exam.before) else [None, None]
        found.append(Score(exam.run.name, name, int(some.sum()), float(first[some].mean()),
                           known[0], float(right[some].mean()), known[1]))
    return found


# ---------------------------------------------------------------- images

def exam_of(run, before, class_names, input_size):
    """Returns the Exam of an Earlier run; raises UserError if none of its images can be read.

    before: the Earlier that is continued. class_names: of the run that continues it.
    """
    if not os.path.exists(os.path.join(run.folder, PREDICTIONS)):
        raise fault(run.folder, 'has no {}'.format(PREDICTIONS))
    rows = read_rows(run.folder, PREDICTIONS, dict(image=str, label=str, predicted=str))
    answers = rows if run is before else [row for row in _exams(before.folder) if os.path.normpath(
        os.path.join(before.folder, row['run'])) == os.path.normpath(run.folder)]
    first, before = [{row['image']: row['label'] == row['predicted'] for row in some}
                     for some in (rows, answers)]
    if run.settings['dataset_name'].startswith(FOLDER):  # what the run before did not test is out
        split = _of_folder(run, [row for row in rows if not before or row['image'] in before],
                           class_names, input_size)
    else:
        split = _of_data_set(run, rows, class_names, input_size)
    return Exam(run, split, len(rows) - split.size, first, before)


def _of_folder(run, rows, class_names, input_size):
    """Returns the Split of those photos that are as the run had them."""
    root, place = os.path.expanduser(run.settings['dataset_name'][len(FOLDER):]), {}
    if os.path.exists(os.path.join(run.folder, PHOTOS)):
        place = still_there(run.folder, root, [row['image'] for row in rows])
    if not place:
        raise fault(run.folder, 'none of its {:,} test images are in {} as they were'.format(
            len(rows), root))
    classes = {}
    for row in rows:
        if row['image'] in place:
            classes.setdefault(row['label'], []).append(place[row['image']])
    return split_of(classes, class_names, input_size, root)


def _of_data_set(run, rows, class_names, input_size):
    """Returns the Split of a data set that is no folder, which must be as the run had it."""
    name, data_dir = run.settings['dataset_name'], run.settings.get('data_dir')
    reason = unprepared(name, data_dir)
    if reason:
        raise fault(run.folder, reason)
    split = load_images(name, input_size, DataSettings(
        data_dir, test_images=run.settings.get('test_images'),
        old_classes=class_names)).test.spaced(len(rows))
    labels = [class_names[label] for label in split.labels()]
    if list(zip(split.named(), labels)) != [(row['image'], row['label']) for row in rows]:
        raise fault(run.folder, 'the test images of {} have changed'.format(name))
    return split


def _exams(folder):
    """Returns the rows of the exams of a run; [] without any."""
    if not os.path.exists(os.path.join(folder, EXAMS)):
        return []
    return read_rows(folder, EXAMS, dict.fromkeys(('run', 'image', 'label', 'predicted'), str))


# ---------------------------------------------------------------- exams

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
    folder, class_names = settings.records.folder, dataset.class_names
    evaluate = evaluation_function(model)

    def pause():
        if session.keeper.stop():
            raise Interrupted(settings.training.num_epochs, dataset.steps, False)
    runs, broken = chain_of(settings.training.continue_from)
    if broken:
        print('runs before are not tested: {}'.format(broken))
    scores, rows = [], []
    for run in reversed(runs):
        try:
            exam = exam_of(run, runs[0], class_names, settings.model.input_size)
            tested = validate(evaluate, in_order(exam.split, dataset.tested_at_once), pause)
        except (UserError, OSError, tf.errors.OpError) as error:
            print('images of run {} are not tested: {}'.format(run.name, first_line(error)))
            continue
        if exam.left_out:
            print('{:,} of {:,} test images of run {} are gone or changed, and not tested'.format(
                exam.left_out, exam.left_out + exam.split.size, run.name))
        labels = [class_names[label] for label in tested.labels]
        scores += scores_of(exam, labels, tested.labels == tested.predicted)
        place = os.path.relpath(run.folder, folder)
        rows += [(place, image, label, class_names[guess], '{:.6g}'.format(probability))
                 for image, label, guess, probability in zip(
                     exam.split.named(), labels, tested.predicted, tested.probability)]
    write_table(os.path.join(folder, EXAMS), ('run',) + PREDICTION_COLUMNS, rows)
    write_table(os.path.join(folder, FORGETTING), FORGETTING_COLUMNS, scores)
    session.recorder.exams(scores, settings.training.num_epochs)
    return scores


def exam_records(settings, scores):
    """Returns what the summary says of the run before, and the mean accuracies of the Scores.

    settings: RunSettings; without a run before, returns {}.
    """
    earlier = settings.training.continue_from
    if earlier is None:
        return {}
    known = [score for score in scores if not score.class_name and score.before is not None]
    before, after = np.mean([score[4:6] for score in known], axis=0).tolist() if known else (
        None, None)
    return dict(run_before=os.path.relpath(earlier, settings.records.folder), exam_before=before,
                exam_after=after)


def read_scores(folder):
    """Returns the Scores of a run; raises UserError if it has none."""
    if not os.path.exists(os.path.join(folder, FORGETTING)):
        raise fault(folder, 'has no {}: it continues no run'.format(FORGETTING))
    kinds = dict(dict.fromkeys(FORGETTING_COLUMNS, finite_or_none), run=str, images=int)
    kinds['class'] = str
    return [Score(*[row[column] for column in FORGETTING_COLUMNS])
            for row in read_rows(folder, FORGETTING, kinds)]


def report(scores):
    """Returns the lines that say what was forgotten, and warn of what is more than noise."""
    whole = [score for score in scores if not score.class_name]
    if not whole:
        return []
    rows = []
    for score in whole:
        fell = sorted((other for other in scores if other.run == score.run and other.class_name
                       and other.fell), key=lambda other: other.after - other.before)
        rows += [_row(score.run, score)] + [_row('  ' + other.class_name, other)
                                            for other in fell[:MOST_CLASSES]]
    known = [score for score in whole if score.before is not None]
    if len(known) > 1:
        first, before, after = np.mean([score[3:6] for score in known], axis=0)
        rows.append(_row('mean', Score('', '', sum(s.images for s in known), first, before, after,
                                       None)))
    return [table(('earlier run, and classes that fell', 'test images', 'first (%)', 'before (%)',
                   'after (%)', 'change (points)'), rows)] + [
        'warning: the accuracy on images of run {} fell from {:.1f} to {:.1f} %, more than noise '
        'explains (paired test, p = {:.2g}): docs/new_data.md says what helps'.format(
            score.run, 100 * score.before, 100 * score.after, score.p_value)
        for score in known if score.fell and score.p_value < NOISE]


def _row(title, score):
    shares = [score.first, score.before, score.after]
    change = '' if score.before is None else '{:+.1f}'.format(100 * (score.after - score.before))
    return [title, '{:,}'.format(score.images)] + [
        '' if share is None else '{:.1f}'.format(100 * share) for share in shares] + [change]
