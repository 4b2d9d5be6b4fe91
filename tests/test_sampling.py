"""When is a step sampled, what stops it, and do falls of MFU, garbage and waits for data reach the run file?"""

from __future__ import annotations

import gc
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flopmeter import load_run, watch
from flopmeter.config import MonitorConfig
from flopmeter.monitor.sampling import Regime, RegimeDetector, Sampling
from flopmeter.monitor.schedule import FIRST_STEPS, NEVER, REPEAT_STEPS, TYPICAL_STEPS, SamplingPlan, is_slower
from flopmeter.profiling.profiler_guard import SampledStep, why_not
from flopmeter.record import Run
from flopmeter.timing.garbage import Collections, GarbageWatch
from interrupted import every_moment


def plan_after(num_steps: int, *, step_s: float = 0.1, interval: int = 1000, budget: float = 0.01) -> SamplingPlan:
    plan = SamplingPlan(interval, budget)
    for index in range(num_steps):
        plan.note_step(index, step_s)
    return plan


def test_the_first_sample_waits_for_typical_steps_and_not_for_the_budget() -> None:
    assert plan_after(FIRST_STEPS - 1).next_step == NEVER
    plan = plan_after(FIRST_STEPS)
    assert plan.is_due(14, run_s=1.5, spent_s=99.0)


def test_the_next_sample_waits_for_its_interval_and_the_budget() -> None:
    plan = plan_after(FIRST_STEPS)
    plan.note_sampled(20, step_s=0.3, reading_s=0.1)
    assert plan.typical_s == 0.1
    assert plan.spent_s == pytest.approx(0.3)  # 0.2 s longer than a typical step, and 0.1 s to read
    assert not plan.is_due(1019, run_s=1e6, spent_s=0.3)
    # At one per cent another 0.3 s beside the 0.3 s already spent needs a run of 60 s.
    assert not plan.is_due(1020, run_s=59.0, spent_s=0.3)
    assert not plan.is_due(1021, run_s=61.0, spent_s=0.3)  # asked again only some steps later
    assert plan.is_due(1020 + TYPICAL_STEPS, run_s=61.0, spent_s=0.3)


def test_a_disturbed_sample_is_taken_again_a_few_steps_later_and_not_for_ever() -> None:
    plan = plan_after(FIRST_STEPS)
    for num_steps in (20, 20 + REPEAT_STEPS):  # each takes 0.3 s, so that three have taken a tenth of 9 s
        plan.note_sampled(num_steps, 0.3, 0.1, is_disturbed=True)
        assert not plan.is_due(num_steps + REPEAT_STEPS - 1, run_s=9.1, spent_s=99.0)
        assert plan.is_due(num_steps + REPEAT_STEPS, run_s=9.1, spent_s=99.0)
    plan.note_sampled(20 + 2 * REPEAT_STEPS, 0.3, 0.1, is_disturbed=True)
    assert not plan.is_due(1000, run_s=1e6, spent_s=0.0)
    assert plan.is_due(1020 + 2 * REPEAT_STEPS, run_s=1e6, spent_s=0.0)


def test_a_sample_that_takes_long_is_not_taken_again_before_the_run_is_long_enough() -> None:
    plan = plan_after(FIRST_STEPS)
    plan.note_sampled(20, step_s=10.1, reading_s=2.0, is_disturbed=True)
    assert plan.spent_s == pytest.approx(12.0)  # two of them are a tenth of 240 s
    assert not plan.is_due(20 + REPEAT_STEPS, run_s=239.0, spent_s=12.0)
    assert plan.is_due(20 + REPEAT_STEPS + TYPICAL_STEPS, run_s=241.0, spent_s=12.0)


def test_an_interval_of_zero_means_one_sample() -> None:
    plan = plan_after(FIRST_STEPS, interval=0)
    plan.note_sampled(20, 0.3, 0.1)
    assert plan.next_step == NEVER


