"""Tests which runs a figure needs, which are trained, and which are drawn."""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

import figure_grid
import main
import reproduce
from cached_runs import network
from elastic.compat.keras_stack import MODEL_FILE
from elastic.errors import UserError
from elastic.settings import ELASTIC
from elastic.timing.table import TensorTimings
from figure_grid import CUB, DOGS, FIGURES, PET, Cell, runs_of
from made_runs import make_run
from small_runs import ROOT, script
from timing_tables import op_times, table_of

# The number of runs of a figure and of its elastic runs, and what they differ in, apart from the
# scheme.
EXPECTED = {'7': (6, 6, {'interval', 'probe_batches'}), '15': (12, 3, {'dataset_name'}),
            '15ad': (4, 1, set()), '16': (8, 2, {'dataset_name'}), '17ac': (9, 5, {'rho'}),
            '19': (12, 3, {'model_name'}), '21': (3, 3, {'dataset_name'}),
            '23': (12, 3, {'dataset_name'}), 'cache': (6, 6, {'rho', 'views', 'prefix_cache'})}


@pytest.mark.parametrize('name', sorted(FIGURES))
def test_runs_of_a_figure_differ_in_what_it_compares(name):
    whole, elastic, differ = EXPECTED[name.replace('_ego', '')]
    cells = FIGURES[name].cells
    assert len(cells) == len(set(cells)) == (elastic if '_ego' in name else whole)
    assert sum(cell.train_type == ELASTIC for cell in cells) == elastic
    fields = {field: {getattr(cell, field) for cell in cells} - {None} for field in Cell._fields}
    fields['views'].add('fresh')  # the default
    assert {field for field, found in fields.items() if len(found) > 1} - {'train_type'} == differ
    if name != 'cache':
        assert fields['prefix_cache'] == {'off'}
        assert {reproduce.arguments_of(run).views for run in runs_of(name)} == {'fresh'}
    # Each network is trained on each data set in the same ways.
    places = {(cell.model_name, cell.dataset_name) for cell in cells}
    ways = [{cell[2:] for cell in cells if cell[:2] == place} for place in places]
    assert all(way == ways[0] for way in ways)


@pytest.mark.parametrize('rehearse', [False, True])
def test_main_accepts_every_run_under_its_own_name(rehearse):
    flags = {}
    for name in FIGURES:
        runs = runs_of(name, seeds=2, rehearse=rehearse)
        assert len({run.name for run in runs}) == len(runs) == 2 * len(FIGURES[name].cells)
        for run in runs:
            args = main.check_arguments(main.parse_arguments(list(run.flags)))
            assert args.run_name == run.name and args.train_type == run.cell.train_type
            assert args.logs_dir == ('logs/rehearsal' if rehearse else 'logs')
            assert flags.setdefault(run.name, run.flags) == run.flags  # figures share runs
    for name in ('15ad', '16', '21', '23', '15_ego'):
        assert {run.name for run in runs_of(name)} <= {run.name for run in runs_of('15')}


def test_energy_is_drawn_for_complete_data_sets():
    runs = runs_of('23')
    there = {run.name for run in runs if run.cell.dataset_name != DOGS}
    for figure, finished, expected in (
            ('23', there, there), ('23', there - {runs[0].name}, {
                run.name for run in runs if run.cell.dataset_name == PET}), ('23', set(), set()),
            ('15', there, set())):
        drawn = reproduce.drawable(FIGURES[figure], runs, finished)
        assert {run.name for run in drawn} == expected


