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
# Reads each image, and prints the growth of the peak in bytes and its fault.
READ = '''
import sys
from elastic.data.photo import fault_of, readable_formats
from elastic.device.host import peak_bytes
readable_formats()
for path in sys.argv[1:]:
    before = peak_bytes()
    fault = fault_of(path, 32)
    print(peak_bytes() - before, fault)
'''


def png(width, height, *extra):
    """Returns a PNG whose header says width x height pixels. extra: (kind, content) of chunks."""
    def chunk(kind, content):
        return (struct.pack('>I', len(content)) + kind + content
                + struct.pack('>I', zlib.crc32(kind + content)))
    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + b''.join(chunk(*each) for each in ((b'IHDR', header),) + extra + (
        (b'IDAT', zlib.compress(bytes(1000))), (b'IEND', b'')))


def gif(*frames):
    """Returns a GIF of 4 x 4 pixels, then of frames with these sizes."""
    content = io.BytesIO()
    Image.new('P', (4, 4)).save(content, 'GIF')
    return content.getvalue()[:-1] + b''.join(
        b',' + struct.pack('<HHHHB', 0, 0, width, height, 0) + b'\x02\x02\x44\x01\0'
        for width, height in frames) + b';'


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


def test_a_bomb_is_refused_or_its_first_frame_read_in_little_memory(tmp_path):
    large = zlib.compress(bytes(10 ** 8), 9)
    attacks = {  # name -> (bytes, words that refuse it; 'None' if its first frame is read)
        'header.png': (png(HUGE, HUGE), 'pixels'),
        'one_row.png': (png(10 ** 8 + 1, 1), 'pixels'),
        'text.png': (png(4, 4, (b'zTXt', b'a\0\0' + large)), 'no image, or damaged'),
        'profile.png': (png(4, 4, (b'iCCP', b'a\0\0' + large)), 'no image, or damaged'),
        'later_frames.gif': (gif((65535, 65535), (65535, 65535)), 'None'),
        'canvas.webp': (webp(10000), 'pixels'), 'largest_canvas.webp': (webp(16383), 'pixels'),
        'largest.jpg': (jpeg(65500), 'pixels'),
        'coefficients.jpg': (jpeg(12000, progressive=True), 'pixels')}
    for name, (content, _) in attacks.items():
        write(tmp_path / name, content)
        assert len(content) < 2 * 10 ** 6
    status, out, errors = script('-c', READ, *[str(tmp_path / name) for name in attacks])
    grown = 0
    assert status == 0, errors
    for line, (name, (_, words)) in zip(out.splitlines(), attacks.items()):
        size, fault = line.split(' ', 1)
        assert words in fault, (name, fault)
        grown += int(size)
    assert grown < 100 * 10 ** 6


def test_the_largest_photos_of_cameras_are_read(tmp_path):
    """A JPEG is decoded at a part of its size, and is then no larger than other images may be."""
    path = str(tmp_path / 'photo.jpg')
    Image.new('L', (12000, 9000)).save(path)
    assert np.prod(Image.open(path).size) > MOST_DECODED and fault_of(path, 224) is None


def test_other_formats_with_huge_headers_are_refused(tmp_path):
    """An icon holds a PNG, whose header counts, not what the icon says."""
    huge, j2k = png(HUGE, HUGE), io.BytesIO()
    Image.new('RGB', (64, 64)).save(j2k, 'JPEG2000')
    j2k = bytearray(j2k.getvalue())
    del j2k[:j2k.find(b'\xff\x4f')]  # the box around the codestream
    sizes = j2k.find(b'\xff\x51') + 6
    j2k[sizes:sizes + 8] = struct.pack('>II', HUGE, HUGE)
    attacks = {
        'a.ppm': b'P6 %d %d 255\n' % (HUGE, HUGE), 'a.j2k': bytes(j2k),
        'a.tga': struct.pack('<BBBHHBHHHHBB', 0, 0, 2, 0, 0, 0, 0, 0, HUGE, HUGE, 24, 0),
        'a.psd': b'8BPS' + struct.pack('>H6sHIIHH', 1, bytes(6), 3, HUGE, HUGE, 8, 3) + bytes(12),
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
