"""Tests folders of photos as people have them: their layouts, files and names."""

import io
import os

import numpy as np
import PIL
import pytest
from PIL import Image, ImageOps

from elastic.data.image_folder import folder_splits
from elastic.data.photo import ORIENTATION, read_image
from elastic.errors import UserError
from image_folders import load_photos, write
from small_runs import script


def photo(kind='JPEG', colour=(200, 30, 60), size=(40, 30), **options):
    """Returns the bytes of a photo of one colour."""
    content = io.BytesIO()
    Image.new('RGB', size, colour).save(content, kind, **options)
    return content.getvalue()


def fill(root, *paths):
    """Writes a photo at each path; a path that ends in / becomes an empty folder."""
    for path in paths:
        if path.endswith('/'):
            (root / path).mkdir(parents=True)
        else:
            write(root / path, photo())


def scanned(path):
    """Returns class -> number of training images, class -> number of test images, and the notes."""
    names, train, test, notes = folder_splits(str(path), 8)
    return [dict(zip(names, np.bincount(split.labels(), minlength=len(names)).tolist()))
            for split in (train, test)] + [notes]


# --- which files

def test_photos_in_folders_of_a_class_folder_belong_to_the_class(tmp_path):
    fill(tmp_path, 'cat/0.jpg', 'cat/2021/may/1.jpg', 'cat/2021/2.jpg', 'cat/2022/3.jpg',
         'dog/0.jpg', 'dog/1.jpg', '__MACOSX/cat/._0.jpg', 'cat/.thumbnails/0.jpg')
    train, test, notes = scanned(tmp_path)
    assert {name: train[name] + test[name] for name in train} == {'cat': 4, 'dog': 2}
    assert not notes


def test_a_linked_folder_counts_once(tmp_path):
    fill(tmp_path, 'cat/0.jpg', 'cat/more/1.jpg', 'dog/0.jpg', 'dog/1.jpg')
    os.symlink('..', str(tmp_path / 'cat' / 'more' / 'up'))
    os.symlink('more', str(tmp_path / 'cat' / 'same'))  # beside what it links to
    train, test, _ = scanned(tmp_path)
    assert train['cat'] + test['cat'] == 2


@pytest.mark.skipif(os.geteuid() == 0, reason='the superuser may read every folder')
def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path):
    fill(tmp_path, 'cat/0.jpg', 'cat/more/1.jpg', 'dog/0.jpg', 'dog/1.jpg')
    (tmp_path / 'cat' / 'more').chmod(0)
    with pytest.raises(PermissionError, match='more'):
        scanned(tmp_path)


def test_every_format_that_pillow_draws_is_read(tmp_path):
    """Also without an extension, except for formats that have no mark of their own."""
    kinds = {'tga': 'TGA', 'ppm': 'PPM', 'pgm': 'PPM', 'jp2': 'JPEG2000', 'pcx': 'PCX',
             'sgi': 'SGI', 'dds': 'DDS', 'ico': 'ICO', 'im': 'IM', 'dib': 'DIB', 'j2k': 'JPEG2000',
             'webp': 'WEBP', 'TIFF': 'TIFF', 'jfif': 'JPEG', 'png': 'PNG', 'download': 'JPEG'}
    for name in ('cat', 'dog'):
        for extension, kind in kinds.items():
            content = photo(kind, size=(32, 32))
            write(tmp_path / name / ('0.' + extension), content)
            write(tmp_path / name / extension, content)
            assert abs(read_image(str(tmp_path / name / extension), 8).astype(int)
                       - (200, 30, 60)).max() <= 8
        write(tmp_path / name / 'table.csv', b'Filename;Width;Height\n')
    train, test, notes = scanned(tmp_path)
    assert sum(train.values()) + sum(test.values()) == 4 * len(kinds)
    assert notes == ('left out: 2 .csv (not an image that Pillow reads)',)


