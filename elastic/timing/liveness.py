"""Predicts which tensors of the graph a step holds at which time. Nothing runs here.

The ops of the full step are put into the order in which TensorFlow's executor runs them. A tensor
is held from the op that makes it to the last op that reads it, which depends on the mask: each
stretch between two readers is held for the tensors that need one of the later readers.
"""

import collections
import heapq

import numpy as np

from elastic.steps.function_graph import work_of
from elastic.steps.inlining import output_names, resolved
from elastic.steps.step_graph import TYPICAL_RATES, estimated_ms, reachable, tensor_sets
from elastic.steps.training_step import NUM_RESULTS
from elastic.timing.memory import Memory

# Their output is their input.
ALIASES = frozenset(('Identity', 'IdentityN', 'Reshape', 'Squeeze', 'ExpandDims', 'StopGradient',
                     'PreventGradient', 'EnsureShape'))
# Their output is held by a variable, by the graph or by the caller.
HELD_ANYWAY = frozenset(('_Arg', 'Const', 'ReadVariableOp', 'VarHandleOp', 'Placeholder'))
# They write over an input of the same size that nothing reads any more.
IN_PLACE = frozenset((
    'Abs', 'Add', 'AddN', 'AddV2', 'BiasAdd', 'Cast', 'Div', 'DivNoNan', 'Elu', 'EluGrad', 'Erf',
    'Exp', 'FusedBatchNorm', 'FusedBatchNormV3', 'LeakyRelu', 'LeakyReluGrad', 'Log', 'Log1p',
    'LogSoftmax', 'Maximum', 'Minimum', 'Mul', 'Neg', 'Pow', 'RealDiv', 'Reciprocal', 'Relu',
    'Relu6', 'Relu6Grad', 'ReluGrad', 'Rsqrt', 'RsqrtGrad', 'Select', 'SelectV2', 'Sigmoid',
    'SigmoidGrad', 'Softmax', 'Sqrt', 'Square', 'SquaredDifference', 'Sub', 'Tanh', 'TanhGrad'))
COPYING = ('AssignSubVariableOp', 'AssignAddVariableOp')  # unless nothing else reads the variable
LEAST = 4096  # bytes of a tensor that counts; hundreds of smaller ones add up to less than 1 %
L2_BYTES, L3_BYTES = 256 << 10, 30 << 20  # as TensorFlow's convolutions assume
THREADS = 2  # that run ops
QUICK_MS = 2e-3  # an op that is as fast is run at once, by TYPICAL_RATES


def memory_of(maker):
    """Returns the Memory of the steps of a masked_step.StepMaker."""
    nodes, sizes = _run(maker.cutter), _sizes(maker)
    begins, ends = _executed(nodes, work_of(maker.concrete.graph))
    order, last = sorted(nodes, key=begins.get), max(ends.values()) + 1
    everyone = (1 << len(maker.variables)) - 1
    bits = dict.fromkeys(nodes, everyone)  # bit mask of the tensors that need each node
    bits.update((name, 1 << k) for name, k in maker.graph.update.items() if k is not None)
    bits.update(maker.graph.backward)
    made, readers, source = _readers(nodes, order, sizes)
    results = [resolved(tensor, source) for tensor, _ in maker.outputs[:NUM_RESULTS]]
    for tensor in results:
        readers[tensor].append(None)
    turn = max(ends[tensor.split(':')[0]] for tensor in results)  # the forward pass ends
    # Bytes that are fixed, that grow with the batch, and those that the forward pass leaves.
    entries = collections.defaultdict(lambda: np.zeros(3))
    entries[everyone, 0, 1]  # there is one, however small the network

    def add(needed_by, begin, end, size, is_forward=False):
        if needed_by and end > begin and size[0]:
            entries[needed_by, begin, end][int(size[1])] += size[0]
            if is_forward and begin <= turn < end and needed_by != everyone:
                entries[needed_by, begin, end][2] += size[0]
    for tensor, name in made.items():
        size, begin = sizes[name][tensor], ends[name]
        add(bits[name], begins[name], begin, size)
        uses = sorted(((last, everyone) if reader is None else (
            begins[reader] if nodes[reader].op in IN_PLACE and size == next(
                iter(sizes[reader].values()), None) else ends[reader], bits[reader])
            for reader in readers[tensor]), reverse=True)
        later = 0
        for (end, reads), (before, _) in zip(uses, uses[1:] + [(begin, 0)]):
            later |= reads
            add(later, max(begin, before), end, size, name in maker.graph.forward)
    for name in order:
        add(bits[name], begins[name], ends[name], _workspace(maker, nodes[name]))
    for name, end, value in _copies(nodes, order, readers, ends):
        value = resolved(value, source)
        nbytes, _ = sizes[value.split(':')[0]].get(value, (0, False))
        add(bits[name], begins[name], end, (nbytes, False))
    return _memory(entries, maker)


def _run(cutter):
    """Returns name -> node of what a step runs, without gradients that no tensor needs."""
    function, nodes = cutter.function, cutter.nodes
    ends = [tensor.split(':')[0] for tensor in function.ret.values()] + list(
        function.control_ret.values())
    live = reachable(ends, lambda name: [source.lstrip('^').split(':')[0] for source in (
        nodes[name].input if name in nodes else ())])
    return {name: node for name, node in nodes.items() if name in live}


