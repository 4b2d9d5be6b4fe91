from __future__ import annotations

import pytest

from flopmeter.monitor.schedule import SECOND_LOOK, WARMUP_STEPS, Schedule


def test_the_first_measurement_comes_right_after_the_warm_up() -> None:
    schedule = Schedule(100, budget=0.005)
    due = [step for step in range(10) if schedule.is_due(step, run_s=float(step), own_s=0.0)]
    assert due[0] == WARMUP_STEPS


def test_then_every_interval() -> None:
    schedule, measured = Schedule(100, budget=None), []
    for step in range(450):
        if schedule.is_due(step, run_s=float(step), own_s=0.0):
            measured.append(step)
            schedule.note_measured(step + 1, step_s=1.0, reading_s=0.0)
    second = WARMUP_STEPS + 1 + SECOND_LOOK  # early, because only a second count shows whether steps of a shape differ
    assert measured == [WARMUP_STEPS, *(second + 100 * i for i in range(5))]


def test_a_step_that_is_wanted_for_its_shape_is_early_and_can_be_put_off() -> None:
    schedule = Schedule(100, budget=None)
    schedule.note_measured(3, step_s=1.0, reading_s=0.0)
    schedule.hasten(7)
    assert schedule.next_step == 7
    assert schedule.is_early(7)
    schedule.put_off()
    assert schedule.next_step == 3 + SECOND_LOOK
    assert not schedule.is_early(schedule.next_step)


def test_an_interval_of_zero_measures_once() -> None:
    schedule = Schedule(0, budget=0.005)
    schedule.note_measured(WARMUP_STEPS, step_s=1.0, reading_s=0.0)
    assert not any(schedule.is_due(step, run_s=1e9, own_s=0.0) for step in range(10_000))


def test_the_first_measurement_can_be_left_out() -> None:
    schedule = Schedule(100, budget=None, measures_first=False)
    assert next(step for step in range(150) if schedule.is_due(step, 1.0, 0.0)) == WARMUP_STEPS + 100


def test_the_budget_stretches_the_interval() -> None:
    schedule = Schedule(10, budget=0.01)
    for _ in range(5):
        schedule.note_steps([(0, 1.0)])
    schedule.note_measured(3, step_s=2.5, reading_s=0.5)  # 1.5 s longer than a typical step, 0.5 s to read
    assert schedule.measuring_s == 2.0
    # The next one is expected to cost another 2 s: 4 s are 1 % of 400 s.
    assert not schedule.is_due(100, run_s=399.0, own_s=0.0)
    assert schedule.is_due(101, run_s=400.0, own_s=0.0)


def test_what_else_the_monitor_spends_counts_in_the_budget() -> None:
    schedule = Schedule(10, budget=0.01)
    schedule.note_measured(3, step_s=1.0, reading_s=0.0)
    assert schedule.is_due(100, run_s=100.0, own_s=1.0)
    assert not schedule.is_due(100, run_s=100.0, own_s=1.1)


def test_a_budget_that_says_no_is_not_asked_again_at_once() -> None:
    schedule = Schedule(100, budget=0.01)
    schedule.note_measured(3, step_s=1.0, reading_s=0.0)
    assert not schedule.is_due(200, run_s=100.0, own_s=5.0)
    assert schedule.next_step == 210


def test_without_a_budget_the_interval_rules() -> None:
    schedule = Schedule(10, budget=None)
    schedule.note_measured(3, step_s=100.0, reading_s=100.0)
    assert schedule.is_due(13, run_s=1.0, own_s=1.0)


def test_no_step_before_the_next_is_ever_due() -> None:
    schedule = Schedule(7, budget=None)
    for step in range(100):
        assert not schedule.is_due(step, 1e9, 0.0) or step >= schedule.next_step
        if step >= schedule.next_step:
            schedule.note_measured(step, 1.0, 0.0)


