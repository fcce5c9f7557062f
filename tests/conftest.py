"""Silences TensorFlow, leaves thorough tests out unless --all is given, starts long files first."""

import collections
import gc
import os

import pytest

from elastic.compat import start

THOROUGH_SECONDS, USUAL_SECONDS = 5, 0.1  # of a test, about

start.quiet_tensorflow()
pytest.register_assert_rewrite('refusals')  # so that its failed assertions show both sides


def pytest_addoption(parser):
    parser.addoption('--all', action='store_true', help='with thorough and timing tests')


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would order by count; we do by time


def pytest_collection_modifyitems(config, items):
    # Imported modules stay, so garbage collection may skip them (from Python 3.7 on).
    getattr(gc, 'freeze', gc.collect)()
    if not config.getoption('--all'):
        left_out = [item for item in items if is_thorough(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_thorough(item)]
    # A long file that starts last would leave the other processes idle.
    seconds = collections.defaultdict(float)
    for item in items:
        seconds[file_of(item)] += THOROUGH_SECONDS if is_thorough(item) else USUAL_SECONDS
    items.sort(key=lambda item: -seconds[file_of(item)])


def pytest_terminal_summary(terminalreporter):
    in_worker = hasattr(terminalreporter.config, 'workerinput')  # of pytest-xdist
    if 'TEST_COUNTS' in os.environ and not in_worker:  # scripts/run_tests.sh adds them up
        counts = [len(terminalreporter.getreports(kind)) for kind in ('passed', 'failed', 'error')]
        with open(os.environ['TEST_COUNTS'], 'a') as file:
            file.write('{} {} {}\n'.format(counts[0], counts[1] + counts[2],
                                           len(terminalreporter.getreports('skipped'))))


def is_thorough(item):
    return any(item.get_closest_marker(name) for name in ('thorough', 'timing'))


def file_of(item):
    return item.nodeid.split('::')[0]
