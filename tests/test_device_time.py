"""The monitor on a simulated device: a plain CPU loop whose marks also go to a device of our making."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import flopmeter
from flopmeter import TrainingMonitor, load_run, watch
from flopmeter.devices import Peak
from flopmeter.flops.frames import Batch
from flopmeter.flops.workload import Workload
from flopmeter.monitor.device_time import DeviceTime
from flopmeter.timing.events import FIRST_STEPS, DeviceStep, DeviceTimeline, PhaseTime, is_sampled
from simulated_device import MS, US, SimulatedDevice, timeline_on

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "detail_every": 20}}


class Simulated(nn.Module):
    """Launches kernels on the simulated device as it computes."""

    def __init__(self, device: SimulatedDevice, num_kernels: int, kernel_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.device, self.num_kernels, self.kernel_s = device, num_kernels, kernel_s

    def launch(self, *_: Any) -> None:
        for _ in range(self.num_kernels):
            self.device.stream.launch(self.kernel_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.launch()
        y = self.layer(x)
        y.register_hook(self.launch)  # and as many in the backward pass
        return y


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_s: float, **device: Any) -> dict[str, Any]:
    simulated = SimulatedDevice(**device)
    monkeypatch.setattr("flopmeter.monitor.live_run.timeline_of", lambda _: timeline_on(simulated, num_events=256))
    model = Simulated(simulated, num_kernels=100, kernel_s=kernel_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    optimizer.register_step_pre_hook(model.launch)
    for _ in range(24):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        simulated.stream.synchronize()
    monitor.finish_training()
    events = [event for event in load_run(tmp_path).events if event["event"] == "device_time"]
    assert monitor.run.num_failures == 0
    return events[0]


def test_the_record_has_device_seconds_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = run(tmp_path, monkeypatch, kernel_s=50 * US)
    # 100 kernels of 50 us, launched by a host that is far ahead.
    assert event["device_s"]["forward"] == pytest.approx(5 * MS, rel=0.02)
    assert event["verdict"]["bound"] == "device"


def test_a_host_that_launches_too_slowly_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, kernel_s=1 * US)["verdict"]["bound"] == "host"


class Timeline:
    """A device that finishes each step so many steps after the host."""

    def __init__(self, seconds: list[float], num_behind: int) -> None:
        self.seconds, self.num_behind = seconds, num_behind
        self.mark = self.mark_inside_backward = self.is_capturing = lambda *_: None
        self.last = 0

    def end_step(self, number: int) -> None:
        self.last = number

    def poll(self) -> list[DeviceStep]:
        number = self.last - self.num_behind
        if number < 1:
            return []
        seconds = self.seconds[number - 1]
        phases = {"forward": PhaseTime(device_s=seconds, host_s=seconds)}
        return [DeviceStep(step=number, device_s=seconds, phases=phases)]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("num_behind", [0, 1, 5])
def test_steps_that_do_not_represent_the_run_are_in_no_mean_however_late_they_come(num_behind: int) -> None:
    events: list[dict[str, Any]] = []
    told: list[Mapping[str, float]] = []
    atypical_s = {1: 30.0, 2: 30.0, 3: 30.0, 5: 5.0}  # a warm-up that compiles, and a measured step
    timeline = Timeline([atypical_s.get(number, 0.1) for number in range(1, FIRST_STEPS + 1)], num_behind)
    device_time = DeviceTime(timeline, lambda _, **fields: events.append(fields), every=12)  # type: ignore[arg-type]
    device_time.on_step = told.append
    for number in range(1, FIRST_STEPS + 1):
        device_time.end_step(number)
        device_time.take_finished(number, is_typical=number not in atypical_s)
    assert [event["num_steps"] for event in events] == [12 - num_behind - 4]
    assert events[0]["device_s"]["forward"] == pytest.approx(0.1)
    assert [phase_s["forward"] for phase_s in told] == [0.1] * (FIRST_STEPS - num_behind - 4)


def test_a_watched_run_leaves_its_marked_steps_out_of_the_device_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = run(tmp_path, monkeypatch, kernel_s=50 * US)
    marked = [index for index in load_run(tmp_path).marks if index < 19]
    assert marked[:4] == [0, 1, 2, 3]  # three warm up, the fourth is observed; one more may be profiled
    # The event is written when the host ends its twentieth step, which the device has still to finish.
    # Beyond the first fifteen one step in sixteen is marked: the 34th is the next.
    assert event["num_steps"] == FIRST_STEPS - len([index for index in marked if index < FIRST_STEPS])


class Text(nn.Module):
    """A model whose padding is on the device: to read its lengths is to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(4, 8), nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (self.layer(self.embedding(input_ids)).mean(-1) * attention_mask).sum()


