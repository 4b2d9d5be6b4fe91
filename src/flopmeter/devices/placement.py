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
    lib: Any = sys.modules["torch"]
    if model is None:
        return (lib.device("cpu"),)
    if isinstance(model, lib.nn.DataParallel) and hasattr(model, "src_device_obj"):
        return tuple(lib.device(model.src_device_obj.type, index) for index in model.device_ids)
    held = list(dict.fromkeys(parameter.device for parameter in model.parameters()))
    accelerators = tuple(device for device in held if device.type not in _HOLDING)
    if accelerators or not held:
        return accelerators or (lib.device("cpu"),)
    brought_to = _brought_to(lib, model)
    return (brought_to,) if brought_to is not None else (held[0],)


def _brought_to(lib: Any, model: nn.Module) -> torch.device | None:
    """Where FSDP takes the parameters that it keeps on the host."""
    named = (getattr(module, "compute_device", None) for module in model.modules())  # FSDP1
    found: torch.device | None = next((d for d in named if isinstance(d, lib.device) and d.type not in _HOLDING), None)
    mesh = getattr(next(model.parameters()), "device_mesh", None)  # FSDP2
    if found is None and mesh is not None and mesh.device_type not in _HOLDING:
        found = lib.device(mesh.device_type, getattr(lib, mesh.device_type).current_device())
    return found
