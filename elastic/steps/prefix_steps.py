"""Training steps behind a cut: what is in front of it is computed once, stored, and read back.

prefix_cut.py says where a step is cut, this file makes its two parts, and the step that fills a
cache in passing, from the graph of a masked_step.StepMaker.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from elastic.steps import prefix_cut
from elastic.steps.function_graph import (
    called_ops,
    library_of,
    output_places,
    take_from_outside,
    work_of,
)
from elastic.steps.masked_step import MaskedStep
from elastic.steps.step_graph import estimated_ms
from elastic.steps.training_step import NUM_RESULTS


class CachedStep(NamedTuple):
    """A step in three functions, for a prefix that is computed once.

    fill: (inputs, labels) -> [*StepResult, stored tensors], after one update: the whole step.
    prefix: (inputs, labels) -> stored tensors, no effect.
    read: (stored tensors, labels) -> StepResult, after one update.
    specs: tf.TensorSpec of each stored tensor, the batch first.
    """
    fill: Any
    prefix: Any
    read: Any
    specs: Any


class PrefixSteps:
    """Cuts the steps of a StepMaker in two; made once for each, as it looks at its whole graph."""

    def __init__(self, maker):
        self.maker = maker
        self._num_inputs = len(maker.shapes) - 1
        self._static = self._static_tensors()
        called = called_ops(maker.cutter.nodes.values(), library_of(maker.concrete))
        self._repeatable = prefix_cut.repeatable(
            maker.graph, maker.owners, len(maker.variables), range(self._num_inputs),
            [self._num_inputs], called)
        work = work_of(maker.concrete.graph)
        self._work = {name: work.get(name) for name in self._repeatable.group_of}
        self._rows = {tensor: nbytes for tensor, (nbytes, _) in self._static.items()}
        self._ms = None, {}  # rates, and what ops take by them

    @property
    def fingerprint(self):
        """Returns a str that is equal where the names in a prefix_cut.Cut mean the same."""
        nodes = self.maker.graph.nodes
        text = '\n'.join('{} {} {}'.format(name, nodes[name].op, ' '.join(nodes[name].tensors))
                         for name in sorted(self._repeatable.group_of))
        return hashlib.sha256(text.encode()).hexdigest()

    def cut_off(self, mask, rates, read_ms=None):
        """The prefix_cut.Cut for steps that train the tensors of the (N,) bool mask; None where
        there is none.

        rates: of attribution.OpTimes. read_ms: bytes of one image -> ms to read them for a
        batch (default: READ_MS a byte).
        """
        graph, shapes = self.maker.graph, self.maker.shapes
        if self._ms[0] is not rates:  # the same for one mask after another
            self._ms = rates, {name: estimated_ms(graph.nodes[name].op, work, rates)
                               for name, work in self._work.items()}
        prefix = self._repeatable.prefix_of(mask)
        return prefix_cut.cheapest_cut(
            graph, prefix, self._read_from(prefix, mask), self._rows, self._ms[1],
            read_ms or (lambda nbytes: prefix_cut.READ_MS * shapes[-1][0] * nbytes))

    def serves(self, cut):
        """(N,) bool: tensors any of which may be trained with the Cut of cut_off, rows that were
        stored before staying as they would be; none where no such set is known.
        """
        mask = ~self._repeatable.tensors_of(cut.skipped)
        return mask & set(self._read_from(cut.skipped, mask)).issubset(cut.tensors)

    def _read_from(self, prefix, mask):
        """Tensors of the prefix that the rest of the step of the (N,) bool mask reads."""
        results = ['result {}'.format(i) for i in range(NUM_RESULTS)]
        effects = self.maker.effects(self.maker.left_out(mask)).values()
        return prefix_cut.read_outside(self.maker.graph, prefix, results + list(effects))

    def _static_tensors(self):
        """Tensor of the graph -> (bytes of one image, tf.TensorSpec), where the batch comes first.
        """
        found, maker = {}, self.maker
        for op in maker.concrete.graph.get_operations():
            if op.name in maker.cutter.nodes:
                names = ['{}:{}'.format(op.name, place) for place in output_places(op)]
                found.update(zip(names, op.outputs))
        arguments = maker.cutter.function.signature.input_arg
        found.update(zip((argument.name for argument in arguments),
                         maker.concrete.inputs[:self._num_inputs]))
        return {name: (int(np.prod(tensor.shape[1:], dtype=np.int64)) * tensor.dtype.size,
                       tf.TensorSpec(tensor.shape, tensor.dtype))
                for name, tensor in found.items()
                if tensor.shape.is_fully_defined() and tensor.shape.rank
                and tensor.shape[0] == maker.shapes[-1][0]}

    def cached(self, mask, cut):
        """CachedStep of the (N,) bool mask, its prefix cut off at the Cut of cut_off."""
        left_out, cutter = self.maker.left_out(mask), self.maker.cutter
        effects = self.maker.effects(left_out)
        fill = cutter.cut(effects, NUM_RESULTS, left_out, self._typed(cut.tensors))
        read = cutter.cut(effects, NUM_RESULTS, left_out.union(cut.skipped))
        return CachedStep(MaskedStep(fill, mask, self.maker), self.outputs(cut.tensors),
                          self._behind(cut, read, mask), self.specs(cut.tensors))

    def outputs(self, tensors):
        """(inputs, labels) -> list of these tensors of the forward pass; no effect."""
        cut = self.maker.cutter.cut({}, 0, set(), self._typed(tensors))
        return MaskedStep(cut, None, self.maker)

    def suffix(self, cut):
        """(stored tensors, labels) -> StepResult of the forward pass behind the Cut; no effect."""
        left_out = set(self.maker.graph.update).union(cut.skipped)
        return self._behind(cut, self.maker.cutter.cut({}, NUM_RESULTS, left_out), None)

    def _behind(self, cut, definition, mask):
        """The MaskedStep of a FunctionDef that takes what the Cut stores in place of the inputs."""
        specs = self.specs(cut.tensors)
        del definition.signature.input_arg[:self._num_inputs]
        take_from_outside(definition, ['stored_{}'.format(i) for i in range(len(specs))],
                          [dtype for _, dtype in self._typed(cut.tensors)], cut.tensors)
        return MaskedStep(definition, mask, self.maker,
                          [tuple(spec.shape) for spec in specs] + self.maker.shapes[-1:])

    def specs(self, tensors):
        """tf.TensorSpec of each of these tensors, the batch first."""
        return [self._static[tensor][1] for tensor in tensors]

    def _typed(self, tensors):
        return [(tensor, spec.dtype.as_datatype_enum)
                for tensor, spec in zip(tensors, self.specs(tensors))]

    def rows_apart(self, inputs, labels):
        """By how much, of the largest value, an example's row of the longest prefix differs at
        another place beside other examples: 0 where bits are the same; inf where there is no
        prefix, or where an input has no row for each example.
        """
        count = int(labels.shape[0])
        if any(leaf.shape.rank == 0 or leaf.shape[0] != count for leaf in tf.nest.flatten(inputs)):
            return float('inf')
        mask = np.arange(len(self.maker.variables)) == len(self.maker.variables) - 1
        # At such prices nothing is computed again, so that all of the prefix is tried.
        cut = self.cut_off(mask, {'* flops': 1.0, '* elements': 1.0}, lambda nbytes: 1e-9 * nbytes)
        if cut is None:
            return float('inf')
        prefix, furthest = self.cached(mask, cut).prefix, 0.0
        # Half of them, each twice: statistics of the batch are the same in any mere order.
        order = np.random.RandomState(0).permutation(count) // 2
        others = tf.nest.map_structure(lambda leaf: tf.gather(leaf, order), inputs)
        for first, second in zip(prefix(inputs, labels), prefix(others, labels)):
            first, second = [array.numpy().astype(np.float64) for array in (first, second)]
            apart = np.abs(first[order] - second).max() / max(np.abs(first).max(), 1e-30)
            furthest = max(furthest, float(apart))
        return furthest
