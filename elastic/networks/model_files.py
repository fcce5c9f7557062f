"""Checks the file of a model before Keras loads it: it must neither run code nor fill the memory.

Each class and function that the file names must be one that only computes. Keras 3 also reads a
`.keras` file in its own safe mode. That mode alone is not enough: it forbids Python's code, but
lets a file call most functions of Keras. HDF5 has no such mode, and Keras 2 has none at all.
"""

import importlib
import inspect
import io
import json
import os
import stat
import zipfile

from tensorflow import keras

from elastic.compat import keras_stack
from elastic.errors import UserError

# Layers of Keras that run code from the file, or read files whose paths it names.
UNSAFE = ('Lambda', 'TFOpLambda', 'SlicingOpLambda', 'TFSMLayer', 'TorchModuleWrapper', 'JaxLayer',
          'FlaxLayer', 'StringLookup', 'IntegerLookup', 'TextVectorization', 'DenseFeatures')
# Keras 2 writes `x * 2` as TFOpLambda with the name of a TensorFlow function; these only compute.
PURE = ('math.', '__operators__.')
# Keras writes values as classes of these names, too.
OTHERS = ('Functional', 'Sequential', 'Model', 'TensorShape', 'Policy', 'DTypePolicy', '__tuple__',
          '__keras_tensor__', '__tensor__', '__numpy__', '__bytes__', '__ellipsis__', '__slice__')
# Modules of Keras 3 whose public functions only compute, but for NOT_PURE.
OF_FUNCTIONS = ['keras.' + name for name in (
    'activations', 'constraints', 'initializers', 'losses', 'metrics', 'ops', 'regularizers')]
NOT_PURE = ('get', 'serialize', 'deserialize')
LARGE, DENSITY = 10 ** 8, 1000  # bytes, and bytes for each of the file, from which data are a bomb


def check_model(path):
    """Raises UserError unless the saved model at `path` only computes when Keras loads and runs it.

    Lets damaged files and files of other formats pass: Keras refuses them. For some damaged ones it
    raises the error of zipfile, h5py or json.
    """
    if os.path.isdir(path):
        raise UserError("'{}' is a folder, and a SavedModel folder may write files when it runs: "
                        'give a file such as {}, or use --trust_model if you trust its author'
                        .format(path, keras_stack.MODEL_FILE))
    for config in _configurations(path):
        for found in _classes(config):
            _check_class(path, found)


def check_hdf5(path, file=None):
    """Raises UserError if an HDF5 file refers to other files, or inflates beyond its size.

    file: path or file object to read; default: path, which then only names it in the error.
    """
    import h5py
    declared = [0]

    def fault_of(_, member):  # a text ends the visit
        if isinstance(member, h5py.Group):
            links = [name for name in member
                     if not isinstance(member.get(name, getlink=True), h5py.HardLink)]
            return "has a link '{}' to another place or file".format(links[0]) if links else None
        if member.external or getattr(member, 'is_virtual', False):
            return "has data '{}' in another file".format(member.name)
        if member.dtype.hasobject:
            return "has '{}', which are not numbers".format(member.name)
        declared[0] += (member.size or 0) * member.dtype.itemsize

    with h5py.File(file or path, 'r') as opened:
        fault, size = fault_of('', opened) or opened.visititems(fault_of), opened.id.get_filesize()
    if fault is None and _is_bomb(declared[0], size):
        fault = 'inflates to {:,} bytes'.format(declared[0])
    if fault:
        raise UserError("'{}' {}: no program of ours or Keras writes such a file; it is refused"
                        .format(path, fault))


def _is_bomb(declared, stored):
    return declared > LARGE and declared > DENSITY * stored


