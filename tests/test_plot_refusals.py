"""Tests that incomplete or incomparable runs give no figure, and old figures stay."""

import json

import pytest

import plot
from elastic.errors import UserError
from elastic.runs.folder import read_run
from made_runs import TENSORS, edit_csv, folder_content, make_run
from timing_tables import stored


def drop_rows(folder, name, keep):
    rows = (folder / name).read_text(encoding='utf-8').splitlines(True)
    (folder / name).write_text(''.join(rows[:keep]), encoding='utf-8')


def set_summary(folder, **changes):
    path = folder / 'summary.json'
    summary = json.loads(path.read_text(encoding='utf-8'))
    path.write_text(json.dumps(dict(summary, **changes)), encoding='utf-8')


BREAKS = {
    'unfinished: it has no': lambda run: (run / 'summary.json').unlink(),
    'cannot read .*summary.json': lambda run: (run / 'summary.json').write_text('{"scheme": '),
    'summary.json lacks scheme': lambda run: (run / 'summary.json').write_text('{}'),
    'scheme is magic_training': lambda run: set_summary(run, scheme='magic_training'),
    'unfinished: epochs.csv has 3 of the 4': lambda run: drop_rows(run, 'epochs.csv', 4),
    'epochs.csv cannot be read': lambda run: (run / 'epochs.csv').unlink(),
    "epochs.csv, row 2: test_loss is ''": lambda run: edit_csv(
        run / 'epochs.csv', 2, 'test_loss', ''),
    "epochs.csv, row 2: throttled is 'yes'": lambda run: edit_csv(
        run / 'epochs.csv', 2, 'throttled', 'yes'),
    'epochs.csv, row 2: epoch is 3': lambda run: edit_csv(run / 'epochs.csv', 2, 'epoch', '3'),
    'epochs.csv has no column train_seconds': lambda run: edit_csv(
        run / 'epochs.csv', 0, 'train_seconds', 'seconds'),
    'train_seconds does not grow': lambda run: edit_csv(
        run / 'epochs.csv', 3, 'train_seconds', '99.0'),
    'selections.csv has no column time_share': lambda run: edit_csv(
        run / 'selections.csv', 0, 'time_share', 'share'),
    "selections.csv, row 5: selected is ''": lambda run: edit_csv(
        run / 'selections.csv', 5, 'selected', ''),
    'selection of epoch 3 does not name each of the tensors 0 to 8 once':
        lambda run: drop_rows(run, 'selections.csv', 2 * TENSORS),
    'selections of epochs 1 to 9': lambda run: edit_csv(run / 'selections.csv', 18, 'epoch', '9')}


@pytest.mark.parametrize('says', list(BREAKS))
def test_an_incomplete_run_is_named_with_what_is_wrong(tmp_path, says):
    run = make_run(tmp_path, 'bad_run')
    read_run(run)
    BREAKS[says](run)
    with pytest.raises(UserError, match="^run 'bad_run': .*" + says):
        read_run(run)


def test_an_incomplete_run_leaves_old_figures(tmp_path):
    good, bad = make_run(tmp_path, 'good', 'full_training'), make_run(tmp_path, 'bad_run')
    figures = tmp_path / 'figures'
    plot.accuracy_over_time([good, bad], figures / 'curves')
    plot.selection_map(bad, figures / 'map')
    before = folder_content(figures)
    drop_rows(bad, 'epochs.csv', 4)
    for draw in (lambda: plot.accuracy_over_time([good, bad], figures / 'curves'),
                 lambda: plot.selection_map(bad, figures / 'map')):
        with pytest.raises(UserError, match="^run 'bad_run': unfinished"):
            draw()
    assert folder_content(figures) == before


def test_a_missing_run_is_named_with_the_nearest_name(tmp_path):
    make_run(tmp_path, 'elastic_seed0')
    with pytest.raises(UserError, match="run 'elastic_sed0': no folder .*'elastic_seed0'"):
        read_run(tmp_path / 'elastic_sed0')


def test_a_run_without_selections_has_no_map(tmp_path):
    with pytest.raises(UserError, match="run 'full': selections.csv is absent"):
        plot.selection_map(make_run(tmp_path, 'full', 'full_training'), tmp_path / 'map')


@pytest.mark.parametrize('key, value', [
    ('host', 'jetson'), ('dataset_name', 'digits'), ('stack', 'TensorFlow 2.7')])
def test_runs_that_do_not_compare_are_refused(tmp_path, key, value):
    first = make_run(tmp_path, 'first')
    second = make_run(tmp_path, 'second', 'full_training', **{key: value})
    with pytest.raises(UserError, match="run 'second' has {} {}, run 'first'".format(key, value)):
        plot.accuracy_over_time([first, second], tmp_path / 'curves')


def test_seeds_of_unequal_length_and_repeated_runs_are_refused(tmp_path):
    first = make_run(tmp_path, 'first')
    second = make_run(tmp_path, 'second', seed=1, epochs=3)
    drop_rows(second, 'epochs.csv', 4)
    with pytest.raises(UserError, match="run 'second' has epochs 3, run 'first' has 4"):
        plot.accuracy_over_time([first, second], tmp_path / 'curves')
    with pytest.raises(UserError, match="run 'first': given twice"):
        plot.accuracy_over_time([first, str(first) + '/'], tmp_path / 'curves')
    with pytest.raises(UserError, match='no run given'):
        plot.accuracy_over_time([], tmp_path / 'curves')


def test_a_figure_that_cannot_be_written_leaves_the_old_ones(tmp_path):
    figures = tmp_path / 'figures'
    plot.timing_bars(stored(tmp_path), figures / 'timings')
    before = folder_content(figures)
    with pytest.raises(AttributeError):  # fails in the middle of drawing
        plot.write_figure(figures / 'timings', (7, 3), lambda figure: figure.no_such_method(),
                          ['a'], [])
    assert folder_content(figures) == before
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot write'):
        plot.timing_bars(stored(tmp_path), tmp_path / 'file' / 'timings')
