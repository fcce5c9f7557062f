"""Training steps for any mask, cut out of one traced graph.

To trace and optimise a new step for every selection costs tens of steps. Here the step of full
training is traced once. The step of a mask is a copy of its graph with everything left out that
only serves tensors which are not selected: what remains is what tracing that mask would give, and
is ready within a step or two (benchmarks/overhead.py).
"""

import time

import numpy as np
import tensorflow as tf

from elastic.command_line import UserError
from elastic.compat import keras_stack, tf_internals
from elastic.steps.function_graph import (
    Cutter,
    add_node,
    analysable,
    inlined,
    library_of,
    repeat_noise,
    resolved,
    set_inputs,
    take_from_outside,
)
from elastic.steps.step_graph import analyse, check_effects
from elastic.steps.training_step import NUM_RESULTS, StepResult, TrainingStep


class StepMaker:
    """Makes the training steps of a model for any mask, its forward pass and its gradients alone.

    inputs, labels: one batch, or tf.TensorSpecs of it: steps take batches of these very shapes.
    inputs: one array, or a list, tuple or dict of several, as the model takes them.
    weight_decay: see TrainingStep. optimizer: None for gradients alone.
    penalty, loss_scale: see TrainingStep.
    Steps share the model's and the optimizer's variables.
    UserError for a model or labels that cannot be trained here, with the reason.
    """

    def __init__(self, model, optimizer, weight_decay, inputs, labels, penalty=None,
                 loss_scale=None):
        self.model = model
        self.optimizer = optimizer
        self.penalty = penalty
        # Once: Keras takes milliseconds to gather them.
        self.variables = [keras_stack.raw(v) for v in model.trainable_variables]
        everything = np.ones(len(self.variables), dtype=bool)
        full = TrainingStep(model, optimizer, everything, weight_decay, outputs_gradients=True,
                            update=optimizer is not None, penalty=penalty, loss_scale=loss_scale)
        self.loss_scale = full.loss_scale
        with keras_stack.dropout_as_product(model) as products:
            concrete = _traced(full.function, inputs, labels)
        _check_results(concrete, self.variables)
        self.concrete = concrete  # as traced; owns what the captured handles refer to
        self.captured = list(concrete.captured_inputs)
        function = resolved(inlined(concrete.function_def, library_of(concrete)))
        self.cutter = Cutter(function)
        self.shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten((inputs, labels))]
        self._noises = self._noises_of({product.op.name for product in products})
        self._decay = set(full.decay_ops)
        self.owners = self._owners()
        self.graph = analyse(analysable(function), len(everything), self.owners, {},
                             NUM_RESULTS)
        check_effects(self.graph, self.effects(set()).values())
        self._gradients = None
        self.config = _config()  # what steps run with

    @property
    def state(self):
        """All variables that an update may change: weights, the optimizer's, the loss scale's."""
        of_optimizer = keras_stack.optimizer_variables(self.optimizer) if self.optimizer else []
        return self.variables + [keras_stack.raw(v) for v in of_optimizer] + (
            self.loss_scale.variables if self.loss_scale else [])

    @property
    def everything(self):
        """tf.Variables: all that training may change, moving statistics and random states too."""
        rest = [keras_stack.raw(v) for v in keras_stack.model_variables(self.model)]
        # Random states that are of no layer; TensorFlow gives them in any order, names may repeat.
        places = {id(handle): place for place, handle in enumerate(self.captured)}
        rest += sorted(self.concrete.variables, key=lambda variable: places[id(variable.handle)])
        found = {id(variable): variable for variable in self.state + rest}
        return list(found.values())

    def assign(self, values):
        """Gives `everything` these values, arrays; UserError where they are of another network."""
        variables = self.everything
        if [tuple(v.shape) for v in variables] != [value.shape for value in values]:
            raise UserError('the checkpoint is of another network; start over with --restart')
        for variable, value in zip(variables, values):
            if value.dtype.kind == 'V':  # NumPy itself does not know bfloat16
                value = value.view(variable.dtype.as_numpy_dtype)
            variable.assign(value, read_value=False)

    def left_out(self, mask):
        """Nodes of the update that serve tensors outside the (N,) bool mask."""
        return {name for name, k in self.graph.update.items() if k is not None and not mask[k]}

    def _noises_of(self, products):
        """Noise -> (what it is multiplied by, its type), tensors; products: names as traced."""
        nodes = [node for name, node in self.cutter.nodes.items() if name in products]
        return {node.input[1]: (node.input[0], node.attr['T'].type) for node in nodes}

    def _owners(self):
        """Argument index -> k for the argument that is the handle of tensor k."""
        handles = {id(variable.handle): k for k, variable in enumerate(self.variables)}
        return {i + len(self.shapes): handles.get(id(handle))  # batch first
                for i, handle in enumerate(self.captured)}

    def step(self, mask, update=True):
        """The MaskedStep of the (N,) bool mask; ValueError where nothing is selected.

        update: False leaves out decay and update: forward and backward pass alone, no effect.
        """
        mask = np.asarray(mask, dtype=bool)
        if mask.shape != (len(self.variables),):
            raise ValueError('the mask has shape {}, the model {} trainable tensors'.format(
                mask.shape, len(self.variables)))
        if not mask.any():
            raise ValueError('a training step needs at least one selected tensor')
        if update:
            left_out = self.left_out(mask)
            effects = self.effects(left_out)
        else:
            # Computed and freed at once, as an update does; results are all held to the end.
            left_out = set(self.graph.update)
            names = [self.cutter.result_node(NUM_RESULTS + k) for k in np.flatnonzero(mask)]
            effects = {'gradient_{}'.format(i): name for i, name in enumerate(names)}
        return MaskedStep(self.cutter.cut(effects, NUM_RESULTS, left_out), mask, self)

    def gradients(self):
        """(inputs, labels) -> [*StepResult, N gradients]; no dropout, no effect.

        One for all: as large as a step, it is kept by the importance and by the closed loop.
        """
        if self._gradients is None:
            self._gradients = MaskedStep(self._quiet(NUM_RESULTS + len(self.variables)), None, self)
        return self._gradients

    def with_gradients(self):
        """As the step of all tensors, with the N gradients behind its StepResult.

        For the profiler, to find them in the executed graph. Not for timing: holding all of them to
        the end makes the late layers' large ones slower.
        """
        mask = np.ones(len(self.variables), dtype=bool)
        cut = self.cutter.cut(self.effects(set()), NUM_RESULTS + len(mask), set())
        return MaskedStep(cut, mask, self)

    def forward(self, dropout=True):
        """(inputs, labels) -> StepResult of the forward pass alone, in training mode.

        Changes nothing, neither random states nor BN statistics. dropout: False leaves it out.
        """
        if not dropout:
            return MaskedStep(self._quiet(NUM_RESULTS), None, self)
        return MaskedStep(self.cutter.cut({}, NUM_RESULTS, set(self.graph.update)), None, self)

    def update_alone(self, decay=True):
        """GraphFunction (N gradients) -> [], after one update of all tensors by them.

        What the step does with its gradients, cut out where they enter; BN statistics stay. Beside
        a pass ten times as long, the update would be lost in the noise of its time.
        decay: False leaves out the weight decay.
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
        del cut.signature.input_arg[:len(self.shapes)]
        outputs = list(function.signature.output_arg)[NUM_RESULTS:]
        arguments = ['gradient_{}'.format(k) for k in range(len(outputs))]
        take_from_outside(cut, arguments, [output.type for output in outputs],
                          [function.ret[output.name] for output in outputs])
        return GraphFunction(cut, self)

    def _quiet(self, num_results):
        """FunctionDef of the first results and gradients, without dropout and without effects.

        Neither random states nor BN statistics change; other noise is the same in every call.
        """
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
        """result name -> node of everything outside both passes that changes a variable, but for
        `left_out`.
        """
        return {result: name for result, name in self.cutter.function.control_ret.items()
                if name in self.graph.update and name not in left_out
                and self.cutter.nodes[name].op != 'ReadVariableOp'}


def _traced(function, inputs, labels):
    """The concrete function; a UserError that was raised while it was traced as it was raised."""
    try:
        return function.get_concrete_function(inputs, labels)
    except Exception as error:  # AutoGraph puts one of its own around it
        refusal = error
        while refusal is not None and not isinstance(refusal, UserError):
            refusal = refusal.__context__
        raise refusal or error


def _check_results(concrete, variables):
    """ValueError unless a traced step returns a StepResult and a gradient like each variable."""
    shapes = [output.shape for output in concrete.outputs]
    expected = [tf.TensorShape([])] * NUM_RESULTS + [variable.shape for variable in variables]
    if len(shapes) != len(expected) or not all(map(tf.TensorShape.is_compatible_with, shapes,
                                                   expected)):
        raise ValueError('a traced step returns {}, expected {}'.format(shapes, expected))


class GraphFunction:
    """(*tensors) -> list of results, of a graph that a StepMaker cut.

    Its graph leaves TensorFlow's memory with this object.
    """

    def __init__(self, definition, maker):
        self.nodes = {node.name: node.op for node in definition.node_def}  # name -> op type
        self._maker = maker  # keeps alive what the handles refer to
        self._name = definition.signature.name
        self._num_outputs = len(definition.signature.output_arg)
        tf_internals.add_function(definition)

    def __call__(self, *tensors):
        return tf_internals.call_function(
            self._name, self._num_outputs, list(tensors) + self._maker.captured,
            self._maker.config)

    def __del__(self):
        try:
            tf_internals.remove_function(self._name)
        except (AttributeError, TypeError):  # at interpreter exit modules are empty
            pass


class MaskedStep(GraphFunction):
    """(inputs, labels) -> StepResult, after one update of the selected tensors.

    A list, with the gradients behind it, where they were asked for.

    Made by StepMaker. mask: (N,) bool, None where nothing is updated.
    """

    def __init__(self, definition, mask, maker, shapes=None):
        super().__init__(definition, maker)
        self.mask = mask
        self._shapes = shapes or maker.shapes
        self.called = False  # the first call compiles; the loop books it apart
        self.again = False  # whether an interrupted run had called it before

    def __call__(self, inputs, labels):
        batch = tf.nest.flatten((inputs, labels))
        shapes = [tuple(leaf.shape) for leaf in batch]
        if shapes != self._shapes:
            raise ValueError('this step was made for inputs and labels of shapes {}, not {}'.format(
                self._shapes, shapes))
        results = super().__call__(*batch)
        return StepResult(*results) if len(results) == NUM_RESULTS else results

    def timed(self, inputs, labels):
        """(results, ms) of one call, until the device is done."""
        begin = time.perf_counter()
        results = self(inputs, labels)
        results[0].numpy()
        return results, 1e3 * (time.perf_counter() - begin)

    def milliseconds(self, inputs, labels):
        """What one call takes."""
        return self.timed(inputs, labels)[1]


def _config():
    """Serialised ConfigProto for the cut steps.

    On CPU they run as cut: TensorFlow's graph optimiser takes several steps' time for each mask
    and does not make a step faster there. On a GPU it chooses the memory layout, and stays on.
    """
    config = tf_internals.session_config()
    if not tf.config.list_physical_devices('GPU'):
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString()
