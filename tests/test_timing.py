from __future__ import annotations

import gc
import weakref

import pytest
import torch

from flopmeter.timing import StepClock
from flopmeter.timing.late import take


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def time_() -> FakeClock:
    return FakeClock()


@pytest.fixture
def clock(time_: FakeClock) -> StepClock:
    clock = StepClock(time_)
    clock.start()
    return clock


def test_a_step_lasts_from_the_end_of_the_last_one(clock: StepClock, time_: FakeClock) -> None:
    time_.pass_s(2)
    assert clock.end_step() == (2.0, {})
    time_.pass_s(3)
    assert clock.end_step() == (3.0, {})


def test_phases_are_summed_over_micro_batches(clock: StepClock, time_: FakeClock) -> None:
    for _ in range(2):
        with clock.phase("forward"):
            time_.pass_s(1)
        time_.pass_s(0.5)
    assert clock.end_step() == (3.0, {"forward": 2.0})
    assert clock.end_step() == (0.0, {})


def test_a_pause_is_no_part_of_the_step(clock: StepClock, time_: FakeClock) -> None:
    time_.pass_s(1)
    with clock.pause() as lasted_s:
        time_.pass_s(10)
    time_.pass_s(1)
    assert lasted_s() == 10.0
    assert clock.end_step()[0] == 2.0


def test_a_pause_within_a_pause_is_taken_out_once(clock: StepClock, time_: FakeClock) -> None:
    with clock.pause():
        time_.pass_s(1)
        with clock.pause() as inner_s:
            time_.pass_s(2)
    assert inner_s() == 2.0
    time_.pass_s(5)
    assert clock.end_step()[0] == 5.0


def test_a_phase_or_pause_that_raises_is_timed_all_the_same(clock: StepClock, time_: FakeClock) -> None:
    with pytest.raises(RuntimeError), clock.phase("forward"):
        time_.pass_s(1)
        raise RuntimeError
    with pytest.raises(RuntimeError), clock.pause():
        time_.pass_s(4)
        raise RuntimeError
    assert clock.end_step() == (1.0, {"forward": 1.0})


def test_starting_twice_does_not_move_the_start(clock: StepClock, time_: FakeClock) -> None:
    time_.pass_s(1)
    clock.start()
    assert clock.end_step()[0] == 1.0


def test_a_clock_that_was_never_started_gives_zero() -> None:
    assert StepClock(FakeClock()).end_step() == (0.0, {})


def test_a_late_value_is_the_one_at_the_time_of_taking() -> None:
    loss = torch.tensor(8.0, requires_grad=True) * 1
    value = take(loss)
    with torch.no_grad():
        loss /= 4
    assert value.is_ready()
    assert value.read() == 8.0


def test_a_late_value_does_not_keep_the_graph_alive() -> None:
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    loss = hidden.sum()
    value = take(loss)
    graph = weakref.ref(hidden)
    del hidden, loss
    gc.collect()
    assert graph() is None
    assert value.read() == 6.0


def test_a_plain_number_is_its_own_late_value() -> None:
    assert take(1.5).read() == 1.5


def test_taking_a_value_reads_nothing_from_the_device() -> None:
    # On the meta device there is no value to read: any .item(), .cpu() or bool() raises.
    take(torch.tensor(1.0, device="meta", requires_grad=True) * 2)
    with pytest.raises(RuntimeError, match="meta"):
        take(torch.tensor(1.0, device="meta")).read()
