"""Makes graphs of images, molecules and nearest digits, and the networks that graphs.py trains.

A graph is three arrays, padded to n nodes: `nodes` (n, F) float32; `edges` (n, n) float32, a
row-normalised adjacency with self-loops; `mask` (n, 1) float32, 0 for padding. The networks are
Dense layers and layers without weights. No graph library runs on all of our stacks.
"""

import functools
import os
from typing import Any, Callable, NamedTuple

import _path  # noqa: F401
import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.data.fashion import FASHION, fashion_splits

layers = keras.layers
SHARED = 5  # classes: of images and digits, 0 to 4 are the source, 5 to 9 the target
NEIGHBOURS = 8
DARK = 0.08  # superpixels of less ink are no nodes
ELEMENTS = ('C', 'O', 'N', 'S', 'Cl', 'Br', 'F', 'P', 'I')  # others share a feature
MOST_ATOMS = 32  # without hydrogen; 4 % of the molecules are larger
BLOCKED = -1e9  # added to scores that softmax or maximum must not choose


class Domain(NamedTuple):
    """Holds examples, graphs or nodes of one graph.

    inputs: name -> array, as the network takes them. labels: (E,) int32, less than SHARED.
    """
    inputs: Any
    labels: np.ndarray


class Task(NamedTuple):
    """Holds a network and its two domains.

    build: (aggregates=True) -> keras.Model with random weights; False: without aggregation, to see
    what aggregation costs. batch: (Domain, (B,) int) -> (inputs, labels). batch_size: B.
    sizes: numbers of examples in the training, validation and test part.
    """
    build: Callable
    source: Domain
    target: Domain
    batch: Callable
    batch_size: int
    sizes: tuple


# ---------------------------------------------------------------- data

def grey_images(name, count):
    """Returns ((E, S, S) float32 from 0 to 1, (E,) int labels) of 'digits' or Fashion-MNIST."""
    if name == 'digits':
        from sklearn.datasets import load_digits
        digits = load_digits()
        return digits.images[:count].astype(np.float32) / 16, digits.target[:count]
    split = fashion_splits(FASHION, 28, None)[1].spaced(count).decoded(True, 'images')
    images = split.fetch(np.arange(count)).numpy()
    return images[..., 0].astype(np.float32) / 255, split.labels()


def superpixels(images, across, rounds=4, chunk=128):
    """Returns (E, across ** 2, 4) float32: x, y from -1 to 1, ink from 0 to 1, share of the pixels.

    Groups near pixels of similar ink by k-means from a grid, as SLIC does. Empty ones have ink 0.
    images: (E, S, S) float32 from 0 to 1.
    """
    if len(images) > chunk:
        return np.concatenate([superpixels(images[i:i + chunk], across, rounds)
                               for i in range(0, len(images), chunk)])
    side, count = images.shape[1], across ** 2
    axis = np.linspace(-1, 1, side)
    place = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)  # (P, 2)
    pixels = np.concatenate([np.broadcast_to(place, (len(images),) + place.shape),
                             images.reshape(len(images), -1, 1)], -1).astype(np.float32)
    grid = np.linspace(0, side - 1, across).round().astype(int)
    centres = pixels[:, (grid[:, None] * side + grid).ravel()]  # (E, K, 3)
    first = count * np.arange(len(images))[:, None]
    for _ in range(rounds):
        nearness = pixels @ centres.transpose(0, 2, 1) - (centres ** 2).sum(-1)[:, None] / 2
        owner = (first + nearness.argmax(-1)).ravel()  # (E P,)
        size = np.bincount(owner, minlength=centres[..., 0].size)
        centres = np.stack([np.bincount(owner, pixels[..., i].ravel(), size.size)
                            for i in range(3)], -1) / np.maximum(size, 1)[:, None]
        centres = centres.reshape(len(images), count, 3).astype(np.float32)
    share = size.reshape(len(images), count, 1) / side ** 2
    return np.concatenate([centres, share], -1).astype(np.float32)


def adjacency(places, kept):
    """Returns (E, n, n) float32: rows of the nearest neighbours and the node itself, of sum 1.

    places: (E, n, D). kept: (E, n) bool; other nodes have neither edges nor a self-loop.
    """
    squares = (places ** 2).sum(-1)
    far = squares[:, :, None] + squares[:, None] - 2 * places @ places.transpose(0, 2, 1)
    far = np.where(kept[:, None], far, np.inf)
    nearest = np.argsort(far, -1)[..., :NEIGHBOURS + 1]  # the node itself among them
    edges = np.zeros(far.shape, np.float32)
    np.put_along_axis(edges, nearest, 1, -1)
    edges = np.maximum(edges, edges.transpose(0, 2, 1)) * kept[:, None] * kept[:, :, None]
    return edges / np.maximum(edges.sum(-1, keepdims=True), 1)


