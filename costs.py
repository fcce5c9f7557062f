"""What each way to train costs on this device, before it trains: time, memory, disk.

Takes a timing table (tensor_timings.py), how many images there are, and the most memory that steps
took (peak_memory.py); gives the table that profiler.py ends with (cost_file.py keeps it), and which
of the paper's figures (figure_grid.py) are within reach. A way to train, or a run of a figure, is
the arguments that main.py takes for it; scripts/reproduce.py reckons by the same functions.
"""

import time

import numpy as np

import command_line
import prefix_cache
from command_line import UserError
from cost_file import FROM_TIMINGS, KIND
from datasets import augmentation_of, sizes_at_hand
from figure_grid import BASELINES, DATA, ELASTIC, FIGURES, PRUNE, runs_of
from flags import parse_arguments
from row_costs import RowCosts
from schemes import SCHEMES
from selection_solver_DP import choose_tensors, out_of_reach, smallest_rho

RHOS = (0.7, 0.5, 0.35, 0.25)
OF_A_STEP = ('model_name', 'alpha', 'input_size', 'batch_size', 'optimizer', 'clip_norm')


# ------------------------------------------------------- what a run of given arguments takes


def mask_of(train_type, names):
    """(N,) bool: what the fixed scheme trains; the last of the N tensors is of the output layer."""
    layers = np.array([name.rsplit('/', 1)[0] for name in names])
    return SCHEMES[train_type].trains(names, layers == layers[-1])


