"""Timing of tensors: the table, the whole profiler, and what stays untouched."""

import csv
import importlib
import json
import os

import numpy as np
import pytest
from tensorflow import keras
from traced_networks import branching, traced

import backbone
import keras_stack
import models
import profiler
from backward_graph import OpTimes, attribute
from measured_totals import (
    Totals,
    build_table,
    measured_share,
    own_and_shared_scale,
    tensors_to_time,
    totals_of_steps,
    way_of_the_error_gradient,
)
from tensor_timings import TensorTimings, chain_timings

# --- the table


def op_times(groups, num_tensors, update=None):
    if update is None:
        update = np.full(num_tensors, 0.25)
    return OpTimes(groups, update, 0.5, {}, 1.0, [])


def table_of(times):
    n = len(times.update)
    total = sum(times.groups.values())
    deepest = int(chain_timings(times.groups, n)[2][0])
    bit = 1 << deepest
    chain = sum(ms for mask, ms in times.groups.items() if mask & bit)
    return build_table(['layer/{}'.format(k) for k in range(n)], [(k + 1, 2) for k in range(n)],
                       times, Totals(2.0, total, 1.2, 0.3, chain, deepest), {'model': 'test'})


def random_masks(n, count, seed=0):
    masks = np.random.RandomState(seed).rand(count, n) < np.linspace(0.05, 0.9, count)[:, None]
    masks[np.arange(count), np.random.RandomState(seed + 1).randint(n, size=count)] = True
    return masks


@pytest.fixture(scope='module')
def branching_table():
    return table_of(attribute(traced(branching).graph, traced(branching).times, 8))


def random_table(seed, n=9):
    rng = np.random.RandomState(seed)
    groups = {int(mask): float(ms) for mask, ms in
              zip(rng.randint(1, 1 << n, 25), rng.exponential(size=25))}
    groups.update({1 << k: float(rng.exponential()) for k in range(n)})
    return table_of(op_times(groups, n))


def test_a_tensor_is_flagged_where_an_op_of_it_was_estimated():
    table = table_of(op_times({0b01: 1.0, 0b10: 2.0, 0b11: 4.0}, 2)._replace(estimated={0b10: 2.0}))
    assert table.estimated.tolist() == [False, True]


def test_chain_timings_of_a_chain():
    # Tensor 2 nearest the output; all need the first group, 0 and 1 the second.
    t_dw, t_dy, order = chain_timings({0b001: 1, 0b010: 2, 0b100: 3, 0b111: 10, 0b011: 20}, 3)
    assert (t_dw.tolist(), t_dy.tolist(), order.tolist()) == ([1, 2, 3], [0, 20, 10], [0, 1, 2])


def test_chain_timings_of_two_branches():
    # stem 0, left 1, right 2, head 3; right has more shared time, so it counts as deeper.
    groups = {0b0001: 1, 0b0010: 2, 0b0100: 3, 0b1000: 4,
              0b1111: 5, 0b0111: 6, 0b0011: 7, 0b0101: 8}
    t_dw, t_dy, order = chain_timings(groups, 4)
    assert t_dw.tolist() == [1, 2, 3, 4]
    assert order.tolist() == [0, 2, 1, 3]
    assert t_dy.tolist() == [0, 6 + 7, 8, 5]
    table = table_of(op_times(groups, 4))
    right = [False, False, True, False]
    assert table.backward_time(right) == pytest.approx(3 + 5 + 6 + 8)
    assert table.chain_time(right) == pytest.approx(3 + 5 + (6 + 7) + 8)


@pytest.mark.parametrize('seed', [None, 0, 1, 2])
def test_the_chain_is_never_cheaper_than_the_graph_and_equal_for_all_tensors(seed, branching_table):
    table = branching_table if seed is None else random_table(seed)
    n = len(table.names)
    masks = random_masks(n, 200)
    graph = np.array([table.backward_time(mask) for mask in masks])
    chain = np.array([table.chain_time(mask) for mask in masks])
    assert (chain >= graph - 1e-9).all() and (chain > graph + 1e-9).any()
    everything = np.ones(n, dtype=bool)
    assert table.chain_time(everything) == pytest.approx(table.backward_time(everything))
    assert table.backward_time(everything) == pytest.approx(table.t_bp)


