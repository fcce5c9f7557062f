"""Reads one image file, as Pillow shows it."""

import functools
import warnings

import numpy as np

from elastic.command_line import UserError

# Formats that are read. Pillow knows more, of which some run programs of their own.
FORMATS = ('JPEG', 'PNG', 'BMP', 'GIF', 'WEBP', 'TIFF', 'AVIF')
MOST_PIXELS = 10 ** 8  # of an image, which takes 300 MB when decoded
DEEP_MODES = ('I', 'F')  # beginnings of Pillow's modes with more than 8 bits per channel


def read_image(path, input_size):
    """Returns the image at `path`, resized to (S, S, 3) uint8.

    Turns a photo upright by its EXIF orientation, repeats a grey channel, drops transparency, and
    takes the first frame of an animation. Raises ValueError in one line for a file that is no such
    image, is damaged or too large, or has more than 8 bits per channel in one channel.
    """
    from PIL import Image, ImageOps
    try:
        with _opened(path) as image:
            # Decodes a large JPEG at a half, a quarter or an eighth of its size.
            image.draft('RGB', (2 * input_size, 2 * input_size))
            image = ImageOps.exif_transpose(image).convert('RGB')
            return np.asarray(image.resize((input_size, input_size), Image.BILINEAR))
    except ValueError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types
        raise ValueError(' '.join('{}'.format(error).split()) or type(error).__name__)


def fault_of(path, input_size=None):
    """Returns one line on why the image cannot be read, None if it can.

    input_size: as in read_image; None checks the header alone.
    """
    try:
        if input_size is None:
            _opened(path).close()
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


def unreadable(path, reason):
    """Returns the UserError for a file that cannot be read."""
    return UserError("cannot read image '{}': {}; repair or remove it, or use --skip_bad_images"
                     .format(path, reason))


def _opened(path):
    """Returns Pillow's image of the file, of which only the header was read."""
    from PIL import Image
    try:
        image = Image.open(path, formats=readable_formats())
    except Image.DecompressionBombError as error:
        raise ValueError(str(error))
    except Exception:
        raise ValueError('no image, or damaged; readable are {}'.format(
            ', '.join(readable_formats())))
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError('{:,} x {:,} pixels, {:,} at most'.format(width, height, MOST_PIXELS))
    if image.mode.startswith(DEEP_MODES):
        raise ValueError('more than 8 bits per pixel in one channel: convert it to 8 bits, so that '
                         'you choose what becomes black and white')
    return image


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