def epochs_of_a_cache(args):
    """How many there are for each that fills a prefix cache: it is read until views change."""
    changing = augmentation_of(args.dataset_name, args.augmentation) != 'none' and args.interval
    return args.num_epochs / (-(-args.num_epochs // args.interval) if changing else 1)


def priced(args, table, row_costs=None):
    """The TensorTimings with the price of a prefix cache where these arguments ask for one.

    row_costs: RowCosts of its rows; None: they cost nothing, as at best.
    """
    if args.prefix_cache != 'on':
        return table
    best = table.cached_at_best(epochs_of_a_cache(args))
    if row_costs is None:
        return best
    read, write = row_costs.copying(table.cut_bytes)
    return best._replace(cache=best.cache._replace(read_ms=read, write_ms=write))


def why_not(args, table):
    """Why rho is out of reach by this table, in one line; None where it is not.

    With a prefix cache: where it is so at best. A run whose data are at hand knows more.
    """
    return out_of_reach(priced(args, table), args.rho) if args.train_type == ELASTIC else None


def step_ms(args, table):
    """ms of a mean step, by a priced table: what elastic training may spend. PruneTrain is taken as
    full training, which it is until channels go.
    """
    if args.train_type == ELASTIC:
        return args.rho * table.t_step
    if args.train_type == PRUNE:
        return table.t_step
    return float(table.step_time(mask_of(args.train_type, table.names)))


def hours_of(args, table, images):
    """Hours of a run, tests between epochs included, by a priced table.

    images: (training, test) images of the data set.
    """
    train_images = args.train_images or images[0]
    steps = min(train_images // args.batch_size, args.steps_per_epoch or train_images)
    tests = min(images[1] / args.batch_size, args.validation_steps or images[1])
    return args.num_epochs * (steps * step_ms(args, table) + tests * table.t_fp) / 3.6e6


# ------------------------------------------------------------------------------ the table


def sizes_of(args):
    """(classes, training images, test images) of the data set; UserError where that is not known
    before it is prepared, or a batch is larger. args: of profiler.py.
    """
    sizes = DATA.get(args.dataset_name) or sizes_at_hand(
        args.dataset_name, args.input_size, args.data_dir)
    if sizes is None:
        raise UserError('data set {} is not prepared yet, so nothing is known of it; main.py '
                        'prepares it'.format(args.dataset_name))
    if args.batch_size > sizes[1]:
        raise UserError('a batch of {} does not fit into the {} training images of {}'.format(
            args.batch_size, sizes[1], args.dataset_name))
    return sizes


def costs_of(args, table, path, images, peaks):
    """dict that JSON can hold: see describe. What was measured for it goes to the table at `path`.

    args: of profiler.py. table: TensorTimings, stored at `path`. images: (training, test) images.
    peaks: as of peaks_of.
    """
    row_ms = dict(table.measured.get('row_ms', {}))
    memory, _ = prefix_cache.room(args.logs_dir)
    row_costs = RowCosts(images[0], args.batch_size, args.logs_dir, memory_bytes=memory,
                         measured=row_ms)
    ways = [way_of(way, table, row_costs, images, peaks, memory) for way in ways_of(args, table)]
    measured = dict(peak_bytes=peaks, row_ms=row_ms)
    if measured != table.measured:
        table._replace(measured=measured).save(path)
    content = dict(kind=KIND, model=args.model_name, dataset=args.dataset_name,
                   num_epochs=args.num_epochs, train_images=images[0], test_images=images[1],
                   ways=ways, figures=figures_of(args, table), notes=notes_on(args, table))
    for name in FROM_TIMINGS:
        value = getattr(table, name)
        content[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return dict(content, shapes=[list(shape) for shape in table.shapes])


def peaks_of(args, model):
    """train type -> the most bytes that it takes, or None; see peak_memory.peaks_of. Elastic
    training also evaluates importance. model: Keras model, whose weights change.
    """
    import tensorflow as tf

    import peak_memory
    from keras_stack import variable_name
    begin, names = time.perf_counter(), [variable_name(v) for v in model.trainable_variables]
    peaks = peak_memory.peaks_of(
        model, tf.random.stateless_uniform(
            (args.batch_size, args.input_size, args.input_size, 3), (0, 0), 0, 255),
        tf.zeros((args.batch_size,), tf.int32),
        {name: mask_of(name, names) for name in BASELINES}, args.optimizer, args.weight_decay,
        args.clip_norm)
    peaks[ELASTIC] = peaks.pop('importance')
    print('peak memory measured in {:.1f} s'.format(time.perf_counter() - begin))
    return peaks


def ways_of(args, table):
    """Arguments of main.py, way by way; with a prefix cache, too, where it can serve."""
    given = ['--{}={}'.format(flag, getattr(args, flag)) for flag in (
        'model_name', 'dataset_name', 'batch_size', 'num_epochs', 'augmentation')
             if getattr(args, flag) is not None]
    can_be_cut = args.num_epochs > 1 and np.isfinite(table.cut_bytes).any()
    for train_type in BASELINES + (ELASTIC,):
        for rho in RHOS if train_type == ELASTIC else (1,):
            for cache in ('off', 'on') if can_be_cut and SCHEMES[train_type].frozen_front else (
                    'off',):
                yield parse_arguments(given + ['--train_type=' + train_type, '--prefix_cache=' +
                                               cache, '--rho={}'.format(rho)])


def way_of(args, table, row_costs, images, peaks, memory):
    """dict of one way to train: a row of the table; None: out of reach, or not measured.

    tensors, cache_bytes: of elastic training those that it would choose, were all equally
    important. memory: bytes of it that a cache may take; a larger one goes to the disk.
    """
    table, elastic = priced(args, table, row_costs), args.train_type == ELASTIC
    least = smallest_rho(table) if elastic else None
    row = dict(train_type=args.train_type, rho=args.rho if elastic else None,
               prefix_cache=args.prefix_cache, smallest_rho=least, step_ms=None, hours=None,
               speed_up=None, tensors=None, cache_bytes=None, cache_in=None,
               peak_bytes=peaks[args.train_type])
    if elastic and args.rho < least:
        return row
    mask = choose_tensors(table, np.ones(len(table.names)), args.rho)[0] if elastic else (
        mask_of(args.train_type, table.names))
    row.update(step_ms=step_ms(args, table), hours=hours_of(args, table, images),
               tensors=int(mask.sum()))
    row.update(speed_up=table.t_step / row['step_ms'])
    if table.cache is not None and table.is_cached(mask):
        row['cache_bytes'] = int(images[0] * (table.cut_bytes[table.deepest(mask)] + 4))  # labels
        row['cache_in'] = 'memory' if row['cache_bytes'] <= memory else 'disk'
    return row


def takes_the_step_of(args, run):
    """Whether steps of `run`, arguments of main.py, are those that profiler.py's `args` time."""
    return (run.bn_statistics or 'frozen') == args.bn_statistics and all(
        getattr(run, flag) == getattr(args, flag) for flag in OF_A_STEP)


def figures_of(args, table):
    """[dict], of the paper's figures those with runs of this very network and step: how many they
    are, hours of those within reach, and of elastic training alone, and what rho is out of reach.
    """
    found = []
    for name, figure in FIGURES.items():
        runs = [parse_arguments(list(run.flags)) for run in runs_of(name)]
        mine = [run for run in runs if takes_the_step_of(args, run)]
        if name.endswith('_ego') or not mine:
            continue
        beyond = [run for run in mine if why_not(run, table)]
        hours = [(run.train_type, hours_of(run, priced(run, table), DATA[run.dataset_name][1:]))
                 for run in mine if run not in beyond]
        found.append(dict(
            figure=name, title=figure.title, runs=len(mine), of_runs=len(runs),
            hours=sum(each for _, each in hours), paper=figure.hours,
            elastic_hours=sum(each for train_type, each in hours if train_type == ELASTIC),
            out_of_reach=sorted({run.rho for run in beyond})))
    return found


def notes_on(args, table):
    """Lines of text below the table."""
    notes = ['time: by these steps, tests between epochs included; selecting and preparing images '
             'are not',
             'tensors, prefix cache: of elastic training as if all tensors were equally important',
             'peak: of the process, with TensorFlow; preparing images, a prefix cache and the '
             'memory of a GPU come on top']
    if args.num_epochs == 1:
        return notes + ['no prefix cache: no image comes back in one epoch']
    if not np.isfinite(table.cut_bytes).any():
        return notes + ['no prefix cache: no part of this network can be cut off (batch '
                        'statistics?)']
    by_views = augmentation_of(args.dataset_name, args.augmentation) != 'none'
    return notes + ['prefix cache: with --prefix_cache on, which holds the views of images for '
                    '--interval epochs' if by_views else
                    'prefix cache: used by itself, as images of {} come back unchanged'.format(
                        args.dataset_name)]


# ------------------------------------------------------------------------------ for people


def describe(costs):
    """Text of what costs_of gave: the ways to train, notes, the figures."""
    unit, scale = _unit([row['hours'] for row in costs['ways']])
    rows = [[
        row['train_type'] + ('' if row['rho'] is None else ' rho {:g}'.format(row['rho'])),
        _cache_text(row),
        'out of reach' if row['step_ms'] is None else '{:.1f}'.format(row['step_ms']),
        _or_nothing('{:.2f}', row['speed_up']),
        _or_nothing('{:.3f}', row['smallest_rho'] and row['smallest_rho'] + 5e-4),
        _or_nothing('{}', row['tensors']), _or_nothing('{:.1f}', row['hours'], scale),
        'not measured' if row['peak_bytes'] is None else '{:,.0f}'.format(row['peak_bytes'] / 1e6)]
            for row in costs['ways']]
    title = '{} on {} on this device, {} epoch{} of {:,} images, {} at a time'.format(
        costs['model'], costs['dataset'], costs['num_epochs'], 's' * (costs['num_epochs'] > 1),
        costs['train_images'], costs['key']['batch_size'])
    ways = command_line.table(
        ['way to train', 'prefix cache', 'step (ms)', 'speed-up', 'smallest rho', 'tensors',
         'time ({})'.format(unit), 'peak (MB)'], rows, '<<>>>>>>')
    return '\n\n'.join([title, ways, '\n'.join(costs['notes']), _describe_figures(costs)])


def _describe_figures(costs):
    if not costs['figures']:
        run = parse_arguments([])
        models = {cell.model_name for figure in FIGURES.values() for cell in figure.cells}
        return "the paper's figures take other steps: of {}, {}x{}, {} at a time".format(
            ', '.join(sorted(models)), run.input_size, run.input_size, run.batch_size)
    rows = [[figure['figure'], '{runs} of {of_runs}'.format(**figure)
             if figure['runs'] < figure['of_runs'] else figure['runs'],
             '{:.1f}'.format(figure['hours']), '{:.1f}'.format(figure['elastic_hours']),
             ', '.join(map('{:g}'.format, figure['out_of_reach'])) or 'none', figure['paper']]
            for figure in costs['figures']]
    return "the paper's figures by these steps (scripts/run_figure*.sh):\n\n" + command_line.table(
        ['figure', 'runs', 'time (h)', 'elastic alone (h)', 'rho out of reach', "the paper's"],
        rows, '<>>>><')


def _unit(hours):
    """(name, how many an hour has) of the unit for these hours, None among them."""
    most = max(each or 0 for each in hours)
    return ('h', 1) if most >= 1 else ('min', 60) if most >= 0.05 else ('s', 3600)


def _or_nothing(form, value, scale=1):
    return '' if value is None else form.format(value * scale)


def _cache_text(row):
    if row['prefix_cache'] != 'on':
        return '' if not SCHEMES[row['train_type']].frozen_front else 'off'
    if row['step_ms'] is None:
        return 'on'
    return 'does not pay' if row['cache_bytes'] is None else '{:,.0f} MB {}'.format(
        row['cache_bytes'] / 1e6, {'memory': 'in memory', 'disk': 'on disk'}[row['cache_in']])