def image_graphs(images, labels, across):
    """Returns the source and target Domain: a graph of each image, its dark superpixels padding."""
    found = superpixels(images, across)
    order = np.argsort(found[..., 2] <= DARK, axis=1, kind='stable')  # nodes first
    found = np.take_along_axis(found, order[..., None], 1)
    kept = found[..., 2] > DARK
    kept[:, 0] = True
    longest = kept.sum(1).max()
    found, kept = found[:, :longest], kept[:, :longest]
    arrays = dict(nodes=found * [1, 1, 1, across ** 2] * kept[..., None],
                  edges=adjacency(found[..., :2], kept), mask=kept[..., None])
    return [Domain({name: array[chosen].astype(np.float32) for name, array in arrays.items()},
                   (labels[chosen] % SHARED).astype(np.int32))
            for chosen in (labels < SHARED, labels >= SHARED)]


def molecule_graphs(count):
    """Returns the source and target Domain: the smaller and the larger half of `count` molecules.

    They are the first ones of the National Cancer Institute, as the package rdkit ships them. A
    label is a molecule's fifth of its domain by polar surface area.
    """
    from rdkit import Chem, RDConfig, RDLogger
    RDLogger.DisableLog('rdApp.*')
    with open(os.path.join(RDConfig.RDDataDir, 'NCI', 'first_5k.tpsa.csv')) as file:
        lines = [line.rpartition(',') for line in file if not line.startswith('#')]
    molecules, areas = [], []
    for text, _, area in lines:
        molecule = Chem.MolFromSmiles(text)
        if molecule and molecule.GetNumAtoms() <= MOST_ATOMS and len(areas) < count:
            molecules.append(molecule)
            areas.append(float(area))
    sizes = np.array([molecule.GetNumAtoms() for molecule in molecules])
    arrays = dict(nodes=np.zeros((len(sizes), MOST_ATOMS, len(ELEMENTS) + 5), np.float32),
                  edges=np.zeros((len(sizes), MOST_ATOMS, MOST_ATOMS), np.float32))
    for molecule, size, nodes, edges in zip(molecules, sizes, *arrays.values()):
        nodes[:size] = [features_of(atom) for atom in molecule.GetAtoms()]
        edges[:size, :size] = Chem.GetAdjacencyMatrix(molecule) + np.eye(size)
    arrays['edges'] /= np.maximum(arrays['edges'].sum(-1, keepdims=True), 1)
    arrays['mask'] = (np.arange(MOST_ATOMS) < sizes[:, None]).astype(np.float32)[..., None]
    order, domains = np.argsort(sizes, kind='stable'), []
    for chosen in np.array_split(order, 2):
        area = np.array(areas)[chosen]
        fifth = np.searchsorted(np.quantile(area, np.arange(1, SHARED) / SHARED), area)
        domains.append(Domain({name: array[chosen] for name, array in arrays.items()},
                              fifth.astype(np.int32)))
    return domains


def features_of(atom):
    """Returns the features of an rdkit atom: its element, neighbours, hydrogens, charge, ring."""
    return [atom.GetSymbol() == element for element in ELEMENTS] + [
        atom.GetSymbol() not in ELEMENTS, atom.GetDegree() / 4, atom.GetTotalNumHs() / 4,
        atom.GetFormalCharge(), atom.GetIsAromatic()]


def digit_graphs(count):
    """Returns the source and target Domain: one graph of `count` digits, nearest ones linked."""
    images, labels = grey_images('digits', None)
    domains = []
    for chosen in (labels < SHARED, labels >= SHARED):
        nodes = images[chosen][:count].reshape(count, -1)
        edges = adjacency(nodes[None], np.ones((1, count), bool))[0]
        domains.append(Domain(dict(nodes=tf.constant(nodes), edges=tf.constant(edges)),
                              (labels[chosen][:count] % SHARED).astype(np.int32)))
    return domains


def batch_of_graphs(domain, chosen):
    """Returns (inputs, labels) of some graphs, as tensors."""
    return ({name: tf.constant(array[chosen]) for name, array in domain.inputs.items()},
            tf.constant(domain.labels[chosen]))


def whole_graph(domain, chosen):
    """Returns (inputs, labels) of some nodes: the whole graph, and which nodes have a label."""
    return (dict(domain.inputs, chosen=tf.constant(chosen, tf.int32)),
            tf.constant(domain.labels[chosen]))


# ---------------------------------------------------------------- layers without weights

class Aggregate(layers.Layer):
    """Returns the mean of each node's neighbours: [(..., n, W), edges (..., n, n)]."""

    def call(self, inputs):
        x, edges = inputs
        return tf.matmul(edges, x)


