"""Numbers of the device without waiting for them: copied at once, read when the device has caught up.

A loss is never kept itself (it would keep the autograd graph alive), and a bare `detach()` would show what a later
`loss /= 4` made of it. So its value is copied into a slot of our own, and read when an event says that it is there.
Lengths of sequences and sums by dataset are tensors of our own making: they are copied whole, with one event for all
of a step's.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Mapping
from time import monotonic, sleep
from typing import Any, cast
from weakref import WeakValueDictionary

import torch

from flopmeter.torch_compat import DisableTorchFunction

logger = logging.getLogger("flopmeter")

NUM_SLOTS = 256
POLL_S = 1e-3
"""From one question to the next, where somebody waits."""


class LateNumbers:
    """Slots for numbers that are still on their way from the device.

    A number on the host (a float, a tensor on the CPU) is there already and needs no slot. On CUDA the slots are pinned
    memory, filled by an asynchronous copy; elsewhere they are on the device. A number for which there is no free slot,
    or that would be captured into a CUDA graph, is NaN: unknown, and no wait.
    """

    def __init__(self) -> None:
        self._slots: dict[torch.device, _Slots] = {}
        self._has_told = False

    def take(self, value: Any) -> float | LateNumber:
        """Copy whatever `float` takes, or one element in a tensor on any device, without waiting for it.

        Raises:
            Exception: It is no number: several elements, a complex one, a text; whatever its own class raises.
        """
        if not isinstance(value, torch.Tensor):
            item = getattr(value, "item", None)  # numpy has other arrays of one element than those without a dimension
            return float(item() if callable(item) else value)
        with DisableTorchFunction():  # the user's function modes and tensor classes are not for us
            return self._take(value)

    def _take(self, value: torch.Tensor) -> float | LateNumber:
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"a tensor of {value.dtype} with the shape {tuple(value.shape)} is not one number")
        if type(value) is not torch.Tensor and hasattr(value, "placements"):
            local = self._local(value)
            if local is None:
                return math.nan
            value = local
        if value.is_cpu:
            return float(value.item())  # nothing to wait for
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return math.nan
        slots = self._slots.get(value.device)
        if slots is None:
            slots = self._slots[value.device] = _Slots(value.device, NUM_SLOTS)
        return slots.put(value)

    def _local(self, value: Any) -> torch.Tensor | None:
        """What this rank holds of a DTensor, as FSDP2's gradient norm is one; None where others hold a part of it."""
        if all(placement.is_replicate() for placement in value.placements):
            return cast(torch.Tensor, value.detach().to_local())
        if not self._has_told:  # to add the parts up is a collective, which all ranks would have to take part in
            self._has_told = True
            logger.warning("a number that is spread over the ranks is unknown here: log its full_tensor() instead")
        return None


class LateNumber:
    """A number in a slot. `read` gives the slot back, and so does `give_back` instead."""

    __slots__ = ("_event", "_free", "_is_lost", "_number", "_slot")

    def __init__(self, slot: torch.Tensor, event: Any, free: list[tuple[torch.Tensor, Any]]) -> None:
        self._slot = slot
        self._event = event
        self._free = free
        self._is_lost = False
        self._number: float | None = None

    def is_ready(self) -> bool:
        """Whether `read` can answer without waiting. Call it on the training thread only."""
        if self._event is None:
            return True
        try:
            # Asking for an event while a graph is captured would spoil it.
            return not torch.cuda.is_current_stream_capturing() and bool(self._event.query())
        except RuntimeError:  # the user's own error on the device: their next call shall report it, not ours
            self._event, self._is_lost = None, True
            return True

    def read(self) -> float:
        """The number; NaN when the device failed before it came. Only for one that is ready."""
        if self._is_lost:
            return math.nan
        if self._number is None:
            self._number = cast(float, self._slot.tolist())  # unlike `item`, it does not let go of the interpreter
            self.give_back()
        return self._number

    def give_back(self) -> None:
        """The slot may hold another number."""
        self._free.append((self._slot, self._event))


