"""Trains by a scheme inside model.fit: reduced steps run in place of Keras' own step."""

import argparse
import time

import tensorflow as tf
from tensorflow import keras

from elastic.compat import keras_fit, keras_stack
from elastic.errors import UserError, one_of
from elastic.files import write_table
from elastic.networks.backbone import statistics_from_batch
from elastic.options import boolean
from elastic.runs.folder import SelectionRow
from elastic.runs.recorder import selection_rows
from elastic.selection.metrics import METRICS
from elastic.settings import ELASTIC, FLAGS, Settings
from elastic.steps.epoch import PLAIN, Call, EpochProgress
from elastic.steps.fit_step import INPUTS, FitObjective, batch_of, check_fit, check_tensors
from elastic.steps.masked_step import StepMaker
from elastic.steps.training_step import NUM_RESULTS, StepResult
from elastic.timing.stored import machine_key, stored_table
from elastic.timing.table import TensorTimings


class TrainingInFit(keras.callbacks.Callback):
    """Is a callback that trains, in each epoch of model.fit, the tensors that a scheme chooses.

    It replaces model.train_function for one call at a time, so that whatever ends `fit` leaves an
    ordinary model. Everything else is Keras': data, loss, optimizer, metrics, other callbacks. The
    first batch decides the shape of a step; a smaller last batch of an epoch is left out.
    selections: epoch, from 1 -> scheme.Choice of the tensors trained from then on, in this `fit`.
    A subclass has scheme_of(maker, inputs, labels), the scheme.Scheme of one `fit`, from the
    masked_step.StepMaker with a fit_step.FitObjective and the first batch. Raises UserError,
    before the first step, for a model that cannot be trained in this way.
    """

    def __init__(self):
        super().__init__()
        self.selections = {}

    def on_train_begin(self, logs=None):
        check_fit(self.model)
        self.selections, self._scheme, self._step, self._progress = {}, None, None, EpochProgress()
        self._usual = self.model.train_function
        if not keras_stack.KERAS_3:  # else TensorBoard looks for its graph, which is never traced
            self.model.train_tf_function = None

    def on_epoch_begin(self, epoch, logs=None):
        self._last = self._progress.result() if self._progress.count else None
        self._epoch, self._progress, self._left_out = epoch + 1, EpochProgress(), False
        self._since = time.perf_counter()

    def on_train_batch_begin(self, batch, logs=None):
        self.model.train_function = self._train

    def on_train_end(self, logs=None):
        if not keras_stack.KERAS_3:
            self.model.train_tf_function = self._usual

    def write_selections(self, path):
        """Writes what was trained when as CSV, for `plot.py selection PATH`."""
        if not self.selections:
            raise UserError('there is no selection to write: call model.fit first')
        rows = []
        for epoch in sorted({self._epoch, *self.selections}):  # a picture ends at the last epoch
            choice = self.selections[max(e for e in self.selections if e <= epoch)]
            rows += selection_rows(epoch, choice.timings.names, choice.timings.shapes, choice.mask,
                                   choice.importance, choice.time_share)
        write_table(path, SelectionRow._fields, rows)

    def _train(self, iterator):
        """Takes the place of model.train_function: trains on the next batch, returns the logs."""
        self.model.train_function = self._usual
        inputs, labels = batch_of(next(iterator))
        wait_ms = 1e3 * (time.perf_counter() - self._since)
        if self._scheme is None:
            self._begin(inputs, labels)
        if not self._progress.count:
            self._choose()
        if not self._leaves_out(labels):
            called = time.perf_counter()
            results = self._step(inputs, labels)
            loss = float(results[0])  # waits for the device
            ms = 1e3 * (time.perf_counter() - called)
            self._progress.add(Call(PLAIN, None, self._step), StepResult(*results[:NUM_RESULTS]),
                               loss, wait_ms + ms, wait_ms)
            self._logs = tf.nest.pack_sequence_as(self._logs, results[NUM_RESULTS:])
        self._since = time.perf_counter()
        return self._logs

    def _begin(self, inputs, labels):
        """Makes the scheme of this `fit`."""
        model = self.model
        if not model.built:
            model(inputs[INPUTS])
        check_tensors(model)
        maker = StepMaker(model, keras_fit.optimizer_of(model), 0.0, inputs, labels,
                          FitObjective())
        self._scheme = self.scheme_of(maker, inputs, labels)
        self._logs = keras_fit.metric_results(model)

    def _choose(self):
        """Asks the scheme what to train in this epoch, and makes its step."""
        choice = self._scheme.select(self._epoch, self._last)
        if choice is not None:
            self.selections[self._epoch] = choice
            if self._step is None or (choice.mask != self._step.mask).any():
                self._step = None  # frees the old graph before the new one is made
                self._step = self._scheme.maker.step(choice.mask)

    def _leaves_out(self, labels):
        """Returns whether this batch is a smaller last one; raises UserError for one in between."""
        usual, size = self._step.examples, int(labels.shape[0])
        if self._left_out or size > usual:
            raise UserError('batches of {} and of {} examples in one epoch: all but the last need '
                            'the same size; use dataset.batch(N, drop_remainder=True)'.format(
                                *sorted({usual, self._left_out or size})))
        self._left_out = size < usual and size
        return bool(self._left_out)


def timings_in_fit(given, maker, inputs, labels, measure):
    """Returns the TensorTimings of a StepMaker's full steps: given, stored, or measured and stored.

    given: TensorTimings, or the path of a table, which need not exist; None: nothing is stored.
    measure: (StepMaker, inputs, labels) -> TensorTimings; it may take many steps.
    """
    if isinstance(given, TensorTimings):
        if given.shapes != [tuple(v.shape) for v in maker.variables]:
            raise UserError('the timings are of another model: {} tensors, here {}'.format(
                len(given.shapes), len(maker.variables)))
        return given
    model, usual = maker.model, maker.optimizer
    key = dict(optimizer=type(usual).__name__, variables=len(maker.everything),
               batch=[list(shape) for shape in maker.shapes], **machine_key(model))
    table = given and stored_table(given, key)
    if table is None:
        begin = time.perf_counter()
        optimizer = type(usual).from_config(dict(usual.get_config(), learning_rate=1e-6))
        keras_stack.build_optimizer(optimizer, model.trainable_variables)
        slow = StepMaker(model, optimizer, 0.0, inputs, labels, FitObjective())
        with keras_stack.restored_afterwards(slow.everything):
            statistics_from_batch(model, inputs[INPUTS])
            table = measure(slow, inputs, labels)._replace(key=key)
        print('steps were timed in {:.1f} s'.format(time.perf_counter() - begin))
        if given is not None:
            table.save(given)
    return table


def fit_settings(given):
    """Returns the Settings with these flags of elastic training; raises UserError for wrong ones.

    given: name -> value; head_epochs is left out, as `fit` can be called twice.
    """
    allowed = [name for name, flag in FLAGS.items() if name in Settings._fields and (
        flag.of == ELASTIC or name in ('interval', 'memory', 'seed')) and name != 'head_epochs']
    for name in given:
        one_of(name, allowed, 'setting')
    return Settings(**{name: _checked(name, value) for name, value in given.items()})


def _checked(name, value):
    kind = FLAGS[name].kind
    kind = {bool: boolean, list: tuple(METRICS)}.get(kind, kind)
    if isinstance(kind, tuple):
        return one_of(value, kind, name)
    try:
        return kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise UserError('{}: {}'.format(name, error))