def test_backward_time_is_the_union_and_grows_with_the_mask():
    table = random_table(5)
    n = len(table.names)
    assert table.backward_time(np.zeros(n, bool)) == table.chain_time(np.zeros(n, bool)) == 0
    for mask in random_masks(n, 50):
        by_hand = sum(ms for members, ms in zip(table.group_tensors, table.group_ms)
                      if mask[members].any())
        assert table.backward_time(mask) == pytest.approx(by_hand)
        assert table.backward_time(mask | (np.arange(n) == 3)) >= table.backward_time(mask)


def test_step_time_adds_forward_backward_and_the_update_of_the_selected():
    table = table_of(op_times({0b01: 1.0, 0b10: 2.0, 0b11: 4.0}, 2, np.array([0.5, 1.0])))
    # 1.2 ms of update measured for 0.5 + 1 traced: 0.4 and 0.8; 0.3 beside it in every step.
    assert table.t_up == pytest.approx([0.4, 0.8])
    assert table.fixed == pytest.approx(2 + 0.3)
    assert table.step_time([True, False]) == pytest.approx(2.3 + 5 + 0.4)
    assert table.step_time([True, True]) == pytest.approx(2 + 7 + 1.5)
    assert table.t_step == pytest.approx(2 + 7 + 1.5)


def test_own_and_shared_ops_are_scaled_to_the_two_measured_totals():
    groups = {0b01: 2.0, 0b10: 1.0, 0b11: 4.0}
    # All: 0.5 * 3 + 2 * 4 = 9.5; the deepest, tensor 0: 0.5 * 2 + 2 * 4 = 9.
    totals = Totals(1.0, 9.5, 1.0, 0.0, 9.0, 0)
    assert own_and_shared_scale(groups, totals) == pytest.approx((0.5, 2.0))
    table = build_table(['a', 'b'], [(1,), (2,)], op_times(groups, 2), totals, {})
    assert table.backward_time([True, True]) == pytest.approx(9.5)
    assert table.backward_time([True, False]) == pytest.approx(9.0)


def test_totals_add_up_to_the_full_step_and_hold_what_no_pass_does():
    times = op_times({0b01: 2.0, 0b10: 1.0, 0b11: 5.0}, 2, np.array([0.5, 1.5]))
    t_fp, t_bp, t_update, t_always, t_chain = 3.0, 16.0, 1.0, 0.5, 15.0
    # Tensor 1, nearest the output, needs 6 of 8 traced ms and three quarters of the update.
    beyond = [t_bp + t_always + t_update, t_chain + t_always + 0.25, 12 + t_always + 0.75]
    totals = totals_of_steps(times, [0, 1], t_fp, t_update, 20.0, beyond, 0.01)
    assert totals == Totals(t_fp, pytest.approx(t_bp), t_update, pytest.approx(t_always),
                            pytest.approx(t_chain), 0, 20.0, 0.01, chains=[])
    table = build_table(['a', 'b'], [(1,), (2,)], times, totals, {})
    assert table.step_time([True, True]) == table.t_step == pytest.approx(t_fp + beyond[0])
    assert table.step_time([True, False]) == pytest.approx(t_fp + beyond[1])


@pytest.mark.parametrize('beyond', [[20.0, 30.0, 40.0], [0.1, 0.1, 0.1], [-1.0, -1.0, -1.0]])
def test_totals_of_a_disturbed_measurement_are_positive_and_add_up(beyond):
    times = op_times({0b01: 2.0, 0b10: 1.0, 0b11: 5.0}, 2)
    totals = totals_of_steps(times, [0, 1], 3.0, 1.0, 20.0, beyond, 0.5)
    assert min(totals.t_bp, totals.t_update, totals.t_chain) > 0 <= totals.t_always
    assert totals.t_bp + totals.t_update + totals.t_always == pytest.approx(max(beyond[0], 1e-3))
    assert totals.t_chain <= totals.t_bp


