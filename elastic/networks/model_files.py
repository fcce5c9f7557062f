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
import zipfile

import numpy as np
from tensorflow import keras

from elastic.command_line import UserError
from elastic.compat import keras_stack

# Layers of Keras that run code from the file, or read files whose paths it names.
UNSAFE = ('Lambda', 'TFOpLambda', 'SlicingOpLambda', 'TFSMLayer', 'TorchModuleWrapper', 'JaxLayer',
          'FlaxLayer', 'StringLookup', 'IntegerLookup', 'TextVectorization', 'DenseFeatures')
# Keras 2 writes `x * 2` as TFOpLambda with the name of a TensorFlow function; these only compute.
PURE = ('math.', '__operators__.')
OTHERS = ('Functional', 'Sequential', 'Model', 'TensorShape', 'Policy', 'DTypePolicy', '__tuple__',
          '__keras_tensor__')
# Keras 3 also writes values and functions as classes of these names. All but functions are data.
VALUES = ('__tensor__', '__numpy__', '__bytes__', '__ellipsis__', '__slice__')
OF_FUNCTIONS = ('activations', 'constraints', 'initializers', 'losses', 'metrics', 'ops',
                'regularizers')  # modules of Keras 3 whose public functions only compute, but for:
NOT_PURE = ('get', 'serialize', 'deserialize')
LARGE, DENSITY = 10 ** 8, 1000  # bytes, and bytes for each stored one, from which data are a bomb


def check_model(path):
    """Raises UserError unless the saved model at `path` only computes when Keras loads and runs it.

    Lets damaged files and files of other formats pass: Keras refuses them. For some damaged ones it
    raises the error of zipfile, h5py or json.
    """
    if os.path.isdir(path) and not keras_stack.KERAS_3:
        raise UserError("'{}' is a SavedModel folder, whose graph may write files here: save the "
                        'model as .h5, or use --trust_model if you trust its author'.format(path))
    import h5py
    hdf5 = os.path.isfile(path) and h5py.is_hdf5(path)
    if hdf5:
        check_hdf5(path)
    if os.path.isfile(path) and zipfile.is_zipfile(path):
        check_zip(path)
    for config in _configurations(path, hdf5):
        for found in _classes(config):
            _check_class(path, found)


def check_hdf5(path, file=None):
    """Raises UserError if an HDF5 file refers to other files, or inflates beyond its size.

    file: path or file object to read; default: path, which then only names it in the error.
    """
    import h5py
    sizes = []
    with h5py.File(path if file is None else file, 'r') as opened:
        reason = _fault_of_group(opened, set(), sizes)
    declared, stored = np.sum(sizes or [(0, 0)], axis=0)
    if not reason and _is_bomb(declared, stored):
        reason = 'inflates to {:,} bytes'.format(int(declared))
    if reason:
        raise UserError("'{}' {}: no program of ours or Keras writes such a file; it is refused"
                        .format(path, reason))


