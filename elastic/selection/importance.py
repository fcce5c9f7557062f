"""Measures the importance of each tensor on probe batches (paper, section 4.2)."""

import contextlib
from typing import NamedTuple

import numpy as np

from elastic.compat import keras_stack
from elastic.schemes.fixed import HEAD, fixed_mask
from elastic.selection.items import layers_of
from elastic.selection.metrics import METRICS
from elastic.settings import TRAINING
from elastic.steps.fit_step import model_inputs
from elastic.steps.masked_step import StepMaker
from elastic.steps.training_step import NUM_RESULTS, StepResult, as_batch

SMALLEST_SCALE = 2.0 ** -10  # of a trial update; it bounds how often one is halved
EASILY = 1.25  # if the drops agree within this factor, twice the update would likely hold too


class Trial(NamedTuple):
    """Compares the predicted with the real loss drop of one trial update.

    scale: of the update, 1 for the whole. predicted_drop: scale times the sum of first-order drops.
    real_drop: objective before the update minus objective after it.
    """
    scale: float
    predicted_drop: float
    real_drop: float

    @property
    def holds(self):
        """Returns whether the drops agree within a factor of two."""
        return self.agrees_within(2)

    def agrees_within(self, factor):
        """Returns whether both are drops within a factor of each other, or mere rounding.

        Two rises do not agree: such a trial only shows which tensors do least harm.
        """
        low, high = sorted((self.predicted_drop, self.real_drop))
        return max(abs(low), abs(high)) < 1e-6 or (low > 0 and high <= factor * low)


class Evaluator:
    """Computes gradients and trial updates. Make one per run, as it compiles its passes.

    Passes run in training mode without dropout, whose noise would drown a first-order drop.
    maker: masked_step.StepMaker of the training step. seed: of `random`, which metrics draw from.
    micro_batch: number of examples of which a pass computes a batch in turn, in less memory; it
    divides the batch, and may be set before the first pass. None: the maker's. Where whole_because
    gives a reason, batches stay whole.
    scale: of the next trial update: that of the last, doubled if it held easily.
    pass_ms: ms of each forward and backward pass after the first, which compiles.
    """

    def __init__(self, maker, seed=0, micro_batch=None):
        self.maker, self.micro_batch = maker, micro_batch
        self.random = np.random.RandomState(seed)
        self.memory = {}  # what a metric keeps from one selection to the next
        self.scale = 1.0
        self.variables = maker.variables
        self.pass_ms = []
        slots = {id(keras_stack.raw(slot)) for of_one in keras_stack.slots(
            maker.optimizer, maker.model.trainable_variables) for slot in of_one}
        self._others = [variable for variable in maker.state[len(maker.variables):]
                        if id(variable) not in slots]  # the iteration count, the loss scale
        self._pass = self._drops = None
        self._update = maker.trial_update()

    @property
    def in_parts(self):
        """Returns whether passes compute a batch in other parts than the maker's steps do."""
        return self.micro_batch not in (None, self.maker.micro_batch) and (
            self.maker.whole_because is None)

    def gradients(self, inputs, labels):
        """Returns (objective, N gradients); changes neither random states nor BN statistics."""
        if self._pass is None:
            if self.micro_batch is not None and self.maker.whole_because:
                print('importance in whole batches: ' + self.maker.whole_because)
            maker = self.maker.in_parts(self.micro_batch) if self.in_parts else self.maker
            self._pass, self._drops = maker.gradients(), maker.drops()
            self._pass(inputs, labels)[0].numpy()  # compiles, which pass_ms leaves out
            self._pass.compiled = True
        return self._timed(self._pass, inputs, labels)

    def _timed(self, function, *batch):
        """Returns (objective, other results) of a function of the maker."""
        results, ms = function.timed(*batch)
        # The wire would count, too.
        if self.maker.mean is None and function.compiled:
            self.pass_ms.append(ms)
        function.compiled = True
        return float(StepResult(*results[:NUM_RESULTS]).objective), results[NUM_RESULTS:]

    @contextlib.contextmanager
    def updated(self, gradients):
        """Updates the weights to w + dw within the context, and yields w, a list of N tensors.

        dw is the optimizer's update without weight decay and momentum: only recently trained
        tensors have momentum, which would make importances incomparable. Afterwards everything is
        as before, bit for bit. gradients: list of N, emptied to free memory.
        """
        with keras_stack.restored_afterwards(self.variables) as before:
            with keras_stack.restored_afterwards(self._others):
                self._update(*gradients)
            del gradients[:]
            yield before

    def trial(self, inputs, labels, scale=None):
        """Returns ((N,) float64 first-order drops, Trial) of a trial update on one batch.

        The drop of tensor k is - sum_i dL/dw_i (at w + dw) * dw_i (paper, equation 3). An update of
        all tensors at once may overshoot; the gradients at w + dw then point back and say nothing
        about w. The update is therefore halved until the predicted and the real drop agree.
        scale: of the update. None: the evaluator's, which is halved until Trial.holds.
        """
        objective, gradients = self.gradients(inputs, labels)
        with self.updated(gradients) as before:
            # A copy only once a weight is assigned.
            after, tried = [v.read_value() for v in self.variables], scale or self.scale
            while True:
                if tried != 1.0:
                    for variable, old, new in zip(self.variables, before, after):
                        variable.assign(old + tried * (new - old), read_value=False)
                reached, (products,) = self._timed(self._drops, inputs, labels, *before, *after)
                drops = -products.numpy().astype(np.float64)
                trial = Trial(tried, tried * float(drops.sum()), objective - reached)
                if scale or trial.holds or tried <= SMALLEST_SCALE:
                    break
                tried = self.scale = tried / 2
        return drops, trial