@pytest.mark.parametrize("num_before", [0, 3, 12])
def test_a_step_that_is_captured_into_a_graph_is_left_alone_and_is_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    simulated = SimulatedDevice()  # while it captures, every record or query raises RuleBroken
    monkeypatch.setattr("flopmeter.monitor.live_run.timeline_of", lambda _: timeline_on(simulated))

    read = Batch.workload

    def workload(batch: Batch) -> Workload:
        assert not simulated.is_capturing, "a wait for the device, which spoils the graph"
        return read(batch)

    monkeypatch.setattr(Batch, "workload", workload)
    model = Text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)

    def step() -> None:
        ids = torch.zeros(2, 8, dtype=torch.long)
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).backward()
        optimizer.step()

    for _ in range(num_before):
        step()
    assert monitor.run.effort.is_measuring == (num_before == 3)  # torch's recipe warms up for as many steps as we do
    simulated.is_capturing = True
    step()
    assert not monitor.run.effort.is_measuring
    assert torch._C._len_torch_dispatch_stack() == 0
    simulated.is_capturing = False
    for _ in range(6):
        step()
    monitor.finish_training()
    assert monitor.run.num_failures == 0
    run = load_run(tmp_path)
    assert len(run) == num_before + 6
    assert [event["name"] for event in run.events if event["event"] == "pause" and event["name"] != "flopmeter"] == [
        "graph capture"
    ]
    assert [event["event"] for event in run.events].count("count") == 1
    assert not [event for event in run.events if event["event"] == "warning"]


def test_a_sample_that_meets_a_capture_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedDevice()
    monkeypatch.setattr("flopmeter.monitor.live_run.timeline_of", lambda _: timeline_on(simulated))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    sampling = monitor.run.effort.sampling
    for _ in range(100):
        if sampling.running is not None:
            simulated.is_capturing = True
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert monitor.run.worker is not None
        monitor.run.worker.drain(10.0)
        if simulated.is_capturing:
            break
    assert simulated.is_capturing
    assert sampling.running is None
    assert not torch._C._autograd._profiler_enabled()
    assert sampling.plan.next_step == monitor.num_steps + 20
    simulated.is_capturing = False
    monitor.finish_training()
    assert "profile" not in [event["event"] for event in load_run(tmp_path).events]


def test_a_model_that_is_moved_after_watch_is_held_against_the_device_where_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = [torch.device("cpu")]
    simulated = SimulatedDevice()

    def peak(device: torch.device, dtype: str, **_: object) -> Peak:
        return Peak(flop_per_s=1e11 if device.type == "cpu" else 6e13, dtype=dtype, device=str(device), source="table")

    def timeline(device: torch.device) -> DeviceTimeline | None:
        return timeline_on(simulated) if device.type == "cuda" else None

    monkeypatch.setattr("flopmeter.monitor.measuring.peak_flops", peak)
    monkeypatch.setattr("flopmeter.monitor.live_run.timeline_of", timeline)
    for module in ("measuring", "live_run", "header"):
        monkeypatch.setattr(f"flopmeter.monitor.{module}.device_of", lambda _: where[0])
    monkeypatch.setattr("flopmeter.monitor.live_run.device_name", lambda device: f"name of {device.type}")
    monkeypatch.setattr("flopmeter.monitor.header.device_uuid", lambda device: f"uuid of {device.type}")
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config={"monitoring": {"sinks": [], "profile_steps": False}})
    monitor.run.start_now()  # as after the first forward pass
    where[0] = torch.device("cuda", 0)  # as model.to("cuda") does
    for _ in range(8):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    assert monitor.run.resources is not None
    assert monitor.run.resources._uuid == "uuid of cuda"
    monitor.finish_training()
    assert monitor.run.num_failures == 0
    run = load_run(tmp_path)
    assert run.header.device == "name of cuda"
    assert [peak["device"] for peak in run.peaks.values()] == ["cuda:0"]
    assert simulated.num_records > 0
    # A gradient for the weights and none for the input: two products.
    flop = 2 * (2 * 8 * 64 * 64)
    at_peak_s = [mfu * s for mfu, s in zip(run.column("perf/mfu"), run.column("perf/step_time"), strict=True)]
    assert at_peak_s == pytest.approx([flop / 6e13] * 8)


