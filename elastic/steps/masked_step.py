"""Cuts the training step of any mask out of one traced graph.

Tracing a new step for every selection takes as long as tens of steps. So the full step is traced
once. The reduced step of a mask is a copy of its graph without the nodes that serve only unselected
tensors, and is ready in the time of a step or two (benchmarks/overhead.py).
"""

import time
import weakref

import numpy as np
import tensorflow as tf

from elastic.compat import keras_stack, tf_internals
from elastic.errors import UserError
from elastic.steps.function_graph import (
    Cutter,
    add_node,
    pass_through,
    repeat_noise,
    take_from_outside,
    untie,
)
from elastic.steps.inlining import inlined, set_inputs
from elastic.steps.step_graph import analyse, check_effects
from elastic.steps.training_step import (
    NUM_RESULTS,
    StepResult,
    TrainingStep,
    as_batch,
    checked_mask,
)


class ModelState:
    """Holds what training may change of a model, and makes no steps.

    optimizer: may be None. mean: as for StepMaker.
    """

    def __init__(self, model, optimizer, mean=None):
        self.model, self.optimizer, self.mean, self.loss_scale = model, optimizer, mean, None
        # Kept because Keras takes milliseconds to collect them.
        self.variables = [keras_stack.raw(v) for v in model.trainable_variables]

    @property
    def state(self):
        """Returns the variables of model, optimizer and loss scale that an update may change."""
        of_optimizer = keras_stack.optimizer_variables(self.optimizer) if self.optimizer else []
        return self.variables + [keras_stack.raw(v) for v in of_optimizer] + (
            self.loss_scale.variables if self.loss_scale else [])

    @property
    def everything(self):
        """Returns all tf.Variables that training may change: `state`, statistics, random states."""
        found = {id(variable): variable for variable in
                 self.state + [keras_stack.raw(v) for v in self.model.variables] + self._outside()}
        return list(found.values())

    def _outside(self):
        """Returns the variables that the steps use and that are in no layer."""
        return []

    @property
    def moving(self):
        """Returns the variables of `everything` that are moving statistics which steps change."""
        return []

    def assign(self, values):
        """Assigns arrays to `everything`; raises UserError where their shapes do not fit."""
        variables = self.everything
        if [tuple(v.shape) for v in variables] != [value.shape for value in values]:
            raise UserError('the checkpoint is of another network; to start over, use --restart')
        keras_stack.assign_arrays(variables, values)


