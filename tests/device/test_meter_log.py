"""Tests the log of an external meter: energy of training intervals, damage, gaps, two clocks."""

import json
import shutil
import tracemalloc

import pytest

from elastic.command_line import UserError
from elastic.device.energy import NO_SENSOR
from elastic.device.meter_log import check_meter, metered_joules, read_meter
from elastic.runs import metered
from made_runs import make_run


def meter_log(path, rows, header='timestamp,watts'):
    path.write_text('\n'.join([header] + ['{},{}'.format(*row) for row in rows]) + '\n')
    return str(path)


def energy_of(tmp_path, path, intervals):
    """Returns the summary's energy of a run that trained in these intervals."""
    run = make_run(tmp_path, 'metered', training_intervals=intervals, energy_joules=None)
    try:
        metered.add_to_run(str(run), path)
    except UserError:
        pass
    summary = json.loads((run / 'summary.json').read_text())
    shutil.rmtree(str(run))
    return {key: summary[key] for key in ('energy_joules', 'energy_source', 'energy_note',
                                          'training_intervals')}


def test_a_meter_log_is_integrated_over_the_training_intervals(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 4), (102, 4), (103, 8), (104, 8)])
    log = read_meter(path)
    assert metered_joules(log, [[100, 104]]) == pytest.approx(3 + 4 + 6 + 8)
    assert metered_joules(log, [[100.5, 100.75], [103.5, 104]]) == pytest.approx(
        0.25 * 3.25 + 4)
    assert energy_of(tmp_path, path, [[101, 102]]) == {
        'energy_joules': pytest.approx(4), 'energy_source': 'meter log meter.csv',
        'energy_note': None, 'training_intervals': [[101, 102]]}


@pytest.mark.parametrize('rows, header, says', [
    ([(100, 2), (101, 'x')], 'timestamp,watts', 'line 3: expected the columns'),
    ([(100, 2), (101, 3)], 'time,power', 'line 2: expected the columns'),
    ([(100, 2), (100, 3)], 'timestamp,watts', 'line 3.*must grow'),
    ([(100, 2), (101, -3)], 'timestamp,watts', 'line 3.*negative'),
    ([(100, 2)], 'timestamp,watts', 'has 1 readings')])
def test_an_invalid_log_is_refused_with_its_line(tmp_path, rows, header, says):
    with pytest.raises(UserError, match=says):
        read_meter(meter_log(tmp_path / 'meter.csv', rows, header))


def test_a_growing_log_is_read_up_to_its_last_complete_line(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2)])
    with open(path, 'a') as log:
        log.write('102')
    (times, watts), = read_meter(path).stretches
    assert (list(times), list(watts)) == ([100, 101], [2, 2])
    check_meter(path)
    (tmp_path / 'meter.csv').write_text('')  # the log may start later
    check_meter(path)
    with pytest.raises(UserError, match='columns time, power'):
        check_meter(meter_log(tmp_path / 'meter.csv', [(1, 2)], 'time,power'))
    with pytest.raises(UserError, match='cannot read'):
        check_meter(str(tmp_path / 'none'))


def test_a_log_with_a_gap_or_too_short_gives_the_reason(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2), (110, 2), (111, 2)])
    for interval, says in (([100, 111], 'a gap of 9 s at 101'), ([99, 101], 'covers 100 to 111'),
                           ([110, 112], 'covers 100 to 111')):
        result = energy_of(tmp_path, path, [interval])
        assert result['energy_joules'] is None and says in result['energy_note']
    assert energy_of(tmp_path, path, [[110, 111]])['energy_joules'] == pytest.approx(2)
    assert 'cannot read' in energy_of(tmp_path, str(tmp_path / 'none'), [[1, 2]])['energy_note']


DAMAGED = {  # the line between the readings at 102 s and 104 s
    'header again': 'timestamp,watts', 'cut line': '103', 'cut into the next': '103,2103.5,2',
    'stray quote': '103,"2', 'NUL bytes': '\0' * 100, 'NUL block': '\0' * 200000,
    'no text': '\udcff', 'negative': '103,-2', 'went back': '101.5,7'}


