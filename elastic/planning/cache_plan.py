"""Decides whether a run has a prefix cache, and whether its images keep their augmentations."""

from typing import NamedTuple, Optional

import numpy as np

from elastic.schemes.fixed import SCHEMES, is_elastic
from elastic.selection.items import out_of_reach


class CachePlan(NamedTuple):
    """Says what a run caches.

    views: 'fresh' or 'held'; 'auto' where only a timing table can tell, and there was none.
    why_not: why there is no cache, in one line; None: there is one.
    silent: whether that goes without saying.
    """
    views: str
    why_not: Optional[str] = None
    silent: bool = False


def plan_cache(asked, views, scheme, epochs, interval, augments, batch_statistics=False,
               table=None, rho=1.0, layers=None):
    """Returns the CachePlan of a run: a pure function, and the only place that decides.

    asked: --prefix_cache, 'auto', 'on' or 'off'. views: --views, 'auto', 'fresh' or 'held'.
    scheme: a train type. epochs: number of those that train. interval: epochs for which views are
    held; 0: all. augments: whether images are augmented. batch_statistics: whether those of batch
    normalization are trained. table: TensorTimings of elastic training; None: not measured yet.
    rho, layers: as in items.out_of_reach.
    """
    can_be_cut = table is None or bool(np.isfinite(table.cut_bytes).any())
    unwanted = asked == 'off' or not SCHEMES[scheme].frozen_front or not epochs
    if asked == 'on':
        views = 'held'
    elif views == 'auto' and (unwanted or not augments or not is_elastic(scheme) or epochs == 1
                              or interval == 1 or batch_statistics or not can_be_cut):
        views = 'fresh'
    elif views == 'auto' and table is not None:
        views = 'held' if out_of_reach(table, rho, layers) else 'fresh'
    if unwanted:
        return CachePlan(views, '{} freezes no layers next to the input'.format(scheme),
                         asked != 'on' or not epochs)
    if epochs == 1:
        return CachePlan(views, 'no image comes back in one epoch')
    if augments and views == 'fresh':
        return CachePlan(views, 'each epoch draws new augmentations; --views held keeps them for '
                                '--interval epochs')
    if augments and interval == 1:
        return CachePlan(views, 'each epoch draws new augmentations with --interval 1; use a '
                                'longer one')
    if not can_be_cut:
        return CachePlan(views, 'no part of the network can be cut off so that each image has its '
                                'own outputs (batch statistics?)')
    return CachePlan(views)