class StepMaker(ModelState):
    """Makes the training step of a model for any mask, its forward pass, and its gradients.

    inputs, labels: one batch, or tf.TensorSpecs of one; steps take batches of exactly these shapes.
        inputs is an array, or a list, tuple or dict of them, as the model takes it; see as_batch.
    optimizer: may be None where only gradients are needed.
    weight_decay, penalty, loss_scale, class_weight: as for TrainingStep.
    mean: workers.step_mean.StepMean, to average each step over several workers; None: this process
        trains alone.
    kind: the TrainingStep, or a class derived from it.
    Raises UserError for a model or labels that cannot be trained.
    """

    def __init__(self, model, optimizer, weight_decay, inputs, labels, penalty=None,
                 loss_scale=None, class_weight=None, mean=None, kind=TrainingStep):
        super().__init__(model, optimizer, mean)
        inputs, labels = as_batch(model, inputs, labels)
        self.penalty, self.class_weight = penalty, class_weight
        everything = np.ones(len(self.variables), dtype=bool)
        full = kind(model, optimizer, everything, weight_decay, outputs_gradients=True,
                    penalty=penalty, loss_scale=loss_scale, class_weight=class_weight)
        self.loss_scale = full.loss_scale
        with keras_stack.dropout_as_product(model) as products:
            concrete = _traced(full.function, inputs, labels)
        for name, result in zip(StepResult._fields, concrete.outputs):
            if result.shape.rank:  # a layer may add such a penalty
                raise ValueError('the {} of a step has shape {}; needed is a number'.format(
                    name, result.shape))
        self.concrete = concrete  # keeps alive what the captured handles refer to
        self.captured = list(concrete.captured_inputs)
        library = concrete.graph.as_graph_def().library.function
        self.library = {function.signature.name: function for function in library}
        function = inlined(concrete.function_def, self.library)
        untie(function)
        self.cutter = Cutter(function)
        batch = tf.nest.flatten((inputs, labels))
        self.shapes = [tuple(leaf.shape) for leaf in batch]
        self.dtypes = [leaf.dtype for leaf in batch]
        dropouts = {product.op.name for product in products}
        self._noises = {node.input[1]: (node.input[0], node.attr['T'].type)  # factor and dtype
                        for name, node in self.cutter.nodes.items() if name in dropouts}
        self._decay = set(full.decay_ops)
        handles = {id(variable.handle): k for k, variable in enumerate(self.variables)}
        self.owners = {i: handles.get(id(handle))  # k for the argument that is tensor k's handle
                       for i, handle in enumerate(self.captured, len(self.shapes))}
        self.graph = analyse(self.cutter.analysable, len(everything), self.owners, {}, NUM_RESULTS)
        check_effects(self.graph, self.effects(set()).values())
        self._gradients = {}
        self.config = tf_internals.step_config()

    def _outside(self):
        # Random states: TensorFlow lists them in any order, and names may repeat.
        places = {id(handle): place for place, handle in enumerate(self.captured)}
        return sorted(self.concrete.variables, key=lambda variable: places[id(variable.handle)])

    @property
    def moving(self):
        written = {self.cutter.nodes[name].input[0] for name in self.effects(set()).values()}
        arguments = self.cutter.function.signature.input_arg[len(self.shapes):]
        handles = {id(handle) for argument, handle in zip(arguments, self.captured)
                   if argument.name in written}
        return [variable for variable in self.everything[len(self.state):]
                if id(variable.handle) in handles and variable.dtype.is_floating]

    def left_out(self, mask):
        """Returns the update nodes that serve only tensors outside the (N,) bool mask."""
        return {name for name, k in self.graph.update.items() if k is not None and not mask[k]}

    def step(self, mask):
        """Returns the MaskedStep of the (N,) bool mask; raises ValueError for an empty one."""
        mask = checked_mask(mask, len(self.variables))
        left_out = self.left_out(mask)
        cut = self.cutter.cut(self.effects(left_out), NUM_RESULTS, left_out)
        return MaskedStep(cut, mask, self, called=self.averaged(cut, mask))

    def averaged(self, cut, mask, tag='step'):
        """Averages results and gradients of a cut step over the workers, if there are several.

        cut: FunctionDef, which changes. mask: (N,) bool, the tensors whose gradients it computes.
        tag: str, the kind of step. Returns what has to live as long as the step, or None.
        """
        if self.mean is None:
            return None
        whole = self.cutter.function
        outputs = list(whole.signature.output_arg)
        chosen = outputs[:NUM_RESULTS] + [outputs[NUM_RESULTS + k] for k in np.flatnonzero(mask)]
        tensors = [(whole.ret[output.name], output.type) for output in chosen]
        called = self.mean([tuple(self.variables[k].shape) for k in np.flatnonzero(mask)],
                           [tf.as_dtype(dtype) for _, dtype in tensors[NUM_RESULTS:]], tag, mask)
        effects = set(self.effects(self.left_out(mask)).values())
        pass_through(cut, called, tensors, self.graph.update, effects)
        return called

    def gradients(self, averaged=True):
        """Returns a function (inputs, labels) -> [*StepResult, N gradients], without dropout.

        It changes nothing, and is made once, because it is as large as a step.
        averaged: whether over the workers, if there are several.
        """
        averaged = averaged and self.mean is not None
        if averaged not in self._gradients:
            cut, mask = self._quiet(NUM_RESULTS + len(self.variables)), np.ones(
                len(self.variables), dtype=bool)
            called = self.averaged(cut, mask, 'gradients') if averaged else None
            self._gradients[averaged] = MaskedStep(cut, None, self, called=called)
        return self._gradients[averaged]

    def with_gradients(self):
        """Returns the full step, with the N gradients after its results.

        It is not for timing: holding all gradients slows down the large ones of late layers.
        """
        mask = np.ones(len(self.variables), dtype=bool)
        cut = self.cutter.cut(self.effects(set()), NUM_RESULTS + len(mask), set())
        return MaskedStep(cut, mask, self)

    def forward(self, dropout=True):
        """Returns a function (inputs, labels) -> StepResult: the forward pass, without effects."""
        if not dropout:
            return MaskedStep(self._quiet(NUM_RESULTS), None, self)
        return MaskedStep(self.cutter.cut({}, NUM_RESULTS, set(self.graph.update)), None, self)

    def update_alone(self, decay=True):
        """Returns a GraphFunction that updates all tensors by N given gradients.

        BN statistics stay. decay: whether to apply weight decay.
        """
        outside = {name for name, node in self.cutter.nodes.items()
                   if name not in self.graph.update and node.op not in ('ReadVariableOp', 'Const')}
        written = {id(variable.handle) for variable in self.state}
        names = [argument.name for argument in self.cutter.function.signature.input_arg]
        handles = {name for name, handle in zip(names[len(self.shapes):], self.captured)
                   if id(handle) in written}
        left_out = outside if decay else outside | self._decay
        effects = {result: name for result, name in self.effects(left_out).items()
                   if self.cutter.nodes[name].input[0] in handles}
        cut, function = self.cutter.cut(effects, 0, left_out), self.cutter.function
        gradients = [(function.ret[output.name], output.type)
                     for output in list(function.signature.output_arg)[NUM_RESULTS:]]
        take_from_outside(cut, gradients, len(self.shapes))
        return GraphFunction(cut, self)

    def _quiet(self, num_results):
        """Returns the FunctionDef of the first results, without dropout, effects or new noise."""
        noises = {noise.split(':')[0] for noise in self._noises}
        cut = self.cutter.cut({}, num_results, noises.union(self.graph.update))
        ones = {}
        for i, (noise, (like, dtype)) in enumerate(self._noises.items()):
            add_node(cut, 'OnesLike', 'ones/{}'.format(i), [like], T=dtype)
            ones[noise] = 'ones/{}:y:0'.format(i)
        for node in cut.node_def:
            set_inputs(node, [ones.get(tensor, tensor) for tensor in node.input])
        repeat_noise(cut)
        return cut

    def effects(self, left_out):
        """Returns result name -> update node that changes a variable, without `left_out`."""
        return {result: name for result, name in self.cutter.function.control_ret.items()
                if name in self.graph.update and name not in left_out
                and self.cutter.nodes[name].op != 'ReadVariableOp'}


