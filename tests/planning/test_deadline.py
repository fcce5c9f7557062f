"""Tests that a run with a deadline plans well, ends in time, and resumes with the time left."""

import argparse
import json

import pytest
from tensorflow import keras

import main
import train
from cached_runs import BATCH, SIZE, AfterSteps, digits, network
from elastic.cache.prefix_cache import NoCache
from elastic.compat import keras_stack
from elastic.planning.deadline import (
    ENOUGH,
    FLOOR,
    GOAL,
    MOST,
    Deadline,
    Pace,
    Plan,
    carried_on,
    plan,
    process_seconds,
)
from elastic.runs import checkpoint
from elastic.runs.checkpoint import Interrupted
from elastic.runs.recorder import Recorder
from elastic.runs.session import RECORDS, Session
from elastic.settings import Settings
from elastic.steps.epoch import PLAIN, Call
from elastic.steps.training_step import evaluation_function
from elastic.texts import duration, duration_text
from fixed_tables import fixed_profile, store_table
from models import build_model
from refusals import assert_refused
from small_models import saved
from small_runs import quick_flags

# An epoch of full training takes 100 s; with tests and selections as below, a whole run of GOAL
# epochs at FLOOR takes 12 x (30 + 2) + 3 x 5 = 399 s.
PACE = Pace(steps=100, full_step=1.0, epoch=2.0, selection=5.0, interval=4, lows=(0.4, 0.2),
            saving=4.0)


# ---------------------------------------------------------------- durations

@pytest.mark.parametrize('text, seconds', [
    ('90', 90), ('45m', 2700), ('1h30m', 5400), ('1.5h', 5400), ('1h1m1.5s', 3661.5)])
def test_a_time_is_read(text, seconds):
    assert duration(text) == seconds
    assert duration(duration_text(seconds)) == -(-seconds // 1)


@pytest.mark.parametrize('text', ['', '0s', '-1m', '3 parsecs', '1..5h', '5m1h', 'nan'])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match='allowed are such as 90s, 45m, 1h30m'):
        duration(text)


@pytest.mark.parametrize('given, said', [
    (['--deadline=-1m'], "'-1m' is not a time above 0"),
    (['--deadline', '9m', '--rho', '0.533'], '--deadline chooses --rho: leave --rho out'),
    (['--deadline', '9m', '--num_epochs', '12', '--head_epochs', '1'],
     '--deadline chooses --num_epochs and --head_epochs'),
    (['--deadline', '9m', '--train_type', 'full_training'], 'fits elastic training alone'),
    (['--head_epochs', '12'], '--head_epochs 12 is not less than --num_epochs 12'),
    (['--head_epochs', '1', '--train_type', 'prunetrain'], 'fits elastic training alone')])
def test_wrong_flags_are_refused_before_anything_begins(tmp_path, capsys, given, said):
    assert_refused(['--logs_dir', str(tmp_path)] + given, said, tmp_path, capsys)


# ---------------------------------------------------------------- the plan

@pytest.mark.parametrize('seconds, planned', [
    (10 ** 6, Plan(ENOUGH, MOST)),  # more than enough
    (12 * 52 + 15 + 3 * 52, Plan(0.496, 15)),  # time beyond the goal buys epochs
    (12 * 52 + 15, Plan(ENOUGH, GOAL)),
    (12 * 42 + 15, Plan(0.4, GOAL)),  # a smaller rho before fewer epochs
    (12 * 32 + 15, Plan(FLOOR, GOAL)),
    (6 * 32 + 10, Plan(FLOOR, 6)),
    (6.9 * 32 + 10, Plan(0.348, 6)),  # no time is left over
    (47, Plan(0.4, 1)), (46.9, None)])  # a single epoch has no cache: rho 0.4 is the smallest
def test_a_plan_uses_the_time(seconds, planned):
    assert plan(seconds, PACE) == planned


def test_what_is_left_of_a_run_is_planned_like_a_whole_one():
    assert plan(4 * 42 + 5, PACE, done=8) == Plan(0.4, 12)
    assert plan(2 * 32 + 5, PACE, done=8) == Plan(FLOOR, 10)
    assert plan(1, PACE, done=8) is None


class Watch:
    """A clock that only tests move."""

    def __init__(self):
        self.seconds = 10.0

    def __call__(self):
        return self.seconds


@pytest.mark.parametrize('left, epochs, end', [
    (25.0, 7, 6.5), (20.5, 6, 6.05), (0.0, 4, 4.0), (-3.0, 4, 4.0), (1e6, MOST, MOST)])
def test_time_that_is_left_trains_more_epochs_than_were_planned(left, epochs, end):
    assert carried_on(Plan(0.4, 5), left, 10.0, 4) == (Plan(0.4, epochs), pytest.approx(end))


@pytest.mark.parametrize('seconds, planned, said', [
    (30, Plan(0.4, 1), 'the head is solved first, then no time is left to train'),
    (65, Plan(0.4, 1), 'no time'), (75, Plan(0.44, 2),
                                   'then rho 0.44 for 2 epochs; 12 at that rho')])
def test_the_head_is_solved_in_any_case(seconds, planned, said, capsys):
    """10 s have passed, 10 s solve the head, 4 s end the run, 51 s take an epoch of training."""
    deadline = Deadline(seconds, PACE._replace(head=10.0), now=Watch())
    deadline.begin()
    assert deadline.plan == planned and said in capsys.readouterr().out


