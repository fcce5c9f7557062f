"""Turns images into what a LiteRT file takes, and its scores into probabilities.

Files of other tools differ: channels first, oblong or grey images, integers, logits.
"""

import numpy as np

from elastic.errors import UserError

PASSED_ON = ('DEQUANTIZE', 'QUANTIZE', 'RESHAPE', 'SQUEEZE', 'CAST')  # ops that keep scores


def layout_of(shape):
    """Returns (height, width, channels, whether these come first) of an input; -1: any size."""
    sizes = [int(size) for size in shape[1:]] + [1] * (len(shape) == 3)  # grey, without its axis
    if len(sizes) == 3 and sizes[2] in (1, 3):
        return tuple(sizes) + (False,)
    if len(sizes) == 3 and sizes[0] in (1, 3):
        return sizes[1], sizes[2], sizes[0], True
    raise UserError('it takes arrays of {}, not images'.format('x'.join(map(str, shape))))


def arranged(image, height, width, channels, first):
    """Returns an (S, S, 3) float32 image in a layout: (H, W, C) or, with `first`, (C, H, W)."""
    shape = [len(image) if size < 0 else size for size in (height, width)] + [channels]
    if list(image.shape) != shape:
        from PIL import Image
        image = Image.fromarray(np.uint8(np.rint(image))).convert('L' if channels == 1 else 'RGB')
        image = np.float32(image.resize(shape[1::-1], Image.BILINEAR)).reshape(shape)
    return image.transpose(2, 0, 1) if first else image


def as_input(image, kind, scale, zero):
    """Returns an image of values 0 to 255 as the numbers that an input of this dtype takes.

    scale, zero: value = scale * (number - zero); scale 0: numbers are values. The values that
    integers can stand for show whether the network takes 0 to 255, 0 to 1, or -1 to 1.
    """
    if not np.issubdtype(kind, np.integer) or not scale:
        return (image - 128 if kind == np.int8 else image).astype(kind)
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    low, high = scale * (least - zero), scale * (most - zero)
    centred = abs(low + high) < 0.1 * high
    if low < -0.1 * high and not centred:
        raise UserError('the file takes values of {:.3g} to {:.3g}, and not 0 to 255, 0 to 1, or '
                        '-1 to 1: convert it with its preprocessing inside'.format(low, high))
    if high < 2:
        image = image / 127.5 - 1 if centred else image / 255
    return np.clip(np.rint(image / scale + zero), least, most).astype(kind)


def maker_of(tensor, ops):
    """Returns the name of the op that made the scores in this tensor, by its number; else None.

    ops: of the interpreter's _get_ops_details.
    """
    makers = {output: op for op in ops if op['op_name'] != 'DELEGATE' for output in op['outputs']}
    while tensor in makers and makers[tensor]['op_name'] in PASSED_ON:
        tensor = makers[tensor]['inputs'][0]
    return makers[tensor]['op_name'] if tensor in makers else None


def as_probabilities(scores, maker):
    """Returns (B, C) float32 scores as probabilities; those of a sigmoid stay. maker: of maker_of.

    A single score is that of the second of two classes.
    """
    if scores.shape[1] == 1:
        scores = np.hstack([1 - scores if maker == 'LOGISTIC' else 0 * scores, scores])
    if maker in ('SOFTMAX', 'LOGISTIC') or (
            scores.min() >= 0 and np.allclose(scores.sum(axis=1), 1, atol=1e-3)):
        return scores
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))  # also of LOG_SOFTMAX
    return powers / powers.sum(axis=1, keepdims=True)