def test_a_fall_of_mfu_asks_for_a_sample_within_the_budget() -> None:
    plan = plan_after(FIRST_STEPS)
    plan.note_sampled(20, 0.3, 0.1)
    plan.ask()
    assert not plan.is_due(100, run_s=10.0, spent_s=0.3)
    assert plan.is_due(100 + TYPICAL_STEPS, run_s=100.0, spent_s=0.3)


def test_a_run_that_is_slower_after_a_sample_is_not_sampled_again() -> None:
    plan = plan_after(TYPICAL_STEPS)
    plan.note_sampled(30, 0.3, 0.1)
    found = [plan.note_step(30 + after, 0.12) for after in range(TYPICAL_STEPS)]
    assert found[:-1] == [None] * (TYPICAL_STEPS - 1)
    assert found[-1] == (0.1, 0.12)
    assert plan.next_step == NEVER
    plan.ask()
    assert not plan.is_due(10_000, run_s=1e9, spent_s=0.0)


def test_a_sample_that_leaves_nothing_attached_is_not_blamed() -> None:
    plan = plan_after(TYPICAL_STEPS)
    plan.note_sampled(30, 0.3, 0.1, may_linger=False)
    assert all(plan.note_step(30 + after, 0.2) is None for after in range(2 * TYPICAL_STEPS))
    assert plan.next_step == 1030


def test_a_run_that_goes_on_as_before_is_sampled_again() -> None:
    plan = plan_after(TYPICAL_STEPS)
    plan.note_sampled(30, 0.3, 0.1)
    assert all(plan.note_step(30 + after, 0.104) is None for after in range(TYPICAL_STEPS))
    assert plan.next_step == 1030


@pytest.mark.parametrize("num_late", [0, 1, 15, TYPICAL_STEPS, 100])
def test_steps_that_are_digested_late_lie_before_the_sample_all_the_same(num_late: int) -> None:
    plan, waiting, found = SamplingPlan(5000, 0.005), deque[tuple[int, float]](), []
    for index in range(400):
        if index == 200:
            plan.note_sampled(200, step_s=0.005, reading_s=0.001)
            assert plan.typical_s == 0.001
        waiting.append((index, 0.001 if index < 200 else 0.0015))
        if len(waiting) > num_late:
            found.append(plan.note_step(*waiting.popleft()))
    # Twenty steps from number 200 on are digested: 0..219.
    assert [(index, slower) for index, slower in enumerate(found) if slower] == [(219, (0.001, 0.0015))]


def test_before_the_first_digested_step_nothing_is_typical() -> None:
    plan = SamplingPlan(1000, 0.01)
    plan.note_sampled(5, step_s=0.3, reading_s=0.1)
    assert plan.typical_s is None
    assert plan.spent_s == pytest.approx(0.1)


def test_whoever_asks_gets_another_sample_and_neither_the_first_one_nor_one_after_the_end() -> None:
    plan = plan_after(FIRST_STEPS - 1)
    plan.ask()
    assert plan.next_step == NEVER  # the first sample comes by itself
    plan = plan_after(FIRST_STEPS)
    plan.note_sampled(20, step_s=0.3, reading_s=0.1)
    plan.ask()
    assert plan.next_step == 0
    plan.stop()
    plan.ask()
    assert plan.next_step == NEVER


def test_the_next_sample_is_expected_to_cost_the_mean_of_those_before() -> None:
    plan = plan_after(FIRST_STEPS, step_s=0.5, interval=10, budget=0.25)
    assert plan.next_step == 0
    plan.note_sampled(20, step_s=1.0, reading_s=0.5)
    plan.note_sampled(40, step_s=1.5, reading_s=1.0)
    assert plan.spent_s == 3.0
    # 3 s and the 1.5 s to come are a quarter of 18 s.
    assert not plan.is_due(50, run_s=17.9, spent_s=3.0)
    assert plan.next_step == 50 + TYPICAL_STEPS
    assert plan.is_due(50 + TYPICAL_STEPS, run_s=18.0, spent_s=3.0)


