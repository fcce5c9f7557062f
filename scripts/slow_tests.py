"""Lists the slow tests: reads pytest's `--durations=0` and prints seconds and name of each.

    scripts/run_tests.sh --durations=0 | python scripts/slow_tests.py > tests/slow_tests.txt

A test counts with all its parameters. Where what is made for a test takes long, it is made for
others of its file too, and the file is listed. run_tests.sh --quick leaves out what is.
"""

import collections
import re
import sys

SLOW, SLOW_SETUP = 0.25, 1.5  # s


def slow_tests(lines):
    """[(seconds, test or file)], the slowest first; lines: of pytest's output."""
    seconds, files = collections.defaultdict(float), set()
    for line in lines:
        found = re.match(r'([\d.]+)s (call|setup|teardown) +((\S+?)::\S+?)(?:\[.*)?$',
                         line.rstrip())
        if found:
            took, phase, test, path = found.groups()
            seconds[test] += float(took)
            seconds[path] += float(took)
            if phase == 'setup' and float(took) >= SLOW_SETUP:
                files.add(path)
    return sorted(((s, name) for name, s in seconds.items() if name in files or (
        '::' in name and s >= SLOW and name.split('::')[0] not in files)), reverse=True)


if __name__ == '__main__':
    for seconds, test in slow_tests(sys.stdin):
        print('{:7.1f}  {}'.format(seconds, test))
