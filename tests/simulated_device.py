"""A device without hardware: queues that run kernels in order behind the host's back, and events with CUDA's semantics.

Time is one number, moved by the host alone. What the device will do is decided when the host enqueues it: a kernel
starts when it has been launched and its stream is free. Breaking a rule of CUDA's that would harm the user's run raises
`RuleBroken`, which no `except Exception` swallows.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque

import pytest
import torch

from flopmeter.timing.events import DeviceStep, DeviceTimeline

US = 1e-6
MS = 1e-3


class RuleBroken(BaseException):
    """A call that CUDA would answer by breaking the user's run."""


class Host:
    """The host's clock; several devices may hang on one host."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    def work(self, seconds: float) -> None:
        self.now_s += seconds


class Stream:
    """Work in order. The host blocks when `depth` kernels are waiting."""

    def __init__(self, device: SimulatedDevice, depth: int) -> None:
        self.device = device
        self.free_at_s = 0.0
        self._depth = depth
        self._ends_s: deque[float] = deque()

    def launch(self, kernel_s: float, *, launch_s: float | None = None) -> None:
        host = self.device.host
        host.work(self.device.launch_s if launch_s is None else launch_s)
        while self._ends_s and self._ends_s[0] <= host.now_s:
            self._ends_s.popleft()
        if len(self._ends_s) >= self._depth:
            host.now_s = self._ends_s.popleft()
        self.free_at_s = max(host.now_s, self.free_at_s) + kernel_s
        self._ends_s.append(self.free_at_s)

    def wait_for(self, other: Stream) -> None:
        """Later kernels here start after those that `other` has so far; the host goes on."""
        self.wait_until(other.free_at_s)

    def wait_until(self, time_s: float) -> None:
        self.free_at_s = max(self.free_at_s, time_s)

    def synchronize(self) -> None:
        self.device.host.now_s = max(self.device.host.now_s, self.free_at_s)


class SimulatedDevice:
    """One device with a clock of its own.

    Args:
        launch_s: Host time of a launch.
        record_s: Host time of recording an event.
        depth: Kernels that may wait in a stream.
        drift: How much faster than the host's its clock runs: 1e-6 is 1 ppm.
        fail_at_query: Number of the call to `query`, from 1, that raises the user's own error; all later calls do, too.
    """

    def __init__(
        self,
        host: Host | None = None,
        *,
        launch_s: float = 5 * US,
        record_s: float = 1 * US,
        depth: int = 1024,
        drift: float = 0.0,
        fail_at_query: int | None = None,
    ) -> None:
        self.host = host or Host()
        self.launch_s, self.record_s, self.drift = launch_s, record_s, drift
        self.fail_at_query = fail_at_query
        self.is_initialized, self.is_capturing = True, False
        self.num_queries = self.num_records = 0
        self.threads = {threading.get_ident()}
        self._process = os.getpid()
        self._depth = depth
        self.stream = self.default_stream = Stream(self, depth)
        """The current one; assign another to switch."""

    def new_stream(self) -> Stream:
        return Stream(self, self._depth)

    def clock_s(self, time_s: float) -> float:
        """The device's own clock, which counts half microseconds from some start of its own."""
        return round((12_345.0 + time_s * (1 + self.drift)) / (0.5 * US)) * (0.5 * US)

    def check_call(self) -> None:
        if os.getpid() != self._process:
            raise RuleBroken("CUDA was called in a forked child")
        if threading.get_ident() not in self.threads:
            raise RuleBroken("CUDA was called on a foreign thread")
        if not self.is_initialized:
            raise RuleBroken("the call would initialise CUDA")

    def check_not_capturing(self) -> None:
        self.check_call()
        if self.is_capturing:
            raise RuleBroken("the call would break a graph capture")


