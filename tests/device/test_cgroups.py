"""Tests that the limits of containers, services and `ulimit` are taken into account."""

import contextlib
import os
import subprocess
import sys

import pytest

from boards import change
from elastic.device.cgroups import cpu_quota, memory_left
from elastic.device.host import available_bytes
from small_models import ROOT

V1 = 'sys/fs/cgroup/memory/docker/abc'
NO_LIMIT = '9223372036854771712'


def written(folder, cgroup, files):
    """Writes the files of a root folder; returns its path."""
    return change(folder, dict(files, **{'proc/self/cgroup': cgroup}))


@pytest.mark.parametrize('cgroup, files, cores', [
    ('0::/', {'sys/fs/cgroup/cpu.max': '150000 100000'}, 1.5),
    ('0::/', {'sys/fs/cgroup/cpu.max': 'max 100000'}, None), ('', {}, None),
    ('0::/a/b', {'sys/fs/cgroup/a/cpu.max': '50000 100000',
                 'sys/fs/cgroup/a/b/cpu.max': 'max 100000'}, 0.5),
    ('3:cpu,cpuacct:/', {'sys/fs/cgroup/cpu/cpu.cfs_quota_us': '50000',
                         'sys/fs/cgroup/cpu/cpu.cfs_period_us': '100000'}, 0.5),
    ('3:cpu:/', {'sys/fs/cgroup/cpu/cpu.cfs_quota_us': '-1',
                 'sys/fs/cgroup/cpu/cpu.cfs_period_us': '100000'}, None)])
def test_a_container_s_share_of_cores_is_read(tmp_path, cgroup, files, cores):
    assert cpu_quota(written(tmp_path, cgroup, files)) == cores


@pytest.mark.parametrize('cgroup, files, left', [
    ('', {}, None),
    ('0::/', {'sys/fs/cgroup/memory.max': 'max', 'sys/fs/cgroup/memory.current': '5'}, None),
    ('0::/', {'sys/fs/cgroup/memory.max': '1000', 'sys/fs/cgroup/memory.current': '700',
              'sys/fs/cgroup/memory.stat': 'anon 500\ninactive_file 200'}, 500),
    ('0::/', {'sys/fs/cgroup/memory.max': '1000', 'sys/fs/cgroup/memory.high': '800',
              'sys/fs/cgroup/memory.current': '700'}, 100),
    # A service: its own group has no limit, the slice around it has one.
    ('0::/user.slice/run.service', {
        'sys/fs/cgroup/user.slice/memory.max': '3000',
        'sys/fs/cgroup/user.slice/memory.current': '1000',
        'sys/fs/cgroup/user.slice/run.service/memory.max': 'max',
        'sys/fs/cgroup/user.slice/run.service/memory.current': '900'}, 2000),
    ('4:memory:/docker/abc', {V1 + '/memory.limit_in_bytes': '5000',
                              V1 + '/memory.usage_in_bytes': '4000',
                              V1 + '/memory.stat': 'total_inactive_file 500'}, 1500),
    # In a container of version 1, its group is the mount itself.
    ('9:name=systemd:/\n4:memory:/docker/abc\n0::/', {
        'sys/fs/cgroup/memory/memory.limit_in_bytes': '5000',
        'sys/fs/cgroup/memory/memory.usage_in_bytes': '1000'}, 4000),
    ('0::/../outside', {'sys/fs/cgroup/memory.max': '1000',
                        'sys/fs/cgroup/memory.current': '400'}, 600)])
def test_the_memory_that_a_group_has_left_is_read(tmp_path, cgroup, files, left):
    root = written(tmp_path, cgroup, dict(files, **{
        'proc/meminfo': 'MemTotal: 99 kB\nMemAvailable:   8000000 kB'}))
    assert memory_left(root) == left
    assert available_bytes(root) == (8192000000 if left is None else left)


def test_without_a_limit_of_version_1_the_host_s_memory_counts(tmp_path):
    root = written(tmp_path, '4:memory:/', {
        'sys/fs/cgroup/memory/memory.limit_in_bytes': NO_LIMIT,
        'sys/fs/cgroup/memory/memory.usage_in_bytes': '1000',
        'proc/meminfo': 'MemAvailable:   2000 kB'})
    assert available_bytes(root) == 2048000


def in_group(code, before=''):
    """Returns what Python code prints. before: a command of the shell that comes first."""
    return subprocess.check_output(
        ['bash', '-c', before + 'exec "$0" -c "$1"', sys.executable, code], cwd=ROOT,
        universal_newlines=True)


def test_a_limit_of_ulimit_counts():
    code = 'from elastic.device.host import available_bytes; print(available_bytes())'
    assert 0 < int(in_group(code, 'ulimit -v {}; '.format(2 * 10 ** 6))) < 2.048e9


@contextlib.contextmanager
def real_group(controller, limit, value):
    """Yields the command with which a process joins a real group of this limit."""
    folder = '/sys/fs/cgroup/{}/elastic_test_{}'.format(controller, os.getpid())
    try:
        os.mkdir(folder)
        with open(os.path.join(folder, limit), 'w') as file:
            file.write(str(value))
    except OSError as error:
        pytest.skip('no control groups can be made here: {}'.format(error))
    try:
        yield 'echo $$ > {}/cgroup.procs && '.format(folder)
    finally:
        os.rmdir(folder)


@pytest.mark.thorough
def test_images_that_do_not_fit_into_a_container_are_decoded_in_each_epoch():
    """In memory, they would take 1.96 GB, and the process would be killed."""
    code = ('import datasets\n'
            'data = datasets.load_dataset("digits", 224, 4)\n'
            'images, _ = next(iter(data.train))\n'
            'print(images.shape)')
    with real_group('memory', 'memory.limit_in_bytes', 1400 * 2 ** 20) as joining:
        assert in_group(code, joining) == '(4, 224, 224, 3)\n'


@pytest.mark.thorough
def test_the_quota_of_a_real_group_is_part_of_the_host_in_the_key_of_timing_tables():
    code = ('from elastic.timing.stored import host_description\n'
            'print(host_description())')
    with real_group('cpu', 'cpu.cfs_quota_us', 50000) as joining:
        described = [in_group(code, before) for before in (joining, '')]
    assert ', 0.5 of them at a time' in described[0] and described[0] != described[1]