@pytest.mark.parametrize('groups, t_bp, t_chain', [
    ({0b01: 2.0, 0b10: 1.0}, 6.0, 3.0),  # no shared op
    ({0b01: 2.0, 0b11: 4.0}, 6.0, 6.0),  # the deepest needs everything: nothing to tell apart
    # Its own gradient is nearly all: 1 % of noise would make the shared ops 17 times as dear.
    ({0b01: 18.0, 0b10: 0.2, 0b11: 1.0}, 19.2, 19.19)])
def test_one_scale_serves_both_where_the_two_totals_do_not_tell_them_apart(groups, t_bp, t_chain):
    own, shared = own_and_shared_scale(groups, Totals(1.0, t_bp, 1.0, 0.0, t_chain, 0))
    assert own == shared == pytest.approx(t_bp / sum(groups.values()))


@pytest.mark.parametrize('t_chain', [50.0, 7.0, 1e-3])  # noise; own gradients cost nothing; noise
def test_scales_stay_positive_and_add_up_to_the_backward_pass(t_chain):
    groups = {0b01: 2.0, 0b10: 1.0, 0b11: 4.0}
    own, shared = own_and_shared_scale(groups, Totals(1.0, 7.0, 1.0, 0.0, t_chain, 0))
    assert own > 0 and shared > 0
    assert 3 * own + 4 * shared == pytest.approx(7.0)
    assert own < 0.2 or t_chain < 7  # what is left for them beside the error gradient's way


def test_steps_that_follow_the_error_gradient_in_part_come_out_as_measured():
    # A chain: tensor 3 nearest the output; half of the way is behind it and 2, by the trace.
    groups = {0b0001: 1.0, 0b0010: 1.0, 0b0100: 1.0, 0b1000: 1.0,
              0b1111: 2.0, 0b0111: 4.0, 0b0011: 6.0}
    times = op_times(groups, 4)
    assert tensors_to_time(groups, 4) == [0, 3, 2]
    beyond = [18.0, 14.5, 4.0, 10.0]  # of all, 0, 3 and 2; each own gradient takes a ms
    totals = totals_of_steps(times, [0, 3, 2], 3.0, 1.0, 20.0, beyond, 0.01)
    table = build_table(list('abcd'), [(1,)] * 4, times, totals, {})
    for tensors, ms in zip(([0, 1, 2, 3], [0], [2]), (18.0, 14.5, 10.0)):
        assert table.step_time(np.isin(np.arange(4), tensors)) - 3.0 == pytest.approx(ms)
    without = build_table(list('abcd'), [(1,)] * 4, times, totals._replace(chains=()), {})
    assert without.backward_time([0, 0, 1, 0]) < 0.8 * table.backward_time([0, 0, 1, 0])
    assert table.traced_ms.sum() == 16


@pytest.mark.parametrize('ms', [-5.0, 0.0, 100.0])  # of a disturbed measurement
def test_the_way_of_the_error_gradient_keeps_its_sum_and_no_part_of_it_is_free(ms):
    groups = {0b001: 1.0, 0b010: 1.0, 0b111: 4.0, 0b011: 6.0}
    totals = Totals(1.0, 12.0, 1.0, 0.0, 11.0, 0, chains=[(2, ms), (3, ms)])  # 3 took no time
    way = way_of_the_error_gradient(groups, totals, 1.0, 2.0, 4)
    without = way_of_the_error_gradient(groups, totals._replace(chains=[(2, ms)]), 1.0, 2.0, 4)
    assert way == without
    assert sorted(way) == [0b011, 0b111] and min(way.values()) > 0.1
    assert sum(way.values()) == pytest.approx(20.0)


