"""Which hardware counters can be read here, and do they see work?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopmeter.doctor._result import Result
from flopmeter.text import amount, percent

if TYPE_CHECKING:
    from flopmeter.counters import CounterReader

ORDER = 80
LIMIT_S = 15.0
NEEDS_TORCH = True

SIZE, REPEATS = 1024, 8
WATCH_S = 1.5
"""NVML and DCGM tell of the last moments: keep the device busy for that long."""


def check() -> Result:
    from flopmeter.counters import Unavailable, open_counters
    from flopmeter.doctor._trial import device_at_hand
    from flopmeter.monitor.header import device_uuid

    device = device_at_hand()
    reader = open_counters(str(device), uuid=device_uuid(device))
    if isinstance(reader, Unavailable):
        return Result(standing="falls back", says=f"{reader}; the mode hybrid uses the profiler instead")
    try:
        return _read(reader, device)
    finally:
        reader.close()


def _read(reader: CounterReader, device: object) -> Result:
    from dataclasses import asdict

    multiply(device, for_s=0.0)
    reader.start()
    flop = multiply(device, for_s=0.0 if str(device) == "cpu" else WATCH_S)
    reading = reader.read()
    values = {key: value for key, value in asdict(reading).items() if isinstance(value, float)}
    if not values:
        says = f"{reader.name} opens but gives nothing ({reading.note}); the mode hybrid uses the profiler instead"
        return Result(standing="falls back", says=says)
    if reading.flop is not None:
        says = f"{reader.name} saw {percent(reading.flop / flop, 0)} of the {amount(flop, 'FLOP')} of a matmul"
    else:
        shares = ", ".join(f"{key} {percent(value, 0)}" for key, value in values.items() if key.endswith("active"))
        says = f"{reader.name} under matmuls: {shares}"
    return Result(standing="works", says=says, figures=values)


def multiply(device: object, for_s: float) -> float:
    """Square products for a while, at least a few; gives their FLOP."""
    from time import perf_counter

    import torch

    square = torch.ones(SIZE, SIZE, device=str(device))
    end_s, flop = perf_counter() + for_s, 0.0
    while flop == 0.0 or perf_counter() < end_s:
        for _ in range(REPEATS):
            square = torch.mm(square, square) * 0
        flop += REPEATS * 2.0 * SIZE**3
        if square.device.type != "cpu":
            torch.accelerator.synchronize(square.device)
    return flop
