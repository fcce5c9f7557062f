"""Tests the command lines end to end: good input runs, and leaves complete files."""

import json
import os
import re
import shutil
import time
from multiprocessing.pool import ThreadPool

import pytest

import main
import profiler
from cached_runs import BATCH, SIZE, network
from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.files import read_json
from elastic.runs.folder import read_run
from elastic.runs.recorder import open_run
from elastic.settings import settings_of
from fixed_tables import store_table
from models import build_model
from small_runs import at_line, outcome, quick_flags, run_settings_of, script

TABLE = '{}_{}_10_{}_profile'.format(os.path.splitext(keras_stack.MODEL_FILE)[0], SIZE, BATCH)
FULL = ['--train_type', 'full_training', '--num_epochs', '1']


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """Returns (folder, flags) of one elastic run with a fixed timing table."""
    folder = tmp_path_factory.mktemp('logs')
    flags = quick_flags(folder, '--rho', '0.6', '--interval', '1', '--run_name', 'one',
                        '--save_model', '--save_txt', '1')
    store_table(flags)
    assert main.main(flags) == 0
    return folder, flags


def test_the_folder_of_a_run_is_complete(logs):
    folder, _ = logs
    run = read_run(str(folder / 'one'))
    assert run.summary['rho'] == 0.6 and run.summary['importance'] == 'gradient_update'
    for key in ('run_name', 'scheme', 'model_name', 'dataset_name', 'seed', 'epochs', 'stack',
                'final_accuracy', 'best_accuracy', 'train_seconds', 'step_seconds', 'host',
                'selection_seconds', 'importance_seconds', 'step_ms'):
        assert key in run.summary
    assert (run.summary['throttled_epochs'] is None) == (run.epochs['throttled'] == [None, None])
    files = set(os.listdir(str(folder / 'one')))
    assert {'summary.json', 'settings.json', 'epochs.csv', 'selections.csv', 'epochs.txt',
            'predictions.csv', 'classes.csv', 'checkpoint'} <= files and any(
                name.startswith('events.out') for name in files)
    assert set(os.listdir(str(folder / 'one' / 'checkpoint'))) == {
        'weights.npz', keras_stack.MODEL_FILE, 'class_names.txt'}
    path = folder / 'one' / 'flags.txt'
    assert path.read_text().startswith('# To repeat this run: python main.py @{}, '.format(path))


def test_a_finished_run_is_not_repeated(logs, capsys):
    folder, flags = logs
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size)
              for p in (folder / 'one').iterdir()}
    assert main.main(flags) == 0
    assert 'already finished with the same settings' in capsys.readouterr().out
    assert before == {p.name: (p.stat().st_mtime_ns, p.stat().st_size)
                      for p in (folder / 'one').iterdir()}


def test_other_settings_under_the_same_name_are_refused(logs):
    folder, flags = logs
    before = (folder / 'one' / 'summary.json').read_bytes()
    with pytest.raises(UserError, match="run 'one'.*seed 0 there, 3 now.*choose another --run_name "
                       '.with --weights .*weights.npz to train on from there., or start over with '
                       '--restart'):
        main.main(flags + ['--seed', '3'])
    assert (folder / 'one' / 'summary.json').read_bytes() == before


def test_a_run_that_lost_its_records_starts_over_and_reads_its_meter(logs):
    folder, flags = logs
    flags = flags + FULL + ['--run_name', 'two']
    (folder / 'two').mkdir()
    (folder / 'two' / 'settings.json').write_text(
        json.dumps(main.decisive_settings(run_settings_of(flags))))
    (folder / 'two' / 'epochs.csv').write_text('half a line')
    (folder / 'two' / 'summary.json').write_text('')  # as if power failed while it was written
    now, meter = time.time(), folder / 'meter.csv'
    meter.write_text('timestamp,watts\n' + ''.join(
        '{},5\n'.format(now + second) for second in range(-5, 3600)))
    assert main.main(flags + ['--meter_csv', str(meter)]) == 0
    summary = read_run(str(folder / 'two')).summary
    assert summary['epochs'] == 1 and summary['energy_source'] == 'meter log meter.csv'
    measured = sum(end - start for start, end in summary['training_intervals'])
    assert summary['energy_joules'] == pytest.approx(5 * measured, rel=1e-3)


def test_a_run_that_another_process_has_just_finished_is_kept(logs):
    """The run is unfinished when main first looks, and finished once its table is read."""
    folder, flags = logs
    with at_line('timing table: ', lambda: shutil.copytree(
            str(folder / 'one'), str(folder / 'late'))) as out:
        assert main.main(flags + ['--run_name', 'late']) == 0
    assert 'already finished with the same settings' in out.getvalue()
    for name in os.listdir(str(folder / 'one')):
        if (folder / 'one' / name).is_file():
            assert (folder / 'late' / name).read_bytes() == (folder / 'one' / name).read_bytes()
    (folder / 'late' / 'summary.json').unlink()
    settings = read_json(str(folder / 'late' / 'settings.json'))
    open_run(str(folder / 'late'), settings).close()  # the lock was released