def test_the_forward_pass_behind_a_cut_is_what_was_measured_there_and_in_between_by_the_trace():
    suffixes = [(0.5, 0.6), (0.1, 0.2)]
    assert measured_share(np.array([0.1, 0.3, 0.5, 0.75, 1.0]), suffixes) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0])
    assert measured_share(np.array([0.0]), suffixes) == [0.2]  # to call it takes time, too
    noisy = [(0.1, 0.3), (0.5, 0.2), (0.6, 1.7)]  # less for more, more than all
    left = measured_share(np.linspace(0, 1, 11), noisy)
    assert (np.diff(left) >= 0).all() and left[0] == 0.3 and left.max() == 1
    times = op_times({0b01: 2.0, 0b10: 1.0}, 2)._replace(forward={'near': 3.0, 'far': 1.0})
    totals = Totals(10.0, 3.0, 1.0, 0.0, 3.0, 0, suffixes=[(0.25, 0.4)])
    table = build_table(['a', 'b'], [(1,), (2,)], times, totals, {},
                        (np.array([0.0, 3.0]), np.array([50.0, 9.0])))
    assert table.t_prefix == pytest.approx([0.0, 6.0])  # of 10 ms, 0.4 are left behind the cut


@pytest.mark.parametrize('seed', [None, 0])
def test_a_saved_table_prices_every_mask_identically(seed, branching_table, tmp_path):
    table = branching_table if seed is None else random_table(seed)
    path = str(tmp_path / 'timings.json')
    table.save(path)
    again = TensorTimings.load(path)
    for mask in random_masks(len(table.names), 100):
        assert again.backward_time(mask) == table.backward_time(mask)
        assert again.chain_time(mask) == table.chain_time(mask)
        assert again.step_time(mask) == table.step_time(mask)
    assert (again.names, again.shapes, again.key) == (table.names, table.shapes, table.key)
    for field in ('t_dw', 't_dy', 't_up', 'order', 'estimated'):
        assert getattr(again, field).dtype == getattr(table, field).dtype
    assert sorted(os.listdir(str(tmp_path))) == ['timings.csv', 'timings.json']


def test_the_csv_beside_the_table_has_one_row_per_tensor(branching_table, tmp_path):
    branching_table.save(str(tmp_path / 'timings.json'))
    with open(str(tmp_path / 'timings.csv'), newline='') as source:
        rows = list(csv.DictReader(source))
    assert [row['name'] for row in rows] == branching_table.names
    assert rows[1]['shape'] == '2x2' and {row['time'] for row in rows} == {'measured'}
    for column, expected in (('t_dw_ms', branching_table.t_dw), ('t_dy_ms', branching_table.t_dy),
                             ('t_up_ms', branching_table.t_up)):
        np.testing.assert_allclose([float(row[column]) for row in rows], expected, atol=1e-5)
    assert sum(float(row['share']) for row in rows) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize('content', ['{"a": 1}', '[1, 2]', 'null', '7', '"text"', '{', ''])
def test_a_foreign_file_is_no_timing_table(content, tmp_path):
    path = str(tmp_path / 'timings.json')
    with open(path, 'w') as out:
        out.write(content)
    with pytest.raises(ValueError):
        TensorTimings.load(path)


def test_a_table_with_a_field_missing_is_refused(branching_table, tmp_path):
    path = str(tmp_path / 'timings.json')
    branching_table.save(path)
    with open(path) as source:
        content = json.load(source)
    del content['t_up']
    with open(path, 'w') as out:
        json.dump(content, out)
    with pytest.raises(ValueError, match='is not a timing table of this version'):
        TensorTimings.load(path)


# --- the whole profiler


def values(variables):
    return [keras_stack.raw(v).numpy().copy() for v in variables]


