"""Tests the flags of the prefix cache: refusals, why a run has no cache, what a run reports."""

import os

import pytest

import main
from elastic.errors import UserError
from elastic.files import read_json
from elastic.planning.plans import prefix_cache_of
from elastic.runs.folder import read_run
from fixed_tables import store_table
from refusals import assert_refused
from small_runs import flags, quick_flags, run_settings_of, stopped_at

FROZEN = ['--bn_statistics', 'frozen', '--steps_per_epoch', '2', '--train_images', '128',
          '--interval', '2', '--num_epochs', '4', '--validation_steps', '1']


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize('arguments, words', [
    (['--prefix_cache', 'maybe'], 'choose from'), (['--cache_gb', '0'], '--cache_gb'),
    (['--cache_dir', __file__], 'is no folder; give one that exists'),
    (['--cache_dir', '/proc/self'], "--cache_dir '/proc/self' cannot be written"),
    (['--prefix_cache', 'on'], 'needs --bn_statistics frozen')])  # with --weights none
def test_bad_flags_exit_2_in_one_line_before_anything_is_written(
        tmp_path, capsys, arguments, words):
    assert_refused(flags(tmp_path, *arguments), words, tmp_path, capsys)


def test_the_place_of_a_cache_does_not_change_the_settings_of_a_run(tmp_path):
    one = run_settings_of(flags(tmp_path, '--cache_dir', str(tmp_path), '--cache_gb', '0.5'))
    assert one.cache.cache_gb == 0.5
    assert main.decisive_settings(one) == main.decisive_settings(run_settings_of(flags(tmp_path)))


# ---------------------------------------------------------------- which runs have a cache

def cache_of(tmp_path, *more):
    """Returns the PrefixCache, or NoCache, of a run on the digits with these flags."""
    settings = run_settings_of(flags(tmp_path, *(FROZEN + list(more))))
    return prefix_cache_of(settings, main.load_data(settings))


AUGMENTED = ['--augmentation', 'flip+rotate']


@pytest.mark.parametrize('more, lines', [
    (['--views', 'fresh'] + AUGMENTED, ['no prefix cache: each epoch draws new augmentations; '
                                        '--views held keeps them for --interval epochs']),
    (['--prefix_cache', 'off'], []), (['--train_type', 'full_training'], [])])
def test_a_run_says_why_it_has_no_cache_unless_that_is_plain(tmp_path, capsys, more, lines):
    assert not cache_of(tmp_path, *more).used
    assert capsys.readouterr().out.splitlines() == lines


def test_a_deterministic_run_asks_the_cache_for_exact_bits(tmp_path):
    assert cache_of(tmp_path, '--deterministic').exact and not cache_of(tmp_path).exact


def test_views_stay_open_only_where_the_timing_table_decides(tmp_path):
    more = ['--bn_statistics', 'frozen', '--num_epochs', '4', '--interval', '2']
    assert run_settings_of(flags(tmp_path, *(more + AUGMENTED))).data.views == 'auto'
    assert run_settings_of(flags(tmp_path, *more)).data.views == 'fresh'
    held = run_settings_of(flags(tmp_path, *(more + ['--prefix_cache', 'on'])))
    assert held.data.views == 'held'


def test_prefix_cache_on_is_refused_where_no_image_comes_back(tmp_path):
    with pytest.raises(UserError, match='--prefix_cache on: no image comes back in one epoch'):
        run_settings_of(flags(tmp_path, *FROZEN, '--prefix_cache', 'on', '--num_epochs', '1'))
    with pytest.raises(UserError, match='--prefix_cache on: each epoch draws new augmentations'):
        run_settings_of(flags(tmp_path, *FROZEN, *AUGMENTED, '--prefix_cache', 'on', '--interval',
                              '1'))


# ---------------------------------------------------------------- runs

@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp('logs')