def test_a_damaged_meter_log_loses_the_energy_but_not_the_run(logs, capsys):
    folder, flags = logs
    (folder / 'damaged.csv').write_bytes(b'timestamp,watts\n' + b'\0' * 200000 + b'\n')
    assert main.main(flags + FULL + ['--run_name', 'metered', '--meter_csv',
                                     str(folder / 'damaged.csv')]) == 0
    assert 'energy not measured: ' in capsys.readouterr().err
    summary = read_run(str(folder / 'metered')).summary
    assert summary['energy_joules'] is None and summary['energy_source'] == 'meter log damaged.csv'
    assert 'damaged.csv, line 2: ' in summary['energy_note']


def test_a_timing_table_is_reused_only_for_an_equal_key(logs, capsys):
    table = str(logs[0] / TABLE / 'timings.json')
    stored = profiler.TensorTimings.load(table)
    capsys.readouterr()
    assert profiler.stored_table(table, stored.key).key == stored.key
    assert 'timing table:' in capsys.readouterr().out
    other = dict(stored.key, host='another board')
    assert profiler.stored_table(table, other) is None
    assert 'host:' in capsys.readouterr().out
    assert set(stored.key) == {
        'model', 'network', 'alpha', 'input_size', 'batch_size', 'num_classes', 'optimizer',
        'decay', 'clipped', 'bn_statistics', 'augmentation', 'dtype', 'inter_op_threads',
        'intra_op_threads', 'environment', 'host', 'tensorflow', 'keras'}


def test_a_rho_out_of_reach_is_refused_with_the_smallest(logs):
    folder, flags = logs
    with pytest.raises(UserError, match='--rho 0.01 is out of reach.*smallest rho .* 0.'):
        main.main(flags + ['--rho', '0.01', '--run_name', 'never'])
    assert not (folder / 'never').exists()


def test_a_diverging_run_exits_1_and_leaves_nothing(logs, capsys):
    folder, flags = logs
    assert main.main(flags + FULL + ['--learning_rate', '1e18', '--run_name', 'burst']) == 1
    assert re.search(r'epoch 1/1.* smaller --learning_rate \(it was .*e\+1\d\)',
                     capsys.readouterr().err)
    assert not (folder / 'burst').exists()  # no epoch was finished


@pytest.mark.thorough
@pytest.mark.skipif(not keras_stack.KERAS_3, reason='no op determinism before TensorFlow 2.9')
def test_two_deterministic_processes_give_the_same_bits_also_if_one_exports(logs):
    folder, _ = logs
    with ThreadPool(2) as pool:
        ended = pool.map(lambda more: script('main.py', *quick_flags(
            folder, '--rho', '0.6', '--interval', '1', '--deterministic', '--seed', '5',
            '--run_name', *more)), (['d1', '--export', 'litert_int8'], ['d2']))
    for code, out, err in ended:
        assert code == 0 and 'timing table: ' in out, out + err
    assert outcome(folder / 'd1') == outcome(folder / 'd2')


@pytest.mark.skipif(keras_stack.KERAS_3, reason='today\'s TensorFlow has op determinism')
def test_deterministic_is_refused_where_tensorflow_cannot(logs):
    with pytest.raises(UserError, match='--deterministic needs TensorFlow 2.9'):
        main.main(logs[1] + ['--deterministic', '--run_name', 'never'])


@pytest.mark.thorough
def test_the_profiler_prints_and_writes_its_table(tmp_path, capsys):
    path = str(tmp_path / keras_stack.MODEL_FILE)
    network().save(path)
    flags = ['--model_name', path, '--input_size', str(SIZE), '--num_classes', '10', '--logs_dir',
             str(tmp_path), '--augmentation', 'none', '--data_dir', str(tmp_path)]
    digits = ['--dataset_name', 'digits']
    assert profiler.main(flags + digits + ['--plot']) == 0
    out = capsys.readouterr().out
    for words in ('peak memory measured in', '12 epochs of 10,776 images',
                  'elastic_training rho 0.25',
                  'steps are timed on a batch of digits\n', 'head/kernel', '16x10',
                  't_dw (ms)', 't_up (ms)', 'forward pass (t_fp)', 'attributed: ', 'profiled in'):
        assert words in out
    first, folder = out[out.index('12 epochs of '):], tmp_path / TABLE.replace(
        '_{}_'.format(BATCH), '_4_')
    assert {'timings.json', 'timings.csv', 'figure.png'} <= set(os.listdir(str(folder)))
    assert 't_up_ms' in (folder / 'timings.csv').read_text().split('\n')[0]  # not the figure's CSV
    # The table serves any data of these settings; only measuring one needs a batch.
    assert profiler.main(flags) == 0
    out = capsys.readouterr().out
    assert 'timing table: ' in out and 'timed on' not in out and 'measured in' not in out
    assert '12 epochs of 5,994 images' in out
    assert profiler.main(flags + digits) == 0
    assert capsys.readouterr().out.endswith(first)
    settings = run_settings_of(flags + digits)
    main.profile(settings, build_model(path, (SIZE, SIZE, 3), 10), main.load_data(settings))
    assert 'timing table: ' in capsys.readouterr().out


def test_a_profile_on_noise_says_why(tmp_path, capsys):
    settings = settings_of(profiler.parse_arguments(['--num_classes', '200']),
                           profiler.StepSettings)
    assert profiler.batch_for(settings, 'caltech_birds2011', str(tmp_path)) is None
    assert profiler.batch_for(settings, 'digits') is None
    assert capsys.readouterr().out == (
        'steps are timed on noise: caltech_birds2011 is not prepared in {}\n'
        'steps are timed on noise: digits has 10 classes, not 200\n'.format(tmp_path))
