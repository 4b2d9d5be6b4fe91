"""Device times, on a simulated device whose kernels last as long as we say."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter.timing.events import MAX_UNCOLLECTED_STEPS, DeviceStep, DeviceTimeline
from simulated_device import MS, US, Host, Loop, SimulatedDevice, SimulatedEvent, SimulatedEvents, Stream, timeline_on

# The device's clock counts half microseconds; a step has six marks.
CLOCK_S = 3 * US


def device_s(step: DeviceStep) -> dict[str, float]:
    return {name: time.device_s for name, time in step.phases.items()}


def host_s(step: DeviceStep) -> dict[str, float]:
    return {name: time.host_s for name, time in step.phases.items()}


def backlog(step: DeviceStep) -> set[str]:
    return {name for name, time in step.phases.items() if time.has_backlog}


def run_marks(timeline: DeviceTimeline, stream: Stream, kernel_s: float, step: int) -> None:
    """A step of two phases with one kernel each."""
    timeline.mark("forward")
    stream.launch(kernel_s)
    timeline.mark("backward")
    stream.launch(kernel_s)
    timeline.end_step(step)


# What the phases of a step come to


def test_a_compute_bound_step_lasts_as_long_as_its_kernels() -> None:
    device = SimulatedDevice()
    steps = Loop(device, timeline_on(device), kernel_s=20 * US).run(6)
    assert [step.step for step in steps] == [2, 3, 4, 5]
    for step in steps:
        # 400, 800 and 100 kernels of 20 us; the queue never empties, so nothing else takes device time.
        expected_s = {"forward": 8 * MS, "backward": 16 * MS, "optimizer": 2 * MS}
        expected_s |= {"other": 0.0, "data_wait": 0.0, "host_to_device": 0.0}
        assert device_s(step) == pytest.approx(expected_s, abs=CLOCK_S)
        assert step.device_s == pytest.approx(26 * MS, abs=CLOCK_S)
        assert {"forward", "backward", "optimizer"} <= backlog(step)


def test_a_launch_bound_step_lasts_as_long_as_its_launches() -> None:
    device = SimulatedDevice()
    for step in Loop(device, timeline_on(device), kernel_s=3 * US).run(6):
        # 5 us a launch whatever the kernel; the last kernel of a phase ends at most 3 us after the host's mark.
        expected_s = {"forward": 2 * MS, "backward": 4 * MS, "optimizer": 0.5 * MS}
        for phase, seconds in expected_s.items():
            assert step.phases[phase].device_s == pytest.approx(seconds, abs=5 * US)
            assert step.phases[phase].host_s == pytest.approx(seconds, abs=2 * US)
        assert backlog(step) <= {"other", "data_wait", "host_to_device"}


def test_a_wait_for_data_behind_a_full_queue_takes_no_device_time() -> None:
    device = SimulatedDevice()
    for step in Loop(device, timeline_on(device), kernel_s=20 * US, data_s=5 * MS).run(8):
        assert host_s(step)["data_wait"] == pytest.approx(5 * MS, abs=CLOCK_S)
        assert device_s(step)["data_wait"] == pytest.approx(0.0, abs=CLOCK_S)
        assert step.device_s == pytest.approx(26 * MS, abs=CLOCK_S)


def test_a_wait_for_data_costs_the_device_what_its_queue_does_not_cover() -> None:
    device = SimulatedDevice()
    loop = Loop(device, timeline_on(device), kernel_s=20 * US, data_s=5 * MS, reads_loss="backward")
    for step in loop.run(6):
        # After the read the queue is empty. The optimizer is 2 ms of kernels, enqueued in 0.5: 1.5 of 5 ms are covered.
        assert device_s(step)["data_wait"] == pytest.approx(3.5 * MS, abs=10 * US)


def test_reading_the_loss_in_mid_step_shows_where_the_device_was_behind() -> None:
    device = SimulatedDevice()
    for step in Loop(device, timeline_on(device), kernel_s=20 * US, reads_loss="forward").run(6):
        assert device_s(step)["backward"] == pytest.approx(16 * MS, abs=10 * US)
        assert "forward" not in backlog(step)
        assert "optimizer" in backlog(step)
        # Backward: 800 kernels of 20 us from an empty queue, enqueued in 5 us each.
        lag = step.phases["backward"]
        assert lag.lag_at_least_s == pytest.approx(12 * MS, abs=10 * US)
        # The mark after the read is seen to be passed at the next one only, 4 ms of launches later.
        assert lag.lag_at_most_s == pytest.approx(16 * MS, abs=10 * US)


@pytest.mark.parametrize(("collective_s", "exposed_s"), [(6 * MS, 0.0), (11 * MS, 3 * MS)])
def test_a_collective_costs_what_outlasts_the_backward_pass(collective_s: float, exposed_s: float) -> None:
    device = SimulatedDevice()
    timeline, main, side = timeline_on(device), device.stream, device.new_stream()
    for step in range(4):
        timeline.mark("forward")
        for half in range(2):
            for _ in range(400):
                main.launch(20 * US)
            if half == 0:
                timeline.mark("backward")
                side.wait_for(main)
                side.launch(collective_s)
        timeline.mark_inside_backward("communication")
        main.wait_for(side)
        timeline.mark("other")
        timeline.end_step(step)
    device.host.work(1.0)
    for finished in timeline.poll()[1:]:
        # Backward is 400 kernels of 20 us, and the collective starts with it.
        assert device_s(finished)["backward"] == pytest.approx(8 * MS, abs=CLOCK_S)
        assert device_s(finished)["communication"] == pytest.approx(exposed_s, abs=10 * US)


def test_micro_batches_are_summed_by_phase() -> None:
    device = SimulatedDevice()
    timeline, stream = timeline_on(device), device.stream
    for step in range(3):
        for _ in range(4):
            timeline.mark("forward")
            stream.launch(1 * MS)
            timeline.mark("backward")
            stream.launch(2 * MS)
        timeline.end_step(step)
    device.host.work(1.0)
    assert device_s(timeline.poll()[-1]) == pytest.approx(
        {"other": 0.0, "forward": 4 * MS, "backward": 8 * MS}, abs=20 * US
    )


def test_a_backlog_in_one_micro_batch_is_one_of_the_step() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    timeline.end_step(0)
    device.stream.launch(1 * MS)
    for is_synchronised in (False, True):
        timeline.mark("forward")
        if is_synchronised:
            device.stream.synchronize()
        timeline.mark("backward")
    timeline.end_step(1)
    device.host.work(1.0)
    assert "forward" in backlog(timeline.poll()[-1])


def test_two_devices_have_times_and_events_of_their_own() -> None:
    host = Host()
    devices = [SimulatedDevice(host), SimulatedDevice(host)]
    timelines = [timeline_on(device) for device in devices]
    for step in range(4):
        for device, timeline, kernel_s in zip(devices, timelines, (2 * MS, 5 * MS), strict=True):
            run_marks(timeline, device.stream, kernel_s, step)
    host.work(1.0)
    assert [timeline.poll()[-1].device_s for timeline in timelines] == pytest.approx([4 * MS, 10 * MS], abs=CLOCK_S)
    with pytest.raises(RuntimeError, match="does not match"):
        event = SimulatedEvent()
        event.record(devices[0].stream)
        event.record(devices[1].stream)


# What must not disturb them


def test_half_a_microsecond_is_told_apart_after_a_day() -> None:
    device = SimulatedDevice(depth=4)
    timeline = timeline_on(device)
    num_steps, step_s = 100_000, 0.864
    seen = []
    for step in range(num_steps):
        device.stream.launch(step_s + (step % 2) * US)
        timeline.end_step(step)
        if step % 100 == 0:
            seen += timeline.poll()
    assert device.host.now_s > 86_000
    assert len(seen) > num_steps - 110
    # From the start of the run a float32 of milliseconds would be 8 ms wide by now.
    assert ctypes.c_float(86_400_000 + 3).value == 86_400_000
    for step in seen[-1000:]:
        assert step.device_s == pytest.approx(step_s + (step.step % 2) * US, abs=0.6 * US)


@pytest.mark.parametrize("drift", [100e-6, -100e-6])
@pytest.mark.parametrize("kernel_s", [3 * US, 20 * US])
@pytest.mark.parametrize("reads_loss", ["", "step"])
def test_a_clock_that_drifts_by_100_ppm_makes_no_step_unordered(drift: float, kernel_s: float, reads_loss: str) -> None:
    device = SimulatedDevice(drift=drift)
    steps = Loop(device, timeline_on(device), kernel_s=kernel_s, reads_loss=reads_loss).run(10)
    assert [step.flaw for step in steps] == [None] * 8


def test_marks_on_another_stream_make_the_step_unordered_and_it_has_no_times() -> None:
    device = SimulatedDevice()
    timeline, side = timeline_on(device), device.new_stream()
    run_marks(timeline, device.stream, 1 * MS, 0)
    timeline.mark("forward")
    device.stream.launch(10 * MS)
    timeline.mark("backward")
    device.stream = side
    timeline.mark("optimizer")
    device.stream = device.default_stream
    timeline.end_step(1)
    run_marks(timeline, device.stream, 1 * MS, 2)
    device.host.work(1.0)
    _, unordered, sound = timeline.poll()
    assert unordered == DeviceStep(step=1, device_s=None, phases={}, flaw="unordered")
    assert sound.device_s == pytest.approx(2 * MS, abs=CLOCK_S)


def test_a_process_that_was_suspended_within_a_mark_makes_the_step_unordered() -> None:
    device = SimulatedDevice()

    class Suspended(SimulatedEvents):
        lasts_s = 0.0

        def record(self, slot: int) -> None:
            super().record(slot)
            device.host.work(self.lasts_s)

    source = Suspended(device)
    timeline = DeviceTimeline(source, now_ns=device.host.now_ns)
    for step in range(4):
        for phase in ("forward", "backward"):
            timeline.mark(phase)
            for _ in range(10):
                device.stream.launch(3 * US)
        source.lasts_s = 2.0 if step == 2 else 0.0
        timeline.mark("optimizer")
        source.lasts_s = 0.0
        device.host.work(1 * MS)
        timeline.end_step(step)
    device.host.work(1.0)
    assert [step.flaw for step in timeline.poll()] == ["incomplete", None, "unordered", None]


def test_an_event_that_was_never_recorded_is_not_taken_for_a_passed_one() -> None:
    assert SimulatedEvent().query()
    device = SimulatedDevice()
    timeline = timeline_on(device)
    assert timeline.poll() == []
    device.stream.launch(1.0)
    timeline.end_step(0)
    assert timeline.poll() == []
    device.stream.synchronize()
    assert [(step.step, step.flaw) for step in timeline.poll()] == [(0, "incomplete")]
    assert timeline.poll() == []


@settings(max_examples=60)
@given(
    num_events=st.integers(3, 24),
    drift=st.sampled_from([0.0, 100e-6]),
    work=st.lists(
        st.tuples(st.integers(0, 3000), st.integers(1, 500), st.sampled_from(["", "sync", "poll"])),
        min_size=9,
        max_size=150,
    ),
)
def test_whatever_the_device_does_a_step_without_a_flaw_is_right(
    num_events: int, drift: float, work: list[tuple[int, int, str]]
) -> None:
    device = SimulatedDevice(drift=drift)
    timeline = timeline_on(device, num_events)
    ends_s: list[float] = []
    lags_s: list[float] = []
    seen: list[DeviceStep] = []
    for number, (kernel_us, launch_us, then) in enumerate(work):
        timeline.mark(("forward", "backward", "optimizer")[number % 3])
        device.stream.launch(kernel_us * US, launch_s=launch_us * US)
        if then == "sync":
            device.stream.synchronize()
        if number % 3 == 2:
            lags_s.append(max(0.0, device.stream.free_at_s - device.host.now_s))
            ends_s.append(max(device.host.now_s + device.record_s / 2, device.stream.free_at_s))
            timeline.end_step(len(ends_s) - 1)
        if then == "poll":
            seen += timeline.poll()
    device.host.work(10.0)
    seen += timeline.poll()
    numbers = [step.step for step in seen]
    assert numbers == sorted(set(numbers))
    assert "unordered" not in {step.flaw for step in seen}
    for step in seen:
        if step.device_s is not None:
            truth_s = ends_s[step.step] - ends_s[step.step - 1]
            slack_s = 2e-4 * truth_s + CLOCK_S
            assert step.device_s == pytest.approx(truth_s, abs=slack_s)
            assert sum(device_s(step).values()) == pytest.approx(step.device_s)
            last = list(step.phases.values())[-1]
            assert last.lag_at_least_s - slack_s <= lags_s[step.step] <= last.lag_at_most_s + slack_s


# What it must never do to the user's run


def test_nothing_is_called_before_the_device_is_in_use() -> None:
    device = SimulatedDevice()
    device.is_initialized = False
    timeline = timeline_on(device)
    run_marks(timeline, device.stream, 1 * MS, 0)
    assert timeline.poll() == []
    assert device.num_records == 0
    device.is_initialized = True
    run_marks(timeline, device.stream, 1 * MS, 1)
    run_marks(timeline, device.stream, 1 * MS, 2)
    device.host.work(1.0)
    assert [(step.step, step.flaw) for step in timeline.poll()] == [(1, "incomplete"), (2, None)]


def test_nothing_is_called_while_a_graph_is_captured() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    for step in range(5):
        timeline.mark("forward")
        device.is_capturing = step in (1, 2)
        timeline.mark("backward")
        assert device.is_capturing is False or timeline.poll() == []
        device.stream.launch(1 * MS)
        device.is_capturing = step == 2
        timeline.end_step(step)
        device.is_capturing = False
    device.host.work(1.0)
    assert device.num_records == 5 * 3 - 3
    # Step 1 missed a border inside it. Step 2 missed its end, so that step 3 has no start.
    _, unsplit, incomplete, sound = timeline.poll()
    assert device_s(unsplit) == pytest.approx({"other": 0.0, "unsplit": 1 * MS}, abs=10 * US)
    assert (incomplete.step, incomplete.flaw) == (3, "incomplete")
    assert (sound.step, sound.flaw) == (4, None)


@pytest.mark.parametrize("fail_at_query", [1, 2, 7, 20])
def test_the_users_own_error_ends_device_times_with_one_warning_and_stays_theirs(
    fail_at_query: int, caplog: pytest.LogCaptureFixture
) -> None:
    device = SimulatedDevice(fail_at_query=fail_at_query)
    timeline = timeline_on(device)
    with caplog.at_level(logging.WARNING, "flopmeter"):
        for step in range(30):
            run_marks(timeline, device.stream, 10 * US, step)
            timeline.poll()
    assert device.num_queries == fail_at_query
    (warning,) = caplog.messages
    assert "illegal memory access" in warning
    assert "\n" not in warning


@pytest.mark.parametrize("broken", ["initialized", "capturing", "record", "query", "elapsed_ms"])
def test_no_failing_call_reaches_the_user(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    device = SimulatedDevice()
    source = SimulatedEvents(device)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such symbol")

    setattr(source, broken, fail)
    timeline = DeviceTimeline(source, now_ns=device.host.now_ns)
    with caplog.at_level(logging.WARNING, "flopmeter"):
        for step in range(5):
            run_marks(timeline, device.stream, 1 * US, step)
    assert timeline.poll() == []
    assert len(caplog.messages) == 1


def test_other_threads_are_ignored() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    run_marks(timeline, device.stream, 1 * US, 0)
    device.host.work(1.0)
    calls: list[Callable[[], object]] = [
        lambda: timeline.mark("forward"),
        lambda: timeline.mark_inside_backward("communication"),
        lambda: timeline.end_step(1),
        timeline.poll,
    ]
    with ThreadPoolExecutor(1) as pool:
        results = [pool.submit(call).result() for call in calls]
    assert results == [None, None, None, []]
    assert device.num_records == 3
    assert len(timeline.poll()) == 1


def test_a_callback_of_autograds_may_mark_on_its_own_thread_while_ours_is_in_backward() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    with ThreadPoolExecutor(1, initializer=lambda: device.threads.add(get_ident())) as pool:
        for step in range(2):
            timeline.mark("backward")
            device.stream.launch(2 * MS)
            pool.submit(timeline.mark_inside_backward, "communication").result()
            device.stream.launch(1 * MS)
            timeline.end_step(step)
    device.host.work(1.0)
    assert device_s(timeline.poll()[1])["communication"] == pytest.approx(1 * MS, abs=CLOCK_S)


def test_a_forked_child_calls_nothing() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    for step in range(3):
        run_marks(timeline, device.stream, 1 * MS, step)
    device.host.work(3 * MS)
    timeline.mark("forward")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # other tests' threads make fork a worry; this child needs none
        child = os.fork()
    if child == 0:
        code = 1
        try:
            run_marks(timeline, device.stream, 1 * MS, 3)
            code = int(timeline.poll() != [])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [step.step for step in timeline.poll()] == [0]


@pytest.mark.parametrize(("connections", "records_per_step"), [("1", 3), ("8", 4)])
def test_with_one_connection_no_event_is_recorded_inside_backward(
    connections: str, records_per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    device = SimulatedDevice()
    timeline = timeline_on(device)
    timeline.mark("forward")
    timeline.mark("backward")
    timeline.mark_inside_backward("communication")
    timeline.end_step(0)
    assert device.num_records == records_per_step


def test_marks_beyond_the_limit_of_a_micro_batch_are_skipped_and_their_time_is_unsplit() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    timeline.end_step(0)
    for step in (1, 2):
        timeline.mark("forward")
        for number in range(10):
            timeline.mark(f"layer {number}")
            device.stream.launch(1 * MS)
        timeline.end_step(step)
    device.host.work(1.0)
    # The forward mark and seven more, then none up to the step's own: 1 + 2 * (8 + 1) of 23.
    assert device.num_records == 19
    # The eighth event opens layer 6; what follows is known as a whole only.
    step = timeline.poll()[-1]
    assert device_s(step)["layer 5"] == pytest.approx(1 * MS, abs=10 * US)
    assert device_s(step)["unsplit"] == pytest.approx(4 * MS, abs=10 * US)


def test_a_loop_whose_forward_pass_is_never_seen_keeps_its_marks() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    for step in range(20):
        timeline.mark("data_wait")
        timeline.mark("host_to_device")
        device.stream.launch(1 * MS)
        timeline.mark("optimizer")
        timeline.end_step(step)
        device.stream.synchronize()
    assert device.num_records == 20 * 4
    assert device_s(timeline.poll()[-1])["host_to_device"] == pytest.approx(1 * MS, abs=10 * US)


def test_a_device_that_never_catches_up_costs_no_memory_and_is_measured_again_when_it_does() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device, num_events=16)
    run_marks(timeline, device.stream, 1 * MS, 0)
    device.stream.launch(1e6)
    for step in range(1, 100):
        run_marks(timeline, device.stream, 0.0, step)
    before = sys.getallocatedblocks()
    for step in range(100, 600):
        timeline.mark("forward")
        timeline.mark("backward")
        timeline.end_step(step)
    assert sys.getallocatedblocks() - before < 100
    assert device.num_records <= 16 + 3
    device.stream.synchronize()
    for step in range(600, 604):
        run_marks(timeline, device.stream, 1 * MS, step)
        device.stream.synchronize()
    late = {step.step: step for step in timeline.poll()}
    assert late[600].flaw == "incomplete"
    assert late[602].device_s == pytest.approx(2 * MS, abs=20 * US)
    assert set(late).isdisjoint(range(100, 600))


def test_steps_that_nobody_collects_are_bounded() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    for step in range(2 * MAX_UNCOLLECTED_STEPS):
        run_marks(timeline, device.stream, 0.0, step)
    device.host.work(1.0)
    finished = timeline.poll()
    assert len(finished) == MAX_UNCOLLECTED_STEPS
    assert finished[-1].step == 2 * MAX_UNCOLLECTED_STEPS - 1


def test_a_closed_timeline_marks_nothing() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    timeline.close()
    run_marks(timeline, device.stream, 0.0, 0)
    assert device.num_records == 0
