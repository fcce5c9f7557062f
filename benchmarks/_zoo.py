"""Builds tiny classifiers of every kind that can be trained: ZOO[name].build(size).

At its `benchmark` size, for architectures.py, a member's step takes at least 15 ms. Size 1 is for
tests: a step takes milliseconds, tracing about a second. ZOO leaves out members that this stack
cannot build.
"""

from typing import Any, Callable, NamedTuple

import _graphs
import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from models import build_model

CLASSES = 3
layers = keras.layers


class Classifier(NamedTuple):
    """Holds a model, its inputs (a tensor, list or dict of them), and (B,) int32 labels."""
    model: Any
    inputs: Any
    labels: Any


class Member(NamedTuple):
    """Holds a builder, size -> Classifier, which gives the same weights and batch each time."""
    build: Callable
    benchmark: int


ZOO = {}


def member(benchmark, here=True):
    """Registers a builder, size -> (model, inputs, batch size), under its name.

    here: whether this stack can build it.
    """
    def register(builder):
        if here:
            ZOO[builder.__name__] = Member(
                lambda size=1: _classifier(builder, size), benchmark)
        return builder
    return register


def _classifier(builder, size):
    keras_stack.set_seed(0)
    model, inputs, batch_size = builder(size)
    tensors = tf.nest.map_structure(tf.constant, inputs)
    if not model.built:
        model(tensors)  # a subclassed model has no weights before its first call
    labels = tf.constant(np.arange(batch_size) % CLASSES, tf.int32)
    return Classifier(model, tensors, labels)


def noise(*shape):
    """Returns normal float32 noise, the same in each call."""
    return np.random.RandomState(1).randn(*shape).astype(np.float32)


def tokens(vocabulary, *shape):
    """Returns int32 tokens less than `vocabulary`, the same in each call."""
    return np.random.RandomState(1).randint(0, vocabulary, shape).astype(np.int32)


def _head(x):
    return layers.Dense(CLASSES, name='head')(x)


# ------------------------------------------------------------------------- keras.applications

# A small member of each family, with its smallest input size and its size in the benchmark.
APPLICATIONS = {
    'MobileNet': (32, 96), 'MobileNetV2': (32, 96), 'MobileNetV3Small': (32, 96),
    'NASNetMobile': (32, 32), 'EfficientNetB0': (32, 64), 'EfficientNetV2B0': (32, 64),
    'DenseNet121': (32, 64), 'InceptionV3': (75, 75), 'InceptionResNetV2': (75, 75),
    'ResNet50': (32, 64), 'ResNet50V2': (32, 64), 'Xception': (71, 71), 'VGG16': (32, 32),
    'ConvNeXtTiny': (32, 32)}
APPLICATIONS = {name: sizes for name, sizes in APPLICATIONS.items()
                if hasattr(keras.applications, name)}


def _application(name):
    def build(size):
        side = APPLICATIONS[name][size > 1]
        model = build_model(name, (side, side, 3), CLASSES, 'none')
        return model, 127.5 + 60 * noise(4, side, side, 3), 4
    build.__name__ = name
    return build


for application in APPLICATIONS:
    member(benchmark=2)(_application(application))


# ------------------------------------------------------------------------------- sequences

@member(benchmark=30)
def lstm(size):
    inputs = keras.Input((4 + size, 4 * size))
    model = keras.Model(inputs, _head(layers.LSTM(8 * size)(inputs)))
    return model, noise(4 * size, 4 + size, 4 * size), 4 * size


@member(benchmark=23)
def gru(size):
    inputs = keras.Input((4 + size, 4 * size))
    x = layers.GRU(8 * size, return_sequences=True)(inputs)
    model = keras.Model(inputs, _head(layers.GRU(8 * size)(x)))
    return model, noise(4 * size, 4 + size, 4 * size), 4 * size


@member(benchmark=26)
def bidirectional_lstm(size):
    inputs = keras.Input((4 + size, 4 * size))
    x = layers.Bidirectional(layers.LSTM(8 * size))(inputs)
    return keras.Model(inputs, _head(x)), noise(4 * size, 4 + size, 4 * size), 4 * size


