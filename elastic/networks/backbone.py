"""Makes backbones with frozen or trained batch statistics, and classifiers on top of them."""

import contextlib
from unittest import mock

import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.downloads import weights_file
from elastic.networks.efficientnet_lite import efficientnet_lite0
from elastic.networks.model_files import check_hdf5
from elastic.networks.names import LITE, applications

# With Keras' 0.99 or 0.999, the moving statistics lag so far that a network trained from scratch
# for a few hundred steps is still at chance in inference.
BN_MOMENTUM_TRAIN = 0.95
PREPROCESSING = 'preprocessing'  # name of the layer that export/plain.py makes of it; never trained


@keras_stack.register
class Backbone(keras.layers.Layer):
    """Runs a network without its head, after the preprocessing of its family.

    base: the network. preprocessing: name of a keras.applications module, or None.
    train_statistics: whether batch normalization uses and tracks the statistics of the batch.

    It is a layer, because only inside call() does `base(x, training=False)` freeze the moving
    statistics on every stack. Inside a functional model, Keras 3 overrides it when the outer model
    is called with training=True.
    """

    def __init__(self, base, preprocessing=None, train_statistics=False, **kwargs):
        super().__init__(**kwargs)
        self.base = base
        self.preprocessing = preprocessing
        self.set_statistics(train_statistics)

    def set_statistics(self, train):
        """Sets whether batch normalization uses and tracks the statistics of the batch."""
        self.train_statistics = train
        for layer in keras_stack.flat_layers(self.base):
            if train and isinstance(layer, keras.layers.BatchNormalization):
                layer.momentum = min(layer.momentum, BN_MOMENTUM_TRAIN)

    def call(self, images, training=None):
        if self.preprocessing:
            module = getattr(keras.applications, self.preprocessing)
            images = module.preprocess_input(images)
        return self.base(images, training=bool(training) and self.train_statistics)

    @tf.function
    def infer(self, images):
        """Returns what `call` does outside training, by a graph: eagerly, Keras 3 holds what each
        layer returns until the end."""
        return self(images, training=False)

    def compute_output_shape(self, input_shape):
        return self.base.compute_output_shape(input_shape)

    def get_config(self):
        return dict(super().get_config(), base=keras.layers.serialize(self.base),
                    preprocessing=self.preprocessing, train_statistics=self.train_statistics)

    @classmethod
    def from_config(cls, config):
        return cls(**dict(config, base=keras.layers.deserialize(config['base'])))


def classifier(base, preprocessing, input_shape, num_classes, bn_statistics):
    """Returns the model: Backbone, global average pooling, dropout 0.2, Dense logits."""
    inputs = keras.Input(input_shape)
    x = Backbone(base, preprocessing, bn_statistics == 'train', name='backbone')(inputs)
    if len(x.shape) == 4:  # (B, h, w, C) -> (B, C); vit returns its class token, (B, C)
        x = keras.layers.GlobalAveragePooling2D(name='pooling')(x)
    x = keras.layers.Dropout(0.2, name='dropout')(x)
    outputs = keras.layers.Dense(num_classes, name='head')(x)
    return keras.Model(inputs, outputs)


def build_base(name, input_shape, weights, alpha):
    """Returns a network without top, and the keras.applications module of its preprocessing.

    weights: 'imagenet', the path of a .h5 file, or None for random weights. The module is None if
    the network itself begins with its preprocessing.
    """
    try:
        own = {'vit': _vit, LITE: efficientnet_lite0}.get(name)
        build = own or {key.lower(): build for key, build in applications().items()}[name.lower()]
        scales = 'alpha' in build.__code__.co_varnames[:build.__code__.co_argcount]
        if alpha != 1.0 and not scales:
            raise UserError('--alpha {} is for the MobileNet families; {} has no width '
                            'multiplier'.format(alpha, name))
        if own is not None and weights not in (None, 'imagenet'):
            raise UserError("{} takes --weights imagenet, none or a .npz of this project; got '{}'"
                            .format(name, weights))
        if weights not in (None, 'imagenet'):
            check_hdf5(weights)
        with keras_stack.downloads_by(weights_file):
            if own is not None:  # vit-keras scales to -1..1, as mobilenet_v2 does
                return build(input_shape, weights), 'mobilenet_v2' if name == 'vit' else None
            options = dict(alpha=alpha) if scales else {}
            return build(include_top=False, weights=weights, input_shape=tuple(input_shape),
                         **options), build.__module__.rsplit('.', 1)[1]
    except UserError:
        raise
    except Exception as error:  # Keras raises many types of error
        raise _readable(error, name, input_shape, weights)


def _vit(input_shape, weights):
    try:
        from vit_keras import vit
    except ImportError as error:
        raise UserError('vit needs the package vit-keras, which is not installed ({}); it exists '
                        'for Python 3.8 to 3.11 on x86-64, see requirements.txt'.format(error))
    if input_shape[0] % 16 or input_shape[1] % 16:
        raise UserError('vit takes input sizes that are multiples of 16, not {}'.format(
            input_shape[0]))
    return vit.vit_b16(image_size=tuple(input_shape[:2]), include_top=False, pretrained_top=False,
                       pretrained=weights == 'imagenet')


def _readable(error, name, input_shape, weights):
    """Returns a UserError in one line for an error of keras.applications or vit-keras."""
    text = ' '.join(str(error).split())
    if 'nput size must be' in text or 'nput_shape' in text or 'dimension' in text:
        return UserError('{} cannot take images of {}x{}: {}'.format(name, *input_shape[:2], text))
    if weights not in (None, 'imagenet'):
        return UserError("weights file '{}' does not fit {}: truncated, or of another architecture "
                         '({})'.format(weights, name, text[:300]))
    return UserError('{} cannot be built: {}'.format(name, text[:500]))


def backbone_of(model):
    """Returns the Backbone of a model from models.build_model."""
    return next(layer for layer in model.layers if isinstance(layer, Backbone))


def output_layer(model):
    """Returns the last layer that has weights, also inside nested models."""
    while isinstance(model, Backbone) or getattr(model, 'layers', None):
        inner = [model.base] if isinstance(model, Backbone) else model.layers
        model = [layer for layer in inner if layer.trainable_weights][-1]
    return model


def statistics_from_batch(model, inputs):
    """Sets every moving statistic to that of one batch, so that frozen normalization normalizes.

    Otherwise the signal of an untrained network shrinks layer by layer into denormal numbers, on
    which some convolutions take ten times as long. Modes and momenta are restored, even after an
    error. inputs: one batch, in the structure that the model takes.
    """
    with contextlib.ExitStack() as changed:
        for layer in keras_stack.flat_layers(model):
            for kind, name, value in ((Backbone, 'train_statistics', True),
                                      (keras.layers.BatchNormalization, 'momentum', 0.0)):
                if isinstance(layer, kind):
                    changed.enter_context(mock.patch.object(layer, name, value))
        tf.function(lambda given: model(given, training=True))(inputs)  # a graph holds less at once