@pytest.mark.parametrize('left, steps', [(100.0, 7), (10.0, 7), (8.0, 6), (5.0, 3), (0.0, 1)])
def test_an_epoch_stops_before_its_tests_would_be_late(left, steps):
    """Seven steps of 1 s; 2 s for the tests, 4 s for the end."""
    watch = Watch()
    deadline, taken = Deadline(watch.seconds + 4 + left, PACE, now=watch), 0
    for _ in deadline.within(Call(PLAIN, None, None) for _ in range(7)):
        watch.seconds, taken = watch.seconds + 1, taken + 1
    assert taken == steps
    assert deadline.stopped == (steps < 7)


# ---------------------------------------------------------------- real runs

@pytest.mark.thorough
def test_a_run_ends_before_its_deadline_with_its_best_epoch(tmp_path, capsys):
    given, passed = quick_flags(tmp_path, '--run_name', 'timed', '--save_model'), process_seconds()
    at = given.index('--num_epochs')
    seconds = int(passed) + 600
    given[at:at + 2] = ['--deadline', str(seconds), '--validation_share', '0.3']
    at = given.index('--learning_rate')
    del given[at:at + 2]
    store_table(given)
    assert main.main(given) == 0
    said = capsys.readouterr().out
    assert 'solved first, then rho 0.50 for {} epochs; more would gain'.format(MOST) in said
    assert '\nlearning rate ' in said
    summary = json.loads((tmp_path / 'timed' / 'summary.json').read_text())
    assert summary['seconds_used'] < seconds and summary['epochs'] <= MOST
    assert summary['keep'] == 'best' and summary['kept_epoch'] <= summary['epochs']
    with open(str(tmp_path / 'timed' / 'selections.csv')) as rows:
        assert rows.read().split('\n')[1].startswith('1,')  # the head is solved
    flags = (tmp_path / 'timed' / 'flags.txt').read_text()
    assert '--deadline {}'.format(seconds) in flags and '--rho' not in flags
    assert main.main(['@{}'.format(tmp_path / 'timed' / 'flags.txt'), '--logs_dir',
                      str(tmp_path)]) == 0
    assert 'already finished' in capsys.readouterr().out


def test_without_time_to_profile_only_the_head_is_solved(tmp_path, capsys):
    flags, seconds = quick_flags(tmp_path, '--run_name', 'run'), int(process_seconds()) + 30
    at = flags.index('--num_epochs')
    assert main.main(flags[:at] + flags[at + 2:] + [
        '--deadline', str(seconds), '--validation_share', '0.3']) == 0
    assert 'left, too little to profile the network: only the head' in capsys.readouterr().out
    summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
    assert summary['epochs'] == summary['kept_epoch'] == 1 and summary['head'] == 'stages'
    assert not list(tmp_path.glob('*_profile'))


@pytest.mark.parametrize('image, learned', [(0.01, 0.5), (1.0, 1.0)])
def test_judging_is_timed_before_training_without_its_first_call(image, learned):
    """The first call takes 99 s, later ones half a second an image; a higher estimate is kept."""
    watch, model = Watch(), network()
    evaluate, calls = evaluation_function(model), []

    def slow(images, labels):
        watch.seconds += 0.5 * len(labels) if calls else 99
        calls.append(len(labels))
        return evaluate(images, labels)
    pace = PACE._replace(image=image, validation_images=20, test_images=100)
    deadline = Deadline(600, pace, now=watch)
    deadline.begin_training(slow, digits(validation_share=0.2).validation)
    assert deadline.pace.image == learned
    assert deadline.pace.epoch == 20 * learned and deadline.pace.finish == 4 + 100 * learned
    assert 2 <= len(calls) <= 5


@pytest.mark.thorough
def test_a_run_that_was_stopped_ends_at_the_same_deadline(tmp_path):
    """The clock moves by 10 s with each step, and stands still otherwise."""
    path, dataset = saved(network(), tmp_path), digits(validation_share=0.2)

    def model():
        return build_model(path, (SIZE, SIZE, 3), 10, head='stages', head_start='solved')
    table = fixed_profile(model(), (SIZE, SIZE, 3), 10, BATCH)
    pace = Pace(dataset.steps, 10.0, 0.0, 0.0, 2, (0.9, 0.3), saving=4.0)
    settings = Settings(interval=2, learning_rate=0.05, closed_loop=False, keep='best',
                        deadline=10 + 4 + 600, head_start='solved')
    taken = []

    def process(steps):
        keras.backend.clear_session()
        watch, resumed = Watch(), checkpoint.read(str(tmp_path), RECORDS)
        deadline = Deadline(settings.deadline, pace, now=watch)
        if resumed is None:
            deadline.begin()
        else:
            watch.seconds = 0.0
            deadline.restore(resumed['deadline'])
        planned = deadline.settings(settings)
        maker = train.step_maker(model(), dataset, planned)
        scheme = main.scheme_of(maker, dataset, planned, table, NoCache(dataset))
        recorder = Recorder(str(tmp_path), resumed=resumed and resumed['records'])

        class Timed(AfterSteps):
            def due(self):
                watch.seconds += 10
                taken.append(1)
                return super().due()
        session = Session(recorder, None, Timed(str(tmp_path), steps), resumed)
        try:
            result, _ = train.train(scheme, dataset, planned, session, None, deadline)
        except Interrupted:
            return None
        finally:
            recorder.writer.close()
        rate = keras_stack.schedule(maker.optimizer)
        assert float(rate._steps) == deadline.total_steps - dataset.steps
        assert 0 <= result['epochs'] * dataset.steps - deadline.total_steps < dataset.steps
        return deadline.used, result['epochs']

    assert process(13) is None
    assert len(taken) == 13
    used, epochs = process(10 ** 9)
    assert 60 - dataset.steps <= len(taken) <= 60  # of 10 s each
    assert used <= settings.deadline and epochs <= -(-60 // dataset.steps)
