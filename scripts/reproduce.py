"""Makes a figure of the paper: trains the runs that are missing, then draws the picture.

scripts/run_figureNN.sh calls this in the virtual environment. A finished run is never repeated, an
interrupted one resumes, and figures share the runs that they have in common. A failed run is
reported at the end, and the others still run.
"""

import argparse
import contextlib
import csv
import fnmatch
import functools
import importlib.util
import os
import shlex
import subprocess
import sys
import time

import _root
from elastic import command_line, errors, texts
from elastic.errors import UserError
from elastic.options import as_path, number
from elastic.settings import ELASTIC, PAPER_SETS, settings_of
from figure_grid import FIGURES, REHEARSED_SIZES, logs_dir, output_of, runs_of


def arguments_of(run):
    """Returns what main.py reads from the run's flags."""
    import main
    return main.parse_arguments(run.flags)


def way_of(run):
    """Returns the ways.Way of a run."""
    from elastic.planning.ways import Way
    return settings_of(arguments_of(run), Way)


def is_done(run):
    """Returns whether the run is finished; raises UserError if it has other settings."""
    import main
    from elastic.runs.folder import is_finished
    settings = main.run_settings(main.check_arguments(arguments_of(run)))
    return is_finished(settings.records.folder, main.decisive_settings(settings))


def finished_names(runs):
    """Returns the names of the finished runs, leaving out those with other settings."""
    names = set()
    for run in runs:
        with contextlib.suppress(UserError):  # run_all reported it
            if is_done(run):
                names.add(run.name)
    return names


def chosen(runs, pattern):
    """Returns the runs whose name contains the pattern (with * and ?).

    Raises UserError if there is none.
    """
    found = [run for run in runs if fnmatch.fnmatchcase(run.name, '*{}*'.format(pattern))]
    if not found:
        raise UserError("--only '{}' fits no run of this figure{}; --dry_run lists them".format(
            pattern, errors.nearest(pattern, [run.name for run in runs])))
    return found


# ---------------------------------------------------------------- before: hours

def dry_run(figure, runs):
    """Prints the runs with the hours of each; runs nothing but the profiler."""
    tables, rows, reasons, total = {}, [], [], 0.0
    for run in runs:
        hours, state = 0.0, 'finished'
        if not is_done(run):
            key = run.cell.model_name, arguments_of(run).bn_statistics
            if key not in tables:
                tables[key] = timings_for(run)
            reason = way_of(run).why_not(tables[key])
            if reason:
                state = 'out of reach'
                reasons.append('{}: {}'.format(run.name, reason))
            else:
                state, hours = '', estimated_hours(run, tables[key])
        total += hours
        rows.append([run.name, state, _hours(hours)])
    print('\n' + texts.table(['run', '', 'time here'], rows + [
        ['total', '', _hours(total)]], '<<>'))
    print('\nby the step times of this device, with the tests between epochs, without preparing '
          'the data' + (figure.hours and '; in the paper: ' + figure.hours))
    for line in reasons:
        print(line)


def _hours(hours):
    return '{:.1f} h'.format(hours) if hours >= 1 else '{:.1f} min'.format(60 * hours)


def table_of(args):
    """Returns (path of the timing table of a run with these arguments, its number of classes)."""
    import profiler
    classes = PAPER_SETS.get(args.dataset_name, REHEARSED_SIZES)[0]
    return profiler.table_path(
        args.logs_dir, args.model_name, args.input_size, classes, args.batch_size), classes


def timings_for(run):
    """Returns the TensorTimings of the run's network on this device: stored, or measured now.

    They also serve for data sets with other numbers of classes: the head hardly matters.
    """
    import main
    from elastic.timing.table import TensorTimings
    args = main.check_arguments(arguments_of(run))
    path, classes = table_of(args)
    flags = ['--{}={}'.format(flag, getattr(args, flag)) for flag in (
        'model_name', 'dataset_name', 'input_size', 'batch_size', 'logs_dir', 'bn_statistics')]
    print('step times of {} on this device'.format(args.model_name), flush=True)
    child = subprocess.run(
        [sys.executable, 'profiler.py', '--num_classes={}'.format(classes)] + flags,
        stdout=subprocess.PIPE, universal_newlines=True)
    print('\n'.join(line for line in child.stdout.splitlines()
                    if line.startswith(('warning', 'steps are timed on noise'))))
    if child.returncode:
        raise UserError('profiler.py failed on {}; its message is above'.format(args.model_name))
    return TensorTimings.load(path)


