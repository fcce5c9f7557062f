"""Says where the timing table of a network lies, and reads the one that matches."""

import os

from elastic.timing.table import TensorTimings

TABLE_FILE = 'timings.json'
WIDER = 0.01  # of a step, below the noise of measuring it (docs/benchmarks.md)


def table_path(logs_dir, model_name, input_size, num_classes, batch_size, head=''):
    """Returns logs/<model>_<size>_<classes>_<batch>_profile/timings.json.

    head: str, of tables that differ by it.
    """
    name = os.path.splitext(os.path.basename(os.path.normpath(model_name)))[0]
    return os.path.join(logs_dir, '{}_{}_{}_{}{}_profile'.format(
        name, input_size, num_classes, batch_size, head and '_' + head), TABLE_FILE)


def stored_table(path, key):
    """Returns the TensorTimings at `path` if its key is `key`; else None, and prints why."""
    if not os.path.exists(path):
        print('no timing table at {}: profiling'.format(path))
        return None
    try:
        table = TensorTimings.load(path)
    except (ValueError, KeyError, TypeError) as error:
        print('the timing table cannot be used ({}): profiling again'.format(error))
        return None
    differing = [f'{k}: {table.key.get(k)} there, {key.get(k)} now'
                 for k in sorted(set(key).union(table.key)) if key.get(k) != table.key.get(k)]
    if differing:
        print(f'the timing table at {path} is for other settings ({", ".join(differing)}): '
              'profiling again')
        return None
    print('timing table: {}'.format(path))
    return table


def wider_table(path, key, model):
    """Returns the stored_table at `path`, of the same network with fewer classes, for a model.

    Returns None if its key differs, or if the new classes would change a step by more than WIDER.
    """
    table = stored_table(path, key)
    if table is None:
        return None
    # The forward pass and the error gradient of a layer take about as long as its weight gradient.
    head_ms, classes = 3 * table.t_dw[-2:].sum() + table.t_up[-2:].sum(), model.output_shape[-1]
    change = (classes / key['num_classes'] - 1) * head_ms / table.t_step
    print('  of {} classes: with {} a step takes {:.1f} % longer{}'.format(
        key['num_classes'], classes, 100 * change, ', so it is not used' * bool(change > WIDER)))
    return None if change > WIDER else table._replace(
        shapes=[tuple(int(n) for n in v.shape) for v in model.trainable_variables])