def test_every_figure_has_its_script_a_link():
    scripts = glob.glob(os.path.join(ROOT, 'scripts', 'run_figure*.sh'))
    assert {os.path.basename(path) for path in scripts} == {
        'run_{}.sh'.format(figure_grid.file_name(name)) for name in FIGURES}
    assert {os.readlink(path) for path in scripts} == {'_figure.sh'}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Makes a root folder with links to the scripts, and enters it."""
    (tmp_path / 'scripts').mkdir()
    for path in glob.glob(os.path.join(ROOT, '*.py')) + glob.glob(
            os.path.join(ROOT, 'scripts', '*.py')):
        (tmp_path / os.path.relpath(path, ROOT)).symlink_to(path)
    (tmp_path / 'elastic').symlink_to(os.path.join(ROOT, 'elastic'))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small_figure(monkeypatch, *cells, **rehearsal):
    """Makes these the cells of figure 15ad, saves their network here, and returns their runs."""
    network().save(MODEL_FILE)
    monkeypatch.setitem(FIGURES, '15ad', FIGURES['15ad']._replace(cells=cells))
    for flag, value in dict(rehearsal, weights='imagenet').items():  # its own
        monkeypatch.setitem(figure_grid.REHEARSAL, flag, value)
    return runs_of('15ad', rehearse=True)


@pytest.mark.thorough
def test_a_failed_run_is_reported_and_the_others_run_once(here, monkeypatch, tmp_path, capfd):
    for name in ('cat', 'dog'):
        (tmp_path / 'broken' / name).mkdir(parents=True)
        for i in range(6):
            (tmp_path / 'broken' / name / '{}.jpg'.format(i)).write_bytes(b'not an image')
    monkeypatch.setitem(figure_grid.REHEARSED_DATA, PET, 'folder:{}'.format(tmp_path / 'broken'))
    cells = [Cell(MODEL_FILE, data, 'traditional_tl_training') for data in (CUB, PET)]
    head, impossible = [run.name for run in small_figure(
        monkeypatch, *cells, num_epochs=2, steps_per_epoch=2, validation_steps=2)]
    assert reproduce.main(['15ad', '--rehearse'], str(here)) == 1
    out, err = capfd.readouterr()
    assert '.jpg' in err and 'failed with status 2: ' + impossible in err
    assert '1 of the 2 runs of figure 15ad are missing: ' + impossible in out
    assert 'figure 15ad is not drawn' in out
    summary = here / 'logs/rehearsal' / head / 'summary.json'
    before = summary.read_bytes()
    assert reproduce.main(['15ad', '--rehearse', '--only', 'caltech'], str(here)) == 0
    assert head + ': finished before' in capfd.readouterr().out
    assert summary.read_bytes() == before
    reproduce.main(['15ad', '--rehearse', '--dry_run', '--only', 'caltech'], str(here))
    rows = [line.split() for line in capfd.readouterr().out.splitlines() if MODEL_FILE in line]
    assert rows == [[head, 'finished', '0.0', 'min']]


# Waits in place of training, as main.py does, until its script is gone.
WAITS = """
import sys, time
sys.path.insert(0, {root!r})
from elastic.runs.signals import Signals
with Signals() as signals:
    try:
        print('begins', flush=True)
        time.sleep(100)
    except KeyboardInterrupt:
        print('stopped by', signals.name, flush=True)
sys.exit(128 + (signals.caught or 0))
"""
GRID = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests are in background
sys.path[:0] = [{root!r}, {root!r} + '/scripts']
import reproduce
from elastic import command_line
from elastic.compat import start
command_line.run(lambda argv: reproduce.main(argv, {folder!r}), ['15ad', '--rehearse'])
"""


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='kills as Linux does')
@pytest.mark.parametrize('number, status', [
    (signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 128 + signal.SIGINT)])
def test_a_stopped_grid_stops_its_run_and_starts_no_other(tmp_path, number, status):
    (tmp_path / 'main.py').write_text(WAITS.format(root=ROOT))
    grid = subprocess.Popen(
        [sys.executable, '-c', GRID.format(root=ROOT, folder=str(tmp_path))],
        stdout=subprocess.PIPE, universal_newlines=True)
    assert 'begins\n' in iter(grid.stdout.readline, '')
    grid.send_signal(number)
    rest = grid.communicate()[0]  # until the run has closed its output, too
    assert grid.returncode == status
    assert 'stopped by its script' in rest and 'begins' not in rest


PROFILER = """
import sys
sys.path[:0] = [{root!r}, {support!r}]
from elastic import command_line
from elastic.compat import start
start.quiet_tensorflow()
import profiler
from fixed_tables import fixed_profile
profiler.profile_model = fixed_profile
command_line.run(profiler.main)
"""


@pytest.mark.thorough
def test_a_dry_run_prints_hours_and_each_rho_out_of_reach(here, monkeypatch, capsys):
    """Runs profiler.py with fixed times, so that the outcome does not depend on the machine."""
    (here / 'profiler.py').unlink()
    (here / 'profiler.py').write_text(PROFILER.format(
        root=ROOT, support=os.path.join(ROOT, 'tests', 'support')))
    runs = small_figure(monkeypatch, Cell(MODEL_FILE, CUB, 'full_training'), *[
        figure_grid.elastic(MODEL_FILE, CUB, rho) for rho in (0.7, 0.05)], num_epochs=1000)
    assert reproduce.main(['15ad', '--rehearse', '--dry_run'], str(here)) == 0
    out = capsys.readouterr().out
    rows = [line.split('  ', 1)[1].split() for line in out.splitlines()
            if re.match('model.* (min|h)$| *total', line)]
    minutes = [{'min': 1, 'h': 60}[row[-1]] for row in rows]
    full, most, least, total = [float(row[-2]) * unit for row, unit in zip(rows, minutes)]
    assert rows[2][:3] == ['out', 'of', 'reach'] and least == 0 < most < full
    assert total == pytest.approx(full + most, abs=0.05 * sum(minutes))  # rounded when printed
    assert 'rho0.05_interval4_probe1_seed0: rho 0.05 is out of reach' in out
    assert [path.name for path in (here / 'logs/rehearsal').iterdir()] == [
        'model_32_10_8_profile']
    # A run that finds its rho out of reach is reported with the reason, not as a failure.
    (here / 'main.py').unlink()
    (here / 'main.py').write_text('raise SystemExit(2)')  # the status of a refusal
    assert reproduce.main(['15ad', '--rehearse', '--only', 'rho0.05'], str(here)) == 0
    out, err = capsys.readouterr()
    assert re.search('left out of the figure: .*rho0.05.*: rho 0.05 is out of reach', out)
    assert 'failed' not in err
    # The table of another device says nothing about this one.
    path, _ = reproduce.table_of(reproduce.arguments_of(runs[0]))
    table = TensorTimings.load(path)
    table._replace(key=dict(table.key, host='another')).save(path)
    assert reproduce.impossible(runs) == {}