def estimated_hours(run, table):
    """Returns the hours of one run by the TensorTimings."""
    way = way_of(run)
    return way.hours(table, PAPER_SETS.get(way.dataset_name, REHEARSED_SIZES)[1:])


# ---------------------------------------------------------------- the runs

def run_all(runs):
    """Trains one unfinished run after the other; returns a line of text for each that failed."""
    from elastic.runs.signals import status_of, was_stopped
    failed, begin = [], time.perf_counter()
    for i, run in enumerate(runs, 1):
        title = '[{}/{}] {}'.format(i, len(runs), run.name)
        try:
            if is_done(run):
                print('{}: finished before'.format(title), flush=True)
                continue
        except UserError as error:  # a log or the folder has changed since the start
            failed.append('{}: {}'.format(run.name, error))
            continue
        print('\n{}   {:.0f} min since the start'.format(
            title, (time.perf_counter() - begin) / 60), flush=True)
        status = status_of([sys.executable, 'main.py'] + run.flags)
        if was_stopped(status):  # stopping a run stops the whole grid
            raise KeyboardInterrupt
        if status and not impossible([run]):  # impossible runs are not failures
            failed.append('failed with status {}: {}'.format(status, run.name))
    return failed


@functools.lru_cache(maxsize=None)
def this_device():
    """Returns host.host_description(), from a child: TensorFlow must not stay in memory here."""
    code = ('from elastic.compat.start import quiet_tensorflow; quiet_tensorflow(); '
            'from elastic.device.host import host_description; print(host_description())')
    return subprocess.check_output([sys.executable, '-c', code],
                                   universal_newlines=True).strip().split('\n')[-1]


def check_device(finished):
    """Raises UserError if one of these finished runs was made on another device."""
    from elastic.files import read_json
    for run in finished:
        host = read_json(os.path.join(arguments_of(run).logs_dir, run.name, 'summary.json'))['host']
        if host != this_device():
            raise UserError("run '{}' was made on {}, this is {}: their times cannot be compared "
                            'in one figure; move its folder away, or continue where it was '
                            'made'.format(run.name, host, this_device()))


def _meter(run):
    """Adds the energy by --meter_csv to a finished run that has none."""
    from elastic.runs import metered
    from elastic.runs.folder import read_run
    args = arguments_of(run)
    folder = os.path.join(args.logs_dir, run.name)
    try:
        if args.meter_csv and read_run(folder).summary['energy_joules'] is None:
            metered.add_to_run(folder, args.meter_csv)
    except UserError as error:
        print('energy not measured: {}'.format(error), file=sys.stderr)


def impossible(runs):
    """Returns name -> reason of the runs whose rho this device cannot reach, by their tables."""
    from elastic.timing.table import TensorTimings
    reasons = {}
    for run in runs:
        path, _ = table_of(arguments_of(run))
        if run.cell.train_type != ELASTIC or not os.path.exists(path):
            continue
        try:
            table = TensorTimings.load(path)
        except (ValueError, KeyError, TypeError):
            continue  # the run itself reports that its table is damaged, and measures again
        reason = way_of(run).why_not(table)
        if reason and table.key.get('host') == this_device():
            reasons[run.name] = reason
    return reasons


# ---------------------------------------------------------------- the figure

def drawable(figure, runs, finished):
    """Returns the runs that the figure can show: all of them, or those of complete data sets.

    runs: all that are possible here. finished: names of the finished runs. Returns [] if the figure
    cannot be drawn.
    """
    if figure.by_data:
        short = {run.cell.dataset_name for run in runs if run.name not in finished}
        return [run for run in runs if run.cell.dataset_name not in short]
    return runs if all(run.name in finished for run in runs) else []


def conclude(args, everything):
    """Draws the figure if its runs are there; returns a line of text for each failure."""
    import paper_plots
    figure, finished = FIGURES[args.figure], finished_names(everything)
    for run in everything:
        if run.name in finished:
            _meter(run)  # only now does the meter's log cover the last run
    missing = [run for run in everything if run.name not in finished]
    left_out = impossible(missing)
    shown = drawable(figure, [run for run in everything if run.name not in left_out], finished)
    print()
    if missing:
        print('{} of the {} runs of figure {} are missing: {}'.format(
            len(missing), len(everything), args.figure, ', '.join(run.name for run in missing)))
    for name, reason in left_out.items():
        print('left out of the figure: {}: {}'.format(name, reason))
    not_drawn = 'figure {} is not drawn'.format(args.figure)
    if not shown:
        print(not_drawn)
        return []
    folders = [os.path.join(logs_dir(args.rehearse), run.name) for run in shown]
    output = output_of(args.figure, args.rehearse)
    try:
        print('\n'.join(getattr(paper_plots, figure.draw)(folders, output)))
    except (UserError, OSError, csv.Error) as error:
        return ['{}: {}'.format(not_drawn, error)]
    return []