def _copies(nodes, order, readers, ends):
    """Yields (node, event at which its copy is alone, value) of updates that copy their variable.

    The first write to a variable finds its value in use, as long as an op reads it. value: a tensor
    of the same size.
    """
    reads = collections.defaultdict(list)
    for name, node in nodes.items():
        if node.op == 'ReadVariableOp':
            reads[node.input[0]] += readers[name + ':value:0']
    written = set()
    for name in order:
        node = nodes[name]
        if node.op in COPYING and node.input[0] not in written:
            written.add(node.input[0])
            yield name, max([ends[name]] + [ends[each] for each in reads[node.input[0]] if each]
                            ), node.input[1]


def _memory(entries, maker):
    keys = list(entries)
    sets = sorted({needed_by for needed_by, _, _ in keys})
    number, batch = {each: i for i, each in enumerate(sets)}, maker.micro_batch
    of, begin, end = np.array([(number[needed_by], begin, end)
                               for needed_by, begin, end in keys]).T
    fixed, whole, kept = np.array([entries[key] for key in keys]).T
    weights = sum(int(np.prod(v.shape)) * v.dtype.size for v in maker.variables)
    return Memory(tensor_sets(sets, len(maker.variables)), of, begin, end, fixed, whole / batch,
                  np.bincount(of, kept, len(sets)), batch, weights)


def _readers(nodes, order, sizes):
    """Returns (tensor -> its node, tensor -> names of its readers, alias -> tensor)."""
    made, readers, source = {}, collections.defaultdict(list), {}
    for name in order:
        node = nodes[name]
        inputs = [resolved(tensor, source) for tensor in node.input if tensor[0] != '^']
        if node.op in ALIASES:
            source.update((tensor, inputs[i if node.op == 'IdentityN' else 0])
                          for i, tensor in enumerate(sizes[name]))
            continue
        for tensor in set(inputs):
            readers[tensor].append(name)
        if node.op not in HELD_ANYWAY:
            made.update((tensor, name) for tensor, (nbytes, _) in sizes[name].items()
                        if nbytes >= LEAST)
    return made, readers, source


def _sizes(maker):
    """Returns node -> {output: (bytes, whether they grow with the batch)}."""
    found, batch = collections.defaultdict(dict), maker.micro_batch
    for op in maker.concrete.graph.get_operations():
        if op.name in maker.cutter.nodes:
            for tensor, output in zip(output_names(op), op.outputs):
                nbytes = (output.shape.num_elements() or 0) * output.dtype.size
                grows = bool(output.shape.rank) and output.shape[0] == batch
                found[op.name][tensor] = nbytes, grows
    return found


def _workspace(maker, node):
    """Returns (bytes, whether they grow with the batch) in which an op works."""
    if node.op not in ('Conv2DBackpropInput', 'Conv2DBackpropFilter'):
        return 0, False
    op = maker.concrete.graph.get_operation_by_name(node.name)
    backward = node.op == 'Conv2DBackpropInput'
    patch, gradient = (op.inputs[1] if backward else op.outputs[0]).shape, op.inputs[2].shape
    if not (patch.is_fully_defined() and gradient.is_fully_defined()) or (
            node.attr['data_format'].s not in (b'', b'NHWC')):
        return 0, False
    batch, high, wide, channels = gradient
    patch, pixels = int(np.prod(patch[:3])), high * wide
    unit = pixels * channels + patch * channels + pixels * patch  # numbers of one image
    rows = -(-L3_BYTES // 4 // unit)
    if backward and (batch == 1 or unit // 2 >= L2_BYTES // 4):
        rows = 1
    return 4 * min(rows, batch) * pixels * patch, rows >= batch


def _executed(nodes, work):
    """Returns (name -> event at which the op begins, name -> event at which it ends).

    A thread continues with one of the ops that its last op made ready and queues the others. Then
    it takes its newest, or another thread's oldest. work: as in StepGraph.
    """
    ms = {name: estimated_ms(node.op, work.get(name), TYPICAL_RATES)
          for name, node in nodes.items()}
    after, left = collections.defaultdict(list), {}
    for name, node in nodes.items():
        sources = {source.lstrip('^').split(':')[0] for source in node.input}.intersection(nodes)
        left[name] = len(sources)
        for source in sources:
            after[source].append(name)
    queues = [collections.deque() for _ in range(THREADS)]
    inline = [collections.deque() for _ in range(THREADS)]
    inline[0].extend(name for name in nodes if not left[name])
    begins, ends, running, idle, now = {}, {}, [], set(range(THREADS)), 0.0
    while True:
        for thread in sorted(idle):
            waiting = [queue for queue in queues if queue]
            if not inline[thread] and waiting:
                own = queues[thread]
                inline[thread].append(own.popleft() if own else waiting[0].pop())
            if inline[thread]:
                name = inline[thread].popleft()
                begins[name] = len(begins) + len(ends)
                heapq.heappush(running, (now + ms[name], begins[name], thread, name))
                idle.discard(thread)
        if not running:
            return begins, ends
        now, _, thread, name = heapq.heappop(running)
        ends[name] = len(begins) + len(ends)
        idle.add(thread)
        ready = []
        for reader in after[name]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
        inline[thread].extend(reader for reader in ready if ms[reader] < QUICK_MS)
        slow = [reader for reader in ready if ms[reader] >= QUICK_MS]
        if slow and not inline[thread]:
            inline[thread].append(slow.pop())
        queues[thread].extendleft(slow)
