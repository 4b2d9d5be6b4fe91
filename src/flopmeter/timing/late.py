"""Loss and gradient norm without waiting for them: copied at once, read when the device has caught up.

The tensor itself is never kept (it would keep the autograd graph alive), and a bare `detach()` would show what a later
`loss /= 4` made of it. So its value is copied into a slot of our own, and read when an event says that it is there.
"""

from __future__ import annotations

from typing import Any

import torch

NUM_SLOTS = 256


class LateNumbers:
    """A ring of slots for numbers that are still on their way from the device.

    A number on the host (a float, a tensor on the CPU) is there already and needs no slot. On CUDA the slots are pinned
    memory, filled by an asynchronous copy; elsewhere they are on the device.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self._num_slots = num_slots
        self._rings: dict[torch.device, _Ring] = {}

    def take(self, value: Any) -> float | LateNumber:
        """Copy a number, whether it is a float or a tensor of one element on any device, without waiting for it."""
        if not isinstance(value, torch.Tensor):
            return float(value)
        if value.device.type == "cpu":
            return value.item()  # nothing to wait for
        ring = self._rings.get(value.device)
        if ring is None:
            ring = self._rings[value.device] = _Ring(value.device, self._num_slots)
        return ring.put(value)


class LateNumber:
    """A number in a slot."""

    __slots__ = ("_event", "_slot")

    def __init__(self, slot: torch.Tensor, event: Any) -> None:
        self._slot = slot
        self._event = event

    def is_ready(self) -> bool:
        """Whether `read` can answer without waiting. Call it on the training thread only."""
        return self._event is None or bool(self._event.query())

    def read(self) -> float:
        """The number."""
        return self._slot.item()


class _Ring:
    def __init__(self, device: torch.device, num_slots: int) -> None:
        is_cuda = device.type == "cuda"
        home = torch.device("cpu") if is_cuda else device
        memory = torch.zeros(num_slots, dtype=torch.float32, device=home, pin_memory=is_cuda)
        self._slots = list(memory.unbind())
        self._events = [torch.cuda.Event() for _ in range(num_slots)] if is_cuda else [None] * num_slots  # type: ignore[no-untyped-call]
        self._device = device
        self._next = 0

    def put(self, value: torch.Tensor) -> LateNumber:
        index = self._next
        self._next = (index + 1) % len(self._slots)
        slot, event = self._slots[index], self._events[index]
        slot.copy_(value.detach().reshape(()), non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))
        return LateNumber(slot, event)