def write_jobs(runs, path):
    """Writes one command per line, each of which works from any folder."""
    here, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    lines = ''.join('cd {} && {} main.py {}\n'.format(
        here, python, ' '.join(map(shlex.quote, run.flags))) for run in runs)
    if path == '-':
        sys.stdout.write(lines)
        return
    with open(path, 'w') as out:
        out.write(lines)
    print('{} runs written to {}; when they are finished, this script draws the figure'.format(
        len(runs), path))


# ---------------------------------------------------------------- the command

def parse_arguments(argv=None):
    script = os.environ.get('FIGURE_SCRIPT')  # the calling script, which gives the figure
    parser = argparse.ArgumentParser(
        prog=script, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage='{} [--rehearse] [--dry_run | --jobs FILE] [--only PATTERN] [--seeds N] '
              '[--meter_csv FILE]'.format('%(prog)s' if script else '%(prog)s FIGURE'))
    parser.add_argument('figure', help=argparse.SUPPRESS if script else 'one of ' + ', '.join(
        FIGURES))
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument('--dry_run', action='store_true',
                         help='print the runs, and hours by the step times of this device')
    parser.add_argument('--rehearse', action='store_true', help='the same runs in minutes, small '
                        'and on built-in digits; writes figures/rehearsal/')
    parser.add_argument('--only', metavar='PATTERN', help='only runs whose name contains this')
    parser.add_argument('--seeds', type=number(int, low=1), default=1, metavar='N',
                        help='seeds of each run; the figure shows mean and spread (default: 1)')
    instead.add_argument('--jobs', type=as_path, metavar='FILE', help='run nothing; write the '
                         'commands of the unfinished runs, one per line (- for the terminal)')
    parser.add_argument('--meter_csv', type=as_path, metavar='FILE', help='log of an external '
                        'power meter: columns timestamp (seconds since 1970) and watts')
    parser.add_argument('--check', action='store_true', help='check these arguments and stop')
    args = parser.parse_args(argv)
    errors.one_of(args.figure, list(FIGURES), 'figure')
    if args.meter_csv:
        args.meter_csv = os.path.abspath(args.meter_csv)
        if not os.path.isfile(args.meter_csv):
            raise UserError('--meter_csv {}: no such file; start the meter before training'.format(
                args.meter_csv))
    if args.jobs and args.jobs != '-':
        args.jobs = os.path.abspath(args.jobs)
        if not os.access(os.path.dirname(args.jobs), os.W_OK) or os.path.isdir(args.jobs):
            raise UserError('--jobs {}: cannot be written; give a file in a folder that exists'
                            .format(args.jobs))
    everything = runs_of(args.figure, args.seeds, args.rehearse, args.meter_csv)
    return args, everything, chosen(everything, args.only) if args.only else everything


def main(argv=None, root=_root.ROOT):
    """Makes a figure in the folder `root`, which holds the repository's scripts."""
    args, everything, runs = parse_arguments(argv)
    if args.check:
        return 0
    os.chdir(root)
    figure = FIGURES[args.figure]
    of_the_paper = 'the paper: ' + figure.board if figure.board else 'not in the paper'
    print('figure {}: {} ({})'.format(args.figure, figure.title, of_the_paper),
          file=sys.stderr if args.jobs else sys.stdout)
    lacking = [name for name in ('numpy', 'tensorflow', 'matplotlib')
               if importlib.util.find_spec(name) is None]
    if lacking and not args.jobs:  # otherwise a missing matplotlib would show after hours
        raise UserError('{} lacks {}: install what requirements.txt names first'.format(
            sys.executable, ' and '.join(lacking)))
    finished = {run.name for run in everything if is_done(run)}  # may refuse before anything heavy
    if args.jobs:
        write_jobs([run for run in runs if run.name not in finished], args.jobs)
        return 0
    if args.dry_run:
        dry_run(figure, runs)
        return 0
    if figure.draw == 'energy_bars' and not args.meter_csv:
        from elastic.device import energy
        if not energy.find_sensors()[0]:
            print('energy will not be measured: ' + energy.NO_SENSOR)
    if any(run.name not in finished for run in runs):
        check_device([run for run in everything if run.name in finished])
    failed = run_all(runs) + conclude(args, everything)
    print('\n'.join(failed), file=sys.stderr, end='\n' if failed else '')
    return 1 if failed else 0


if __name__ == '__main__':
    command_line.run(main)
