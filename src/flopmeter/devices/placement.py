"""On which devices does a model compute? Not always where its parameters lie: some are brought there for each pass.

Left out: layers that other libraries bring to a device one by one (Accelerate's `cpu_offload`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_HOLDING = ("cpu", "meta")
"""Kinds of devices that parameters may wait on while others compute."""


def devices_of(model: nn.Module | None) -> tuple[torch.device, ...]:
    """The accelerators that a model computes on, in the order of its parameters; else the CPU. Starts none of them."""
    torch: Any = sys.modules["torch"]
    if model is None:
        return (torch.device("cpu"),)
    if isinstance(model, torch.nn.DataParallel) and hasattr(model, "src_device_obj"):
        return tuple(torch.device(model.src_device_obj.type, index) for index in model.device_ids)
    held = list(dict.fromkeys(parameter.device for parameter in model.parameters()))
    accelerators = tuple(device for device in held if device.type not in _HOLDING)
    if accelerators or not held:
        return accelerators or (torch.device("cpu"),)
    brought_to = _brought_to(torch, model)
    return (brought_to,) if brought_to is not None else (held[0],)


def _brought_to(torch: Any, model: nn.Module) -> torch.device | None:
    """Where FSDP takes the parameters that it keeps on the host."""
    for module in model.modules():
        compute_device = getattr(module, "compute_device", None)  # FSDP1
        if isinstance(compute_device, torch.device) and compute_device.type not in _HOLDING:
            return compute_device
    mesh = getattr(next(model.parameters()), "device_mesh", None)  # FSDP2
    if mesh is None or mesh.device_type in _HOLDING:
        return None
    return torch.device(mesh.device_type, getattr(torch, mesh.device_type).current_device())  # type: ignore[no-any-return]
