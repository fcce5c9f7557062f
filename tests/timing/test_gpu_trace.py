"""Tests how traces of a GPU are read: made in TensorFlow's format, for ops of a real graph."""

import collections

import numpy as np
import pytest

import profiler
from elastic.errors import UserError
from elastic.steps.step_graph import FREE_OPS
from elastic.timing.attribution import attribute
from elastic.timing.op_times import read_trace
from elastic.timing.table import TensorTimings
from elastic.timing.totals import build_table
from timing_tables import by_bits, op_times, totals_as_traced
from traced_networks import STEPS, branching, traced
from xplanes import CPU, DERIVED, GPU, copy, kernel, xplane


def trace_of(tmp_path, events, other=None):
    return xplane(tmp_path / 'host.xplane.pb', {**{GPU: events}, **(other or {})})


# --- op by op


@pytest.mark.parametrize('reference', [False, True])
def test_time_on_the_gpu_wins_over_the_launch_on_the_host(reference, tmp_path):
    def op(text):
        return {'tf_op': ('ref', text) if reference else text, 'other': 'model/x:Add'}
    path = xplane(tmp_path / 'host.xplane.pb', {
        CPU: [('model/conv/Conv2D:Conv2D', 0.5, {}), ('model/conv/Conv2D:Conv2D', 0.5, {}),
              ('model/Cast:Cast', 0.25, {}), ('Executor::Process', 9, {})],
        ('/host:CUPTI', 'Host Threads/3'): [
            ('cuLaunchKernel', 5, op('model/conv/Conv2D:Conv2D')), ('NVTX:range', 5, {})],
        GPU: [('volta_sgemm', 2, op('model/conv/Conv2D:Conv2D')),
              ('im2col', 1, op('model/conv/Conv2D:Conv2D')),
              ('volta_sgemm', 4, op('model/conv/Conv2D:Conv2D')), ('MemcpyHtoD', 8, {})]})
    assert read_trace(path, num_steps=2)[0] == {'model/conv/Conv2D': pytest.approx(7 / 2),
                                                'model/Cast': pytest.approx(0.25 / 2)}


@pytest.mark.parametrize('text, op', [
    ('model/conv/Conv2D:Conv2D', 'model/conv/Conv2D'),
    ('model/conv/Conv2D:Conv2D:scope/inner', 'model/conv/Conv2D'),
    ('call:XlaLaunch::fusion.3:Fusion', 'call'),
    ('', 'volta_sgemm_128x64_nn'), ('XlaModule:', 'volta_sgemm_128x64_nn'),
    ('no op', 'volta_sgemm_128x64_nn')])
def test_a_kernel_is_of_the_op_that_tf_op_begins_with_or_counts_under_its_own_name(
        text, op, tmp_path):
    assert read_trace(trace_of(tmp_path, [kernel(text, 1)]), 1)[0] == {op: pytest.approx(1)}


@pytest.mark.parametrize('event, own', [
    (copy('MemcpyH2D', 8), 0), (copy('MemcpyD2H', 8, op='x/Add:Add'), 0),
    (copy('MemcpyP2P', 8, op='x/Add:Add'), 0), (copy('MemcpyD2D', 8), 0),
    (copy('Memset', 8, op='', stat='Memset_details'), 0),
    (copy('', 8, op='x/Add:Add', stat='memalloc_details'), 0),
    (copy('UM_BYTES_TRANSFER_HTOD', 8, stat='other'), 0),
    # Copies and clears that an op makes on the device are its work.
    (copy('MemcpyD2D', 8, op='x/Add:Add'), 8),
    (copy('Memset', 8, op='x/Add:Add', stat='Memset_details'), 8)])
def test_copies_are_no_kernels(event, own, tmp_path):
    path = trace_of(tmp_path, [kernel('x/Add:Add', 1), event])
    assert read_trace(path, 1)[0] == {'x/Add': pytest.approx(1 + own)}


@pytest.mark.parametrize('planes, gpu, what', [
    ({('/device:GPU:0', None): []}, None, '/device:GPU:0 is empty'),
    ({('/device:GPU:0', 'Stream #7(Memcpy)'): [('MemcpyD2H', 1, {})]}, None, 'GPU:0 is empty'),
    ({('/device:GPU:0', 'Steps'): [('0', 1, {})]}, None, 'GPU:0 is empty'),
    ({}, True, 'no plane of a GPU')])
def test_a_gpu_whose_kernels_are_missing_is_an_error_with_the_remedy(planes, gpu, what, tmp_path):
    path = xplane(tmp_path / 'host.xplane.pb', {CPU: [('a/Conv2D:Conv2D', 1, {})]})
    assert read_trace(path, 1, gpu=False)[0] == {'a/Conv2D': pytest.approx(1)}
    path = xplane(tmp_path / 'host.xplane.pb', {**{CPU: [('a/Conv2D:Conv2D', 1, {})]}, **planes})
    with pytest.raises(UserError, match=what + '.*RestrictProfilingToAdminUsers=0') as error:
        read_trace(path, 1, gpu=gpu)
    assert '\n' not in str(error.value) and 'CUDA_VISIBLE_DEVICES' in str(error.value)


# --- a real graph, executed here on the CPU, with the kernels that a GPU would run


def kernels_of(graph, seed=0):
    """Draws {node: ms of its kernels in one step} for all ops that compute."""
    rng = np.random.RandomState(seed)
    return {name: float(rng.uniform(0.1, 1)) for name in sorted(graph.nodes)
            if name in graph.work and graph.nodes[name].op not in FREE_OPS}


