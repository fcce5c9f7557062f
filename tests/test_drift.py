"""Tests the benchmark of what each way to train forgets, on a tiny network."""

import csv

import _drift_streams as streams
import _drift_tables
import drift
import numpy as np
import pytest
import tensorflow as tf

from elastic.errors import UserError
from elastic.networks import backbone, stages
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from fixed_tables import fixed_table
from small_models import SMALL, small_base

BATCH = 8


def pixels(labels, first=0):
    """Returns Pixels whose images hold their own numbers, from `first` on."""
    labels = np.array(labels)
    return streams.Pixels(np.tile(np.arange(first, first + len(labels))[:, None, None, None], (
        1, 2, 2, 3)).astype(np.uint8), labels)


def two(source, random):
    """Upright, then dark."""
    tasks = source.tasks(random, 2)
    return [tasks[0], tasks[1].changed(streams.dark, random)]


def tiny(classes, for_solved):
    base = stages.pooled(small_base(), 'stages', 100) if for_solved else small_base()
    model = backbone.classifier(base, None, SMALL, classes, 'frozen')
    if for_solved:
        return model
    batch = tf.zeros((BATCH,) + SMALL), tf.zeros((BATCH,), tf.int32)
    return model, fixed_table(StepMaker(
        model, make_optimizer('sgd', 1e-6, 100, model.trainable_variables), 5e-4, *batch))


@pytest.mark.thorough
def test_every_row_is_measured_once_and_a_line_that_is_there_stays(tmp_path, monkeypatch):
    monkeypatch.setitem(streams.STREAMS, 'two', two)
    monkeypatch.setattr(drift, 'LOGS', str(tmp_path / 'logs'))
    path = str(tmp_path / 'new' / 'drift.csv')
    bench = drift.Bench(tiny, streams.Source('digits', SMALL[0], 2 * BATCH, 20), 0.2, BATCH)
    wanted = [('two', equal, row, kept, 0) for equal in ('seconds', 'epochs')
              for row in streams.ROWS.values() for kept in (0, 10)
              if (row.keeps or not kept) and (kept or row.at_once != 'kept')]
    drift.measure(bench, wanted[:3], path, 'one')
    before = open(path).read()
    drift.measure(bench, wanted, path, 'one')
    assert open(path).read().startswith(before)
    with open(path, newline='') as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(wanted) == len(drift.read(path))
    for line in lines:
        row, end = streams.ROWS[line['row']], float(line['end'])
        assert 0 <= end <= 1 and (row.at_once or 0 <= float(line['new']) <= 1)
        if row.trains and line['equal'] == 'epochs' and not row.at_once:
            assert int(line['steps']) == streams.EPOCHS * 2 * (1 + (line['kept'] == '10'))
            assert float(line['gap']) <= 0
        if row.trains is None:
            assert line['steps'] == '0'
        assert int(line['bytes']) == (10 * 16 * 16 * 3 if line['kept'] == '10' else int(
            line['bytes'])) and (line['row'] != streams.SOLVED or int(line['bytes']) > 0)
    with pytest.raises(UserError, match='results of another setup'):
        drift.measure(bench, wanted, path, 'two')
    results = _drift_tables.Results(drift.read(path), 'two')
    for equal in ('seconds', 'epochs'):
        assert len(results.table(equal, list(streams.ROWS)).split('\n')) == 2 + len(wanted) // 2
    assert len(results.answers()) == 8


class Predictor:
    """Is right in a share of each exam. right: list, by the exam, whose images hold 10 * number."""

    def predict(self, images):
        numbers = images[:, 0, 0, 0]
        return np.where(numbers % 10 < 4 * self.right[numbers[0] // 10], numbers // 10, 9)


def test_exams_give_the_measures_of_forgetting():
    predictor = Predictor()
    exams = drift.Exams([streams.Task(None, pixels([task] * 4, 10 * task)) for task in range(3)],
                        predictor, ahead=True)
    for task, right in enumerate([[0.5, 0.25], [1.0, 0.75, 0.25], [0.25, 0.5, 1.0]]):
        if task:  # meanwhile, the first exam falls to nothing
            predictor.right = [0.0] + right[1:]
            exams.look(task)
        predictor.right = right
        exams.take(task)
    assert exams.measures() == pytest.approx(dict(
        end=(0.25 + 0.5 + 1) / 3, new=(0.75 + 1) / 2, bwt=(0.25 - 0.5 + 0.5 - 0.75) / 2,
        worst=0.75,  # from 1.0 after the second task
        first=-0.25, next=0.25, gap=(-1.0 - 0.125) / 2))


def test_answers_pair_rows_by_seed():
    made = {}
    for seed, noise in (('0', 0.0), ('1', 0.1)):
        for row, kept, equal, end, new, bwt in (
                ('full', 0, 'seconds', 0.5, 0.80, -0.40), ('full', 0, 'epochs', 0.4, 0.90, -0.60),
                ('elastic 0.35', 0, 'seconds', 0.6, 0.85, -0.30),
                ('elastic 0.35', 0, 'epochs', 0.45, 0.85, -0.50),
                ('full', 200, 'seconds', 0.8, 0.8, -0.1),
                ('elastic 0.35', 200, 'seconds', 0.805, 0.8, -0.1)):
            made['x', equal, row, str(kept), seed] = dict(
                end=end + noise, new=new + noise, bwt=bwt + noise, seconds=10 - 6 * (row != 'full'))
    lines = _drift_tables.Results(made, 'x').answers()
    assert 'backward transfer +10.0 ± 0.0, new exams +5.0 ± 0.0' in lines[0]
    assert 'at equal new accuracy +20.0 ± 0.0' in lines[0]  # full: -0.5 in the middle
    assert 'at equal new accuracy not measured' in lines[1]
    assert 'irrelevant? 200: all exams, rho 0.35 to full, +10.0 ± 0.0 with 0, +0.5' in lines[3]
    assert '0 kept: rho 0.35 is 2.50 times as fast as full; all exams +5.0 ± 0.0' in lines[-1]


def test_bad_flags_are_refused(tmp_path, capsys):
    (tmp_path / 'other.csv').write_text('a,b\n1,2\n')
    for flags in (['--seeds', '0'], ['--kept', '-1'], ['--streams', 'videos'], ['--images', '3']):
        with pytest.raises(SystemExit) as end:
            drift.main(flags)
        assert end.value.code == 2
    with pytest.raises(UserError, match="row 'fulll'"):
        drift.main(['--rows', 'fulll'])
    with pytest.raises(UserError, match='no table of this benchmark'):
        drift.read(str(tmp_path / 'other.csv'))
