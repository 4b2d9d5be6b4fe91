"""What was each kernel for, and which call launched it? On a CPU the operators themselves are the work."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from flopmeter.devices.kernels import is_matmul
from flopmeter.traces.host import Cover, Host, Phase
from flopmeter.traces.kernels import Work
from flopmeter.traces.timeline import Timeline


@dataclass(kw_only=True, slots=True)
class Placement:
    """Everything that ran on the device, one entry each, in the order of the trace."""

    start_us: array[float]
    end_us: array[float]
    work: array[int]
    """`Work`, with compute told apart by what it was launched for."""
    phase: list[Phase] = field(default_factory=list)
    launch_us: array[float] = field(default_factory=lambda: array("d"))
    """When the host launched it; NaN when the trace does not say."""
    thread: array[int] = field(default_factory=lambda: array("l"))
    """The thread that launched it; -1 when the trace does not say."""

    def __len__(self) -> int:
        return len(self.start_us)


def place(timeline: Timeline, host: Host) -> Placement:
    """Join what ran with what the host was doing: on the accelerator, or on the host itself where there is none."""
    return _kernels(timeline, host) if len(timeline.device_events) else _operators(timeline, host)


def _kernels(timeline: Timeline, host: Host) -> Placement:
    events = timeline.device_events
    placed = Placement(start_us=events.start_us, end_us=events.end_us, work=array("b", events.work))
    unknown = (math.nan, -1)
    for position, correlation in enumerate(events.correlation):
        launch_us, thread = timeline.launches.get(correlation, unknown)
        phase: Phase = host.phase(thread, launch_us) if thread >= 0 else "other"
        placed.launch_us.append(launch_us)
        placed.thread.append(thread)
        placed.phase.append(phase)
        if placed.work[position] == Work.OTHER_COMPUTE:
            name = timeline.kernel_names[events.name[position]]
            placed.work[position] = _purpose(host, phase, thread, launch_us, is_matmul(name))
    return placed


def _purpose(host: Host, phase: Phase, thread: int, instant: float, is_product: bool) -> Work:
    if phase == "optimizer":
        return Work.OPTIMIZER
    if phase == "backward" and host.is_repeated(thread, instant):
        return Work.RECOMPUTE
    if is_product or host.is_in_product(thread, instant):
        return Work.MATMUL
    return Work.OTHER_COMPUTE


def _operators(timeline: Timeline, host: Host) -> Placement:
    """Operators of a CPU. They nest: the sweep charges an instant to a product before what surrounds it."""
    spans = timeline.dispatched
    placed = Placement(start_us=array("d", spans.start_us), end_us=array("d", spans.end_us), work=array("b"))
    for start_us, thread in zip(spans.start_us, spans.thread, strict=True):
        phase = host.phase(thread, start_us)
        placed.phase.append(phase)
        placed.work.append(_purpose(host, phase, thread, start_us, False))
    placed.launch_us, placed.thread = array("d", spans.start_us), array("l", spans.thread)
    _add_fetches(placed, host.fetches)
    return placed


def _add_fetches(placed: Placement, fetches: Cover) -> None:
    for start_us, end_us in zip(fetches.starts, fetches.ends, strict=True):
        placed.start_us.append(start_us)
        placed.end_us.append(end_us)
        placed.work.append(Work.DATA)
        placed.phase.append("other")
        placed.launch_us.append(math.nan)
        placed.thread.append(-1)