class SimulatedEvent:
    """An event as `torch.cuda.Event(enable_timing=True)` is one."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._passed_s = 0.0

    def record(self, stream: Stream) -> None:
        device = stream.device
        device.check_not_capturing()
        if self._stream is not None and self._stream.device is not device:
            raise RuntimeError("Event device does not match recording stream's device")
        device.num_records += 1
        device.host.work(device.record_s / 2)
        self._stream, self._passed_s = stream, max(device.host.now_s, stream.free_at_s)
        device.host.work(device.record_s / 2)

    def query(self) -> bool:
        if self._stream is None:
            return True
        device = self._stream.device
        device.check_not_capturing()
        device.num_queries += 1
        if device.fail_at_query is not None and device.num_queries >= device.fail_at_query:
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"
            )
        return device.host.now_s >= self._passed_s

    def elapsed_time(self, end: SimulatedEvent) -> float:
        if self._stream is None or end._stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time")
        device = self._stream.device
        if end._stream.device is not device:
            raise ValueError("Events must be on the same device")
        device.check_not_capturing()
        if device.host.now_s < max(self._passed_s, end._passed_s):
            raise RuntimeError("CUDA error: device not ready")
        return ctypes.c_float((device.clock_s(end._passed_s) - device.clock_s(self._passed_s)) * 1e3).value


class SimulatedEvents:
    """The events of a simulated device as a timeline wants them."""

    def __init__(self, device: SimulatedDevice, num_events: int = 64) -> None:
        self.num_events = num_events
        self._device = device
        self._events = [SimulatedEvent() for _ in range(num_events)]

    def initialized(self) -> bool:
        return self._device.is_initialized

    def capturing(self) -> bool:
        self._device.check_call()
        return self._device.is_capturing

    def record(self, slot: int) -> None:
        self._events[slot].record(self._device.stream)

    def query(self, slot: int) -> bool:
        return self._events[slot].query()

    def elapsed_ms(self, first: int, second: int) -> float:
        return self._events[first].elapsed_time(self._events[second])


def timeline_on(device: SimulatedDevice, num_events: int = 64) -> DeviceTimeline:
    return DeviceTimeline(SimulatedEvents(device, num_events), now_ns=device.host.now_ns)


UNKNOWN = -123.0
"""What memory holds before a copy has come."""


class Queue:
    """Stands in for CUDA where copies go to the host: any tensor is the device's, and its copy comes late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = SimulatedDevice(launch_s=0.0, record_s=0.0)
        self.num_events = 0
        self._copies: list[tuple[float, torch.Tensor, torch.Tensor]] = []
        monkeypatch.setattr("flopmeter.timing.late.to_host", self.to_host)
        monkeypatch.setattr(torch.cuda, "Event", self.new_event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.device.stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.device.is_capturing)

    def new_event(self) -> SimulatedEvent:
        self.num_events += 1
        return SimulatedEvent()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(tensor, UNKNOWN)
        self._copies.append((self.device.stream.free_at_s, host, tensor.clone()))
        self.pass_s(0.0)  # an idle device copies at once
        return host

    def pass_s(self, seconds: float) -> None:
        self.device.host.work(seconds)
        for arrives_s, host, tensor in self._copies:
            if arrives_s <= self.device.host.now_s:
                host.data.copy_(tensor)  # as a device writes: no version tells of it


class Loop:
    """A training loop: per step a wait for data, then forward, backward and optimizer as so many equal kernels.

    Args:
        data_s: Time that `next(loader)` takes on the host.
        reads_loss: Where `.item()` is called: after a phase, after the "step", or never.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        timeline: DeviceTimeline,
        *,
        kernel_s: float,
        forward: int = 400,
        backward: int = 800,
        optimizer: int = 100,
        data_s: float = 0.0,
        reads_loss: str = "",
    ) -> None:
        self.device, self.timeline = device, timeline
        self.kernel_s, self.data_s, self.reads_loss = kernel_s, data_s, reads_loss
        self.num_kernels = {"forward": forward, "backward": backward, "optimizer": optimizer}
        self.step = 0

    def run_step(self) -> None:
        self.timeline.mark("data_wait")
        self.device.host.work(self.data_s)
        self.timeline.mark("host_to_device")
        for phase in self.num_kernels:
            self.run_phase(phase)
        self.timeline.end_step(self.step)
        self.step += 1
        if self.reads_loss == "step":
            self.device.stream.synchronize()

    def run_phase(self, phase: str) -> None:
        self.timeline.mark(phase)
        for _ in range(self.num_kernels[phase]):
            self.device.stream.launch(self.kernel_s)
        if self.reads_loss == phase:
            self.device.stream.synchronize()

    def run(self, num_steps: int) -> list[DeviceStep]:
        """Run so many steps, let the device finish, and give them without the first two, which fill its queue."""
        for _ in range(num_steps):
            self.run_step()
        self.device.host.work(1.0)
        return self.timeline.poll()[2:]
