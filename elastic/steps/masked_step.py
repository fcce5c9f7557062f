"""Cuts the training step of any mask out of one traced graph.

Tracing a step takes as long as tens of steps, so the full step is traced once. A reduced step is a
copy of its graph without the nodes that serve only unselected tensors, and is ready in the time of
a step or two (benchmarks/overhead.py).
"""

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.types_pb2 import DT_RESOURCE

from elastic.compat import keras_stack, tf_internals
from elastic.errors import UserError
from elastic.steps.additions import add_products, add_up, in_order, read_sums, set_aside
from elastic.steps.cut_steps import GraphFunction, MaskedStep, SummedStep
from elastic.steps.function_graph import (
    Cutter,
    add_arguments,
    add_node,
    pass_through,
    repeat_noise,
    take_from_outside,
    take_results,
    untie,
)
from elastic.steps.inlining import inlined, redirect
from elastic.steps.model_state import ModelState
from elastic.steps.step_graph import analyse, check_effects
from elastic.steps.training_step import (
    NUM_RESULTS,
    PLAIN,
    StepResult,
    TrainingStep,
    as_batch,
    checked_mask,
)


class StepMaker(ModelState):
    """Makes the training step of a model for any mask, its forward pass, and its gradients.

    inputs, labels: one batch, or tf.TensorSpecs of one; steps take batches of exactly these shapes.
        inputs is an array, or a list, tuple or dict of them, as the model takes it; see as_batch.
    optimizer: may be None where only gradients are needed.
    weight_decay, objective: as for TrainingStep.
    mean: workers.step_mean.StepMean of several workers; None: this process trains alone.
    micro_batch: number of examples; each function computes a batch in parts of this size, and a
        step updates once, by the sum of their gradients. None, as several workers need: the
        whole batch at once.
    Raises UserError for a model or labels that cannot be trained, or not in micro-batches.
    """

    def __init__(self, model, optimizer, weight_decay, inputs, labels, objective=PLAIN,
                 mean=None, micro_batch=None):
        super().__init__(model, optimizer, mean)
        inputs, labels = as_batch(model, inputs, labels)
        batch = tf.nest.flatten((inputs, labels))
        self.shapes = [tuple(leaf.shape) for leaf in batch]
        self.dtypes = [leaf.dtype for leaf in batch]
        self.micro_batch = micro_batch or self.shapes[-1][0]
        self.parts = 1 if micro_batch is None else parts_of(self.shapes, micro_batch)
        self._specs = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), (inputs, labels))
        if self.parts > 1:
            inputs, labels = tf.nest.map_structure(lambda leaf: tf.TensorSpec(
                (micro_batch,) + tuple(leaf.shape[1:]), leaf.dtype), self._specs)
        self._all = np.ones(len(self.variables), dtype=bool)  # the mask of all tensors
        full = TrainingStep(model, optimizer, self._all, weight_decay, outputs_gradients=True,
                            objective=objective)
        self.objective, self.loss_scale = full.objective, full.loss_scale
        with keras_stack.dropout_as_product(model) as products:
            concrete = _traced(full.function, inputs, labels)
        for name, result in zip(StepResult._fields, concrete.outputs):
            if result.shape.rank:  # a layer may add such a penalty
                raise UserError('the {} of a step has shape {}; allowed is one number: give its '
                                'sum or mean'.format(name, result.shape))
        self.concrete = concrete  # keeps alive what the captured handles refer to
        self.captured = list(concrete.captured_inputs)
        library = concrete.graph.as_graph_def().library.function
        self.library = {function.signature.name: function for function in library}
        function = inlined(concrete.function_def, self.library)
        untie(function)
        self._reports = take_results(function, NUM_RESULTS + len(self.variables))
        self.cutter = Cutter(function)
        arguments = function.signature.input_arg[len(self.shapes):]
        self._names = {id(handle): argument.name  # of the argument that stands for it
                       for argument, handle in zip(arguments, self.captured)}
        self.outputs = [(function.ret[output.name], output.type)  # (tensor, dtype enum)
                        for output in function.signature.output_arg]
        dropouts = {product.op.name for product in products}
        self._noises = {node.input[1]: (node.input[0], node.attr['T'].type)  # factor and dtype
                        for name, node in self.cutter.nodes.items() if name in dropouts}
        self._decay = set(full.decay_ops)
        handles = {id(variable.handle): k for k, variable in enumerate(self.variables)}
        self.owners = {i: handles.get(id(handle))  # k for the argument that is tensor k's handle
                       for i, handle in enumerate(self.captured, len(self.shapes))}
        self.graph = analyse(self.cutter.analysable, len(self._all), self.owners, {}, NUM_RESULTS)
        check_effects(self.graph, self.effects(set()).values())
        self._gradients = {}
        self.config = tf_internals.step_config()
        if self.parts > 1 and self.whole_because:
            raise UserError('micro-batches of {} do not fit: {}'.format(
                micro_batch, self.whole_because))

    def _outside(self):
        # Random states: TensorFlow lists them in any order, and names may repeat.
        places = {id(handle): place for place, handle in enumerate(self.captured)}
        return sorted(self.concrete.variables, key=lambda variable: places[id(variable.handle)])

    @property
    def moving(self):
        written = {self.cutter.nodes[name].input[0] for name in self.effects(set()).values()}
        return [variable for variable in self.everything[len(self.state):]
                if self._names.get(id(variable.handle)) in written and variable.dtype.is_floating]

    @property
    def whole_because(self):
        """Returns why this step cannot be computed in micro-batches, in one line, or None."""
        if self.mean is not None:
            return 'several workers average whole batches'
        return 'batch statistics are those of a whole batch' if self.moving else None

    def in_parts(self, micro_batch):
        """Returns a StepMaker of the same batch in micro-batches, whose steps update nothing."""
        return StepMaker(self.model, None, 0.0, *self._specs, objective=self.objective,
                         micro_batch=micro_batch)

    def left_out(self, mask):
        """Returns the update nodes that serve only tensors outside the (N,) bool mask."""
        return {name for name, k in self.graph.update.items() if k is not None and not mask[k]}

    def step(self, mask):
        """Returns the MaskedStep of the (N,) bool mask; raises ValueError for an empty one."""
        mask = checked_mask(mask, len(self.variables))
        left_out = self.left_out(mask)
        effects = self.effects(left_out)
        if self.parts == 1:
            cut = self.cutter.cut(effects, NUM_RESULTS, left_out, self._reports)
            return MaskedStep(cut, mask, self, called=self.averaged(cut, mask))
        updates = self._updates(left_out)
        others = {result: name for result, name in effects.items() if result not in updates}
        cut = self.cutter.cut(others, NUM_RESULTS, left_out, self._gradients_of(mask))
        update = self._update(mask, left_out)
        read_sums(update, int(mask.sum()))
        return self._summed(cut, mask, self._one_by_one(update, mask))

    def _gradients_of(self, mask):
        """Returns (tensor, dtype enum) of the gradient of each tensor of the (N,) bool mask."""
        return [self.outputs[NUM_RESULTS + k] for k in np.flatnonzero(mask)]

    def _summed(self, cut, mask, update=None):
        """Returns the SummedStep of a cut step whose last results are gradients."""
        gradients = take_results(cut, NUM_RESULTS)
        add_up(cut, gradients, add_arguments(cut, len(self.shapes), [DT_RESOURCE] * len(gradients)),
               1 / self.parts)
        return SummedStep(cut, mask, self, update)

    def averaged(self, cut, mask, tag='step'):
        """Averages results and gradients of a cut step over the workers, if there are several.

        cut: FunctionDef, which changes. mask: (N,) bool, the tensors whose gradients it computes.
        tag: str, the kind of step. Returns what has to live as long as the step, or None.
        """
        if self.mean is None:
            return None
        tensors = self.outputs[:NUM_RESULTS] + self._gradients_of(mask)
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
            cut = self._quiet(len(self.outputs))
            if self.parts > 1:
                made = self._summed(cut, self._all)
            else:
                called = self.averaged(cut, self._all, 'gradients') if averaged else None
                made = MaskedStep(cut, None, self, called=called)
            self._gradients[averaged] = made
        return self._gradients[averaged]

    def drops(self):
        """Returns a function (inputs, labels, *before, *after) -> [*StepResult, (N,) sums].

        It is like `gradients`, but returns the sum of gradient x (after - before) for each tensor,
        so that each gradient can be freed at once. before, after: N tensors each.
        """
        cut = self._quiet(len(self.outputs))
        called = self.averaged(cut, self._all, 'drops')
        gradients = take_results(cut, NUM_RESULTS)
        given = add_arguments(cut, len(self.shapes), [dtype for _, dtype in 2 * gradients])
        add_products(cut, gradients, given[:len(gradients)], given[len(gradients):],
                     [len(variable.shape) for variable in self.variables])
        return MaskedStep(cut, None, self, called=called)

    def with_gradients(self):
        """Returns the full step with N gradients after its results; holding them takes time."""
        cut = self.cutter.cut(self.effects(set()), len(self.outputs), set())
        return MaskedStep(cut, self._all, self)

    def forward(self, dropout=True):
        """Returns a function (inputs, labels) -> StepResult: the forward pass, without effects."""
        if not dropout:
            return MaskedStep(self._quiet(NUM_RESULTS), None, self)
        return MaskedStep(self.cutter.cut({}, NUM_RESULTS, set(self.graph.update)), None, self)

    def update_alone(self):
        """Returns a GraphFunction that updates all tensors by N gradients; BN statistics stay."""
        return GraphFunction(self._update(self._all, set()), self)

    def trial_update(self):
        """Returns a GraphFunction that updates all tensors by N gradients, and restores the slots.

        It omits weight decay and momentum, and never holds a copy of all slots. The iteration count
        and the loss scale change.
        """
        cut, variables = self._update(self._all, self._decay), self.model.trainable_variables
        slots = [slot for of_one in keras_stack.slots(self.optimizer, variables) for slot in of_one]
        set_aside(cut, self._arguments(slots), bool(keras_stack.momenta(self.optimizer, variables)))
        return self._one_by_one(cut, self._all)

    def _one_by_one(self, cut, mask):
        """Returns the GraphFunction of an update that updates one tensor after the other.

        With a loss scale, in any order: each update waits for all gradients.
        """
        if self.loss_scale is None:
            slots = keras_stack.slots(self.optimizer, self.model.trainable_variables)
            groups = []
            for k, gradient in zip(np.flatnonzero(mask), cut.signature.input_arg):
                written = self._arguments([self.variables[k]] + slots[k])
                groups.append([gradient.name] + [argument for argument, _ in written])
            in_order(cut, groups)
        return GraphFunction(cut, self)

    def _arguments(self, variables):
        """Returns (argument, dtype enum) of each variable, without those no step uses."""
        return [(self._names[id(each.handle)], each.dtype.as_datatype_enum)
                for each in map(keras_stack.raw, variables) if id(each.handle) in self._names]

    def _update(self, mask, left_out):
        """Returns the FunctionDef that updates the tensors of a mask by given gradients."""
        outside = {name for name, node in self.cutter.nodes.items()
                   if name not in self.graph.update and node.op not in ('ReadVariableOp', 'Const')}
        left_out = outside | left_out
        cut = self.cutter.cut(self._updates(left_out), 0, left_out)
        take_from_outside(cut, self._gradients_of(mask), len(self.shapes))
        return cut

    def _quiet(self, num_results):
        """Returns the FunctionDef of the first results, without dropout, effects or new noise."""
        noises = {noise.split(':')[0] for noise in self._noises}
        cut = self.cutter.cut({}, num_results, noises.union(self.graph.update))
        ones = {}
        for i, (noise, (like, dtype)) in enumerate(self._noises.items()):
            add_node(cut, 'OnesLike', 'ones/{}'.format(i), [like], T=dtype)
            ones[noise] = 'ones/{}:y:0'.format(i)
        redirect(cut, ones)
        repeat_noise(cut)
        return cut

    def effects(self, left_out):
        """Returns result name -> update node that changes a variable, without `left_out`."""
        return {result: name for result, name in self.cutter.function.control_ret.items()
                if name in self.graph.update and name not in left_out
                and self.cutter.nodes[name].op != 'ReadVariableOp'}

    def _updates(self, left_out):
        """Returns those of `effects` that change a variable of `state`."""
        written = {self._names.get(id(variable.handle)) for variable in self.state}
        return {result: name for result, name in self.effects(left_out).items()
                if self.cutter.nodes[name].input[0] in written}


def parts_of(shapes, micro_batch):
    """Returns how many micro-batches a batch of leaves of these shapes makes, or a UserError."""
    sizes = {shape[:1] for shape in shapes}
    (size,) = shapes[-1]
    if sizes != {(size,)} or size % micro_batch:
        raise UserError('micro-batches of {0} do not fit arrays of shapes {1}: the first axis of '
                        'each must be the batch, a multiple of {0}'.format(
                            micro_batch, ', '.join(map(str, shapes))))
    return size // micro_batch


def _traced(function, inputs, labels):
    try:
        return function.get_concrete_function(inputs, labels)
    except Exception as error:  # AutoGraph wraps a UserError in its own
        refusal = error
        while refusal is not None and not isinstance(refusal, UserError):
            refusal = refusal.__context__
        raise refusal or error
