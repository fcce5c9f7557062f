"""Checks that files, links, flags and records in README.md and docs/ agree with the code."""

import csv
import glob
import json
import os
import re
import subprocess
import sys

import pytest
import tensorflow as tf

import main
import profiler
from boards import board
from cached_runs import SIZE, network
from elastic.compat import keras_stack
from elastic.device import thermal
from fixed_tables import fixed_profile
from slow_tests import slow_tests

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FILE = r'((?:[a-z]+/)*\w+\.(?:py|sh|md))\b'
PAGES = sorted(os.path.relpath(path, ROOT) for pattern in (
    '*.md', 'docs/**/*.md', 'figures/README.md', 'logs/README.md')
    for path in glob.glob(os.path.join(ROOT, pattern), recursive=True))
PRESENT = [page for page in PAGES if page != 'CHANGELOG.md']  # CHANGELOG names removed files, too


def text_of(page):
    with open(os.path.join(ROOT, page), encoding='utf-8') as file:
        return file.read()


def headings(page):
    """Returns the anchors that GitHub makes from the headings."""
    return {re.sub(r'[^\w\- ]', '', line.strip('# ').lower()).replace(' ', '-')
            for line in text_of(page).split('\n') if re.match(r'#+ ', line)}


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_somewhere(page):
    folder = os.path.dirname(page)
    for link in re.findall(r'\]\((?!http)([^)]+)\)', text_of(page)):
        path, _, anchor = link.partition('#')
        there = os.path.normpath(os.path.join(folder, path)) if path else page
        assert os.path.exists(os.path.join(ROOT, there)), link
        assert not anchor or anchor in headings(there), link


@pytest.mark.parametrize('page', PRESENT)
def test_files_named_in_a_page_exist(page):
    named = set(re.findall(r'(?<![\w/.])' + FILE, text_of(page)))
    folders = ('', 'scripts', 'benchmarks', 'docs')
    missing = [name for name in named if not any(
        os.path.exists(os.path.join(ROOT, folder, name)) for folder in folders)]
    assert not missing


def commands(page):
    """Yields (script, flags) of each `python FILE`, `python -m MODULE` and `scripts/FILE.sh`.

    A backslash continues a command on the next line.
    """
    text = re.sub('```.*?```', '', text_of(page), flags=re.S).replace('\\\n', ' ')
    code = re.findall(r'`([^`]+)`', text) + re.findall(r'^    (\S.*)$', text, re.M)
    for line in code:
        line = re.sub(r'python -m (elastic[\w.]+)',
                      lambda found: 'python {}.py'.format(found.group(1).replace('.', '/')), line)
        found = re.match(r'(?:\S+=\S+ )?(?:python3? )?(?:\./)?' + FILE + '(.*)',
                         ' '.join(line.split('#')[0].split()))
        if found:
            yield found.group(1), re.findall(r'(?<!\S)--\w+', found.group(2))


@pytest.mark.parametrize('page', PRESENT)
def test_commands_in_a_page_use_flags_of_the_script(page):
    helps = {}
    for script, flags in commands(page):
        path = next(path for path in (os.path.join(ROOT, folder, script)
                                      for folder in ('', 'scripts', 'benchmarks'))
                    if os.path.exists(path))
        if not flags:
            continue
        if path not in helps:
            start = [sys.executable, path] if path.endswith('.py') else [path]
            if script.startswith('elastic/'):
                start[1:] = ['-m', script[:-len('.py')].replace('/', '.')]
            helps[path] = subprocess.run(
                start + ['--help'], stdout=subprocess.PIPE, check=True, universal_newlines=True,
                env=dict(os.environ, PYTHON=sys.executable)).stdout
        for flag in flags:
            assert re.search(re.escape(flag) + r'\b', helps[path]), (script, flag)


@pytest.mark.skipif(sys.version_info[:2] not in ((3, 11), (3, 12)),
                    reason='argparse formats --help differently')
def test_the_page_of_flags_agrees_with_the_scripts():
    made = subprocess.run([os.path.join(ROOT, 'scripts', 'write_flags.sh')], check=True,
                          env=dict(os.environ, PYTHON=sys.executable), stdout=subprocess.PIPE,
                          universal_newlines=True).stdout
    assert made == text_of(os.path.join('docs', 'flags.md'))


def explained(section):
    """Returns the names in the first column of the tables of a section of docs/records.md."""
    text = text_of('docs/records.md').split('\n## {}\n'.format(section))[1].split('\n## ')[0]
    return {name for cell in re.findall(r'^\|([^|]*)\|', text, re.M)
            for name in re.findall('`([^`]+)`', cell)}


def header_of(path):
    with open(path, newline='') as file:
        return set(next(csv.reader(file)))


@pytest.mark.parametrize('scheme, flags', [
    ('elastic_training', []), ('traditional_tl_training', ['--validation_share', '0.2']),
    ('prune_training', ['--class_weight', 'balanced'])])
