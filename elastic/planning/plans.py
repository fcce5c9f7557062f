"""Decides before training what a run can afford: its epochs, its tensors' costs, its cache."""

import os
from typing import Any, NamedTuple

from elastic.cache.prefix_cache import NoCache, PrefixCache
from elastic.device.host import memory_limit
from elastic.errors import UserError
from elastic.files import make_folder
from elastic.planning.cache_offers import CacheOffers
from elastic.planning.cache_plan import plan_cache
from elastic.planning.deadline import PROFILE, AllEpochs, Deadline, first_pace, process_seconds
from elastic.schemes.fixed import HEAD, SCHEMES, is_elastic
from elastic.selection.items import layers_of, out_of_reach, smallest_rho
from elastic.settings import CHOSEN
from elastic.texts import duration_text


class Plans(NamedTuple):
    """Holds what is decided before training.

    settings: RunSettings, which a deadline changes. table: the TensorTimings; None of a scheme that
    needs none. cache: PrefixCache or NoCache. epochs: deadline.AllEpochs or Deadline.
    """
    settings: Any
    table: Any
    cache: Any
    epochs: Any


def plans_of(settings, model, dataset, resumed, table_path, profile):
    """Returns the Plans of a run.

    resumed: as in session.open_session. table_path: of the timing table. profile: () -> the
    TensorTimings, stored ones or new ones.
    """
    training, epochs = settings.training, AllEpochs()
    if training.deadline is not None and solves_alone(training, resumed, table_path):
        return head_alone(settings, dataset)
    if not is_elastic(training.train_type):
        table = profile() if training.train_type == CHOSEN else None
        return Plans(settings, table, prefix_cache_of(settings, dataset), epochs)
    table = profile()
    layers = layers_of(model) if training.granularity == 'layer' else None
    if training.deadline is not None:
        epochs = deadline_of(settings, table, layers, dataset, resumed)
        if resumed is None and epochs.plan.num_epochs == 1:  # there is no time to train
            return head_alone(settings, dataset)
        settings = settings._replace(training=epochs.settings(training))
    cache = elastic_cache(settings, table, layers, dataset, resumed)
    return Plans(settings, table, cache, epochs)


def solves_alone(training, resumed, table_path):
    """Returns whether a run with a deadline has no time for a profile, and only solves the head."""
    if resumed is not None:
        return resumed['deadline'] is None
    left = training.deadline - process_seconds()
    if left >= PROFILE or os.path.exists(table_path):
        return False
    print('deadline: {} left, too little to profile the network: only the head is solved'.format(
        duration_text(max(0.0, left))))
    return True


def head_alone(settings, dataset):
    """Returns the Plans of a run that only solves the head."""
    training = settings.training._replace(train_type=HEAD, num_epochs=1, deadline=None)
    settings = settings._replace(training=training)
    return Plans(settings, None, prefix_cache_of(settings, dataset), AllEpochs())


def cache_plan_of(settings, dataset, table=None, layers=None):
    """Returns the CachePlan of a run. table, layers: of elastic training, as in plan_cache."""
    training = settings.training
    return plan_cache(settings.cache.prefix_cache, settings.data.views, training.train_type,
                      training.trained_epochs, settings.data.interval,
                      dataset.augmentation != 'none', table=table, rho=training.rho, layers=layers)


def prefix_cache_of(settings, dataset, plan=None):
    """Returns the PrefixCache of this run, or NoCache, and says why there is none.

    plan: a CachePlan; default: that of a fixed scheme. Raises UserError if --prefix_cache on is
    impossible.
    """
    plan = plan or cache_plan_of(settings, dataset)
    if plan.why_not is None:
        logs_dir = settings.records.logs_dir
        make_folder(logs_dir)
        return PrefixCache(dataset, settings.cache.cache_dir or logs_dir, settings.cache.cache_gb,
                           memory_bytes=None if memory_limit() is None else 0,
                           exact=settings.deterministic)
    if settings.cache.prefix_cache == 'on' and SCHEMES[settings.training.train_type].frozen_front:
        raise UserError('--prefix_cache on: ' + plan.why_not)
    if not plan.silent:
        print('no prefix cache: ' + plan.why_not)
    return NoCache(dataset)


def elastic_cache(settings, table, layers, dataset, resumed):
    """Returns the PrefixCache of elastic training, or NoCache.

    With --views auto, holds views if rho is out of reach without a cache; a run that resumes keeps
    what it began with. Raises UserError if rho is still out of reach, unless the run resumes.
    table: TensorTimings. layers: as in items.items_of. resumed: as in session.open_session.
    """
    rho, data = settings.training.rho, settings.data
    if resumed is not None:
        settings = settings._replace(data=data._replace(views=resumed['about']['views']))
    plan = cache_plan_of(settings, dataset, table, layers)
    if plan.views == 'held':
        dataset.hold_views()
    cache = prefix_cache_of(settings, dataset, plan)
    costed = table if plan.why_not else CacheOffers(
        cache, table, 1, settings.training.num_epochs + 1).table
    reason = out_of_reach(costed, rho, layers)
    if reason and resumed is None:
        raise UserError('--' + reason)
    if data.views == 'auto' and dataset.views == 'held':
        print('--views held, as rho {:g} is out of reach without the prefix cache: each image '
              'keeps its augmentation for {}'.format(rho, '{} epochs'.format(
                  data.interval) if data.interval else
                  'the whole run (--interval 4 loses less accuracy)'))
    return cache


def deadline_of(settings, table, layers, dataset, resumed):
    """Returns the Deadline of this run, which holds a plan; prints it.

    The arguments are those of elastic_cache.
    """
    views = 'fresh' if settings.data.views == 'fresh' else 'held'
    held = settings._replace(data=settings.data._replace(views=views))
    why_not = cache_plan_of(held, dataset, table, layers).why_not
    least = smallest_rho(table, layers)
    pace = first_pace(settings, table, dataset, (least, least if why_not else 0.0))
    deadline = Deadline(settings.training.deadline, pace)
    if resumed is None:
        deadline.begin()
    else:
        deadline.restore(resumed['deadline'])
    return deadline
