"""Tests which epoch is kept, when a run ends early, and that test images are used once."""

import numpy as np
import pytest

import train
from cached_runs import bits, digits, network
from elastic.runs.judge import BestEpoch
from elastic.runs.recorder import Recorder
from elastic.runs.session import Session
from elastic.schemes.fixed import FixedScheme
from elastic.settings import Settings
from elastic.steps.epoch import validate
from elastic.steps.training_step import evaluation_function

JUDGED = [(0.50, 1.0), (0.75, 0.9), (0.75, 0.8), (0.75, 0.8), (0.70, 0.1)]  # accuracy, loss


def test_the_best_epoch_has_the_highest_accuracy_then_the_lowest_loss():
    best, model, over = BestEpoch('last', patience=2), network(), []
    for epoch, (accuracy, loss) in enumerate(JUDGED, 1):
        best.judge(epoch, loss, accuracy, model)
        over.append(best.is_over(epoch))
    assert best.best == 3 and over == [False, False, False, False, True]
    assert not BestEpoch('best').is_over(10 ** 6)


class Counted:
    """Batches that count how often they are used."""

    def __init__(self, batches):
        self.batches, self.passes = batches, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.batches)


def trained(folder, share=0.2, **settings):
    """Trains; returns (measured summary, model, rows, bits of the weights by epoch, dataset)."""
    model, dataset = network(), digits(validation_share=share)
    dataset.test = Counted(dataset.test)
    settings = Settings(**dict(dict(num_epochs=5, learning_rate=0.4), **settings))
    recorder, rows, ends = Recorder(str(folder)), [], []
    recorder.epoch = lambda row: (rows.append(row), ends.append(bits(model)))
    scheme = FixedScheme('full_training', train.step_maker(model, dataset, settings))
    result, model = train.train(scheme, dataset, settings, Session(recorder))
    return result, model, rows, ends, dataset


def test_the_weights_of_the_best_epoch_are_kept_and_tested_once(tmp_path):
    result, model, rows, ends, dataset = trained(tmp_path, keep='best')
    scores = [(row['validation_accuracy'], -row['validation_loss']) for row in rows]
    kept = 1 + scores.index(max(scores))
    assert result['kept_epoch'] == kept < len(rows)  # this learning rate is too high to end well
    assert bits(model) == ends[kept - 1] != ends[-1]
    assert dataset.test.passes == 1
    for images, loss, accuracy in (
            (dataset.test, result['final_loss'], result['final_accuracy']),
            (dataset.validation, result['validation_loss'], result['validation_accuracy'])):
        assert validate(evaluation_function(model), images)[:2] == pytest.approx((loss, accuracy))
    assert result['best_accuracy'] is None and 'test_accuracy' not in rows[0]


@pytest.mark.thorough
def test_patience_ends_a_run_early_and_leaves_its_schedule(tmp_path, capsys):
    whole = trained(tmp_path / 'whole')
    early = trained(tmp_path / 'early', patience=1)
    assert early[0]['epochs'] < whole[0]['epochs'] == whole[0]['kept_epoch'] == 5
    assert 'training ends: no epoch was better than epoch ' in capsys.readouterr().out
    ended = early[0]['epochs']
    assert early[0]['kept_epoch'] == ended and early[3] == whole[3][:ended]
    assert [row['learning_rate'] for row in early[2]] == [
        row['learning_rate'] for row in whole[2][:ended]]


def test_without_validation_images_the_test_images_judge_each_epoch(tmp_path):
    result, model, rows, ends, dataset = trained(tmp_path, share=None)
    assert dataset.validation is None and dataset.test.passes == 5
    assert result['final_accuracy'] == rows[-1]['test_accuracy'] and 'kept_epoch' not in result
    assert bits(model) == ends[-1] and np.isfinite(result['final_loss'])
