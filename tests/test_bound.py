"""Who waits for whom: on a simulated device, and on the kernels of recorded runs."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flopmeter.monitor.device_time import judge
from flopmeter.timing.events import DeviceStep, PhaseTime
from simulated_device import MS, US, Loop, SimulatedDevice, timeline_on

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
PPM = 1e-6


def run(kernel_s: float, *, num_steps: int = 14, reads_loss: str = "", data_s: float = 0.0) -> list[DeviceStep]:
    device = SimulatedDevice(drift=30 * PPM)
    return Loop(device, timeline_on(device), kernel_s=kernel_s, reads_loss=reads_loss, data_s=data_s).run(num_steps)


# 400 kernels forward, 800 backward and 100 in the optimizer, 5 us a launch: a kernel above 5 us puts the device behind.


@pytest.mark.parametrize("reads_loss", ["", "step", "forward"])
def test_kernels_shorter_than_their_launch_make_a_run_host_bound(reads_loss: str) -> None:
    verdict = judge(run(3 * US, reads_loss=reads_loss))
    assert verdict.bound == "host"
    assert verdict.reason == "the device waited for the host to launch or synchronise in 100 % of 12 steps"


@pytest.mark.parametrize(
    ("kernel_s", "reads_loss"), [(20 * US, ""), (20 * US, "step"), (20 * US, "forward"), (6 * US, "")]
)
def test_kernels_longer_than_their_launch_make_a_run_device_bound(kernel_s: float, reads_loss: str) -> None:
    verdict = judge(run(kernel_s, reads_loss=reads_loss))
    assert verdict.bound == "device"
    assert verdict.queued_share > 0.5


@pytest.mark.parametrize(
    ("kernel_share", "bound"), [(None, "unknown"), (0.97, "device"), (0.5, "device"), (0.49, "host"), (0.1, "host")]
)
def test_a_device_that_is_a_little_behind_is_judged_by_a_sampled_step_alone(
    kernel_share: float | None, bound: str
) -> None:
    # A microsecond a kernel behind after each read: 1200 kernels that never end, or one long one at the end of each
    # phase, leave the same marks.
    assert judge(run(6 * US, reads_loss="step"), kernel_share=kernel_share).bound == bound


def test_a_long_kernel_at_the_end_of_a_phase_does_not_make_a_device_the_slower_one() -> None:
    # A step of 23 ms, 7 ms of it forward, in which the device is 1.6 ms behind at the end: it works 7 % of the time.
    phases = {
        "forward": PhaseTime(device_s=7 * MS, host_s=7 * MS, lag_at_least_s=1.6 * MS),
        "backward": PhaseTime(device_s=13 * MS, host_s=13 * MS),
        "optimizer": PhaseTime(device_s=3 * MS, host_s=3 * MS),
    }
    verdict = judge([DeviceStep(step=0, device_s=23 * MS, phases=phases)] * 10)
    assert (verdict.bound, verdict.queued_share) == ("unknown", pytest.approx(1.6 / 23))
    assert judge([DeviceStep(step=0, device_s=23 * MS, phases=phases)] * 10, kernel_share=0.21).bound == "host"


def test_what_marks_prove_outweighs_an_older_sample() -> None:
    assert judge(run(20 * US), kernel_share=0.1).bound == "device"


def test_a_read_in_every_step_makes_the_lag_exact() -> None:
    # From an empty queue, forward and backward are 1200 kernels, and each puts the device 15 or 1 us further behind.
    for kernel_s, lag_s in ((20 * US, 18 * MS), (6 * US, 1.2 * MS), (3 * US, 0.0)):
        for step in run(kernel_s, reads_loss="step"):
            assert step.phases["backward"].lag_at_least_s == pytest.approx(lag_s, abs=10 * US)


@pytest.mark.parametrize(
    ("kernel_s", "reads_loss", "backlog"),
    [
        (3 * US, "", (False, False, False)),
        (3 * US, "step", (False, False, False)),
        (20 * US, "", (True, True, True)),
        (20 * US, "step", (False, True, True)),
        (6 * US, "step", (False, False, True)),
    ],
)
def test_backlog_is_seen_in_the_phases_that_the_device_begins_late(
    kernel_s: float, reads_loss: str, backlog: tuple[bool, bool, bool]
) -> None:
    for step in run(kernel_s, reads_loss=reads_loss):
        assert tuple(step.phases[phase].has_backlog for phase in ("forward", "backward", "optimizer")) == backlog


def test_a_device_that_waits_in_one_phase_alone_is_not_host_bound() -> None:
    device = SimulatedDevice()
    loop = Loop(device, timeline_on(device), kernel_s=20 * US, forward=0, reads_loss="step")
    assert judge(loop.run(14)).bound == "device"


def step_with(lag_s: float, *, step_s: float = 0.001, has_backlog: bool = False) -> DeviceStep:
    time = PhaseTime(device_s=step_s, host_s=step_s, has_backlog=has_backlog, lag_at_least_s=lag_s)
    return DeviceStep(step=0, device_s=step_s, phases={"forward": time})


@pytest.mark.parametrize(("num_behind", "bound"), [(1, "host"), (2, "unknown"), (4, "unknown"), (5, "device")])
def test_one_step_in_ten_may_be_behind_in_a_host_bound_run(num_behind: int, bound: str) -> None:
    steps = [step_with(0.0)] * (10 - num_behind) + [step_with(0.0, has_backlog=True)] * num_behind
    assert judge(steps).bound == bound


@pytest.mark.parametrize(
    ("lag_s", "step_s", "bound"),
    [(49 * US, MS, "host"), (51 * US, MS, "unknown"), (9 * MS, 1.0, "host"), (11 * MS, 1.0, "unknown")],
)
def test_a_lag_of_a_few_launches_or_a_hundredth_of_the_step_is_none(lag_s: float, step_s: float, bound: str) -> None:
    assert judge([step_with(lag_s, step_s=step_s)] * 10).bound == bound


def test_too_few_steps_or_steps_with_a_flaw_give_no_verdict() -> None:
    flawed = DeviceStep(step=0, device_s=None, phases={}, flaw="unordered")
    unmarked = DeviceStep(step=0, device_s=1.0, phases={"other": PhaseTime(device_s=1.0)})
    verdict = judge([flawed] * 50 + [unmarked] * 50 + [step_with(0.0)] * 9)
    assert (verdict.bound, verdict.num_steps, verdict.queued_share) == ("unknown", 9, None)
    assert "9 steps" in verdict.reason


def test_only_the_data_wait_that_idles_the_device_is_lost() -> None:
    # 6.5 ms of launches and 5 ms of waiting fit into 26 ms of kernels.
    hidden = [step.phases["data_wait"] for step in run(20 * US, data_s=5 * MS)]
    assert sum(wait.host_s for wait in hidden) == pytest.approx(12 * 5 * MS, rel=1e-3)
    assert sum(wait.device_s for wait in hidden) == pytest.approx(0.0, abs=12 * US)
    # After a read nothing is queued: the device stands still for all of it.
    lost = [step.phases["data_wait"] for step in run(20 * US, data_s=5 * MS, reads_loss="step")]
    assert sum(wait.device_s for wait in lost) == pytest.approx(12 * 5 * MS, rel=1e-3)
    assert sum(wait.host_s - wait.device_s for wait in lost) == pytest.approx(0.0, abs=50 * US)


# Recorded runs: launches and kernels as a profiler saw them


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    launched_s: float
    started_s: float
    kernel_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The stream that most kernels of a trace ran on, and the host's marks, seconds from the first of them."""

    kernels: list[Kernel]
    marks: list[tuple[float, str]]