class HostCopies:
    """Copies of tensors on their way to the host. For the training thread.

    On CUDA they go into pinned memory. Elsewhere the tensor itself is its copy, to be read later.
    """

    def __init__(self) -> None:
        self.arrival: Arrival | None = None
        """When the copies of the running step are there; None when there are none. Whoever takes it puts None."""
        self.used: deque[Any] = deque()
        """What holds copies that were read elsewhere. It dies here: to free pinned memory is a call to the device."""
        self._free: dict[torch.device, list[Any]] = {}

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy, which says nothing before `arrival` is ready."""
        host = to_host(tensor)
        if host is not tensor:
            while len(self.used) > 1:  # whoever handed the last one over may still hold it
                self.used.popleft()
            if self.arrival is None:
                self.arrival = Arrival(self._free)
            self.arrival.mark(tensor.device)
        return host


class Arrival:
    """When copies are on the host: one event for each device, used again once it was passed.

    Args:
        free: Events by device that nobody waits for.
    """

    __slots__ = ("_events", "_free", "is_lost")

    def __init__(self, free: dict[torch.device, list[Any]]) -> None:
        self.is_lost = False
        """Whether the device failed before they came."""
        self._events: dict[torch.device, Any] = {}
        self._free = free

    def mark(self, device: torch.device) -> None:
        """A copy was queued on this device; its event moves behind it."""
        event = self._events.get(device)
        if event is None:
            free = self._free.setdefault(device, [])
            event = self._events[device] = free.pop() if free else _event(is_cuda=True)
        event.record(torch.cuda.current_stream(device))

    def is_ready(self) -> bool:
        """Whether all copies are there, or lost. Call it on the training thread only."""
        try:
            # Asking for an event while a graph is captured would spoil it.
            if torch.cuda.is_current_stream_capturing() or not all(event.query() for event in self._events.values()):
                return False
        except RuntimeError:  # the user's own error on the device: their next call shall report it, not ours
            self.is_lost = True
            return True
        for device, event in self._events.items():
            self._free[device].append(event)
        self._events = {}
        return True

    def comes_within(self, seconds: float) -> bool:
        """Whether the copies are there, which is asked again and again for so long: the device is not synchronised."""
        deadline_s = monotonic() + seconds
        while not (is_ready := self.is_ready()) and monotonic() < deadline_s:
            sleep(POLL_S)
        return is_ready and not self.is_lost


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on its way to the host, without waiting for it."""
    if tensor.device.type != "cuda":
        return tensor
    # The device is named, because the loop may have set another one as its default.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy = host.copy_(tensor, non_blocking=True)
    _outlive_forks([copy])
    return copy


def is_ready(values: Mapping[str, Any]) -> bool:
    """Whether all of these can be read."""
    return all(type(value) is not LateNumber or value.is_ready() for value in values.values())


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same as plain numbers."""
    return {name: value.read() if type(value) is LateNumber else value for name, value in values.items()}


def without_late(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with what is still on its way unknown for good."""
    return {
        name: math.nan if type(value) is LateNumber and not value.is_ready() else value
        for name, value in values.items()
    }


def give_back(values: Mapping[str, Any]) -> None:
    """These are not read any more: let their slots hold other numbers. A copy under way lies before those in queue."""
    for value in values.values():
        if type(value) is LateNumber:
            value.give_back()


class _Slots:
    def __init__(self, device: torch.device, num_slots: int) -> None:
        is_cuda = device.type == "cuda"
        home = torch.device("cpu") if is_cuda else device
        with torch.inference_mode(False):  # what is made in an evaluation could be written nowhere else
            memory = torch.zeros(num_slots, dtype=torch.float32, device=home, pin_memory=is_cuda)
            slots = memory.unbind()
        if is_cuda:
            _outlive_forks(slots)
        self._free: list[tuple[torch.Tensor, Any]] = [(slot, _event(is_cuda)) for slot in slots]
        self._device = device

    def put(self, value: torch.Tensor) -> float | LateNumber:
        if not self._free:
            return math.nan
        slot, event = self._free.pop()
        slot.copy_(value.detach().reshape(()), non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))
        return LateNumber(slot, event, self._free)


_pinned: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
_inherited: list[torch.Tensor] = []


def _outlive_forks(tensors: Iterable[torch.Tensor]) -> None:
    """To free pinned memory asks the device, and a forked child (a worker of a DataLoader) that does so is aborted."""
    _pinned.update((id(tensor), tensor) for tensor in tensors)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _inherited.extend(_pinned.values()))


def _event(is_cuda: bool) -> Any:
    return torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
