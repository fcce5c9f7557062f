"""Tests which runs have a prefix cache, and when their images keep their augmentations."""

from types import SimpleNamespace

import numpy as np
import pytest

from elastic.planning.cache_plan import plan_cache
from fixed_tables import fixed_profile
from small_models import SMALL, small_classifier

ELASTIC, HEAD, FULL = 'elastic_training', 'traditional_tl_training', 'full_training'
FRESH = 'each epoch draws new augmentations; --views held keeps them for --interval epochs'
SHORT = 'each epoch draws new augmentations with --interval 1; use a longer one'
ONCE = 'no image comes back in one epoch'
NO_CUT = SimpleNamespace(cut_bytes=np.full(3, np.inf))


@pytest.fixture(scope='module')
def table():
    return fixed_profile(small_classifier(10, 'frozen'), SMALL, 10, 8)


# asked, views, scheme, epochs, interval, augments -> views, why there is no cache, said aloud
@pytest.mark.parametrize('given, views, why, said', [
    (('auto', 'auto', ELASTIC, 4, 2, False), 'fresh', None, True),
    (('auto', 'auto', ELASTIC, 4, 0, True), 'auto', None, True),
    (('auto', 'auto', ELASTIC, 4, 2, True), 'auto', None, True),
    (('auto', 'auto', ELASTIC, 4, 1, True), 'fresh', FRESH, True),
    (('auto', 'auto', ELASTIC, 1, 2, True), 'fresh', ONCE, True),
    (('auto', 'auto', HEAD, 4, 2, True), 'fresh', FRESH, True),
    (('auto', 'auto', HEAD, 0, 1, False), 'fresh', 'no layers', False),  # the head is solved
    (('auto', 'auto', FULL, 4, 2, True), 'fresh', 'full_training freezes no layers', False),
    (('auto', 'fresh', ELASTIC, 4, 2, True), 'fresh', FRESH, True),
    (('auto', 'held', ELASTIC, 4, 2, True), 'held', None, True),
    (('auto', 'held', ELASTIC, 4, 1, True), 'held', SHORT, True),
    (('off', 'auto', ELASTIC, 4, 2, True), 'fresh', 'no layers', False),
    (('off', 'held', ELASTIC, 4, 2, True), 'held', 'no layers', False),
    (('on', 'fresh', HEAD, 4, 2, True), 'held', None, True),
    (('on', 'auto', ELASTIC, 1, 2, True), 'held', ONCE, True),
    (('on', 'auto', FULL, 4, 2, True), 'held', 'full_training freezes no layers', True)])
def test_the_flags_decide(given, views, why, said):
    plan = plan_cache(*given)
    assert plan.views == views and (plan.why_not is None) == (why is None)
    assert why is None or why in plan.why_not and plan.silent == (not said)


def test_batch_statistics_leave_views_fresh():
    assert plan_cache('auto', 'auto', ELASTIC, 4, 2, True, True).views == 'fresh'


@pytest.mark.parametrize('rho, views', [(0.9, 'fresh'), (0.1, 'held')])
def test_the_timing_table_decides_where_flags_do_not(table, rho, views):
    plan = plan_cache('auto', 'auto', ELASTIC, 4, 2, True, table=table, rho=rho)
    assert plan.views == views and plan.why_not == (FRESH if views == 'fresh' else None)
    for given in ('fresh', 'held'):
        assert plan_cache('auto', given, ELASTIC, 4, 2, True, table=table, rho=rho).views == given


@pytest.mark.parametrize('views', ['auto', 'held'])
def test_what_cannot_be_cut_is_not_cached(views):
    plan = plan_cache('auto', views, ELASTIC, 4, 2, False, table=NO_CUT, rho=0.1)
    assert plan.views == ('fresh' if views == 'auto' else 'held')
    assert plan.why_not.startswith('no part of the network can be cut off')