class Attend(layers.Layer):
    """Returns the attended mean of each node's neighbours, as in graph attention networks.

    Takes [values (..., n, W), scores of receivers and of senders (..., n, H), edges (..., n, n)].
    """

    def call(self, inputs):
        values, receivers, senders, edges = inputs
        heads = receivers.shape[-1]
        scores = tf.nn.leaky_relu(tf.linalg.matrix_transpose(receivers)[..., None]
                                  + tf.linalg.matrix_transpose(senders)[..., None, :])
        blocked = BLOCKED * tf.cast(edges == 0, scores.dtype)[..., None, :, :]
        shares = tf.nn.softmax(scores + blocked)  # (..., H, n, n)
        values = tf.stack(tf.split(values, heads, -1), -3)  # (..., H, n, W / H)
        return tf.concat(tf.unstack(tf.matmul(shares, values), heads, -3), -1)


class Readout(layers.Layer):
    """Returns (B, 2 W), mean and maximum over the nodes: [(B, n, W), mask (B, n, 1)]."""

    def call(self, inputs):
        x, mask = inputs
        mean = tf.reduce_sum(x * mask, 1) / tf.reduce_sum(mask, 1)
        return tf.concat([mean, tf.reduce_max(x + BLOCKED * (1 - mask), 1)], -1)


class Choose(layers.Layer):
    """Returns (T, W), the chosen nodes: [(V, W), chosen (T,) int32]."""

    def call(self, inputs):
        x, chosen = inputs
        return tf.gather(x, chosen)


# ---------------------------------------------------------------- networks

def residual_block(x, edges, width):
    """Adds to each node a function of itself and its neighbours (as in residual GINs)."""
    z = layers.LayerNormalization()(x)
    z = z if edges is None else layers.Add()([z, Aggregate()([z, edges])])
    return layers.Add()([x, layers.Dense(width)(layers.Dense(width, activation='relu')(z))])


def attention_block(x, edges, width, heads=4):
    """Adds to each node what it attends to among its neighbours."""
    values = layers.Dense(width)(layers.LayerNormalization()(x))
    if edges is not None:
        scores = [layers.Dense(heads, use_bias=False)(values) for _ in range(2)]
        values = Attend()([values] + scores + [edges])
    return layers.Add()([x, layers.Activation('elu')(values)])


def convolution_block(x, edges, width):
    """Returns a graph convolution of each node."""
    x = x if edges is None else Aggregate()([x, edges])
    return layers.Dense(width, activation='relu')(x)


def graph_classifier(block, depth, width, nodes, features=4, aggregates=True, classes=SHARED):
    """Returns the network from padded graphs of `nodes` nodes to (B, classes) logits."""
    x, edges, mask = [keras.Input((nodes, size), name=name) for name, size in (
        ('nodes', features), ('edges', nodes), ('mask', 1))]
    found = layers.Dense(width)(x)
    for _ in range(depth):
        found = block(found, edges if aggregates else None, width)
    found = Readout()([layers.LayerNormalization()(found), mask])
    return keras.Model(dict(nodes=x, edges=edges, mask=mask), layers.Dense(classes)(found))


def node_classifier(depth, width, nodes, features=64, aggregates=True, classes=SHARED):
    """Returns the network from one graph and (T,) chosen nodes to their (T, classes) logits.

    The nodes are the batch axis, so that each chosen node is an example with one label.
    """
    x, edges = keras.Input((features,), name='nodes'), keras.Input((nodes,), name='edges')
    chosen = keras.Input((), dtype='int32', name='chosen')
    found = x
    for _ in range(depth):
        found = convolution_block(found, edges if aggregates else None, width)
    return keras.Model(dict(nodes=x, edges=edges, chosen=chosen),
                       layers.Dense(classes)(Choose()([found, chosen])))


# ---------------------------------------------------------------- tasks

DEPTHS = {'residual': 7, 'attention': 5, 'molecules': 7}
BLOCKS = {'residual': residual_block, 'attention': attention_block, 'molecules': residual_block}


def make_task(name, data, small=False):
    """Returns the Task of one of graphs.NETWORKS. data: of grey_images. small: for tests."""
    if name == 'nodes':
        count, depth, width = (200, 3, 8) if small else (880, 4, 64)
        return Task(functools.partial(node_classifier, depth, width, count), *digit_graphs(count),
                    whole_graph, 10 if small else 50,
                    (10, 50, 100) if small else (50, 200, count - 250))
    count, across, depth, width = (300, 4, 1, 8) if small else (5000, 6, DEPTHS[name], 48)
    domains = (molecule_graphs(count) if name == 'molecules' else
               image_graphs(*grey_images(data, count), across))
    build = functools.partial(graph_classifier, BLOCKS[name], depth, width,
                              *domains[0].inputs['nodes'].shape[1:])
    sizes = np.multiply([0.5, 0.1, 0.4], min(len(domain.labels) for domain in domains))
    return Task(build, *domains, batch_of_graphs, 8 if small else 32, tuple(sizes.astype(int)))


def fresh_weights(task, seed):
    """Returns random weights of the task's network, a list of arrays."""
    keras_stack.set_seed(seed)
    return task.build().get_weights()
