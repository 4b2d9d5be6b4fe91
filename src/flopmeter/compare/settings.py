"""In what do the runs differ before the first step: model, machine, versions, settings?"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from flopmeter.columns import mapping
from flopmeter.record import Run
from flopmeter.text import rate

_OF_HEADER = ("model", "num_parameters", "device", "world_size", "host", "mode", "convention")
_OF_FACTS = ("optimizer", "is_compiled", "tf32", "num_parameter_tensors", "num_ops")
MAX_TEXT = 120


def settings_of(run: Run) -> dict[str, str]:
    """What the run says of itself, as text by name."""
    header = run.header
    settings: dict[str, Any] = {_name(name): getattr(header, name) for name in _OF_HEADER}
    settings |= {f"{library} version": version for library, version in header.versions.items()}
    settings |= _peaks(run)
    settings |= _amounts(run)
    count, facts = run.last("count"), run.last("facts")
    settings |= {"FLOPs by": count.get("method")}
    settings |= {_name(name): facts.get(name) for name in _OF_FACTS}
    settings |= {"matmul dtypes": ", ".join(sorted(mapping(facts.get("matmul_dtypes"))))}
    return {name: _text(value) for name, value in settings.items() if value is not None and value != ""}


def _name(key: str) -> str:
    return key.removeprefix("num_").removeprefix("is_").replace("_", " ")


def peaks_of(run: Run) -> dict[str, float]:
    """FLOP/s by dtype that the run's MFU is held against."""
    peaks: dict[str, Any] = {dtype: peak.get("flop_per_s") for dtype, peak in run.peaks.items()}
    return {dtype: float(value) for dtype, value in peaks.items() if _is_number(value)}


def _peaks(run: Run) -> dict[str, str]:
    return {f"peak {dtype}": rate(value) for dtype, value in peaks_of(run).items()}


def _amounts(run: Run) -> dict[str, str]:
    """Tokens and samples of a typical step: what people call the batch size."""
    amounts = {}
    step_s, steady = run.column("perf/step_time"), run.steady()
    for what in ("tokens", "samples"):
        rate = run.column(f"perf/{what}_per_second")
        known = [rate[i] * step_s[i] for i in steady if math.isfinite(rate[i] * step_s[i])]
        if known:
            amounts[f"{what} in a step"] = f"{median(known):,.0f}"
    return amounts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _text(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