def test_a_sampled_step_that_was_shorter_than_usual_costs_what_reading_took() -> None:
    plan = plan_after(FIRST_STEPS, step_s=0.5)
    plan.note_sampled(20, step_s=0.25, reading_s=0.125)
    assert plan.spent_s == 0.125


def test_a_sample_that_was_under_way_when_all_was_stopped_is_the_last() -> None:
    plan = plan_after(FIRST_STEPS)
    plan.stop()
    plan.note_sampled(20, step_s=0.3, reading_s=0.1)
    assert plan.next_step == NEVER
    assert plan_after(0).is_due(NEVER - 1, run_s=1e9, spent_s=0.0) is False


def test_a_fall_by_just_what_counts_is_none() -> None:
    detector = RegimeDetector(min_fall=0.25, patience=1)
    assert detector.update(0, 1.0) is None
    assert detector.update(1, 0.75) is None  # now 0.875 is normal
    assert detector.update(2, 0.5) == Regime(0.875, 0.5, 2)


def test_as_many_intervals_as_must_be_low_say_what_is_normal() -> None:
    detector = RegimeDetector(min_fall=0.25, patience=1)
    assert detector.update(0, 1.0) is None
    assert detector.update(7, 0.5) == Regime(1.0, 0.5, 7)


def test_slower_means_more_than_the_steps_scatter() -> None:
    assert is_slower([0.1] * 20, [0.112] * 20)
    # Steps of 0.09, 0.10 and 0.11 s scatter by 0.01: an excess of 0.025 is more than twice that, one of 0.019 is not.
    assert is_slower([0.09, 0.1, 0.11] * 6, [0.125] * 20)
    assert not is_slower([0.09, 0.1, 0.11] * 6, [0.119] * 20)
    assert not is_slower([0.1] * 20, [0.105] * 20)
    # Median 0.1, typical distance from it 0.02: 0.13 lies within twice that.
    assert not is_slower([0.08, 0.1, 0.12] * 7, [0.13] * 20)
    # Just a tenth, and just twice the scatter, are not more than that.
    assert not is_slower([1.0] * 20, [1.1] * 20)
    assert not is_slower([0.75, 1.0, 1.25] * 7, [1.5] * 20)
    assert is_slower([0.75, 1.0, 1.25] * 7, [1.51] * 20)


def falls(values: list[float]) -> list[Regime]:
    detector = RegimeDetector(min_fall=0.15, patience=3)
    found = (detector.update(50 * number, value) for number, value in enumerate(values))
    return [fall for fall in found if fall is not None]


def test_a_fall_that_stays_is_told_once_with_where_it_began() -> None:
    assert falls([0.4, 0.4, 0.4, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]) == [(0.4, 0.3, 200)]


def test_a_bad_moment_and_a_small_fall_are_not_told() -> None:
    assert falls([0.4, 0.4, 0.4, 0.2, 0.2, 0.4, 0.2, 0.4, 0.4]) == []
    assert falls([0.4, 0.4, 0.4, 0.35, 0.35, 0.35, 0.35]) == []  # 12.5 %


def test_after_a_fall_the_new_level_is_normal() -> None:
    assert falls([0.4] * 4 + [0.3] * 4 + [0.2] * 3) == [(0.4, 0.3, 200), (0.3, 0.2, 400)]


def test_collections_of_garbage_are_added_up() -> None:
    times = iter([0, 5_000_000, 10_000_000, 12_000_000])
    garbage = GarbageWatch(lambda: next(times))
    for phase in ("start", "stop", "start", "stop"):
        garbage.on_collection(phase, {})
    assert garbage.take() == Collections(num=2, duration_s=0.007, longest_s=0.005)
    assert garbage.take() is None


class Collecting(GarbageWatch):
    """Collections of a nanosecond."""

    def __init__(self) -> None:
        super().__init__(count().__next__)

    def collect(self) -> None:
        self.on_collection("start", {})
        self.on_collection("stop", {})


