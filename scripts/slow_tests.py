"""Writes tests/slow_tests.txt, the seconds and the name of each slow test.

    scripts/run_tests.sh --durations=0 | python scripts/slow_tests.py

All parameters of a test count together. If its fixtures are slow, other tests of the file share
them, so the whole file is listed. `run_tests.sh --quick` leaves the listed tests out.
"""

import collections
import os
import re
import sys

import _root

SLOW, SLOW_SETUP = 0.25, 1.5  # s, from which a test, or the fixtures of a file, are slow


def slow_tests(lines):
    """Returns [(seconds, test or file)], the slowest first, from the lines of pytest's output."""
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


def main():
    lines = list(sys.stdin)
    sys.stdout.writelines(lines)
    found = slow_tests(lines)
    if not found or not any(re.search(r'\d+ passed', line) for line in lines):
        print('the tests did not finish: tests/slow_tests.txt is unchanged', file=sys.stderr)
        return 1
    with open(os.path.join(_root.ROOT, 'tests', 'slow_tests.txt'), 'w') as out:
        out.writelines('{:7.1f}  {}\n'.format(seconds, test) for seconds, test in found)
    return 0


if __name__ == '__main__':
    sys.exit(main())
