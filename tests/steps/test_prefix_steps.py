"""Tests that steps with a cached prefix give the same bits as steps that compute it.

All networks run in one separate process in which TensorFlow is deterministic: by its option, or on
a single thread where TensorFlow (2.7) has no such option.
"""

import hashlib
import json
import os
import sys

import numpy as np
import pytest
import tensorflow as tf
from _zoo import ZOO
from tensorflow import keras

from cached_runs import images_apart
from elastic.compat import keras_stack
from elastic.networks.backbone import statistics_from_batch
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from elastic.steps.prefix_cut import ROUNDING
from elastic.steps.prefix_steps import PrefixSteps
from elastic.steps.training_step import NUM_RESULTS
from models import build_model
from small_runs import script
from small_steps import Centred, random_masks, residual, small_model, still

FROM_ZOO = [name for name in (
    'two_inputs_list', 'two_inputs_dict', 'lstm', 'attention', 'embedding', 'shared', 'regularised',
    'mixed_float16', 'nested', 'sequential', 'subclassed', 'frozen_layer', 'random_layers',
    'normalisations', 'grouped') if name in ZOO]
NETWORKS = ['residual'] + FROM_ZOO
QUICK = ['residual', 'shared', 'two_inputs_dict']
LARGE = 'mobilenetv2'  # takes seconds, so two masks must do, each with different costs
# ms per operation and per byte: recomputes nothing, or all that makes the cut smaller.
COSTS = ((1.0, 1e-9), (1e-9, 1.0))
SEVERAL = ('shared', 'regularised', 'two_inputs_list', 'two_inputs_dict')  # store several tensors


def images_and_labels(side, count=6):
    rng = np.random.RandomState(1)
    return (tf.constant(rng.uniform(0, 255, (count, side, side, 3)), tf.float32),
            tf.constant(np.arange(count) % 3, tf.int32))


def network(name):
    """Returns (model, inputs, labels), with random layers off."""
    keras_stack.set_seed(0)
    if name in ZOO:
        model, inputs, labels = ZOO[name].build()
    elif name == LARGE:  # the zoo has it, but with batch statistics
        model = build_model(name, (32, 32, 3), 3, 'none', alpha=0.35, bn_statistics='frozen')
        inputs, labels = images_and_labels(32, 4)
        statistics_from_batch(model, inputs)  # otherwise a deep network's signal vanishes
    else:
        model = residual()
        inputs, labels = images_and_labels(12)
    still(model)
    return model, inputs, labels


def cut_off(prefixes, mask, costs):
    operation, byte = costs
    return prefixes.cut_off(mask,
                         {'* flops': operation, '* elements': operation},
                         lambda nbytes: byte * nbytes)


def bits(arrays):
    """Returns a digest of each array, as copies of large networks would fill the memory."""
    return [hashlib.sha1(array.numpy().tobytes()).hexdigest() for array in arrays]


def two_steps(back_to_start, variables, step, *batch):
    """Takes two steps from the start; returns the bits of both results and of all variables.

    Also returns the bits of the tensors that the first step stores.
    """
    back_to_start()
    results = [bits(step(*batch)) for _ in range(2)]
    ends = [of_step[:NUM_RESULTS] for of_step in results], bits(map(keras_stack.raw, variables))
    return ends, results[0][NUM_RESULTS:]


def masks_and_costs(name, n):
    """Returns pairs of an (n,) bool mask and a list of costs; small networks get extreme masks."""
    if name == LARGE:
        return zip(random_masks(2, n), [[costs] for costs in COSTS])
    masks = [np.arange(n) == n - 1, np.ones(n, bool)] + list(random_masks(2, n))
    return [(mask, COSTS) for mask in masks]


def compared(name, optimizer='sgd'):
    """Compares two cached steps with two uncached ones, for several masks."""
    model, inputs, labels = network(name)
    trained_by = make_optimizer(optimizer, 1e-2, 100, model.trainable_variables)
    maker = StepMaker(model, trained_by, 1e-3, inputs, labels)
    prefixes = PrefixSteps(maker)
    variables = list(model.variables) + keras_stack.optimizer_variables(trained_by)
    start = [keras_stack.raw(variable).numpy() for variable in variables]

    def back_to_start():
        keras_stack.assign_arrays(variables, start)
    found = []
    for mask, several in masks_and_costs(name, len(model.trainable_variables)):
        plain, cuts = maker.step(mask), []
        expected, _ = two_steps(back_to_start, variables, plain, inputs, labels)
        for costs in several:
            cuts.append(cut_off(prefixes, mask, costs))
            if cuts[0].tensors == cuts[-1].tensors and len(cuts) > 1:
                found.append(found[-1])
                continue
            steps = prefixes.cached(mask, cuts[-1])
            back_to_start()  # the weights from which the prefix is computed
            stored = list(steps.prefix(inputs, labels))
            filled, of_fill = two_steps(back_to_start, variables, steps.fill, inputs, labels)
            read, _ = two_steps(back_to_start, variables, steps.read, stored, labels)
            again = filled == read == expected or expected == two_steps(
                back_to_start, variables, plain, inputs, labels)[0]
            found.append(dict(
                again=again, fill=filled == expected, read=read == expected,
                stored=bits(stored) == of_fill,
                specs=[tf.TensorSpec(a.shape, a.dtype) for a in stored] == steps.specs,
                tensors=len(cuts[-1].tensors), recomputed=len(cuts[-1].recomputed),
                fewer=len(plain.nodes) - len(steps.read.nodes)))
    back_to_start()
    return dict(steps=found, apart=prefixes.rows_apart(inputs, labels))