@member(benchmark=30)
def embedding(size):
    inputs = keras.Input((5 * size,), dtype='int32')
    x = layers.Embedding(50 * size, 8 * size)(inputs)
    x = layers.Dense(16 * size, activation='relu')(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, _head(x)), tokens(50 * size, 4 * size, 5 * size), 4 * size


@member(benchmark=20)
def attention(size):
    inputs = keras.Input((5 * size, 8 * size))
    x = layers.MultiHeadAttention(2, 4 * size)(inputs, inputs)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + inputs))
    return keras.Model(inputs, _head(x)), noise(4 * size, 5 * size, 8 * size), 4 * size


@keras_stack.register
class Positions(layers.Layer):
    """Adds an embedding of the position, which an inner layer looks up."""

    def __init__(self, length, width, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.table = layers.Embedding(length, width)

    def build(self, input_shape):
        self.table.build((self.length,))
        super().build(input_shape)

    def call(self, x):
        return x + self.table(tf.range(self.length))


def _transformer_block(x, width):
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, width // 2)(x, x))
    y = layers.Dense(width)(layers.Dense(2 * width, activation='relu')(x))
    return layers.LayerNormalization()(x + y)


@member(benchmark=16)
def transformer(size):
    inputs = keras.Input((6 * size,), dtype='int32')
    x = layers.Embedding(40 * size, 8 * size)(inputs)
    x = Positions(6 * size, 8 * size)(x)
    x = _transformer_block(x, 8 * size)
    model = keras.Model(inputs, _head(layers.GlobalAveragePooling1D()(x)))
    return model, tokens(40 * size, 4 * size, 6 * size), 4 * size


@member(benchmark=12)
def home_made_vit(size):
    side = 8 * size
    inputs = keras.Input((side, side, 3))
    x = layers.Conv2D(8 * size, 4, strides=4)(inputs)
    x = layers.Reshape(((side // 4) ** 2, 8 * size))(x)
    x = Positions((side // 4) ** 2, 8 * size)(x)
    for _ in range(2):
        x = _transformer_block(x, 8 * size)
    model = keras.Model(inputs, _head(layers.GlobalAveragePooling1D()(x)))
    return model, noise(4, side, side, 3), 4


# -------------------------------------------------------------------------- ways of building

@member(benchmark=112)
def shared(size):
    """Applies one layer twice in succession, and another on two branches."""
    inputs = keras.Input((8 * size,))
    twice, both = layers.Dense(8 * size, activation='tanh'), layers.Dense(8 * size)
    x = twice(twice(inputs))
    x = layers.Concatenate()([both(x), both(inputs)])
    return keras.Model(inputs, _head(x)), noise(6 * size, 8 * size), 6 * size


class GraphNetwork(keras.Model):
    """Passes messages along edges twice, then sums the nodes of each graph.

    inputs: dict of nodes: (V, F) float32; source, target: (E,) int32, indices of nodes;
    graph: (V,) int32, ascending.
    """

    def __init__(self, width, num_graphs):
        super().__init__()
        self.num_graphs = num_graphs
        self.messages = [layers.Dense(width, activation='relu') for _ in range(2)]
        self.own = [layers.Dense(width, activation='relu') for _ in range(2)]
        self.head = layers.Dense(CLASSES)

    def call(self, inputs, training=None):
        x = inputs['nodes']
        for message, own in zip(self.messages, self.own):
            sent = tf.gather(message(x), inputs['source'])
            x = own(x) + tf.math.unsorted_segment_sum(sent, inputs['target'], tf.shape(x)[0])
        sums = tf.math.segment_sum(x, inputs['graph'])
        return self.head(tf.ensure_shape(sums, (self.num_graphs, x.shape[-1])) / 5)


@member(benchmark=72)
def graph_network(size):
    graphs = 4 * size
    nodes, edges = 5 * graphs, 12 * graphs
    inputs = dict(nodes=noise(nodes, 4 * size), source=tokens(nodes, edges),
                  target=tokens(nodes, edges)[::-1].copy(),
                  graph=np.repeat(np.arange(graphs), 5).astype(np.int32))
    return GraphNetwork(8 * size, graphs), inputs, graphs


def _graph_classifier(block, size):
    nodes, graphs = 4 + 2 * size, 4 * size
    places = noise(graphs, nodes, 4)
    kept = np.arange(nodes) < nodes - 1 - np.arange(graphs)[:, None] % 2  # the rest is padding
    inputs = dict(nodes=places * kept[..., None], edges=_graphs.adjacency(places, kept),
                  mask=kept[..., None].astype(np.float32))
    model = _graphs.graph_classifier(block, 2, 8 * size, nodes, classes=CLASSES)
    return model, inputs, graphs


@member(benchmark=14)
def graph_convolutions(size):
    return _graph_classifier(_graphs.residual_block, size)


@member(benchmark=12)
def graph_attention(size):
    return _graph_classifier(_graphs.attention_block, size)


@member(benchmark=30)
def node_classification(size):
    """Classifies some nodes of one graph, which are the batch."""
    nodes, chosen = 12 * size, 6 * size
    features = 3 * noise(nodes, 4 * size)
    edges = _graphs.adjacency(features[None], np.ones((1, nodes), bool))[0]
    inputs = dict(nodes=features, edges=edges, chosen=np.arange(chosen, dtype=np.int32) * 2)
    model = _graphs.node_classifier(3, 8 * size, nodes, 4 * size, classes=CLASSES)
    return model, inputs, chosen


def _two_inputs(size):
    image, facts = keras.Input((8, 8, 2 * size), name='image'), keras.Input((4,), name='facts')
    x = layers.Conv2D(4 * size, 3, activation='relu')(image)
    x = layers.Concatenate()([layers.GlobalAveragePooling2D()(x),
                              layers.Dense(4 * size, activation='tanh')(facts)])
    return (image, facts), _head(x), (noise(4 * size, 8, 8, 2 * size), noise(4 * size, 4))


@member(benchmark=51)
def two_inputs_list(size):
    inputs, outputs, arrays = _two_inputs(size)
    return keras.Model(list(inputs), outputs), list(arrays), 4 * size


@member(benchmark=51)
def two_inputs_dict(size):
    inputs, outputs, arrays = _two_inputs(size)
    names = ('image', 'facts')
    return keras.Model(dict(zip(names, inputs)), outputs), dict(zip(names, arrays)), 4 * size


def _conv_inputs(size):
    """Returns (Input, (B, S, S, 3) array, B) for the image networks below."""
    side = 8 + 4 * (size - 1)
    return keras.Input((side, side, 3)), noise(4, side, side, 3), 4


@member(benchmark=20)
def nested(size):
    inputs, images, batch_size = _conv_inputs(size)
    inner = keras.Input((None, None, 3))
    innermost = keras.Sequential([keras.Input((None, None, 4 * size)),
                                  layers.Conv2D(4 * size, 3, activation='relu')])
    x = layers.Conv2D(4 * size, 3, activation='relu')(inner)
    base = keras.Model(inner, innermost(x))
    x = layers.GlobalAveragePooling2D()(base(inputs))
    return keras.Model(inputs, _head(x)), images, batch_size


@member(benchmark=28)
def sequential(size):
    inputs, images, batch_size = _conv_inputs(size)
    return keras.Sequential([
        inputs, layers.Conv2D(4 * size, 3, activation='relu'), layers.MaxPooling2D(),
        layers.Conv2D(6 * size, 3, activation='relu'), layers.Flatten(),
        layers.Dense(CLASSES, activation='softmax')]), images, batch_size


class Subclassed(keras.Model):
    """Has a list of layers, a weight outside any layer, and a loop in call()."""

    def __init__(self, width):
        super().__init__()
        self.convolutions = [layers.Conv2D(width, 3, activation='relu') for _ in range(2)]
        self.scale = self.add_weight(name='scale', shape=(width,), initializer='ones')
        self.head = layers.Dense(CLASSES)

    def call(self, images, training=None):
        x = images
        for convolution in self.convolutions:
            x = convolution(x)
        return self.head(tf.reduce_mean(x, (1, 2)) * self.scale)


@member(benchmark=19)
def subclassed(size):
    _, images, batch_size = _conv_inputs(size)
    return Subclassed(4 * size), images, batch_size


# ------------------------------------------------------------------- losses, dtypes, layers

@keras_stack.register
class Sparse(layers.Layer):
    """Returns its input, and adds its magnitude to the loss."""

    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(tf.abs(x)))
        return x


@member(benchmark=18)
def regularised(size):
    inputs, images, batch_size = _conv_inputs(size)
    l2 = keras.regularizers.L2
    x = layers.Conv2D(4 * size, 3, activation='relu', kernel_regularizer=l2(0.05))(inputs)
    x = Sparse()(x)
    x = layers.Conv2D(4 * size, 3, bias_regularizer=l2(0.01), activity_regularizer=l2(1e-3))(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, _head(x)), images, batch_size


@member(benchmark=18)
def mixed_float16(size):
    inputs, images, batch_size = _conv_inputs(size)
    x = layers.Conv2D(4 * size, 3, activation='relu', dtype='mixed_float16')(inputs)
    x = layers.GlobalAveragePooling2D(dtype='mixed_float16')(x)
    x = layers.Dense(16 * size, activation='relu', dtype='mixed_float16')(x)
    return keras.Model(inputs, layers.Dense(CLASSES, dtype='float32')(x)), images, batch_size


@member(benchmark=19)
def batch_norm(size):
    """Has moving statistics that training updates, and biases without a gradient."""
    inputs, images, batch_size = _conv_inputs(size)
    x = inputs
    for _ in range(2):
        x = layers.Conv2D(4 * size, 3)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, _head(layers.GlobalAveragePooling2D()(x))), images, batch_size


@member(benchmark=19)
def random_layers(size):
    inputs, images, batch_size = _conv_inputs(size)
    x = layers.GaussianNoise(0.1)(inputs)
    x = layers.SpatialDropout2D(0.2)(layers.Conv2D(4 * size, 3, activation='relu')(x))
    x = layers.Conv2D(4 * size, 3, activation='relu')(x)
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, _head(x)), images, batch_size


@member(benchmark=20)
def separable(size):
    inputs, images, batch_size = _conv_inputs(size)
    x = layers.SeparableConv2D(4 * size, 3, activation='relu')(inputs)
    x = layers.SeparableConv2D(6 * size, 3, activation='relu')(x)
    return keras.Model(inputs, _head(layers.GlobalAveragePooling2D()(x))), images, batch_size


@member(benchmark=8, here=keras_stack.KERAS_3)  # 2.7 cannot run them on a CPU
def grouped(size):
    """Has grouped convolutions, which Keras compiles as nested functions on a CPU."""
    inputs, images, batch_size = _conv_inputs(size)
    x = layers.Conv2D(4 * size, 3, activation='relu')(inputs)
    x = layers.Conv2D(4 * size, 3, groups=2 * size, activation='relu')(x)
    x = layers.Conv2D(4 * size, 3, groups=2)(x)
    return keras.Model(inputs, _head(layers.GlobalAveragePooling2D()(x))), images, batch_size


@member(benchmark=18)
def normalisations(size):
    inputs, images, batch_size = _conv_inputs(size)
    x = layers.LayerNormalization()(layers.Conv2D(4 * size, 3, activation='relu')(inputs))
    x = layers.Conv2D(4 * size, 3, activation='relu')(x)
    if hasattr(layers, 'GroupNormalization'):
        x = layers.GroupNormalization(2)(x)
    return keras.Model(inputs, _head(layers.GlobalAveragePooling2D()(x))), images, batch_size


@member(benchmark=20)
def frozen_layer(size):
    inputs, images, batch_size = _conv_inputs(size)
    x = layers.Conv2D(4 * size, 3, activation='relu')(inputs)
    x = layers.Conv2D(4 * size, 3, activation='relu', trainable=False)(x)
    x = layers.Conv2D(4 * size, 3, activation='relu')(x)
    return keras.Model(inputs, _head(layers.GlobalAveragePooling2D()(x))), images, batch_size
