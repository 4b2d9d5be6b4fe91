"""In what do the runs differ before the first step: model, machine, versions, settings?"""

from __future__ import annotations

from statistics import median
from typing import Any

from flopmeter.columns import finite, mapping
from flopmeter.metrics import flop_per_s
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
    settings |= {f"peak {dtype}": rate(value) for dtype, value in flop_per_s(run.peaks).items()}
    settings |= _amounts(run)
    count, facts = run.last("count"), run.last("facts")
    settings |= {"FLOPs by": count.get("method")}
    settings |= {_name(name): facts.get(name) for name in _OF_FACTS}
    settings |= {"matmul dtypes": ", ".join(sorted(mapping(facts.get("matmul_dtypes"))))}
    return {name: _text(value) for name, value in settings.items() if value is not None and value != ""}


def _name(key: str) -> str:
    return key.removeprefix("num_").removeprefix("is_").replace("_", " ")


def _amounts(run: Run) -> dict[str, str]:
    """Tokens and samples of a typical step: what people call the batch size."""
    amounts = {}
    for what in ("tokens", "samples"):
        known = finite([run.amount(what)[place] for place in run.steady()])
        if known:
            amounts[f"{what} in a step"] = f"{median(known):,.0f}"
    return amounts


def _text(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
