"""The command lines end to end: good input runs, and what a run leaves is whole."""

import json
import os
import shutil
import time
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest

import main
import profiler
from elastic import command_line
from elastic.command_line import UserError
from elastic.compat import keras_stack
from elastic.files import read_json
from elastic.runs.folder import read_run
from elastic.runs.recorder import open_run
from small_runs import flags, script


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """One elastic run through main(), which profiles first."""
    folder = tmp_path_factory.mktemp('logs')
    arguments = flags(folder, '--rho', '0.6', '--interval', '1', '--run_name', 'one',
                      '--save_model', '--save_txt', '1')
    assert main.main(arguments) == 0
    return folder, arguments


def test_run_folder_is_complete(logs):
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
            'checkpoint'} <= files and any(name.startswith('events.out') for name in files)
    assert set(os.listdir(str(folder / 'one' / 'checkpoint'))) == {
        'weights.npz', keras_stack.MODEL_FILE}


def test_finished_run_says_so_and_is_not_touched(logs, capsys):
    folder, arguments = logs
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size)
              for p in (folder / 'one').iterdir()}
    assert main.main(arguments) == 0
    assert 'already finished with the same settings' in capsys.readouterr().out
    assert before == {p.name: (p.stat().st_mtime_ns, p.stat().st_size)
                      for p in (folder / 'one').iterdir()}


def test_other_settings_under_the_same_name_are_refused(logs):
    folder, arguments = logs
    before = (folder / 'one' / 'summary.json').read_bytes()
    with pytest.raises(UserError, match="run 'one'.*seed 0 there, 3 now"):
        main.main(arguments + ['--seed', '3'])
    assert (folder / 'one' / 'summary.json').read_bytes() == before


def test_interrupted_run_starts_over(logs, capsys):
    folder, arguments = logs
    arguments = arguments + ['--run_name', 'two', '--train_type', 'traditional_tl_training',
                             '--num_epochs', '1']
    (folder / 'two').mkdir()
    settings = main.decisive_settings(main.run_settings(main.check_arguments(
        main.parse_arguments(arguments))))
    (folder / 'two' / 'settings.json').write_text(json.dumps(settings))
    (folder / 'two' / 'epochs.csv').write_text('half a line')
    (folder / 'two' / 'summary.json').write_text('')  # the power failed as it was written
    now, meter = time.time(), folder / 'meter.csv'
    meter.write_text('timestamp,watts\n' + ''.join(
        '{},5\n'.format(now + second) for second in range(-5, 600)))
    assert main.main(arguments + ['--meter_csv', str(meter)]) == 0
    summary = read_run(str(folder / 'two')).summary
    assert summary['epochs'] == 1 and summary['energy_source'] == 'meter log meter.csv'
    assert summary['energy_joules'] == pytest.approx(5 * summary['train_seconds'], rel=0.05)


def test_a_run_that_another_process_trains_is_left_alone(tmp_path):
    folder = str(tmp_path / 'run')
    lock = open_run(folder, {'seed': 0})
    (tmp_path / 'run' / 'epochs.csv').write_text('of the other process')
    with pytest.raises(UserError, match="run 'run': another process is training it"):
        open_run(folder, {'seed': 0})
    assert (tmp_path / 'run' / 'epochs.csv').exists()
    os.close(lock)
    os.close(open_run(folder, {'seed': 0}))
    assert not (tmp_path / 'run' / 'epochs.csv').exists()


