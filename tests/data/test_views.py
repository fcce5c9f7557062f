"""Tests the order, augmentation and subsets of training images, and their flags."""

import os

import numpy as np
import pytest

import datasets
import image_folders
import main
from elastic.data.augmentation import augment, augmentation_draws
from elastic.errors import UserError
from image_folders import arrays, encoded, same, write, write_photos
from small_runs import run_settings_of


@pytest.fixture
def photos(tmp_path):
    write_photos(tmp_path)
    return tmp_path


def load_photos(path, augmentation='flip+rotate', **options):
    """Returns the data set; by default each view of an image has an angle of its own."""
    return image_folders.load_photos(path, augmentation=augmentation, **options)


# --- order

def test_the_seed_decides_the_batches(photos):
    one, two, other = [load_photos(photos, seed=seed) for seed in (1, 1, 2)]
    for _ in range(2):
        epoch = arrays(one.train)
        assert same(epoch, arrays(two.train))
        assert not same(epoch, arrays(other.train))


def test_each_epoch_has_a_new_order_and_a_new_augmentation(photos):
    data = load_photos(photos)
    first, second = arrays(data.train), arrays(data.train)
    assert [len(labels) for _, labels in first] == [4] * (data.train_size // 4)
    labels = [np.concatenate([labels for _, labels in epoch]) for epoch in (first, second)]
    assert not np.array_equal(*labels)
    assert np.array_equal(*[np.bincount(epoch) for epoch in labels])
    seen = {image.tobytes() for images, _ in first for image in images}
    again = {image.tobytes() for images, _ in second for image in images}
    assert len(seen) == 32 and not seen & again


def test_short_epochs_have_new_images_and_short_tests_spaced_ones():
    few = dict(train_images=1280, cache='unread')
    data = datasets.load_dataset('digits', 8, 64, steps_per_epoch=3, validation_steps=5, **few)
    whole = datasets.load_dataset('digits', 8, 64, **few)
    assert (data.train_size, data.test_size) == (192, 320)
    first, second = [[image.tobytes() for images, _ in arrays(data.train) for image in images]
                     for _ in range(2)]
    assert len(set(first)) == 192 and len(set(first) & set(second)) < 60
    everything = np.concatenate([images for images, _ in arrays(whole.test)])
    spaced = everything[np.linspace(0, len(everything) - 1, 320).round().astype(int)]
    assert np.array_equal(np.concatenate([images for images, _ in arrays(data.test)]), spaced)
    generous = datasets.load_dataset('digits', 8, 64, steps_per_epoch=10 ** 6,
                                     validation_steps=10 ** 6, **few)
    assert same(arrays(generous.train), arrays(whole.train))
    assert same(arrays(generous.test), arrays(whole.test))


def test_the_probe_never_disturbs_training_never_ends_and_repeats_with_the_seed(photos):
    alone, probed = load_photos(photos), load_photos(photos)
    for _ in range(2):
        expected, got = arrays(alone.train), []
        for batch in probed.train:
            arrays(probed.probe.take(3))
            got += arrays([batch])
        assert same(expected, got)
    batches = arrays(probed.probe.take(20))  # more than two epochs
    assert [len(labels) for _, labels in batches] == [4] * 20
    again = load_photos(photos)
    first, second = arrays(alone.probe.take(2)), arrays(alone.probe.take(2))
    assert not same(first, second)
    assert same(first, arrays(again.probe.take(2))) and same(second, arrays(again.probe.take(2)))


def test_test_images_are_neither_shuffled_nor_augmented(photos):
    one, two = load_photos(photos, seed=1), load_photos(photos, seed=2)
    first = arrays(one.test)
    assert same(first, arrays(one.test)) and same(first, arrays(two.test))
    labels = np.concatenate([labels for _, labels in first])
    assert np.array_equal(labels, np.sort(labels)) and np.bincount(labels).tolist() == [4, 4]


def test_train_follows_the_order(photos):
    for options in ({}, {'steps_per_epoch': 3}, {'views': 'held'}):
        data = load_photos(photos, **options)
        for epoch in range(1, 4):
            numbers = data.order(epoch)
            assert numbers.dtype == np.int64 and numbers.shape == (data.train_size // 4, 4)
            assert np.array_equal(numbers, data.order(epoch))
            assert same(arrays(data.train), arrays(data.batches(numbers, data.view(epoch))))


def test_the_order_has_never_changed(photos):
    for seed, epoch in ((0, 1), (7, 4)):
        first = np.random.RandomState([seed, 0, epoch - 1]).permutation(32)
        assert np.array_equal(load_photos(photos, seed=seed).order(epoch), first.reshape(8, 4))


# --- fixed augmentation

def by_number(data, epoch):
    """Returns {image number: bytes}, as `train` yields them in an epoch."""
    images = np.concatenate([images for images, _ in arrays(data.train)])
    return {number: image.tobytes() for number, image in zip(data.order(epoch).ravel(), images)}


def test_views_of_each_epoch(photos):
    for views, interval, kind, expected in (
            ('fresh', 2, 'flip+rotate', [0, 1, 2, 3, 4]), ('auto', 2, 'flip', [0, 1, 2, 3, 4]),
            ('held', 2, 'flip', [0, 0, 1, 1, 2]), ('held', 1, 'flip+rotate', [0, 1, 2, 3, 4]),
            ('held', 0, 'flip+rotate', [0] * 5),
            ('fresh', 2, 'none', [0] * 5), ('held', 2, 'none', [0] * 5)):
        data = load_photos(photos, views=views, interval=interval, augmentation=kind)
        assert [data.view(epoch) for epoch in range(1, 6)] == expected
        assert data.augmentation == kind
        assert data.views == ('held' if views == 'held' else 'fresh')


def test_held_views_repeat_for_one_interval(photos):
    data = load_photos(photos, views='held', interval=2)
    first, second, third, fourth = [by_number(data, epoch) for epoch in range(1, 5)]
    assert len(first) == 32 and first == second and third == fourth
    assert not set(first.values()) & set(third.values())
    other = load_photos(photos, interval=2)
    other.hold_views()  # later, but before the first epoch
    again = arrays(other.batches(other.order(4), other.view(4)))
    assert {number: image.tobytes() for number, image in zip(
        other.order(4).ravel(), np.concatenate([images for images, _ in again]))} == third


def test_the_probe_has_fresh_views_while_those_of_training_are_held(photos):
    data = load_photos(photos, views='held', interval=0)
    images = [image.tobytes() for images, _ in arrays(data.probe.take(24)) for image in images]
    assert len(set(images)) == 3 * 32
    assert not set(images) & set(by_number(data, 1).values())


def test_an_image_does_not_depend_on_its_batch():
    """In batches of 37, TensorFlow's cosine would depend on the place in the batch."""
    data = datasets.load_dataset('digits', 8, 37, 'unread', augmentation='flip+rotate')
    numbers, rng = data.order(1)[:6], np.random.RandomState(0)
    shuffled = rng.permutation(numbers.ravel())
    expected, got = [
        {number: (image.tobytes(), label) for row, (images, labels) in zip(rows, arrays(
            data.batches(rows, 5))) for number, image, label in zip(row, images, labels)}
        for rows in (numbers, shuffled.reshape(6, 37))]
    assert len(expected) == 6 * 37 and expected == got


# --- batches of any numbers

def test_some_batches_of_an_epoch_equal_those_of_the_whole(photos):
    data = load_photos(photos)
    numbers = data.order(3)
    whole = arrays(data.batches(numbers, 2))
    for rows in ([1, 4, 6], [5], []):
        some = data.batches(numbers[rows], 2)
        assert some.cardinality().numpy() == len(rows)
        assert same(arrays(some), [whole[row] for row in rows])
        assert same(arrays(some), [whole[row] for row in rows])  # a second pass


# --- draws

def test_a_flip_mirrors_half_of_the_images_and_changes_nothing_else(photos):
    plain, flipped, rotated = [by_number(load_photos(photos, kind), 1)
                               for kind in ('none', 'flip', 'flip+rotate')]
    mirrored = [np.frombuffer(plain[number], np.float32).reshape(24, 24, 3)[:, ::-1].tobytes()
                for number in range(32)]
    kinds = [('plain' if flipped[number] == plain[number] else
              'mirrored' if flipped[number] == mirrored[number] else 'other')
             for number in range(32)]
    assert set(kinds) == {'plain', 'mirrored'} and 8 < kinds.count('mirrored') < 24
    # Both kinds draw the same flips.
    drawn, _ = augmentation_draws(0, 0, 0, 32)
    assert [kind == 'mirrored' for kind in kinds] == drawn.tolist()
    assert not set(rotated.values()) & set(flipped.values())


def test_the_draws_have_the_range_of_the_paper_and_have_never_changed():
    flips, turns = augmentation_draws(7, 0, 3, 50)
    rng = np.random.RandomState([7, 0, 3, 1])
    assert np.array_equal(flips, rng.uniform(size=50) < 0.5)
    angles = rng.uniform(-1, 1, 50) * 0.2 * 2 * np.pi
    expected = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    assert np.array_equal(turns, expected)


def test_augmentation_agrees_with_the_keras_layers():
    """Searches many of our angles for the one that Keras drew; only interpolation may differ."""
    import tensorflow as tf
    coarse = np.random.RandomState(0).uniform(0, 255, (1, 4, 4, 3)).astype('float32')
    image = tf.image.resize(coarse, (32, 32))
    theirs = tf.keras.layers.RandomRotation(0.2, fill_mode='reflect', seed=3)(
        image, training=True).numpy()
    ours = augment(tf.tile(image, [1000, 1, 1, 1]), *augmentation_draws(1, 0, 0, 1000)).numpy()
    error = np.abs(ours - theirs).mean(axis=(1, 2, 3))
    assert error.min() < 1 and np.median(error) > 10


# --- a subset

def all_images(data):
    """Returns the unaugmented training images, as bytes, and their labels, by image number."""
    batches = arrays(data.batches(np.arange(data.num_images)[:, None], 0))
    return [images.tobytes() for images, _ in batches], [labels[0] for _, labels in batches]


def test_subsets_are_balanced_whatever_the_seed_and_larger_ones_contain_smaller_ones(tmp_path):
    for name, count in (('a', 16), ('b', 2), ('c', 5)):
        for i in range(count):
            write(tmp_path / 'train' / name / '{}.png'.format(i), encoded(100 * count + i, 'png'))
        write(tmp_path / 'test' / name / '0.png', encoded(0, 'png'))
    smaller = set()
    for total, counts in ((3, [1, 1, 1]), (6, [2, 2, 2]), (12, [5, 2, 5]), (15, [8, 2, 5]),
                          (23, [16, 2, 5])):
        images, labels = all_images(datasets.load_dataset(
            'folder:{}'.format(tmp_path), 24, 1, augmentation='none', train_images=total,
            seed=total))
        assert np.bincount(labels).tolist() == counts and labels == sorted(labels)
        assert len(set(images)) == total and smaller < set(images)
        smaller = set(images)


# --- flags

SMALL = ['--model_name', 'mobilenetv2', '--alpha', '0.35', '--input_size', '32', '--weights',
         'none', '--batch_size', '8']


def arguments(*flags):
    return run_settings_of(SMALL + list(flags))


def test_flags_reach_the_data(photos):
    data = main.load_data(arguments(
        '--dataset_name', 'folder:{}'.format(photos), '--augmentation', 'none', '--train_images',
        '12'))
    assert (data.augmentation, data.num_images, data.train_size) == ('none', 12, 12)
    data = main.load_data(arguments('--dataset_name', 'digits', '--views', 'held', '--interval',
                                    '3', '--augmentation', 'flip+rotate', '--train_images', '40',
                                    '--validation_steps', '1'))
    assert data.augmentation == 'flip+rotate'
    assert [data.view(epoch) for epoch in (1, 3, 4)] == [0, 0, 1]


def test_the_interval_matters_if_views_are_held():
    fixed = ['--train_type', 'full_training', '--interval', '3']
    assert main.decisive_settings(arguments(*fixed))['interval'] is None
    assert main.decisive_settings(arguments(*fixed, '--views', 'held'))['interval'] == 3


@pytest.mark.parametrize('flags, words', [
    (['--train_images', '9'], '9 training images of digits .*allowed: 10 .*to 10776'),
    (['--test_images', '20000'], '20000 test images of digits .*to 2250')])
def test_an_impossible_subset_is_refused_before_anything_is_written(tmp_path, flags, words):
    with pytest.raises(UserError, match=words) as error:
        main.main(SMALL + ['--dataset_name', 'digits', '--logs_dir', str(tmp_path)] + flags)
    assert '\n' not in str(error.value) and os.listdir(str(tmp_path)) == []