def load_recording(name: str) -> Recording:
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"the recorded run {name} is not beside the repository")
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    launch_us = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") == "cuda_runtime"}
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = [e for e in work if e["args"]["correlation"] in launch_us]
    stream = Counter(e["args"]["stream"] for e in work).most_common(1)[0][0]
    marks = sorted(mark for e in events if e.get("cat") == "user_annotation" for mark in marks_of(e))
    start_us = marks[0][0]
    kernels = [
        Kernel(
            launched_s=(launch_us[e["args"]["correlation"]] - start_us) * US,
            started_s=(e["ts"] - start_us) * US,
            kernel_s=e["dur"] * US,
        )
        for e in work
        if e["args"]["stream"] == stream
    ]
    return Recording(
        kernels=sorted(kernels, key=lambda kernel: kernel.launched_s),
        marks=[((time_us - start_us) * US, phase) for time_us, phase in marks],
    )


def marks_of(annotation: dict[str, Any]) -> list[tuple[float, str]]:
    name, start_us = annotation["name"], annotation["ts"]
    if name.startswith("ProfilerStep"):
        return [(start_us, "step")]
    phase = name.strip("# ")
    if name.startswith("## ") and phase in ("forward", "backward", "optimizer"):
        return [(start_us, phase), (start_us + annotation["dur"], "other")]
    return []