def made(here, run, settings, **changes):
    """Makes the folder of a finished run, as main.py leaves it, with some settings changed."""
    folder = make_run(here / 'logs/rehearsal', run.name, run.cell.train_type, **changes)
    decisive = main.decisive_settings(
        main.run_settings(main.check_arguments(reproduce.arguments_of(run))))
    (folder / 'settings.json').write_text(json.dumps(dict(decisive, **settings)))


@pytest.mark.parametrize('settings, host, says', [
    ({'rho': 0.9}, 'tx2', 'exists with other settings .*rho'),
    pytest.param({}, 'tx2', 'was made on tx2, this is', marks=pytest.mark.thorough)])
def test_runs_that_do_not_belong_to_the_figure_are_refused_before_training(
        here, settings, host, says):
    made(here, runs_of('15ad', rehearse=True)[0], settings, host=host)
    with pytest.raises(UserError, match=says):
        reproduce.main(['15ad', '--rehearse'], str(here))
    assert len(list((here / 'logs/rehearsal').iterdir())) == 1


def test_a_figure_of_finished_runs_is_drawn_or_says_why_not(here, monkeypatch, capsys):
    monkeypatch.setitem(FIGURES, '15ad', FIGURES['15ad']._replace(cells=FIGURES['15ad'].cells[:1]))
    made(here, runs_of('15ad', rehearse=True)[0], {})
    assert reproduce.main(['15ad', '--rehearse'], str(here)) == 0
    assert (here / 'figures/rehearsal/figure15ad.png').exists()
    shutil.rmtree(str(here / 'figures'))
    (here / 'figures').write_text('')
    assert reproduce.main(['15ad', '--rehearse'], str(here)) == 1
    assert 'figure 15ad is not drawn: ' in capsys.readouterr().err


def test_jobs_are_the_commands_of_unfinished_runs(here, capsys):
    reproduce.main(['17ac', '--jobs', 'jobs.txt', '--seeds', '3'], str(here))
    lines = (here / 'jobs.txt').read_text().splitlines()
    assert len(lines) == 27 and all(' main.py --model_name=resnet50 ' in line for line in lines)
    assert not (here / 'logs').exists()


WRONG = [
    (['16', '--only', 'birds2012'], "--only 'birds2012' fits no run of this figure"),
    (['18'], "unknown figure '18'"), (['15', '--meter_csv', 'none.csv'], 'no such file'),
    (['15', '--seeds', '0'], '0 is not a whole number'),
    (['15', '--jobs', 'no/such/folder'], '--jobs')]


def test_wrong_arguments_are_refused_before_anything_heavy():
    code = ("import sys; sys.path.insert(0, 'scripts')\n"
            "from elastic import command_line; import reproduce\n"
            "for arguments in {}:\n"
            "    try: command_line.run(reproduce.main, arguments)\n"
            "    except SystemExit as stop: print(stop.code, file=sys.stderr)\n"
            "print([m for m in ('numpy', 'tensorflow') if m in sys.modules])")
    _, out, said = script('-c', code.format([arguments for arguments, _ in WRONG]))
    assert out == '[]\n', said
    errors = said.split('\n2\n')[:-1]
    assert len(errors) == len(WRONG)
    assert all(says in error for (_, says), error in zip(WRONG, errors))


def test_hours_follow_steps_and_shares():
    timings = table_of(op_times({1 << k: 1.0 + k for k in range(6)}, 6))
    timings = timings._replace(names=['layer_{}/kernel'.format(k) for k in range(6)])
    whole, head, _, half = [reproduce.estimated_hours(run, timings) for run in runs_of('15ad')]
    tests = 12 * 5794 / 4 * timings.t_fp / 3.6e6
    assert whole == pytest.approx(12 * 1498 * timings.t_step / 3.6e6 + tests)
    assert half - tests == pytest.approx(0.5 * (whole - tests)) and head < whole
