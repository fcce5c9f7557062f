"""Lays out the photographs of solar cells of PyPI's elpv-dataset as folders of classes.

The 2,624 grey photographs (300x300) show cells of 44 modules by electroluminescence (Buerhop-Lutz
et al., 2018, doi:10.4229/35thEUPVSEC20182018-5CV.3.15). They are CC BY-NC-SA 4.0, so they are no
part of this project. A cell is `defective` here if its probability of a defect is above 1/2.

The package does not say which cells are from one module. Neighbouring numbers mostly are, so every
fifth BLOCK of numbers is for testing. The BLOCK before it tests what learning rates are tuned by.
"""

import csv
import importlib.util
import os
import shutil

from elastic.errors import UserError

PACKAGE = 'elpv-dataset'
FILE = '{:04d}.png'  # of a number
BLOCK = 60  # cells; the mean of a module
CLASSES = ('functional', 'defective')


def write_cells(folder, tuning=False, package=PACKAGE):
    """Makes train/ and test/ in `folder`, unless they are there.

    tuning: leaves the cells for testing out, and makes test/ of a quarter of the others.
    package: on PyPI. Raises UserError if the package is not installed.
    """
    if os.path.isdir(os.path.join(folder, 'test')):
        return
    data = data_of(package)
    beside = folder + '.unfinished'
    shutil.rmtree(beside, ignore_errors=True)
    for name, probability, _ in cells(os.path.join(data, 'labels.csv')):
        part, number = part_of_cell(name, tuning)
        if part is None:
            continue
        to = os.path.join(beside, part, CLASSES[probability > 0.5])
        os.makedirs(to, exist_ok=True)
        shutil.copyfile(os.path.join(data, name), os.path.join(to, FILE.format(number)))
    os.rename(beside, folder)


def data_of(package=PACKAGE):
    """Returns the folder of the package's data; raises UserError if it is not installed."""
    found = importlib.util.find_spec(package.replace('-', '_'))
    if found is None:
        raise UserError('the photographs of solar cells are not installed; `pip install {}` '
                        '(91 MB, CC BY-NC-SA 4.0)'.format(package))
    return os.path.join(os.path.dirname(found.origin), 'data')


def kinds_of_cells():
    """Returns file name in the folders of write_cells -> mono or poly."""
    return {FILE.format(part_of_cell(name)[1]): kind
            for name, _, kind in cells(os.path.join(data_of(), 'labels.csv'))}


def cells(path):
    """Yields (path of the photograph, probability of a defect, mono or poly) of labels.csv."""
    with open(path, encoding='utf-8', newline='') as file:
        for line in csv.reader(file, delimiter=' ', skipinitialspace=True):
            yield line[0], float(line[1]), line[2]


def part_of_cell(name, tuning=False):
    """Returns ('train', 'test' or None, number) of a photograph such as images/cell0061.png."""
    number = int(os.path.splitext(os.path.basename(name))[0][len('cell'):])
    left = 4 - (number - 1) // BLOCK % 5 - tuning  # blocks until the next one for testing
    return None if left < 0 else 'train' if left else 'test', number
