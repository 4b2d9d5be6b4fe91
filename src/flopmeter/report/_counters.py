"""What did the device's own counters say beside the counted FLOPs? Their means over the run, where there were any."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from flopmeter.record import Run
from flopmeter.text import amount, clean, number, percent

_SHARES = {
    "tensor_active": "tensor pipes busy",
    "sm_active": "multiprocessors busy",
    "dram_active": "memory busy",
}


def counters_of(run: Run) -> dict[str, Any] | None:
    """Mean shares, or the rate of FLOPs of a CPU, which counts since the start; None where no counter was read."""
    events = run.named("counters")
    if not events:
        return None
    shares = {name: [value for event in events if (value := number(event.get(name))) is not None] for name in _SHARES}
    return {
        "reader": clean(events[-1].get("reader") or "", 40),
        "num_readings": len(events),
        **{name: fmean(values) if values else None for name, values in shares.items()},
        "flop_per_s": _flop_per_s(events),
        "note": clean(events[-1].get("note") or "", 200),
    }


def counters_text(counters: dict[str, Any], hfu: float | None) -> str:
    """One line for the report; utilisation stands beside HFU and is not turned into it."""
    told = [f"{words} {percent(counters[name])}" for name, words in _SHARES.items() if counters[name] is not None]
    if counters["flop_per_s"] is not None:
        told.append(f"{amount(counters['flop_per_s'], 'FLOP/s')} executed, element-wise work included")
    if not told:
        return f"{counters['reader']}: no values ({counters['note'] or 'the source gave none'})"
    return f"{counters['reader']}: {', '.join(told)}; HFU by counting {percent(hfu)}"


def _flop_per_s(events: list[dict[str, Any]]) -> float | None:
    """From the first reading to the last one."""
    known = [
        (time_s, flop)
        for event in events
        if (time_s := number(event.get("time"))) is not None and (flop := number(event.get("flop"))) is not None
    ]
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return None
    return (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])
