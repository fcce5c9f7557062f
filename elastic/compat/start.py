"""Starts TensorFlow without its notices, with the threads and the seed of a run."""

import contextlib
import os
import sys
import tempfile

from elastic.errors import UserError


@contextlib.contextmanager
def quiet(after_error=False):
    """Within this context, hides what is written to stderr, also by C++; shows it after an error.

    No log level silences all notices of TensorFlow, because C++ writes to file descriptor 2.
    after_error: whether to hide it then, too, because the error says all.
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
            if not after_error:
                sys.stderr.write(notices.read().decode(errors='replace'))
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)


def quiet_tensorflow():
    """Imports TensorFlow without its start-up notices, unless TF_CPP_MIN_LOG_LEVEL is set."""
    if 'TF_CPP_MIN_LOG_LEVEL' in os.environ or 'tensorflow' in sys.modules:
        return
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
    with quiet():
        import tensorflow
        tensorflow.get_logger().setLevel('ERROR')
        tensorflow.config.list_physical_devices()


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
