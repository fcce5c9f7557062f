"""Builds networks: a backbone with its preprocessing, global pooling, dropout and a new head."""

import warnings

from elastic.errors import UserError
from elastic.networks.backbone import build_base, classifier
from elastic.networks.names import canonical_name, check_weights, is_saved
from elastic.networks.saved_model import from_saved_model
from elastic.networks.stages import pooled
from elastic.networks.weights import load_weights, save_weights
from elastic.settings import MODEL, SOLVED, pools, statistics_of

__all__ = ['build_model', 'canonical_name', 'load_weights', 'save_weights']


def build_model(name, input_shape, num_classes, weights=MODEL.weights,
                alpha=MODEL.alpha, bn_statistics=None, trust=False, keep_frozen=False,
                head=MODEL.head, head_features=MODEL.head_features, head_start=MODEL.head_start,
                known=None):
    """Returns a classifier in which every tensor is trainable, unless keep_frozen.

    name: resnet50, vgg16, mobilenetv2, vit, efficientnet_lite0, a keras.applications class, or
        the path of a saved model.
    input_shape: (height, width, 3).
    weights: 'imagenet'; 'none' for random weights; the path of a .npz file of save_weights, from
        any stack (a head for another number of classes is left out, with a warning); or the path
        of a .h5 file of keras.applications weights without top.
    alpha: width multiplier of the MobileNet families.
    bn_statistics: 'frozen': batch normalization uses its moving statistics and does not change
        them, gamma and beta still train, and dropout inside the base is off. 'train': it uses
        the statistics of the batch. None: the default of settings.statistics_of.
    trust: whether Python code inside a saved model may run.
    keep_frozen: whether layers of a saved model that were frozen before saving stay frozen.
    head: what the output layer reads, 'last' or 'stages'; head_features: at most so many features,
        as in stages.pooled. head_start: 'solved' prepares the model for solved_head.solve_head,
        which also sets the weights of the output layer.
    known: as in weights.load_weights, for a .npz file.
    Returns a keras.Model from (B, H, W, 3) float32 in 0..255 to (B, num_classes) float32 logits; a
    saved classifier of as many classes keeps its output.
    Raises UserError for a name, size, weights file or saved model that cannot be used.
    """
    name = canonical_name(name)
    check_weights(weights)
    of_keras = weights.lower().endswith('.h5')
    bn_statistics = statistics_of(weights, bn_statistics)
    pool = (head, head_features) if pools(head, head_start) else None
    if is_saved(name):
        if weights == 'none' or of_keras:
            raise UserError("the saved model '{}' has its own weights: omit --weights {}, or use "
                            'a .npz of this project'.format(name, weights))
        model = from_saved_model(name, input_shape, num_classes, bn_statistics, trust,
                                 keep_frozen, pool)
    else:
        if head_start == SOLVED and weights == 'none':
            warnings.warn('--head_start solved with --weights none: the features are random')
        start = weights if weights == 'imagenet' or of_keras else None
        base, preprocessing = build_base(name, input_shape, start, alpha)
        base = pooled(base, *pool) if pool else base
        model = classifier(base, preprocessing, input_shape, num_classes, bn_statistics)
    if weights.lower().endswith('.npz'):
        load_weights(model, weights, known)
    return model
