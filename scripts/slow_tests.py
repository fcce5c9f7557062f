"""Lists the slow tests in tests/slow_tests.txt: seconds and name of each.

    scripts/run_tests.sh --durations=0 | python scripts/slow_tests.py

A test counts with all its parameters. Where what is made for a test takes long, it is made for
others of its file too, and the file is listed. run_tests.sh --quick leaves out what is.
"""

import collections
import os
import re
import sys

import _root

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


def main():
    lines = list(sys.stdin)
    sys.stdout.writelines(lines)
    found = slow_tests(lines)
    if not found or not any(re.search(r'\d+ passed', line) for line in lines):
        print('the tests were not run to their end: the list stays as it was', file=sys.stderr)
        return 1
    with open(os.path.join(_root.ROOT, 'tests', 'slow_tests.txt'), 'w') as out:
        out.writelines('{:7.1f}  {}\n'.format(seconds, test) for seconds, test in found)
    return 0


if __name__ == '__main__':
    sys.exit(main())
