"""PruneTrain (Lym et al., SC'19): removes channels that vanish during training.

A group lasso on the input and output channels of the convolutions draws whole channels to zero.
Every few epochs, channels whose weights are all below a threshold are removed. The remaining
channels keep their weights, momentum and BN statistics. channels.py finds in the graph which
channels belong together.

The flags default to the authors' settings for ImageNet; for CIFAR their interval is 10.
"""

from functools import partial
from itertools import islice

import numpy as np
import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError
from elastic.networks.backbone import Backbone
from elastic.schemes.channels import Structure, network_of
from elastic.schemes.scheme import Choice, Scheme
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import optimizer_for
from elastic.steps.training_step import evaluation_function

FIRST_BATCHES = 4  # batches whose loss sets the penalty's coefficient
EPSILON = 1e-12  # added under the root of a norm, because the root's gradient at 0 is infinite


class GroupLasso:
    """Computes the penalty on a model, a scalar tensor: coefficient * sum of norms of all groups.

    A group is the weights of one output or input channel of a convolution or a Dense layer, or
    those into or out of one hidden unit of a transformer block. Only removable channels have
    groups: shrinking others would cost accuracy and gain nothing.
    batches: iterable of (images, labels). ratio: the penalty's share of loss plus penalty on the
    first FIRST_BATCHES before training; it sets the coefficient, as in the paper.
    class_weight: of the loss, as in training_step.cross_entropy.
    """

    def __init__(self, model, batches, ratio, class_weight=None):
        evaluate = evaluation_function(model, class_weight)
        if not Structure(model).channels:
            raise UserError('prune_training finds no channels to remove from this model: it needs '
                            'convolutions, in a functional or Sequential Keras model')
        losses = [float(evaluate(images, labels)[0]) / len(labels)
                  for images, labels in islice(batches, FIRST_BATCHES)]
        self.coefficient = (ratio / (1 - ratio) * float(np.mean(losses))
                            / float(self.norms(model)))

    @staticmethod
    def norms(model):
        """Returns the sum of the norms of all groups, a scalar tensor."""
        norms = []
        for channels in Structure(model).channels:
            for variable, axis in channels.judged:
                others = [i for i in range(len(variable.shape)) if i != axis]
                squares = tf.reduce_sum(tf.square(keras_stack.raw(variable)), axis=others)
                norms.append(tf.reduce_sum(tf.sqrt(squares + EPSILON)))
        return tf.add_n(norms)

    def __call__(self, model):
        return self.coefficient * self.norms(model)


def prune(model, optimizer, threshold, make_optimizer):
    """Returns (model, optimizer, number of removed channels), without the vanished channels.

    If no channel has vanished, model and optimizer are the same objects.
    threshold: a channel has vanished if all its weights are smaller in magnitude.
    make_optimizer: (variables) -> new optimizer of the same kind.
    Weights, optimizer slots, iteration count and BN statistics are kept. The output is that of the
    old model with the vanished weights set to 0.
    """
    found = Structure(model)
    kept = [channels.kept(threshold) for channels in found.channels]
    widths = [len(stay) for stay in kept]
    removed = found.size - sum(widths)
    if not removed:
        return model, optimizer, 0
    indices = {}  # id of a variable -> [(axis, indices that stay)]
    for channels, stay in zip(found.channels, kept):
        for variable, axis in channels.judged + channels.carried:
            indices.setdefault(id(keras_stack.raw(variable)), []).append((axis, stay))

    def keep(old, new, variable):
        """Assigns what stays of an array that has the shape of this variable of the old model."""
        array = keras_stack.raw(old).numpy()
        for axis, stay in indices.get(id(keras_stack.raw(variable)), ()):
            if array.ndim:  # Adam's count has no axes
                array = np.take(array, stay, axis=axis)
        new.assign(array)
    smaller = narrower_model(model, found, widths)
    for old, new in zip(model.weights, smaller.weights):
        keep(old, new, old)
    keras_stack.weights_were_set(smaller)
    new_optimizer = make_optimizer(smaller.trainable_variables)
    new_optimizer.iterations.assign(optimizer.iterations)
    for variable, of_old, of_new in zip(
            model.trainable_variables, keras_stack.slots(optimizer, model.trainable_variables),
            keras_stack.slots(new_optimizer, smaller.trainable_variables)):
        for old, new in zip(of_old, of_new):
            keep(old, new, variable)
    return smaller, new_optimizer, removed