def test_a_collection_that_ends_while_they_are_taken_is_counted_once() -> None:
    watches: list[Collecting] = []

    def make_call() -> tuple[Callable[[], Collections | None], Callable[[], None]]:
        watches.append(Collecting())
        watches[-1].collect()
        return watches[-1].take, watches[-1].collect

    nums = []
    for first in every_moment(make_call):
        second = watches[-1].take()
        nums.append(sum(taken.num for taken in (first, second) if taken is not None))
    assert len(nums) > 10
    assert set(nums) == {2}


def test_a_collection_that_was_heard_in_part_is_left_out() -> None:
    garbage = Collecting()
    garbage.on_collection("stop", {})
    garbage.collect()
    garbage.on_collection("start", {})
    garbage.collect()
    assert garbage.take() == Collections(num=2, duration_s=2e-9, longest_s=1e-9)


class InterruptedByTestError(Exception):
    """What the handler of a signal raises."""


class Trash:
    """Stays until it is collected. Ends with calls that run no line of Python, so no handler runs among them."""

    def __init__(self) -> None:
        self.itself = self


class Alarm(Trash):
    __del__ = partial(signal.setitimer, signal.ITIMER_VIRTUAL, 0.001)


class Delay(Trash):
    __del__ = partial(sum, range(2_000_000))


def test_a_signal_during_a_collection_reaches_the_loop() -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedByTestError

    garbage, before = GarbageWatch(), signal.signal(signal.SIGVTALRM, interrupt)
    gc.collect()
    gc.freeze()  # what others leave may have callbacks written in Python, which lose the signal
    others = gc.callbacks[:]
    gc.callbacks.clear()
    garbage.start()
    try:
        Alarm(), Delay()
        with pytest.raises(InterruptedByTestError):
            gc.collect()
    finally:
        garbage.close()
        gc.callbacks[:] = others
        gc.unfreeze()
        signal.signal(signal.SIGVTALRM, before)
    taken = garbage.take()
    assert taken is not None
    assert taken.num >= 1


def test_a_real_collection_is_seen_and_the_callback_goes_away() -> None:
    garbage, before = GarbageWatch(), list(gc.callbacks)
    garbage.start()
    garbage.start()
    gc.collect()
    garbage.close()
    taken = garbage.take()
    assert taken is not None
    assert taken.num == 1
    assert 0 < taken.longest_s <= taken.duration_s
    assert gc.callbacks == before


def test_only_collections_in_ordinary_steps_are_the_loops(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"monitoring": {"sinks": [], "peak_flop_per_s": 1e12}}
    gc.disable()
    try:
        with watch(model, optimizer, config=settings, output_dir=tmp_path):
            for _ in range(10):
                model(torch.ones(2, 4)).sum().backward()
                gc.collect()
                optimizer.step()
    finally:
        gc.enable()
    run = load_run(tmp_path)
    # Three steps warm up, the fourth is the observed one; the background digests the ten at once.
    assert sorted(run.marks) == [0, 1, 2, 3]
    assert sum(event["num"] for event in run.events if event["event"] == "gc") == 6


def steps(sampling: Sampling, mfu: float, num: int, first: int = 1) -> None:
    """Ordinary ones of 0.1 s; five are an interval."""
    for number in range(first, first + num):
        sampling.note_steps([(number - 1, 0.1)])
        if number % 5 == 0:
            sampling.end_interval(number - 4, mfu)


def test_a_fall_of_mfu_becomes_an_event_and_asks_for_a_profile() -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    sampling = Sampling(MonitorConfig(), 1000, lambda name, **fields: events.append((name, fields)))
    steps(sampling, 0.4, 20)
    sampling.plan.note_sampled(20, 0.2, 0.0)
    assert sampling.plan.next_step == 20 + 10 * 1000
    steps(sampling, 0.2, 15, first=21)
    assert events == [("regime", {"from_mfu": pytest.approx(0.4), "to_mfu": pytest.approx(0.2), "since_step": 21})]
    assert sampling.plan.is_due(40, run_s=1e6, spent_s=0.0)


