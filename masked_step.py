"""Training steps for any mask, cut out of one traced graph.

To trace and optimise a new step for every selection costs tens of steps. Here the step of full
training is traced once. The step of a mask is a copy of its graph with everything left out that
only serves tensors which are not selected: what remains is what tracing that mask would give, and
is ready within a step or two (benchmarks/overhead.py).
"""

import contextlib
import time

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute as eager_execute

import keras_stack
from backward_graph import Node, analyse
from training_step import TrainingStep


class StepMaker:
    """Makes the training steps of a model for any mask, its forward pass and its gradients alone.

    images, labels: one batch, or tf.TensorSpecs of it: steps take batches of this very shape.
    weight_decay: see TrainingStep. optimizer: None for gradients alone.
    dropout: False leaves it out.
    Steps share the model's and the optimizer's variables.
    """

    def __init__(self, model, optimizer, weight_decay, images, labels, dropout=True):
        self.model = model
        self.optimizer = optimizer
        everything = np.ones(len(model.trainable_variables), dtype=bool)
        full = TrainingStep(model, optimizer, everything, weight_decay, outputs_gradients=True,
                            update=optimizer is not None)
        with contextlib.ExitStack() as stack:
            if not dropout:
                stack.enter_context(keras_stack.dropout_off(model))
            concrete = full.function.get_concrete_function(images, labels)
        self.concrete = concrete  # as traced; owns what the captured handles refer to
        self._captured = list(concrete.captured_inputs)
        self._function = _resolved(concrete.function_def)
        self._shape = tuple(int(n) for n in images.shape)
        self._nodes = {node.name: node for node in self._function.node_def}
        self.owners = self._owners(model)
        self.graph = analyse(_analysable(self._function), len(everything), self.owners, {})
        self._config = _config()
        self._made = 0
        names = [argument.name for argument in self._function.signature.input_arg]
        self._handles = names[2:]
        self._weights = {k: names[i] for i, k in self.owners.items() if k is not None}

    def _owners(self, model):
        """Argument index -> k for the argument that is the handle of tensor k."""
        handles = {id(keras_stack.raw(v).handle): k
                   for k, v in enumerate(model.trainable_variables)}
        return {i + 2: handles.get(id(handle))  # arguments 0 and 1 are images and labels
                for i, handle in enumerate(self._captured)}

    def step(self, mask, update=True):
        """The MaskedStep of the (N,) bool mask; ValueError where nothing is selected.

        update: False leaves out decay and update: forward and backward pass alone, no effect.
        """
        mask = np.asarray(mask, dtype=bool)
        if mask.shape != (len(self.model.trainable_variables),):
            raise ValueError('the mask has shape {}, the model {} trainable tensors'.format(
                mask.shape, len(self.model.trainable_variables)))
        if not mask.any():
            raise ValueError('a training step needs at least one selected tensor')
        if update:
            left_out = {name for name, k in self.graph.update.items()
                        if k is not None and not mask[k]}
            effects = self._effects(left_out)
        else:
            # Computed and freed at once, as an update does; results are all held to the end.
            left_out = set(self.graph.update)
            names = [self._node_of(2 + k) for k in np.flatnonzero(mask)]
            effects = {'gradient_{}'.format(i): name for i, name in enumerate(names)}
        return MaskedStep(self._cut(effects, 2, left_out), mask, self)

    def gradients(self):
        """(images, labels) -> [loss, number correct, N gradients]; changes nothing."""
        outputs = 2 + len(self.model.trainable_variables)
        return MaskedStep(self._cut({}, outputs, set(self.graph.update)), None, self)

    def with_gradients(self):
        """As the step of all tensors, with the N gradients behind its two results.

        For the profiler, to find them in the executed graph. Not for timing: holding all of them to
        the end makes the late layers' large ones slower.
        """
        mask = np.ones(len(self.model.trainable_variables), dtype=bool)
        return MaskedStep(self._cut(self._effects(set()), 2 + len(mask), set()), mask, self)

    def forward(self):
        """(images, labels) -> [loss, number correct] of the forward pass alone, in training mode.

        Changes nothing, neither random states nor BN statistics.
        """
        return MaskedStep(self._cut({}, 2, set(self.graph.update)), None, self)

    def updates(self):
        """(N gradients) -> N updates that the optimizer makes of them; changes nothing.

        Weight decay is left out. Cut out where the gradients enter, which become its arguments;
        weights and the optimizer's state are put back in the same graph.
        """
        names = {self._function.ret[output.name]: 'gradient_{}'.format(k)
                 for k, output in enumerate(self._function.signature.output_arg[2:])}
        # Of all nodes only those of the update, and reads, which other nodes wait for.
        left_out = {name for name, node in self._nodes.items()
                    if name not in self.graph.update and node.op != 'ReadVariableOp'}
        behind, todo = set(), list(names)  # what is computed from a gradient; decay is not
        readers = {}
        for name, node in self._nodes.items():
            for tensor in node.input:
                # Through control edges too: the new momentum is read back from its variable.
                for source in (tensor, tensor.lstrip('^').split(':')[0]):
                    readers.setdefault(source, []).append(name)
        while todo:
            for name in readers.get(todo.pop(), ()):
                if name not in behind and name not in left_out:
                    behind.add(name)
                    todo.append(name)
        effects = {result: name for result, name in self._effects(left_out).items()
                   if name in behind}
        decay = set(self._effects(left_out).values()) - behind
        cut = self._cut(effects, 0, left_out | decay)
        for node in cut.node_def:
            _set_inputs(node, [names.get(tensor, tensor) for tensor in node.input])
        arguments = list(cut.signature.input_arg)[2:]
        del cut.signature.input_arg[:]
        cut.arg_attr.clear()
        for k, output in enumerate(self._function.signature.output_arg[2:]):
            cut.signature.input_arg.add(name='gradient_{}'.format(k), type=output.type)
        cut.signature.input_arg.extend(arguments)
        self._undo(cut, effects)
        return GraphFunction(cut, self)

    def _undo(self, cut, effects):
        """Turns a graph that updates weights into one that returns the updates and undoes them."""
        dtypes = {id(keras_stack.raw(v).handle): keras_stack.raw(v).dtype.as_datatype_enum
                  for v in list(self.model.trainable_variables)
                  + keras_stack.optimizer_variables(self.optimizer)}
        types = {name: dtypes.get(id(handle)) for name, handle in zip(
            self._handles, self._captured)}
        written = {}  # handle argument -> type, of every variable that an effect may change
        for name in effects.values():
            for argument in self._nodes[name].input:
                if argument in types:
                    written[argument] = types[argument]
        for node in cut.node_def:
            if node.name in effects.values():
                node.input.append('^undo/all_before')
        for argument, dtype in written.items():
            _add(cut, 'ReadVariableOp', 'undo/before/' + argument, [argument], dtype=dtype)
        _add(cut, 'NoOp', 'undo/all_before', ['^undo/before/' + a for a in written])
        _add(cut, 'NoOp', 'undo/all_updated', ['^' + name for name in effects.values()])
        restored = []
        for k, argument in sorted(self._weights.items()):
            before = 'undo/before/{}:value:0'.format(argument)
            _add(cut, 'ReadVariableOp', 'undo/after/' + argument,
                 [argument, '^undo/all_updated'], dtype=written[argument])
            _add(cut, 'Sub', 'undo/update/' + argument,
                 ['undo/after/{}:value:0'.format(argument), before], T=written[argument])
            output = cut.signature.output_arg.add(name='update_{}'.format(k),
                                                  type=written[argument])
            cut.ret[output.name] = 'undo/update/{}:z:0'.format(argument)
            restored.append('^undo/update/' + argument)
        _add(cut, 'NoOp', 'undo/all_read', restored)
        del cut.signature.control_output[:]
        cut.control_ret.clear()
        for argument, dtype in written.items():
            name = 'undo/restore/' + argument
            _add(cut, 'AssignVariableOp', name,
                 [argument, 'undo/before/{}:value:0'.format(argument), '^undo/all_read'],
                 dtype=dtype)
            cut.signature.control_output.append(name)
            cut.control_ret[name] = name

    def _effects(self, left_out):
        """result name -> node of everything that changes a variable, but for `left_out`."""
        return {result: name for result, name in self._function.control_ret.items()
                if name not in left_out and self._nodes[name].op != 'ReadVariableOp'}

    def _node_of(self, output):
        name = self._function.signature.output_arg[output].name
        return self._function.ret[name].split(':')[0]

    def _cut(self, effects, num_outputs, left_out):
        """FunctionDef with the ancestors of the outputs and of `effects` alone.

        A control edge orders two nodes: it is followed, so that order passes on through nodes
        which compute nothing, but not into updates that are left out.
        """
        outputs = list(self._function.signature.output_arg)[:num_outputs]
        kept = set()
        stack = list(effects.values()) + [self._node_of(i) for i in range(num_outputs)]
        while stack:
            name = stack.pop()
            if name in kept or name in left_out or name not in self._nodes:
                continue
            kept.add(name)
            stack.extend(source.lstrip('^').split(':')[0] for source in self._nodes[name].input)
        self._made += 1
        cut = function_pb2.FunctionDef()
        cut.signature.CopyFrom(self._function.signature)
        cut.signature.name = '{}_masked_{}'.format(cut.signature.name, self._made)
        del cut.signature.output_arg[:]
        del cut.signature.control_output[:]
        cut.signature.output_arg.extend(outputs)
        cut.signature.control_output.extend(effects)
        for node in self._function.node_def:
            if node.name in kept:
                copy = cut.node_def.add()
                copy.CopyFrom(node)
                _set_inputs(copy, [source for source in node.input if not (
                    source.startswith('^') and source[1:] not in kept)])
        for output in outputs:
            cut.ret[output.name] = self._function.ret[output.name]
        for result, name in effects.items():
            cut.control_ret[result] = name
        for key, value in self._function.attr.items():
            cut.attr[key].CopyFrom(value)
        for key, value in self._function.arg_attr.items():
            cut.arg_attr[key].CopyFrom(value)
        return cut


