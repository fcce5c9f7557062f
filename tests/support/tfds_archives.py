"""Writes tiny archives of data sets, for their real builders, and makes builders of other sets.

Images are random; classes, folders, lists and annotations are as in the originals.
"""

import io
import os
import tarfile
import zipfile

import numpy as np

PET_IMAGES = {'trainval': 14, 'test': 6}
BIRD_IMAGES = 12
DOG_BREEDS = 120
DOG_TEST_IMAGES = 5


def prepare(name, data_dir):
    """Writes archives of `name` where load_dataset(name, data_dir=data_dir) looks for them.

    Replaces the checksums in the builder's `url_infos`, so that it accepts them.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import checksums
    manual_dir = os.path.join(str(data_dir), 'downloads', 'manual')
    os.makedirs(manual_dir, exist_ok=True)
    for archive, members in ARCHIVES[name]().items():
        _write(os.path.join(manual_dir, archive), members)
    builder_class = type(tfds.builder(name, data_dir=str(data_dir)))
    builder_class.url_infos = {
        url: checksums.compute_url_info(os.path.join(manual_dir, info.filename))
        if os.path.exists(os.path.join(manual_dir, info.filename)) else info
        for url, info in builder_class.url_infos.items()}


def _write(path, members):
    """Writes an archive of `members`, name -> bytes, or a file, given its bytes."""
    if isinstance(members, bytes):
        with open(path, 'wb') as file:
            file.write(members)
        return
    if path.endswith('.zip'):
        with zipfile.ZipFile(path, 'w') as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return
    with tarfile.open(path, 'w:gz' if path.endswith(('.tgz', '.gz')) else 'w') as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def image(seed, encode, height=40, width=30, channels=3):
    """Returns an encoded random image, smooth enough to survive JPEG."""
    import tensorflow as tf
    coarse = np.random.RandomState(seed).uniform(0, 255, (4, 3, channels))
    pixels = tf.image.resize(coarse, (height, width))
    return encode(tf.cast(pixels, tf.uint8)).numpy()


def _jpeg(seed, **size):
    import tensorflow as tf
    return image(seed, tf.io.encode_jpeg, **size)


def _mask(seed):
    import tensorflow as tf
    return image(seed, tf.io.encode_png, channels=1)


def _pets():
    images, annotations, lists = {}, {}, {'trainval': [], 'test': []}
    for split, count in PET_IMAGES.items():
        for i in range(count):
            name = 'pet_{}_{}'.format(split, i)
            breed = 1 + 36 * (i // 2) // (count // 2 - 1)  # from 1 to 37, two images each
            lists[split].append('{} {} 1 1\n'.format(name, breed))
            images['images/{}.jpg'.format(name)] = _jpeg(i)
            annotations['annotations/trimaps/{}.png'.format(name)] = _mask(i)
    for split, lines in lists.items():
        annotations['annotations/{}.txt'.format(split)] = ''.join(lines).encode()
    return {'images.tar.gz': images, 'annotations.tar.gz': annotations}


def _birds():
    images, masks, names, splits, boxes = {}, {}, '', '', ''
    for i in range(BIRD_IMAGES):
        file = 'Bird_{}'.format(i)
        folder = '{:03d}.{}'.format(1 + 199 * i // (BIRD_IMAGES - 1), file)
        names += '{} {}/{}.jpg\n'.format(i + 1, folder, file)
        splits += '{} {}\n'.format(i + 1, int(i % 3 > 0))
        boxes += '{} 5.0 5.0 20.0 20.0\n'.format(i + 1)
        images['CUB_200_2011/images/{}/{}.jpg'.format(folder, file)] = _jpeg(i)
        masks['segmentations/{}/{}.png'.format(folder, file)] = _mask(i)
    for name, text in (('images', names), ('train_test_split', splits), ('bounding_boxes', boxes)):
        images['CUB_200_2011/{}.txt'.format(name)] = text.encode()
    return {'CUB_200_2011.tgz': images, 'segmentations.tgz': masks}


def _dogs():
    from scipy.io import savemat
    xml = ('<annotation><size><width>30</width><height>40</height></size><object><bndbox><xmin>2'
           '</xmin><ymin>2</ymin><xmax>20</xmax><ymax>20</ymax></bndbox></object></annotation>')
    images, annotations, lists = {}, {}, {'train': [], 'test': []}
    for i in range(DOG_BREEDS + DOG_TEST_IMAGES):
        breed, split = i % DOG_BREEDS, 'train' if i < DOG_BREEDS else 'test'
        path = 'n{:08d}-Breed_{}/n{:08d}_{}'.format(breed, breed, breed, i)
        lists[split].append(path + '.jpg')
        images['Images/{}.jpg'.format(path)] = _jpeg(i)
        annotations['Annotation/' + path] = xml.encode()
    mats = {}
    for split, paths in lists.items():
        file = io.BytesIO()
        savemat(file, {'file_list': np.array(paths, object).reshape(-1, 1)})
        mats['{}_list.mat'.format(split)] = file.getvalue()
    return {'images.tar': images, 'annotation.tar': annotations, 'lists.tar': mats}


CIFAR_NAMES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship',
               'truck')


def _cifar():
    """Writes 4 images in each of 5 training files, 10 for testing: image i is of class i % 10."""
    files, rng = {'batches.meta.txt': '\n'.join(CIFAR_NAMES).encode()}, np.random.RandomState(0)
    for name, numbers in [('data_batch_{}'.format(n + 1), range(4 * n, 4 * n + 4))
                          for n in range(5)] + [('test_batch', range(10))]:
        files[name + '.bin'] = b''.join(bytes([i % 10]) + rng.bytes(3072) for i in numbers)
    return {'cifar-10-binary.tar.gz': {
        'cifar-10-batches-bin/' + name: content for name, content in files.items()}}


EUROSAT_IMAGES = {'Forest': 10, 'River': 5, 'SeaLake': 2}


def _eurosat():
    return {'EuroSAT.zip': {
        '2750/{}/{}_{}.jpg'.format(name, name, i): _jpeg(i, height=64, width=64)
        for name, count in EUROSAT_IMAGES.items() for i in range(count)}}


ARCHIVES = {'caltech_birds2011': _birds, 'oxford_iiit_pet': _pets, 'stanford_dogs': _dogs,
            'cifar10': _cifar, 'eurosat': _eurosat}


# ---------------------------------------------------------------- other sets

def own_builder(name, features, examples, supervised_keys=None, known=True):
    """Returns a new builder class of TensorFlow Datasets.

    name: in CamelCase. features: () -> dict of tfds.features. examples: split -> list of dicts.
    known: whether tfds.builder finds it by its name.
    """
    import contextlib

    import tensorflow_datasets as tfds

    def info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features()),
                                     supervised_keys=supervised_keys)

    def split_generators(self, dl_manager):
        return {split: iter(list(enumerate(found))) for split, found in examples.items()}

    def generate_examples(self):  # the base class wants it; split_generators has the examples
        raise AssertionError

    with contextlib.ExitStack() as stack:
        if not known:
            stack.enter_context(tfds.core.registered.skip_registration())
        return type(name, (tfds.core.GeneratorBasedBuilder,), dict(
            VERSION=tfds.core.Version('1.0.0'), __module__=__name__, _info=info,
            _split_generators=split_generators, _generate_examples=generate_examples))