def test_a_run_that_another_process_finished_meanwhile_is_kept(logs, capsys, monkeypatch):
    """It was unfinished when main asked first, and is finished once its data are loaded."""
    folder, arguments = logs
    load = main.load_data

    def load_slowly(settings):
        shutil.copytree(str(folder / 'one'), str(folder / 'late'))
        return load(settings)
    monkeypatch.setattr(main, 'load_data', load_slowly)
    assert main.main(arguments + ['--run_name', 'late']) == 0
    assert 'already finished with the same settings' in capsys.readouterr().out
    for name in os.listdir(str(folder / 'one')):
        if (folder / 'one' / name).is_file():
            assert (folder / 'late' / name).read_bytes() == (folder / 'one' / name).read_bytes()
    settings = read_json(str(folder / 'late' / 'settings.json'))
    for _ in range(2):  # the lock is free again
        assert open_run(str(folder / 'late'), settings) is None
    with pytest.raises(UserError, match='other settings'):
        open_run(str(folder / 'late'), dict(settings, seed=9))
    (folder / 'late' / 'summary.json').unlink()
    os.close(open_run(str(folder / 'late'), settings))


def test_a_damaged_meter_log_costs_the_energy_and_not_the_run(logs, capsys):
    folder, arguments = logs
    arguments = arguments + ['--run_name', 'metered', '--train_type', 'traditional_tl_training',
                             '--num_epochs', '1', '--meter_csv', str(folder / 'damaged.csv')]
    (folder / 'damaged.csv').write_bytes(b'timestamp,watts\n' + b'\0' * 200000 + b'\n')
    assert main.main(arguments) == 0
    assert 'energy not measured: ' in capsys.readouterr().err
    summary = read_run(str(folder / 'metered')).summary
    assert summary['energy_joules'] is None and summary['energy_source'] == 'meter log damaged.csv'
    assert 'damaged.csv, line 2: ' in summary['energy_note']


def test_table_is_reused_only_on_an_exact_match(logs, capsys):
    folder, arguments = logs
    table = str(folder / 'mobilenetv2_32_10_64_profile' / 'timings.json')
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
    assert stored.key['model'] == 'mobilenetv2' and stored.key['dtype'] == 'float32'


def test_rho_out_of_reach_names_the_smallest(logs):
    folder, arguments = logs
    with pytest.raises(UserError, match='--rho 0.01 is out of reach.*smallest rho .* 0.'):
        main.main(arguments + ['--rho', '0.01', '--run_name', 'never'])
    assert not (folder / 'never').exists()


def test_diverging_run_exits_1_and_leaves_nothing(logs, capsys):
    folder, arguments = logs
    assert main.main(arguments + ['--train_type', 'full_training', '--learning_rate', '1e18',
                                  '--run_name', 'burst']) == 1
    assert 'smaller --learning_rate' in capsys.readouterr().err
    assert not (folder / 'burst').exists()  # not one epoch was done


def test_saved_model_can_be_trained_on(logs, tmp_path):
    """By path, and by its portable weights: the same network."""
    from models import build_model
    checkpoint = logs[0] / 'one' / 'checkpoint'
    by_path = build_model(str(checkpoint / keras_stack.MODEL_FILE), (32, 32, 3), 10)
    by_weights = build_model('mobilenetv2', (32, 32, 3), 10, str(checkpoint / 'weights.npz'),
                             alpha=0.35)
    images = np.random.RandomState(0).uniform(0, 255, (2, 32, 32, 3)).astype('float32')
    np.testing.assert_allclose(np.array(by_path(images)), np.array(by_weights(images)), rtol=1e-4,
                               atol=1e-5)


@pytest.mark.skipif(not keras_stack.KERAS_3, reason='no op determinism before TensorFlow 2.9')
def test_two_deterministic_runs_of_one_seed_are_identical(logs):
    """Weights and selections, in two processes side by side, with the table saved before."""
    folder, _ = logs
    with ThreadPool(2) as pool:
        ended = pool.map(lambda name: script('main.py', *flags(
            folder, '--rho', '0.6', '--interval', '1', '--run_name', name, '--save_model',
            '--deterministic', '--seed', '5')), ('d1', 'd2'))
    for code, out, err in ended:
        assert code == 0, out + err
    first, second = [np.load(str(folder / name / 'checkpoint' / 'weights.npz'))
                     for name in ('d1', 'd2')]
    assert first.files == second.files
    assert all(first[key].tobytes() == second[key].tobytes() for key in first.files)
    assert (folder / 'd1' / 'selections.csv').read_bytes() == (
        folder / 'd2' / 'selections.csv').read_bytes()


