"""What does a run say of itself when it starts?"""

from __future__ import annotations

import platform
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flopmeter import __version__
from flopmeter.config import MonitorConfig
from flopmeter.devices.placement import devices_of
from flopmeter.resources import ResourceSampler
from flopmeter.schema import SCHEMA_VERSION
from flopmeter.torch_compat import off_here


def make_header(model: nn.Module | None, config: MonitorConfig, peaks: Mapping[str, Any]) -> dict[str, Any]:
    """The run file's first line.

    Args:
        peaks: By dtype, as far as they are known; later ones come as events.
    """
    settings = config.monitoring
    return {
        "kind": "header",
        "schema": SCHEMA_VERSION,
        "run_id": uuid.uuid4().hex[:12],
        "started_at": time.time(),
        "host": socket.gethostname(),
        "world_size": torch.distributed.get_world_size() if _is_distributed() else 1,
        "model": type(model).__name__ if model is not None else "",
        "num_parameters": _num_parameters(model) if model is not None else 0,
        "device": device_name(device_of(model)),
        "peak": peaks,
        "mode": settings.mfu_calculation_mode,
        "convention": settings.convention,
        "off": off_here(),
        "versions": {"flopmeter": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def device_of(model: nn.Module | None) -> torch.device:
    """Where the model computes; of several devices the first."""
    return devices_of(model)[0]


def device_name(device: torch.device) -> str:
    """As the driver gives it, for devices that have a driver."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def device_uuid(device: torch.device) -> str | None:
    """Names the physical GPU, whatever index it has here; None for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def make_sampler(model: nn.Module | None) -> ResourceSampler:
    """What samples the machine in the background."""
    device = device_of(model)
    return ResourceSampler(str(device), device_uuid(device))


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _num_parameters(model: nn.Module) -> int:
    """Of those that exist: a lazy module makes its own in the first forward pass."""
    return sum(parameter.numel() for parameter in model.parameters() if not is_lazy(parameter))