@pytest.mark.parametrize('line', list(DAMAGED.values()), ids=list(DAMAGED))
def test_a_damaged_line_matters_only_within_training(tmp_path, line):
    path = tmp_path / 'meter.csv'
    path.write_bytes('\n'.join(['timestamp,watts', '100,2', '101,2', '102,2', line, '104,2',
                                '105,2', '106,2', '']).encode('utf-8', 'surrogateescape'))
    good = energy_of(tmp_path, str(path), [[100, 101], [104, 106]])
    assert (good['energy_joules'], good['energy_note']) == (pytest.approx(6), None)
    bad = energy_of(tmp_path, str(path), [[100, 101], [101, 105]])
    assert bad['energy_joules'] is None
    assert bad['energy_note'].startswith('{}, line 5: '.format(path))


def test_damage_at_the_end_of_a_log_is_named(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2), (102, '\0')])
    assert energy_of(tmp_path, path, [[100, 101]])['energy_joules'] == pytest.approx(2)
    assert 'line 4: ' in energy_of(tmp_path, path, [[100, 102]])['energy_note']


def test_readings_of_two_clocks_are_never_mixed(tmp_path):
    """A board boots with an old time, gets the right time, and boots again in 1970."""
    seconds = list(range(100, 120)) + list(range(110, 125)) + list(range(300, 310)) + [5, 6, 310]
    watts = [2] * 20 + [50] * 15 + [3] * 13
    path = meter_log(tmp_path / 'meter.csv', zip(seconds, watts))
    for interval, joules in (([100, 110], 20), ([120, 124], 200), ([301, 305], 12)):
        assert energy_of(tmp_path, path, [interval])['energy_joules'] == pytest.approx(joules)
    for interval, says in (([105, 112], 'line 22: timestamps must grow'),  # spans both clocks
                           ([112, 118], 'line 22: timestamps must grow'),
                           ([118, 122], 'line 22: timestamps must grow'),
                           ([123, 301], 'a gap of 176 s at 124')):
        result = energy_of(tmp_path, path, [interval])
        assert result['energy_joules'] is None and says in result['energy_note']


def peak_memory(call, *arguments):
    """Returns the most bytes of memory that the call held at once."""
    tracemalloc.start()
    try:
        call(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_reading_a_long_log_needs_little_memory(tmp_path):
    path = meter_log(tmp_path / 'meter.csv', [(1700000000 + i, 2.5) for i in range(20000)])
    assert peak_memory(read_meter, path) < 20000 * 100
    with open(path, 'r+b') as log:
        log.truncate(1 << 25)  # zeros without a line end
    assert peak_memory(check_meter, path) < 1e6


def test_a_damaged_header_is_refused_before_training(tmp_path):
    (tmp_path / 'meter.csv').write_bytes(b'\0' * 200000 + b'\n')
    with pytest.raises(UserError, match='meter.csv, line 1: '):
        check_meter(str(tmp_path / 'meter.csv'))


def test_a_log_is_added_to_a_finished_run(tmp_path, capsys):
    run = make_run(tmp_path, 'run', training_intervals=[[100, 102]], energy_joules=None)
    path = meter_log(tmp_path / 'meter.csv', [(99, 5), (103, 5)])
    metered.main([str(run), '--meter_csv', path])
    assert capsys.readouterr().out.endswith('10.0 J\n')
    assert json.loads((run / 'summary.json').read_text())['energy_joules'] == pytest.approx(10)
    stepped = make_run(tmp_path, 'stepped', training_intervals=None, energy_joules=None)
    with pytest.raises(UserError, match='the system clock was set during training'):
        metered.main([str(stepped), '--meter_csv', path])
    measured = make_run(tmp_path, 'measured', training_intervals=[[90, 102]], energy_joules=7)
    before = (measured / 'summary.json').read_bytes()
    with pytest.raises(UserError, match='covers 99 to 103'):
        metered.main([str(measured), '--meter_csv', path])
    assert (measured / 'summary.json').read_bytes() == before
    with pytest.raises(UserError, match='belong together'):
        metered.main([str(run)])


def test_the_command_lists_the_sensors_of_this_device(capsys):
    metered.main([])
    out = capsys.readouterr().out
    assert 'power (W)' in out or NO_SENSOR in out
