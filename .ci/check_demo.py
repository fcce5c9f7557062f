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
    full, stages, elastic = found['full'], found['stages'], found['stages_elastic0.35']
    share = elastic['train_seconds'] / full['train_seconds']
    lost = 100 * (full['final_accuracy'] - elastic['final_accuracy'])
    checks = {
        'both pictures': all(os.path.getsize('figures/{}.png'.format(name)) > 10000
                             for name in ('demo', 'demo_selection')),
        'full training above 97 %': full['final_accuracy'] > 0.97,
        'the solved stages above 96 %': stages['final_accuracy'] > 0.96,
        'in at most 0.2 of its time': stages['train_seconds'] <= 0.2 * full['train_seconds'],
        'rho 0.35 from there loses at most 2 points': lost <= 2,
        'in at most 0.8 of its time': share <= 0.8}
    print('full training {:.1f} %; rho 0.35 from the solved head loses {:.1f} points, in {:.2f} of '
          'its time'.format(100 * full['final_accuracy'], lost, share))
    for what, holds in checks.items():
        print('{:42} {}'.format(what, 'yes' if holds else 'NO'))
    return 0 if all(checks.values()) else 1


if __name__ == '__main__':
    sys.exit(main())