@pytest.mark.parametrize("settings", [{"profile_steps": False}, {"mfu_calculation_mode": "estimate"}])
def test_sampling_can_be_off(settings: dict[str, Any]) -> None:
    sampling = Sampling(MonitorConfig.load({"monitoring": settings}), 1000, lambda *_, **__: None)
    steps(sampling, 0.4, 60)
    assert sampling.plan.next_step == NEVER


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def train(folder: Path, num_steps: int, **settings: Any) -> Run:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    loader = DataLoader(torch.randn(8 * num_steps, 64), batch_size=8)
    config = {"monitoring": {"sinks": [], "peak_flop_per_s": 1e12, "flush_every": 1, **settings}}
    monitor = watch(net, optimizer, loader, folder, config)
    for number, batch in enumerate(loader, start=1):
        net(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(number)
        assert monitor.run.worker is not None
        monitor.run.worker.drain(5.0)  # so that the background has seen each step before the next one
    monitor.finish_training()
    return load_run(folder)


def events_of(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == name]


def test_a_watched_run_has_one_profile_marked_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopmeter.monitor.sampling._waited_s", lambda: 7.0)  # no wait for a core in the meantime
    run = train(tmp_path, 30)
    (profile,) = events_of(run, "profile")
    # Three steps of warm-up, one observed, FIRST_STEPS ordinary ones and the one that was under way when the last of
    # them reached the background; the next one is profiled.
    at = 3 + 1 + FIRST_STEPS + 1
    assert run.marks[at] == ("profiled",)
    assert profile["after_step"] == at + 1
    assert profile["step_s"] == pytest.approx(run.column("perf/step_time")[at])
    assert profile["waited_s"] == 0
    outside = ("step_s", "typical_step_s", "waited_s")
    parts_s = sum(value for key, value in profile.items() if key.endswith("_s") and key not in outside)
    assert 0 < parts_s <= profile["step_s"]
    calls = {name: number for name, _, number in profile["top"]}
    assert (calls["aten::addmm"], calls["aten::mm"]) == (2, 3)
    pauses = [event["name"] for event in events_of(run, "pause")]
    measured = sum("observed" in marks or "profiled" in marks for marks in run.marks.values())
    assert measured >= 2
    assert pauses == ["flopmeter"] * measured  # reading the sampled step and the observed ones


def test_the_facts_of_the_observed_step_are_in_the_run_file(tmp_path: Path) -> None:
    (facts,) = events_of(train(tmp_path, 8), "facts")
    assert facts["num_parameter_tensors"] == 4
    assert (facts["num_shapes"], facts["optimizer"], facts["host_syncs"]) == (1, "for-loop", {})


def test_the_cpu_time_of_some_waits_is_recorded(tmp_path: Path) -> None:
    run = train(tmp_path, 15)
    shares = run.column("perf/data_wait_cpu_share")
    assert [index for index, share in enumerate(shares) if share == share] == [6, 13]
    assert all(0 <= shares[index] <= 1 for index in (6, 13))


def test_a_run_without_profiles_has_none(tmp_path: Path) -> None:
    assert events_of(train(tmp_path, 25, profile_steps=False), "profile") == []


def test_a_profiler_that_fails_is_switched_off_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: SampledStep) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(SampledStep, "start", fail)
    run = train(tmp_path, 30)
    assert len(run) == 30
    assert [event["message"] for event in events_of(run, "warning")] == [
        "no more steps are profiled, because profiling failed: RuntimeError: no room"
    ]
    assert caplog.text.count("no room") == 1


def test_off_the_main_thread_no_step_is_profiled() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert "main thread" in str(pool.submit(why_not, "cpu").result())
    assert why_not("cpu") is None


def test_no_step_is_profiled_beside_the_users_own_profiler(tmp_path: Path) -> None:
    with torch.profiler.profile() as user:
        run = train(tmp_path, 30)
    assert events_of(run, "profile") == []
    assert [event["message"] for event in events_of(run, "warning")] == [
        "steps are not measured now: another profiler session is prepared or running, and would show our calls",
        "steps are not profiled now: another profiler session is prepared or running",
    ]
    assert len(user.events()) > 0