class GraphFunction:
    """(*tensors) -> list of results, of a graph that a StepMaker cut.

    nodes: name -> op type of the graph, which leaves TensorFlow's memory with this object.
    """

    def __init__(self, definition, maker):
        self.nodes = {node.name: node.op for node in definition.node_def}
        self._maker = maker
        self._name = definition.signature.name
        self._num_outputs = len(definition.signature.output_arg)
        self._attributes = ('executor_type', '', 'config_proto', maker._config)
        eager_context.context().add_function_def(definition)

    def __call__(self, *tensors):
        return eager_execute.execute(
            self._name, num_outputs=self._num_outputs,
            inputs=list(tensors) + self._maker._captured, attrs=self._attributes,
            ctx=eager_context.context())

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

    def __call__(self, images, labels):
        if tuple(images.shape) != self._maker._shape:
            raise ValueError('this step was made for images of shape {}, not {}'.format(
                self._maker._shape, tuple(images.shape)))
        return super().__call__(images, labels)

    def milliseconds(self, images, labels):
        """What one call takes until the device is done."""
        begin = time.perf_counter()
        self(images, labels)[0].numpy()
        return 1e3 * (time.perf_counter() - begin)


def _add(function_def, op, name, inputs, **types):
    """A new node; types: its type attributes."""
    node = function_def.node_def.add(name=name, op=op)
    node.input.extend(inputs)
    for key, value in types.items():
        node.attr[key].type = value


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
    """A copy without the nodes that would tie every tensor to every other.

    The gradients pass together through one IdentityN on their way to the optimizer, and results
    through Identity nodes that wait for all updates.
    """
    resolved = function_pb2.FunctionDef()
    resolved.CopyFrom(function_def)
    nodes = {node.name: node for node in resolved.node_def}

    def source(tensor, passed_on):
        parts = tensor.split(':')
        while not tensor.startswith('^') and parts[0] in nodes and (
                nodes[parts[0]].op in passed_on):
            tensor = nodes[parts[0]].input[int(parts[2])]
            parts = tensor.split(':')
        return tensor

    for node in resolved.node_def:
        _set_inputs(node, [source(tensor, ('IdentityN',)) for tensor in node.input])
    for output in resolved.signature.output_arg:
        resolved.ret[output.name] = source(resolved.ret[output.name], ('Identity', 'IdentityN'))
    return resolved


def _set_inputs(node, inputs):
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
