"""Predicts the time and memory of each way to train on this device.

profiler.py ends with these costs; scripts/reproduce.py adds up the hours of a figure's runs.
"""

from typing import NamedTuple, Optional

import numpy as np

from elastic import texts
from elastic.data.images import augmentation_of, prepared_sizes
from elastic.errors import UserError, first_line
from elastic.planning.cache_plan import plan_cache
from elastic.schemes.fixed import SCHEMES
from elastic.selection.items import out_of_reach, smallest_rho
from elastic.settings import BASELINES, ELASTIC, TRAINING

UNKNOWN_IMAGES = 1000  # stand for a data set that cannot be counted
RHOS = (0.7, 0.5, 0.35, 0.25)
PEAK_NOTE = ('peak: of the process, with TensorFlow; preparing images, a prefix cache and the '
             'memory of a GPU come on top')
HOLDS_NOTE = 'step holds: tensors beside the variables, predicted (docs/memory.md)'
TIME_NOTE = 'time: tests between epochs included; selecting tensors and preparing images are not'


class Way(NamedTuple):
    """Describes a way to train by the flags of main.py that decide how long a run takes.

    rho: of elastic training; other schemes ignore it.
    """
    train_type: str
    dataset_name: str
    batch_size: int
    num_epochs: int
    rho: float = 1.0
    prefix_cache: str = 'off'
    augmentation: Optional[str] = None
    interval: int = TRAINING.interval
    train_images: Optional[int] = None
    steps_per_epoch: Optional[int] = None
    validation_steps: Optional[int] = None

    @property
    def augments(self):
        """Returns whether training images are augmented."""
        return augmentation_of(self.dataset_name, self.augmentation) != 'none'

    def with_cache_cost(self, table, copy_times=None):
        """Returns the TensorTimings with the cost of a prefix cache, if this way uses one.

        copy_times: CopyTimes; None: copying is free.
        """
        if self.prefix_cache != 'on':
            return table
        fillings = -(-self.num_epochs // self.interval) if self.augments and self.interval else 1
        best = table.cached_at_best(self.num_epochs / fillings)  # epochs from filling to filling
        if copy_times is None:
            return best
        read, write = copy_times.copying(table.cut_bytes)
        return best._replace(cache=best.cache._replace(read_ms=read, write_ms=write))

    def why_not(self, table):
        """Returns one line if rho is out of reach even with an ideal prefix cache, else None."""
        if self.train_type != ELASTIC:
            return None
        reason = out_of_reach(self.with_cache_cost(table), self.rho)
        held = self._replace(prefix_cache='on')
        if reason and self != held and not why_no_cache(self, table) and not held.why_not(table):
            reason += '; with --prefix_cache on, which holds views, it may be within reach'
        return reason

    def step_ms(self, table):
        """Returns the predicted mean ms of a step.

        Elastic training spends its whole budget.
        """
        if self.train_type == ELASTIC:
            return self.rho * table.t_step
        return float(table.step_time(mask_of(self.train_type, table.names)))

    def working_bytes(self, table):
        """Returns the predicted bytes that a step holds beside the variables; None if unknown.

        Elastic training is taken to train all tensors from the output down to the deepest for which
        rho has time.
        """
        if table.memory is None:
            return None
        if self.train_type != ELASTIC:
            return table.memory.peak(mask_of(self.train_type, table.names))
        chains = table.depth <= np.arange(len(table.names))[:, None]  # from the output down
        within = [mask for mask in chains if table.step_time(mask) <= self.rho * table.t_step]
        return table.memory.peak(within[-1]) if within else None

    def hours(self, table, images):
        """Returns the predicted hours of a run, tests between epochs included.

        images: (training, test) images of the data set.
        """
        train_images = self.train_images or images[0]
        steps = min(train_images // self.batch_size, self.steps_per_epoch or train_images)
        tests = min(images[1] / self.batch_size, self.validation_steps or images[1])
        return self.num_epochs * (steps * self.step_ms(table) + tests * table.t_fp) / 3.6e6


class Forecast(NamedTuple):
    """Holds the costs of a Way; step_ms, hours, speed_up: None if rho is out of reach."""
    way: Way
    smallest_rho: Optional[float]  # None unless training is elastic
    peak_bytes: Optional[int]  # None if not measured
    step_ms: Optional[float] = None
    hours: Optional[float] = None
    speed_up: Optional[float] = None
    working_bytes: Optional[float] = None


def mask_of(train_type, names):
    """Returns the (N,) bool mask of a fixed scheme; the last tensor belongs to the output layer."""
    layers = np.array([name.rsplit('/', 1)[0] for name in names])
    return SCHEMES[train_type].trains(names, layers == layers[-1])


def sizes_of(dataset_name, input_size, batch_size, data_dir=None):
    """Returns (classes, training images, test images); prepares the data set if it can.

    Prints a line if it cannot, and returns published sizes. Where only the number of classes is
    published, the sizes are UNKNOWN_IMAGES for training and none for tests. Raises UserError for a
    data set that cannot be used, or that is smaller than a batch.
    """
    (classes, train, test), reason = prepared_sizes(dataset_name, input_size, data_dir)
    if reason is not None:
        train, test, source = (train, test, 'as published') if train else (
            max(UNKNOWN_IMAGES, batch_size), 0, 'the classes as published, the images a guess')
        print('{}\ncosts are for {} classes, {:,} training and {:,} test images ({})'.format(
            first_line(reason), classes, train, test, source))
    if batch_size > train:
        raise UserError('a batch of {} does not fit into the {} training images of {}'.format(
            batch_size, train, dataset_name))
    return classes, train, test


def why_no_cache(way, table):
    """Returns why no run could cache activations of this network, or None."""
    return plan_cache('auto', 'held', ELASTIC, way.num_epochs, 0, way.augments,
                      table=table).why_not


def ways_like(way, table):
    """Yields the Ways to compare: baselines, then RHOS; with and without a prefix cache."""
    for train_type in BASELINES + (ELASTIC,):
        cached = not why_no_cache(way, table) and SCHEMES[train_type].frozen_front
        for rho in RHOS if train_type == ELASTIC else (1.0,):
            for cache in ('off', 'on') if cached else ('off',):
                yield way._replace(train_type=train_type, rho=rho, prefix_cache=cache)


def forecast_of(way, table, copy_times, images, peaks):
    """Returns the Forecast of a Way.

    images: (training, test) images. peaks: train type -> bytes or None. copy_times: CopyTimes.
    """
    table, elastic = way.with_cache_cost(table, copy_times), way.train_type == ELASTIC
    least = smallest_rho(table) if elastic else None
    cost = Forecast(way, least, peaks[way.train_type])
    if elastic and way.rho < least:
        return cost
    step_ms = way.step_ms(table)
    return cost._replace(step_ms=step_ms, hours=way.hours(table, images),
                         working_bytes=way.working_bytes(table),
                         speed_up=table.t_step / step_ms)


# ------------------------------------------------------------------------------ for people


def notes_on(way, table):
    """Returns the lines of text below the table."""
    why = why_no_cache(way, table)
    if why:
        cache = 'no prefix cache: ' + why
    elif way.augments:
        cache = ('prefix cache: holds the augmentation of each image for --interval epochs; by '
                 'default only where rho needs it')
    else:
        cache = 'prefix cache: used by default, as images of {} come back unchanged'.format(
            way.dataset_name)
    return [TIME_NOTE, PEAK_NOTE, HOLDS_NOTE, cache]


def describe(costs):
    """Returns the Costs as a text table, one row each."""
    longest = max(cost.hours or 0 for cost in costs)
    unit, per_hour = ('h', 1) if longest >= 1 else ('min', 60) if longest >= 0.05 else ('s', 3600)
    rows = []
    for way, least, peak_bytes, step_ms, hours, speed_up, working_bytes in costs:
        elastic, cacheable = way.train_type == ELASTIC, SCHEMES[way.train_type].frozen_front
        rows.append([
            way.train_type + (' rho {:g}'.format(way.rho) if elastic else ''),
            (way.prefix_cache + ', held views' * (way.augments and way.prefix_cache == 'on')
             if cacheable else ''),
            'out of reach' if step_ms is None else '{:.1f}'.format(step_ms),
            '' if speed_up is None else '{:.2f}'.format(speed_up),
            '{:.3f}'.format(least + 5e-4) if elastic else '',  # rounded up
            '' if hours is None else '{:.1f}'.format(hours * per_hour),
            'not measured' if peak_bytes is None else '{:,.0f}'.format(peak_bytes / 1e6),
            '' if working_bytes is None else '{:,.0f}'.format(working_bytes / 1e6)])
    return texts.table(
        ['way to train', 'prefix cache', 'step (ms)', 'speed-up', 'smallest rho',
         'time ({})'.format(unit), 'peak (MB)', 'step holds (MB)'], rows, '<<>>>>>>')
