"""Starts TensorFlow without its notices, with the threads and the seed of a run."""

import contextlib
import json
import os
import platform
import sys
import tempfile
import warnings

from elastic.errors import UserError

KERAS_JSON = dict(backend='tensorflow', floatx='float32', image_data_format='channels_last',
                  epsilon=1e-7)


@contextlib.contextmanager
def quiet(after_error=False, descriptor=2):
    """Within this context, hides what is written to stderr, also by C++; shows it after an error.

    No log level silences all notices of TensorFlow, because C++ writes to file descriptor 2.
    after_error: whether to hide it then, too, because the error says all. descriptor: 1 for stdout.
    """
    stream = sys.stdout if descriptor == 1 else sys.stderr
    stream.flush()
    terminal = os.dup(descriptor)
    with tempfile.TemporaryFile() as notices:
        os.dup2(notices.fileno(), descriptor)
        try:
            yield
        except BaseException:
            os.dup2(terminal, descriptor)
            notices.seek(0)
            if not after_error:
                sys.stderr.write(notices.read().decode(errors='replace'))
            raise
        finally:
            stream.flush()
            os.dup2(terminal, descriptor)
            os.close(terminal)


def quiet_tensorflow():
    """Imports TensorFlow without its start-up notices, unless TF_CPP_MIN_LOG_LEVEL is set.

    Also imports Keras, with the settings that training needs.
    """
    if 'tensorflow' in sys.modules:
        return
    _use_onednn()
    noisy = 'TF_CPP_MIN_LOG_LEVEL' in os.environ
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    with _settings_of_keras(), contextlib.ExitStack() if noisy else quiet():
        import tensorflow
        tensorflow.keras.backend.floatx()  # imports Keras, which reads its settings only now
        if not noisy:
            tensorflow.get_logger().setLevel('ERROR')
            tensorflow.config.list_physical_devices()


def _use_onednn():
    """Turns on the kernels of oneDNN on every x86 processor, unless TF_ENABLE_ONEDNN_OPTS is set.

    TensorFlow itself does so on newer processors alone. Elsewhere, its own kernels need up to 15
    times as long for an error gradient, and elastic training reaches fewer layers in the same time.
    TensorFlow 2.7 and 2.6, of the paper's boards, stay as they are.
    """
    if sys.version_info >= (3, 10) and platform.machine().lower() in ('x86_64', 'amd64'):
        os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')


def keras_home():
    """Returns the folder of Keras' settings and of downloaded weights."""
    return os.path.expanduser(os.environ.get('KERAS_HOME') or '~/.keras')


@contextlib.contextmanager
def _settings_of_keras():
    """Within this context, Keras has its default settings; warns of those of other projects."""
    path, home = os.path.join(keras_home(), 'keras.json'), os.environ.pop('KERAS_HOME', None)
    removed = {name: os.environ.pop(name) for name in list(os.environ)
               if name.startswith(('KERAS_', 'TF_USE_LEGACY_KERAS'))}
    found = ['{}={}'.format(name, value) for name, value in removed.items()
             if value.lower() not in ('', '0', 'false', 'tensorflow')]
    try:
        with open(path, encoding='utf-8') as file:
            content = dict(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError):
        content = {'content': 'not JSON'} if os.path.exists(path) else {}
    found += ['{} {!r:.40} in {}'.format(key, value, path) for key, value in content.items()
              if KERAS_JSON.get(key) != value]
    if found:
        warnings.warn('not used are these settings of Keras: ' + ', '.join(found))
    os.environ['KERAS_HOME'] = os.devnull  # where no keras.json can be read or written
    try:
        yield
    finally:
        del os.environ['KERAS_HOME']
        os.environ.update({'KERAS_HOME': home} if home else {})


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
