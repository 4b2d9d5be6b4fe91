"""Which calls to CUDA does the timeline need? These five, on a pool of events for one device.

    timeline = timeline_of(next(model.parameters()).device)

Nothing here runs before `torch.cuda.is_initialized()`: a context of ours would take memory on GPU 0 and break a later
fork. On a build without CUDA most of these names raise when called, so they are looked up only when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from flopmeter.timing.events import DeviceTimeline
from flopmeter.timing.sharded import ShardedWaits

NUM_EVENTS = 512
"""Per device: 64 micro-batches that the host may be ahead. Torch creates each one at its first record."""
NUM_WAIT_EVENTS = 1024
"""For the waits of one step of FSDP2: 128 layers, gathered twice, and some more."""


class CudaApi(Protocol):
    """What is used of `torch.cuda`; tests pass a stub that knows the rules."""

    def is_initialized(self) -> bool: ...

    def is_current_stream_capturing(self) -> bool: ...

    def current_stream(self, device: int) -> Any: ...

    def Event(self, enable_timing: bool) -> Any: ...  # noqa: N802 - torch's name


class CudaEvents:
    """Timing events of one device, recorded on the stream that is current there.

    Args:
        device: Index of the model's device, which need not be the current one: an event belongs to the device of its
            first record, and another device's stream raises.
    """

    def __init__(self, device: int, *, num_events: int = NUM_EVENTS, cuda: CudaApi | None = None) -> None:
        self.num_events = num_events
        self._device = device
        self._cuda: CudaApi = cuda if cuda is not None else torch.cuda
        self._events: list[Any] = []

    def initialized(self) -> bool:
        return self._cuda.is_initialized()

    def capturing(self) -> bool:
        # `torch.cuda.graph` makes its stream and device the current ones, so this sees captures on any device.
        return self._cuda.is_current_stream_capturing()

    def record(self, slot: int) -> None:
        if not self._events:
            self._events = [self._cuda.Event(enable_timing=True) for _ in range(self.num_events)]
        self._events[slot].record(self._cuda.current_stream(self._device))

    def query(self, slot: int) -> bool:
        return bool(self._events[slot].query())

    def elapsed_ms(self, first: int, second: int) -> float:
        return float(self._events[first].elapsed_time(self._events[second]))


def waits_of(device: torch.device, phase: Callable[[], int]) -> ShardedWaits | None:
    """What tells how long the device waits for FSDP2; None where there are no events."""
    if device.type != "cuda" or device.index is None:
        return None
    return ShardedWaits(CudaEvents(device.index, num_events=NUM_WAIT_EVENTS), phase)


def timeline_of(device: torch.device) -> DeviceTimeline | None:
    """A timeline with its own pool of events; None where there are none, and the host's times are the truth."""
    if device.type != "cuda" or device.index is None:
        return None
    return DeviceTimeline(CudaEvents(device.index))
