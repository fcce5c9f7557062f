"""Training steps for any mask, cut out of one traced graph.

To trace and optimise a new step for every selection costs tens of steps. Here the step of full
training is traced once. The step of a mask is a copy of its graph with everything left out that
only serves tensors which are not selected: what remains is what tracing that mask would give, and
is ready within a step or two (benchmarks/overhead.py).
"""

import time

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute as eager_execute

import keras_stack
from backward_graph import Node, analyse
from command_line import UserError
from training_step import TrainingStep


class StepMaker:
    """Makes the training steps of a model for any mask, its forward pass and its gradients alone.

    images, labels: one batch, or tf.TensorSpecs of it: steps take batches of this very shape.
    weight_decay: see TrainingStep. optimizer: None for gradients alone.
    penalty: see TrainingStep.
    named: True keeps the names of the nodes, which tell their layers, for a trace. Numbers instead
    make the first call of each step shorter by a third of a step (mobilenetv2, 96x96).
    Steps share the model's and the optimizer's variables.
    """

    def __init__(self, model, optimizer, weight_decay, images, labels, penalty=None,
                 named=False):
        self.model = model
        self.optimizer = optimizer
        # Once: Keras takes milliseconds to gather them.
        self.variables = [keras_stack.raw(v) for v in model.trainable_variables]
        everything = np.ones(len(self.variables), dtype=bool)
        full = TrainingStep(model, optimizer, everything, weight_decay, outputs_gradients=True,
                            update=optimizer is not None, penalty=penalty)
        with keras_stack.dropout_as_product(model) as products:
            concrete = full.function.get_concrete_function(images, labels)
        self.concrete = concrete  # as traced; owns what the captured handles refer to
        self.captured = list(concrete.captured_inputs)
        self.function = _resolved(concrete.function_def)
        self.traced_names = {} if named else _number(self.function)  # number -> name
        self.shape = tuple(int(n) for n in images.shape)
        self.nodes = {node.name: node for node in self.function.node_def}
        self._noises = self._noises_of({product.op.name for product in products})
        self._sources = {name: [source.lstrip('^').split(':')[0] for source in node.input]
                         for name, node in self.nodes.items()}
        self._waits_for = {name: [source[1:] for source in node.input if source[0] == '^']
                           for name, node in self.nodes.items()}
        self.owners = self._owners()
        self.graph = analyse(_analysable(self.function), len(everything), self.owners, {})
        self._config = _config()
        self._made = 0
        names = [argument.name for argument in self.function.signature.input_arg]
        self.handles = names[2:]
        self.weights = {k: names[i] for i, k in self.owners.items() if k is not None}
        self._check_reads()

    def _check_reads(self):
        """UserError where the forward or backward pass takes a weight other than as a whole.

        Its gradient would be of rows alone, and no trial could put other values in its place.
        """
        of_weight = {argument: k for k, argument in self.weights.items()}
        for node in self.function.node_def:
            whole = node.op == 'ReadVariableOp' or node.name in self.graph.update
            for source in [] if whole else node.input:
                if source in of_weight:
                    raise UserError(
                        '{} is read by {}, row by row: networks with such layers cannot be trained '
                        'here'.format(self.variables[of_weight[source]].name, node.op))

    def _noises_of(self, products):
        """Noise -> (what it is multiplied by, its type), tensors; products: names as traced."""
        nodes = [node for name, node in self.nodes.items()
                 if self.traced_names.get(name, name) in products]
        return {node.input[1]: (node.input[0], node.attr['T'].type) for node in nodes}

    def _owners(self):
        """Argument index -> k for the argument that is the handle of tensor k."""
        handles = {id(variable.handle): k for k, variable in enumerate(self.variables)}
        return {i + 2: handles.get(id(handle))  # arguments 0 and 1 are images and labels
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
            left_out = {name for name, k in self.graph.update.items()
                        if k is not None and not mask[k]}
            effects = self.effects(left_out)
        else:
            # Computed and freed at once, as an update does; results are all held to the end.
            left_out = set(self.graph.update)
            names = [self._node_of(2 + k) for k in np.flatnonzero(mask)]
            effects = {'gradient_{}'.format(i): name for i, name in enumerate(names)}
        return MaskedStep(self.cut(effects, 2, left_out), mask, self)

    def gradients(self):
        """(images, labels) -> [loss, number correct, N gradients]; no dropout, no effect."""
        return MaskedStep(self.quiet(2 + len(self.variables)), None, self)

    def quiet(self, num_outputs):
        """FunctionDef of the first of: loss, number correct, N gradients; without dropout.

        It has no effects: neither random states nor BN statistics change.
        """
        noises = {noise.split(':')[0] for noise in self._noises}
        cut = self.cut({}, num_outputs, noises.union(self.graph.update))
        ones = {}
        for i, (noise, (like, dtype)) in enumerate(self._noises.items()):
            add_node(cut, 'OnesLike', 'ones/{}'.format(i), [like], T=dtype)
            ones[noise] = 'ones/{}:y:0'.format(i)
        for node in cut.node_def:
            set_inputs(node, [ones.get(tensor, tensor) for tensor in node.input])
        return cut

    def with_gradients(self):
        """As the step of all tensors, with the N gradients behind its two results.

        For the profiler, to find them in the executed graph. Not for timing: holding all of them to
        the end makes the late layers' large ones slower.
        """
        mask = np.ones(len(self.variables), dtype=bool)
        return MaskedStep(self.cut(self.effects(set()), 2 + len(mask), set()), mask, self)

    def forward(self, dropout=True):
        """(images, labels) -> [loss, number correct] of the forward pass alone, in training mode.

        Changes nothing, neither random states nor BN statistics. dropout: False leaves it out.
        """
        cut = self.cut({}, 2, set(self.graph.update)) if dropout else self.quiet(2)
        return MaskedStep(cut, None, self)

    def effects(self, left_out):
        """result name -> node of everything that changes a variable, but for `left_out`."""
        return {result: name for result, name in self.function.control_ret.items()
                if name not in left_out and self.nodes[name].op != 'ReadVariableOp'}

    def _node_of(self, output):
        name = self.function.signature.output_arg[output].name
        return self.function.ret[name].split(':')[0]

    def cut(self, effects, num_outputs, left_out):
        """FunctionDef with the ancestors of the outputs and of `effects` alone.

        A control edge orders two nodes: it is followed, so that order passes on through nodes
        which compute nothing, but not into updates that are left out.
        """
        outputs = list(self.function.signature.output_arg)[:num_outputs]
        kept = set()
        stack = list(effects.values()) + [self._node_of(i) for i in range(num_outputs)]
        while stack:
            name = stack.pop()
            if name in kept or name in left_out or name not in self.nodes:
                continue
            kept.add(name)
            stack.extend(self._sources[name])
        self._made += 1
        cut = function_pb2.FunctionDef()
        cut.signature.CopyFrom(self.function.signature)
        cut.signature.name = '{}_masked_{}'.format(cut.signature.name, self._made)
        del cut.signature.output_arg[:]
        del cut.signature.control_output[:]
        cut.signature.output_arg.extend(outputs)
        cut.signature.control_output.extend(effects)
        cut.node_def.extend(node for name, node in self.nodes.items() if name in kept)
        for node in cut.node_def:
            if any(name not in kept for name in self._waits_for[node.name]):
                set_inputs(node, [source for source in node.input if not (
                    source.startswith('^') and source[1:] not in kept)])
        for output in outputs:
            cut.ret[output.name] = self.function.ret[output.name]
        for result, name in effects.items():
            cut.control_ret[result] = name
        for key, value in self.function.attr.items():
            cut.attr[key].CopyFrom(value)
        for key, value in self.function.arg_attr.items():
            cut.arg_attr[key].CopyFrom(value)
        return cut


class GraphFunction:
    """(*tensors) -> list of results, of a graph that a StepMaker cut.

    Its graph leaves TensorFlow's memory with this object.
    """

    def __init__(self, definition, maker):
        self._ops = {node.name: node.op for node in definition.node_def}
        self._maker = maker  # keeps alive what the handles refer to
        self._name = definition.signature.name
        self._num_outputs = len(definition.signature.output_arg)
        self._attributes = ('executor_type', '', 'config_proto', maker._config)
        eager_context.context().add_function_def(definition)

    def __call__(self, *tensors):
        return eager_execute.execute(
            self._name, num_outputs=self._num_outputs,
            inputs=list(tensors) + self._maker.captured, attrs=self._attributes,
            ctx=eager_context.context())

    @property
    def nodes(self):
        """Name as traced -> op type."""
        return {self._maker.traced_names.get(name, name): op for name, op in self._ops.items()}

    def __del__(self):
        # At interpreter exit TensorFlow may be gone already.
        if eager_context is not None and hasattr(self, '_attributes'):
            try:
                eager_context.context().remove_function(self._name)
            except (AttributeError, TypeError, KeyError):
                pass


class MaskedStep(GraphFunction):
    """(images, labels) -> [loss, number correct], after one update of the selected tensors.

    Made by StepMaker. mask: (N,) bool, None where nothing is updated.
    """

    def __init__(self, definition, mask, maker):
        super().__init__(definition, maker)
        self.mask = mask
        self.called = False  # the first call compiles; the loop books it apart

    def __call__(self, images, labels, *more):
        if tuple(images.shape) != self._maker.shape:
            raise ValueError('this step was made for images of shape {}, not {}'.format(
                self._maker.shape, tuple(images.shape)))
        return super().__call__(images, labels, *more)

    def timed(self, *arguments):
        """(results, ms) of one call, until the device is done."""
        begin = time.perf_counter()
        results = self(*arguments)
        results[0].numpy()
        return results, 1e3 * (time.perf_counter() - begin)

    def milliseconds(self, images, labels):
        """What one call takes."""
        return self.timed(images, labels)[1]


def _config():
    """Serialised ConfigProto for the cut steps.

    On CPU they run as cut: TensorFlow's graph optimiser takes several steps' time for each mask
    and does not make a step faster there. On a GPU it chooses the memory layout, and stays on.
    """
    config = config_pb2.ConfigProto()
    config.CopyFrom(eager_context.context().config)
    if not tf.config.list_physical_devices('GPU'):
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString()


def _resolved(function_def):
    """A copy without the nodes that would tie every tensor to every other, and without detours.

    The gradients pass together through one IdentityN on their way to the optimizer, and results
    through Identity nodes that wait for all updates. A step takes as long to prepare as it has
    nodes: each constant is kept once, and what is read back right after it was written is taken
    from where it came.
    """
    resolved = function_pb2.FunctionDef()
    resolved.CopyFrom(function_def)
    nodes = {node.name: node for node in resolved.node_def}
    same = dict(_equal_constants(resolved.node_def), **_read_back(nodes))

    def source(tensor, passed_on):
        parts = tensor.split(':')
        while not tensor.startswith('^') and parts[0] in nodes and (
                nodes[parts[0]].op in passed_on):
            tensor = nodes[parts[0]].input[int(parts[2])]
            parts = tensor.split(':')
        return source(same[tensor], passed_on) if tensor in same else tensor

    for node in resolved.node_def:
        set_inputs(node, [source(tensor, ('IdentityN',)) for tensor in node.input])
    for output in resolved.signature.output_arg:
        resolved.ret[output.name] = source(resolved.ret[output.name], ('Identity', 'IdentityN'))
    return resolved


def _equal_constants(nodes):
    """Tensor -> tensor, of every constant to the first one of the same value."""
    first, same = {}, {}
    for node in nodes:
        if node.op == 'Const' and not node.input:
            value = node.device, node.attr['value'].SerializeToString(deterministic=True)
            if first.setdefault(value, node.name) != node.name:
                same[node.name + ':output:0'] = first[value] + ':output:0'
    return same


def _read_back(nodes):
    """Tensor -> tensor, of reads that wait for the one write of their variable to what it writes.
    """
    writes = {}
    for node in nodes.values():
        if node.op != 'ReadVariableOp' and node.input:
            writes.setdefault(node.input[0], []).append(node)
    same = {}
    for node in nodes.values():
        writers = writes.get(node.input[0], ()) if node.op == 'ReadVariableOp' else ()
        if len(writers) == 1 and writers[0].op == 'AssignVariableOp' and (
                '^' + writers[0].name in node.input):
            same[node.name + ':value:0'] = writers[0].input[1]
    return same


def _number(function_def):
    """Numbers nodes and arguments in place of their names; number -> name."""
    numbers = {thing.name: 'n{}'.format(i) for i, thing in enumerate(
        list(function_def.signature.input_arg) + list(function_def.node_def))}

    def numbered(tensor):
        name, colon, rest = tensor.lstrip('^').partition(':')
        return '^' * tensor.startswith('^') + numbers[name] + colon + rest

    for argument in function_def.signature.input_arg:
        argument.name = numbers[argument.name]
    for node in function_def.node_def:
        node.name = numbers[node.name]
        set_inputs(node, [numbered(tensor) for tensor in node.input])
    for results in (function_def.ret, function_def.control_ret):
        for result in list(results):
            results[result] = numbered(results[result])
    return {number: name for name, number in numbers.items()}


def add_node(function_def, op, name, inputs, **types):
    """A new node, which it returns; types: its type attributes."""
    node = function_def.node_def.add(name=name, op=op)
    node.input.extend(inputs)
    for key, value in types.items():
        node.attr[key].type = value
    return node


def set_inputs(node, inputs):
    if list(node.input) != inputs:
        del node.input[:]
        node.input.extend(inputs)


def _analysable(function_def):
    """name -> Node as backward_graph.analyse takes it, with argument and result nodes."""
    nodes = {}
    for i, argument in enumerate(function_def.signature.input_arg):
        nodes[argument.name] = Node('_Arg', [], [], i)
    for node in function_def.node_def:
        tensors = [tensor for tensor in node.input if not tensor.startswith('^')]
        nodes[node.name] = Node(node.op, [tensor.split(':')[0] for tensor in tensors], tensors,
                                None)
    for i, output in enumerate(function_def.signature.output_arg):
        tensor = function_def.ret[output.name]
        nodes['result {}'.format(i)] = Node('_Retval', [tensor.split(':')[0]], [tensor], i)
    return nodes
