"""Tests argument types, one-line errors, aligned tables, and a quiet TensorFlow."""

import argparse
import os
import platform
import subprocess
import sys

import pytest

import profiler
from elastic import command_line, errors, flags, options, texts
from elastic.errors import UserError
from elastic.runs.names import checked_run_name
from elastic.settings import DEFAULTS
from small_runs import ROOT, script


def python(code, **environment):
    """Runs code in a new interpreter in the repository root."""
    env = {key: value for key, value in os.environ.items()
           if key not in ('TF_CPP_MIN_LOG_LEVEL', 'TF_ENABLE_ONEDNN_OPTS')}
    env.update(environment)
    return subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)


@pytest.mark.parametrize('kind, limits, text, says', [
    (float, {}, 'nan', 'nan'), (float, {}, '-inf', '-inf'), (float, {}, '1e999', '1e999'),
    (int, dict(low=1), '1.5', 'is not a whole number at least 1'),
    (int, dict(low=1), '', 'is not a whole number at least 1'),
    (int, dict(low=2, high=4), '5', 'at least 2, at most 4'),
    (float, dict(above=0, high=1), '-0.0', 'a number above 0, at most 1'),
    (float, dict(above=0, high=1), '1.0000001', 'a number above 0, at most 1')])
def test_a_number_outside_its_limits_is_refused(kind, limits, text, says):
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        options.number(kind, **limits)(text)


def test_low_and_high_are_allowed_and_above_is_not():
    rho = options.number(float, above=0, high=1)
    assert rho('1') == 1.0 and rho('1e-9') == 1e-9
    batch = options.number(int, low=2, high=4)
    assert [batch(text) for text in ('2', '3', ' 4 ')] == [2, 3, 4]
    assert isinstance(batch('2'), int)


@pytest.mark.parametrize('text', ['', '2', 'flase'])
def test_a_boolean_refuses_other_words(text):
    with pytest.raises(argparse.ArgumentTypeError, match="'{}' is not".format(text)):
        options.boolean(text)


@pytest.mark.parametrize('given, value', [
    ([], False), (['--save_txt'], True), (['--save_txt', '1'], True), (['--save_txt', '0'], False),
    (['--save_txt', 'False'], False), (['--save_txt=False'], False), (['--save_txt=true'], True)])
def test_a_flag_may_be_bare_and_false_means_false(given, value):
    parser = argparse.ArgumentParser()
    options.add_flag(parser, '--save_txt', 'write the text log')
    assert parser.parse_args(given).save_txt is value


def test_a_typo_is_refused_with_the_most_similar_name():
    allowed = ('full_training', 'elastic_training', 'bn_plus_bias_training')
    assert errors.one_of('elastic_training', allowed, 'train type') == 'elastic_training'
    with pytest.raises(UserError) as error:
        errors.one_of('elastic_trainig', allowed, 'train type')
    text = str(error.value)
    assert "unknown train type 'elastic_trainig' (did you mean 'elastic_training'?)" in text
    assert all(name in text for name in allowed)


def test_a_table_has_aligned_columns_without_trailing_spaces():
    text = texts.table(['tensor', 'time (ms)', 'share'],
                       [['a/kernel', '12.50', '3 %'], ['longer_name/bias', '0.5', '100 %']])
    assert text.split('\n') == ['tensor            time (ms)  share',
                                '----------------  ---------  -----',
                                'a/kernel              12.50    3 %',
                                'longer_name/bias        0.5  100 %']


def test_a_user_error_shows_no_traceback_in_a_real_process():
    result = python('from elastic import command_line, errors\n'
                    'def main(argv):\n'
                    '    raise errors.UserError("--rho 7 is above 1")\n'
                    'command_line.run(main)')
    assert (result.returncode, result.stdout) == (2, '')
    assert result.stderr == 'error: --rho 7 is above 1\n'


