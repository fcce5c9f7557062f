"""Tests run on real TensorFlow with tiny models; its start-up notices are silenced here too."""

import gc
import os

import pytest

import command_line

SLOW_TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'slow_tests.txt')

command_line.quiet_tensorflow()
pytest.register_assert_rewrite('refusals')  # its assertions show what they compared, too


def pytest_addoption(parser):
    parser.addoption('--quick', action='store_true', help='leave out the tests of slow_tests.txt')


def pytest_collection_modifyitems(config, items):
    # What is imported by now stays: from Python 3.7 on, collections need not look at it any more.
    getattr(gc, 'freeze', gc.collect)()
    if config.getoption('--quick'):
        with open(SLOW_TESTS) as lines:
            slow = {line.split()[1] for line in lines}
        left_out = [item for item in items
                    if slow.intersection((item.nodeid.split('[')[0], item.nodeid.split('::')[0]))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