def narrower_model(model, found, widths):
    """Returns the model with new weights. widths: new size of each of found.channels."""
    size_of = {id(channels): size for channels, size in zip(found.channels, widths)}

    def narrower(layer):
        if isinstance(layer, keras.layers.Lambda):
            return layer  # has no weights, and Keras 3 refuses to deserialize its function
        if isinstance(layer, Backbone):
            return Backbone(narrower(layer.base), layer.preprocessing, layer.train_statistics,
                            name=layer.name)
        if network_of(layer) is not None:
            return keras.models.clone_model(layer, clone_function=narrower)
        config = layer.get_config()
        if id(layer) in found.widths:
            field, channels = found.widths[id(layer)]
            size = size_of[id(channels)]
            config[field] = (tuple(config[field][:-1]) + (size,) if field == 'target_shape'
                             else size)
        return layer.__class__.from_config(config)
    return keras.models.clone_model(model, clone_function=narrower)


class PruneTrainScheme(Scheme):
    """Trains all tensors with the penalty, and prunes the network every `prune_interval` epochs.

    maker: masked_step.StepMaker with a GroupLasso as its penalty. dataset: datasets.Dataset.
    settings: settings.Settings.
    """

    def __init__(self, maker, dataset, settings):
        super().__init__('prune_training', maker)
        self._dataset, self._settings = dataset, settings
        self._make_optimizer = partial(optimizer_for, dataset, settings)
        self.summary = dict(channels=Structure(maker.model).size, channels_removed=0)
        self._prunings = 0

    def select(self, epoch, last):
        interval = self._settings.prune_interval
        if epoch == 1:
            if interval >= self._settings.num_epochs:
                print('no channels will be removed: the first removal would be after epoch {} of {}'
                      .format(interval, self._settings.num_epochs))
        elif not interval or (epoch - 1) % interval or not self._shrunk():
            return None
        return Choice(np.ones(len(self.maker.variables), dtype=bool))

    def _shrunk(self):
        """Removes vanished channels; returns whether there were any."""
        channels = Structure(self.maker.model).size
        model, optimizer, removed = prune(self.maker.model, self.maker.optimizer,
                                          self._settings.prune_threshold, self._make_optimizer)
        print('{:,} of {:,} channels have vanished{}'.format(
            removed, channels, ': the network is rebuilt without them' if removed else ''))
        if removed:
            self.summary['channels_removed'] += removed
            self._prunings += 1
            self._use(model, optimizer)
            self.summary['channel_widths'] = self.state()['widths']
        return bool(removed)

    def _use(self, model, optimizer):
        self.maker = StepMaker(model, optimizer, self._settings.weight_decay,
                               *self._dataset.train.element_spec, self.maker.objective,
                               micro_batch=self._settings.micro_batch)

    def state(self):
        return dict(summary=self.summary, prunings=self._prunings,
                    coefficient=self.maker.objective.penalty.coefficient,
                    widths=[channels.size for channels in Structure(self.maker.model).channels])

    def restore(self, state, choice):
        """Prunes the network to the widths of `state`, whose coefficient the penalty must have."""
        self.summary, self._prunings = state['summary'], state['prunings']
        larger = model = self.maker.model
        for _ in range(self._prunings):  # each draws a seed of dropout, as in an unbroken run
            model = narrower_model(model, Structure(model), state['widths'])
        if self._prunings:
            for old, new in zip(larger.weights, model.weights):
                if old.shape == new.shape:  # keeps constants, e.g. of a Normalization layer
                    new.assign(old)
            keras_stack.weights_were_set(model)
            self._use(model, self._make_optimizer(model.trainable_variables))
