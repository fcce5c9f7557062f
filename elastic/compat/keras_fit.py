"""Hides what model.fit of Keras 2.6, 2.7 and 3 does differently."""

import tensorflow as tf

from elastic.compat.keras_stack import KERAS_3, build_optimizer


def loss_in_fit(model, inputs, labels, predictions, weights):
    """Returns the loss of Keras' own training step, and updates metrics as that does."""
    if KERAS_3:
        loss = model.compute_loss(inputs, labels, predictions, weights)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(labels)[0])
        model.compute_metrics(inputs, labels, predictions, weights)
        return loss
    loss = model.compiled_loss(labels, predictions, weights, regularization_losses=model.losses)
    model.compiled_metrics.update_state(labels, predictions, weights)
    model._train_counter.assign_add(1, read_value=False)
    return loss


def metric_results(model):
    """Returns name -> value of the metrics of a compiled model."""
    return model.get_metrics_result() if KERAS_3 else {
        metric.name: metric.result() for metric in model.metrics}


def steps_per_execution(model):
    """Returns how many steps of a compiled model Keras runs in one call."""
    return int(model.steps_per_execution if KERAS_3 else model._steps_per_execution.numpy())


def compiled_by_xla(model):
    """Returns whether `compile` was given jit_compile=True; on a GPU, Keras 3 does not show it."""
    return KERAS_3 and model.jit_compile and not model._resolve_auto_jit_compile()


def optimizer_of(model):
    """Returns the optimizer of a compiled model, with slots; inside Keras' loss scaling, if any."""
    optimizer = getattr(model.optimizer, 'inner_optimizer', model.optimizer)
    if not getattr(optimizer, 'built', False):
        build_optimizer(optimizer, model.trainable_variables)
    return optimizer