@pytest.mark.skipif(keras_stack.KERAS_3, reason='today\'s TensorFlow has op determinism')
def test_deterministic_is_refused_where_tensorflow_cannot(logs):
    with pytest.raises(UserError, match='--deterministic needs TensorFlow 2.9'):
        main.main(logs[1] + ['--deterministic', '--run_name', 'never'])


def costs_in(out):
    """The last table that profiler.py prints, and the notes below it."""
    return out[out.index('12 epochs of '):]


def test_profiler_command_prints_and_writes_its_table(tmp_path, capsys):
    from models import build_model
    arguments = ['--model_name', 'mobilenetv2', '--alpha', '0.35', '--input_size', '32',
                 '--num_classes', '10', '--logs_dir', str(tmp_path), '--augmentation', 'none',
                 '--data_dir', str(tmp_path)]
    digits = ['--dataset_name', 'digits']
    assert profiler.main(arguments + digits + ['--plot']) == 0
    out = capsys.readouterr().out
    for words in ('peak memory measured in', '12 epochs of 10,776 images',
                  'elastic_training rho 0.25',
                  'steps are timed on a batch of digits\n', 'head/kernel', '1280x10',
                  't_dw (ms)', 't_up (ms)', 'forward pass (t_fp)', 'attributed: 100.0 %',
                  'profiled in'):
        assert words in out
    first = costs_in(out)
    folder = tmp_path / 'mobilenetv2_32_10_4_profile'
    assert {'timings.json', 'timings.csv', 'figure.png', 'plugins'} <= set(
        os.listdir(str(folder)))
    assert 't_up_ms' in (folder / 'timings.csv').read_text().split('\n')[0]  # not the figure's
    # It serves any data of these settings; only where one is measured is a batch asked for.
    assert profiler.main(arguments) == 0
    out = capsys.readouterr().out
    assert 'timing table: ' in out and 'timed on' not in out and 'measured in' not in out
    assert '12 epochs of 5,994 images' in out
    assert profiler.main(arguments + digits) == 0
    assert costs_in(capsys.readouterr().out) == first
    settings = main.run_settings(main.check_arguments(main.parse_arguments(arguments + digits)))
    model = build_model('mobilenetv2', (32, 32, 3), 10, 'none', 0.35, 'frozen')
    main.profile(settings, model, main.load_data(settings))
    assert 'timing table: ' in capsys.readouterr().out


def test_a_profile_tells_that_and_why_it_is_of_noise(tmp_path, capsys):
    settings = command_line.settings_of(profiler.parse_arguments(['--num_classes', '200']),
                                        profiler.StepSettings)
    assert profiler.batch_for(settings, 'caltech_birds2011', str(tmp_path)) is None
    assert profiler.batch_for(settings, 'digits') is None
    assert capsys.readouterr().out == (
        'steps are timed on noise: caltech_birds2011 is not prepared in {}\n'
        'steps are timed on noise: digits has 10 classes, not 200\n'.format(tmp_path))


def test_prune_training_shrinks_the_network_and_saves_the_smaller_one(tmp_path, capsys):
    """A threshold that many fresh channels fall below: what years of training would make vanish."""
    from models import build_model
    arguments = flags(tmp_path, '--train_type', 'prunetrain', '--prune_interval', '1',
                      '--prune_threshold', '0.12', '--save_model', '--run_name', 'pruned')
    assert main.main(arguments) == 0
    assert 'channels have vanished: the network is rebuilt' in capsys.readouterr().out
    summary = read_run(str(tmp_path / 'pruned')).summary
    assert summary['scheme'] == 'prune_training' and summary['channels_removed'] > 0
    whole = build_model('mobilenetv2', (32, 32, 3), 10, 'none', alpha=0.35)
    with np.load(str(tmp_path / 'pruned' / 'checkpoint' / 'weights.npz')) as stored:
        assert sum(stored[key].size for key in stored.files) < whole.count_params()
