"""Tests classification sets of TensorFlow Datasets by tfds:NAME, on tiny archives."""

import glob
import json
import os
import re
import shutil
import time

import numpy as np
import pytest
import tensorflow as tf

import datasets
import main
import tfds_archives
from elastic.data.images import check_dataset_name, load_images
from elastic.data.records import Records
from elastic.errors import UserError
from elastic.flags import check_arguments, parse_arguments
from elastic.planning import ways
from elastic.runs.folder import read_run
from elastic.settings import DataSettings
from image_folders import arrays
from small_runs import quick_flags
from tfds_archives import own_builder

NAMES = ('cifar10', 'eurosat')


def kinds():
    import tensorflow_datasets
    return tensorflow_datasets.features


def shape_features():
    return {'picture': kinds().Image(shape=(None, None, 1)),
            'kind': kinds().ClassLabel(names=['round', 'square', 'star'])}


def shapes(labels):
    """Returns grey images of these labels: every pixel of image i is i."""
    return [dict(picture=np.full((6, 5, 1), i, np.uint8), kind=label)
            for i, label in enumerate(labels)]


@pytest.fixture(scope='module')
def tfds_dir(tmp_path_factory):
    """Returns a folder with archives of NAMES, and with sets of our own, some of them prepared."""
    path = str(tmp_path_factory.mktemp('tfds'))
    for name in NAMES:
        tfds_archives.prepare(name, path)
    own_builder('TinyShapes', shape_features, {
        'train': shapes([0, 1, 2, 0]), 'validation': shapes([2, 1, 0])})(data_dir=path)
    for name, examples in (
            ('PreparedShapes', {'train': [0, 1, 2] * 5}),
            ('HiddenShapes', {'train': [0, 1, 2, 0], 'test': [-1, -1, -1], 'validation': [2, 1]}),
            ('FewShapes', {'train': [0, 1]}), ('TestedShapes', {'test': [0, 1]})):
        prepare(name, path, examples)
    return path


def prepare(name, folder, examples):
    """Prepares a set of our own in a folder; examples: split -> labels of its shapes."""
    from tensorflow_datasets import download
    examples = {split: shapes(labels) for split, labels in examples.items()}
    builder = own_builder(name, shape_features, examples, known=False)(data_dir=str(folder))
    builder.download_and_prepare(
        download_config=download.DownloadConfig(try_download_gcs=False))


def loaded(name, tfds_dir, **more):
    return datasets.load_dataset('tfds:' + name, 16, 2, data_dir=tfds_dir, **more)


# --- what loads

@pytest.mark.parametrize('name, classes, train_size, test_size, notes', [
    ('cifar10', 10, 20, 10, []),
    ('eurosat/rgb:2.0.0', 10, 13, 4, [
        'tfds:eurosat/rgb:2.0.0 has no split for testing: a fixed fifth of its 17 images are the '
        'test images']),
    ('hidden_shapes', 3, 4, 2, ["not used: 'test' (no labels) of tfds:hidden_shapes"]),
    ('tiny_shapes', 3, 4, 3, [])])
def test_a_set_loads_with_its_splits_and_class_names(name, classes, train_size, test_size, notes,
                                                     tfds_dir, offline):
    data = loaded(name, tfds_dir)
    assert (data.num_classes, data.num_images, data.test_size) == (classes, train_size, test_size)
    assert list(data.notes) == notes
    for images, labels in arrays(data.train) + arrays(data.test):
        assert images.shape == labels.shape + (16, 16, 3) and 0 <= images.min() <= images.max()
        assert labels.min() >= 0 and labels.max() < classes
    assert ways.sizes_of('tfds:' + name, 16, 2, tfds_dir) == (classes, train_size, test_size)
    assert datasets.batch_at_hand('tfds:' + name, 16, 2, classes, tfds_dir)[1] is None


def test_images_keep_their_labels_and_grey_becomes_three_channels(tfds_dir):
    data = loaded('prepared_shapes', tfds_dir, augmentation='none')
    assert data.class_names == ('round', 'square', 'star')
    seen = {}
    for images, labels in arrays(data.train) + arrays(data.test):
        for image, label in zip(images, labels):
            assert image.min() == image.max()  # also over the channels
            seen[int(image.max())] = label
    assert seen == {i: i % 3 for i in range(15)}


@pytest.mark.thorough
def test_a_finished_run_does_not_count_for_a_set_that_was_prepared_again(tmp_path, capsys):
    def prepared(*labels):
        prepare('Changing', tmp_path / 'sets', {'train': list(labels) * 4, 'test': [0, 1, 2]})
    flags = quick_flags(
        tmp_path, '--dataset_name', 'tfds:changing', '--data_dir', str(tmp_path / 'sets'),
        '--train_type', 'traditional_tl_training', '--num_epochs', '1', '--run_name', 'run',
        '--train_images', '12', '--test_images', '3')
    prepared(0, 1, 2)
    assert main.main(flags) == 0
    assert read_run(str(tmp_path / 'run')).summary['class_names'] == ['round', 'square', 'star']
    shutil.move(str(tmp_path / 'sets'), str(tmp_path / 'old'))
    prepared(1, 0, 2)
    with pytest.raises(UserError, match='have changed .* replaced .*changing-train.tfrecord'):
        main.main(flags)
    shutil.rmtree(str(tmp_path / 'sets'))
    shutil.move(str(tmp_path / 'old'), str(tmp_path / 'sets'))
    capsys.readouterr()
    assert main.main(flags) == 0 and 'already finished' in capsys.readouterr().out