@pytest.mark.thorough
def test_training_the_head_reads_all_but_the_head_from_the_cache(logs, capsys, tmp_path):
    assert main.main(flags(logs, *FROZEN, '--train_type', 'traditional_tl_training', '--run_name',
                           'head', '--cache_dir', str(tmp_path))) == 0
    assert 'prefix cache: 5 kB an image, 1 MB in all' in capsys.readouterr().out
    summary = read_run(str(logs / 'head')).summary
    assert summary['cache_misses'] == 128 and summary['cache_hits'] == 3 * 128
    assert summary['read_step_ms'] > 0 < summary['fill_step_ms']
    assert summary['cache_bytes'] == 128 * 8 * ((4 * 1280 + 4 + 7) // 8)
    assert summary['cache_seconds_writing'] > 0 < summary['cache_seconds_reading']
    assert os.listdir(str(tmp_path)) == []  # the cache leaves no file


SLOW = 2e3, 4e3  # ms: of a device on which a cache pays


@pytest.mark.thorough
def test_an_elastic_run_uses_the_cache(logs, capsys):
    given = quick_flags(logs, '--prefix_cache', 'auto', '--num_epochs', '4', '--interval', '2')
    store_table(given, *SLOW)
    assert main.main(given + ['--rho', '0.6', '--run_name', 'elastic']) == 0
    out, summary = capsys.readouterr().out, read_run(str(logs / 'elastic')).summary
    assert 'no prefix cache' not in out and summary['prefix_cache'] == 'on'
    assert summary['cache_hits'] + summary['cache_misses'] == 4 * 48


def augmented(logs, name, *more):
    """Returns the flags of an elastic run of four epochs whose images are augmented.

    Stores its timing table.
    """
    given = quick_flags(logs, '--prefix_cache', 'auto', '--num_epochs', '4', '--interval', '2',
                        '--run_name', name, *(AUGMENTED + list(more)))
    store_table(given, *SLOW)
    return given


HELD = ('--views held, as rho 0.3 is out of reach without the prefix cache: each image keeps its '
        'augmentation for 2 epochs\n')


@pytest.mark.parametrize('rho, more, views, cache', [
    ('0.3', [], 'held', 'on'), pytest.param('0.6', [], 'fresh', 'off', marks=pytest.mark.thorough),
    pytest.param('0.6', ['--views', 'held'], 'held', 'on', marks=pytest.mark.thorough)])
def test_views_are_held_where_rho_needs_the_cache(logs, capsys, rho, more, views, cache):
    name = 'auto_{}_{}'.format(rho, len(more))
    assert main.main(augmented(logs, name, '--rho', rho, *more)) == 0
    out, summary = capsys.readouterr().out, read_run(str(logs / name)).summary
    assert (summary['views'], summary['prefix_cache']) == (views, cache)
    assert summary['augmentation'] == 'flip+rotate'
    assert (HELD in out) == (rho == '0.3') and ('no prefix cache: ' in out) == (cache == 'off')
    assert read_json(str(logs / name / 'settings.json'))['views'] == (more or ['', 'auto'])[1]
    # Two views of 48 images, each filled once.
    assert summary.get('cache_misses', 96) == 96


@pytest.mark.parametrize('more, words', [
    (['--views', 'fresh'], 'rho 0.3 is out of reach: .* full step; the'),
    (['--prefix_cache', 'off'], 'rho 0.3 is out of reach: .* full step; the'),
    (['--rho', '0.001'], 'rho 0.001 is out of reach: .*, and the prefix cache has to be filled')])
def test_a_rho_that_stays_out_of_reach_is_refused(logs, capsys, more, words):
    with pytest.raises(UserError, match=words):
        main.main(augmented(logs, 'never', '--rho', '0.3', *more))
    assert '--views held, ' not in capsys.readouterr().out
    assert not (logs / 'never').exists()


@pytest.mark.thorough
def test_a_resumed_run_keeps_its_views_where_rho_needs_no_cache(tmp_path, capsys):
    """The device on which it resumes has so quick a forward pass that views would be fresh."""
    assert main.main(augmented(tmp_path, 'whole', '--rho', '0.3')) == 0
    given = augmented(tmp_path, 'parts', '--rho', '0.3')
    stopped_at('epoch 1/', given)
    store_table(given, 20.0, 4e3)
    capsys.readouterr()
    assert main.main(given) == 0
    out = capsys.readouterr().out
    assert 'resumes in epoch 2' in out and HELD in out
    whole, parts = [read_run(str(tmp_path / name)) for name in ('whole', 'parts')]
    assert parts.summary['views'] == 'held'
    for column in ('train_loss', 'test_loss'):
        assert parts.epochs[column] == whole.epochs[column]
    assert main.main(given + ['--run_name', 'other']) == 0
    assert read_run(str(tmp_path / 'other')).summary['views'] == 'fresh'