def report(names):
    """Prints compared() of these networks as JSON."""
    if hasattr(tf.config.experimental, 'enable_op_determinism'):
        tf.config.experimental.enable_op_determinism()
    else:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    found = {name: compared(name) for name in names}
    found['adam'] = compared('residual', 'adam')
    print(json.dumps(found))


@pytest.fixture(scope='module')
def outcomes(request):
    names = NETWORKS + [LARGE] if request.config.getoption('--all') else QUICK
    code = 'import sys, test_prefix_steps; test_prefix_steps.report(sys.argv[1:])'
    status, out, errors = script('-c', code, *names, TF_CPP_MIN_LOG_LEVEL='3',
                                 PYTHONPATH=os.pathsep.join(sys.path))
    assert status == 0, errors
    return json.loads(out.splitlines()[-1])


ALL = QUICK + [pytest.param(name, marks=pytest.mark.thorough)
               for name in NETWORKS + [LARGE] if name not in QUICK]


@pytest.mark.parametrize('name', ALL + ['adam'])
def test_fill_and_read_steps_give_the_bits_of_the_uncached_step(outcomes, name):
    for found in outcomes[name]['steps']:
        assert found['again'], 'the uncut step itself is not deterministic'
        assert found['fill'] and found['read'] and found['stored'] and found['specs'], found
        assert found['tensors'] and found['fewer'] >= 0


@pytest.mark.parametrize('name', ALL)
def test_activations_do_not_depend_on_other_images(outcomes, name):
    """Rounding may depend on the place in the batch: in small products, and on some processors."""
    of_name = 1e-6 if name == 'attention' else 0
    assert outcomes[name]['apart'] <= (ROUNDING if images_apart() > 0 else of_name)


@pytest.mark.thorough
def test_costs_move_the_cut(outcomes):
    steps = [found for name in NETWORKS for found in outcomes[name]['steps']]
    at_dear, at_cheap = [sum(found['recomputed'] for found in steps[i::2]) for i in (0, 1)]
    assert at_cheap > 3 * at_dear
    whole = {name for name in NETWORKS if not any(
        found['fewer'] > 0 for found in outcomes[name]['steps'])}
    assert whole <= {'random_layers'}  # on Keras 2 nothing lies in front of its first random op


@pytest.mark.parametrize('name', [name for name in SEVERAL if name in QUICK])
def test_several_tensors_are_stored_where_several_are_read(outcomes, name):
    assert max(found['tensors'] for found in outcomes[name]['steps']) > 1


# ---------------------------------------------------------------- in this process

def test_activations_that_depend_on_other_images_are_detected():
    """Batch statistics do not depend on the order of images, so reordering would find nothing."""
    inputs = keras.Input((12, 12, 3))
    x = keras.layers.GlobalAveragePooling2D()(Centred()(keras.layers.Conv2D(4, 3)(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    images, labels = images_and_labels(12)
    prefixes = PrefixSteps(StepMaker(model, None, 0.0, images, labels))
    assert prefixes.rows_apart(images, labels) > ROUNDING


@pytest.mark.parametrize('name', ['batch_norm', 'backbone'])
def test_a_prefix_with_batch_statistics_is_detected_or_ends_before(name):
    """The prefix ends before a batch normalisation op that reads moving statistics (2.7)."""
    model, images, labels = (small_model('train'),) + images_and_labels(8) if (
        name == 'backbone') else ZOO[name].build()
    maker = StepMaker(model, None, 0.0, images, labels)
    prefixes, n = PrefixSteps(maker), len(maker.variables)
    if prefixes.rows_apart(images, labels) <= ROUNDING:
        cut = cut_off(prefixes, np.arange(n) == n - 1, COSTS[0])
        assert not any('BatchNorm' in maker.graph.nodes[node].op for node in cut.skipped)


def test_an_input_without_batch_axis_is_not_cached():
    model, inputs, labels = ZOO['graph_network'].build()
    prefixes = PrefixSteps(StepMaker(model, None, 0.0, inputs, labels))
    assert prefixes.rows_apart(inputs, labels) == np.inf


def test_a_cached_step_refuses_batches_of_other_shapes():
    model, inputs, labels = network('residual')
    maker = StepMaker(model, make_optimizer('sgd', 0.1, 10, model.trainable_variables), 0.0,
                      inputs, labels)
    mask = np.arange(len(maker.variables)) >= 3
    prefixes = PrefixSteps(maker)
    steps = prefixes.cached(mask, cut_off(prefixes, mask, COSTS[0]))
    stored = steps.prefix(inputs, labels)
    with pytest.raises(ValueError, match='of shapes'):
        steps.read([tensor[:3] for tensor in stored], labels[:3])
