"""Loss and gradient norm without waiting for them: copied at once, read when the device has caught up.

The tensor itself is never kept (it would keep the autograd graph alive), and a bare `detach()` would show what a later
`loss /= 4` made of it. So its value is copied into a slot of our own, and read when an event says that it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class LateValue(Protocol):
    """A number that will be there."""

    def is_ready(self) -> bool:
        """Whether `read` can answer without waiting."""
        ...

    def read(self) -> float:
        """The number."""
        ...


class KnownValue:
    """A number that the host already has."""

    def __init__(self, value: float) -> None:
        self._value = value

    def is_ready(self) -> bool:
        return True

    def read(self) -> float:
        return self._value


class CopiedValue:
    """A copy of a tensor's value, on its way to the host."""

    def __init__(self, slot: torch.Tensor, is_done: Callable[[], bool]) -> None:
        self._slot = slot
        self._is_done = is_done

    def is_ready(self) -> bool:
        return self._is_done()

    def read(self) -> float:
        return float(self._slot)


def take(value: Any) -> LateValue:
    """Copy a number, whether it is a float or a tensor of one element on any device, without waiting for it."""
    if not isinstance(value, torch.Tensor):
        return KnownValue(float(value))
    detached = value.detach()
    if detached.device.type == "cuda":
        slot = torch.empty((), dtype=detached.dtype, pin_memory=True)
        slot.copy_(detached, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(detached.device))
        return CopiedValue(slot, event.query)
    return CopiedValue(detached.clone(), lambda: True)
