"""Lists the runs of each figure, and their flags of main.py.

scripts/reproduce.py trains them and draws the figures. Nothing here touches a file.
"""

import os
from typing import NamedTuple, Optional, Sequence

from elastic.settings import BASELINES, ELASTIC, LOGS_DIR, PAPER_SETS, PRUNE

CUB, PET, DOGS = PAPER_SETS
REHEARSED_SIZES = (10, 10776, 2250)  # classes, training and test images of all REHEARSED_DATA
RHO, INTERVAL = 0.5, 4
REHEARSED_DATA = {CUB: 'digits_shifted', PET: 'digits_inverted', DOGS: 'digits'}
REHEARSAL = {'input_size': 32, 'batch_size': 8, 'weights': 'none', 'learning_rate': 0.001,
             'num_epochs': 5, 'steps_per_epoch': 20, 'validation_steps': 25}
# A prefix cache needs images that come back and frozen layers.
REHEARSED_HELD = {'train_images': 160, 'bn_statistics': 'frozen'}


class Cell(NamedTuple):
    """One run of a figure, without its seed. None leaves a flag at its default, views at fresh."""
    model_name: str
    dataset_name: str
    train_type: str
    rho: Optional[float] = None
    interval: Optional[int] = None
    probe_batches: Optional[int] = None
    views: Optional[str] = None
    prefix_cache: str = 'off'  # as in the paper


class Figure(NamedTuple):
    """What a figure shows, and the runs it needs.

    board, hours: the paper's devices, and its hours on them; '' for a figure that it does not have.
    draw: name of a function in paper_plots.py.
    by_data: whether the figure may be drawn without data sets whose runs are incomplete.
    """
    title: str
    board: str
    hours: str
    cells: Sequence
    draw: str
    by_data: bool = False


def elastic(model, data, rho=RHO, interval=INTERVAL, probe_batches=1):
    return Cell(model, data, ELASTIC, rho, interval, probe_batches)


def schemes(model, data, rho=RHO):
    """Returns the four schemes that the paper compares nearly everywhere."""
    return [Cell(model, data, name) for name in BASELINES] + [elastic(model, data, rho)]


def _elastic_alone(cells):
    return [cell for cell in cells if cell.train_type == ELASTIC]


def _figures():
    """Returns name -> Figure; names that end in `_ego` are elastic training alone."""
    over_data = {data: schemes('resnet50', data) for data in (CUB, PET, DOGS)}
    curves15 = sum(over_data.values(), [])
    baselines = [Cell('resnet50', CUB, name) for name in BASELINES + (PRUNE,)]
    rhos = [elastic('resnet50', CUB, rho) for rho in (0.35, 0.4, 0.5, 0.6, 0.7)]
    models = sum([schemes(model, CUB, 0.4) for model in ('resnet50', 'vgg16', 'mobilenetv2')], [])
    stability = [elastic('resnet50', CUB, interval=interval) for interval in (1, 2, 4)] + [
        elastic('resnet50', CUB, interval=1, probe_batches=count) for count in (2, 4, 8)]
    tx2, pi = 'Jetson TX2', 'Raspberry Pi 4B'
    figures = {
        '7': Figure('Importance from selection to selection, by interval and probe batches', tx2,
                    'not given', stability, 'importance_stability'),
        '15': Figure('Accuracy and loss over time, ResNet50 on three data sets', tx2,
                     '33 h on the TX2', curves15, 'curve_grid'),
        '15ad': Figure('Accuracy and loss over time, ResNet50 on CUB-200', tx2,
                       '10 h on the TX2', over_data[CUB], 'curve_grid'),
        '16': Figure('Accuracy and loss over time, ResNet50 on two data sets', pi,
                     '221 h on the Pi', over_data[CUB] + over_data[PET], 'curve_grid'),
        '17ac': Figure('Accuracy and training time by rho, ResNet50 on CUB-200', tx2 + ', ' + pi,
                       '15 h on the TX2, 190 h on the Pi', baselines + rhos, 'bars'),
        '19': Figure('Accuracy and training time of three networks on CUB-200, rho 0.4',
                     tx2 + ', ' + pi, '20 h on the TX2, 310 h on the Pi', models, 'bars'),
        '21': Figure('Which tensors were trained in which epoch', tx2, 'those of figure 15',
                     _elastic_alone(curves15), 'selection_panels'),
        '23': Figure('Energy of each scheme', tx2 + ', ' + pi, 'those of figures 15 and 16',
                     curves15, 'energy_bars', by_data=True)}
    ego_hours = {'15': '6.5 h on the TX2', '15ad': 'not given', '16': '52 h on the Pi',
                 '17ac': '9 h on the TX2, 85 h on the Pi',
                 '19': '3.5 h on the TX2, 50 h on the Pi'}
    for name, hours in ego_hours.items():
        whole = figures[name]
        figures[name + '_ego'] = whole._replace(
            title=whole.title + ', elastic training alone', hours=hours,
            cells=_elastic_alone(whole.cells))
    fresh = [elastic('resnet50', CUB, rho) for rho in (0.5, 0.25)]
    held = [cell._replace(views='held') for cell in fresh]
    cached = [cell._replace(prefix_cache='on') for cell in held]
    figures['cache'] = Figure('What the prefix cache gains at rho 0.5 and 0.25, ResNet50 on '
                              'CUB-200', '', '', fresh + held + cached, 'curve_grid')
    return figures


FIGURES = _figures()


class Run(NamedTuple):
    """name: of the run's folder. flags: those of main.py that differ from its defaults."""
    name: str
    cell: Cell
    flags: Sequence


def runs_of(name, seeds=1, rehearse=False, meter_csv=None):
    """Returns the Runs of one figure, cell by cell and seed by seed."""
    figure = FIGURES[name]
    runs = []
    for cell in figure.cells:
        for seed in range(seeds):
            values = {key: value for key, value in cell._asdict().items() if value is not None}
            if rehearse:
                values.update(REHEARSAL)
                values['dataset_name'] = REHEARSED_DATA[cell.dataset_name]
                if cell.train_type == PRUNE:
                    values['prune_interval'] = 2
                if cell.views == 'held':
                    values.update(REHEARSED_HELD)
            values.setdefault('views', 'fresh')  # as in the paper
            values.update(seed=seed, logs_dir=logs_dir(rehearse), run_name=run_name(cell, seed))
            if meter_csv:
                values['meter_csv'] = meter_csv
            runs.append(Run(values['run_name'], cell, [
                '--{}={}'.format(key, value) for key, value in values.items()]))
    return runs


def run_name(cell, seed):
    name = '{}_{}_{}'.format(cell.model_name, cell.dataset_name, cell.train_type)
    if cell.rho is not None:
        name += '_rho{:g}_interval{}_probe{}'.format(cell.rho, cell.interval, cell.probe_batches)
    if cell.views is not None:
        name += '_' + cell.views
    if cell.prefix_cache != 'off':
        name += '_cache'
    return '{}_seed{}'.format(name, seed)


def logs_dir(rehearse):
    return os.path.join(LOGS_DIR, 'rehearsal') if rehearse else LOGS_DIR


def file_name(name):
    """Returns the name of a figure's files, such as figure15ad or figure_cache."""
    return 'figure' + ('' if name[0].isdigit() else '_') + name


def output_of(name, rehearse):
    """Returns the path of the picture, without its ending."""
    return os.path.join('figures', 'rehearsal' if rehearse else '', file_name(name))