def small_classifier():
    """With batch normalisation and dropout: statistics and random state to be kept."""
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(8, 3, strides=2, use_bias=False, name='stem')(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(name='bn')(x))
    x = keras.layers.DepthwiseConv2D(3, use_bias=False, name='depthwise')(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(name='depthwise_bn')(x))
    return backbone.classifier(keras.Model(inputs, x), None, (32, 32, 3), 3, 'frozen')


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_profiling_leaves_the_model_bit_identical_and_a_trace_in_the_folder(optimizer, tmp_path):
    model = small_classifier()
    state = list(model.variables)  # in Keras 3 those of the random generators too
    norms = [layer for layer in keras_stack.flat_layers(model)
             if isinstance(layer, keras.layers.BatchNormalization)]
    before, momenta = values(state), [layer.momentum for layer in norms]
    table = profiler.profile_model(model, (32, 32, 3), 3, 4, optimizer, folder=str(tmp_path),
                                   key={'batch': 4}, num_steps=3, seconds=0)
    assert len(state) > len(model.trainable_variables) + 3
    for was, now in zip(before, values(state)):
        np.testing.assert_array_equal(was, now)
    assert momenta == [layer.momentum for layer in norms]
    assert not model.get_layer('backbone').train_statistics
    files = [name for _, _, names in os.walk(str(tmp_path)) for name in names]
    assert [name for name in files if name.endswith('.xplane.pb')]

    assert table.names == ['stem/kernel', 'bn/gamma', 'bn/beta', 'depthwise/kernel',
                           'depthwise_bn/gamma', 'depthwise_bn/beta', 'head/kernel', 'head/bias']
    assert table.shapes == [tuple(v.shape) for v in model.trainable_variables]
    assert table.key == {'batch': 4} and table.coverage >= profiler.MIN_COVERAGE
    assert table.t_fp > 0 and table.t_bp > 0 and table.t_update > 0 and table.t_dw[0] > 0
    everything = np.ones(8, dtype=bool)
    assert table.backward_time(everything) == pytest.approx(table.t_bp)
    assert table.backward_time(np.arange(8) >= 6) < table.backward_time(np.arange(8) == 0)


def nasnet_of_one_block_per_stage():
    """NASNetMobile's cells, a quarter of its depth: the whole one takes over a minute to trace."""
    build = importlib.import_module(keras.applications.NASNetMobile.__module__).NASNet
    base = build(input_shape=(32, 32, 3), penultimate_filters=96, num_blocks=1,
                 stem_block_filters=32, skip_reduction=False, include_top=False, weights=None)
    return backbone.classifier(base, 'nasnet', (32, 32, 3), 3, 'frozen')


def whole(name):
    return lambda: models.build_model(name, (32, 32, 3), 3, 'none', bn_statistics='frozen')


@pytest.mark.parametrize('build', [
    whole('EfficientNetB0'), whole('DenseNet121'), nasnet_of_one_block_per_stage,
    pytest.param(whole('NASNetMobile'), marks=pytest.mark.skipif(
        'SLOW_TESTS' not in os.environ, reason='takes over a minute; set SLOW_TESTS to run it'))],
    ids=['EfficientNetB0', 'DenseNet121', 'NASNet cells', 'NASNetMobile'])
def test_other_families_are_profiled_without_any_table_of_their_layers(build):
    model = build()
    before = values(model.variables)
    table = profiler.profile_model(model, (32, 32, 3), 3, 2, num_steps=2, seconds=0)
    n = len(model.trainable_variables)
    assert table.coverage >= profiler.MIN_COVERAGE and len(table.names) == n
    kernels = np.array([name.endswith('kernel') for name in table.names])
    assert (table.t_dw[kernels] > 0).all()
    for mask in random_masks(n, 30):
        assert 0 < table.backward_time(mask) <= table.chain_time(mask) + 1e-9
    for was, now in zip(before, values(model.variables)):
        np.testing.assert_array_equal(was, now)


