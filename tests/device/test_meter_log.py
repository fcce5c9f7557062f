"""Tests the log of an external meter: energy of training intervals, damage, gaps, two clocks."""

import json

import pytest

from elastic.device.energy import NO_SENSOR
from elastic.device.meter_log import check_meter, metered_joules, read_meter
from elastic.errors import UserError
from elastic.runs import metered
from made_runs import make_run


def meter_log(path, rows, header='timestamp,watts'):
    path.write_text('\n'.join([header] + ['{},{}'.format(*row) for row in rows]) + '\n')
    return str(path)


def test_a_meter_log_is_integrated_over_the_training_intervals(tmp_path):
    log = read_meter(meter_log(tmp_path / 'meter.csv', [
        (100, 2), (101, 4), (102, 4), (103, 8), (104, 8)]))
    assert metered_joules(log, [[100, 104]]) == pytest.approx(3 + 4 + 6 + 8)
    assert metered_joules(log, [[101.5, 102], [103.5, 104]]) == pytest.approx(2 + 4)
    assert metered_joules(log, []) == 0


@pytest.mark.parametrize('line, says', [
    ('103', 'must be numbers'), ('103,2103.5,2', 'must be numbers'), ('103,"2', ''),
    ('\0' * 200000, ''), ('\udcff', 'must be numbers'), ('103,nan', 'must be numbers'),
    ('103,-2', 'watts must not be negative'), ('101.5,7', 'timestamps must grow')])
def test_a_damaged_line_is_named(tmp_path, line, says):
    path = tmp_path / 'meter.csv'
    path.write_bytes('\n'.join(['timestamp,watts', '100,2', '102,2', line, '104,2', '']).encode(
        'utf-8', 'surrogateescape'))
    with pytest.raises(UserError, match='meter.csv, line 4: .*{}.*; correct or'.format(says)):
        read_meter(str(path))


@pytest.mark.parametrize('encoding, content', [
    ('utf-8-sig', 'timestamp,watts\n100,2\n101,4\n'),
    ('utf-8-sig', '\r\n timestamp , watts\r\n 100, 2 \r\n\r\n101 ,4\r\n'),
    ('utf-8', ' "timestamp", "watts"\n"100", "2"\n101,4\n'),
    ('utf-8', 'volts,watts,timestamp\n5,2,100\n,4,101\n102'),
    ('utf-8', 'timestamp,watts\r100,2\r101,4\r102,"'),
    ('utf-16', 'timestamp;watts\r\n100,0;2,0\r\n101,0;4,0\r\n'),
    ('utf-8', '\n \n timestamp\twatts \n100\t2\n101\t4\n'),
    ('utf-8', 'Timestamp watts\n100 2 \n 101  4\n')])
def test_logs_of_spreadsheets_and_meters_are_read_up_to_their_last_complete_line(
        tmp_path, encoding, content):
    path = tmp_path / 'meter.csv'
    path.write_bytes(content.encode(encoding))
    check_meter(str(path))
    times, watts = read_meter(str(path))
    assert (list(times), list(watts)) == ([100, 101], [2, 4])


def test_what_cannot_become_a_log_is_refused_before_training(tmp_path):
    path = tmp_path / 'meter.csv'
    for content in ('', 'timestamp,watts\n', 'timest'):  # the log may start later
        path.write_text(content)
        check_meter(str(path))
        with pytest.raises(UserError, match='has 0 readings; at least two'):
            read_meter(str(path))
    path.write_text('time,power\n')
    with pytest.raises(UserError, match="line 1: .*not 'time,power'"):
        check_meter(str(path))
    with pytest.raises(UserError, match='cannot read'):
        check_meter(str(tmp_path / 'none'))


@pytest.mark.parametrize('intervals, says', [
    ([[100, 101], [105, 106]], 'a gap of 9 s at 101; .* at most 5 s'),
    ([[109, 110.5]], 'a gap of 9 s at 101'),
    ([[99, 101]], 'covers 100 to 111, training 99 to 101'), ([[110, 112]], 'covers 100 to 111'),
    (None, 'the system clock was set during training')])
def test_a_gap_matters_only_within_training(tmp_path, intervals, says):
    log = read_meter(meter_log(tmp_path / 'meter.csv', [(100, 2), (101, 2), (110, 2), (111, 2)]))
    assert metered_joules(log, [[100, 101], [110, 111]]) == pytest.approx(4)
    with pytest.raises(UserError, match=says):
        metered_joules(log, intervals)


def test_a_log_is_added_to_a_finished_run(tmp_path, capsys):
    run = make_run(tmp_path, 'run', training_intervals=[[100, 102]], energy_joules=None)
    path = meter_log(tmp_path / 'meter.csv', [(99, 5), (103, 5)])
    metered.main([str(run), '--meter_csv', path])
    assert capsys.readouterr().out.endswith('10.0 J\n')
    assert json.loads((run / 'summary.json').read_text())['energy_joules'] == pytest.approx(10)
    outside = make_run(tmp_path, 'outside', training_intervals=[[90, 102]], energy_joules=None)
    with pytest.raises(UserError, match='covers 99 to 103'):
        metered.main([str(outside), '--meter_csv', path])
    assert 'covers 99 to 103' in json.loads((outside / 'summary.json').read_text())['energy_note']
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
