"""Tests weights of classes: from the images or a file, in the loss, and what follows from it."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import datasets
import main
import profiler
import train
from cached_runs import network
from elastic.compat import keras_stack
from elastic.data.class_weights import class_weights
from elastic.errors import UserError
from elastic.files import read_json
from elastic.schemes.prunetrain import GroupLasso
from elastic.selection.importance import Evaluator, evaluate_importance
from elastic.settings import Settings
from elastic.timing.stored import table_key
from fixed_tables import store_table
from image_folders import encoded, write
from photo_runs import first_flags

SIZE, BATCH, RATE = 8, 6, 1e-3
IMAGES = dict(common=24, rare=2, usual=10)  # training images
BALANCED = {name: 36 / (3 * count) for name, count in IMAGES.items()}


@pytest.fixture(scope='module')
def unequal(tmp_path_factory):
    """Returns the name of a folder of very unequal classes."""
    path = tmp_path_factory.mktemp('unequal')
    for c, (name, count) in enumerate(sorted(IMAGES.items())):
        for i in range(count + 2):
            part = 'train' if i < count else 'test'
            write(path / part / name / '{}.png'.format(i), encoded(100 * c + i, 'png'))
    return 'folder:{}'.format(path)


def written(path, text):
    path.write_text(text, encoding='utf-8')
    return str(path)


# ---------------------------------------------------------------- from images or a file

def test_balanced_weights_give_each_class_the_same_influence(unequal):
    names, images, weights = zip(*datasets.find_images(
        unequal, SIZE, BATCH, class_weight='balanced').class_weights)
    assert (names, images) == (('common', 'rare', 'usual'), (24, 2, 10))
    np.testing.assert_allclose(weights, [BALANCED[name] for name in sorted(IMAGES)])
    np.testing.assert_allclose(np.multiply(images, weights), 36 / 3)
    fewer = datasets.find_images(unequal, SIZE, BATCH, class_weight='balanced',
                                 validation_share=0.5).class_weights
    assert [row[1] for row in fewer] == [12, 1, 5]  # of the images that are trained
    assert not datasets.find_images(unequal, SIZE, BATCH).class_weights
    # A continued run may have no image of an old class: the others keep their mean of 1.
    assert class_weights('balanced', 'abcd', [8, 24, 0, 0])[:2] == [['a', 8, 2], ['b', 24, 2 / 3]]


@pytest.mark.parametrize('text', [
    'rare,7\nusual, 1.5\ncommon,1\n', '\ufeffname,weight\r\nCOMMON ,1\r\n\r\n"rare",7\r\nusual,1.5'
    ], ids=['plain', 'header'])
def test_weights_are_read_from_a_file(tmp_path, text):
    found = class_weights(written(tmp_path / 'w.csv', text), ('common', 'rare', 'usual'), [2, 0, 0])
    assert found == [['common', 2, 1], ['rare', 0, 7], ['usual', 0, 1.5]]


def test_names_in_the_file_are_those_that_people_see(tmp_path):
    path = written(tmp_path / 'w.csv', 'cafe\u0301,2\n"acer\u2028palmatum",4\n')
    found = class_weights(path, ('acer palmatum', 'caf\xe9'), [1, 1])
    assert [row[2] for row in found] == [4, 2]


@pytest.mark.parametrize('text, words', [
    ('common,1\nCOMMON,2\nrare,7\nusual,1', 'two of the names mean the same class'),
    ('common,1\nrar,7\nusual,1', "'rar' is no class (did you mean 'rare'?); the classes are "
     'common, rare, usual'),
    ('usual,1', 'no weight for common, rare; every class needs one'),
    ('common,0\n', "line 1 is 'common,0'; needed is name,weight with a weight above 0"),
    ('name,weight\ncommon,nan', "line 2 is 'common,nan'"), ('common;1', "line 1 is 'common;1'"),
    ('common,1\ncommon,2', "'common' has two weights")])
def test_a_file_that_does_not_fit_is_refused_in_one_line(unequal, tmp_path, text, words):
    path = written(tmp_path / 'w.csv', text)
    with pytest.raises(UserError) as refused:
        datasets.find_images(unequal, SIZE, BATCH, class_weight=path)
    assert words in str(refused.value) and path in str(refused.value)
    assert '\n' not in str(refused.value)


# ---------------------------------------------------------------- in the loss

def linear(dataset):
    """Returns a linear classifier of flat images, its StepMaker, and a batch of all classes."""
    keras_stack.set_seed(1)
    inputs = keras.Input((SIZE, SIZE, 3))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(inputs)))
    maker = train.step_maker(model, dataset, Settings(weight_decay=0.0, learning_rate=RATE))
    images = np.random.RandomState(0).rand(BATCH, SIZE, SIZE, 3).astype(np.float32)
    return model, maker, (tf.constant(images), tf.constant([0, 0, 0, 2, 2, 1], tf.int32))


def by_hand(weights, kernel, bias, images, labels):
    """Returns (weighted loss, its gradients), in float64."""
    x, labels = images.numpy().reshape(BATCH, -1).astype(np.float64), labels.numpy()
    p = np.exp(x @ kernel + bias)
    p /= p.sum(axis=1, keepdims=True)
    w = np.array([weights[name] for name in sorted(IMAGES)])[labels]
    loss = float(np.mean(-w * np.log(p[np.arange(BATCH), labels])))
    d = w[:, None] * (p - np.eye(3)[labels]) / BATCH  # (B, classes)
    return loss, [x.T @ d, d.sum(axis=0)]


def values(model):
    return [keras_stack.raw(v).numpy().astype(np.float64) for v in model.trainable_variables]


def test_weights_change_loss_and_gradients_as_computed_by_hand(unequal):
    dataset = datasets.load_dataset(unequal, SIZE, BATCH, class_weight='balanced')
    model, maker, batch = linear(dataset)
    loss, *results = maker.gradients()(*batch)
    expected, gradients = by_hand(BALANCED, *values(model), *batch)
    plain, others = by_hand(dict.fromkeys(IMAGES, 1.0), *values(model), *batch)
    assert float(loss) == pytest.approx(expected, rel=1e-5) and abs(expected - plain) > 0.1 * plain
    for found, wanted, other in zip(results[2:], gradients, others):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-6)
        assert np.abs(wanted - other).max() > 0.1 * np.abs(wanted).max()
    before = values(model)
    assert float(maker.step([True, True])(*batch).loss) == pytest.approx(expected, rel=1e-5)
    for now, old, gradient in zip(values(model), before, gradients):
        np.testing.assert_allclose(now, old - RATE * gradient, rtol=1e-5, atol=1e-6)


def test_importance_is_the_predicted_drop_of_the_weighted_loss(unequal):
    dataset = datasets.load_dataset(unequal, SIZE, BATCH, class_weight='balanced')
    model, maker, batch = linear(dataset)
    trials = []
    importance = evaluate_importance(model, maker.optimizer, [batch], 'gradient_update',
                                     Evaluator(maker), trials)
    before = values(model)
    loss, gradients = by_hand(BALANCED, *before, *batch)
    updates = [-RATE * gradient for gradient in gradients]
    moved = [value + update for value, update in zip(before, updates)]
    after, there = by_hand(BALANCED, *moved, *batch)
    drops = [-(gradient * update).sum() for gradient, update in zip(there, updates)]
    np.testing.assert_allclose(importance, drops, rtol=1e-3)
    assert trials[0].predicted_drop == pytest.approx(sum(drops), rel=1e-3)
    assert trials[0].real_drop == pytest.approx(loss - after, rel=1e-2)
    plain = dict.fromkeys(IMAGES, 1.0)
    unweighted = by_hand(plain, *before, *batch)[0] - by_hand(plain, *moved, *batch)[0]
    assert unweighted != pytest.approx(sum(drops), rel=0.1)


def test_the_penalty_of_prune_training_is_a_share_of_the_weighted_loss(unequal):
    dataset = datasets.load_dataset(unequal, 32, BATCH, class_weight='balanced')
    model, batch = network(), next(iter(dataset.test))
    plain, weighted = [GroupLasso(model, [batch], 0.2, weights).coefficient
                       for weights in (None, np.arange(1.0, 11.0))]
    losses = -tf.nn.log_softmax(model(batch[0])).numpy()[np.arange(6), batch[1].numpy()]
    factor = np.mean(losses * (1 + batch[1].numpy())) / np.mean(losses)
    assert weighted / plain == pytest.approx(factor, rel=1e-4) and factor > 1.1


# ---------------------------------------------------------------- on the command line

@pytest.mark.thorough
def test_a_run_says_its_weights_and_knows_a_changed_file(unequal, tmp_path, capsys):
    flags = first_flags(tmp_path, unequal, '--train_type', 'elastic_training', '--num_epochs', '1',
                        '--rho', '0.9', '--learning_rate', '1e-4')
    balanced = flags + ['--class_weight', 'balanced', '--run_name', 'balanced']
    table = read_json(store_table(balanced))
    assert main.main(balanced) == 0
    out = capsys.readouterr().out
    assert ('class   training images  weight\n------  ---------------  ------\n'
            'common               24     0.5\nrare                  2       6\n'
            'usual                10     1.2\n') in out
    summary = read_json(str(tmp_path / 'balanced' / 'summary.json'))
    assert summary['class_weights'] == [['common', 24, 0.5], ['rare', 2, 6.0], ['usual', 10, 1.2]]
    assert 'timing table: ' in out and table['key']['weighted'] is True
    path = written(tmp_path / 'w.csv', 'common,1\nrare,2\nusual,3\n')
    flags += ['--class_weight', path, '--run_name', 'from_file']
    assert main.main(flags) == 0 and main.main(flags) == 0
    out = capsys.readouterr().out
    assert 'timing table: ' in out and 'already finished with the same settings' in out
    written(tmp_path / 'w.csv', 'common,1\nrare,2\nusual,4\n')
    with pytest.raises(UserError, match='other settings .class_weights .*3.0.*4.0'):
        main.main(flags)


def test_a_timing_table_knows_that_the_loss_is_weighted(tmp_path):
    step = profiler.StepSettings('resnet50', 1.0, 32, 8, 10, 'none', 'frozen', 'sgd', 0.0, None)
    model = network()
    plain = table_key(step, model)
    weighted = table_key(step._replace(class_weight='balanced'), model)
    assert weighted == dict(plain, weighted=True) and 'weighted' not in plain
    assert table_key(step._replace(class_weight='w.csv'), model) == weighted
    maker = profiler.step_maker(model, step._replace(class_weight='balanced'),
                                tf.zeros((8, 32, 32, 3)), tf.zeros(8, tf.int32))
    assert any(node.op == 'GatherV2' for node in maker.cutter.nodes.values())
