"""Makes up folders of finished runs; edits and checks their files and figures."""

import csv
import json

from elastic.runs.folder import SelectionRow, epoch_columns
from elastic.settings import VARIED

EPOCHS, TENSORS = 4, 9
SHARE = [0.05 + 0.01 * tensor for tensor in range(TENSORS)]
MASKS = {1: [0, 0, 1, 0, 1, 1, 0, 1, 1], 3: [0, 1, 0, 0, 0, 1, 1, 0, 1]}  # first epoch -> mask


def write_csv(path, rows):
    with open(str(path), 'w', encoding='utf-8', newline='') as file:
        csv.writer(file).writerows(rows)


def read_csv(path):
    with open(str(path), encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def edit_csv(path, row, column, value):
    """Changes one cell; row 1 is the first after the header."""
    rows = [list(line) for line in csv.reader(path.read_text(encoding='utf-8').splitlines())]
    rows[row][rows[0].index(column)] = value
    write_csv(path, rows)


def epoch_rows(step_seconds, accuracy, throttled=None):
    """Returns rows of epochs.csv. throttled: these epochs, or None if the device reports none."""
    rows = []
    for epoch in range(1, EPOCHS + 1):
        test = accuracy * (1 - 0.5 ** epoch)
        rows.append([epoch, 1e-3 / epoch, test + 0.05, 1.5 - test, 0.0, test, 1.75 - test,
                     10.0, step_seconds - 1.0, 1.0, 0.5, 3.0, epoch * step_seconds]
                    + (['', '', ''] if throttled is None else
                       [61.5, 1500.0, int(epoch in throttled)]))
    return rows


def make_run(logs, name, scheme='elastic_training', rho=0.5, seed=0, step_seconds=50.0,
             accuracy=0.8, share=SHARE, throttled=None, **changes):
    """Makes a run; changes: to its summary, which may have fewer than EPOCHS epochs."""
    folder = logs / name
    folder.mkdir(parents=True)
    elastic = scheme.startswith('elastic')
    summary = dict.fromkeys(VARIED)
    summary.update({
        'run_name': name, 'scheme': scheme, 'model_name': 'mobilenetv2',
        'dataset_name': 'oxford_iiit_pet', 'rho': rho if elastic else None,
        'importance': 'loss_drop' if elastic else None, 'seed': seed, 'epochs': EPOCHS,
        'final_accuracy': accuracy, 'best_accuracy': accuracy, 'stack': 'TensorFlow 2.21',
        'host': 'pi4b', 'finished': True,
        'throttled_epochs': None if throttled is None else len(throttled),
        'train_seconds': EPOCHS * step_seconds, 'step_ms': 10.0, 'selection_seconds': EPOCHS * 1.0,
        'training_intervals': None, 'energy_joules': None, 'energy_source': None,
        'energy_note': 'no power sensor found'})
    summary.update(changes)
    rows = epoch_rows(step_seconds, accuracy, throttled)[:summary['epochs']]
    write_csv(folder / 'epochs.csv', [list(epoch_columns(summary))] + rows)
    if elastic:
        rows = [list(SelectionRow._fields)]
        for epoch, mask in MASKS.items():
            rows += [[epoch, tensor, 'block_{}/kernel'.format(tensor), '3x3x8x8', mask[tensor],
                      '' if tensor == 0 else 0.1 * tensor, share[tensor] if share else '']
                     for tensor in range(TENSORS)]
        write_csv(folder / 'selections.csv', rows)
    (folder / 'summary.json').write_text(json.dumps(summary), encoding='utf-8')
    return folder


def folder_content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def watched_figures(monkeypatch):
    """Returns the list of all Figures that are written from now on."""
    from matplotlib.figure import Figure
    figures, save = [], Figure.savefig

    def savefig(figure, *arguments, **more):
        if figure not in figures:
            figures.append(figure)
        save(figure, *arguments, **more)
    monkeypatch.setattr(Figure, 'savefig', savefig)
    return figures


def assert_figure(paths, output):
    """Asserts that the paths are a complete PNG, PDF and CSV of that name."""
    import numpy as np
    from matplotlib import image
    assert [str(path) for path in paths] == [str(output) + end for end in ('.png', '.pdf', '.csv')]
    pixels = image.imread(str(paths[0]))
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000
    assert len(np.unique((255 * pixels[..., :3]).astype(int).reshape(-1, 3), axis=0)) > 20
    with open(str(paths[1]), 'rb') as file:
        content = file.read()
    assert content.startswith(b'%PDF') and content.rstrip().endswith(b'%%EOF')
