"""Tests run on real TensorFlow with tiny models; its start-up notices are silenced here too."""

import collections
import gc
import os

import pytest

from elastic import command_line

SLOW_TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'slow_tests.txt')
QUICK = 0.1  # s, of a test that is not in there

command_line.quiet_tensorflow()
pytest.register_assert_rewrite('refusals')  # its assertions show what they compared, too


def pytest_addoption(parser):
    parser.addoption('--quick', action='store_true', help='leave out the tests of slow_tests.txt')


def pytest_configure(config):
    config.option.loadscopereorder = False  # of pytest-xdist: by time, below, not by count


def pytest_collection_modifyitems(config, items):
    # What is imported by now stays: from Python 3.7 on, collections need not look at it any more.
    getattr(gc, 'freeze', gc.collect)()
    with open(SLOW_TESTS) as lines:
        seconds = {name: float(took) for took, name in map(str.split, lines)}
    if config.getoption('--quick'):
        left_out = [item for item in items
                    if seconds.keys() & {item.nodeid.split('[')[0], file_of(item)}]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        seconds = {}
    # The longest files first: one that begins last keeps one process busy and the others waiting.
    of_file = collections.defaultdict(float)
    for name, took in seconds.items():
        of_file[name.split('::')[0]] += took
    for item in items:
        of_file[file_of(item)] += QUICK
    items.sort(key=lambda item: -of_file[file_of(item)])


def file_of(item):
    return item.nodeid.split('::')[0]