def test_what_is_left_out_is_counted_with_the_true_reason(tmp_path):
    fill(tmp_path, '0.jpg', 'cat/0.jpg', 'cat/1.jpg', 'dog/0.jpg', 'dog/1.jpg')
    for name, content in (
            ('cat/2.heic', b'?'), ('cat/3.HEIC', b'?'), ('cat/x', b''), ('dog/notes.txt', b'?'),
            ('dog/scan.dcm', bytes(128) + b'DICM' + bytes(900)), ('dog/plan.eps', photo('EPS'))):
        write(tmp_path / name, content)
    os.mkfifo(str(tmp_path / 'dog' / 'pipe.jpg'))
    note, = scanned(tmp_path)[2]
    assert note.startswith('left out: 2 .heic (not an image that Pillow reads), 1 ')
    assert sorted(note.split(', 1 ')[1:]) == [
        '.dcm (not an image that Pillow reads)', '.eps (EPS is not read)',
        '.jpg (in no class folder)', '.txt (not an image that Pillow reads)',
        'pipe, device or broken link (not a file)',
        'without extension (not an image that Pillow reads)']
    fill(tmp_path, 'elk/')
    write(tmp_path / 'elk' / '0.heic', b'something else')
    with pytest.raises(UserError, match="class folder 'elk' .*; left out: 3 .heic"):
        scanned(tmp_path)


# --- layouts

@pytest.mark.parametrize('train, test', [
    ('Train', 'TEST'), ('training', 'testing'), ('train', 'valid'), ('train', 'Validation'),
    ('train\r', 'val ')])
def test_splits_are_known_by_their_usual_names(tmp_path, train, test):
    fill(tmp_path, *['{}/{}/0.jpg'.format(part, name) for part in (train, test) for name in 'ab'])
    fill(tmp_path, '{}/a/1.jpg'.format(train))
    assert scanned(tmp_path) == [{'a': 2, 'b': 1}, {'a': 1, 'b': 1}, ()]


def test_a_test_folder_comes_before_validation_and_what_is_unused_is_named(tmp_path):
    fill(tmp_path, 'train/a/0.jpg', 'train/b/0.jpg', 'val/a/0.jpg', 'test/b/0.jpg', 'test/a/',
         'docs/0.jpg')
    _, test, notes = scanned(tmp_path)
    assert test == {'a': 0, 'b': 1}
    assert notes == ("not used: 'docs', 'val' of {}".format(tmp_path), 'no test images of a')


def test_a_flat_test_folder_gives_way_to_validation(tmp_path):
    fill(tmp_path, 'train/a/0.jpg', 'train/b/0.jpg', 'val/a/0.jpg', 'val/b/0.jpg', 'test/0.jpg')
    _, test, notes = scanned(tmp_path)
    assert test == {'a': 1, 'b': 1} and notes == ("not used: 'test' of {}".format(tmp_path),)


@pytest.mark.parametrize('files, said', [
    (['train/0.jpg', 'test/0.jpg'], r'test \(0 class folders\), train \(0 class folders\); '
                                    '.*put the images of each class into a folder'),
    (['train/a/0.jpg', 'train/b/0.jpg', 'test/0.jpg'], 'give folder:{}/train'),
    (['train/a/0.jpg', 'train/b/0.jpg'], 'give folder:{}/train'),
    (['bus/0.jpg', 'car/0.jpg', 'train/0.jpg'], 'rename a class that has the name of a split'),
    (['photos/a/0.jpg', 'photos/b/0.jpg'], '; or give folder:{}/photos')])
def test_another_layout_is_refused_with_what_to_give(tmp_path, files, said):
    fill(tmp_path, *files)
    with pytest.raises(UserError, match=said.replace('{}', str(tmp_path))):
        scanned(tmp_path)