def test_the_nearer_the_output_a_cut_is_the_less_of_the_forward_pass_is_left_behind_it():
    """Six convolutions, five of them alike: four fifths of the work lie in front of the last."""
    keras_stack.set_seed(0)
    inputs = keras.Input((48, 48, 3))
    x = inputs
    for _ in range(6):
        x = keras.layers.Conv2D(32, 3, padding='same', activation='relu')(x)
    outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x))
    table = profiler.profile_model(keras.Model(inputs, outputs), (48, 48, 3), 3, 8, seconds=1)
    saved = table.t_prefix[::2] / table.t_fp  # kernels, from the input
    assert saved[0] < 0.2 and saved[-1] > 0.6 and (np.diff(saved) >= 0).all()


def test_a_disturbed_profile_says_so(branching_table, capsys):
    profiler.warn_of(branching_table._replace(spread=0.02, coverage=1.0))
    assert capsys.readouterr().out == ''
    profiler.warn_of(branching_table._replace(spread=0.3, coverage=1.0))
    assert 'took 30 % more or less' in capsys.readouterr().out


# --- what a table is valid for


def small_network(units=4, strides=1, dtype='float32', activation='relu'):
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(units, 3, strides=strides, padding='same', dtype=dtype,
                            activation=activation)(inputs)
    x = keras.layers.GlobalAveragePooling2D(dtype=dtype)(x)
    return keras.Model(inputs, keras.layers.Dense(3, dtype='float32')(x))


def key_of(model_name, model):
    args = profiler.parse_arguments(['--model_name', str(model_name), '--input_size', '8'])
    return profiler.table_key(args, model, 3, 'none')


def test_the_key_knows_a_saved_model_by_its_content_and_not_its_path(tmp_path):
    model, keys = small_network(), []
    model.get_layer(index=1).set_weights([np.ones_like(w) for w in model.layers[1].get_weights()])
    for folder in ('here', 'there'):
        path = tmp_path / folder / keras_stack.MODEL_FILE
        path.parent.mkdir()
        model.save(str(path))
        loaded = keras.models.load_model(str(path), compile=False)
        keys.append(key_of(path, loaded))
        model = small_network()  # of other values, and with other numbers in Keras' names
    assert keys[0] == keys[1] == key_of(path, model)
    assert str(tmp_path) not in json.dumps(keys)
    assert json.loads(json.dumps(keys[0])) == keys[0]


@pytest.mark.parametrize('other, differing', [
    (dict(units=5), {'network'}), (dict(strides=2), {'network'}),
    (dict(activation='tanh'), {'network'}), (dict(dtype='mixed_float16'), {'network', 'dtype'})])
def test_the_key_tells_networks_and_dtype_policies_apart(other, differing):
    one, two = key_of('model.h5', small_network()), key_of('model.h5', small_network(**other))
    assert {name for name in one if one[name] != two[name]} == differing


@pytest.mark.parametrize('variable', profiler.ENVIRONMENT)
def test_the_key_holds_what_the_environment_tells_tensorflow(variable, monkeypatch):
    model = small_network()
    monkeypatch.delenv(variable, raising=False)
    without = key_of('resnet50', model)
    monkeypatch.setenv(variable, '1')
    assert key_of('resnet50', model)['environment'] == dict(without['environment'],
                                                            **{variable: '1'})
    assert variable not in without['environment'] and without['model'] == 'resnet50'


@pytest.mark.parametrize('files, cores', [
    ({'cpu.max': '150000 100000\n'}, 1.5), ({'cpu.max': 'max 100000\n'}, None), ({}, None),
    ({'cpu/cpu.cfs_quota_us': '50000\n', 'cpu/cpu.cfs_period_us': '100000\n'}, 0.5),
    ({'cpu/cpu.cfs_quota_us': '-1\n', 'cpu/cpu.cfs_period_us': '100000\n'}, None)])
def test_the_share_of_cores_that_a_container_gives_is_read(files, cores, tmp_path):
    (tmp_path / 'cpu').mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert profiler.cpu_quota(str(tmp_path)) == cores