def test_an_interrupt_exits_130_and_a_bug_keeps_its_traceback(capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    def broken(argv):
        raise ValueError('a bug')
    with pytest.raises(SystemExit) as stop:
        command_line.run(interrupted)
    assert stop.value.code == 130
    assert capsys.readouterr().err == '\ninterrupted\n'
    with pytest.raises(ValueError, match='a bug'):
        command_line.run(broken)


@pytest.mark.parametrize('parse', [flags.parse_arguments, profiler.parse_arguments])
def test_flags_have_the_defaults_of_the_settings(parse):
    given = vars(parse([]))
    assert given.pop('bn_statistics') in (None, 'frozen') and not given.pop('importance', None)
    for name, value in DEFAULTS.items():
        assert given.get(name, value) == value, name


@pytest.mark.parametrize('closed', [
    pytest.param('>&-', marks=pytest.mark.thorough),
    pytest.param('2>&-', marks=pytest.mark.thorough), '>&- 2>&-'])
def test_scripts_run_with_closed_output(closed):
    code = ('from elastic import command_line\n'
            'from elastic.compat.start import quiet, quiet_tensorflow\n'
            'def main(argv):\n'
            '    quiet_tensorflow()\n'
            '    with quiet(), quiet(descriptor=1):\n'
            '        print("hidden")\n'
            '    return 3\n'
            'command_line.run(main)')
    done = subprocess.run(['bash', '-c', 'unset TF_CPP_MIN_LOG_LEVEL; exec "$0" -c "$1" ' + closed,
                           sys.executable, code],
                          cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (3, b'', b'')


@pytest.mark.thorough
@pytest.mark.parametrize('given', [{}, dict(TF_ENABLE_ONEDNN_OPTS='0', TF_CPP_MIN_LOG_LEVEL='1')])
def test_tensorflow_starts_quietly_with_onednn_unless_the_user_decides(given):
    result = python('import os, sys; from elastic.compat import start\n'
                    'start.quiet_tensorflow()\n'
                    'assert "tensorflow" in sys.modules\n'
                    'for name in ("TF_ENABLE_ONEDNN_OPTS", "TF_CPP_MIN_LOG_LEVEL"):\n'
                    '    print(os.environ.get(name))\n'
                    'sys.stderr.write("after\\n")', **given)
    # Not on the stacks of the paper's boards, nor on other processors.
    today = sys.version_info >= (3, 10) and platform.machine() == 'x86_64'
    assert result.returncode == 0 and result.stdout.split() == (
        ['0', '1'] if given else ['1' if today else 'None', '3'])
    assert given or result.stderr == 'after\n'


def test_a_failed_import_of_tensorflow_shows_its_notices(tmp_path):
    (tmp_path / 'tensorflow.py').write_text(
        'import os\n'
        'os.write(2, b"libcudart not found\\n")\n'
        'raise ImportError("broken installation")\n')
    result = python('from elastic.compat import start; start.quiet_tensorflow()',
                    PYTHONPATH=str(tmp_path) + os.pathsep + ROOT)
    assert result.returncode == 1
    assert 'libcudart not found' in result.stderr
    assert 'ImportError: broken installation' in result.stderr


@pytest.mark.parametrize('parse', [flags.parse_arguments, profiler.parse_arguments])
def test_a_wrong_value_is_reported_below_one_line_of_usage(parse, capsys):
    with pytest.raises(SystemExit) as leaves:
        parse(['--batch_size', '0'])
    lines = capsys.readouterr().err.splitlines()
    assert leaves.value.code == 2 and len(lines) == 2 and '--batch_size: 0 is not' in lines[1]


# A script that prints 100 lines, more than buffers hold.
LONG = '''
import sys
from elastic import command_line
def main(argv):
    for number in range(100):
        print('line', number, 'x' * 1000)
    return 3
command_line.run(main, sys.argv[1:])
'''


@pytest.mark.parametrize('command, status, says', [
    ('"$@" | head -n 1', 141, ''), ('"$@" 2>&1 | head -n 1', 141, ''), ('"$@" >&-', 3, ''),
    ('"$@" > /dev/full', 2, 'error: No space left on device')])
def test_output_that_cannot_be_written_ends_a_script_without_a_traceback(command, status, says):
    child = subprocess.run(
        ['bash', '-c', 'set -o pipefail; ' + command, 'bash', sys.executable, '-c', LONG], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert child.returncode == status and child.stderr.startswith(says)
    assert child.stderr.count('\n') == bool(says)
    assert child.stdout.count('\n') == command.count('head')


# ------------------------------------------------- what other projects and containers set

KERAS = """
import sys
from elastic import command_line
from elastic.compat import start
def main(argv):
    start.quiet_tensorflow()
    from tensorflow import keras
    import os
    x = keras.layers.Conv2D(2, 3)(keras.Input((8, 8, 3)))
    print(tuple(x.shape), keras.backend.floatx(), os.environ.get('KERAS_HOME'))
command_line.run(main)
"""


@pytest.mark.parametrize('variables, settings, named', [
    ({'TF_USE_LEGACY_KERAS': '1', 'KERAS_BACKEND': 'openvino', 'KERAS_MAX_EPOCHS': 'many'},
     '{"floatx": "float16", "image_data_format": "channels_first", "backend": "theano", '
     '"epsilon": 1}',
     ['TF_USE_LEGACY_KERAS=1', 'KERAS_BACKEND=openvino', 'KERAS_MAX_EPOCHS=many',
      "floatx 'float16' in ", "image_data_format 'channels_first'", "backend 'theano'"]),
    pytest.param({'KERAS_BACKEND': 'torch', 'KERAS_NNX_ENABLED': '1'}, '{"floatx": ',
                 ['KERAS_BACKEND=torch', "content 'not JSON' in "],
                 marks=pytest.mark.thorough),
    pytest.param({'KERAS_BACKEND': 'tensorflow', 'TF_USE_LEGACY_KERAS': '0'},
                 '{"floatx": "float32", "epsilon": 1e-07, "backend": "tensorflow", '
                 '"image_data_format": "channels_last"}', [], marks=pytest.mark.thorough)])
def test_settings_of_keras_of_other_projects_are_named_and_not_used(
        tmp_path, variables, settings, named):
    (tmp_path / 'keras.json').write_text(settings)
    result = python(KERAS, KERAS_HOME=str(tmp_path), **variables)
    assert result.stdout == '(None, 6, 6, 2) float32 {}\n'.format(tmp_path), result.stderr
    assert result.returncode == 0 and result.stderr.count('\n') == bool(named)
    assert all(words in result.stderr for words in named)
    assert (tmp_path / 'keras.json').read_text() == settings


def test_without_a_home_folder_temporary_files_are_its_place(tmp_path):
    code = ('import os\nfrom elastic import command_line\n'
            'command_line.run(lambda argv: print(os.path.expanduser("~/a")))')
    for home in (str(tmp_path / 'none'), '~'):
        result = python(code, HOME=home, TMPDIR=str(tmp_path))
        assert (result.returncode, result.stdout) == (0, '{}/a\n'.format(tmp_path))
        assert result.stderr.startswith('warning: this user has no home folder: {} '.format(
            tmp_path)) and result.stderr.count('\n') == 1
    assert python(code, HOME=str(tmp_path)).stderr == ''


def test_without_a_place_for_temporary_files_one_line_names_tmpdir():
    code = ('import tempfile\nfrom elastic import command_line\n'
            'command_line.run(lambda argv: tempfile.TemporaryFile())')
    code = 'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n' + code
    status, _, errors = script('-c', code)
    assert status == 2 and errors.count('\n') == 1 and 'set TMPDIR' in errors
    assert errors.startswith('error: no folder for temporary files')


PATHS = {'--logs_dir': '~/logs', '--data_dir': '~/data', '--weights': '~/w.npz',
         '--model_name': '~/m.keras', '--class_weight': '~/w.csv', '--cache_dir': '~',
         '--meter_csv': '~/meter.csv'}


def test_in_each_flag_of_a_path_the_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'flags.txt').write_text('\n'.join(
        '{} "{}"'.format(*item) for item in PATHS.items()))
    for argv in (['{}={}'.format(*item) for item in PATHS.items()],
                 [word for item in PATHS.items() for word in item], ['@~/flags.txt']):
        given = vars(flags.parse_arguments(argv))
        for flag, path in PATHS.items():
            assert given[flag[2:]] == path.replace('~', str(tmp_path))
    assert profiler.parse_arguments(['--logs_dir=~/x']).logs_dir == str(tmp_path / 'x')


def test_no_run_is_named_after_the_home_folder(tmp_path):
    for name in ('~', '~/run', 'a/~'):
        with pytest.raises(UserError, match='leaves'):
            checked_run_name(name, str(tmp_path))
    assert checked_run_name('~a', str(tmp_path)) == '~a'


NAMES = r"""
import os, sys
from elastic import command_line
def main(argv):
    print(sys.getfilesystemencoding(), os.path.isfile(sys.argv[1]))
    print('\u65e5\u672c', os.fsdecode(b'\xff'))
command_line.run(main)
"""


@pytest.mark.parametrize('environment', [
    dict(LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0'), dict(PYTHONIOENCODING='ascii')],
    ids=['ascii', 'ascii output'])
def test_names_of_files_are_utf_8_in_every_locale_and_output_never_fails(tmp_path, environment):
    (tmp_path / 'names.py').write_text(NAMES)
    place = os.path.join(os.fsencode(str(tmp_path)), b'gr\xc3\xbcn \xff')
    open(place, 'w').close()
    result = subprocess.run([sys.executable, str(tmp_path / 'names.py'), place], cwd=ROOT,
                            env=dict(os.environ, PYTHONPATH=ROOT, **environment),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = result.stdout.split(b'\n')
    assert (result.returncode, result.stderr, lines[0]) == (0, b'', b'utf-8 True')
    assert lines[1] in (b'\\u65e5\\u672c \\udcff', b'\xe6\x97\xa5\xe6\x9c\xac \\udcff')
