"""The file in which a table of costs goes from one device to another: profiler.py --save_table.

JSON with a checksum; what is in it says costs.costs_of, how it is drawn timing_figures.device_bars.
"""

import os

from command_line import UserError
from files import read_json, write_json

KIND = 'costs'  # what tells such a table from other JSON
FROM_TIMINGS = ('key', 'names', 'shapes', 't_dw', 't_dy', 't_fp', 't_bp', 't_update')


def check_path(path):
    """UserError where no table can be saved at `path`: no such folder, or of another kind."""
    folder = os.path.dirname(os.path.abspath(path))
    if not path.endswith('.json') or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UserError('--save_table {}: cannot be written; give a .json file in a folder that is '
                        'there'.format(path))
    if os.path.exists(path):
        try:
            load(path)
        except UserError as error:
            raise UserError('--save_table would overwrite what it did not write: {}'.format(error))


def save(path, costs):
    """Writes what costs_of gave as JSON, with a checksum."""
    write_json(path, costs)
    print('saved {}'.format(path))


def load(path):
    """What `save` wrote; UserError where it is damaged or something else."""
    costs = read_json(path)
    if costs.get('kind') != KIND or not {'ways', 'model'}.union(FROM_TIMINGS) <= set(costs) or (
            not {'host', 'tensorflow', 'batch_size'} <= set(costs['key'])):
        raise UserError('{} is not a table of costs, which profiler.py --save_table writes'.format(
            path))
    return costs
