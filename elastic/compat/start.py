"""Starts TensorFlow without its notices, with the threads and the seed of a run."""

import contextlib
import json
import os
import sys
import tempfile
import warnings

from elastic.errors import UserError

# Settings that other projects may need of Keras. What is trained here needs none of them.
KERAS_VARIABLES = ('TF_USE_LEGACY_KERAS', 'KERAS_BACKEND', 'KERAS_MAX_EPOCHS',
                   'KERAS_MAX_STEPS_PER_EPOCH', 'KERAS_NNX_ENABLED')
CHANGE_NOTHING = ('', '0', 'false', 'tensorflow')
KERAS_JSON = dict(backend='tensorflow', floatx='float32', image_data_format='channels_last',
                  epsilon=1e-7, nnx_enabled=False)


@contextlib.contextmanager
def quiet():
    """Within this context, hides what is written to stderr, also by C++; shows it after an error.

    No log level silences all notices of TensorFlow, because C++ writes to file descriptor 2.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as notices:
        os.dup2(notices.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(terminal, 2)
            notices.seek(0)
            sys.stderr.write(notices.read().decode(errors='replace'))
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)


def quiet_tensorflow():
    """Imports TensorFlow and Keras, with the settings that training needs.

    A warning names settings of other projects, which are not used. Start-up notices are hidden
    unless TF_CPP_MIN_LOG_LEVEL is set.
    """
    if 'tensorflow' in sys.modules:
        return
    noisy = 'TF_CPP_MIN_LOG_LEVEL' in os.environ
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    with _own_settings_of_keras(), contextlib.ExitStack() if noisy else quiet():
        import tensorflow
        tensorflow.keras.backend.floatx()  # imports Keras, which reads its settings only now
        if not noisy:
            tensorflow.get_logger().setLevel('ERROR')
            tensorflow.config.list_physical_devices()


def keras_home():
    """Returns the folder of Keras' settings and of downloaded weights."""
    return os.path.expanduser(os.environ.get('KERAS_HOME') or '~/.keras')


@contextlib.contextmanager
def _own_settings_of_keras():
    """Within this context, Keras finds no settings of other projects; warns of them."""
    path = os.path.join(keras_home(), 'keras.json')
    given = [(name, os.environ.pop(name, '')) for name in KERAS_VARIABLES]
    found = ['{}={}'.format(name, value) for name, value in given
             if value.lower() not in CHANGE_NOTHING] + _unlike_ours(path)
    if found:
        warnings.warn('these settings of Keras are not used, because training needs its defaults: '
                      + ', '.join(found))
    home = os.environ.get('KERAS_HOME')
    os.environ['KERAS_HOME'] = os.devnull  # where no keras.json can be read or written
    try:
        yield
    finally:
        del os.environ['KERAS_HOME']
        os.environ.update({} if home is None else {'KERAS_HOME': home})


def _unlike_ours(path):
    """Returns a text for each setting in a keras.json that differs from KERAS_JSON."""
    if not os.path.exists(path):
        return []
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
        return ['{} {} in {}'.format(key, json.dumps(content[key])[:40], path)
                for key, ours in KERAS_JSON.items() if content.get(key, ours) != ours]
    except (OSError, ValueError, AttributeError, RecursionError):
        return [path + ', which holds no JSON object']


def start_tensorflow(inter_op_threads=0, deterministic=False, seed=None):
    """Imports TensorFlow quietly and sets its threads, determinism and seed.

    inter_op_threads: number of ops that may run at once; 0: TensorFlow chooses.
    Raises UserError if this TensorFlow has no deterministic ops.
    """
    quiet_tensorflow()
    import tensorflow as tf

    from elastic.compat import keras_stack
    keras_stack.keep_tracebacks()  # in_one_line reads them
    if inter_op_threads != tf.config.threading.get_inter_op_parallelism_threads():
        tf.config.threading.set_inter_op_parallelism_threads(inter_op_threads)
    if deterministic:
        if not hasattr(tf.config.experimental, 'enable_op_determinism'):
            raise UserError('--deterministic needs TensorFlow 2.9 or later; this is {}'.format(
                tf.__version__))
        tf.config.experimental.enable_op_determinism()
    if seed is not None:
        keras_stack.set_seed(seed)
