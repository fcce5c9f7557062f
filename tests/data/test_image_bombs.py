"""Tests that small files which would decode to gigabytes are refused by their header."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from elastic.data.photo import MOST_DECODED, fault_of
from image_folders import write
from small_runs import script

HUGE = 23000  # pixels; a square of it takes 1.6 GB as RGB
# Reads images; prints the fault of each, then the growth of the peak in bytes.
READ = '''
import sys
from elastic.data.photo import fault_of, readable_formats
from elastic.device.host import peak_bytes
readable_formats()
before = peak_bytes()
for path in sys.argv[1:]:
    print(fault_of(path, 32))
print(peak_bytes() - before)
'''


def png(width, height, *extra):
    """Returns a PNG whose header says width x height pixels. extra: (kind, content) of chunks."""
    def chunk(kind, content):
        return (struct.pack('>I', len(content)) + kind + content
                + struct.pack('>I', zlib.crc32(kind + content)))
    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + b''.join(chunk(*each) for each in ((b'IHDR', header),) + extra + (
        (b'IDAT', zlib.compress(bytes(1000))), (b'IEND', b'')))


def jpeg(size, **options):
    """Returns a JPEG whose header says size x size pixels."""
    content = io.BytesIO()
    Image.new('RGB', (64, 64), (9, 9, 9)).save(content, 'JPEG', **options)
    content = bytearray(content.getvalue())
    header = max(content.find(b'\xff\xc0'), content.find(b'\xff\xc2'))
    content[header + 5:header + 9] = struct.pack('>HH', size, size)
    return bytes(content)


def webp(size):
    """Returns an animated WebP of 4 x 4 pixels in a canvas of size x size."""
    content = io.BytesIO()
    images = [Image.new('RGB', (4, 4), (i, 9, 9)) for i in range(2)]
    images[0].save(content, 'WEBP', save_all=True, append_images=images[1:], lossless=True,
                   duration=100)
    content = bytearray(content.getvalue())
    canvas = content.find(b'VP8X') + 12
    content[canvas:canvas + 6] = 2 * struct.pack('<I', size - 1)[:3]
    return bytes(content)


def test_a_bomb_is_refused_in_little_memory(tmp_path):
    large = zlib.compress(bytes(10 ** 8), 9)
    attacks = {  # name -> (bytes, words that refuse it)
        'header.png': (png(HUGE, HUGE), 'pixels'),
        'text.png': (png(4, 4, (b'zTXt', b'a\0\0' + large)), 'no image, or damaged'),
        'canvas.webp': (webp(10000), 'pixels'), 'largest.jpg': (jpeg(65500), 'pixels'),
        'coefficients.jpg': (jpeg(12000, progressive=True), 'pixels')}
    for name, (content, _) in attacks.items():
        write(tmp_path / name, content)
        assert len(content) < 2 * 10 ** 6
    status, out, errors = script('-c', READ, *[str(tmp_path / name) for name in attacks])
    assert status == 0, errors
    *faults, grown = out.splitlines()
    for fault, (name, (_, words)) in zip(faults, attacks.items()):
        assert words in fault, (name, fault)
    assert int(grown) < 100 * 10 ** 6


def test_the_largest_photos_of_cameras_are_read(tmp_path):
    """A JPEG is decoded at a part of its size, and is then no larger than other images may be."""
    path = str(tmp_path / 'photo.jpg')
    Image.new('L', (12000, 9000)).save(path)
    assert np.prod(Image.open(path).size) > MOST_DECODED and fault_of(path, 224) is None


def test_other_formats_with_huge_headers_are_refused(tmp_path):
    """An icon holds a PNG, whose header counts, not what the icon says."""
    huge = png(HUGE, HUGE)
    attacks = {
        'a.ppm': b'P6 %d %d 255\n' % (HUGE, HUGE),
        'a.ico': struct.pack('<HHHBBBBHHII', 0, 1, 1, 0, 0, 0, 0, 1, 32, len(huge), 22) + huge}
    for name, content in attacks.items():
        write(tmp_path / name, content + bytes(100))
        assert 'pixels' in fault_of(str(tmp_path / name), 32), name


def test_what_may_run_a_program_is_not_opened(tmp_path):
    content = io.BytesIO()
    Image.new('RGB', (8, 8)).save(content, 'EPS')
    for name in ('a.eps', 'a.jpg', 'a'):
        write(tmp_path / name, content.getvalue())
        assert 'in a format that is not read' in fault_of(str(tmp_path / name), 8)