def gpu_planes(graph, kernels, steps=STEPS):
    """Returns planes with two kernels per op, on two GPUs; copies; and some derived lines."""
    compute, other, now = [], [], 0.0
    for _ in range(steps):
        for i, (name, ms) in enumerate(kernels.items()):
            full = '{}:{}'.format(name, graph.nodes[name].op)
            stream = other if i % 5 == 0 else compute
            stream += [kernel(full, ms / 4, now), kernel(full, ms * 3 / 4, now + ms / 4, 'dgrad')]
            now += ms
    planes = {('/device:GPU:0', 'Stream #13(Compute,MemcpyD2D)'): compute + [copy('MemcpyD2D', 5)],
              ('/device:GPU:1', 'Stream #20(Compute)'): other,
              ('/device:GPU:0', 'Stream #14(MemcpyH2D)'): [copy('MemcpyH2D', 50, op='in:_Send')],
              ('/device:GPU:0', 'Stream #15(MemcpyD2H)'): [copy('MemcpyD2H', 50)]}
    planes.update({('/device:GPU:0', line): compute[:30] for line in DERIVED})
    return planes


def attributed(graph, path, num_steps):
    ms, kernels = read_trace(path, num_steps)
    return attribute(graph, ms, 8, kernels)


def groups_by_hand(graph, kernels):
    groups = collections.defaultdict(float)
    for name, mask in graph.backward.items():
        groups[mask] += kernels.get(name, 0.0)
    return groups


def test_kernels_of_a_real_graph_are_attributed_once_and_launches_not_at_all(tmp_path):
    case = traced(branching)
    kernels = kernels_of(case.graph)
    assert len(kernels) > 30 and len(set(kernels).intersection(case.times)) > 30  # launches
    path = xplane(tmp_path / 'gpu.xplane.pb', gpu_planes(case.graph, kernels), onto=case.path)
    times = attributed(case.graph, path, STEPS)
    found = by_bits(times.group_tensors, times.group_ms)
    for mask, ms in groups_by_hand(case.graph, kernels).items():
        host = sum(case.times[name] for name, needed in case.graph.backward.items()
                   if needed == mask and name in case.times and name not in kernels)
        assert found[mask] == pytest.approx(ms + host)
    assert times.coverage == pytest.approx(1) and times.left_out == []
    assert not times.estimated_ms.any()
    assert times.kernels == pytest.approx(sum(kernels.values()))


def test_an_op_without_a_kernel_is_not_estimated_on_a_gpu_and_one_of_the_host_takes_its_time(
        tmp_path):
    case = traced(branching)
    weights = sorted(name for name in case.graph.backward
                     if case.graph.nodes[name].op == 'Conv2DBackpropFilter')
    none, host = weights[:2]
    kernels = kernels_of(case.graph)
    del kernels[none], kernels[host]
    planes = gpu_planes(case.graph, kernels)
    planes[CPU] = [(host + ':Conv2DBackpropFilter', 2, {}, i) for i in range(STEPS)]
    path = xplane(tmp_path / 'host.xplane.pb', planes)
    times = attributed(case.graph, path, STEPS)
    expected = groups_by_hand(case.graph, dict(kernels, **{host: 2.0}))
    assert by_bits(times.group_tensors, times.group_ms) == {
        mask: pytest.approx(ms) for mask, ms in expected.items()}
    assert not times.estimated_ms.any()
    without = attribute(case.graph, read_trace(path, STEPS)[0], 8)  # as on a CPU
    assert by_bits(without.group_tensors, without.group_ms)[case.graph.backward[none]] > expected[
        case.graph.backward[none]]


# --- how much of the step the kernels fill


def table_with(kernels):
    times = op_times({0b01: 2.0, 0b10: 1.0}, 2)._replace(kernels=kernels, coverage=1.0)
    return build_table(['a', 'b'], [(1,), (2,)], times, totals_as_traced(
        times, 3.0, 5.0, 1.5, 0.5), {})


def test_kernels_that_overlap_fill_less_of_the_step_than_they_add_up_to(tmp_path):
    path = trace_of(tmp_path, [kernel('a:Mul', 4, 0), kernel('a:Mul', 1, 10)], {
        ('/device:GPU:0', 'Stream #14(Compute)'): [kernel('b:Mul', 4, 2), kernel('b:Mul', 1, 3)],
        ('/device:GPU:0', 'Steps'): [('0', 100, {})]})
    assert sum(read_trace(path, 1)[0].values()) == pytest.approx(10)
    assert read_trace(path, 2)[1] == pytest.approx((6 + 1) / 2)


@pytest.mark.parametrize('kernels, share', [(4.0, 0.4), (7.9, 0.79)])
def test_a_step_that_waits_for_launches_is_told_in_one_line_with_the_number(
        kernels, share, tmp_path, capsys):
    made = table_with(kernels)
    made.save(str(tmp_path / 'timings.json'))
    for table in (made, TensorTimings.load(str(tmp_path / 'timings.json'))):
        assert table.profile.kernel_share == pytest.approx(share)
        assert 'during {:.1f} % of'.format(100 * share) in profiler.describe(table)
        profiler.warn_of(table.profile)
        told = capsys.readouterr().out
        assert told.count('\n') == 1 and 'only {:.0f} %'.format(100 * share) in told
        assert 'rho may be missed' in told and '--batch_size' in told


@pytest.mark.parametrize('kernels', [None, 8.0, 10.5])  # a CPU; filled; more, by noise
def test_a_step_that_kernels_fill_and_one_on_a_cpu_need_no_warning(kernels, capsys):
    table = table_with(kernels)
    profiler.warn_of(table.profile)
    assert capsys.readouterr().out == ''
    assert ('kernels' in profiler.describe(table)) == (kernels is not None)
    share = table.profile.kernel_share
    assert share is None if kernels is None else share <= 1