def test_the_name_of_a_run_has_the_name_of_the_set():
    flags = ['--dataset_name', 'tfds:eurosat/rgb:2.0.0', '--train_type', 'full_training']
    assert check_arguments(parse_arguments(flags)).run_name == (
        'resnet50_eurosat-rgb-2.0.0_full_training')


# --- names

@pytest.mark.parametrize('name', [
    'huggingface:cifar10', 'kaggle:some/set', 'cifar10:latest', 'cifar10:3.*.*', 'cifar10:3.0.2:1',
    'a/b/c', '', '../x', 'cifar10/a=1', 'gs://bucket/set', 'cifar10\n', 'café'])
def test_a_name_of_another_form_is_refused_before_anything_is_imported(name):
    with pytest.raises(UserError, match=r'give tfds:NAME\[/CONFIG\]\[:VERSION\], such as') as error:
        check_dataset_name('tfds:' + name)
    assert '\n' not in str(error.value).replace(name, '')


@pytest.mark.parametrize('name, words', [
    ('oxford_flowers10', "no data set 'oxford_flowers10' .did you mean 'oxford_flowers102'?"),
    ('prepared_shape', "did you mean 'prepared_shapes'?"),
    ('cifar10:1.0.0', 'cannot use tfds:cifar10:1.0.0: .*3.0.2'),
    ('eurosat/rgbb', "unknown configuration of eurosat 'rgbb' .did you mean 'rgb'.*: rgb, all"),
    ('cifar10/x', 'cannot use tfds:cifar10/x: ')])
def test_an_unknown_set_configuration_or_version_is_refused(name, words, tfds_dir, offline):
    for check in (lambda: loaded(name, tfds_dir),
                  lambda: ways.sizes_of('tfds:' + name, 16, 2, tfds_dir)):
        with pytest.raises(UserError, match=words) as error:
            check()
        assert '\n' not in str(error.value)


# --- sets that cannot be used

@pytest.mark.parametrize('name, words', [
    ('eurosat/all', 'it has no image; .*sentinel2 .Tensor., label .ClassLabel.'),
    ('voc', r'any number of labels \(labels, labels_no_difficult\)'),
    ('coco', 'it has no class label; .*objects .Sequence.'),
    ('dsprites', r'it has several class labels \(label_\w+, label_')])
def test_a_set_of_another_kind_is_refused_before_it_is_downloaded(name, words, tmp_path, offline):
    for check in (lambda: loaded(name, str(tmp_path)),
                  lambda: ways.sizes_of('tfds:' + name, 16, 2, str(tmp_path))):
        with pytest.raises(UserError, match='cannot train on tfds:{}: .*{}'.format(
                name, words)) as error:
            check()
        assert '\n' not in str(error.value)
    assert os.listdir(str(tmp_path)) == []


@pytest.mark.parametrize('change, words', [
    (lambda: {'left': kinds().Image()}, r'several images \(picture, left\)'),
    (lambda: {'picture': kinds().Image(shape=(4, 4, 1), dtype=tf.uint16)}, 'of uint16, not 1, 3'),
    (lambda: {'kind': kinds().ClassLabel(num_classes=1)}, 'its label has 1 classes')])
def test_features_that_do_not_fit_are_refused_by_name(change, words, tmp_path):
    from elastic.data.tfds import image_and_label
    builder = own_builder('Unfit', lambda: dict(shape_features(), **change()), {}, known=False)
    with pytest.raises(UserError, match=words):
        image_and_label(builder(data_dir=str(tmp_path)).info, 'tfds:unfit')


def test_of_several_features_the_declared_pair_is_used(tmp_path):
    from elastic.data.tfds import image_and_label
    builder = own_builder('Declared', lambda: dict(
        shape_features(), mask=kinds().Image(), size=kinds().ClassLabel(num_classes=2)), {},
        ('mask', 'size'), known=False)
    assert image_and_label(builder(data_dir=str(tmp_path)).info, 'x') == ('mask', 'size')


@pytest.mark.parametrize('name, words', [
    ('tested_shapes', 'no training images, only the splits test'),
    ('few_shapes', r'has 2 image\(s\), and no class has two')])
def test_splits_that_cannot_be_used_are_refused(name, words, tfds_dir):
    with pytest.raises(UserError, match=words):
        loaded(name, tfds_dir)


# --- without a network, and damaged files

@pytest.mark.parametrize('name, words', [
    ('eurosat', ['no connection to ', ', which has EuroSAT.zip', 'its configuration rgb',
                 'downloads/manual', '\n  EuroSAT.zip  http']),
    ('imagenet2012', ['by hand', 'downloads/manual', '\n  ILSVRC2012']),
    ('plantae_k', ['and ', ' more\n'])])
