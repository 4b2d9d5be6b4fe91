"""What does this very card reach, at which clock, and what holds it back?

Data sheets are reached by nothing: the best matmuls get to half or four fifths of them. What `flopmeter peak --measure`
finds is kept in the user's cache, by machine, device and dtype, with the clock and the power cap at which it was found;
a run on the same device finds it there. No torch is imported here.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from flopmeter.columns import known, mapping
from flopmeter.devices import cpu

Shape = tuple[int, int, int]
"""Rows, columns and inner length of one product: 2 x m x n x k FLOP."""

THROTTLING = {
    0x4: "the power cap",
    0x8: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat, in hardware",
    0x80: "the power brake",
}
"""Bits of NVML's clock event reasons that keep a busy GPU below its clock; others are settings, or rest."""
MAX_SHAPES = 64
"""Of one device and dtype, the latest."""
MIN_COVERED = 0.5
"""Share of a run's own products that must have been measured before the roof is called that of its shapes."""


def throttling(reasons: float) -> list[str]:
    """What held the clock down, in words, from NVML's bits."""
    return [name for bit, name in THROTTLING.items() if int(reasons) & bit]


def condition(uuid: str | None) -> dict[str, Any]:
    """Clock, power cap and what holds the clock down, as the driver tells them now; empty without NVML."""
    if uuid is None:
        return {}
    found: dict[str, Any] = {}
    with suppress(Exception):  # no library, no driver, or a board that does not tell
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        try:
            board = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            found.update((name, ask()) for name, ask in gpu_probes(nvml, board).items())
        finally:
            nvml.nvmlShutdown()
    return found


def gpu_probes(nvml: Any, board: Any) -> dict[str, Callable[[], float]]:
    """What the driver tells of clock and power cap; each may raise."""
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    return {
        "clock_hz": lambda: float(nvml.nvmlDeviceGetClockInfo(board, nvml.NVML_CLOCK_SM) * 1e6),
        "power_limit_w": lambda: float(nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3),
        "throttle_reasons": lambda: float(reasons(board)),
    }


def _file() -> Path:
    return cpu.cache_folder() / "roofs.json"


def _key(device: str, uuid: str | None, dtype: str) -> str:
    if device.startswith("cpu"):
        return f"{socket.gethostname()} | {cpu.key(dtype, cpu.read_cpu())}"
    return f"{socket.gethostname()} | {device} | {uuid or ''} | {dtype}"


def _kept() -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        return dict(mapping(json.loads(_file().read_text())))
    return {}


def keep_roof(
    device: str, uuid: str | None, dtype: str, rates: Mapping[Shape, float], state: Mapping[str, Any]
) -> None:
    """Keep what a sweep found: the best rate of each shape. A cache that cannot be written is no error."""
    file, kept, key = _file(), _kept(), _key(device, uuid, dtype)
    before = mapping(mapping(kept.get(key)).get("shapes"))
    found = {"x".join(map(str, shape)): rate for shape, rate in rates.items()}
    best = {name: max(rate, *known([before.get(name)], 1e24), 0.0) for name, rate in found.items()}
    shapes = {**{name: rate for name, rate in before.items() if name not in best}, **best}
    kept[key] = {**state, "shapes": dict(list(shapes.items())[-MAX_SHAPES:])}
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(kept, indent=1))
        draft.replace(file)


def roof_of(
    device: str, uuid: str | None, dtype: str, products: Mapping[Shape, float] | None = None
) -> dict[str, Any] | None:
    """What was measured on this device: FLOP/s at a program's own products where most of them were, else the best.

    Args:
        products: Calls of each shape.
    """
    entry = mapping(_kept().get(_key(device, uuid, dtype)))
    rates = {name: rate for name, rate in mapping(entry.get("shapes")).items() if known([rate], 1e24) and rate > 0}
    if not rates:
        return None
    state = {name: value for name, value in entry.items() if name != "shapes"}
    flop = {"x".join(map(str, shape)): 2.0 * shape[0] * shape[1] * shape[2] * calls
            for shape, calls in (products or {}).items()}  # fmt: skip
    measured = {name: amount for name, amount in flop.items() if name in rates}
    covered = sum(measured.values()) / (sum(flop.values()) or 1.0)
    if covered >= MIN_COVERED:
        seconds = sum(amount / rates[name] for name, amount in measured.items())
        return {**state, "flop_per_s": sum(measured.values()) / seconds, "own_shapes": covered}
    return {**state, "flop_per_s": max(rates.values()), "own_shapes": 0.0}
