"""Reads one image file, as Pillow shows it, in a bounded amount of memory."""

import contextlib
import functools
import io
import os
import re
import struct
import threading
import warnings

import numpy as np

from elastic.command_line import UserError
from elastic.device.host import MEMORY_SHARE, available_bytes

# Formats that are read. Pillow knows more, of which some run programs of their own.
FORMATS = ('JPEG', 'PNG', 'BMP', 'GIF', 'WEBP', 'TIFF', 'AVIF')
DEEP_MODES = ('I', 'F')  # beginnings of Pillow's modes with more than 8 bits per channel
ORIENTATION = 0x112  # in EXIF; 2 to 8 are mirrored or turned
TILE_SIDES = 322, 323  # tags of TIFF
TIFF_NUMBERS = {1: 'B', 3: 'H', 4: 'I', 16: 'Q'}  # type of a tag's value -> its struct format

MOST_BYTES = 800 * 10 ** 6  # of memory to decode one image, as estimated from its header
# The largest that were measured (tests/data/test_image_bombs.py). Pillow keeps a pixel in 4 bytes,
# twice while it converts; the decoders of WebP and AVIF have copies of their own.
BYTES_PER_PIXEL = {'WEBP': 17, 'AVIF': 15}
MOST_SCANS = 100  # passes over a JPEG; each takes as long as a whole image, cameras write up to 10
OF_TENSORFLOW = ('JPEG', 'PNG', 'BMP', 'GIF', 'WEBP')  # formats in its records
MOST_PIXELS_FOR_TENSORFLOW = 25 * 10 ** 6  # it takes up to 15 bytes for each
SMALL = 64 * 10 ** 6  # bytes of memory; smaller images do not wait for each other


def read_image(path, input_size):
    """Returns the image at `path`, resized to (S, S, 3) uint8.

    Turns a photo upright by its EXIF orientation, repeats a grey channel, drops transparency, and
    takes the first frame of an animation. Raises ValueError in one line for a file that is no such
    image, is damaged or too large, or has more than 8 bits per channel in one channel.
    """
    from PIL import Image
    with _file(path) as file:
        image, taken = _opened(file, input_size)
        with _DECODING.taking(taken):
            image = _upright(image)
            if image.mode != 'RGB':
                image = image.convert('RGB')
            return np.asarray(image.resize((input_size, input_size), Image.BILINEAR))


def fault_of(path, input_size=None):
    """Returns one line on why the image cannot be read, None if it can.

    input_size: as in read_image; None checks the header alone.
    """
    try:
        if input_size is None:
            with _file(path) as file:
                _opened(file)
        else:
            read_image(path, input_size)
    except ValueError as error:
        return str(error)


def first_fault(files, input_size=None):
    """Returns (path, reason) of the first image that cannot be read; None if all can be read.

    input_size: as in fault_of.
    """
    faults = ((path, fault_of(path, input_size)) for path in files)
    return next((fault for fault in faults if fault[1] is not None), None)


def fault_for_tensorflow(content):
    """Returns one line on why TensorFlow shall not decode an image, by its header; None if it may.

    content: of the file. TensorFlow decodes whole images, several at once, and all frames of a GIF.
    """
    file = io.BytesIO(content)
    try:
        image = _pillow_image(file, [name for name in OF_TENSORFLOW if name in readable_formats()])
        _coefficient_bytes(image, file)
    except ValueError as error:
        return str(error)
    if image.format == 'WEBP' and getattr(image, 'is_animated', False):
        return 'an animated WebP, which ends the process of TensorFlow'
    pixels = image.size[0] * image.size[1]
    if image.format == 'GIF':
        pixels = max(pixels, _gif_pixels(content))
    return None if pixels <= MOST_PIXELS_FOR_TENSORFLOW else (
        '{:,} pixels in all its frames, {:,} at most'.format(pixels, MOST_PIXELS_FOR_TENSORFLOW))


def _gif_pixels(content):
    """Returns the sum of the pixels of all frames of a GIF, which may exceed its own size."""
    def colours(flags):
        return 3 * 2 ** (flags % 8 + 1) if flags & 0x80 else 0
    content, pixels = content + bytes(16), 0  # it may be cut short
    at = 13 + colours(content[10])
    while at < len(content) - 16 and content[at] in b',!':
        if content[at:at + 1] == b',':
            pixels += int.from_bytes(content[at + 5:at + 7], 'little') * int.from_bytes(
                content[at + 7:at + 9], 'little')
            at += 11 + colours(content[at + 9])
        else:
            at += 2
        while at < len(content) and content[at]:  # blocks, each after its length
            at += content[at] + 1
        at += 1
    return pixels


def unreadable(path, reason):
    """Returns the UserError for a file that cannot be read."""
    return UserError("cannot read image '{}': {}; repair or remove it, or use --skip_bad_images"
                     .format(path, reason))