def _traced(function, inputs, labels):
    try:
        return function.get_concrete_function(inputs, labels)
    except Exception as error:  # AutoGraph wraps a UserError in its own
        refusal = error
        while refusal is not None and not isinstance(refusal, UserError):
            refusal = refusal.__context__
        raise refusal or error


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
    """Updates the selected tensors on one batch: (inputs, labels) -> StepResult.

    A graph with more results returns a list.
    mask: (N,) bool; None if nothing is updated. shapes: of the batch, if not those of `maker`.
    called: the ConcreteFunction that the graph calls, or None.
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

    def __call__(self, inputs, labels):
        batch, maker = tf.nest.flatten((inputs, labels)), self._maker
        if self._shapes is maker.shapes and not (
                all(map(tf.is_tensor, batch)) and [leaf.dtype for leaf in batch] == maker.dtypes):
            batch = tf.nest.flatten(as_batch(maker.model, inputs, labels))
            batch = list(map(tf.cast, batch, maker.dtypes))
        shapes = [tuple(leaf.shape) for leaf in batch]
        if shapes != self._shapes:
            raise ValueError('this step was made for inputs and labels of shapes {}, not {}'.format(
                self._shapes, shapes))
        results = super().__call__(*batch)
        return StepResult(*results) if len(results) == NUM_RESULTS else results

    def timed(self, inputs, labels):
        """Returns the results of one call, and the ms until the device finished."""
        begin = time.perf_counter()
        results = self(inputs, labels)
        results[0].numpy()
        return results, 1e3 * (time.perf_counter() - begin)

    def milliseconds(self, inputs, labels):
        """Returns the duration of one call in ms."""
        return self.timed(inputs, labels)[1]
