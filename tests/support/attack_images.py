"""Makes small files that a careless decoder turns into gigabytes, or into hours."""

import io
import struct
import zlib

from PIL import Image

HUGE = 23000  # pixels; a square of it takes 1.6 GB as RGB


def chunk(kind, content, good=True):
    """Returns a chunk of a PNG. good: whether its checksum is right."""
    return (struct.pack('>I', len(content)) + kind + content
            + struct.pack('>I', zlib.crc32(kind + content) ^ (not good)))


def png(width, height, *extra, data=None, good=True):
    """Returns an RGB PNG. extra: chunks before the pixels. data: compressed pixels, else black."""
    if data is None:
        data = zlib.compress(bytes((3 * width + 1) * height))
    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    return b''.join((b'\x89PNG\r\n\x1a\n', chunk(b'IHDR', header, good)) + extra + (
        chunk(b'IDAT', data), chunk(b'IEND', b'')))


def gif(*frames):
    """Returns a GIF of 4 x 4 pixels, then of frames with these sizes."""
    content = io.BytesIO()
    Image.new('P', (4, 4)).save(content, 'GIF')
    return content.getvalue()[:-1] + b''.join(
        b',' + struct.pack('<HHHHB', 0, 0, width, height, 0) + b'\x02\x02\x44\x01\0'
        for width, height in frames) + b';'


def apng():
    def frame(number, width, height):
        return chunk(b'fcTL', struct.pack('>IIIIIHHBB', number, width, height, 0, 0, 1, 1, 0, 0))
    more = [chunk(b'fdAT', struct.pack('>I', 2) + zlib.compress(bytes(10 ** 6)))]
    head, tail = png(4, 4, chunk(b'acTL', struct.pack('>II', 2, 0)), frame(0, 4, 4)), -12
    return head[:tail] + frame(1, HUGE, HUGE) + b''.join(more) + head[tail:]


def jpeg(size, scans=0, **options):
    """Returns a JPEG whose header says size x size pixels, with additional scans."""
    content = io.BytesIO()
    Image.new('RGB', (64, 64), (9, 9, 9)).save(content, 'JPEG', **options)
    content = bytearray(content.getvalue())
    header = max(content.find(b'\xff\xc0'), content.find(b'\xff\xc2'))
    content[header + 5:header + 9] = struct.pack('>HH', size, size)
    first = content.find(b'\xff\xda')
    second = content.find(b'\xff\xda', first + 1)
    third = content.find(b'\xff\xda', second + 1)
    return bytes(content[:third] + content[second:third] * scans + content[third:])


def webp(size, frames=2):
    """Returns an animated WebP of 4 x 4 pixels in a canvas of size x size."""
    content = io.BytesIO()
    images = [Image.new('RGB', (4, 4), (i, 9, 9)) for i in range(frames)]
    images[0].save(content, 'WEBP', save_all=True, append_images=images[1:], lossless=True,
                   duration=100)
    content = bytearray(content.getvalue())
    canvas = content.find(b'VP8X') + 12
    content[canvas:canvas + 6] = 2 * struct.pack('<I', size - 1)[:3]
    return bytes(content)


def tiff(size, pixels, *entries, compression=8):
    """Returns an RGB TIFF of size x size. pixels: as stored. entries: (tag, LONG), also twice.

    The value DATA is the place of `pixels`.
    """
    entries = [(256, size), (257, size), (259, compression), (262, 2), (277, 3)] + list(entries)
    table = b''.join(struct.pack('<HHII', tag, 4, 1, 8 if value == 'DATA' else value)
                     for tag, value in sorted(entries, key=lambda entry: entry[0]))
    bits = struct.pack('<HHII', 258, 3, 3, 8 + len(pixels))
    table = table[:24] + bits + table[24:]
    return (b'II*\0' + struct.pack('<I', 16 + len(pixels)) + pixels
            + struct.pack('<HHHH', 8, 8, 8, 0) + struct.pack('<H', len(entries) + 1) + table
            + bytes(4))


def tiled(*sides):
    """Returns a TIFF of 64 x 64 pixels with a tile of the largest of `sides`, given in turn."""
    content = zlib.compress(bytes(10 ** 6))
    return tiff(64, content, *[(tag, side) for side in sides for tag in (322, 323)] + [
        (324, 'DATA'), (325, len(content))])


def striped(size, rows, bytes_in_strip, compression=8):
    content = bytes(3 * size * size)
    content = zlib.compress(content) if compression == 8 else content
    return tiff(size, content, (273, 'DATA'), (278, rows), (279, bytes_in_strip or len(content)),
                compression=compression)


def attacks():
    """Returns name -> (bytes, words that refuse it; None if its first frame is read)."""
    bytes_of = zlib.compress(bytes(10 ** 6))
    text = zlib.compress(bytes(10 ** 6 - 99), 9)
    return {
        'bad_checksum.png': (png(HUGE, HUGE, data=bytes_of, good=False), 'no image, or damaged'),
        'header.png': (png(HUGE, HUGE, data=bytes_of), 'pixels'),
        'one_text.png': (png(4, 4, chunk(b'zTXt', b'a\0\0' + zlib.compress(bytes(10 ** 8), 9))),
                         'no image, or damaged'),
        'many_texts.png': (png(4, 4, *[chunk(b'iTXt', b'a%d\0\1\0\0\0' % i + text)
                                       for i in range(200)]), 'no image, or damaged'),
        'profile.png': (png(4, 4, chunk(b'iCCP', b'a\0\0' + zlib.compress(bytes(10 ** 8), 9))),
                        'no image, or damaged'),
        'exif.png': (png(4, 4, chunk(b'eXIf', b'MM\0*\0\0\0\x08' + struct.pack('>H', 60000)
                                     + struct.pack('>HHII', 0x112, 3, 2 ** 31 - 1, 8) * 60000)),
                     None),
        'later_frames.gif': (gif((65535, 65535), (65535, 65535)), None),
        'later_frame.apng': (apng(), None),
        'canvas.webp': (webp(10000), 'pixels'),
        'largest_canvas.webp': (webp(16383), 'pixels'),
        'largest.jpg': (jpeg(65500), 'pixels'),
        'largest_progressive.jpg': (jpeg(65500, progressive=True), 'pixels'),
        'coefficients.jpg': (jpeg(12000, progressive=True), 'pixels'),
        'scans.jpg': (jpeg(2000, 2000, progressive=True), '2,010 scans, 100 at most'),
        'tile.tif': (tiled(HUGE), '64 x 64 pixels, which take'),
        'tile_first.tif': (tiled(HUGE, 64), '64 x 64 pixels, which take'),
        'tile_second.tif': (tiled(64, HUGE), '64 x 64 pixels, which take'),
        'strip.tif': (striped(64, 2 ** 31 - 1, 2 ** 32 - 1), '-2'),
        'strip_of_bytes.tif': (striped(64, 64, 2 ** 32 - 1, 1), None)}