def test_every_record_of_a_run_is_explained(scheme, flags, tmp_path, monkeypatch):
    """Trains on a device that reports heat, with a prefix cache if the scheme can use one."""
    root, cpus = board(tmp_path / 'board', 'TX2')
    find, model = thermal.find_device, str(tmp_path / keras_stack.MODEL_FILE)
    monkeypatch.setattr(thermal, 'find_device', lambda: find(root, cpus))
    monkeypatch.setattr(profiler, 'profile_model', fixed_profile)
    network().save(model)
    assert main.main([
        '--model_name', model, '--bn_statistics', 'frozen', '--input_size', str(SIZE),
        '--batch_size', '8', '--dataset_name', 'digits', '--train_images', '40',
        '--validation_steps', '2', '--num_epochs', '2', '--learning_rate', '0.01', '--rho', '0.9',
        '--train_type', scheme, '--logs_dir', str(tmp_path), '--run_name', 'run'] + flags) == 0
    folder = str(tmp_path / 'run')
    shown = {value.tag for path in glob.glob(os.path.join(folder, 'events.out.*'))
             for event in tf.compat.v1.train.summary_iterator(path)
             for value in event.summary.value}
    assert len(shown) > 11 and shown <= explained('TensorBoard')
    with open(os.path.join(folder, 'summary.json')) as file:
        summary = set(json.load(file))
    settings = set(re.findall(r'^ +--(\w+)', text_of('docs/flags.md'), re.M))
    assert summary - settings <= explained('summary.json')
    images = 'validation_' if '--validation_share' in flags else 'test_'
    for name in ('epochs.csv', 'selections.csv'):
        assert header_of(os.path.join(folder, name)) == {
            column.replace('test_', images) for column in explained(name)}
    for name in ('predictions.csv', 'classes.csv'):
        assert header_of(os.path.join(folder, name)) == explained(name)


def test_the_example_in_python_trains_a_network(monkeypatch, capsys):
    monkeypatch.setattr(profiler, 'profile_model', fixed_profile)
    code, = re.findall(r'```python\n(.*?)```', text_of('docs/python.md'), re.S)
    exec(code, {})
    assert re.search(r'\d of 6 tensors, loss \d\.\d+$', capsys.readouterr().out.strip())


def test_the_readme_has_at_most_150_lines():
    assert text_of('README.md').count('\n') <= 150


def test_the_version_is_the_newest_in_the_changelog():
    versions = [subprocess.run(
        [sys.executable, os.path.join(ROOT, script), '--version'], check=True,
        stdout=subprocess.PIPE, universal_newlines=True).stdout.split()
        for script in ('main.py', 'profiler.py')]
    newest, = re.findall(r'^## (\S+)', text_of('CHANGELOG.md'), re.M)[:1]
    assert versions == [['ElasticTrainer', newest]] * 2


def test_every_test_listed_as_slow_exists():
    lines = text_of('tests/slow_tests.txt').splitlines()
    assert len(lines) > 100
    for line in lines:
        path, _, name = line.split()[1].partition('::')
        assert ('def {}('.format(name) if name else 'def test_') in text_of(path), line


def test_seconds_of_parameters_add_up_and_slow_setups_mark_a_file():
    lines = ['0.20s call     tests/a.py::test_x[1]', '0.20s call     tests/a.py::test_x[2 3]',
             '0.10s setup    tests/a.py::test_y', '0.10s call     tests/a.py::test_y[1-a::b]',
             '12.00s setup    tests/b.py::test_z', '1.00s call     tests/b.py::test_w',
             '12 passed in 3.00s']
    assert slow_tests(lines) == [(13.0, 'tests/b.py'), (0.4, 'tests/a.py::test_x')]


QUICK_FILE, SLOW_FILE = 'tests/device/test_energy.py', 'tests/device/test_thermal.py'


def collected(*flags):
    """Returns the lines in which pytest prints the path and name of a test."""
    listed = subprocess.run([sys.executable, '-m', 'pytest', '--collect-only', '-q', QUICK_FILE,
                             SLOW_FILE] + list(flags), cwd=ROOT, stdout=subprocess.PIPE,
                            universal_newlines=True).stdout
    return [line for line in listed.split('\n') if '::' in line]


def test_the_slowest_file_starts_first_and_quick_leaves_out_slow_tests():
    lines, quick = collected(), {line.split('[')[0] for line in collected('--quick')}
    files = [line.split('::')[0] for line in lines]
    assert files == sorted(files, reverse=True) and set(files) == {QUICK_FILE, SLOW_FILE}
    every = {line.split('[')[0] for line in lines}
    slow = {line.split()[1] for line in text_of('tests/slow_tests.txt').splitlines()}
    assert every & slow and quick == every - slow
