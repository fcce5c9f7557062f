"""Tests the table of runs: medians, speed-up, and separate rows and columns."""

from elastic.figures import compare
from elastic.runs.folder import Run
from elastic.settings import VARIED


def run(scheme, seed, accuracy, seconds, rho=None):
    summary = dict(dict.fromkeys(VARIED), scheme=scheme, rho=rho, seed=seed,
                   model_name='vgg16', dataset_name='digits',
                   importance=None if rho is None else 'gradient_update', final_accuracy=accuracy,
                   best_accuracy=accuracy + 0.01, throttled_epochs=None, epochs=3,
                   train_seconds=seconds, selection_seconds=4.0, step_ms=seconds / 10)
    return Run(summary, {}, [])


def test_medians_ranges_and_differences_from_full_training():
    runs = [run('full_training', seed, 0.97 + seed / 100, 100.0 + seed) for seed in (0, 1, 2)]
    runs += [run('traditional_tl_training', 0, 0.5, 30.0)]
    runs += [run('elastic_training', seed, 0.92 + seed / 100, 50.0, 0.5) for seed in (0, 1, 2)]
    header, _, full, head, elastic = compare.table(runs).splitlines()[:5]
    assert '98.0 [97.0, 99.0]' in full and '101.0 [100.0, 102.0]' in full
    assert '93.0 [92.0, 94.0]' in elastic and '2.02 [2.00, 2.04]' in elastic  # of equal seeds
    assert header.endswith('to full (points)') and full.endswith(']')
    assert [line.split()[-1] for line in (head, elastic)] == ['-48.0', '-5.0']


def test_full_training_of_fewer_epochs_has_a_row_of_its_own_and_is_no_reference():
    runs = [run('full_training', 0, accuracy, seconds) for accuracy, seconds in (
        (0.9, 30.0), (0.95, 100.0))]
    runs[0].summary.update(epochs=1, num_epochs=1)
    runs[1].summary.update(num_epochs=3)
    short, whole = compare.table(runs).splitlines()[2:4]
    assert short.startswith('full_training, num_epochs 1 ')
    assert short.split()[-3:] == ['3.33', '3.33', '-5.0'] and '1.00' in whole


def test_networks_and_data_sets_have_rows_and_references_of_their_own():
    runs = [run('full_training', seed, 0.9, seconds) for seed, seconds in enumerate(
        (100.0, 20.0, 40.0))] + [run('elastic_training', 0, 0.8, 10.0, 0.5)]
    for each in runs[1], runs[3]:
        each.summary.update(model_name='vit')
    runs[2].summary.update(dataset_name='digits_shifted')
    rows = compare.table(runs).splitlines()[2:6]
    assert [row.split('  ')[0] for row in rows] == [
        'full_training, vgg16, digits', 'full_training, vit, digits',
        'full_training, vgg16, digits_shifted', 'elastic_training rho 0.5, vit, digits']
    assert '2.00' in rows[3] and rows[3].endswith('-10.0')


def test_runs_with_validation_images_have_no_best_test_accuracy():
    judged = run('full_training', 0, 0.9, 100.0)
    judged.summary.update(best_accuracy=None, validation_share=0.1, keep='best')
    lines = compare.table([judged, run('full_training', 0, 0.91, 100.0)]).splitlines()
    assert lines[2].startswith('full_training, validation_share 0.1, keep best ')
    assert lines[2].count('90.0') == 1 and lines[3].split()[2:4] == ['91.0', '92.0']


def test_without_full_training_there_is_no_speed_up():
    row = compare.table([run('elastic_training', 0, 0.9, 50.0, 0.5)]).splitlines()[2]
    assert row.split()[-1] == '8.0'  # the share of selections


def test_runs_that_select_in_another_way_have_rows_of_their_own():
    elastic = run('elastic_training', 0, 0.97, 50.0, rho=0.5)
    others = [elastic._replace(summary=dict(elastic.summary, **changes)) for changes in (
        dict(granularity='layer'), dict(interval=0), dict(importance='fisher'))]
    text = compare.table([elastic] + others)
    for words in ('granularity layer', 'interval 0', 'importance fisher'):
        assert text.count(words) == 1


def test_throttled_epochs_have_a_column_if_there_are_any():
    cool, hot = [run('full_training', seed, 0.97, 100.0) for seed in (0, 1)]
    cool.summary.update(epochs=3, throttled_epochs=0)
    text = compare.table([cool])
    assert 'throttled' not in text
    hot.summary.update(epochs=3, throttled_epochs=2)
    head = run('traditional_tl_training', 0, 0.5, 30.0)  # its device reports nothing
    text = compare.table([cool, hot, head])
    header, _, first, second = text.splitlines()[:4]
    assert header.endswith('throttled') and text.count('2 of 6') == 1
    assert first.endswith('2 of 6')
    assert ' of ' not in second