@dataclass(slots=True)
class Replay:
    """What a timeline makes of a recording, beside what its kernels' own end times say."""

    steps: list[DeviceStep]
    passed_s: list[tuple[float, str]]
    """When the recorded device passed each mark: at the end of the last kernel launched before it, or at once."""

    def recorded_phase_s(self, step: int, phase: str) -> float:
        borders = [number for number, (_, opened) in enumerate(self.passed_s) if opened == "step"]
        first, last = borders[step - 1], borders[step]
        pairs = zip(self.passed_s[first:last], self.passed_s[first + 1 : last + 1], strict=True)
        return sum(end_s - start_s for (start_s, opened), (end_s, _) in pairs if opened == phase)


def replay(recording: Recording, *, has_waits: bool, host_stretch: float = 1.0) -> Replay:
    """Launch the recorded kernels at the recorded times.

    Args:
        has_waits: The stream waited for others: a kernel that started long after it could have is held back as long.
        host_stretch: How much slower the host is than the recorded one.
    """
    device = SimulatedDevice(depth=len(recording.kernels), launch_s=0.0, record_s=0.0)
    timeline, stream = timeline_on(device, num_events=512), device.stream
    passed_s: list[tuple[float, str]] = []
    end_s = 0.0
    marks = iter([*recording.marks, (float("inf"), "")])
    mark_s, phase = next(marks)
    for kernel in recording.kernels:
        while mark_s <= kernel.launched_s:
            device.host.now_s = mark_s * host_stretch
            passed_s.append((max(mark_s, end_s), phase))
            if phase == "step":
                timeline.end_step(sum(opened == "step" for _, opened in passed_s) - 1)
            else:
                timeline.mark(phase)
            mark_s, phase = next(marks)
        device.host.now_s = kernel.launched_s * host_stretch
        if has_waits and kernel.started_s - max(end_s, kernel.launched_s) > 20 * US:
            stream.wait_until(kernel.started_s)
        stream.launch(kernel.kernel_s)
        end_s = max(end_s, kernel.started_s + kernel.kernel_s)
    device.host.work(1.0)
    return Replay(timeline.poll()[1:], passed_s)


RECORDED = [
    # One stream. Between two of 1,200 kernels the real device takes about a microsecond: 1 % of the step.
    ("v100_single_5steps", False, 4, 0.02),
    # Collectives on other streams, which the main one waits for.
    ("a100_low_busy_5steps", True, 4, 0.01),
    ("a100_nccl_6steps", True, 5, 0.01),
]


@pytest.mark.parametrize(("name", "has_waits", "num_steps", "tolerance"), RECORDED)
def test_a_recorded_run_takes_the_device_as_long_as_its_kernels_did(
    name: str, has_waits: bool, num_steps: int, tolerance: float
) -> None:
    result = replay(load_recording(name), has_waits=has_waits)
    assert [step.step for step in result.steps] == list(range(1, num_steps + 1))
    for step in result.steps:
        assert step.flaw is None
        for phase in ("forward", "backward", "optimizer"):
            recorded_s = result.recorded_phase_s(step.step, phase)
            assert step.phases[phase].device_s == pytest.approx(recorded_s, abs=tolerance * step.device_s)


@pytest.mark.parametrize(
    ("name", "has_waits", "num_steps", "kernel_share"),
    [
        ("v100_single_5steps", False, 4, None),
        ("a100_low_busy_5steps", True, 4, None),
        ("a100_nccl_6steps", True, 5, 0.838),  # idle 16.2 % by HTA
    ],
)
def test_no_recorded_run_waited_for_its_host(
    name: str, has_waits: bool, num_steps: int, kernel_share: float | None
) -> None:
    recording = load_recording(name)
    result = replay(recording, has_waits=has_waits)
    # By their own end times: each device is still in backward when its host has enqueued the whole optimizer.
    for (passed_s, phase), (left_s, _) in zip(result.passed_s, recording.marks[1:], strict=False):
        assert phase != "optimizer" or passed_s > left_s
    # Where host and device go through forward together, marks prove too little, and the sampled share of kernels does.
    assert judge(result.steps, min_steps=num_steps, kernel_share=kernel_share).bound == "device"
    assert judge(result.steps, min_steps=num_steps).bound == ("device" if kernel_share is None else "unknown")


def test_the_same_kernels_on_a_host_ten_times_slower_are_host_bound() -> None:
    slow = replay(load_recording("v100_single_5steps"), has_waits=False, host_stretch=10.0)
    assert judge(slow.steps, min_steps=4).bound == "host"
