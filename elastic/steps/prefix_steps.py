"""Makes training steps that reuse cached activations of the prefix; prefix_cut.py finds the cut."""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from elastic.steps import prefix_cut
from elastic.steps.cut_steps import MaskedStep
from elastic.steps.function_graph import take_from_outside, work_of
from elastic.steps.inlining import called_ops, output_names
from elastic.steps.step_graph import estimated_ms
from elastic.steps.training_step import NUM_RESULTS


class CachedStep(NamedTuple):
    """Holds the functions of one step whose prefix is cached.

    fill: (inputs, labels) -> [*StepResult, *stored tensors]; the whole step.
    prefix: (inputs, labels) -> stored tensors; changes nothing.
    read: (stored tensors, labels) -> StepResult; the step after the cut.
    specs: tf.TensorSpec of each stored tensor, with the batch as its first axis.
    """
    fill: Any
    prefix: Any
    read: Any
    specs: Any


class PrefixSteps:
    """Cuts the steps of a StepMaker in two. Make one for all masks: it reads the whole graph."""

    def __init__(self, maker):
        self.maker = maker
        self._num_inputs = len(maker.shapes) - 1
        self._specs = self._batch_tensors()  # tensor whose first axis is the batch -> TensorSpec
        self._nbytes = {tensor: spec.shape[1:].num_elements() * spec.dtype.size
                        for tensor, spec in self._specs.items()}
        called = called_ops(maker.cutter.nodes.values(), maker.library)
        self._repeatable = prefix_cut.repeatable(
            maker.graph, maker.owners, len(maker.variables), range(self._num_inputs),
            [self._num_inputs], called)
        self._work = work_of(maker.concrete.graph)

    @property
    def fingerprint(self):
        """Returns a hash of the graph: equal hashes mean that a Cut fits both."""
        nodes = self.maker.graph.nodes
        text = '\n'.join('{} {} {}'.format(name, nodes[name].op, ' '.join(nodes[name].tensors))
                         for name in sorted(self._repeatable.needs))
        return hashlib.sha256(text.encode()).hexdigest()

    def cut_off(self, mask, rates, read_ms=None):
        """Returns the prefix_cut.Cut for the (N,) bool mask; None if the step has no prefix.

        rates: as in attribution.OpTimes. read_ms: (bytes per image) -> ms to read a batch; by
        default READ_MS per byte.
        """
        graph, prefix = self.maker.graph, self._repeatable.prefix_of(mask)
        ms = {name: estimated_ms(graph.nodes[name].op, self._work.get(name), rates)
              for name in prefix}
        batch_size = self.maker.shapes[-1][0]
        return prefix_cut.cheapest_cut(
            graph, prefix, self._read_from(prefix, mask), self._nbytes, ms,
            read_ms or (lambda nbytes: prefix_cut.READ_MS * batch_size * nbytes))

    def trainable_at(self, cut):
        """Returns the (N,) bool mask of the tensors that may be trained with this Cut.

        It is empty if the rest of the step would read a tensor that the Cut does not store.
        """
        mask = ~self._repeatable.tensors_of(cut.skipped)
        return mask & set(self._read_from(cut.skipped, mask)).issubset(cut.tensors)

    def _read_from(self, prefix, mask):
        """Returns the prefix tensors that the rest of the step of the (N,) bool mask reads."""
        results = ['result {}'.format(i) for i in range(NUM_RESULTS)]
        effects = self.maker.effects(self.maker.left_out(mask)).values()
        return prefix_cut.read_outside(self.maker.graph, prefix, results + list(effects))

    def _batch_tensors(self):
        found, maker = {}, self.maker
        for op in maker.concrete.graph.get_operations():
            if op.name in maker.cutter.nodes:
                found.update(zip(output_names(op), op.outputs))
        arguments = maker.cutter.function.signature.input_arg
        found.update(zip((argument.name for argument in arguments),
                         maker.concrete.inputs[:self._num_inputs]))
        return {name: tf.TensorSpec(tensor.shape, tensor.dtype)
                for name, tensor in found.items()
                if tensor.shape.is_fully_defined() and tensor.shape.rank
                and tensor.shape[0] == maker.shapes[-1][0]}

    def cached(self, mask, cut):
        """Returns the CachedStep of the (N,) bool mask, cut at a Cut from cut_off."""
        left_out, cutter = self.maker.left_out(mask), self.maker.cutter
        effects = self.maker.effects(left_out)
        fill = cutter.cut(effects, NUM_RESULTS, left_out, self._typed(cut.tensors))
        read = cutter.cut(effects, NUM_RESULTS, left_out.union(cut.skipped))
        called = [self.maker.averaged(each, mask) for each in (fill, read)]
        return CachedStep(MaskedStep(fill, mask, self.maker, called=called[0]),
                          self.outputs(cut.tensors), self._after(cut, read, mask, called[1]),
                          [self._specs[tensor] for tensor in cut.tensors])

    def outputs(self, tensors):
        """Returns a function (inputs, labels) -> these tensors of the forward pass, a list."""
        cut = self.maker.cutter.cut({}, 0, set(), self._typed(tensors))
        return MaskedStep(cut, None, self.maker)

    def suffix(self, cut):
        """Returns the forward pass after a Cut: (stored tensors, labels) -> StepResult."""
        left_out = set(self.maker.graph.update).union(cut.skipped)
        return self._after(cut, self.maker.cutter.cut({}, NUM_RESULTS, left_out), None)

    def _after(self, cut, definition, mask, called=None):
        """Returns the MaskedStep of a FunctionDef, with stored tensors in place of its inputs."""
        take_from_outside(definition, self._typed(cut.tensors), self._num_inputs)
        shapes = [tuple(self._specs[tensor].shape) for tensor in cut.tensors]
        return MaskedStep(definition, mask, self.maker, shapes + self.maker.shapes[-1:], called)

    def _typed(self, tensors):
        return [(tensor, self._specs[tensor].dtype.as_datatype_enum) for tensor in tensors]

    def rows_apart(self, inputs, labels):
        """Returns how much the activations of an image depend on the other images of its batch.

        This is the largest difference in the outputs of the longest prefix, relative to the largest
        value; inf if there is no prefix, or if the first axis of an input is not the batch.
        """
        count = int(labels.shape[0])
        if any(leaf.shape.rank == 0 or leaf.shape[0] != count for leaf in tf.nest.flatten(inputs)):
            return float('inf')
        mask = np.arange(len(self.maker.variables)) == len(self.maker.variables) - 1
        # Reading is almost free at these rates, so nothing is recomputed and the prefix is longest.
        cut = self.cut_off(mask, {'* flops': 1.0, '* elements': 1.0}, lambda nbytes: 1e-9 * nbytes)
        if cut is None:
            return float('inf')
        prefix, furthest = self.outputs(cut.tensors), 0.0
        # Half of the images, each twice, because a permutation would not change batch statistics.
        order = np.random.RandomState(0).permutation(count) // 2
        others = tf.nest.map_structure(lambda leaf: tf.gather(leaf, order), inputs)
        for first, second in zip(prefix(inputs, labels), prefix(others, labels)):
            first, second = [array.numpy().astype(np.float64) for array in (first, second)]
            apart = np.abs(first[order] - second).max() / max(np.abs(first).max(), 1e-30)
            furthest = max(furthest, float(apart))
        return furthest