def test_without_a_network_the_error_comes_fast_and_names_files(name, words, tmp_path, offline):
    begin = time.perf_counter()
    with pytest.raises(UserError) as error:
        loaded(name, str(tmp_path))
    assert time.perf_counter() - begin < 60  # TensorFlow Datasets retries for 200 s
    message = str(error.value)
    assert message.startswith('data set tfds:{} cannot be prepared: '.format(name))
    assert all(word in message for word in words), message
    assert message.endswith('digits_inverted, folder:PATH') and message.count('\n') < 30


def prepared_file(tmp_path):
    """Prepares the set `damaged`; returns the path and content of its 12 training images."""
    prepare('Damaged', tmp_path, {'train': [0, 1, 2] * 4, 'test': [0, 1, 2]})
    path, = glob.glob(str(tmp_path / 'damaged/1.0.0/*train.tfrecord*'))
    with open(path, 'rb') as file:
        return path, file.read()


@pytest.mark.parametrize('damage, words', [
    ('cut', 'has 11 records, not 12: it is damaged'), ('missing', 'is missing'),
    ('a record too many', 'has 13 records, not 12: it is damaged')])
def test_a_damaged_shard_is_named_with_what_to_do(damage, words, tmp_path):
    path, content = prepared_file(tmp_path)
    first = 16 + int.from_bytes(content[:8], 'little')
    with open(path, 'wb') as file:
        file.write(content[:-20] if damage == 'cut' else content + content[:first])
    if damage == 'missing':
        os.remove(path)
    with pytest.raises(UserError) as error:
        load_images('tfds:damaged', 16, DataSettings(data_dir=str(tmp_path)))
    assert "'{}' {}; restore it, or remove {} ".format(
        path, words, os.path.dirname(path)) in str(error.value)


def test_a_set_of_a_newer_tensorflow_datasets_is_refused_with_what_to_do(tmp_path):
    folder = os.path.dirname(prepared_file(tmp_path)[0])
    path = os.path.join(folder, 'dataset_info.json')
    with open(path) as file:
        info = json.load(file)
    info['splits'][0]['fieldOfTomorrow'] = 'new'
    with open(path, 'w') as file:
        json.dump(info, file)
    with pytest.raises(UserError, match='cannot use tfds:damaged: another version of TensorFlow '
                                        'Datasets wrote its folder in .*; prepare it in another'):
        loaded('damaged', str(tmp_path))


def test_a_flipped_bit_is_found_when_its_record_is_read(tmp_path):
    path, content = prepared_file(tmp_path)
    for place in range(5, len(content), len(content) // 25):
        with open(path, 'wb') as file:
            file.write(content[:place] + bytes([content[place] ^ 16]) + content[place + 1:])
        with pytest.raises(UserError, match="'{}' (is damaged|has [0-9]+ records)".format(path)):
            Records([path], [12], 'picture', 'kind', 3).labels()
    with pytest.raises(UserError, match="'{}' is damaged: the checksum of a record".format(path)
                       ) as error:
        datasets.load_dataset('tfds:damaged', 16, 2, data_dir=str(tmp_path))
    assert '\n' not in str(error.value)


def test_another_format_is_refused(tmp_path):
    prepare('Foreign', tmp_path, {'train': [0, 1]})
    path, = glob.glob(str(tmp_path / 'foreign/1.0.0/*.tfrecord*'))
    os.rename(path, path.replace('.tfrecord', '.riegeli'))
    info = tmp_path / 'foreign/1.0.0/dataset_info.json'
    info.write_text(info.read_text().replace('tfrecord', 'riegeli'))
    with pytest.raises(UserError, match="1.0.0' is in the format riegeli; prepare it in another "
                                        "folder with file_format='tfrecord', and give that as "):
        load_images('tfds:foreign', 16, DataSettings(data_dir=str(tmp_path)))


@pytest.mark.parametrize('examples, words', [
    ({'train': [0, 1, 2, -1, 0, -1], 'test': [0, 1]},
     "example [0-9] of the split with '.*-train.tfrecord.*' has the label -1; allowed: 0 to 2; "
     r'prepare the data set without such examples \(2 in all\)$'),
    ({'train': [0, 1, 2], 'test': [-1, 1, 0]}, "example [0-9] .*'.*-test.tf.*' .* label -1;")])
def test_labels_of_no_class_are_named_before_training(examples, words, tmp_path):
    prepare('WrongLabels', tmp_path, examples)
    with pytest.raises(UserError, match=words) as error:
        load_images('tfds:wrong_labels', 16, DataSettings(data_dir=str(tmp_path)))
    assert '\n' not in str(error.value)


def test_a_label_above_the_classes_is_named_with_its_example(tmp_path):
    records = Records([prepared_file(tmp_path)[0]], [12], 'picture', 'kind', 2)
    words = r'example ([0-9]+) .* has the label 2; allowed: 0 to 1; .*\(4 in all\)$'
    with pytest.raises(UserError, match=words) as error:
        records.labels()
    assert records.label(int(re.search(words, str(error.value)).group(1))) == 2
