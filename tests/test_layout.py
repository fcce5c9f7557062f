"""Checks that imports run one way through the folders, and that no script is imported."""

import ast
import glob
import os

import elastic
from small_runs import ROOT

SCRIPTS = {os.path.basename(path)[:-len('.py')] for path in glob.glob(os.path.join(ROOT, '*.py'))}
# From the bottom up. Folders (or lone modules) in one list import nothing from each other.
ORDER = [['compat'], ['settings', 'durations', 'trees'], ['output'],
         ['command_line'], ['files'], ['figure_file'], ['device'], ['steps', 'networks', 'data'],
         ['timing', 'cache', 'schemes', 'export'], ['selection', 'workers'], ['runs'],
         ['flags', 'costs']]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def imports_of(path):
    """Yields the name of each module that the file imports, also inside functions."""
    with open(path, encoding='utf-8') as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ('{}.{}'.format(node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def modules():
    """Yields (folder, path) of each module of the package; without a folder, (name, path)."""
    folder = os.path.dirname(elastic.__file__)
    for path in glob.glob(os.path.join(folder, '**', '*.py'), recursive=True):
        inside = os.path.relpath(path, folder)
        if os.path.basename(inside) != '__init__.py':
            yield inside.split(os.sep)[0].replace('.py', ''), path


def test_the_root_holds_the_seven_scripts():
    assert SCRIPTS == {'main', 'profiler', 'train', 'selection_solver_DP', 'models', 'datasets',
                       'plot'}


def test_the_package_imports_no_script():
    found = {(os.path.relpath(path, ROOT), name) for _, path in modules()
             for name in imports_of(path) if name.split('.')[0] in SCRIPTS}
    assert not found


def test_rooms_import_only_from_rooms_below():
    upward = set()
    for room, path in modules():
        for name in imports_of(path):
            parts = name.split('.')
            if parts[0] == 'elastic' and len(parts) > 1 and parts[1] != room and (
                    LEVEL[parts[1]] >= LEVEL[room]):
                upward.add((os.path.relpath(path, ROOT), name))
    assert not upward


def test_no_module_is_longer_than_a_reader_has_patience_for():
    lines = {}
    for _, path in modules():
        with open(path, encoding='utf-8') as file:
            lines[os.path.relpath(path, ROOT)] = sum(1 for _ in file)
    assert max(lines.values()) <= 400, lines
