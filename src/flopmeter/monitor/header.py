"""What does a run say of itself when it starts, and in one line when it is over?"""

from __future__ import annotations

import platform
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from flopmeter import __version__
from flopmeter.config import MonitorConfig
from flopmeter.devices import devices_of
from flopmeter.metrics import ROW_NAMES, certainty
from flopmeter.record.reader import LOOP
from flopmeter.resources import ResourceSampler
from flopmeter.schema import SCHEMA_VERSION
from flopmeter.text import plural, seconds, utilisation
from flopmeter.torch_compat import off_here

WRAPPED = ("module", "_orig_mod")
"""What a wrapper (DDP, DataParallel, torch.compile) calls the model in it."""
AVERAGED = re.compile(r"(^|_)ema(_|$)|Ema|EMA|AveragedModel")
"""Names of averaged copies of a model, which are not trained."""


def make_header(
    model: nn.Module | None, config: MonitorConfig, peaks: Mapping[str, Any], named: Sequence[nn.Module] = ()
) -> dict[str, Any]:
    """The run file's first line.

    Args:
        model: What the loop calls, the first of several.
        named: What is trained, if that is not `model` alone.
        peaks: By dtype, as far as they are known; later ones come as events.
    """
    settings = config.monitoring
    name, num_parameters, num_trainable = described(named or ([] if model is None else [model]))
    return {
        "kind": "header",
        "schema": SCHEMA_VERSION,
        "run_id": uuid.uuid4().hex[:12],
        "started_at": time.time(),
        "host": socket.gethostname(),
        "world_size": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        "model": name,
        "num_parameters": num_parameters,
        "num_trainable": num_trainable,
        "device": device_name(device_of(model)),
        "peak": peaks,
        "mode": settings.mfu_calculation_mode,
        "convention": settings.convention,
        "off": off_here(),
        "rows": ROW_NAMES,
        "loop": LOOP,
        "price_per_device_hour": settings.price_per_device_hour,
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
    with suppress(ImportError):  # on this thread: Python forgets a Ctrl-C when a module is loaded beside its end
        import_module("psutil")
    device = device_of(model)
    # Asked for here: properties of a device start it, which is the training thread's business.
    total = {each: total_bytes for each in devices_of(model) if (total_bytes := _total_bytes(each))}
    return ResourceSampler(str(device), device_uuid(device), memory=lambda: _held_bytes(total))


def _total_bytes(device: torch.device) -> int | None:
    backend: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not getattr(backend, "is_initialized", lambda: False)():
        return None
    return getattr(backend.get_device_properties(device), "total_memory", None)


def _held_bytes(total: Mapping[torch.device, int]) -> dict[str, float]:
    """What torch's allocator holds on each device, the first one's without its name: counters of its own."""
    found: dict[str, float] = {}
    for place, (device, total_bytes) in enumerate(total.items()):
        stats = getattr(torch, device.type).memory_stats(device)
        name = f"/{device}" if place else ""
        for key, counter in (("allocated", "allocated_bytes.all.current"), ("reserved", "reserved_bytes.all.current"),
                             ("peak", "allocated_bytes.all.peak")):  # fmt: skip
            if counter in stats:
                found[f"resource/memory_{key}_bytes{name}"] = float(stats[counter])
        found[f"resource/memory_total_bytes{name}"] = float(total_bytes)
    return found


def described(models: Sequence[nn.Module]) -> tuple[str, int, int]:
    """Name, parameters and trainable parameters of what the user trains: without wrappers and averaged copies of it.

    Of the parameters that exist: a lazy module makes its own in the first forward pass.
    """
    names: dict[str, None] = {}
    found: dict[int, nn.Parameter] = {}
    for model in models:
        while len(inner := list(model.named_children())) == 1 and inner[0][0] in WRAPPED and not model._parameters:
            model = inner[0][1]
        kind = type(model)
        names[kind.__bases__[-1].__name__ if kind.__bases__[0].__name__ == "FSDPModule" else kind.__name__] = None
        copies = [
            part
            for path, part in model.named_modules()
            if (AVERAGED.search(path.rpartition(".")[2]) or AVERAGED.search(type(part).__name__))
            and not any(parameter.requires_grad for parameter in part.parameters())
        ]
        left_out = {id(parameter) for part in copies for parameter in part.parameters()}
        found |= {id(parameter): parameter for parameter in model.parameters() if id(parameter) not in left_out}
    # Under DeepSpeed's ZeRO 3 a parameter is empty between its uses, and says by another name how large it is.
    counts = [(0 if is_lazy(p) else getattr(p, "ds_numel", None) or p.numel(), p.requires_grad) for p in found.values()]
    total = sum(count for count, _ in counts)
    return " + ".join(names), total, sum(count for count, is_trainable in counts if is_trainable)


def last_words(
    summary: Mapping[str, float], num_steps: int, place: str, *, num_before: int = 0, why_unknown: str = ""
) -> str:
    """MFU, step time, how many steps they are of, and where to read more.

    Args:
        summary: Of the steady steps; nothing when there were too few.
        num_steps: Steps that the record has.
        num_before: Steps that the loop did before: those in which it was being understood.
        why_unknown: Why there is no MFU, where that is not for want of steps.
    """
    mfu, step_s = summary.get("perf/mfu"), summary.get("step_time_median_s")
    reason = why_unknown or ("too few steps" if step_s is None else "")
    found = (
        f"MFU {utilisation(mfu)}, {certainty(summary)}"
        if mfu is not None
        else "MFU unknown" + (f" ({reason})" if reason else "")
    )
    if step_s is not None:
        found += f", {seconds(step_s)} per step (median)"
    steps = plural(num_steps + num_before, "step")
    return f"{found}, {f'{num_steps:,} of {steps} measured' if num_before else steps}; {place}"