def test_a_step_measured_before_any_ordinary_one_is_charged_once_those_are_known() -> None:
    schedule = Schedule(10, budget=0.01)
    schedule.note_measured(3, step_s=2.5, reading_s=0.5)
    assert schedule.measuring_s == 0.5  # nothing to hold it against yet
    schedule.note_steps([(0, 1.0)])
    assert schedule.measuring_s == 2.0


def test_what_one_phase_of_the_training_spent_is_spent_for_the_next() -> None:
    warmup, main = Schedule(10, budget=0.01), Schedule(20, budget=0.01)
    warmup.note_steps([(0, 1.0)])
    warmup.note_measured(3, step_s=1.5, reading_s=0.25)
    main.inherit(warmup)
    assert main.measuring_s == 0.75


def test_a_measurement_that_is_hastened_still_keeps_to_the_budget() -> None:
    schedule = Schedule(1000, budget=0.01)
    for _ in range(5):
        schedule.note_steps([(0, 0.1)])
    schedule.note_measured(4, step_s=0.2, reading_s=0.0)  # 0.1 s extra: two of them fit into 20 s
    schedule.hasten(50)
    assert not schedule.is_due(50, run_s=5.0, own_s=0.0)
    assert schedule.next_step == 150
    schedule.hasten(120)
    assert schedule.is_due(120, run_s=20.0, own_s=0.0)


def test_a_measurement_is_not_hastened_into_the_warm_up_nor_put_off() -> None:
    schedule = Schedule(1000, budget=0.01)
    schedule.hasten(1)
    assert schedule.next_step == 3
    schedule.hasten(7)
    assert schedule.next_step == 3


def test_a_phase_of_the_training_goes_on_from_the_last_measurement_of_the_one_before() -> None:
    before, main = Schedule(10, budget=0.01), Schedule(20, budget=0.01)
    main.inherit(before)
    assert main.next_step == WARMUP_STEPS  # nothing was measured: the first one is still to come
    assert main.is_due(WARMUP_STEPS, run_s=1.0, own_s=1.0)
    before.note_measured(7, step_s=1.0, reading_s=0.5)
    main.inherit(before)
    assert main.next_step == 26  # its number is 27, 20 after the seventh
    assert not main.is_due(27, run_s=99.0, own_s=0.0)  # 0.5 s were spent, and as much is expected
    assert main.is_due(29, run_s=100.0, own_s=0.0)


def test_a_measured_step_that_was_shorter_than_usual_costs_what_reading_took() -> None:
    schedule = Schedule(10, budget=0.01)
    schedule.note_steps([(0, 2.0)])
    schedule.note_measured(3, step_s=1.5, reading_s=0.25)
    assert schedule.measuring_s == 0.25


def test_the_next_measurement_is_expected_to_cost_the_mean_of_those_before() -> None:
    schedule = Schedule(10, budget=0.125)
    schedule.note_steps([(0, 1.0)])
    schedule.note_measured(3, step_s=2.0, reading_s=0.0)
    schedule.note_measured(13, step_s=3.0, reading_s=1.0)
    assert schedule.measuring_s == 4.0
    # 1 s of other things, 4 s of measuring and 2 s to come are an eighth of 56 s.
    assert not schedule.is_due(23, run_s=55.9, own_s=1.0)
    assert schedule.is_due(24, run_s=56.0, own_s=1.0)


@pytest.mark.parametrize(("interval", "steps"), [(0, 100), (5, 1), (10, 1), (40, 4)])
def test_a_budget_that_says_no_is_asked_again_a_tenth_of_an_interval_later(interval: int, steps: int) -> None:
    schedule = Schedule(interval, budget=0.01)
    schedule.note_measured(3, step_s=1.0, reading_s=1.0)
    schedule.hasten(50)
    assert not schedule.is_due(50, run_s=1.0, own_s=0.0)
    assert schedule.next_step == 50 + steps