def test_names_that_are_not_utf_8_are_used_and_printed(tmp_path):
    for path in (folder + name for folder in (b'ma\xe7\xe3/', b'p\x94re/')
                 for name in (b'0.jpg', b'1.jpg', b'\xe9.jpg')):
        path = os.path.join(os.fsencode(str(tmp_path)), path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'wb') as file:
            file.write(photo())
    data = load_photos(tmp_path, cache='memory')
    assert data.class_names == ('ma\\xe7\\xe3', 'p\\x94re') and data.test_size == 2
    assert len(data.fingerprint) == 64


# --- pixels

def test_a_photo_is_turned_upright(tmp_path):
    """A raw TIFF that lies on its side is read as noise by Pillow 13 if opened by its name."""
    kinds = (('a.png', {}), ('a.tif', {}), ('b.tif', {'compression': 'tiff_lzw'}))
    if int(PIL.__version__.split('.')[0]) < 9:
        kinds = kinds[:1]  # it writes no orientation into a TIFF
    pixels = np.random.RandomState(0).randint(0, 256, (20, 30, 4), np.uint8)
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = turn
        found = []
        for name, options in kinds:
            Image.fromarray(pixels, 'RGBA').save(str(tmp_path / name), exif=exif.tobytes(),
                                                 **options)
            found.append(read_image(str(tmp_path / name), 16))
        turned = ImageOps.exif_transpose(Image.open(str(tmp_path / 'a.png'))).convert('RGB')
        expected = np.asarray(turned.resize((16, 16), Image.BILINEAR))
        assert all(np.array_equal(image, expected) for image in found)


@pytest.mark.parametrize('mode, kind', [
    ('P', 'PNG'), ('P', 'GIF'), ('1', 'PNG'), ('LA', 'PNG'), ('CMYK', 'JPEG')])
def test_colours_are_those_that_pillow_shows(tmp_path, mode, kind):
    drawn = Image.new('RGB', (16, 16), (255, 0, 0))
    drawn.paste((0, 0, 255), (0, 0, 16, 8))
    path = str(tmp_path / 'image')
    drawn.convert(mode).save(path, kind)
    shown = np.asarray(Image.open(path).convert('RGB')).astype(int)
    assert np.abs(read_image(path, 16) - shown).max() <= 1
    if mode in ('P', 'CMYK'):
        assert np.abs(shown[15, 0] - (255, 0, 0)).max() <= 2  # no index numbers


def test_a_large_photo_is_averaged_not_sampled(tmp_path):
    """Every second column is white. Sampling single pixels would give stripes or one colour."""
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[:, ::2] = 255
    Image.fromarray(pixels).save(str(tmp_path / 'stripes.png'))
    assert np.abs(read_image(str(tmp_path / 'stripes.png'), 16).astype(int) - 128).max() <= 4


@pytest.mark.parametrize('content, said', [
    ('16 bits', 'more than 8 bits per pixel'), (b'<html>404</html>', 'no image, or damaged'),
    (b'', 'no image, or damaged'), (b'II*\0\x08\0\0\0\xff\xff', 'no image, or damaged'),
    (photo(size=(300, 300))[:700], 'truncated')])
def test_a_file_that_cannot_be_shown_is_named_in_one_plain_line(tmp_path, content, said):
    fill(tmp_path, *['{}/{}.jpg'.format(name, i) for name in ('cat', 'dog') for i in range(4)])
    bad = tmp_path / 'dog' / '9.png'
    if content == '16 bits':
        bad = bad.with_suffix('')
        Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)).save(str(bad), 'PNG')
    else:
        write(bad, content)
    with pytest.raises(UserError) as error:
        load_photos(tmp_path)
    line = str(error.value)
    assert line.startswith("cannot read image '{}': ".format(bad)) and said in line
    assert '\n' not in line and 'tensor' not in line.lower() and 'Traceback' not in line


# --- refusals come first

@pytest.mark.parametrize('flags, said', [
    (['--batch_size', '9'], 'a batch of 9 does not fit into the 4 training images'),
    (['--num_classes', '3'], 'has 2 classes'),
    (['--batch_size', '2', '--warmup_steps', '24'], 'not less than the 24 steps')])
