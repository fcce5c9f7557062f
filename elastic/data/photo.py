"""Reads one image file, as Pillow shows it. Huge images are refused by their header."""

import contextlib
import functools
import os
import re
import warnings

import numpy as np

from elastic.errors import UserError
from elastic.files import printable

# Formats of Pillow that are not read. EPS runs Ghostscript, IPTC may hold EPS. FITS may inflate.
# BLP takes many times its size. Pillow recognises the others, but cannot read them.
NOT_READ = ('EPS', 'IPTC', 'FITS', 'BLP', 'BUFR', 'GRIB', 'HDF5', 'MPEG', 'WMF')
NO_IMAGE = 'no image, or damaged, or in a format that is not read'
DEEP_MODES = ('I', 'F')  # beginnings of Pillow's modes with more than 8 bits per channel
ORIENTATION = 0x112  # in EXIF; 2 to 8 are mirrored or turned

MOST_PIXELS = 110 * 10 ** 6  # by the header: the largest photos of telephones
# Of what is decoded: a JPEG is decoded at an eighth of its size at least. Pillow takes up to 8
# bytes for a pixel, 17 for one of WebP, 25 for one of JPEG 2000: 1.25 GB at most.
MOST_DECODED = 50 * 10 ** 6


def images_among(files, left_out):
    """Returns the paths that are images; counts the others in left_out, a Counter."""
    reasons = [_why_left_out(file) for file in files]
    left_out.update(filter(None, reasons))
    return [file for file, reason in zip(files, reasons) if reason is None]


def left_out_note(left_out):
    """Returns the line that says what was left out, and why. left_out: (kind, why) -> number."""
    return 'left out: ' + ', '.join('{:,} {} ({})'.format(count, *reason)
                                    for reason, count in left_out.most_common())


def _why_left_out(path):
    """Returns None for an image; else its kind, and why it is none.

    This is the one rule of what an image is: a file with the extension or the content of a format
    in readable_formats. It may be damaged, or too large.
    """
    from PIL import Image
    if not os.path.isfile(path):  # it might never end
        return 'pipe, device or broken link', 'not a file'
    formats = readable_formats()  # first: it makes Pillow know its extensions
    extension = os.path.splitext(path)[1].lower()
    known = Image.registered_extensions().get(extension)
    if known in formats or fault_of(path) != NO_IMAGE:
        return None
    return printable(extension) or 'without extension', (
        '{} is not read'.format(known) if known in NOT_READ else 'not an image that Pillow reads')


def read_image(path, input_size):
    """Returns the image at `path`, resized to (S, S, 3) uint8.

    Turns a photo upright by its EXIF orientation, repeats a grey channel, drops transparency, and
    takes the first frame of an animation. Raises ValueError in one line for a file that is no such
    image, is damaged or too large, or has more than 8 bits per channel in one channel.
    """
    from PIL import Image, ImageOps
    with _opened(path, input_size) as image:
        if image.getexif().get(ORIENTATION) in range(2, 9):
            image = ImageOps.exif_transpose(image)
        if image.mode != 'RGB':
            image = image.convert('RGB')
        return np.asarray(image.resize((input_size, input_size), Image.BILINEAR))


def fault_of(path, input_size=None):
    """Returns one line on why the image cannot be read, None if it can.

    input_size: as in read_image; None checks the header alone.
    """
    try:
        if input_size is None:
            with _opened(path):
                pass
        else:
            read_image(path, input_size)
    except ValueError as error:
        return str(error)


def first_fault(files, input_size=None):
    """Returns (path, reason) of the first image that cannot be read; None if all can be read.

    files: paths; None, for an image without one, is passed over. input_size: as in fault_of.
    """
    for path in files:
        fault = None if path is None else fault_of(path, input_size)
        if fault is not None:
            return path, fault
    return None


def check_readable(files, input_size=None):
    """Raises UserError for the first image that cannot be read; arguments as in first_fault."""
    fault = first_fault(files, input_size)
    if fault is not None:
        raise UserError("cannot read image '{}': {}; repair or remove it, or use "
                        '--skip_bad_images'.format(printable(fault[0]), fault[1]))


@contextlib.contextmanager
def _opened(path, input_size=1):
    """Yields Pillow's image, of which only the header was read.

    Raises ValueError in one line if it is refused, and for any error within this context.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError('a pipe, device or folder, not a file')
        with open(path, 'rb') as file:
            image = _pillow_image(file)
            # Decodes a large JPEG at a half, a quarter or an eighth of its size.
            image.draft('RGB', (2 * input_size, 2 * input_size))
            if image.size[0] * image.size[1] > MOST_DECODED:
                raise ValueError('{:,} x {:,} pixels, {:,} at most'.format(
                    *image.size + (MOST_DECODED,)))
            if image.mode.startswith(DEEP_MODES):
                raise ValueError('more than 8 bits per pixel in one channel: convert it to 8 bits, '
                                 'so that you choose what becomes black and white')
            yield image
    except ValueError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types, also OSError(-2)
        text = getattr(error, 'strerror', None) or ' '.join(str(error).split())
        raise ValueError(text if re.search('[a-z]', text) else 'damaged ({} {})'.format(
            type(error).__name__, text))


def _pillow_image(file):
    from PIL import Image
    try:
        return Image.open(file, formats=readable_formats())
    except Image.DecompressionBombError as error:
        raise ValueError(str(error))
    except Exception:
        raise ValueError(NO_IMAGE)


@functools.lru_cache()
def readable_formats():
    """Returns the formats that are read, guessed ones last, and sets Pillow's limit on pixels."""
    from PIL import Image
    Image.init()
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2  # Pillow warns above this, and refuses above twice
    warnings.simplefilter('ignore', Image.DecompressionBombWarning)
    return tuple(sorted(set(Image.OPEN).difference(NOT_READ),
                        key=lambda name: (Image.OPEN[name][1] is None, name)))
