"""Which figures of a run are compared with another's, what counts as better, and in what do their settings differ?"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

from msgspec import Struct

from flopmeter.columns import finite, mapping
from flopmeter.compare.noise import Ratio
from flopmeter.goodput import goodput
from flopmeter.metrics import flop_per_s, parts, summarise
from flopmeter.record import Run
from flopmeter.schema import PHASES
from flopmeter.text import rate

Unit = Literal["share", "s", "1/s", "FLOP"]


class Quantity(Struct, frozen=True, kw_only=True):
    """One figure of a run."""

    name: str
    """As `--fail-if` writes it."""
    label: str
    """As people read it."""
    unit: Unit
    """A share is compared by difference where it is a part of the time (`is_part`), all else by ratio."""
    better: Literal["more", "less", None] = None
    """Which direction is a gain; None where it depends."""
    is_part: bool = False
    """Whether it is a part of the step time: its change is given in points."""


_GOES_LOST = ("data_wait", "host_to_device", "exposed_communication", "overhead")


def _part(name: str) -> Quantity:
    better: Literal["less", None] = "less" if name in _GOES_LOST else None
    label = name.replace("_", " ").capitalize()
    return Quantity(name=f"{name}_share", label=label, unit="share", better=better, is_part=True)


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(name="mfu", label="MFU", unit="share", better="more"),
    Quantity(name="hfu", label="HFU", unit="share", better="more"),
    Quantity(name="step_time", label="Step time, mean", unit="s", better="less"),
    Quantity(name="step_time_median", label="Step time, median", unit="s", better="less"),
    Quantity(name="step_time_p95", label="Step time, p95", unit="s", better="less"),
    Quantity(name="steps_per_second", label="Steps per second", unit="1/s", better="more"),
    Quantity(name="tokens_per_second", label="Tokens per second", unit="1/s", better="more"),
    Quantity(name="samples_per_second", label="Samples per second", unit="1/s", better="more"),
    Quantity(name="goodput", label="Goodput", unit="share", better="more", is_part=True),
    Quantity(name="model_flop", label="FLOPs per step", unit="FLOP"),
    *map(_part, (*PHASES, "exposed_communication", "overhead")),
)
LARGEST = 1e60
"""Beyond it a figure is damage, and so is one that is not a number: its squares would overflow."""
NAMES = tuple(quantity.name for quantity in QUANTITIES)

_OF_STEPS = {"mfu", "hfu", "tokens_per_second", "samples_per_second", "model_flop"} | {
    q.name for q in QUANTITIES if q.is_part
}
_OF_STEPS -= {"goodput", "overhead_share"}
"""Figures that every step has its own value of: the run's is their mean."""


def figures_of(run: Run, ratios: Mapping[str, Ratio]) -> dict[str, float | None]:
    """Every quantity of a run, from its steady steps; None where it is unknown."""
    summary = summarise(run.columns, run.steady_stretches())
    figures: dict[str, float | None] = {name: summary.get(f"perf/{name}") for name in NAMES}
    figures |= {name: ratio.value() for name, ratio in ratios.items()}
    figures |= {f"step_time_{which}": summary.get(f"step_time_{which}_s") for which in ("median", "p95")}
    figures["goodput"] = goodput(run).share
    return {name: value if value is not None and abs(value) < LARGEST else None for name, value in figures.items()}


def ratios_of(run: Run) -> Mapping[str, Ratio]:
    """The figures whose noise the steps can tell, as sums over steps."""
    columns, steady = {"perf/step_time": run.column("perf/step_time"), **run.columns}, run.steady_stretches()
    names = (*(_OF_STEPS & {key.removeprefix("perf/") for key in run.columns}), "step_time")
    ratios = {name: Ratio(*map(list, parts(columns, f"perf/{name}", steady, LARGEST))) for name in names}
    ratios["steps_per_second"] = Ratio(ratios["step_time"].below, ratios["step_time"].above)
    return ratios


# Settings

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
