"""Shows the power sensors of this device, or adds an external meter's energy to finished runs.

    python -m elastic.runs.metered                        shows the sensors and what they read
    python -m elastic.runs.metered RUN --meter_csv FILE   adds the energy of a meter's log to a run

Sensors are the rails of a Jetson's INA3221, the RAPL counters of Intel and AMD processors, and
NVIDIA GPUs. A Raspberry Pi 4B has none: an external meter logs `timestamp,watts`, with timestamps
in seconds since 1970. Energy is that of training without validation, as are all reported times.
"""

import argparse
import contextlib
import os
import resource
import sys
import time

from elastic import command_line, texts
from elastic.device.energy import NO_SENSOR, PERIOD, Meter, find_sensors
from elastic.device.meter_log import metered_joules, read_meter
from elastic.errors import UserError
from elastic.files import read_json, write_json
from elastic.options import as_path
from elastic.runs.folder import read_run, run_folder
from elastic.schemes.fixed import SCHEMES
from elastic.settings import LOGS_DIR

WAKING = 10  # s that the driver of a GPU may take if no other program uses it


def main(argv=None):
    parser = argparse.ArgumentParser('python -m elastic.runs.metered', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='*', type=as_path, metavar='RUN',
                        help='name under --logs_dir, or a path')
    parser.add_argument('--meter_csv', type=as_path, metavar='FILE',
                        help='log of an external meter')
    parser.add_argument('--logs_dir', type=as_path, default=LOGS_DIR, metavar='DIR')
    args = parser.parse_args(argv)
    if bool(args.runs) != bool(args.meter_csv):
        raise UserError('runs and --meter_csv belong together; only {} given, add the other'.format(
            'runs are' if args.runs else '--meter_csv is'))
    for name in args.runs:
        add_to_run(run_folder(name, args.logs_dir), args.meter_csv)
    return 0 if args.runs else show_sensors()


def add_to_run(folder, path):
    """Adds the energy in an external meter's log to the summary of a finished run.

    folder: of the run. path: of the log. Raises UserError if the log does not cover the training.
    If the run has no energy at all, its summary then gives the reason.
    """
    read_run(folder)
    summary_path = os.path.join(folder, 'summary.json')
    summary = read_json(summary_path)
    source = 'meter log ' + os.path.basename(path)
    try:
        joules = metered_joules(read_meter(path), summary['training_intervals'])
    except UserError as error:
        if summary['energy_joules'] is None:
            write_json(summary_path, dict(summary, energy_source=source, energy_note=str(error)))
        raise
    write_json(summary_path, dict(summary, energy_joules=joules, energy_source=source,
                                  energy_note=None))
    print('{}: {:,.1f} J'.format(folder, joules))


def measured_beside(plans, dataset, clock):
    """Returns what the summary says of sensors, memory, cache, images and classes."""
    settings = plans.settings
    found = dict(clock.meter.result(), device_note=clock.monitor.note, views=dataset.views,
                 augmentation=dataset.augmentation, class_names=list(dataset.class_names),
                 peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if settings.records.meter_csv:  # read only once the run is safe, because it may be damaged
        found.update(energy_joules=None, energy_source=None,
                     energy_note='{} was not read'.format(settings.records.meter_csv))
    if SCHEMES[settings.training.train_type].frozen_front:
        found['prefix_cache'] = 'on' if plans.cache.used else 'off'
    if dataset.class_weights:
        found['class_weights'] = dataset.class_weights
    if settings.data.skip_bad_images:
        found['images_left_out'] = len(dataset.left_out)
    return found


def add_metered_energy(records):
    """Adds the energy of --meter_csv to the summary; prints why, where that fails."""
    if records.meter_csv:
        try:
            add_to_run(records.folder, records.meter_csv)
        except UserError as error:
            print('energy not measured: {}'.format(error), file=sys.stderr)


def show_sensors():
    """Prints a table of this device's sensors and the power that each reads within a second."""
    sensors, notes = find_sensors(gpu_seconds=WAKING)
    meters = [Meter([sensor]) for sensor in sensors]
    with contextlib.ExitStack() as stack:
        for meter in meters:
            stack.enter_context(meter.sampler.running())
        begin = time.perf_counter()
        time.sleep(2 * PERIOD if meters else 0)
        seconds = time.perf_counter() - begin
    rows = []
    for sensor, meter in zip(sensors, meters):
        meter.trained(begin, begin + seconds)
        result = meter.result()
        joules = result['energy_joules']
        rows.append([sensor.name, result['energy_note'] if joules is None else '{:.2f}'.format(
            joules / seconds)])
    print(texts.table(['sensor', 'power (W)'], rows) if rows else NO_SENSOR)
    for note in notes:
        print(note)
    return 0


if __name__ == '__main__':
    command_line.run(main)