def _configurations(path):
    """Yields each configuration that Keras may read from a file, as a dict.

    Raises UserError for data that lie elsewhere or inflate.
    """
    import h5py
    if os.path.isfile(path) and h5py.is_hdf5(path):  # it may be both
        check_hdf5(path)
        with h5py.File(path, 'r') as file:
            yield json.loads(file.attrs.get('model_config', '{}'))
    if os.path.isfile(path) and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename
                if os.path.isabs(name) or '..' in name.split('/') or (
                        stat.S_ISLNK(entry.external_attr >> 16)):
                    raise UserError("'{}' holds {}, a link or a path that leaves it; it is refused"
                                    .format(path, name))
                if _is_bomb(entry.file_size, entry.compress_size):
                    raise UserError("'{}' holds {}, which inflates to {:,} bytes; it is refused"
                                    .format(path, name, entry.file_size))
                if name.endswith('.h5'):
                    check_hdf5(path, io.BytesIO(archive.read(entry)))
            if 'config.json' in archive.namelist():
                config = json.loads(archive.read('config.json'))
                if isinstance(config, dict):
                    config.pop('compile_config', None)  # a loss, say: no model is loaded compiled
                yield config


def _classes(config):
    """Yields each dict within a configuration that names a class."""
    if isinstance(config, dict):
        if 'class_name' in config:
            yield config
        config = list(config.values())
    if isinstance(config, list):
        for each in config:
            yield from _classes(each)


def _check_class(path, found):
    """Raises UserError if the class that a configuration names may do more than compute."""
    name, content = found['class_name'], found.get('config')
    if name in UNSAFE:
        function = content.get('function') if isinstance(content, dict) else None
        if name not in ('TFOpLambda', 'SlicingOpLambda') or not str(function).startswith(PURE):
            raise UserError("'{}' holds a {} layer, which may run code or read files here: use "
                            '--trust_model if you trust its author'.format(path, name))
    elif not _only_computes(found):
        raise unknown(path, 'the function {}'.format(content) if name == 'function' else name)


def unknown(path, name):
    """Returns the UserError for a model that needs a class or function of its author."""
    return UserError("'{}' needs {}, a Python class or function that Keras does not know: from "
                     'Python, import it, load the model, and train it as docs/python.md shows'
                     .format(path, name))


def _only_computes(found):
    """Returns whether a class or function only computes, or is registered in this process."""
    name, module = found['class_name'], found.get('module')
    registered, known = keras.utils.get_custom_objects(), found.get('registered_name')
    if not all(each is None or isinstance(each, str) for each in (name, module, known)):
        return False
    if name == 'function' and keras_stack.KERAS_3:
        name = found.get('config')
        return isinstance(name, str) and (name in registered or any(
            inspect.isroutine(_found(place, name)) for place in OF_FUNCTIONS
            if module in (place, 'builtins') and name not in NOT_PURE))
    # Keras 2, and Keras 3 where there is no module, look for the class by its name alone.
    by_module = module and keras_stack.KERAS_3
    if (known if by_module else name) in registered or name in OTHERS:
        return True
    if by_module:
        value = _found(module, name)
        return inspect.isclass(value) and issubclass(value, (
            keras.layers.Layer, keras.Operation, keras.initializers.Initializer,
            keras.regularizers.Regularizer, keras.constraints.Constraint, keras.losses.Loss,
            keras.metrics.Metric, keras.optimizers.Optimizer, keras.DTypePolicy,
            keras.optimizers.schedules.LearningRateSchedule))
    return (module or 'keras').split('.')[0] in ('keras', 'builtins') and any(
        inspect.isclass(vars(place).get(name)) for place in (
            keras.layers, keras.initializers, keras.regularizers, keras.constraints,
            getattr(keras.layers, 'experimental', keras.layers)))


def _found(module, name):
    """Returns what a module of Keras has under a public name; None if there is nothing."""
    if module.split('.')[0] != 'keras' or name.startswith('_'):
        return None
    try:
        return vars(importlib.import_module(module)).get(name)
    except (ImportError, ValueError):  # ValueError: a name that is no module's, such as 'keras..a'
        return None
