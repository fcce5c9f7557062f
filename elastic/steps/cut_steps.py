"""Runs the graphs that masked_step.py cuts: a step, its forward pass, its gradients, an update."""

import itertools
import time
import weakref

import tensorflow as tf

from elastic.compat import tf_internals
from elastic.steps.training_step import NUM_RESULTS, StepResult, as_batch


class GraphFunction:
    """Runs a graph that a StepMaker cut, and frees it at its end: (*tensors) -> list of results."""

    def __init__(self, definition, maker):
        self.nodes = {node.name: node.op for node in definition.node_def}
        self._maker = maker  # keeps alive what the handles refer to
        self._name = definition.signature.name
        self._num_outputs = len(definition.signature.output_arg)
        tf_internals.add_function(definition)
        weakref.finalize(self, tf_internals.remove_function, self._name).atexit = False

    def __call__(self, *tensors):
        return tf_internals.call_function(
            self._name, self._num_outputs, list(tensors) + self._maker.captured,
            self._maker.config)


class MaskedStep(GraphFunction):
    """Updates the selected tensors on one batch: (inputs, labels, *given) -> StepResult.

    A graph with more results returns a list. If the maker has micro-batches, the graph runs on each
    in turn; results are means over them, the number of correct examples is the sum.
    mask: (N,) bool; None if nothing is updated. shapes: of the batch, if not those of `maker`.
    called: the ConcreteFunction that the graph calls, or None. given: what else the graph takes.
    """

    def __init__(self, definition, mask, maker, shapes=None, called=None):
        super().__init__(definition, maker)
        self.mask, self._keeps_alive = mask, called
        self._shapes = shapes or maker.shapes
        self.compiled = False  # by the first call, whose time the loop counts separately
        self.remade = False  # whether an interrupted run has called it before

    @property
    def examples(self):
        """Returns the number of examples of a step, of all workers."""
        return self._shapes[-1][0] * (self._maker.mean.size if self._maker.mean else 1)

    def __call__(self, inputs, labels, *given):
        batch, maker = tf.nest.flatten((inputs, labels)), self._maker
        if self._shapes is maker.shapes and not (
                all(map(tf.is_tensor, batch)) and [leaf.dtype for leaf in batch] == maker.dtypes):
            batch = tf.nest.flatten(as_batch(maker.model, inputs, labels))
            batch = list(map(tf.cast, batch, maker.dtypes))
        shapes = [tuple(leaf.shape) for leaf in batch]
        if shapes != self._shapes:
            raise ValueError('this step was made for inputs and labels of shapes {}, not {}'.format(
                self._shapes, shapes))
        results = self._results(batch, given)
        return StepResult(*results) if len(results) == NUM_RESULTS else results

    def _results(self, batch, given):
        """Returns the list of results. batch: flat list of tensors, (B, ...) each."""
        parts, run = self._maker.parts, super().__call__
        if parts == 1:
            return run(*batch, *given)
        found = [run(*part, *given) for part in zip(*[tf.split(leaf, parts) for leaf in batch])]
        correct = StepResult._fields.index('correct')
        return [tf.add_n(each) if i == correct else tf.add_n(each) / parts
                for i, each in enumerate(zip(*found))]

    def timed(self, inputs, labels, *given):
        """Returns the results of one call, and the ms until the device finished."""
        begin = time.perf_counter()
        results = self(inputs, labels, *given)
        results[0].numpy()
        return results, 1e3 * (time.perf_counter() - begin)

    def milliseconds(self, inputs, labels):
        """Returns the duration of one call in ms."""
        return self.timed(inputs, labels)[1]


class SummedStep(MaskedStep):
    """Adds up the gradients of a batch over its micro-batches, and updates the selected tensors.

    The graph adds each gradient to a variable as soon as it is known, so that one set of gradients
    exists. update: GraphFunction of the handles of the sums; it empties them. Without one, nothing
    is updated, and the step returns the gradients after its results.
    """

    def __init__(self, definition, mask, maker, update=None):
        super().__init__(definition, mask, maker)
        self._update, self._kept = update, self._zeros() if update else None

    def _zeros(self):
        return [tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                for variable in itertools.compress(self._maker.variables, self.mask)]

    def _results(self, batch, given):
        sums = self._kept or self._zeros()
        handles = [each.handle for each in sums]
        results = super()._results(batch, handles)
        if self._update is None:
            return results + [each.read_value() for each in sums]
        self._update(*handles)
        return results