def test_communication_that_the_device_waits_for_reaches_the_sinks_as_a_share() -> None:
    events: list[dict[str, Any]] = []
    phases = {name: PhaseTime(device_s=s, host_s=0.001) for name, s in (("backward", 0.3), ("communication", 0.1))}

    class Communicating(Timeline):
        def poll(self) -> list[DeviceStep]:
            return [DeviceStep(step=self.last, device_s=0.4, phases=phases)]

    device_time = DeviceTime(Communicating([], 0), lambda _, **fields: events.append(fields), every=5)  # type: ignore[arg-type]
    for number in range(1, 6):
        device_time.end_step(number)
        device_time.take_finished(number)
    assert [event["metrics"] for event in events] == [{"perf/exposed_communication_share": pytest.approx(0.25)}]


def test_a_phase_that_the_loop_names_is_marked_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedDevice()
    timeline = timeline_on(simulated, num_events=256)
    monkeypatch.setattr("flopmeter.monitor.live_run.timeline_of", lambda _: timeline)
    model = nn.Linear(4, 4)
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)  # no optimizer: its hooks would mark, too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(1, 25):
        model(torch.ones(2, 4)).sum().backward()
        with monitor.phase("optimizer"):
            simulated.stream.launch(3 * MS)
            optimizer.step()
        simulated.stream.launch(1 * MS)
        simulated.stream.synchronize()
        monitor.log_step(number)
    monitor.finish_training()
    (event, *_) = [event for event in load_run(tmp_path).events if event["event"] == "device_time"]
    assert event["device_s"]["optimizer"] == pytest.approx(3 * MS, rel=0.02)


def test_steps_that_the_device_finishes_while_the_last_numbers_come_are_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = SimulatedDevice()
    monkeypatch.setattr("flopmeter.monitor.live_run.timeline_of", lambda _: timeline_on(simulated, num_events=256))
    model = Simulated(simulated, num_kernels=10, kernel_s=50 * US)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    flush = monitor.recorder.flush

    def flush_slowly() -> None:
        simulated.stream.synchronize()
        flush()

    monkeypatch.setattr(monitor.recorder, "flush", flush_slowly)
    for _ in range(10):  # all in the device's queue when the loop is over
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    monitor.finish_training()
    (event,) = [event for event in load_run(tmp_path).events if event["event"] == "device_time"]
    assert event["num_steps"] == 10 - len(load_run(tmp_path).marks)


def calls_of_ours(step: Callable[[], None], num_steps: int) -> list[int]:
    """Calls of Python functions of the package on this thread, step by step."""
    package, nums = str(Path(flopmeter.__file__).parent), []
    num = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num
        num += event == "call" and frame.f_code.co_filename.startswith(package)

    for _ in range(num_steps):
        num = 0
        sys.setprofile(note)
        step()
        sys.setprofile(None)
        nums.append(num)
    return nums


def steps_in_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeline: DeviceTimeline | None) -> list[int]:
    """Of the steps 201 to 300 of a run."""
    monkeypatch.setattr("flopmeter.monitor.live_run.timeline_of", lambda _: timeline)
    model, loader = nn.Linear(4, 4), DataLoader(torch.ones(1000, 4), batch_size=2)  # type: ignore[arg-type]
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), iter(loader)

    def step() -> None:
        model(next(batches)).sum().backward()
        optimizer.step()

    with watch(model, optimizer, loader, output_dir=tmp_path, config=CONFIG):
        for _ in range(200):
            step()
        return calls_of_ours(step, 100)


def test_an_ordinary_step_takes_few_calls_on_a_device_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    on_host = steps_in_calls(tmp_path / "host", monkeypatch, None)
    on_device = steps_in_calls(tmp_path / "device", monkeypatch, timeline_on(device, num_events=256))
    assert statistics.median(on_host) <= 10
    assert statistics.median(on_device) <= statistics.median(on_host) + 2  # is a graph being captured?
    # Seven phases begin in a step, and one event is its start or end; the first fifteen are marked and one in sixteen.
    num_marked = FIRST_STEPS + sum(is_sampled(step) for step in range(FIRST_STEPS + 1, 301))
    assert num_marked * 4 <= device.num_records <= num_marked * 8
