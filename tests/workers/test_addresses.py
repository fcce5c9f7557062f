"""Tests which workers a run has, and what happens if one of them cannot be reached."""

import json
import socket
from types import SimpleNamespace

import pytest

import main
from elastic.errors import UserError
from elastic.workers.addresses import (
    Workers,
    check_own_address,
    split_address,
    tables_folder,
    wait_for_all,
    workers_of,
)
from worker_processes import free_addresses

TWO = ('pi1:2222', 'pi2:2222')


def given(workers=None, index=None, config=None):
    environment = {} if config is None else {'TF_CONFIG': config if isinstance(
        config, str) else json.dumps(config)}
    return workers_of(SimpleNamespace(workers=workers, worker_index=index), environment)


def config(kind, index, **cluster):
    return dict(cluster=cluster, task=dict(type=kind, index=index))


def test_one_process_has_no_workers():
    assert given() is None and given('pi1:2222', 0) is None and given(config={}) is None
    assert given(config=' ') is None


def test_flags_say_which_workers_there_are():
    assert given('pi1:2222,pi2:2222', 1) == Workers(TWO, 1)


@pytest.mark.parametrize('found, index', [
    (config('worker', 1, worker=list(TWO)), 1),
    (config('chief', 0, chief=['pi1:2222'], worker=['pi2:2222']), 0),
    (config('worker', 0, chief=['pi1:2222'], worker=['pi2:2222']), 1)])
def test_tf_config_says_it_as_tensorflow_defines_it(found, index):
    assert given(config=found) == Workers(TWO, index)


def test_flags_come_before_tf_config():
    assert given('a:1,b:1', 0, config('worker', 1, worker=list(TWO))).addresses == ('a:1', 'b:1')


@pytest.mark.parametrize('workers, index, found, message', [
    ('pi1:2222,pi2:2222', 2, None, '--worker_index 2 is none of the 2 workers; allowed: 0 to 1'),
    ('pi1:2222,pi2:2222', None, None, '--workers needs --worker_index'),
    (None, 1, None, '--worker_index 1 needs --workers'),
    ('pi1:2222,pi1:2222', 0, None, 'names an address twice'),
    ('pi1', 0, None, "--workers has 'pi1'; needed is host:port"),
    ('pi1:0,pi2:1', 0, None, "--workers has 'pi1:0'"),
    ('pi1:99999,pi2:1', 0, None, "--workers has 'pi1:99999'"),
    ('pi1:2222,', 0, None, "--workers has ''"),
    (None, None, '{', 'TF_CONFIG is not as TensorFlow defines it'),
    (None, None, '[1]', 'TF_CONFIG is not as TensorFlow defines it'),
    (None, None, config('worker', 0, ps=['a:1']), "TF_CONFIG has jobs 'ps'"),
    (None, None, dict(cluster=dict(worker=list(TWO))), "TF_CONFIG is not as TensorFlow")])
def test_workers_that_make_no_sense_are_refused(workers, index, found, message):
    with pytest.raises(UserError) as refused:
        given(workers, index, found)
    assert message in str(refused.value) and '\n' not in str(refused.value)


def test_each_worker_has_its_own_timing_tables():
    assert len({tables_folder('logs', index) for index in range(3)}) == 3
    assert tables_folder('logs', None) == tables_folder('logs', 0) == 'logs'


def test_an_address_may_be_ipv6():
    assert split_address('[::1]:2222') == ('::1', 2222)


@pytest.mark.parametrize('flags, message', [
    (['--train_type', 'prune_training'], 'prune_training does not fit --workers'),
    (['--deadline', '45m'], '--deadline does not fit --workers')])
def test_what_fits_one_device_alone_is_refused(flags, message):
    workers = ['--workers', ','.join(free_addresses(2)), '--worker_index', '0']
    with pytest.raises(UserError, match=message):
        main.check_arguments(main.parse_arguments(flags + workers))


def test_a_port_in_use_is_refused():
    with socket.socket() as other:
        other.bind(('127.0.0.1', 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(UserError, match='worker 0 .*its port cannot be used .*in use'):
            check_own_address(Workers(('127.0.0.1:{}'.format(port), 'pi2:1'), 0))


@pytest.mark.parametrize('address, message', [
    ('192.0.2.1:2222', 'worker 0 .* is not an address of this machine'),  # for documentation
    ('no.such.host.invalid:2222', "the host 'no.such.host.invalid' is unknown")])
def test_an_address_of_another_machine_or_an_unknown_host_is_refused(address, message):
    with pytest.raises(UserError, match=message):
        check_own_address(Workers((address, 'pi2:1'), 0))


def test_a_worker_that_does_not_answer_is_named():
    addresses = tuple(free_addresses(3))
    with socket.socket() as answering:
        host, port = split_address(addresses[2])
        answering.bind((host, port))
        answering.listen(1)
        with pytest.raises(UserError) as refused:
            wait_for_all(Workers(addresses, 0), 0.5)
    assert str(refused.value).startswith('worker 1 ({}) does not answer after 0.5 s'.format(
        addresses[1]))


def test_a_lone_machine_trains_alone_whatever_its_role_is_called():
    for role in ('chief', 'master', 'worker', 'workerpool0'):
        assert given(config=config(role, 0, **{role: ['algo-1:8888']})) is None


@pytest.mark.parametrize('kind, index, place', [('master', 0, 0), ('worker', 0, 1)])
def test_a_master_is_the_chief_and_an_evaluator_no_worker(kind, index, place):
    found = config(kind, index, worker=['pi2:2222'], master=['pi1:2222'], evaluator=['pi3:2222'])
    assert given(config=found) == Workers(TWO, place)


@pytest.mark.parametrize('found, message', [
    (config('evaluator', 0, chief=['a:1'], worker=['b:1']), 'an evaluator, which does not train'),
    (config('evaluator', 0, chief=['a:1']), 'an evaluator, which does not train'),
    (config('ps', 0, chief=['a:1'], ps=['b:1']), "TF_CONFIG has jobs 'ps'; allowed: chief, master"),
    (config('chief', 0, worker=list(TWO)), 'TF_CONFIG is not as TensorFlow defines it'),
    (config('worker', 2, worker=list(TWO)),
     'TF_CONFIG is not as TensorFlow defines it (IndexError: there is no worker 2; '
     'allowed: 0 to 1)'),
    (config('worker', -1, worker=list(TWO)), 'there is no worker -1; allowed: 0 to 1'),
    (config(None, None, worker=list(TWO)), 'TF_CONFIG is not as TensorFlow defines it')])
def test_a_role_that_does_not_train_is_refused(found, message):
    with pytest.raises(UserError) as refused:
        given(config=found)
    assert message in str(refused.value) and '\n' not in str(refused.value)
