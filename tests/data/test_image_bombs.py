"""Tests that no image takes more memory than its limit, measured in processes of their own."""

import io
import subprocess
import sys
import threading
import time

import numpy as np
import PIL
import pytest
from PIL import Image, ImageOps

from attack_images import attacks
from elastic.data import photo
from elastic.data.photo import Decoding, fault_of, read_image
from image_folders import write
from small_runs import ROOT

SLACK = 12 * 10 ** 6  # bytes that a first image costs beside its pixels: codecs, tables
# Reads each image, and prints the growth of the peak in bytes and its fault.
READ = '''
import io, sys
from PIL import Image
from elastic.data.photo import fault_of, readable_formats
from elastic.device.host import peak_bytes
readable_formats()
for path in sys.argv[1:]:
    before = peak_bytes()
    fault = fault_of(path, 32)
    print(peak_bytes() - before, fault)
'''


def read_in_a_process(*paths):
    """Returns [(bytes by which the peak memory grew, fault)] of reading each file in turn."""
    done = subprocess.run([sys.executable, '-c', READ] + list(map(str, paths)), cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=True,
                          universal_newlines=True)
    return [(int(line.split(' ', 1)[0]), line.split(' ', 1)[1])
            for line in done.stdout.splitlines()]


def test_an_attack_is_refused_or_its_first_frame_read_in_little_memory(tmp_path):
    files = attacks()
    for name, (content, _) in files.items():
        write(tmp_path / name, content)
        assert len(content) < 2 * 10 ** 6
    grown = 0
    for (name, (_, words)), (size, fault) in zip(
            files.items(), read_in_a_process(*[tmp_path / name for name in files])):
        assert fault == 'None' if words is None else words in fault, (name, fault)
        grown += size
    assert grown < 100 * 10 ** 6  # Pillow allows texts of 64 MB in a PNG


SIDE = 1600  # pixels


@pytest.mark.parametrize('mode, kind, options', [
    ('RGB', 'PNG', {}), ('RGBA', 'PNG', {}), ('L', 'PNG', {}), ('P', 'GIF', {}),
    ('RGB', 'BMP', {}), ('CMYK', 'TIFF', {'compression': 'tiff_lzw'}), ('RGB', 'TIFF', {}),
    ('RGB', 'JPEG', {}), ('RGB', 'JPEG', {'progressive': True, 'subsampling': 0}),
    ('CMYK', 'JPEG', {'progressive': True}), ('RGB', 'WEBP', {}), ('RGBA', 'WEBP', {}),
    ('RGB', 'WEBP', {'lossless': True, 'method': 0}),
    ('RGBA', 'AVIF', {'speed': 10, 'subsampling': '4:4:4'})])
@pytest.mark.thorough
def test_decoding_takes_no_more_memory_than_estimated(tmp_path, mode, kind, options):
    """The image is turned, where its format says so: that takes one more copy."""
    if kind not in photo.readable_formats():
        pytest.skip('this Pillow does not read {}'.format(kind))
    coarse = np.random.RandomState(0).randint(0, 256, (SIDE // 8, SIDE // 8, 4), np.uint8)
    image = Image.fromarray(coarse, 'RGBA').convert('RGB').convert(mode).resize((SIDE, SIDE))
    exif, path = Image.Exif(), tmp_path / 'image'
    exif[photo.ORIENTATION] = 6
    if kind not in ('BMP', 'GIF'):
        options = dict(options, exif=exif.tobytes())
    image.save(str(path), kind, **options)
    with open(str(path), 'rb') as file:
        _, estimate = photo._opened(file, 32)
    (grown, fault), = read_in_a_process(path)
    assert fault == 'None' and grown < estimate + SLACK + 2 * path.stat().st_size


def test_the_largest_images_of_cameras_are_read():
    """A JPEG of one scan is decoded in part: its size does not matter."""
    def estimate(width, height, **options):
        content = io.BytesIO()
        Image.new('L', (width, height)).save(content, 'JPEG', **options)
        content.seek(0)
        return photo._opened(content, 224)[1]
    assert estimate(12000, 9000) < photo.SMALL
    assert estimate(12000, 9000, progressive=True) > photo.SMALL


def test_images_decoded_at_once_share_a_part_of_the_memory():
    decoding, lock, taken, most = Decoding(lambda: 10 ** 9), threading.Lock(), [0], []

    def decode(size):
        with decoding.taking(size):
            with lock:
                taken[0] += size
                most.append((taken[0], size))
            time.sleep(0.01)
            with lock:
                taken[0] -= size
    sizes = [7 * 10 ** 7, 15 * 10 ** 7, 39 * 10 ** 7, 80 * 10 ** 7] * 4
    threads = [threading.Thread(target=decode, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == len(sizes)
    share = photo.MEMORY_SHARE * 10 ** 9
    assert all(total <= share or total == size for total, size in most)
    assert max(total for total, size in most if total != size) > 0.5 * share  # several at once


def test_an_image_that_does_not_fit_in_memory_is_refused():
    decoding = Decoding(lambda: 10 ** 8)
    with pytest.raises(ValueError, match='takes 101 MB of memory, 100 are available'):
        with decoding.taking(101 * 10 ** 6):
            pytest.fail('decoded')
    with decoding.taking(99 * 10 ** 6):  # nothing is taken any more
        pass


@pytest.mark.parametrize('content', [b'II*\0', b'II+\0' + bytes(20), b'MM\0*\xff\xff\xff\xff',
                                     b'II*\0\x08\0\0\0\xff\xff'])
def test_a_header_that_ends_too_early_is_one_line(content, tmp_path):
    path = tmp_path / 'image.tif'
    path.write_bytes(content)
    for size in (None, 32):
        assert '\n' not in fault_of(str(path), size)


def test_an_upright_image_without_a_copy_has_the_same_pixels(tmp_path):
    """A raw TIFF that lies on its side is read as noise by Pillow 13 if opened by its name."""
    kinds = (('a.png', {}), ('a.tif', {}), ('b.tif', {'compression': 'tiff_lzw'}))
    if int(PIL.__version__.split('.')[0]) < 9:
        kinds = kinds[:1]  # it writes no orientation into a TIFF
    pixels = np.random.RandomState(0).randint(0, 256, (20, 30, 4), np.uint8)
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[photo.ORIENTATION] = turn
        found = []
        for name, options in kinds:
            Image.fromarray(pixels, 'RGBA').save(str(tmp_path / name), exif=exif.tobytes(),
                                                 **options)
            found.append(read_image(str(tmp_path / name), 16))
        turned = ImageOps.exif_transpose(Image.open(str(tmp_path / 'a.png'))).convert('RGB')
        expected = np.asarray(turned.resize((16, 16), Image.BILINEAR))
        assert all(np.array_equal(image, expected) for image in found)