def check_zip(path):
    """Raises UserError if a `.keras` file inflates beyond its size, or holds such HDF5 data."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if _is_bomb(entry.file_size, entry.compress_size):
                raise UserError("'{}' holds {}, which inflates to {:,} bytes; it is refused".format(
                    path, entry.filename, entry.file_size))
            if entry.filename.endswith('.h5'):
                check_hdf5(path, io.BytesIO(archive.read(entry)))


def _is_bomb(declared, stored):
    return declared > LARGE and declared > DENSITY * stored


def _fault_of_group(group, seen, sizes):
    """Returns what is wrong with an HDF5 group, or None.

    seen: set of checked objects. sizes: list of (declared, stored) bytes of data. Both grow.
    """
    import h5py
    for name in group:
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            return "has a link '{}' to another place or file".format(name)
        member = group[name]
        address = h5py.h5o.get_info(member.id).addr
        if address in seen:
            continue
        seen.add(address)
        if isinstance(member, h5py.Group):
            reason = _fault_of_group(member, seen, sizes)
        else:
            reason = _fault_of_data(name, member, sizes)
        if reason:
            return reason
    return None


def _fault_of_data(name, data, sizes):
    if data.external or getattr(data, 'is_virtual', False):
        return "has data '{}' in another file".format(name)
    declared = data.size * data.dtype.itemsize if data.shape is not None else 0
    if data.dtype.hasobject:
        return "has '{}', which are not numbers".format(name)
    sizes.append((declared, data.id.get_storage_size()))
    if _is_bomb(*sizes[-1]):
        return "has '{}', which inflates to {:,} bytes".format(name, declared)
    return None


def _configurations(path, hdf5):
    """Yields each configuration that Keras may read from this path, as a dict."""
    if hdf5:
        import h5py
        with h5py.File(path, 'r') as file:
            if 'model_config' in file.attrs:
                text = file.attrs['model_config']
                yield json.loads(text.decode() if isinstance(text, bytes) else text)
    if os.path.isdir(path):
        name = os.path.join(path, 'config.json')
        if os.path.exists(name):
            with open(name, encoding='utf-8') as file:
                yield json.load(file)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if 'config.json' in archive.namelist():
                config = json.loads(archive.read('config.json').decode())
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
        pure = name in ('TFOpLambda', 'SlicingOpLambda') and isinstance(function, str) and (
            function.startswith(PURE))
        if not pure:
            raise UserError("'{}' holds a {} layer, which may run code or read files here: use "
                            '--trust_model if you trust its author'.format(path, name))
    elif not _only_computes(name, found):
        if name == 'function':
            name = 'the function {}'.format(content)
        raise UserError(
            "'{}' needs {}, a Python class or function that Keras does not know: from Python, "
            'import it, load the model, and train it as docs/python.md shows'.format(path, name))


def _only_computes(name, found):
    """Returns whether a class or function only computes, or is registered in this process.

    found: the configuration that names it.
    """
    names = [found.get(key) for key in ('class_name', 'registered_name', 'module')]
    if not all(each is None or isinstance(each, str) for each in names):
        return False
    registered = keras.utils.get_custom_objects()
    module = found.get('module') if keras_stack.KERAS_3 else None
    if name == 'function' and keras_stack.KERAS_3:
        function = found.get('config')
        return isinstance(function, str) and (
            function in registered or _is_pure_function(module, function))
    # Keras 2, and Keras 3 where there is no module, look for the class by its name alone.
    if found.get('registered_name' if module else 'class_name') in registered:
        return True
    if name in OTHERS or (keras_stack.KERAS_3 and name in VALUES):
        return True
    if module:
        return _computes_in_keras_3(module, name)
    public = [vars(place).get(name) for place in (
        keras.layers, keras.initializers, keras.regularizers, keras.constraints,
        getattr(keras.layers, 'experimental', keras.layers))]
    return (found.get('module') or 'keras').split('.')[0] in ('keras', 'builtins') and any(
        inspect.isclass(value) for value in public)


def _is_pure_function(module, name):
    """Returns whether a function that Keras 3 finds by these names is public and computes."""
    if name.startswith('_') or name in NOT_PURE:
        return False
    places = ['keras.' + each for each in OF_FUNCTIONS]
    if module in places:
        places = [module]
    elif module != 'builtins':
        return False
    return any(inspect.isroutine(vars(importlib.import_module(place)).get(name))
               for place in places)


def _computes_in_keras_3(module, name):
    """Returns whether these names mean a class of Keras 3 that is made to compute in a model."""
    if module.split('.')[0] != 'keras':
        return False
    try:
        value = vars(importlib.import_module(module)).get(name)
    except (ImportError, ValueError):  # ValueError: a name that is no module's, such as 'keras..a'
        return False
    return inspect.isclass(value) and issubclass(value, (
        keras.layers.Layer, keras.Operation, keras.initializers.Initializer,
        keras.regularizers.Regularizer, keras.constraints.Constraint, keras.losses.Loss,
        keras.metrics.Metric, keras.optimizers.Optimizer, keras.DTypePolicy,
        keras.optimizers.schedules.LearningRateSchedule))
