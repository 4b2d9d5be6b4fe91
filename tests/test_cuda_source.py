"""The calls to CUDA, against a stub of `torch.cuda` that knows when which of them is allowed."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flopmeter.timing.cuda import CudaEvents, timeline_of
from flopmeter.timing.events import DeviceTimeline
from simulated_device import MS, US, Host, RuleBroken, SimulatedDevice, SimulatedEvent, Stream


class StubCuda:
    """`torch.cuda` on a machine with two simulated devices, of which the first is the current one."""

    def __init__(self) -> None:
        self.host = Host()
        self.devices = [SimulatedDevice(self.host), SimulatedDevice(self.host)]
        self.num_events = 0
        for device in self.devices:
            device.is_initialized = False

    def initialize(self) -> None:
        for device in self.devices:
            device.is_initialized = True

    def is_initialized(self) -> bool:
        return self.devices[0].is_initialized

    def is_current_stream_capturing(self) -> bool:
        self.devices[0].check_call()
        return self.devices[0].is_capturing

    def current_stream(self, device: int | None = None) -> Stream:
        self.devices[0].check_not_capturing()
        return self.devices[device or 0].stream

    def Event(self, enable_timing: bool = False) -> SimulatedEvent:  # noqa: N802 - torch's name
        self.devices[0].check_not_capturing()
        assert enable_timing, "an event without timing has no elapsed time"
        self.num_events += 1
        return SimulatedEvent()


@pytest.fixture
def cuda() -> StubCuda:
    return StubCuda()


def timeline_with(cuda: StubCuda, device: int = 0) -> DeviceTimeline:
    return DeviceTimeline(CudaEvents(device, num_events=32, cuda=cuda), now_ns=cuda.host.now_ns)


def run_step(timeline: DeviceTimeline, stream: Stream, step: int) -> None:
    timeline.mark("forward")
    stream.launch(3 * MS)
    timeline.mark("backward")
    stream.launch(6 * MS)
    timeline.end_step(step)


def test_a_step_is_timed_on_the_models_device_though_another_is_current(cuda: StubCuda) -> None:
    cuda.initialize()
    timeline = timeline_with(cuda, device=1)
    for step in range(3):
        run_step(timeline, cuda.devices[1].stream, step)
    cuda.host.work(1.0)
    phases = timeline.poll()[-1].phases
    assert {name: time.device_s for name, time in phases.items()} == pytest.approx(
        {"other": 0.0, "forward": 3 * MS, "backward": 6 * MS}, abs=2 * US
    )
    assert cuda.devices[0].num_records == 0


def test_nothing_but_is_initialized_is_called_before_cuda_is_in_use(cuda: StubCuda) -> None:
    with pytest.raises(RuleBroken, match="initialise"):
        cuda.current_stream(0)
    timeline = timeline_with(cuda)
    run_step(timeline, cuda.devices[0].stream, 0)
    assert timeline.poll() == []
    cuda.initialize()
    run_step(timeline, cuda.devices[0].stream, 1)
    assert cuda.devices[0].num_records == 3


def test_the_pool_is_made_once(cuda: StubCuda) -> None:
    cuda.initialize()
    timeline = timeline_with(cuda)
    assert cuda.num_events == 0
    for step in range(100):
        run_step(timeline, cuda.devices[0].stream, step)
        cuda.host.work(0.01)
    assert cuda.num_events == 32
    assert cuda.devices[0].num_records == 100 * 3


def test_nothing_is_called_while_a_stream_is_captured(cuda: StubCuda) -> None:
    cuda.initialize()
    timeline = timeline_with(cuda)
    run_step(timeline, cuda.devices[0].stream, 0)
    cuda.devices[0].is_capturing = True
    run_step(timeline, cuda.devices[0].stream, 1)
    assert timeline.poll() == []
    assert cuda.devices[0].num_records == 3
    cuda.devices[0].is_capturing = False
    run_step(timeline, cuda.devices[0].stream, 2)
    assert cuda.devices[0].num_records == 6


def test_no_other_thread_calls_cuda(cuda: StubCuda) -> None:
    cuda.initialize()
    timeline = timeline_with(cuda)
    run_step(timeline, cuda.devices[0].stream, 0)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuleBroken, match="foreign thread"):
            pool.submit(cuda.current_stream, 0).result()
        pool.submit(run_step, timeline, cuda.devices[0].stream, 1).result()
    assert cuda.devices[0].num_records == 3


def test_an_event_of_another_device_is_refused_and_ends_device_times(
    cuda: StubCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.initialize()
    timeline = timeline_with(cuda)
    for step in range(20):
        if step == 15:
            cuda.devices[0].stream = cuda.devices[1].stream
        with caplog.at_level(logging.WARNING, "flopmeter"):
            run_step(timeline, cuda.devices[0].stream, step)
        cuda.host.work(0.1)
    assert cuda.devices[0].num_records == 15 * 3
    assert len(caplog.messages) == 1


def test_on_a_build_without_cuda_a_timeline_does_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    timeline = DeviceTimeline(CudaEvents(0))
    with caplog.at_level(logging.DEBUG, "flopmeter"):
        timeline.mark("forward")
        timeline.end_step(0)
        assert timeline.poll() == []
    assert caplog.messages == []


def test_a_cpu_has_no_timeline_and_each_gpu_has_its_own() -> None:
    assert timeline_of(torch.device("cpu")) is None
    assert timeline_of(torch.device("meta")) is None
    first, second = timeline_of(torch.device("cuda:0")), timeline_of(torch.device("cuda:1"))
    assert first is not None
    assert first is not second


def test_importing_and_marking_does_not_initialise_cuda() -> None:
    code = """
import torch
def refuse():
    raise SystemExit("CUDA would be initialised")
torch.cuda._lazy_init = refuse
from flopmeter.timing.cuda import timeline_of
timeline = timeline_of(torch.device("cuda:0"))
timeline.mark("forward")
timeline.end_step(0)
timeline.poll()
assert not torch.cuda.is_initialized()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_torch_still_has_what_is_called() -> None:
    assert "device" in inspect.signature(torch.cuda.current_stream).parameters
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    assert list(inspect.signature(torch.cuda.Event.record).parameters) == ["self", "stream"]
    assert list(inspect.signature(torch.cuda.Event.query).parameters) == ["self"]
    assert list(inspect.signature(torch.cuda.Event.elapsed_time).parameters) == ["self", "end_event"]
    assert inspect.signature(torch.cuda.is_initialized).parameters == {}
    assert inspect.signature(torch.cuda.is_current_stream_capturing).parameters == {}