class Decoding:
    """Bounds the memory of all images that are decoded at once by a share of what is available.

    One image alone may take more, up to all that is available.
    """

    def __init__(self, available):
        """available: () -> bytes."""
        self._available, self._used, self._changed = available, 0, threading.Condition()

    @contextlib.contextmanager
    def taking(self, size):
        """Waits for `size` bytes and takes them within this context.

        Raises ValueError if nobody else decodes and they are not available.
        """
        if size <= SMALL:
            yield
            return
        with self._changed:
            while self._used and self._used + size > MEMORY_SHARE * self._available():
                self._changed.wait()
            available = self._available()
            if size > available:
                raise ValueError('decoding it takes {:,} MB of memory, {:,} are available'.format(
                    size // 10 ** 6, available // 10 ** 6))
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


_DECODING = Decoding(available_bytes)


@contextlib.contextmanager
def _file(path):
    """Yields the open file; raises ValueError in one line for any error within this context."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError('a pipe, device or folder, not a file')
        with open(path, 'rb') as file:
            yield file
    except ValueError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types, also OSError(-2)
        text = getattr(error, 'strerror', None) or ' '.join(str(error).split())
        raise ValueError(text if re.search('[a-z]', text) else 'damaged ({} {})'.format(
            type(error).__name__, text))


def _opened(file, input_size=1):
    """Returns (Pillow's image, of which only the header was read; bytes that decoding takes)."""
    image = _pillow_image(file, readable_formats())
    width, height = image.size
    size = _coefficient_bytes(image, file)
    # Decodes a large JPEG at a half, a quarter or an eighth of its size.
    image.draft('RGB', (2 * input_size, 2 * input_size))
    size += max(image.size[0] * image.size[1], _tile_pixels(image, file)) * (
        BYTES_PER_PIXEL.get(image.format, 8))
    if size > MOST_BYTES:
        raise ValueError('{:,} x {:,} pixels, which take {:,} MB to decode; {:,} at most'.format(
            width, height, size // 10 ** 6, MOST_BYTES // 10 ** 6))
    if image.mode.startswith(DEEP_MODES):
        raise ValueError('more than 8 bits per pixel in one channel: convert it to 8 bits, so that '
                         'you choose what becomes black and white')
    return image, size


def _pillow_image(file, formats):
    from PIL import Image
    try:
        return Image.open(file, formats=formats)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error))
    except Exception:
        raise ValueError('no image, or damaged; readable are {}'.format(', '.join(formats)))


def _coefficient_bytes(image, file):
    """Returns the bytes of the coefficients that a JPEG of several scans keeps, else 0.

    file: as Pillow leaves it, after the header of the first scan. Raises ValueError if there are so
    many scans that decoding might take hours.
    """
    if image.format not in ('JPEG', 'MPO'):  # MPO: several JPEGs in a row, the first is read
        return 0
    channels = image.layers
    file.seek(max(0, file.tell() - 8 - 2 * channels))
    all_channels = b'\xff\xda\0' + bytes([6 + 2 * channels, channels])  # header of a scan
    if 'progressive' not in image.info and file.read(5) == all_channels:
        return 0  # a single scan
    file.seek(0)
    scans = file.read().count(b'\xff\xda')
    if scans > MOST_SCANS:
        raise ValueError('{:,} scans, {} at most'.format(scans, MOST_SCANS))
    return 2 * channels * image.size[0] * image.size[1]


def _tile_pixels(image, file):
    """Returns the pixels of a tile of a TIFF, which may be larger than the image; else 0.

    Reads the file itself: where a tag comes twice, Pillow and the decoder may use different ones.
    """
    if image.format != 'TIFF':
        return 0
    file.seek(0)
    head = file.read(16).ljust(16, b'\0')
    order, big = '<' if head[:2] == b'II' else '>', 43 in head[2:4]
    at, count, step, value = ('8xQ', 'Q', 20, 12) if big else ('4xI', 'H', 12, 8)
    file.seek(struct.unpack_from(order + at, head)[0])
    entries, = struct.unpack(order + count, file.read(struct.calcsize(count)))
    sides = dict.fromkeys(TILE_SIDES, 0)
    for _ in range(min(entries, 2 ** 16)):
        entry = file.read(step).ljust(step, b'\0')
        tag, kind = struct.unpack_from(order + 'HH', entry)
        if tag in sides:
            side, = struct.unpack_from(order + TIFF_NUMBERS.get(kind, 'I'), entry, value)
            sides[tag] = max(sides[tag], side)
    return sides[TILE_SIDES[0]] * sides[TILE_SIDES[1]]


def _upright(image):
    """Returns the image as its EXIF orientation says, without a copy if it is upright."""
    from PIL import ImageOps
    turned = image.getexif().get(ORIENTATION) in range(2, 9)
    return ImageOps.exif_transpose(image) if turned else image


@functools.lru_cache()
def readable_formats():
    """Returns those of FORMATS that this Pillow reads."""
    from PIL import Image
    Image.init()
    # _opened has a limit of its own, and a warning would interrupt the progress bar.
    warnings.simplefilter('ignore', Image.DecompressionBombWarning)
    return tuple(name for name in FORMATS if name in Image.OPEN)


@functools.lru_cache()
def extensions():
    """Returns the file name extensions of readable_formats, a frozenset, in lower case."""
    from PIL import Image
    formats = readable_formats()  # first: it makes Pillow know its extensions
    return frozenset(extension for extension, name in Image.registered_extensions().items()
                     if name in formats)