def evaluate_importance(model, optimizer, batches, metric=TRAINING.importance, evaluator=None,
                        trials=None):
    """Returns (N,) float64: the importance of each trainable tensor, by one metric of metrics.py.

    optimizer: built on all trainable variables. batches: iterable of (images, labels), over which
    the importance is averaged. evaluator: Evaluator of this model and optimizer, to save tracing.
    trials: list that receives the Trial of each batch.
    Leaves weights, slots, iteration count, BN statistics and random states bit for bit as they
    were. Raises ValueError for an unknown metric, and if there is no batch.
    """
    if metric not in METRICS:
        raise ValueError("unknown importance metric '{}'; allowed: {}".format(
            metric, ', '.join(METRICS)))
    probe = Probe(model, optimizer, batches, evaluator)
    importance = METRICS[metric](probe)
    if trials is not None:
        trials.extend(probe.trials)
    return importance


class Probe:
    """Gives a metric the weights, gradients, and loss drops of a trial update.

    model, optimizer, batches, evaluator: as evaluate_importance takes them. Batches are drawn when
    a metric first asks for gradients. variables: list of N.
    random: np.random.RandomState of the run. trials: one Trial a batch, once `drops` was called.
    memory: dict that the metric finds again at the next selection.
    """

    def __init__(self, model, optimizer, batches, evaluator=None):
        self.random = evaluator.random if evaluator else np.random.RandomState()
        # The model's own list takes Keras milliseconds to gather.
        self.variables = evaluator.variables if evaluator else model.trainable_variables
        self.memory = evaluator.memory if evaluator else {}
        self.trials = []
        self._model, self._optimizer = model, optimizer
        self._batches, self._evaluator = batches, evaluator

    @property
    def layers(self):
        """Returns the (N,) int layer of each tensor."""
        return layers_of(self._model)

    @property
    def head(self):
        """Returns the (N,) bool mask of the output layer's tensors."""
        return fixed_mask(HEAD, self._model)

    @property
    def weights(self):
        """Returns a generator of N arrays; it reads one variable at a time."""
        return (keras_stack.raw(variable).numpy() for variable in self.variables)

    def gradients(self):
        """Yields, for each batch, a generator of N arrays, the gradients at w."""
        for inputs, labels in self._drawn():
            yield (gradient.numpy() for gradient in self._evaluator.gradients(inputs, labels)[1])

    def outputs(self):
        """Yields, for each batch, the output of each tensor's layer, a (B, ...) array or None."""
        for inputs, _ in self._drawn():
            found = keras_stack.outputs_by_variable(self._model, model_inputs(inputs))
            yield [found.get(id(keras_stack.raw(variable))) for variable in self.variables]

    def drops(self):
        """Returns for each batch the (N,) float64 loss drops of the tensors' updates (equation 3).

        All batches are tried from the same weights at one scale; if one halves it, all start over.
        """
        batches = self._drawn()
        while True:
            found = [self._evaluator.trial(*batch) for batch in batches]
            if len({trial.scale for _, trial in found}) == 1:
                break
        self.trials = [trial for _, trial in found]
        if all(trial.agrees_within(EASILY) for trial in self.trials):
            self._evaluator.scale = min(1.0, 2 * self._evaluator.scale)
        return [drops for drops, _ in found]

    def _drawn(self):
        """Returns the list of batches; makes the Evaluator if there is none."""
        self._batches = [as_batch(self._model, *batch) for batch in self._batches]
        if not self._batches:
            raise ValueError('at least one probe batch is needed')
        if self._evaluator is None:
            self._evaluator = Evaluator(
                StepMaker(self._model, self._optimizer, 0.0, *self._batches[0]))
        return self._batches
