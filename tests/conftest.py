"""Silences TensorFlow's start-up notices, and orders the tests by the time they take."""

import collections
import gc
import os

import pytest

from elastic import command_line

SLOW_TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'slow_tests.txt')
QUICK = 0.1  # s, assumed for a test that the list does not name

command_line.quiet_tensorflow()
pytest.register_assert_rewrite('refusals')  # so that its failed assertions show both sides


def pytest_addoption(parser):
    parser.addoption('--quick', action='store_true', help='leave out the tests of slow_tests.txt')


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would order by count; we do by time


def pytest_collection_modifyitems(config, items):
    # Imported modules stay, so garbage collection may skip them (from Python 3.7 on).
    getattr(gc, 'freeze', gc.collect)()
    with open(SLOW_TESTS) as lines:
        seconds = {name: float(took) for took, name in map(str.split, lines)}
    if config.getoption('--quick'):
        left_out = [item for item in items
                    if seconds.keys() & {item.nodeid.split('[')[0], file_of(item)}]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        seconds = {}
    # Longest files first: a long file that starts last would leave the other processes idle.
    of_file = collections.defaultdict(float)
    for name, took in seconds.items():
        of_file[name.split('::')[0]] += took
    for item in items:
        of_file[file_of(item)] += QUICK
    items.sort(key=lambda item: -of_file[file_of(item)])


def file_of(item):
    return item.nodeid.split('::')[0]
