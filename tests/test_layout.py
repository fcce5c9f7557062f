"""Checks that imports run one way through the folders, and that no script is imported."""

import ast
import glob
import os

import elastic
from small_runs import ROOT

SCRIPTS = {os.path.basename(path)[:-len('.py')] for path in glob.glob(os.path.join(ROOT, '*.py'))}
# Of the map: from the bottom up, the names in each line, which import nothing from each other.
ORDER = [[name.strip('/') for name in line.split('   ')[0].split(', ')]
         for line in (line[4:] for line in elastic.__doc__.split('\n') if line.startswith('    '))]
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


def test_what_a_module_imports_of_another_exists():
    known, paths = {}, glob.glob(os.path.join(ROOT, '*.py')) + [path for _, path in modules()]
    for path in paths:
        with open(path, encoding='utf-8') as file:
            nodes = list(ast.walk(ast.parse(file.read())))
        module = os.path.relpath(path, ROOT)[:-len('.py')].replace(os.sep, '.')
        known[module] = {name for node in nodes for name in (
            getattr(node, 'name', None), getattr(node, 'id', None), getattr(node, 'asname', None))}
    others = glob.glob(os.path.join(ROOT, 'scripts', '*.py')) + glob.glob(
        os.path.join(ROOT, 'benchmarks', '*.py'))
    unknown = {(os.path.relpath(path, ROOT), name) for path in paths + others
               for name in imports_of(path) if name.rpartition('.')[0] in known
               and name.rpartition('.')[2] not in known[name.rpartition('.')[0]]}
    assert not unknown


def test_rooms_import_only_from_rooms_below():
    upward = set()
    for room, path in modules():
        for name in imports_of(path):
            parts = name.split('.')
            if parts[0] == 'elastic' and len(parts) > 1 and parts[1] != room and (
                    LEVEL[parts[1]] >= LEVEL[room]):
                upward.add((os.path.relpath(path, ROOT), name))
    assert not upward


def test_no_module_and_no_function_is_longer_than_a_reader_has_patience_for():
    lines, functions = {}, {}
    scripts = [os.path.join(ROOT, name + '.py') for name in SCRIPTS]
    for path in scripts + [path for _, path in modules()]:
        with open(path, encoding='utf-8') as file:
            text = file.read()
        lines[os.path.relpath(path, ROOT)] = text.count('\n')
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                last = max(getattr(inner, 'lineno', 0) for inner in ast.walk(node))
                functions[path, node.name] = last - node.lineno + 1
    assert max(lines.values()) <= 350, lines
    assert not [place for place, count in functions.items() if count > 60]


def test_no_modules_import_each_other():
    graph = {}
    for _, path in modules():
        module = os.path.relpath(path, ROOT)[:-len('.py')].replace(os.sep, '.')
        graph[module] = {part for name in imports_of(path) for part in (
            name, name.rsplit('.', 1)[0])}
    seen, circles = {}, []

    def visit(module, above):
        if module in above:
            circles.append(above[above.index(module):])
        elif module not in seen:
            for other in graph.get(module, ()):
                visit(other, above + [module])
            seen[module] = True
    for module in graph:
        visit(module, [])
    assert not circles
