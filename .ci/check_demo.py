"""Checks what scripts/run_demo.sh left in this folder: eight runs, two pictures, their results."""

import json
import os
import sys

RUNS = ('full', 'head', 'bn_bias', 'elastic0.5', 'elastic0.35', 'stages',
        'stages_elastic0.35', 'full_cut')


def summary(run):
    with open('logs/demo_digits_shifted_{}_seed0/summary.json'.format(run)) as file:
        return json.load(file)


def main():
    found = {run: summary(run) for run in RUNS}
    full, half, stages, after = [found[run] for run in (
        'full', 'elastic0.5', 'stages', 'stages_elastic0.35')]

    def share(run):
        return run['train_seconds'] / full['train_seconds']

    def lost(run):
        return 100 * (full['final_accuracy'] - run['final_accuracy'])
    checks = {
        'both pictures': all(os.path.getsize('figures/{}.png'.format(name)) > 10000
                             for name in ('demo', 'demo_selection')),
        'full training above 97 %': full['final_accuracy'] > 0.97,
        'rho 0.5 loses at most 1.5 points': lost(half) <= 1.5,
        'rho 0.5 trains in at most 0.7 of its time': share(half) <= 0.7,
        'the solved stages above 96 %': stages['final_accuracy'] > 0.96,
        'in at most 0.2 of its time': share(stages) <= 0.2,
        'rho 0.35 from there loses at most 2 points': lost(after) <= 2,
        'in at most 0.8 of its time': share(after) <= 0.8}
    print('full training {:.1f} %; rho 0.5 loses {:.1f} points, in {:.2f} of its time'.format(
        100 * full['final_accuracy'], lost(half), share(half)))
    for what, holds in checks.items():
        print('{:42} {}'.format(what, 'yes' if holds else 'NO'))
    return 0 if all(checks.values()) else 1


if __name__ == '__main__':
    sys.exit(main())