def test_what_names_and_flags_show_is_refused_without_tensorflow(tmp_path, flags, said):
    fill(tmp_path, *['{}/{}.jpg'.format(name, i) for name in 'ab' for i in range(3)])
    check = ('import sys, main\ntry:\n    main.main(sys.argv[1:])\nexcept Exception as error:\n'
             '    print(error)\nassert "tensorflow" not in sys.modules')
    status, out, errors = script('-c', check, '--dataset_name', 'folder:{}'.format(tmp_path),
                                 '--logs_dir', str(tmp_path / 'logs'), *flags)
    assert status == 0 and said in out, errors


def test_a_model_that_does_not_fit_is_refused_before_a_photo_is_decoded(tmp_path):
    import main
    fill(tmp_path, 'a/0.jpg', 'a/1.jpg', 'b/0.jpg', 'b/1.jpg')
    write(tmp_path / 'b' / '2.jpg', b'damaged')
    with pytest.raises(UserError, match='vgg16'):
        main.main(['--model_name', 'vgg16', '--input_size', '8', '--batch_size', '1', '--weights',
                   'none', '--dataset_name', 'folder:{}'.format(tmp_path), '--logs_dir',
                   str(tmp_path / 'logs')])


# --- names as people see them

@pytest.mark.parametrize('folder, name', [
    ('acer\u2028\x85\n\x1e\x0b palmatum', 'acer palmatum'), ('bell\x07', 'bell\\x07'),
    ('\tdaisy \xa0', 'daisy'), ('cafe\u0301', 'caf\xe9'), ('\ufeffdaisy', 'daisy'),
    ('\x1b[31mred', '\\x1b[31mred'), ('\u0645\u06cc\u200c\u062e', '\u0645\u06cc\u200c\u062e')])
def test_a_class_name_is_one_line_that_people_see(tmp_path, folder, name):
    fill(tmp_path, *['{}/{}.jpg'.format(each, i) for each in (folder, 'zebra') for i in range(5)])
    data = load_photos(tmp_path)
    assert sorted(data.class_names) == sorted([name, 'zebra']) and data.num_images == 8
    assert all(len(each.splitlines()) == 1 for each in data.class_names + tuple(data.test_names))


@pytest.mark.parametrize('train, test', [
    ('cat', 'CAT '), ('CAF\xc9', 'cafe\u0301'), ('stra\xdfe', 'STRASSE')])
def test_test_folders_match_training_folders_as_people_see_them(tmp_path, train, test):
    fill(tmp_path, *['train/{}/0.jpg'.format(name) for name in (train, 'dog')])
    fill(tmp_path, *['test/{}/0.jpg'.format(name) for name in (test, 'DOG')])
    _, test, notes = scanned(tmp_path)
    assert list(test.values()) == [1, 1] and not notes


def test_letters_in_both_cases_are_two_classes(tmp_path):
    fill(tmp_path, *['{}/{}/{}.jpg'.format(part, name, i) for part in ('train', 'test')
                     for name, count in (('A', 1), ('a', 2)) for i in range(count)])
    assert scanned(tmp_path)[:2] == [{'A': 1, 'a': 2}] * 2
    fill(tmp_path, 'test/\uff21/0.jpg')  # wider
    with pytest.raises(UserError, match="test class '\uff21' has no training images"):
        scanned(tmp_path)


@pytest.mark.parametrize('names, quoted', [
    (('caf\xe9', 'cafe\u0301'), r"'cafe\\u0301' and 'caf\\xe9' of .* look the same; rename one"),
    (('cat', 'cat '), "'cat' and 'cat '"), (('a\u2028b', 'a b'), r"'a b' and 'a\\u2028b'")])
def test_training_classes_that_look_the_same_are_refused(tmp_path, names, quoted):
    fill(tmp_path, *['{}/{}.jpg'.format(name, i) for name in names for i in range(2)])
    with pytest.raises(UserError, match=quoted) as error:
        scanned(tmp_path)
    assert len(str(error.value).splitlines()) == 1
